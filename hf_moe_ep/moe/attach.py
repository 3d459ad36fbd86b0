"""What `patch` does for the MoE layers: choose how each is computed, and send it through us.

every experts module    its own copy of the config, which selects our forward in transformers'
                        experts interface, and its place in the model (`MoELayer`)
the root                pre-forward hooks: one refuses to train unsharded, one keeps the forwards
                        that we rely on, whoever replaces them, one says (with a hook behind
                        forward) which forwards count
the causal LM           hooks around its forward and its decoder's that make the router's aux loss
                        global, and, where that is asked for, each layer's own
every router            a hook behind forward, where each layer's own is asked for: logits for it
"""

from __future__ import annotations

from functools import partial

from torch import nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.moe.aux_loss import FinishAuxLoss, GlobalAuxLoss, MarkLogits
from hf_moe_ep.moe.counting import ForwardBegins, ForwardEnds
from hf_moe_ep.moe.dispatch.deepep import load_deep_ep
from hf_moe_ep.moe.experts import choose_compute
from hf_moe_ep.moe.forwards import KeepForwards, check_forwards, rely_on_forwards
from hf_moe_ep.moe.layer import ForwardGuard, moe_forward
from hf_moe_ep.moe.routers_alone import RoutersAlone, find_routers
from hf_moe_ep.ops.quantised import Quantisation, check_available
from hf_moe_ep.state import STATE, Compute, ModelState, MoELayer
from hf_moe_ep.upstream.experts_interface import (
    EXPERTS_IMPLEMENTATION,
    models_with_experts_implementation,
    own_experts_config,
    refuse_experts_implementation,
    register_experts_forward,
)
from hf_moe_ep.upstream.modules import pre_forward_hooks


def check(parts: Parts, state: ModelState) -> None:
    """Settle how every MoE layer is computed; raise where one cannot be."""
    _check_ep_size(parts, state.config)
    _check_aux_loss(parts, state.config)
    if state.config.dispatcher == "deepep":
        load_deep_ep()
    if (quantisation := _quantisation_of(state.config)) is not None:
        check_available(quantisation)
    for index, experts in enumerate(parts.experts.values()):
        state.moe_layers.append(MoELayer(index, state, _compute_of(experts, parts, state)))
    check_forwards(parts, state)


def attach(parts: Parts, state: ModelState) -> None:
    """Let every experts module call `moe_forward`, and hook the root and the causal LM."""
    register_experts_forward(moe_forward)
    implementation = EXPERTS_IMPLEMENTATION
    if state.config.experts_backend == "eager":
        implementation = "eager"
    experts = list(parts.experts.values())
    # Experts that Liger's class made have no config.
    own_config = own_experts_config(getattr(experts[0], "config", parts.config), implementation)
    for module, layer in zip(experts, state.moe_layers, strict=True):
        state.replace(module, "config", own_config)
        setattr(module, STATE, layer)
    for model in models_with_experts_implementation(parts.root):
        refuse = partial(refuse_experts_implementation, model)
        state.replace(model, "set_experts_implementation", refuse)
    rely_on_forwards(parts, state)
    parts.root.register_forward_pre_hook(KeepForwards(state))
    parts.root.register_forward_pre_hook(ForwardGuard(state))
    parts.root.register_forward_pre_hook(ForwardBegins(state))
    parts.root.register_forward_hook(ForwardEnds(state))
    coefficient = parts.plan.aux_loss_coef
    if coefficient is not None and parts.causal_lm is not None:
        alone = None
        if state.config.aux_loss_per_layer:
            alone = RoutersAlone()
            for router in find_routers(parts):
                router.register_forward_hook(alone, with_kwargs=True)
        aux_loss = GlobalAuxLoss(state, alone)
        aux_loss.install(parts.causal_lm)
        parts.causal_lm.register_forward_pre_hook(aux_loss, with_kwargs=True)
        for child in parts.causal_lm.children():
            if any(module is experts[0] for module in child.modules()):
                child.register_forward_hook(MarkLogits(aux_loss))
        parts.causal_lm.register_forward_hook(FinishAuxLoss(aux_loss), always_call=True)


def detach(model: nn.Module) -> None:
    """Give back what `attach` replaced outside of the model."""
    for module in model.modules():
        for hook in pre_forward_hooks(module):
            if isinstance(hook, GlobalAuxLoss):
                hook.give_back(module)


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
            f"({parts.plan.model_type}) computes a load-balancing loss; leave it out, and balance "
            f"with bias_update_rate where the routers have a correction bias"
        )
    if not find_routers(parts):
        raise ValueError(
            f"aux_loss_per_layer=True: in {parts.plan.model_type} no module is the router alone, "
            f"and the loss is to be felt by routers alone; leave it out"
        )


def _compute_of(experts: nn.Module, parts: Parts, state: ModelState) -> Compute | None:
    config = state.config
    if config.experts_backend == "eager":
        return None
    return choose_compute(
        experts,
        config.experts_backend,
        recompute=config.recompute_activations,
        model_type=parts.plan.model_type,
        quantisation=_quantisation_of(config),
    )


def _quantisation_of(config: ParallelConfig) -> Quantisation | None:
    if config.experts_dtype is None:
        return None
    return Quantisation(config.experts_dtype, nested=config.experts_double_quant)
