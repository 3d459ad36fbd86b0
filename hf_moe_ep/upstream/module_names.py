"""Module and parameter names without the components that wrappers add.

The wrappers are those of torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, of FSDP1
(torch/distributed/fsdp/), of torch/_dynamo/eval_frame.py and of peft/tuners/tuners_utils.py.
"""

from __future__ import annotations

import re
from typing import Any

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")


def canonical_name(name: str) -> str:
    """Remove the components of activation checkpointing, torch.compile and FSDP1 from a name."""
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


def stock_name(module_name: str) -> str:
    """Return the name that a module had before it was wrapped, by PEFT or by the other wrappers."""
    return re.sub(r"\.base_layer(?=\.|$)", "", canonical_name(module_name))


def unwrap(model: Any) -> Any:
    """Return the model inside torch.compile's wrapper, or `model` itself if it has no wrapper.

    The wrapper is an OptimizedModule (torch/_dynamo/eval_frame.py).
    """
    return getattr(model, "_orig_mod", model)
