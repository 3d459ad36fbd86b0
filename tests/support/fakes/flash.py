"""A fake of flash attention on CPU, in any dtype, which is added to transformers' two registries.

It finds the documents of a packed row as `_flash_attention_forward` does (transformers,
modeling_flash_attention_utils.py): by `cu_seq_lens_q`, else by positions that restart at 0. Padding
is found by a 2-D mask, never by a mask of shape (B, 1, S, S). The fake computes plain SDPA, within
a window if there is one. With attention sinks (one per head) the softmax has one more score.
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
    max_length_q: int | None = None,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert module.config._attn_implementation == NAME, "stock code finds its kernel by this name"
    length = query.shape[2]
    assert key.shape[1] * module.num_key_value_groups == query.shape[1]
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    document = torch.zeros(query.shape[0], length, dtype=torch.int64)
    if cu_seq_lens_q is not None:
        assert int(cu_seq_lens_q[-1]) == length
        assert max_length_q == int(cu_seq_lens_q.diff().max())
        starts = torch.zeros(length, dtype=torch.int64)
        starts[cu_seq_lens_q[1:-1].long()] = 1
        document = starts.cumsum(0).expand_as(document)
    elif position_ids is not None and attention_mask is None:
        document = position_ids.eq(0).cumsum(-1)
    keep = document.unsqueeze(2) == document.unsqueeze(1)
    if attention_mask is not None:
        assert attention_mask.ndim == 2
        keep = keep & attention_mask.bool().unsqueeze(1)
    if module.is_causal if is_causal is None else is_causal:
        keep = keep.tril()
    if sliding_window is not None:
        keep = keep.triu(1 - sliding_window)
    # Padding on the left sees no token. Its outputs are not used, but must not become NaN.
    keep = keep | ~keep.any(-1, keepdim=True)
    if s_aux is None:
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=keep.unsqueeze(1), scale=scaling
        )
    else:
        scores = (query @ key.mT * scaling).masked_fill(~keep.unsqueeze(1), -torch.inf)
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        out = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value
    return out.transpose(1, 2), None
