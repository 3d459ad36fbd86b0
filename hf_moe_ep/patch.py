"""`patch` and `unpatch`: read this file first.

`patch` changes one model instance, and nothing that another model shares:

    every experts module    its own copy of the config, which selects our forward in transformers'
                            experts interface, and its place in the model (`MoELayer`)
    the root                the model's state, and a pre-forward hook that refuses to train
                            unsharded
    the causal LM           two hooks around forward that make the router's aux loss global
    a vision tower's owner  a pre-forward hook that runs the tower on every rank or on none
    with sp_size > 1        attention modules get a config that selects ours; the causal LM a loss
                            of slices; hooks on it, its layers and the tower split and join

It looks at the model only. What depends on the world is checked by `shard.py` when the model is
sharded: by `apply_ep_fsdp2`, or by Accelerate and the Trainer through `integrations/`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_moe_ep.architectures import find_plan
from hf_moe_ep.config import ParallelConfig, launched_rank, resolve_config
from hf_moe_ep.integrations.install import install
from hf_moe_ep.moe.aux_loss import GlobalAuxLoss, RestoreAuxLoss
from hf_moe_ep.moe.dispatch.deepep import load_deep_ep
from hf_moe_ep.moe.experts import choose_compute
from hf_moe_ep.moe.layer import ForwardGuard, moe_forward
from hf_moe_ep.moe.recompute import unwatch_checkpoints
from hf_moe_ep.plan import ModelPlan, matches
from hf_moe_ep.sequence.ulysses import (
    JoinLogits,
    SplitSequence,
    TakeSlice,
    attention_with,
    check_heads,
    split_loss,
)
from hf_moe_ep.state import STATE, Compute, ModelState, MoELayer
from hf_moe_ep.upstream.adapters import without_adapters, wraps_for_adapters
from hf_moe_ep.upstream.attention_interface import own_attention_config
from hf_moe_ep.upstream.experts_interface import (
    EXPERTS_IMPLEMENTATION,
    is_experts_module,
    own_experts_config,
    register_experts_forward,
)
from hf_moe_ep.upstream.models import output_head
from hf_moe_ep.upstream.module_names import stock_name
from hf_moe_ep.upstream.modules import own_children, remove_hooks
from hf_moe_ep.upstream.sharded_models import is_distributed_by_transformers, is_fsdp1
from hf_moe_ep.upstream.towers import takes_tower_outputs, tower_heads
from hf_moe_ep.vision.tower import (
    JoinFeatures,
    TakeDeepstack,
    TakePatches,
    TowerOnce,
    patch_attention_with,
)

_logger = logging.getLogger("hf_moe_ep")
_HOOKS = (
    ForwardGuard,
    GlobalAuxLoss,
    RestoreAuxLoss,
    TowerOnce,
    TakePatches,
    JoinFeatures,
    TakeDeepstack,
    SplitSequence,
    JoinLogits,
    TakeSlice,
)


def patch(model: nn.Module, config: ParallelConfig | None = None, **overrides: Any) -> nn.Module:
    """Prepare a stock MoE model, in place, for expert parallelism; returns it.

    Args:
        model: a Transformers model of a known architecture, as `from_pretrained` returns it.
            Not sharded, not wrapped in DDP.
        config: sizes and choices; `overrides` are its fields by name.

    Patching a patched model again with the same config changes nothing; with another config the
    new one counts.

    Raises:
        ValueError: unknown architecture; no experts found, or not the number that the config
            promises; `ep_size` does not divide the number of experts; a gate that no backend
            computes, or `experts_backend="triton"` where it cannot run; a model that is sharded
            already.
        ImportError: `dispatcher="deepep"` without DeepEP.
    """
    config = resolve_config(config, overrides)
    before: ModelState | None = getattr(model, STATE, None)
    if before is not None and before.meshes is None and before.config == config:
        return model
    check_unsharded(model)
    plan, model_config = find_plan(model)
    state = ModelState(config, plan, getattr(model_config, plan.num_experts))
    experts, tower = _find_experts(model, plan, model_config), _find_tower(model, plan)
    _check_ep_size(config, plan, model_config)
    _check_sp_size(model, config, model_config, tower)
    if config.dispatcher == "deepep":
        load_deep_ep()
    computes = [_compute_of(module, config) for module in experts.values()]
    if before is not None:
        unpatch(model)
    register_experts_forward(moe_forward)
    implementation = "eager" if config.experts_backend == "eager" else EXPERTS_IMPLEMENTATION
    own_config = own_experts_config(next(iter(experts.values())).config, implementation)
    for index, (module, compute) in enumerate(zip(experts.values(), computes, strict=True)):
        state.undo.append((module, "config", module.config))
        module.config = own_config
        setattr(module, STATE, MoELayer(index, state, compute))
    _hook_root(without_adapters(model), state)
    if tower is not None:
        _hook_tower(*tower, state)
    install()
    _log(model, state, list(experts), computes[0])
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Take everything of `patch` out of `model` again, in place; returns it.

    Raises:
        ValueError: the model was not patched, or was sharded since.
    """
    state: ModelState | None = getattr(model, STATE, None)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not patched; nothing to undo")
    if state.meshes is not None:
        raise ValueError(
            f"this model is sharded over {state.meshes.world_size} ranks; unpatch it before "
            "apply_ep_fsdp2 or accelerator.prepare"
        )
    for module in model.modules():
        remove_hooks(module, _is_ours)
    unwatch_checkpoints(model)
    for module, name, value in state.undo:
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    for module in model.modules():
        module.__dict__.pop(STATE, None)
    return model


