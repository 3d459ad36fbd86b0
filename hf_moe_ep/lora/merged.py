"""What adapters add to a weight, part by part: W + scale * B A of the rows and columns of a box.

The part of experts 2 and 3, rows 0 to 2, of gate_up_proj [8, 48, 32] wants of the factors

    b_EOP [8, 48, r]   b[2:4, 0:2]        a_EPI [8, r, 32]   a[2:4]

and one product. Rounding is PEFT's (`merge`): each adapter in turn is added to the weight, in the
dtype of both, and the sum is cast to the weight's.

On a CPU a whole parameter has the very bits that PEFT computes, and so have single experts whose
matrices are not tiny.

Here: parts that are sent away or written. Never: a model's own weights, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_moe_ep.lora.factors import is_stacked, stack_a, stack_b

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Update:
    """What one adapter adds to one parameter, its factors whole on this rank.

    Attributes:
        a, b: (r, in) and (out, r), or [E, r, in] and [E, out, r].
        scale: of their product.
        turned: the parameter is (in, out).
        casts: the product is cast to the parameter's dtype before it is added.
    """

    a: Tensor
    b: Tensor
    scale: float
    turned: bool
    casts: bool

    def of(self, part: tuple[slice, ...]) -> Tensor:
        """Multiply the factors for a part of the parameter."""
        a, b = self.a, self.b
        *experts, rows, columns = part
        if self.turned:
            rows, columns = columns, rows
        if experts:
            a, b = a[experts[0]], b[experts[0]]
        a, b = a[..., columns], b[..., rows, :]
        dtype = b.dtype
        if b.device.type == "cpu" and dtype in _HALF:
            a, b = a.float(), b.float()
        # As PEFT's own calls multiply: einsum exchanges the operands for a turned stack, which
        # rounds otherwise where a side is small.
        if experts and self.turned:
            return (a.mT @ b.mT).mul_(self.scale).to(dtype)
        product = (b @ a).mul_(self.scale).to(dtype)
        return product.mT if self.turned else product


def with_experts_in_front(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the factors of a stack, as PEFT packs them or not, as [E, r, in] and [E, out, r]."""
    if is_stacked(a):
        return a, b
    return stack_a(a, num_experts), stack_b(b, num_experts)


def add_updates(values: Tensor, part: tuple[slice, ...], updates: Iterable[Update]) -> Tensor:
    """Add `updates` to the values of a part of a parameter, in place; returns them."""
    for update in updates:
        delta = update.of(part)
        values += delta.to(values.dtype) if update.casts else delta
    return values
