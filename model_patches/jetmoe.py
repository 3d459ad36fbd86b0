"""The router of JetMoE sorts tokens by expert. (The experts of its attention stay stock.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.plan import MoEBlock, WeightSource


def _forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Compute the forward of JetMoeMoE with a routing that is sorted by token, not by expert.

    The router sorts pairs of a token and an expert by expert. It returns for each pair its place in
    the order of tokens, its token and its weight, and for each expert the number of its pairs.
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
