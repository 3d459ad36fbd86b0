"""Register the hooks of sequence parallelism (sp_size > 1).

causal LM             hooks that split the sequences and gather the outputs; a loss for slices
every decoder layer   a pre-forward hook that slices the arguments with one entry per token
attention modules     a copy of the config, which selects `split_attention`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hf_moe_ep.architectures import Parts
from hf_moe_ep.derive import is_mixer
from hf_moe_ep.plan import matches
from hf_moe_ep.sequence.layer_arguments import arguments_of
from hf_moe_ep.sequence.split import JoinLogits, SplitSequence, TakeSlice, split_loss
from hf_moe_ep.sequence.ulysses import check_heads, wrap_attention
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.attention_interface import check_attention, own_attention_config
from hf_moe_ep.upstream.models import attention_heads
from hf_moe_ep.upstream.module_names import stock_name

_REMEDY = "leave sp_size at 1 (ep_size and FSDP2 work)"


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if sp_size > 1 and the sequences of this model cannot be split."""
    sp_size = state.config.sp_size or 1
    if sp_size == 1:
        return
    _check_mixers(parts, sp_size)
    if parts.causal_lm is None:
        raise ValueError(
            f"sp_size ({sp_size}) > 1 needs a model with a language modelling head, and "
            f"{type(parts.root).__name__} has none; load it as a causal LM, or leave sp_size at 1"
        )
    if not parts.plan.sequence_parallel:
        raise ValueError(
            f"sp_size ({sp_size}) > 1 was not tested on {parts.plan.model_type}; {_REMEDY}, or "
            f"allow it yourself after a test: "
            f"patch(model, plan=ModelPlan(..., sequence_parallel=True))"
        )
    if not parts.attention:
        raise ValueError(
            f"sp_size ({sp_size}) > 1 splits attention by heads, and no module in the layers of "
            f"{type(parts.root).__name__} calls transformers' attention interface "
            f"(ALL_ATTENTION_FUNCTIONS); leave sp_size at 1"
        )
    for heads, kv_heads in sorted(attention_heads(parts.config)):
        check_heads(heads, kv_heads, sp_size)
    check_attention(parts.attention[0], parts.root)
    for layer in parts.layers:
        arguments_of(layer, sp_size)


def _check_mixers(parts: Parts, sp_size: int) -> None:
    """Raise ValueError if a module other than attention mixes tokens along the sequence.

    Attention gets whole sequences, split over heads. Any other module gets only a slice.
    """
    plan = parts.plan
    if plan.mixers:
        # A module with the same name in another layer may be attention, or may not mix tokens.
        kinds = {
            f"{name} ({type(module).__name__})"
            for name in plan.mixers
            for other, module in parts.root.named_modules()
            if matches(name, stock_name(other)) and is_mixer(module)
        } or set(plan.mixers)
        raise ValueError(
            f"sp_size ({sp_size}) > 1 splits sequences, and only attention sees the whole, but "
            f"{plan.model_type} also mixes along the sequence in {', '.join(sorted(kinds))}, "
            f"which does not use transformers' attention interface; {_REMEDY}"
        )


def attach(parts: Parts, state: ModelState) -> None:
    """Register the hooks, the loss and the attention function of the module docstring."""
    if state.config.sp_size == 1:
        return
    select_attention(parts.attention, state, wrap_attention)
    for index, layer in enumerate(parts.layers):
        take_slice = TakeSlice(arguments_of(layer, state.config.sp_size or 1), first=index == 0)
        layer.register_forward_pre_hook(take_slice, with_kwargs=True)
    causal_lm = parts.causal_lm
    causal_lm.register_forward_pre_hook(SplitSequence(state), with_kwargs=True)
    causal_lm.register_forward_hook(JoinLogits(state), with_kwargs=True)
    # Before this call, the attribute exists only if the user has set a loss (modeling_utils.py).
    state.replace(causal_lm, "_loss_function", partial(split_loss, causal_lm.loss_function))


def select_attention(
    modules: Sequence[Any], state: ModelState, wrap: Callable[..., Any], *, frames: bool = False
) -> None:
    """Give attention modules a config that selects `wrap(stock function)`.

    `frames` is True for a vision tower, whose attention stays within a frame: a picture, or one
    picture of a video.
    """
    stock = {id(module.config): module.config for module in modules}  # layers may differ
    ours = {key: own_attention_config(config, wrap, frames=frames) for key, config in stock.items()}
    for module in modules:
        state.replace(module, "config", ours[id(module.config)])
