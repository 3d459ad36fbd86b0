"""Register the hooks that split sequences (sp_size or cp_size > 1) or separate packed documents.

causal LM             hooks that split the sequences and gather the outputs; a loss for slices
token classifier      the same
every decoder layer   a pre-forward hook that slices the arguments with one entry per token; a hook
                      that gathers the outputs, if the model keeps inputs of layers; a hook that
                      forgets the slice
attention modules     a copy of the config, which selects `split_attention` (ulysses.py: heads;
                      context.py: keys and values of other ranks, with cp_size > 1); for latent
                      attention, a hook that passes a cache, which gathers latents
                      (latent_cache.py)
modules with masks    with cp_size > 1, a view of the config, which selects a function that builds
                      only the mask rows of this rank (mask_rows.py)
mixers                hooks that gather the slices, and slice the output (mixers.py); attention
                      with an indexer may gather only keys; the forward of a mixer with a
                      convolution or recurrence may be replaced (recurrences.py)

If sequences are not split, a model with mixers, or a model whose masks do not separate documents,
gets hooks that run packed documents one by one:

causal LM             a pre-forward hook that finds the documents; a loss that drops the argument
                      with the documents and calls the stock loss
every decoder layer   a pre-forward hook that passes the bounds of the documents to its mixers, and
                      a hook that forgets them
mixers                the hooks of sp_size > 1, which gather nothing here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.derive import caches_latents, gathers_by_cache
from hf_moe_ep.model_patches.standard import MASKS_WITHOUT_POSITIONS
from hf_moe_ep.plan import as_pattern
from hf_moe_ep.sequence.context_calls import MODULE_PATH
from hf_moe_ep.sequence.kv_exchange import list_key_value_exchanges
from hf_moe_ep.sequence.latent_cache import GatherLatents
from hf_moe_ep.sequence.mask_rows import attach_mask_rows
from hf_moe_ep.sequence.mixer_arguments import read_mixer_arguments
from hf_moe_ep.sequence.mixers import (
    EndLayer,
    GatherArguments,
    LayerSlice,
    MixerSplit,
    SliceOutput,
)
from hf_moe_ep.sequence.packed_rows import SeparateDocuments
from hf_moe_ep.sequence.recurrences import run_slice
from hf_moe_ep.sequence.slice_arguments import read_layer_arguments
from hf_moe_ep.sequence.split import (
    EndForward,
    FindDocuments,
    GatherOutput,
    JoinLogits,
    PassDocuments,
    RunningSlice,
    SliceNorm,
    SplitSequence,
    TakeSlice,
    split_loss,
    split_token_loss,
)
from hf_moe_ep.sequence.ulysses import check_heads, wrap_attention
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.attention_interface import (
    check_attention,
    flash_aligns_first_query,
    make_attention_config,
)
from hf_moe_ep.upstream.causal_loss import passes_arguments_to_loss
from hf_moe_ep.upstream.models import list_attention_heads
from hf_moe_ep.upstream.module_names import get_canonical_name
from hf_moe_ep.upstream.recurrences import has_recurrence, mixes_by_convolution_alone


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if sp_size or cp_size is > 1 and sequences of this model cannot be split."""
    config = state.config
    sp_size, cp_size = config.sp_size or 1, config.cp_size or 1
    if config.ranks_per_batch == 1:
        return
    sizes, leave = _describe_sizes(config)
    if _find_loss_owner(parts) is None:
        raise ValueError(
            f"{sizes} > 1 needs a model that computes a loss of its tokens, and "
            f"{type(parts.root).__name__} has no head that does; load it as a causal LM or for "
            f"token classification, or {leave}"
        )
    if parts.causal_lm is not None and not passes_arguments_to_loss(parts.causal_lm):
        raise ValueError(
            f"{sizes} > 1 gives each rank the loss of its slice by an argument of the forward, and "
            f"in this version of transformers the forward of {type(parts.causal_lm).__name__} "
            f"passes no argument on to its loss; install a newer transformers, or {leave}"
        )
    for size, granted in (("sp_size", "sequence_parallel"), ("cp_size", "context_parallel")):
        asked = getattr(config, size) or 1
        if asked > 1 and not getattr(parts.plan, granted):
            raise ValueError(
                f"{size} ({asked}) > 1 was not tested on {parts.plan.model_type}; leave {size} at "
                f"1 (ep_size and FSDP2 work), or allow it yourself after a test: "
                f"patch(model, plan=ModelPlan(..., {granted}=True))"
            )
    _check_mixers(parts, sizes, leave)
    attention = find_split_attention(parts)
    if not attention and not any(parts.mixers):
        raise ValueError(
            f"{sizes} > 1 splits attention, and no module in the layers of "
            f"{type(parts.root).__name__} calls transformers' attention interface "
            f"(ALL_ATTENTION_FUNCTIONS); {leave}"
        )
    if attention:
        check_heads(list_attention_heads(parts.config), sp_size)
        check_attention(attention[0], parts.root, sizes)
        if cp_size > 1 and flash_aligns_first_query(attention[0]):
            raise ValueError(
                f"cp_size ({cp_size}) > 1 gives attention fewer queries than keys, and the "
                f"installed flash attention aligns the first query with the first key instead of "
                f"the last ones; load the model with attn_implementation='sdpa', or {leave}"
            )
    for layer in parts.layers:
        arguments = read_layer_arguments(layer, sizes)
        if arguments.model_keeps_inputs and not parts.final_norm:
            raise ValueError(
                f"{sizes} > 1 slices the output of the final norm, because "
                f"{type(parts.root).__name__} keeps the inputs of its layers, but no norm follows "
                f"the layers; {leave} (ep_size and FSDP2 work)"
            )


