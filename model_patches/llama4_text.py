"""The routing weights of Llama-4's language model multiply the inputs of the experts.

Attention layers without rotary embeddings scale a query by the position of its token in the row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_moe_ep.plan import MoEBlock, WeightSource


def _forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the forward of Llama4TextMoe, where experts compute only the tokens that chose them.

    The router returns its scores, but not its choice. Both are computed again from the logits, in
    the same way as in the router: with the sigmoid of all logits, because the result of torch for
    an fp32 element depends on the position of the element in the tensor.
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
