"""Compute the ops of this folder slowly, with simple code that autograd differentiates.

The tests compare the fast implementations with these versions. `dequantise_matrices` dequantises a
stack of matrices, `sum_rows` sums the copies of each token, and `expert_mlp` computes the experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.quantised import NF4_CODES, Quantised, dequantise_scales


def dequantise_matrices(stack: Quantised, kind: str, dtype: torch.dtype) -> Tensor:
    """Dequantise a stack to [E, O, I]. Each value times its scale is rounded to `dtype` once."""
    scale = dequantise_scales(stack)
    if kind == "nf4":
        codes = torch.tensor(NF4_CODES, device=scale.device)
        first, second = codes[(stack.values >> 4).int()], codes[(stack.values & 15).int()]
        values = torch.stack([first, second], 3).flatten(2)
        return (values * scale.repeat_interleave(64, 2)).to(dtype)
    values = stack.values.view(torch.float8_e4m3fn).float()
    return (values * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)).to(dtype)


def sum_rows(rows_NH: Tensor, token_of_row_N: Tensor, num_tokens: int) -> Tensor:
    """Return the result of `hf_moe_ep.ops.permute.add_rows`, computed one row at a time."""
    out_TH = list(rows_NH.new_zeros(num_tokens, rows_NH.shape[1]))
    for row_H, token in zip(rows_NH, token_of_row_N.tolist(), strict=True):
        out_TH[token] = out_TH[token] + row_H
    return torch.stack(out_TH)


def expert_mlp(
    rows_RH: Tensor,
    expert_ids_RK: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    formula: ExpertFormula,
) -> Tensor:
    """Return the result of `hf_moe_ep.ops.expert_mlp.expert_mlp`, one row and expert at a time."""
    out_RH = []
    for row_H, experts_K, weights_K in zip(rows_RH, expert_ids_RK, weights_RK, strict=True):
        out_H = torch.zeros_like(row_H)
        for expert, weight in zip(experts_K.tolist(), weights_K, strict=True):
            if expert < experts.up.shape[0]:
                up_GH = _merge_adapter(experts, "up", expert)
                down_HF = _merge_adapter(experts, "down", expert)
                pre_G = _apply_linear(row_H, up_GH, experts.up_bias, expert)
                act_F = _apply_gate(pre_G, formula)
                y_H = _apply_linear(act_F, down_HF, experts.down_bias, expert)
                out_H = out_H + weight * y_H
        out_RH.append(out_H)
    return torch.stack(out_RH) if out_RH else torch.zeros_like(rows_RH)


def _merge_adapter(experts: ExpertWeights, name: str, expert: int) -> Tensor:
    """Return the matrix `name` of one expert with its adapter merged into it."""
    weight_LOI: Tensor = getattr(experts, name)
    adapter = experts.adapter(name)
    if adapter is None:
        return weight_LOI[expert]
    delta_OI = adapter.b_LOP[expert] @ adapter.a_LPI[expert]
    return weight_LOI[expert] + adapter.scale * delta_OI


def _apply_linear(x_I: Tensor, weight_OI: Tensor, bias_LO: Tensor | None, expert: int) -> Tensor:
    out_O = weight_OI @ x_I
    return out_O if bias_LO is None else out_O + bias_LO[expert]


def _apply_gate(pre_G: Tensor, formula: ExpertFormula) -> Tensor:
    if not formula.gated:
        # Without a gate, too, the limit clamps the input of the activation from above.
        return _apply_activation(pre_G.clamp(max=formula.limit), formula)
    if formula.interleaved:
        gate_F, up_F = pre_G[0::2], pre_G[1::2]
    else:
        gate_F, up_F = pre_G[: len(pre_G) // 2], pre_G[len(pre_G) // 2 :]
    if formula.capped:
        up_F = _apply_cap(up_F, formula.up_cap)
        return _apply_cap(gate_F, formula.gate_cap) * torch.sigmoid(gate_F) * up_F
    if formula.clamps_output:
        up_F = up_F.clamp(min=-formula.limit, max=formula.limit)
        return functional.silu(gate_F).clamp(max=formula.limit) * up_F
    if formula.limit != math.inf:
        gate_F = gate_F.clamp(max=formula.limit)
        up_F = up_F.clamp(min=-formula.limit, max=formula.limit)
    return _apply_activation(gate_F, formula) * (up_F + formula.up_offset)


def _apply_cap(x_F: Tensor, cap: float) -> Tensor:
    return x_F if cap == math.inf else cap * torch.tanh(x_F / cap)


def _apply_activation(x_F: Tensor, formula: ExpertFormula) -> Tensor:
    if formula.activation == "swish":
        return x_F * torch.sigmoid(formula.alpha * x_F)
    if formula.activation == "relu2":
        return torch.relu(x_F) ** 2
    tanh = formula.activation == "gelu_tanh"
    return functional.gelu(x_F, approximate="tanh" if tanh else "none")
