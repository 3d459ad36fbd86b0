"""LoRA factors of stacked experts: how PEFT packs them, and how they lie in a sharded model.

    PEFT, stock and in files      lora_A (E * r, in)   expert slowest
                                  lora_B (out, r * E)  expert FASTEST
    sharded, under PEFT's names   lora_A [E, r, in]
                                  lora_B [E, out, r]   split over ep like the weights they adapt

An expert's share of lora_B is every E-th column, which no DTensor placement describes; with the
expert in front both factors are sharded, gathered and checkpointed like any stacked weight.
P is the rank of an adapter, r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.state import ActiveAdapter
from hf_moe_ep.upstream.adapters import parameter_factors
from hf_moe_ep.upstream.module_names import canonical_name


@dataclass(frozen=True)
class Adapter:
    """The factors of one stacked parameter and what their product is multiplied by."""

    a: Tensor
    b: Tensor
    scale: float
    num_experts: int

    def of_experts(self, mine: slice) -> tuple[Tensor, Tensor]:
        """a_LPI and b_LOP of the experts `mine`, which a sharded model has and no others."""
        a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (self.a, self.b))
        if is_stacked(a):
            return a, b
        a_EPI, b_EOP = stack_a(a, self.num_experts), stack_b(b, self.num_experts)
        return a_EPI[mine], b_EOP[mine].contiguous()


def join(adapters: Sequence[ActiveAdapter], mine: slice) -> tuple[Tensor, Tensor, float]:
    """a_LPI, b_LOP and scale of all active adapters as one, whose rank is the sum of theirs."""
    parts = [(*adapter.of_experts(mine), adapter.scale) for adapter in adapters]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([a for a, _, _ in parts], 1), torch.cat([b * s for _, b, s in parts], 2), 1.0


def is_stacked(factor: Tensor) -> bool:
    """Tell whether a factor has its experts in front, as in a sharded model."""
    return factor.ndim == 3


def stack_a(packed: Tensor, num_experts: int) -> Tensor:
    """(E * r, in) -> [E, r, in]."""
    return packed.unflatten(0, (num_experts, -1))


def stack_b(packed: Tensor, num_experts: int) -> Tensor:
    """(out, r * E) -> [E, out, r]; peft, ParamWrapper.get_delta_weight."""
    return packed.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def pack_a(stacked: Tensor) -> Tensor:
    """[E, r, in] -> (E * r, in)."""
    return stacked.flatten(0, 1)


def pack_b(stacked: Tensor) -> Tensor:
    """[E, out, r] -> (out, r * E)."""
    return stacked.permute(1, 2, 0).flatten(1, 2)


def pack_factors(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of whole tensors, the factors in it packed as PEFT packs them."""
    packed = dict(state_dict)
    for name, factor in parameter_factors(model):
        for key in {name, canonical_name(name)} & packed.keys():
            if is_stacked(packed[key]):
                packed[key] = (pack_b if factor.is_b else pack_a)(packed[key])
    return packed
