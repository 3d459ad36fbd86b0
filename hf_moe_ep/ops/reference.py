"""Plain-torch truth of every op in this folder: slow and obvious, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def gather_rows(x_TH: Tensor, token_of_row_N: Tensor) -> Tensor:
    return torch.stack([x_TH[token] for token in token_of_row_N.tolist()])


def sum_rows(rows_NH: Tensor, token_of_row_N: Tensor, num_tokens: int) -> Tensor:
    out_TH = list(rows_NH.new_zeros(num_tokens, rows_NH.shape[1]))
    for row_H, token in zip(rows_NH, token_of_row_N.tolist(), strict=True):
        out_TH[token] = out_TH[token] + row_H
    return torch.stack(out_TH)


def expert_mlp(
    rows_RH: Tensor,
    expert_ids_RK: Tensor,
    weights_RK: Tensor,
    gate_up_LGH: Tensor,
    down_LHF: Tensor,
) -> Tensor:
    """See `hf_moe_ep.ops.expert_mlp.expert_mlp`; one row and one expert at a time."""
    out_RH = []
    for row_H, experts_K, weights_K in zip(rows_RH, expert_ids_RK, weights_RK, strict=True):
        out_H = torch.zeros_like(row_H)
        for expert, weight in zip(experts_K.tolist(), weights_K, strict=True):
            if expert < gate_up_LGH.shape[0]:
                gate_F, up_F = (gate_up_LGH[expert] @ row_H).chunk(2)
                out_H = out_H + weight * (down_LHF[expert] @ (functional.silu(gate_F) * up_F))
        out_RH.append(out_H)
    return torch.stack(out_RH)
