"""Refuse methods of stock models that a sharded model cannot run.

    generate_batch and other functions    each rank would run the forwards that its own requests
    of continuous batching                need, and wait in collectives that other ranks never call

`generate` runs as many forwards on every rank as the rank with the longest text needs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import nn

from hf_moe_ep.upstream.models import list_models_that_generate

# The functions that start transformers' continuous batching, also for
# `generate(cache_implementation="paged")`. Not every version of transformers has all of them.
_CONTINUOUS_BATCHING = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
)


def refuse_calls(model: nn.Module, num_ranks: int) -> None:
    """Let the methods of a sharded model that the module docstring lists raise ValueError."""
    if num_ranks > 1:
        for module in list_models_that_generate(model):
            for name in _CONTINUOUS_BATCHING:
                if hasattr(module, name):
                    setattr(module, name, partial(_refuse_continuous_batching, name, num_ranks))


def _refuse_continuous_batching(name: str, num_ranks: int, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{name}: continuous batching runs as many forwards as the requests of one rank need, but "
        f"the {num_ranks} ranks of a sharded model must run the same number; use generate() "
        f"without cache_implementation='paged' (TRL: use_transformers_continuous_batching=False), "
        f"or vLLM"
    )
