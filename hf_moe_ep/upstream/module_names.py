"""Module and parameter names, without what wrappers put into them.

Those of torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, of version 1 of
torch/distributed/fsdp/, torch/_dynamo/eval_frame.py and peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import re
from typing import Any

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")


def canonical_name(name: str) -> str:
    """A module or parameter name without what activation checkpointing and compile put in."""
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


def stock_name(module_name: str) -> str:
    """A module's name before it was wrapped for checkpointing, compile or adapters."""
    return re.sub(r"\.base_layer(?=\.|$)", "", canonical_name(module_name))


def unwrap(model: Any) -> Any:
    """The model behind torch.compile's wrapper (torch/_dynamo/eval_frame.py, OptimizedModule)."""
    return getattr(model, "_orig_mod", model)