def _describe_sizes(config: ParallelConfig) -> tuple[str, str]:
    """Return the texts "sp_size (2)" and "leave sp_size at 1" of the sizes > 1, for errors."""
    sizes = {"cp_size": config.cp_size or 1, "sp_size": config.sp_size or 1}
    used = {name: size for name, size in sizes.items() if size > 1}
    text = " and ".join(f"{name} ({size})" for name, size in used.items())
    return text, f"leave {' and '.join(used)} at 1"


def _check_mixers(parts: Parts, sizes: str, leave: str) -> None:
    """Raise ValueError if a mixer cannot get whole sequences while its layer gets a slice."""
    experts = set(parts.experts.values())
    for mixers in parts.mixers:
        for name, module in mixers.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                why = "it has no forward of its own"
            elif not experts.isdisjoint(module.modules()):
                why = "it also contains the experts, which would get every token of each slice"
            else:
                continue
            raise ValueError(
                f"{sizes} > 1 runs the modules that mix along the sequence on whole sequences, but "
                f"not {name} ({type(module).__name__}) of {parts.plan.model_type}: {why}; {leave} "
                f"(ep_size and FSDP2 work)"
            )


def find_split_attention(parts: Parts) -> list[nn.Module]:
    """List the attention modules whose heads are split over the ranks.

    Every other attention module is part of a mixer, which computes all heads.
    """
    in_mixers = {
        inner for mixers in parts.mixers for child in mixers.values() for inner in child.modules()
    }
    return [module for module in parts.attention if module not in in_mixers]


def takes_zigzag_order(parts: Parts) -> bool:
    """Return True if cp ranks get the tokens of a sequence in zigzag order (`slices.py`).

    This order divides the work of causal attention evenly. Without a causal mask, the work is even
    in every order. Attention with an indexer or a compressor requires that the queries of a rank
    are consecutive tokens. All layers have the same order: in a model with both sliding windows and
    full attention, a second order would need an exchange of all tokens between the layers.
    """
    if MixerSplit.QUERIES in group_mixers_by_split(parts):
        return False
    return any(getattr(module, "is_causal", True) for module in find_split_attention(parts))


def group_mixers_by_split(parts: Parts) -> dict[MixerSplit, tuple[tuple[str, str], ...]]:
    """Return (pattern of the names, class) of all mixers, grouped by how they are divided."""
    names: dict[MixerSplit, set[tuple[str, str]]] = {split: set() for split in MixerSplit}
    for mixers in parts.mixers:
        for name, module in mixers.items():
            names[_find_split(module, parts)].add((as_pattern(name), type(module).__name__))
    return {split: tuple(sorted(found)) for split, found in names.items() if found}


def _find_split(module: nn.Module, parts: Parts) -> MixerSplit:
    if parts.plan.splits_mixers and has_recurrence(module):
        return MixerSplit.HEADS
    if parts.plan.splits_mixers and mixes_by_convolution_alone(module):
        return MixerSplit.HALO
    if parts.plan.gathers_keys and gathers_by_cache(module):
        return MixerSplit.QUERIES
    return MixerSplit.WHOLE


