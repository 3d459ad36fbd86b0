"""Stock models small enough for fp64 on one core, and batches for them.

Sizes differ wherever the architecture allows, so that swapped axes cannot pass. Weights are larger
than the stock initialisation: at std 0.02 the layers hardly change the residual stream, the router
is close to uniform, and a wrong expert would move the loss by less than rounding.
"""

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

_QWEN3_MOE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "norm_topk_prob": True,  # as the published checkpoints have it
    "initializer_range": 0.18,  # about 1/sqrt(hidden_size): layers keep the scale of their input
    "attn_implementation": "sdpa",
}
_ARCHITECTURES = {"qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _QWEN3_MOE)}


def tiny(
    name: str = "qwen3_moe",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    experts_implementation: str | None = "eager",
    **config_overrides: Any,
) -> PreTrainedModel:
    """A stock model in training mode, the same weights for the same seed.

    `experts_implementation`: stock's default is F.grouped_mm, which has no fp64 on CPU. Equal seeds
    give equal weights only for equal config sizes.
    """
    config_class, model_class, sizes = _ARCHITECTURES[name]
    config = config_class(
        **(sizes | config_overrides), experts_implementation=experts_implementation
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _spread(model)
    return model.to(dtype).train()


def _spread(model: PreTrainedModel) -> None:
    """Make norms differ from each other, and routers use every expert even in a short batch."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith(".gate.weight"):
                torch.nn.init.orthogonal_(parameter)  # of norm-1 rows: logits of about std 1


def batch(
    model: PreTrainedModel,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    *,
    ignore: float = 0.25,
    pad: int = 0,
) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, labels, each (batch_size, seq_len) int64 on the CPU.

    A share `ignore` of the labels is -100, spread unevenly over the rows. Row i is padded on the
    right by `pad * i // (batch_size - 1)` tokens, so the last row has `pad` of them. The label at
    position 1 always counts: no row is without a target.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, seq_len)
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.randint(vocab_size, shape, generator=generator)
    num_padded = pad * torch.arange(batch_size) // max(batch_size - 1, 1)
    is_pad = torch.arange(seq_len) >= seq_len - num_padded[:, None]
    ignored = torch.rand(shape, generator=generator) < ignore
    ignored[:, 1] = False
    labels = input_ids.masked_fill(ignored | is_pad, -100)
    return {
        "input_ids": input_ids.masked_fill(is_pad, 0),
        "attention_mask": (~is_pad).long(),
        "labels": labels,
    }
