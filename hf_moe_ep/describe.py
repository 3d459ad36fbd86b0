"""`describe(model)`: what was replaced, how it is laid out, what precision it trains in."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_moe_ep.state import STATE, ModelState, MoELayer, find_state
from hf_moe_ep.upstream.module_names import canonical_name, unwrap


def describe(model: nn.Module) -> str:
    """Report on a patched model in a few lines, to print; numbers are of the calling rank.

        >>> print(describe(patch(model, ep_size=2)))
        MyMoeForCausalLM (my_moe), patched by hf_moe_ep
          experts    2 layers of 8 (model.layers.0.mlp.experts .. model.layers.1.mlp.experts), ...
          layout     not sharded yet; asks for ep_size 2, sp_size 1, dp_replicate_size 1
          parameters 63,456 in the model, 63,456 on this rank

    Raises:
        ValueError: the model is not patched.
    """
    model = unwrap(model)
    state = find_state(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not patched; call patch(model) first")
    lines = [_header(model, state), _experts(model, state), _layout(state), _memory(model)]
    if state.meshes is not None:
        lines.append(_precision(model, state))
    return "\n".join(lines)


def _header(model: nn.Module, state: ModelState) -> str:
    name = type(model).__name__.removeprefix("FSDP")
    return f"{name} ({state.plan.model_type}), patched by hf_moe_ep"


def _experts(model: nn.Module, state: ModelState) -> str:
    layers = {
        canonical_name(name): layer
        for name, module in model.named_modules()
        if isinstance(layer := getattr(module, STATE, None), MoELayer)
    }
    names, compute = list(layers), next(iter(layers.values())).compute
    backend = "eager"
    if compute is not None:
        fallback = "asked for" if compute.required else "torch for fp64 and off the GPU"
        why = compute.reason or fallback
        backend = f"{compute.backend} ({'no triton: ' if compute.reason else ''}{why})"
    if compute is not None and compute.recompute:
        backend += ", pre-activations recomputed in backward"
    return (
        f"  experts    {len(names)} layers of {state.num_experts} ({names[0]} .. {names[-1]}), "
        f"backend {backend}"
    )


def _layout(state: ModelState) -> str:
    meshes, config = state.meshes, state.config
    if meshes is None:
        return (
            f"  layout     not sharded yet; asks for ep_size {config.ep_size}, sp_size "
            f"{config.sp_size}, dp_replicate_size {config.dp_replicate_size}"
        )
    ep_ranks = meshes.ep.mesh.tolist()
    local = state.num_experts // meshes.ep_size
    first = meshes.ep_rank * local
    return (
        f"  layout     {meshes.world_size} ranks = dp_replicate {config.dp_replicate_size} x "
        f"ep_fsdp {meshes.ep_fsdp_size} x ep {meshes.ep_size}; this rank: experts {first} .. "
        f"{first + local - 1}, ep group {ep_ranks}, sp group {meshes.sp.mesh.tolist()}"
    )


def _memory(model: nn.Module) -> str:
    whole = local = 0
    for parameter in model.parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole += parameter.numel()
        local += held.numel()
    return f"  parameters {whole:,} in the model, {local:,} on this rank"


def _precision(model: nn.Module, state: ModelState) -> str:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    policy = state.policy
    compute = policy.param_dtype if policy is not None and policy.param_dtype else "as stored"
    reduce_ = policy.reduce_dtype if policy is not None and policy.reduce_dtype else "as computed"
    return (
        f"  precision  stored {', '.join(dtypes)}; compute {compute}; gradients reduced "
        f"{reduce_}; {units} FSDP2 modules"
    ).replace("torch.", "")
