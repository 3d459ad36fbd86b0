"""Attach the MoE layers: choose how each layer is computed, and make transformers call our forward.

every experts module    gets a copy of the config, which selects our forward in transformers'
                        experts interface, and a `MoELayer`, its record in the model's state
the root                gets pre-forward hooks: `KeepForwards` restores or refuses replaced
                        forwards, `ForwardGuard` refuses a model that needs sharding but is not
                        sharded, and `BeginCounting` (with the forward hook `EndCounting`) decides
                        whether the tokens of a forward are counted (`counting.py`)
shared experts          get a forward that runs while results are sent back, if tokens are sent to
                        other ranks (`shared_experts.py`)
the causal LM           gets the hooks that find padding tokens (`padding.py`), and the hooks of the
                        aux loss over all ranks (`aux_loss.py`)
"""

from __future__ import annotations

from functools import partial
from types import MethodType

from torch import nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.etp import check_cut
from hf_moe_ep.moe.aux_loss import attach_aux_loss
from hf_moe_ep.moe.counting import attach_counting
from hf_moe_ep.moe.dispatch.deepep import load_deep_ep
from hf_moe_ep.moe.experts import choose_compute
from hf_moe_ep.moe.forwards import KeepForwards, check_forwards, record_forwards
from hf_moe_ep.moe.layer import ForwardGuard, moe_forward
from hf_moe_ep.moe.padding import attach_padding
from hf_moe_ep.moe.recompute import SetMayRoute
from hf_moe_ep.moe.routers_alone import find_routers
from hf_moe_ep.moe.shared_experts import attach_shared_experts
from hf_moe_ep.moe.stacked import StackedExperts
from hf_moe_ep.ops.quantised import Quantisation, check_available
from hf_moe_ep.state import STATE, Compute, ModelState, MoELayer
from hf_moe_ep.upstream.code import uses_name
from hf_moe_ep.upstream.experts_interface import (
    EXPERTS_IMPLEMENTATION,
    make_experts_config,
    refuse_experts_implementation,
    register_experts_forward,
)


def check(parts: Parts, state: ModelState) -> None:
    """Choose how every MoE layer is computed; raise ValueError if the config cannot be met."""
    _check_ep_size(parts, state.config)
    _check_aux_loss(parts, state.config)
    if state.config.dispatcher == "deepep":
        load_deep_ep()
    if (quantisation := _make_quantisation(state.config)) is not None:
        check_available(quantisation)
    for index, experts in enumerate(parts.experts.values()):
        layer = MoELayer(index, state, _decide_compute(experts, parts, state))
        layer.may_choose_no_expert = _has_identity_experts(experts, state.config)
        state.moe_layers.append(layer)
    check_forwards(parts, state)


def attach(parts: Parts, state: ModelState) -> None:
    """Make `moe_forward` the forward of every experts module, and register all hooks."""
    register_experts_forward(moe_forward)
    implementation = EXPERTS_IMPLEMENTATION
    if state.config.experts_backend == "eager":
        implementation = "eager"
    experts = list(parts.experts.values())
    for module in experts:
        if isinstance(module, StackedExperts):
            _replace_block_forward(module, state)
    # Experts modules of Liger's class have no config.
    config_copy = make_experts_config(getattr(experts[0], "config", parts.config), implementation)
    for module, layer in zip(experts, state.moe_layers, strict=True):
        state.replace(module, "config", config_copy)
        setattr(module, STATE, layer)
    for model in parts.root.modules():
        if hasattr(type(model), "set_experts_implementation"):
            refuse = partial(refuse_experts_implementation, model)
            state.replace(model, "set_experts_implementation", refuse)
    record_forwards(parts, state)
    parts.root.register_forward_pre_hook(KeepForwards(state))
    parts.root.register_forward_pre_hook(ForwardGuard(state))
    _mark_routing_modules(parts, state)
    attach_counting(parts, state)
    attach_shared_experts(parts.root, state)
    attach_padding(parts, state)
    attach_aux_loss(parts, state)


