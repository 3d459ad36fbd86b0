"""JetMoE, whose router sorts the tokens by expert. (The experts of its attention stay stock.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.plan import MoEBlock, WeightSource


def _forward(block: Any, hidden_states: Tensor) -> Tensor:
    """The forward of JetMoeMoE, with the routing by token instead of by expert.

    The router returns the pairs of a token and an expert in the order of experts: the place of each
    pair in the order of tokens, its token, its weight, and the number of pairs of each expert.
    """
    tokens = hidden_states.flatten(0, 1)  # (T, H)
    places, _, gates, pairs_of_experts, _ = block.router(tokens)
    experts = torch.arange(len(pairs_of_experts), device=tokens.device).repeat_interleave(
        torch.tensor(pairs_of_experts, device=tokens.device), output_size=len(places)
    )
    chosen = torch.empty_like(places).index_copy(0, places, experts)
    weights = torch.zeros_like(gates).index_copy(0, places, gates)
    top_k = block.router.top_k
    out = block.experts(tokens, chosen.view(-1, top_k), weights.view(-1, top_k))
    return out.view_as(hidden_states) + block.bias


DIFFERS = {
    "aux_loss_coef": "aux_loss_coef",
    "block": MoEBlock(
        name="layers.*.mlp",
        weights={
            "gate_up_proj": WeightSource(("input_linear.weight",)),
            "down_proj": WeightSource(("output_linear.weight",)),
        },
        num_experts="router.num_experts",
        activation="activation",
        forward=_forward,
    ),
}
