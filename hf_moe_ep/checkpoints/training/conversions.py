"""Store in a training checkpoint which of transformers' conversions the loaded model needed.

    conversions.json    {"format": 1, "applied": [["", "mlp.experts.*.down_proj.weight"], ..]}

A row has the module that a conversion is for ("" for all modules), and the keys that it matches.
transformers saves a model in the layout of the checkpoint from which it was loaded, so that a model
with stacked experts is saved with stacked experts (`upstream/conversion.py`). The training
checkpoint of such a model has this file, from which `hf-moe-ep convert` learns the layout. Without
the file, the conversions are those of the model's class.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from hf_moe_ep.upstream.conversion import describe_conversions, restore_conversions

CONVERSIONS = "conversions.json"


def describe_load(model: nn.Module) -> dict[str, Any] | None:
    """Return the content of conversions.json; None if the class's conversions are right."""
    applied = describe_conversions(model)
    return None if applied is None else {"format": 1, "applied": applied}


def restore_load(model: nn.Module, path: Path) -> None:
    """Let a model be saved in the layout that conversions.json describes, if there is this file.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        applied = [[str(text) for text in row] for row in content["applied"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); convert an older checkpoint") from error
    restore_conversions(model, applied)
