"""A fake of flash attention on CPU, in any dtype, which is added to transformers' two registries.

It finds the documents of a packed row as `_flash_attention_forward` does (transformers,
modeling_flash_attention_utils.py): by `cu_seq_lens_q`, else by positions that restart at 0. Padding
is found by a 2-D mask, never by a mask of shape (B, 1, S, S). The fake computes plain SDPA, within
a window if there is one. If there are fewer queries than keys, the last query belongs to the last
key, as in flash attention. With attention sinks (one per head) the softmax has one more score.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "flash_stand_in"


def use_fake_flash(model: nn.Module) -> None:
    """Select the fake in every config of `model`, as attn_implementation= would."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, fake_flash)
    flash = ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = NAME


def fake_flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert module.config._attn_implementation == NAME, "stock code finds its kernel by this name"
    queries, keys = query.shape[2], key.shape[2]
    assert key.shape[1] * module.num_key_value_groups == query.shape[1]
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    document_q, document_k = (
        torch.zeros(query.shape[0], length, dtype=torch.int64) for length in (queries, keys)
    )
    valid_q, valid_k = document_q == 0, document_k == 0
    if attention_mask is not None:
        assert attention_mask.ndim == 2
        valid_k = attention_mask.bool()
        valid_q = valid_k[:, -queries:]
    elif cu_seq_lens_q is not None:
        ends_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        assert max_length_q == int(cu_seq_lens_q.diff().max())
        assert max_length_k in (None, int(ends_k.diff().max()))
        document_q = _numbers_of_documents(cu_seq_lens_q, queries)
        document_k = _numbers_of_documents(ends_k, keys)
    elif position_ids is not None and len(query) == 1:  # as `_is_packed_sequence` of stock
        document_q = document_k = position_ids.eq(0).cumsum(-1)
    keep = document_q.unsqueeze(2) == document_k.unsqueeze(1)
    keep = keep & valid_k.unsqueeze(1)
    ahead = _count_behind(document_k, valid_k).unsqueeze(1)
    ahead = ahead - _count_behind(document_q, valid_q).unsqueeze(2)
    causal = module.is_causal if is_causal is None else is_causal
    if causal:
        keep = keep & (ahead >= 0)
    if sliding_window is not None:
        keep = keep & (ahead.abs() < sliding_window)
    sees_nothing = ~keep.any(-1, keepdim=True)
    keep = keep | sees_nothing  # no scores of -inf alone, whose gradient is NaN
    if s_aux is None:
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=keep.unsqueeze(1), scale=scaling
        )
    else:
        scores = (query @ key.mT * scaling).masked_fill(~keep.unsqueeze(1), -torch.inf)
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        out = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value
    # Padding on the left sees no token. Flash attention does not compute it, and returns zeros.
    return out.masked_fill(sees_nothing.unsqueeze(1), 0).transpose(1, 2), None


def _numbers_of_documents(ends: Tensor, length: int) -> Tensor:
    """Return the number of the document of each token of one row, (1, length)."""
    assert int(ends[-1]) == length
    starts = torch.zeros(length, dtype=torch.int64)
    starts[ends[1:-1].long()] = 1
    return starts.cumsum(0).unsqueeze(0)


def _count_behind(document: Tensor, valid: Tensor) -> Tensor:
    """Count, for each token (B, length), the valid tokens of its document behind it."""
    same = (document.unsqueeze(2) == document.unsqueeze(1)) & valid.unsqueeze(1)
    return same.triu(1).sum(-1)