def _is_ours(hook: object) -> bool:
    return isinstance(hook, _HOOKS)


def _find_experts(model: nn.Module, plan: ModelPlan, model_config: Any) -> dict[str, nn.Module]:
    """Name -> module of every MoE layer, in order; raises unless it is what the config promises."""
    experts = _find(model, plan.experts)
    others = [name for name, module in experts.items() if not is_experts_module(module)]
    expected = plan.num_moe_layers(model_config)
    if len(experts) != expected or expected == 0 or others:
        raise ValueError(
            f"found {len(experts)} experts modules named '{plan.experts}' in this "
            f"{type(model).__name__}, expected {expected} from its config"
            + (f"; not of transformers' experts interface: {', '.join(others)}" if others else "")
            + f". patch() wants the model as from_pretrained returns it, with at least one MoE "
            f"layer of {plan.model_type}"
        )
    return experts


def _find_tower(model: nn.Module, plan: ModelPlan) -> tuple[nn.Module, nn.Module] | None:
    """The module whose forward runs the vision tower, and the tower."""
    if plan.vision is None:
        return None
    for name, tower in model.named_modules():
        if matches(plan.vision.tower, stock_name(name)):
            inner = model.get_submodule(name.rpartition(".")[0])
            if takes_tower_outputs(inner):
                return inner, tower
            raise ValueError(
                f"{type(inner).__name__} of this transformers runs its vision tower itself; "
                f"{plan.model_type} needs transformers 5.23 or newer"
            )
    raise ValueError(
        f"found no vision tower named '{plan.vision.tower}' in this {type(model).__name__}; "
        f"patch() wants the model as from_pretrained returns it"
    )


def _check_ep_size(config: ParallelConfig, plan: ModelPlan, model_config: Any) -> None:
    num_experts, ep_size = getattr(model_config, plan.num_experts), config.ep_size or 1
    if num_experts % ep_size:
        sizes = [str(size) for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"ep_size ({ep_size}) must divide num_experts ({num_experts}) of {plan.model_type}; "
            f"try {', '.join(sizes)}"
        )


def _check_sp_size(
    model: nn.Module,
    config: ParallelConfig,
    model_config: Any,
    tower: tuple[nn.Module, nn.Module] | None,
) -> None:
    if config.sp_size == 1:
        return
    heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
    check_heads(heads, kv_heads, config.sp_size or 1)
    if tower is not None:
        check_heads(tower_heads(tower[1]), tower_heads(tower[1]), config.sp_size or 1)
    if _causal_lm(model) is None:
        raise ValueError(
            f"sp_size ({config.sp_size}) > 1 needs a model with a language modelling head, which "
            f"{type(model).__name__} has not; load it as a causal LM, or leave sp_size at 1"
        )


def _compute_of(module: nn.Module, config: ParallelConfig) -> Compute | None:
    if config.experts_backend == "eager":
        return None
    return choose_compute(module, config.experts_backend, recompute=config.recompute_activations)


