"""LoRA on the experts: PEFT's adapters, computed beside the stacked weights instead of merged in.

PEFT adapts a parameter such as `gate_up_proj` by a wrapper around the module that holds it, which
for the time of a forward replaces the parameter by `W + scale * B A`: a tensor of the size of all
experts, made twice and kept for backward. Here the wrapper only leaves its factors on the experts
module, and `ops.expert_mlp` adds two thin products to each expert's own.

The factors are parameters of PEFT's wrappers, outside the experts module. Sharding treats them like
the rest of the layer: every rank holds a share, the layer's gather brings all of them, and a rank
uses those of its experts. Each expert's gradient comes from the ep ranks that own it and is zero
elsewhere, so the mean over all ranks, which the layer takes, is that of the global batch. Their
global shapes stay PEFT's, (E * r, in) and (out, r * E): what is gathered and saved is a stock
adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_moe_ep import hf
from hf_moe_ep.experts import ADAPTERS, Adapter
from hf_moe_ep.state import STATE, MoELayer


def install() -> None:
    """Let PEFT's wrappers around patched experts leave their factors there, once per process."""
    hf.wrap_parameter_adapters(_computed_here, _leave_factors)


@contextmanager
def _leave_factors(experts: Any, parameter: str, factors: list[hf.Factors]) -> Iterator[None]:
    kept = vars(experts).setdefault(ADAPTERS, {})
    kept[parameter] = [Adapter(*one) for one in factors]
    try:
        yield
    finally:
        del kept[parameter]


def _computed_here(experts: Any) -> bool:
    """Whether this module's forward is ours (not another model's, not the eager backend)."""
    layer = getattr(experts, STATE, None)
    return isinstance(layer, MoELayer) and layer.compute is not None
