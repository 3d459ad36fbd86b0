"""Compute the formula of an expert between its two matrices, in plain torch.

    pre  = up_weight x (+ up_bias)                 [2F], or [F] without a gate
    gate, up = the two halves of pre               concatenated: g0 g1 .. u0 u1 ..
                                                   interleaved:  g0 u0 g1 u1 ..
    act  = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)      [F]
           f(min(pre, limit))                                                without a gate
           min(f(gate), limit) * (clamp(up, -limit, limit) + up_offset)      if f is swish_clamped
    out  = down_weight act (+ down_bias)           [H]

f is one of ACTIVATIONS; `swish` with alpha 1 is silu. gpt-oss uses swish with alpha 1.702, limit 7
and up_offset 1 (transformers, models/gpt_oss/modeling_gpt_oss.py, _apply_gate). `swish_clamped` is
silu, and the limit clamps its output instead of its input (models/step3p7/modeling_step3p7.py). A
gate with soft caps is computed in fp32 or wider (models/inkling2/modeling_inkling2.py,
Inkling2SoftcappedSwiGLU):

    act  = cap(gate, gate_cap) * sigmoid(gate) * cap(up, up_cap)       cap(x, c) = c * tanh(x / c)

`ExpertFormula` has the parameters, `activate` and `activate_backward` compute the formula. For the
Triton kernels `kernels/epilogue.py` computes it, but neither soft caps nor `swish_clamped`.

Pre-activations have the order of the weight's rows, so no matrix product of the backward needs a
reordered copy of the weight. If a model stores weights transposed, callers pass views.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("swish", "gelu", "gelu_tanh", "relu2", "swish_clamped")
# The activations that the Triton kernels do not compute.
ONLY_IN_TORCH = ("swish_clamped",)


@dataclass(frozen=True)
class ExpertFormula:
    """The parameters of the formula in the module docstring.

    `limit` is inf without clamping, and `gate_cap` and `up_cap` are inf without soft caps.
    """

    gated: bool = True
    interleaved: bool = False
    activation: str = "swish"
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0
    gate_cap: float = math.inf
    up_cap: float = math.inf

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}"
            )
        is_swiglu = self.gated and (self.activation, self.alpha) == ("swish", 1.0)
        if self.capped and not (is_swiglu and not self.clamped and self.up_offset == 0):
            raise ValueError(
                f"soft caps ({self.gate_cap} and {self.up_cap}) are only defined for SwiGLU: a "
                f"gate with swish and alpha 1, without a limit or an up_offset"
            )

    @property
    def clamped(self) -> bool:
        return self.limit != math.inf

    @property
    def capped(self) -> bool:
        return self.gate_cap != math.inf or self.up_cap != math.inf

    @property
    def clamps_output(self) -> bool:
        """True if the limit clamps the output of the activation, and not its input."""
        return self.activation == "swish_clamped"

    def list_kernel_constants(self) -> dict[str, Any]:
        """Return the formula as compile-time arguments of the Triton kernels (`epilogue.py`)."""
        assert not self.capped, "the Triton kernels do not compute soft caps"
        return {
            "ACTIVATION": self.activation,
            "ALPHA": self.alpha,
            "LIMIT": self.limit if self.clamped else None,
            "UP_OFFSET": self.up_offset,
        }

    def ffn_size(self, pre_size: int) -> int:
        """Return F for experts with `pre_size` pre-activations per row."""
        return pre_size // 2 if self.gated else pre_size


def split(pre_AG: Tensor, formula: ExpertFormula) -> tuple[Tensor, Tensor]:
    """Return gate_AF and up_AF as views. Without a gate, both of them are `pre_AG` itself."""
    if not formula.gated:
        return pre_AG, pre_AG
    if formula.interleaved:
        return pre_AG[:, 0::2], pre_AG[:, 1::2]
    gate_AF, up_AF = pre_AG.chunk(2, dim=1)
    return gate_AF, up_AF


def activate(pre_AG: Tensor, formula: ExpertFormula) -> Tensor:
    """Compute act_AF by the formula of the module docstring."""
    gate_AF, up_AF = split(pre_AG, formula)
    if formula.capped:
        act_AF, _, _ = _activate_capped(gate_AF, up_AF, formula)
        return act_AF.to(pre_AG.dtype)
    if formula.clamped:
        gate_AF = gate_AF if formula.clamps_output else gate_AF.clamp(max=formula.limit)
        up_AF = up_AF.clamp(-formula.limit, formula.limit)
    f_AF = _apply_activation(gate_AF, formula)
    if formula.clamps_output:
        f_AF = f_AF.clamp_(max=formula.limit)
    if not formula.gated:
        return f_AF
    return f_AF.mul_(up_AF + formula.up_offset if formula.up_offset else up_AF)


def activate_backward(
    pre_AG: Tensor, grad_AF: Tensor, formula: ExpertFormula
) -> tuple[Tensor, Tensor]:
    """Return act_AF and the gradient of `pre_AG`. `grad_AF` is the gradient of act_AF."""
    gate_AF, up_AF = split(pre_AG, formula)
    grad_pre_AG = torch.empty_like(pre_AG)
    grad_gate_AF, grad_up_AF = split(grad_pre_AG, formula)
    if formula.capped:
        act_AF, gate_slope_AF, up_slope_AF = _activate_capped(gate_AF, up_AF, formula)
        grad_gate_AF.copy_(grad_AF * gate_slope_AF)
        grad_up_AF.copy_(grad_AF * up_slope_AF)
        return act_AF.to(pre_AG.dtype), grad_pre_AG
    raw_gate_AF, raw_up_AF = gate_AF, up_AF
    if formula.clamped:
        gate_AF = gate_AF if formula.clamps_output else gate_AF.clamp(max=formula.limit)
        up_AF = up_AF.clamp(-formula.limit, formula.limit)
    f_AF = _apply_activation(gate_AF, formula)
    # The tensor that the limit clamps: the gate, or the output of the activation.
    unclamped_AF = raw_gate_AF
    if formula.clamps_output:
        unclamped_AF, f_AF = f_AF, f_AF.clamp(max=formula.limit)
    if not formula.gated:
        grad_gate_AF.copy_(_activation_backward(grad_AF, gate_AF, formula))
        act_AF = f_AF
    else:
        torch.mul(grad_AF, f_AF, out=grad_up_AF)
        factor_AF = up_AF + formula.up_offset if formula.up_offset else up_AF
        grad_gate_AF.copy_(_activation_backward(grad_AF * factor_AF, gate_AF, formula))
        act_AF = f_AF.mul_(factor_AF)
    if formula.clamped:
        grad_gate_AF.masked_fill_(unclamped_AF > formula.limit, 0)
        if formula.gated:
            grad_up_AF.masked_fill_(raw_up_AF.abs() > formula.limit, 0)
    return act_AF, grad_pre_AG


def _activate_capped(
    gate_AF: Tensor, up_AF: Tensor, formula: ExpertFormula
) -> tuple[Tensor, Tensor, Tensor]:
    """Return act_AF and its derivatives by gate and by up, in fp32 or wider."""
    wide_dtype = torch.promote_types(gate_AF.dtype, torch.float32)
    gate_AF, up_AF = gate_AF.to(wide_dtype), up_AF.to(wide_dtype)
    sigmoid_AF = torch.sigmoid(gate_AF)
    linear_AF, linear_slope_AF = _apply_cap(gate_AF, formula.gate_cap)
    factor_AF, factor_slope_AF = _apply_cap(up_AF, formula.up_cap)
    f_AF = linear_AF * sigmoid_AF
    f_slope_AF = linear_slope_AF * sigmoid_AF + f_AF * (1 - sigmoid_AF)
    return f_AF * factor_AF, f_slope_AF * factor_AF, f_AF * factor_slope_AF


def _apply_cap(x_AF: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return `cap * tanh(x / cap)` and its derivative. A cap of inf changes nothing."""
    if cap == math.inf:
        return x_AF, torch.ones_like(x_AF)
    tanh_AF = torch.tanh(x_AF / cap)
    return cap * tanh_AF, 1 - tanh_AF.square()


def _apply_activation(gate_AF: Tensor, formula: ExpertFormula) -> Tensor:
    if formula.activation == "gelu":
        return functional.gelu(gate_AF)
    if formula.activation == "gelu_tanh":
        return functional.gelu(gate_AF, approximate="tanh")
    if formula.activation == "relu2":
        return functional.relu(gate_AF).square()
    if formula.alpha == 1:
        return functional.silu(gate_AF)
    return gate_AF * torch.sigmoid(gate_AF * formula.alpha)


def _activation_backward(grad_AF: Tensor, gate_AF: Tensor, formula: ExpertFormula) -> Tensor:
    aten = torch.ops.aten
    if formula.activation == "gelu":
        return aten.gelu_backward(grad_AF, gate_AF)
    if formula.activation == "gelu_tanh":
        return aten.gelu_backward(grad_AF, gate_AF, approximate="tanh")
    if formula.activation == "relu2":
        return grad_AF * 2 * functional.relu(gate_AF)
    if formula.alpha == 1:
        return aten.silu_backward(grad_AF, gate_AF)
    sigmoid_AF = torch.sigmoid(gate_AF * formula.alpha)
    return grad_AF * sigmoid_AF * (1 + formula.alpha * gate_AF * (1 - sigmoid_AF))
