"""Module and parameter names, without what wrappers put into them.

Those of torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, of version 1 of
torch/distributed/fsdp/, torch/_dynamo/eval_frame.py and peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import re
from typing import Any

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")


def canonical_name(name: str) -> str:
    """Return a module or parameter name without what wrappers put in.

    The wrappers are those of activation checkpointing, torch.compile and FSDP1.
    """
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


def stock_name(module_name: str) -> str:
    """Return the name that a module had before any wrapper, PEFT's included."""
    return re.sub(r"\.base_layer(?=\.|$)", "", canonical_name(module_name))


def unwrap(model: Any) -> Any:
    """Return the model inside torch.compile's wrapper, or `model` itself where it has none.

    torch/_dynamo/eval_frame.py, OptimizedModule.
    """
    return getattr(model, "_orig_mod", model)
