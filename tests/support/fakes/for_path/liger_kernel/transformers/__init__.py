"""The functions of Liger that transformers' Trainer calls (`apply_liger_kernel_to_qwen3_moe`).

Like the original, they replace the rotary embedding, and the classes of norms and experts from
which later models are built. Norms and experts of a given model also get new forwards and names,
and the model gets the forward of the fused head. Without a model, Qwen3MoeForCausalLM gets this
forward. Nothing is restored. `CALLS` counts the calls of each replacement.
"""

from collections import Counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen3_moe import modeling_qwen3_moe

CALLS: Counter[str] = Counter()


class LigerRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        CALLS["norm"] += 1
        wide = hidden_states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * scale).to(hidden_states.dtype)


class LigerExperts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = config.num_experts, config.hidden_size
        width = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, width))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute all experts on all tokens. The kernel has the same result, by another method."""
        CALLS["experts"] += 1
        pre = torch.einsum("th,efh->etf", hidden_states, self.gate_up_proj)
        gate, up = pre.chunk(2, dim=-1)
        out = torch.einsum("etf,ehf->teh", nn.functional.silu(gate) * up, self.down_proj)
        chosen = out.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    CALLS["rope"] += 1
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotated = (torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) for x in (q, k))
    return tuple(x * cos + y * sin for x, y in zip((q, k), rotated, strict=True))  # type: ignore[return-value]


def lce_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    output_router_logits: bool | None = None,
    num_items_in_batch: Tensor | None = None,
    skip_logits: bool | None = None,
    **kwargs: Any,
) -> MoeCausalLMOutputWithPast:
    """Compute the loss from hidden states and the head's weight, without the head's forward.

    Logits are computed without labels, and in evaluation, unless `skip_logits` is set.
    """
    if skip_logits is None:
        skip_logits = self.training and labels is not None
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        output_router_logits=output_router_logits,
        **kwargs,
    )
    loss = logits = None
    if not skip_logits:
        logits = self.lm_head(outputs.last_hidden_state)
        if labels is not None:
            loss = self.loss_function(
                logits, labels, self.vocab_size, num_items_in_batch=num_items_in_batch, **kwargs
            )
    elif labels is not None:
        CALLS["loss"] += 1
        targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        hidden = outputs.last_hidden_state.reshape(-1, self.config.hidden_size)
        reduction = "mean" if num_items_in_batch is None else "sum"
        scores = hidden @ self.lm_head.weight.T
        loss = nn.functional.cross_entropy(scores.float(), targets, reduction=reduction)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
    aux_loss = None
    if output_router_logits:
        aux_loss = load_balancing_loss_func(
            outputs.router_logits, self.num_experts, self.num_experts_per_tok, attention_mask
        )
        if loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss
    return MoeCausalLMOutputWithPast(
        loss=loss, aux_loss=aux_loss, logits=logits, router_logits=outputs.router_logits
    )


def _bind(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__dict__["forward"] = MethodType(kind.forward, module)
    module.__dict__["_get_name"] = MethodType(lambda self: kind.__name__, module)


def apply_liger_kernel_to_qwen3_moe(
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Any = None,
) -> None:
    if rope:
        modeling_qwen3_moe.apply_rotary_pos_emb = liger_rotary_pos_emb
    if rms_norm:
        modeling_qwen3_moe.Qwen3MoeRMSNorm = LigerRMSNorm
    if swiglu:
        modeling_qwen3_moe.Qwen3MoeExperts = LigerExperts
    if fused_linear_cross_entropy and model is None:
        modeling_qwen3_moe.Qwen3MoeForCausalLM.forward = lce_forward
    if model is None:
        return
    if fused_linear_cross_entropy:
        model.forward = MethodType(lce_forward, model)
    layers = model.model.layers
    norms = [
        getattr(layer, f"{name}_layernorm")
        for layer in layers
        for name in ("input", "post_attention")
    ]
    norms += [getattr(layer.self_attn, f"{name}_norm") for layer in layers for name in "qk"]
    for norm in [model.model.norm, *norms] if rms_norm else []:
        _bind(norm, LigerRMSNorm)
    for layer in layers if swiglu else []:
        _bind(layer.mlp.experts, LigerExperts)


def _apply_liger_kernel_to_instance(model: Any, **kwargs: Any) -> None:
    apply_liger_kernel_to_qwen3_moe(model=model, **kwargs)