def _replace_block_forward(experts: StackedExperts, state: ModelState) -> None:
    """Replace the forward of a MoE block if the plan gives it another forward."""
    block = experts.block
    if experts.description.forward is not None:
        state.replace(block, "forward", MethodType(experts.description.forward, block))


def _mark_routing_modules(parts: Parts, state: ModelState) -> None:
    """Register hooks that record whether a router may call topk at this point of the forward.

    If a plan describes the MoE blocks of a model, routers run only inside of these blocks (the
    attention of JetMoE calls topk as well). In other models routers may run everywhere except in
    attention modules that call topk: the indexer of DeepSeek-V3.2 may call topk with the sizes of a
    router's call.
    """
    blocks = [
        module.block for module in parts.experts.values() if isinstance(module, StackedExperts)
    ]
    state.may_route = not blocks
    attention = [] if blocks else parts.attention
    indexed = [a for a in attention if any(uses_name(module, "topk") for module in a.modules())]
    for module in (*blocks, *indexed):
        module.register_forward_pre_hook(SetMayRoute(state, bool(blocks)))
        module.register_forward_hook(SetMayRoute(state, not blocks), always_call=True)


def _check_ep_size(parts: Parts, config: ParallelConfig) -> None:
    num_experts, ep_size = parts.num_experts, config.ep_size or 1
    if num_experts % ep_size:
        sizes = [str(size) for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"ep_size ({ep_size}) must divide num_experts ({num_experts}) of "
            f"{parts.plan.model_type}; try {', '.join(sizes)}"
        )


def _check_aux_loss(parts: Parts, config: ParallelConfig) -> None:
    if not config.aux_loss_per_layer:
        return
    if parts.plan.aux_loss_coef is None or parts.causal_lm is None:
        raise ValueError(
            f"aux_loss_per_layer=True: no forward of {type(parts.root).__name__} "
            f"({parts.plan.model_type}) computes a load-balancing loss; leave aux_loss_per_layer "
            f"out, and balance with bias_update_rate if the routers have a correction bias"
        )
    if not find_routers(parts):
        raise ValueError(
            f"aux_loss_per_layer=True runs each router a second time, but the routers of "
            f"{parts.plan.model_type} are not separate modules; leave aux_loss_per_layer out"
        )


def _decide_compute(experts: nn.Module, parts: Parts, state: ModelState) -> Compute | None:
    config = state.config
    if config.experts_backend == "eager":
        if isinstance(experts, StackedExperts):
            raise ValueError(
                f"experts_backend='eager' runs the model's own experts, but those of "
                f"{parts.plan.model_type} do not use transformers' experts interface, and "
                f"hf_moe_ep replaces them; use experts_backend='torch'"
            )
        return None
    etp_size = config.etp_size or 1
    compute = choose_compute(
        experts,
        config.experts_backend,
        recompute=config.recompute_activations,
        model_type=parts.plan.model_type,
        quantisation=_make_quantisation(config),
        etp_size=etp_size,
    )
    check_cut(experts, compute, etp_size, model_type=parts.plan.model_type)
    return compute


def _has_identity_experts(experts: nn.Module, config: ParallelConfig) -> bool:
    """Return True if some experts return their input; raise ValueError for DeepEP then."""
    if not isinstance(experts, StackedExperts) or not experts.num_identity_experts:
        return False
    if config.dispatcher == "deepep":
        raise ValueError(
            f"dispatcher='deepep' sends every token to {experts.num_experts} experts, but "
            f"{experts.num_identity_experts} more experts of this model return their input, and no "
            f"token is sent to them; use dispatcher='all_to_all' or 'hierarchical'"
        )
    return True


def _make_quantisation(config: ParallelConfig) -> Quantisation | None:
    if config.experts_dtype is None:
        return None
    return Quantisation(config.experts_dtype, nested=config.experts_double_quant)
