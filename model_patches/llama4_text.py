"""Llama-4's language model, whose routing weights multiply the inputs of the experts.

Its attention without rotary embeddings scales a query by the number of its token in the row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_moe_ep.plan import MoEBlock, WeightSource


def _forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of Llama4TextMoe, whose experts compute only the tokens that chose them.

    The router returns a score for each expert, which is 0 for experts that were not chosen.
    """
    tokens = hidden_states.reshape(-1, block.hidden_dim)  # (T, H)
    scores, logits = block.router(tokens)
    weights, chosen = scores.topk(block.top_k, dim=1)
    return block.shared_expert(tokens) + block.experts(tokens, chosen, weights), logits


BLOCK = MoEBlock(
    name="layers.*.feed_forward",
    weights={
        "gate_up_proj": WeightSource(("experts.gate_up_proj",)),
        "down_proj": WeightSource(("experts.down_proj",)),
    },
    transposed=True,
    forward=_forward,
    weights_inputs=True,
)
DIFFERS = {"block": BLOCK, "whole_sequences": ("layers.*.self_attn",)}