def attach(parts: Parts, state: ModelState) -> None:
    """Register the hooks, the loss and the attention function that the module docstring lists."""
    splits = group_mixers_by_split(parts)
    layer_slices = [LayerSlice() for _ in parts.layers]
    for layer_slice, mixers in zip(layer_slices, parts.mixers, strict=True):
        for name, module in mixers.items():
            arguments = read_mixer_arguments(name, module)
            split = _find_split(module, parts)
            gather = GatherArguments(layer_slice, arguments, split)
            if split in (MixerSplit.HEADS, MixerSplit.HALO) and state.config.ranks_per_batch > 1:
                stock = module.forward
                state.replace(module, "forward", partial(run_slice, module, gather, stock))
            module.register_forward_pre_hook(gather, with_kwargs=True)
            module.register_forward_hook(SliceOutput(gather))
    # The model around a language model (InternVL) has another type than the language model.
    model_types = {parts.plan.model_type, parts.config.model_type}
    separates = any(parts.mixers) or not model_types.isdisjoint(MASKS_WITHOUT_POSITIONS)
    if separates:
        _attach_separation(parts, layer_slices)
    if state.config.ranks_per_batch == 1:
        if separates:
            _attach_documents_to_mixers(parts, state, layer_slices)
            _attach_layer_ends(parts, layer_slices)
        return
    zigzag = (state.config.cp_size or 1) > 1 and takes_zigzag_order(parts)
    if (state.config.cp_size or 1) > 1:
        _attach_context(parts, state, zigzag)
    state.mixers = {split.value: names for split, names in splits.items()}
    select_attention(find_split_attention(parts), state, wrap_attention)
    running = RunningSlice()
    for index, layer in enumerate(parts.layers):
        layer_arguments = read_layer_arguments(layer, state.config.sequence_sizes)
        gets_whole = index == 0 or layer_arguments.model_keeps_inputs
        take_slice = TakeSlice(layer_arguments, layer_slices[index], gets_whole=gets_whole)
        layer.register_forward_pre_hook(take_slice, with_kwargs=True)
        if layer_arguments.model_keeps_inputs:
            layer.register_forward_hook(GatherOutput(layer_slices[index]))
            if index == len(parts.main_layers) - 1:
                parts.final_norm[0].register_forward_hook(SliceNorm(running, parts.root))
    _attach_layer_ends(parts, layer_slices)
    owner = _find_loss_owner(parts)
    split_sequence = SplitSequence(
        state, running, separates=separates, has_mixers=any(parts.mixers), zigzag=zigzag
    )
    owner.register_forward_pre_hook(split_sequence, with_kwargs=True)
    owner.register_forward_hook(JoinLogits(state), with_kwargs=True)
    owner.register_forward_hook(EndForward(running), always_call=True)
    _replace_loss(parts, state, running)


def _attach_layer_ends(parts: Parts, layer_slices: list[LayerSlice]) -> None:
    """Make the layers forget their slices after a forward.

    This hook must run after all hooks that read slices.
    """
    for layer, layer_slice in zip(parts.layers, layer_slices, strict=True):
        layer.register_forward_hook(EndLayer(layer_slice), always_call=True)


def _attach_context(parts: Parts, state: ModelState, zigzag: bool) -> None:
    """Attach what only cp_size > 1 needs, and store for `describe` how keys are exchanged."""
    attention = find_split_attention(parts)
    attach_mask_rows(parts, state)
    for module in filter(caches_latents, attention):
        module.register_forward_pre_hook(GatherLatents(), with_kwargs=True)
    names = {id(module): name for name, module in parts.root.named_modules()}
    named = [(get_canonical_name(names[id(module)]), module) for module in attention]
    for name, module in named:
        state.replace(module, MODULE_PATH, name)
    state.context = (zigzag, list_key_value_exchanges(named, state.config.sp_size or 1))


def _attach_separation(parts: Parts, layer_slices: list[LayerSlice]) -> None:
    """Make attention modules outside mixers separate packed documents."""
    attention = find_split_attention(parts)
    for layer, layer_slice in zip(parts.layers, layer_slices, strict=True):
        inner = set(layer.modules())
        for module in attention:
            if module in inner:
                arguments = read_mixer_arguments(type(module).__name__, module)
                separate = SeparateDocuments(layer_slice, arguments)
                module.register_forward_pre_hook(separate, with_kwargs=True)


def _attach_documents_to_mixers(
    parts: Parts, state: ModelState, layer_slices: list[LayerSlice]
) -> None:
    """Make mixers run packed documents one by one in a model whose sequences are not split."""
    for layer, layer_slice in zip(parts.layers, layer_slices, strict=True):
        layer.register_forward_pre_hook(PassDocuments(layer_slice), with_kwargs=True)
    owner = _find_loss_owner(parts)
    first = parts.root if owner is None else owner
    find = FindDocuments(has_mixers=any(parts.mixers))
    first.register_forward_pre_hook(find, with_kwargs=True)
    if parts.causal_lm is not None:
        _replace_loss(parts, state, RunningSlice())


def _find_loss_owner(parts: Parts) -> Any:
    """Return the module whose forward computes the loss of tokens, or None."""
    return parts.classifier if parts.causal_lm is None else parts.causal_lm


def _replace_loss(parts: Parts, state: ModelState, running: RunningSlice) -> None:
    owner = _find_loss_owner(parts)
    loss = partial(split_loss, owner.loss_function)
    if parts.causal_lm is None:
        loss = partial(split_token_loss, owner.loss_function, running)
    # Before this call, the attribute exists only if the user has set a loss (modeling_utils.py).
    state.replace(owner, "_loss_function", loss)


def select_attention(
    modules: Sequence[Any], state: ModelState, wrap: Callable[..., Any], *, frames: bool = False
) -> None:
    """Give attention modules a config that selects `wrap(stock function)`.

    `frames` is True for a vision tower. Its queries see only keys of the same frame, which is a
    picture, or one picture of a video.
    """
    stock = {id(module.config): module.config for module in modules}  # layers may differ
    ours = {
        key: make_attention_config(config, wrap, frames=frames) for key, config in stock.items()
    }
    for module in modules:
        state.replace(module, "config", ours[id(module.config)])
