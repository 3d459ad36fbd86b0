"""Build the model of several benchmarks: a Qwen3-MoE with random weights."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def qwen3_moe(sizes: Any, vocab: int, **config_options: Any) -> Qwen3MoeForCausalLM:
    """Build a model with the `hidden`, `intermediate`, `layers`, `experts` and `top_k` of `sizes`.

    The weights depend on torch's seed. `config_options` are further fields of the config.
    """
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.intermediate,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=max(sizes.hidden // 8, 8),
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        **config_options,
    )
    return Qwen3MoeForCausalLM(config)
