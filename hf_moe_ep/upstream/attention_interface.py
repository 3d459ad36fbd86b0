"""Transformers' attention and mask interfaces (modeling_utils.py, masking_utils.py)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_ep.upstream.experts_interface import EXPERTS_IMPLEMENTATION

_STOCK_CONFIG = "_hf_moe_ep_stock"
# What a module calls for "eager", which no interface has: a function of its own file.
_EAGER, _EAGER_FUNCTION = "eager", "eager_attention_forward"


def own_attention_config(config: Any, wrap: Callable[..., Any], *, frames: bool = False) -> Any:
    """Return a copy of `config`, for attention modules alone, that selects `wrap(stock function)`.

    The name is registered for attention and for masks (modeling_utils.py, masking_utils.py): a name
    that is unknown to the second silently gets no mask. Where stock's name has "flash" in it, ours
    has too, because transformers searches names for that word.

    With `frames`, for a vision tower, `wrap` is called with `varlen=`, whether stock is a flash
    attention, and our name has "flash" in it in any case: transformers then leaves it to the
    function to keep frames apart. Otherwise it would cut the rows by the lengths of all frames,
    while a rank has only a slice of them.
    """
    stock = config._attn_implementation
    kind = "flash_frames_" if frames else ""
    name = f"{EXPERTS_IMPLEMENTATION}_{kind}{stock}"
    options = {"varlen": "flash" in stock} if frames else {}
    function = _own_eager if stock == _EAGER else ALL_ATTENTION_FUNCTIONS[stock]
    ALL_ATTENTION_FUNCTIONS.register(name, wrap(function, **options))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    own = copy.copy(config)
    own._attn_implementation_internal = name
    setattr(own, _STOCK_CONFIG, config)
    return own


def check_attention(module: Any, model: Any = None) -> None:
    """Refuse attention that is not in transformers' interface, or "eager" where `model` has sdpa.

    Attention with sinks has no sdpa, so that eager is what its models are loaded with.

    Raises:
        ValueError: such an attention; the error names one that works.
    """
    stock = getattr(module.config, _STOCK_CONFIG, module.config)._attn_implementation
    eager = (
        stock == _EAGER
        and not getattr(model, "_supports_sdpa", True)
        and _EAGER_FUNCTION in (_file_of(module))
    )
    if not eager and (stock not in ALL_ATTENTION_FUNCTIONS.valid_keys() or stock == _EAGER):
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


def _own_eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what a module's own file calls eager attention."""
    return _file_of(module)[_EAGER_FUNCTION](module, *args, **kwargs)


def _file_of(module: Any) -> dict[str, Any]:
    return inspect.unwrap(type(module).forward).__globals__
