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
    """A copy of `config` for attention modules alone, which selects `wrap(stock function)`.

    Registered for attention and for masks (modeling_utils.py, masking_utils.py): a name that the
    second does not know silently gets no mask. "flash" stays in the name, upstream asks for it.

    With `frames`, for a vision tower, `wrap` is told by `varlen=` whether stock is a flash
    attention, and "flash" is in every name: upstream then leaves it to the function to keep frames
    apart, instead of cutting its rows by lengths of which it has a slice only.

    Raises:
        ValueError: the model's attention is not in transformers' interface.
    """
    check_attention(config)
    stock = config._attn_implementation
    name = f"{EXPERTS_IMPLEMENTATION}_{'flash_frames_' if frames else ''}{stock}"
    how = {"varlen": "flash" in stock} if frames else {}
    ALL_ATTENTION_FUNCTIONS.register(name, wrap(ALL_ATTENTION_FUNCTIONS[stock], **how))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    own = copy.copy(config)
    own._attn_implementation_internal = name
    setattr(own, _STOCK_CONFIG, config)
    return own


def check_attention(config: Any) -> None:
    """Raise where a model's attention, ours or stock, is not in transformers' interface."""
    stock = getattr(config, _STOCK_CONFIG, config)._attn_implementation
    if stock not in ALL_ATTENTION_FUNCTIONS.valid_keys() or stock == "eager":
        raise ValueError(
            f"sp_size > 1 splits attention by heads, which attn_implementation={stock!r} does not "
            f"allow; load the model with attn_implementation='sdpa' or 'flash_attention_2'"
        )


def stock_attention(module: nn.Module) -> Any:
    """A copy of an attention module with the config that `own_attention_config` was made of.

    Stock functions read from it which flash attention to import (integrations/flash_attention.py).
    """
    module = copy.copy(module)
    module.config = getattr(module.config, _STOCK_CONFIG)
    return module
