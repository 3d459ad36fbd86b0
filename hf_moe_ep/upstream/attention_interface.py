"""Call our function around a stock attention function, through transformers' interfaces.

The private names come from transformers' modeling_utils.py and masking_utils.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import modeling_flash_attention_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_ep.upstream.experts_interface import EXPERTS_IMPLEMENTATION

# The attribute of our copy of a config that holds the stock config.
_STOCK_CONFIG = "_hf_moe_ep_stock"
# The interface has no function for the implementation "eager". A module with this implementation
# calls `eager_attention_forward` of the file that defines the module.
_EAGER, _EAGER_FUNCTION = "eager", "eager_attention_forward"
# The attribute of our copy of a config that holds the name of the stock function.
_WRAPPED_NAME = "_hf_moe_ep_wrapped_attention"
# The attribute of a view of a config that holds our function for masks.
_OWN_MASKS = "_hf_moe_ep_masks"


def make_attention_config(config: Any, wrap: Callable[..., Any], *, frames: bool = False) -> Any:
    """Return a copy of `config` with which attention modules call `wrap(stock function)`.

    The result of `wrap` is registered under a new name for attention. The name is also registered
    for masks, because transformers silently builds no mask for a name without a mask function. Our
    name contains stock's name, because transformers searches names for "flash".

    Args:
        config: the config of the attention modules. Only they may get the copy.
        wrap: takes the stock function and returns ours.
        frames: True for a vision tower. (A frame is a picture, or one picture of a video.) Our name
            then always contains "flash", so that transformers passes the boundaries of the frames
            to the function. Without "flash" transformers would split the rows at the boundaries
            itself, but a rank has only a slice of the rows. `wrap` also gets the argument `varlen`,
            which is True if stock's function is flash attention.
    """
    stock = config._attn_implementation
    kind = "flash_frames_" if frames else ""
    name = f"{EXPERTS_IMPLEMENTATION}_{kind}{stock}"
    options = {"varlen": "flash" in stock} if frames else {}
    function = _call_eager_of_file if stock == _EAGER else ALL_ATTENTION_FUNCTIONS[stock]
    ALL_ATTENTION_FUNCTIONS.register(name, wrap(function, **options))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    attention_config = copy.copy(config)
    attention_config._attn_implementation_internal = name
    setattr(attention_config, _STOCK_CONFIG, config)
    setattr(attention_config, _WRAPPED_NAME, stock)
    return attention_config


def builds_dense_masks(config: Any) -> bool:
    """Return True if transformers builds dense masks, of all queries and keys, for this config.

    `config` is None for a module that has no config.
    """
    return getattr(config, "_attn_implementation", None) in (_EAGER, "sdpa")


def make_mask_config(config: Any, build: Any) -> Any:
    """Return a view of `config` with which the functions that build masks call `build`.

    The view has the same attributes as `config`, including attributes that are set later, except
    the attention implementation. Transformers' functions for masks pass the config on to the mask
    function of this implementation (masking_utils.py, create_causal_mask), which calls
    `build(stock mask function, **arguments)`.

    While `build.applies()` is False, the view names the stock implementation, because some models
    compute something else if the name is not "sdpa".
    """
    stock = config._attn_implementation
    name = f"{EXPERTS_IMPLEMENTATION}_rows_{stock}"
    mask_function = partial(_call_own_masks, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask_function)

    class ConfigView(type(config)):  # type: ignore[misc]
        __slots__ = (_OWN_MASKS,)

        @property
        def _attn_implementation(self) -> str:
            own = getattr(self, _OWN_MASKS, None)  # None while a copy is made
            return name if own is not None and own.applies() else stock

        def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
            text = super().get_text_config(*args, **kwargs)
            is_view = text is self or not builds_dense_masks(text)
            return text if is_view else make_mask_config(text, getattr(self, _OWN_MASKS))

    view = object.__new__(ConfigView)
    object.__setattr__(view, "__dict__", vars(config))
    object.__setattr__(view, _OWN_MASKS, build)
    return view


def _call_own_masks(stock: Callable[..., Any], **kwargs: Any) -> Any:
    return getattr(kwargs["config"], _OWN_MASKS)(stock, **kwargs)


def check_attention(module: Any, model: Any = None, sizes: str = "sp_size") -> None:
    """Raise ValueError if sequence or context parallelism cannot split the attention of `module`.

    The implementation must be registered in transformers' interface. "eager" is accepted only for a
    model that does not support sdpa, such as a model with attention sinks.
    """
    stock = _get_stock_implementation(module)
    needs_eager = (
        stock == _EAGER
        and not getattr(model, "_supports_sdpa", True)
        and _EAGER_FUNCTION in _get_forward_globals(module)
    )
    if not needs_eager and (stock not in ALL_ATTENTION_FUNCTIONS.valid_keys() or stock == _EAGER):
        raise ValueError(
            f"{sizes} > 1 splits attention, which attn_implementation={stock!r} does not support; "
            f"load the model with attn_implementation='sdpa' or 'flash_attention_2'"
        )


def uses_flash_attention(module: Any) -> bool:
    """Return True if an attention module calls a flash attention function."""
    return "flash" in module.config._attn_implementation


def model_uses_flash_attention(model: Any) -> bool:
    """Return True if the layers of a language model call a flash attention function."""
    return "flash" in (model.config.get_text_config()._attn_implementation or "")


def model_builds_dense_masks(model: Any) -> bool:
    """Return True if the layers of a language model get dense masks, of all queries and keys."""
    return builds_dense_masks(model.config.get_text_config())


def uses_sdpa(module: Any) -> bool:
    """Return True if an attention module calls torch's scaled_dot_product_attention."""
    return bool(module.config._attn_implementation == "sdpa")


