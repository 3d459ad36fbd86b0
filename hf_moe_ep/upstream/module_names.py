"""Remove the components that wrappers add from the names of modules and parameters.

    layers.0._checkpoint_wrapped_module.mlp.base_layer  ->  layers.0.mlp

The wrappers come from torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, from FSDP1
(torch/distributed/fsdp/), torch/_dynamo/eval_frame.py and peft/tuners/tuners_utils.py. PEFT's
ModulesToSaveWrapper (peft/utils/other.py) holds a module of modules_to_save and its trained copies.
"""

from __future__ import annotations

import re
from typing import Any

_COPIES = re.compile(r"\.(?:original_module|modules_to_save\.[^.]+)(?=\.|$)")
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")


def get_canonical_name(name: str) -> str:
    """Remove the components of activation checkpointing, torch.compile and FSDP1 from a name."""
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


def get_stock_name(module_name: str) -> str:
    """Return the name that a module had before PEFT and the other wrappers wrapped it."""
    return re.sub(r"\.base_layer(?=\.|$)", "", get_canonical_name(module_name))


def remove_names_of_copies(module_name: str) -> str:
    """Replace the name of a module of modules_to_save, or of its copy, by the wrapper's name."""
    return _COPIES.sub("", module_name)


def unwrap(model: Any) -> Any:
    """Return the model inside torch.compile's wrapper, or `model` itself if it has no wrapper.

    The wrapper is an OptimizedModule (torch/_dynamo/eval_frame.py).
    """
    return getattr(model, "_orig_mod", model)
