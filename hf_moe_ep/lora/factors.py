"""Convert LoRA factors of stacked experts between PEFT's layout and the layout of a sharded model.

    PEFT's layout           lora_A (E * r, in)     expert is the slowest index of E * r
    (unsharded, in files)   lora_B (out, r * E)    expert is the FASTEST index of r * E
    sharded model           lora_A [E, r, in]      both factors keep PEFT's names, and are split
                            lora_B [E, out, r]     over ep like the weights that they adapt

In PEFT's layout the columns of one expert are every E-th column of lora_B, which no DTensor
placement can describe. With experts as the first dim, both factors are sharded, gathered and
checkpointed like stacked weights. With etp_size > 1 a sharded model may store the dim 2F of
gate_up_proj as two dims (2, F), in the weight and in the factor that has this dim
(`etp.find_cut_of_factor`). `sharding/values.py` splits the factors over ranks.

The shape letter P is the rank r of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.upstream.adapters import iterate_parameter_factors
from hf_moe_ep.upstream.module_names import get_canonical_name


@dataclass(frozen=True)
class Adapter:
    """The LoRA factors of one stacked parameter, and the scale of their product."""

    a: Tensor
    b: Tensor
    scale: float
    num_experts: int

    def slice_experts(self, local_experts: slice) -> tuple[Tensor, Tensor]:
        """Return the factors a_LPI and b_LOP of `local_experts`.

        In a sharded model the factors contain only this rank's experts, and all are returned.
        """
        a, b = get_local_tensor(self.a), get_local_tensor(self.b)
        if is_stacked(a):
            return join_gate_and_up(a, b)
        a_EPI, b_EOP = stack_a(a, self.num_experts), stack_b(b, self.num_experts)
        return a_EPI[local_experts], b_EOP[local_experts].contiguous()


def join(adapters: Sequence[Adapter], local_experts: slice) -> tuple[Tensor, Tensor, float]:
    """Join active adapters into one (a_LPI, b_LOP, scale), whose rank is the sum of their ranks."""
    factors = [(*adapter.slice_experts(local_experts), adapter.scale) for adapter in adapters]
    if len(factors) == 1:
        return factors[0]
    joined_a = torch.cat([a for a, _, _ in factors], 1)
    return joined_a, torch.cat([b * scale for _, b, scale in factors], 2), 1.0


def is_stacked(factor: Tensor) -> bool:
    """Return True if experts are the first dim of a factor, as in a sharded model."""
    return factor.ndim >= 3


def join_gate_and_up(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """View stacked factors as [E, r, in] and [E, out, r].

    If a factor has two dims (2, F) for gate and up (`etp.py`), they are joined. B has these dims,
    or A if PEFT treats the dim 2F of the matrix as its input dim.
    """
    return (a if a.ndim == 3 else a.flatten(2)), (b if b.ndim == 3 else b.flatten(1, 2))


def stack_a(packed: Tensor, num_experts: int) -> Tensor:
    """Convert lora_A from PEFT's layout (E * r, in) to [E, r, in]."""
    return packed.unflatten(0, (num_experts, -1))


def stack_b(packed: Tensor, num_experts: int) -> Tensor:
    """Convert lora_B from PEFT's layout (out, r * E) to [E, out, r].

    PEFT defines its layout in ParamWrapper.get_delta_weight.
    """
    return packed.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def pack_a(stacked: Tensor) -> Tensor:
    """Convert lora_A from [E, r, in] to PEFT's layout (E * r, in)."""
    return stacked.flatten(0, 1)


def pack_b(stacked: Tensor) -> Tensor:
    """Convert lora_B from [E, out, r] to PEFT's layout (out, r * E)."""
    return stacked.permute(1, 2, 0).flatten(1, 2)


def pack_factors(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the LoRA factors in a state dict of unsharded tensors to PEFT's layout, in a copy."""
    packed = dict(state_dict)
    for name, factor in iterate_parameter_factors(model):
        for key in {name, get_canonical_name(name)} & packed.keys():
            if is_stacked(packed[key]):
                packed[key] = (pack_b if factor.is_b else pack_a)(packed[key])
    return packed
