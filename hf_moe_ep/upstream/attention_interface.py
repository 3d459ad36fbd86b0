"""Transformers' attention and mask interfaces (modeling_utils.py, masking_utils.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_ep.upstream.experts_interface import EXPERTS_IMPLEMENTATION

_STOCK_CONFIG = "_hf_moe_ep_stock"


def own_attention_config(config: Any, wrap: Callable[..., Any], *, frames: bool = False) -> Any:
    """Return a copy of `config`, for attention modules alone, that selects `wrap(stock function)`.

    The name is registered for attention and for masks (modeling_utils.py, masking_utils.py): a name
    that is unknown to the second silently gets no mask. Where stock's name has "flash" in it, ours
    has too, because transformers searches names for that word.

    With `frames`, for a vision tower, `wrap` is called with `varlen=`, whether stock is a flash
    attention, and our name has "flash" in it in any case: transformers then leaves it to the
    function to keep frames apart. Otherwise it would cut the rows by the lengths of all frames,
    while a rank has only a slice of them.

    Raises:
        ValueError: the model's attention is not in transformers' interface.
    """
    check_attention(config)
    stock = config._attn_implementation
    kind = "flash_frames_" if frames else ""
    name = f"{EXPERTS_IMPLEMENTATION}_{kind}{stock}"
    options = {"varlen": "flash" in stock} if frames else {}
    ALL_ATTENTION_FUNCTIONS.register(name, wrap(ALL_ATTENTION_FUNCTIONS[stock], **options))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    own = copy.copy(config)
    own._attn_implementation_internal = name
    setattr(own, _STOCK_CONFIG, config)
    return own


def check_attention(config: Any) -> None:
    """Refuse attention that is not in transformers' interface, or that is "eager".

    Raises:
        ValueError: such an attention; the error names one that works.
    """
    stock = getattr(config, _STOCK_CONFIG, config)._attn_implementation
    if stock not in ALL_ATTENTION_FUNCTIONS.valid_keys() or stock == "eager":
        raise ValueError(
            f"sp_size > 1 splits attention by heads, which attn_implementation={stock!r} does not "
            f"allow; load the model with attn_implementation='sdpa' or 'flash_attention_2'"
        )


def stock_attention(module: nn.Module) -> Any:
    """Return a copy of an attention module with its stock config, from before our copy.

    Stock attention functions read the config to learn which flash attention to import
    (transformers/integrations/flash_attention.py).
    """
    module = copy.copy(module)
    module.config = getattr(module.config, _STOCK_CONFIG)
    return module
