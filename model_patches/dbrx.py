"""DBRX stores all experts of a layer in three matrices, one expert below the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_moe_ep.plan import MoEBlock, WeightSource


def _forward(block: Any, hidden_states: Tensor) -> Tensor:
    """Compute the forward of DbrxFFN with experts that take tokens instead of sequences."""
    logits = block.router(hidden_states)
    weights, chosen = block.route_tokens_to_experts(logits)
    out: Tensor = block.experts(hidden_states.flatten(0, 1), chosen, weights)
    return out.view_as(hidden_states)


DIFFERS = {
    "block": MoEBlock(
        name="blocks.*.ffn",
        weights={
            "gate_up_proj": WeightSource(("experts.mlp.w1", "experts.mlp.v1"), flat=True),
            "down_proj": WeightSource(("experts.mlp.w2",), flat=True, transposed=True),
        },
        activation="experts.mlp.activation_fn",
        forward=_forward,
    )
}