def uses_flex_attention(module: Any) -> bool:
    """Return True if an attention module calls FlexAttention."""
    return bool(module.config._attn_implementation == "flex_attention")


def is_eager(module: Any) -> bool:
    """Return True if an attention module calls the eager function of its file.

    This is also true if `make_attention_config` made the module's config: our function then calls
    the eager function.
    """
    return bool(_get_stock_implementation(module) == _EAGER)


def _get_stock_implementation(module: Any) -> Any:
    return getattr(module.config, _STOCK_CONFIG, module.config)._attn_implementation


def flash_aligns_first_query(module: Any) -> bool:
    """Return True if a module calls a flash attention that aligns the first query and first key.

    If there are fewer queries than keys, newer versions align the last query and the last key.
    """
    file = modeling_flash_attention_utils
    check = getattr(file, "flash_attn_supports_top_left_mask", None)
    return uses_flash_attention(module) and check is not None and bool(check())


def copy_with_stock_config(module: nn.Module) -> Any:
    """Return a copy of an attention module with the stock config.

    A stock attention function reads the name of its flash attention kernel from the module's config
    (transformers/integrations/flash_attention.py).

    Raises:
        ValueError: `set_attn_implementation` chose another attention after `patch`. transformers
            would build masks for that attention.
    """
    config, wrapped = getattr(module.config, _STOCK_CONFIG), getattr(module.config, _WRAPPED_NAME)
    if config._attn_implementation != wrapped:
        raise ValueError(
            f"attn_implementation was {wrapped!r} when this model was patched, and is "
            f"{config._attn_implementation!r} now, but {type(module).__name__} still computes the "
            f"first one; choose it before patch: from_pretrained(..., attn_implementation=...)"
        )
    module = copy.copy(module)
    module.config = config
    return module


def _call_eager_of_file(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the eager attention function in the file that defines the module."""
    return _get_forward_globals(module)[_EAGER_FUNCTION](module, *args, **kwargs)


def _get_forward_globals(module: Any) -> dict[str, Any]:
    """Return the globals of the file that defines the module's forward."""
    return inspect.unwrap(type(module).forward).__globals__
