"""Llama-4's language model, whose routing weights multiply the inputs of the experts.

Its attention without rotary embeddings scales a query by the number of its token in the row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_moe_ep.plan import MoEBlock, WeightSource


def _forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of Llama4TextMoe, whose experts compute only the tokens that chose them.

    The router returns its scores, but not its choice. Both are computed again from the logits, as
    the router computes them: the sigmoid of all experts' logits, because torch rounds an element
    of an fp32 tensor otherwise if it is at another place of the tensor.
    """
    tokens = hidden_states.reshape(-1, block.hidden_dim)  # (T, H)
    _, logits = block.router(tokens)
    chosen = logits.topk(block.top_k, dim=1).indices
    weights = logits.float().sigmoid().to(logits.dtype).gather(1, chosen)
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
