"""Compute attention to some of the keys, and merge the results for several parts of the keys.

Attention to all keys is a weighted mean of the attention to each part of the keys. The weight of a
part is the exponential of its log-sum-exp (lse). For a query with scores s_k and values v_k:

    out_p = sum_{k in p} exp(s_k) v_k / exp(lse_p)         lse_p = log sum_{k in p} exp(s_k)
    out   = sum_p exp(lse_p - lse) out_p                   lse   = log sum_p exp(lse_p)

With w_p = exp(lse_p - lse), the gradients of a part follow from the gradients of `out` and `lse`:

    d out_p = w_p d out        d lse_p = w_p (d out . (out_p - out) + d lse)

FlashAttention (arXiv 2205.14135) and ring attention (arXiv 2310.01889) merge in this way.
`attend_to_part` computes out_p and lse_p by FlexAttention, which returns its log-sum-exp. On a CPU,
where FlexAttention has no backward, it uses plain PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_mask,
    flex_attention,
)

from hf_moe_ep.sequence.block_masks import MaskMod, build_block_mask, shift_mask


@dataclass(frozen=True)
class ScoreOptions:
    """The options with which scores are computed from queries and keys.

    Attributes:
        mask: determines which query of the whole sequence sees which key.
        scale: the factor of the scores; None for 1 / sqrt(width).
        softcap: a number c that changes each score to c * tanh(score / c); None for no change.
        kernel_options: options of FlexAttention.
    """

    mask: BlockMask
    scale: float | None = None
    softcap: float | None = None
    kernel_options: Any = None


@dataclass(frozen=True)
class QueryKeyRange:
    """The queries `q_start` to `q_stop` - 1 and the keys `k_start` to `k_stop` - 1."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


def attend_to_part(
    query: Tensor,  # (B, Q, queries, W)
    key: Tensor,  # (B, K, keys, W)
    value: Tensor,
    scores: ScoreOptions,
    box: QueryKeyRange,
    computed: dict[Any, Any],
) -> tuple[Tensor, Tensor]:
    """Return the attention (B, Q, queries, W) to the keys of a box, and its log-sum-exp.

    If a query sees no key of the box, its attention is zero and its log-sum-exp is -inf.

    Args:
        computed: a dict that stores the masks of boxes for all layers of one forward.
    """
    if query.device.type == "cpu":
        return _attend_plainly(query, key, value, scores, box, computed)
    mask = compute_once(
        computed, ("flex", box), scores.mask, lambda: slice_block_mask(scores.mask, box)
    )
    out, aux = _compiled_flex_attention()(
        query,
        key,
        value,
        score_mod=None if scores.softcap is None else _soft_cap(scores.softcap),
        block_mask=mask,
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=scores.kernel_options,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: ScoreOptions,
    box: QueryKeyRange,
    computed: dict[Any, Any],
) -> tuple[Tensor, Tensor]:
    def make_visible() -> Tensor:
        rows, heads, *_ = scores.mask.shape
        sizes = box.q_stop - box.q_start, box.k_stop - box.k_start
        return create_mask(_shift(scores.mask, box), rows, heads, *sizes, device=query.device)

    visible = compute_once(computed, ("plain", box), scores.mask, make_visible)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    logits = query @ key.mT * scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    sees_any = visible.any(-1, keepdim=True)
    # A query whose scores are all -inf would have NaN gradients. Therefore the scores of a query
    # without visible keys are not masked, and the results of this query are overwritten below.
    logits = logits.masked_fill(~visible & sees_any, -torch.inf)
    lse = logits.logsumexp(-1, keepdim=True)
    out = (logits - lse).exp() @ value
    return out.masked_fill(~sees_any, 0), lse.masked_fill(~sees_any, -torch.inf).squeeze(-1)


def merge_parts(
    out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the results for two parts of the keys: out (B, Q, queries, W), lse (B, Q, queries)."""
    merged_lse = torch.logaddexp(lse, lse_part)
    weight, weight_of_part = _weigh(lse, merged_lse), _weigh(lse_part, merged_lse)
    merged = weight * out + weight_of_part * out_part
    return merged, merged_lse


def _weigh(lse_part: Tensor, lse: Tensor) -> Tensor:
    """Return exp(lse_part - lse), or 0 for queries that see no key at all: (B, Q, queries, 1)."""
    return (lse_part - lse).exp().masked_fill(lse == -torch.inf, 0).unsqueeze(-1)


def compute_part_grads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, ...]:
    """Compute what one part of the keys adds to the gradients of queries, keys and values.

    Args:
        result: `out` and `lse` of all keys.
        grads: the gradients of `out` and `lse`.
        attend: computes the attention to the part again.
    """
    out, lse = result
    grad_out, grad_lse = grads
    with torch.enable_grad():
        inputs = tuple(x.detach().requires_grad_() for x in (query, key, value))
        out_part, lse_part = attend(*inputs)
        lse_finite = lse_part.masked_fill(lse_part == -torch.inf, 0)
    share = _weigh(lse_part.detach(), lse)
    difference = (grad_out * (out_part.detach() - out)).sum(-1)
    grad_lse_part = share.squeeze(-1) * (difference + grad_lse)
    outputs = out_part, lse_finite
    grads_of_outputs = (share * grad_out).to(out_part.dtype), grad_lse_part.to(lse_finite.dtype)
    return torch.autograd.grad(outputs, inputs, grads_of_outputs)


def slice_block_mask(mask: BlockMask, box: QueryKeyRange) -> BlockMask:
    """Build the BlockMask of some queries and keys of the whole sequence."""
    rows, heads, *_ = mask.shape
    sizes = box.q_stop - box.q_start, box.k_stop - box.k_start
    return build_block_mask(_shift(mask, box), (rows, heads, *sizes), mask.kv_num_blocks.device)


def _shift(mask: BlockMask, box: QueryKeyRange) -> MaskMod:
    return shift_mask(mask.mask_mod, box.q_start, box.k_start, mask.kv_num_blocks.device)


def _soft_cap(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, *indices: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


@cache
def _compiled_flex_attention() -> Any:
    """Compile FlexAttention; without compilation it would compute and store all scores."""
    return torch.compile(flex_attention)


def compute_once(computed: dict[Any, Any], key: Any, mask: Any, compute: Callable[[], Any]) -> Any:
    """Return the value that `computed` has for `key` and `mask`; compute and store it if missing.

    `computed` stores the id of the mask, and a weak reference that does not keep the mask alive.
    The reference reveals a new mask that has got the id of a deleted mask. `mask` may be None.
    """
    key = (*key, id(mask))
    found = computed.get(key)
    if found is None or (mask is not None and found[0]() is not mask):
        reference = None if mask is None else weakref.ref(mask)
        found = computed[key] = reference, compute()
    return found[1]