def check_unsharded(model: nn.Module) -> None:
    """Raise where the model, or a part of it, was sharded or wrapped by anyone."""
    sharded = "pass the model as from_pretrained returns it, patch it, then shard it once"
    if isinstance(model, DistributedDataParallel):
        raise ValueError(f"the model is wrapped in DistributedDataParallel; {sharded}")
    if is_distributed_by_transformers(model):
        raise ValueError(f"transformers sharded this model when it loaded it; {sharded}")
    state: ModelState | None = getattr(model, STATE, None)
    if state is not None and state.meshes is not None:
        raise ValueError(f"the model is sharded by hf_moe_ep already; {sharded}")
    parts = [m for m in model.modules() if isinstance(getattr(m, STATE, None), MoELayer)]
    if any(getattr(part, STATE).model is not state for part in parts):
        raise ValueError(
            f"this {type(model).__name__} is part of a patched model; patch or unpatch the whole"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"FSDP2 shards parts of this model already; {sharded}")
    if is_fsdp1(model):
        raise ValueError(f"FSDP1 wraps parts of this model; {sharded}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(f"the model has DTensor parameters already; {sharded}")


def _hook_root(model: nn.Module, state: ModelState) -> None:
    setattr(model, STATE, state)
    model.register_forward_pre_hook(ForwardGuard(state))
    causal_lm, coefficient = _causal_lm(model), state.plan.aux_loss_coef
    if state.config.sp_size != 1:
        _hook_sequence(model, causal_lm, state)
    if coefficient is not None and causal_lm is not None:
        swap = GlobalAuxLoss(state, coefficient)
        causal_lm.register_forward_pre_hook(swap, with_kwargs=True)
        causal_lm.register_forward_hook(RestoreAuxLoss(swap), always_call=True)


def _causal_lm(model: nn.Module) -> Any:
    """The module that owns the head onto the vocabulary."""
    head = output_head(model)
    owners = (module for module in model.modules() if head in own_children(module))
    return None if head is None else next(owners, None)


def _hook_sequence(model: nn.Module, causal_lm: Any, state: ModelState) -> None:
    attention, layers = (_find(model, p) for p in (state.plan.attention, state.plan.layers))
    _swap_attention(list(attention.values()), state, attention_with)
    for index, layer in enumerate(layers.values()):
        layer.register_forward_pre_hook(TakeSlice(first=index == 0), with_kwargs=True)
    causal_lm.register_forward_pre_hook(SplitSequence(state), with_kwargs=True)
    causal_lm.register_forward_hook(JoinLogits(state), with_kwargs=True)
    # Where the user has set no loss, the model has no such attribute (modeling_utils.py).
    state.undo.append((causal_lm, "_loss_function", vars(causal_lm).get("_loss_function")))
    causal_lm.loss_function = partial(split_loss, causal_lm.loss_function)


def _hook_tower(inner: nn.Module, tower: nn.Module, state: ModelState) -> None:
    assert state.plan.vision is not None
    inner.register_forward_pre_hook(TowerOnce(state, tower), with_kwargs=True)
    if state.config.sp_size == 1:
        return
    attention = _find(inner, state.plan.vision.attention)
    _swap_attention(list(attention.values()), state, patch_attention_with, frames=True)
    tower.register_forward_pre_hook(TakePatches(), with_kwargs=True)
    tower.register_forward_hook(JoinFeatures(), with_kwargs=True)
    decoder, _, _ = next(iter(_find(inner, state.plan.layers))).rpartition(".")[0].rpartition(".")
    inner.get_submodule(decoder).register_forward_pre_hook(TakeDeepstack(), with_kwargs=True)


def _find(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if matches(pattern, stock_name(name)) and not wraps_for_adapters(module)
    }


def _swap_attention(
    modules: list[Any], state: ModelState, wrap: Callable[..., Any], *, frames: bool = False
) -> None:
    own_config = own_attention_config(modules[0].config, wrap, frames=frames)
    for module in modules:
        state.undo.append((module, "config", module.config))
        module.config = own_config


def _log(model: nn.Module, state: ModelState, names: list[str], compute: Compute | None) -> None:
    if launched_rank() == 0:
        _logger.info(
            "patched %s: %d MoE layers (%s .. %s) of %d experts, ep_size %d, experts backend %s",
            type(model).__name__,
            len(names),
            names[0],
            names[-1],
            state.num_experts,
            state.config.ep_size,
            "eager" if compute is None else compute.backend,
        )
