"""Store in a training checkpoint which of transformers' conversions the loaded model needed.

transformers saves a model in the layout of the checkpoint from which it was loaded, so that a model
with stacked experts is saved with stacked experts (`upstream/conversion.py`). `hf-moe-ep convert`
must use the same layout, so the training checkpoint of such a model has one more file:

    conversions.json    {"format": 1, "transformers": "5.24.0",
                         "applied": [[null, "mlp.experts.*.down_proj.weight"], ..]}

A row has the module that a conversion is for (null for the whole model), and the keys that the
conversion matches. Without the file, the conversions are those of the model's class. Other versions
of transformers may have other conversions. `hf-moe-ep convert` then warns, and uses the conversions
of the model's class.

`save.py` (save_checkpoint) and `integrations/saving.py` (the Trainer, Accelerate) write the file,
and `checkpoints/convert.py` reads it.
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from hf_moe_ep.upstream.conversion import describe_conversions, restore_conversions

CONVERSIONS = "conversions.json"
_logger = logging.getLogger("hf_moe_ep")


def make_conversions(model: nn.Module) -> dict[str, Any] | None:
    """Make the content of conversions.json, or None if the model needs no such file."""
    applied = describe_conversions(model)
    if applied is None:
        return None
    return {"format": 1, "transformers": version("transformers"), "applied": applied}


def read_conversions(model: nn.Module, path: Path) -> None:
    """Let a model be saved in the layout that conversions.json describes, if there is this file.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        writer, applied = content["transformers"], [list(row) for row in content["applied"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); convert an older checkpoint") from error
    if not restore_conversions(model, applied):
        _logger.warning(
            "%s was written with transformers %s, whose conversions of checkpoints transformers %s "
            "does not have; the converted checkpoint gets the keys of the model's class, which may "
            "differ from those of the loaded checkpoint; to keep them, convert with transformers "
            "%s",
            path,
            writer,
            version("transformers"),
            writer,
        )
