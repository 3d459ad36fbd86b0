"""`describe(model)`: a report on the experts, the layout and the precision of a patched model."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_moe_ep.ranks.mesh import ranks_in_node
from hf_moe_ep.state import (
    STATE,
    Compute,
    ModelState,
    MoELayer,
    find_state,
    quantised_matrices,
)
from hf_moe_ep.upstream.module_names import canonical_name, unwrap


def describe(model: nn.Module) -> str:
    """Return a report of a few lines on a patched model.

    The experts and groups of ranks in the report are those of the calling rank.

        >>> print(describe(patch(model, ep_size=2)))
        MyMoeForCausalLM (my_moe), patched by hf_moe_ep; plan derived
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
    lines = [_header(model, state), _experts(model, state), _layout(state), _parameters(model)]
    lines += _mtp(state)
    lines += _sequence(state)
    lines += _balance(state)
    if state.meshes is not None:
        lines.append(_precision(model, state))
    return "\n".join(lines)


def _header(model: nn.Module, state: ModelState) -> str:
    """Return the first line: the class of the model, its type, and the origin of its plan."""
    name = type(model).__name__.removeprefix("FSDP")
    origin = state.plan.origin
    return f"{name} ({state.plan.model_type}), patched by hf_moe_ep; plan {origin}"


def _experts(model: nn.Module, state: ModelState) -> str:
    """Return the line about the MoE layers: number, names, and the backend of the experts."""
    layers = {
        canonical_name(name): layer
        for name, module in model.named_modules()
        if isinstance(layer := getattr(module, STATE, None), MoELayer)
    }
    names = list(layers)
    return (
        f"  experts    {len(names)} layers of {state.num_experts} ({names[0]} .. {names[-1]}), "
        f"backend {_backend(layers[names[0]].compute)}{_experts_dtype(model, state)}"
    )


def _experts_dtype(model: nn.Module, state: ModelState) -> str:
    """Return the format and the bytes per parameter of quantised experts; "" for stock dtypes."""
    config = state.config
    if config.experts_dtype is None:
        return ""
    nested = ", double quantisation" if config.experts_double_quant else ""
    num_bytes = num_parameters = 0
    for name, stored, quantisation in quantised_matrices(model):
        num_bytes += sum(tensor.nbytes for tensor in stored.by_name(name).values())
        num_parameters += quantisation.num_values(stored.values)
    if not num_parameters:
        return f"; to be held in {config.experts_dtype}{nested} when the model is sharded"
    per_parameter = num_bytes / num_parameters
    return f"; held in {config.experts_dtype}{nested}, {per_parameter:.4f} bytes per parameter"


def _backend(compute: Compute | None) -> str:
    """Return the name of the experts' backend, and why it was chosen."""
    if compute is None:
        return "eager"
    if compute.reason:
        why = f"no triton: {compute.reason}"
    elif compute.required:
        why = "requested"
    else:
        why = "torch for fp64 tensors and for tensors that are not on a GPU"
    recomputes = ", pre-activations recomputed in backward" if compute.recompute else ""
    return f"{compute.backend} ({why}){recomputes}"


def _layout(state: ModelState) -> str:
    """Return the line about the layout: mesh sizes, and the experts and groups of this rank."""
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
        f"{first + local - 1}, ep group {ep_ranks}{_nodes(state)}, sp group "
        f"{meshes.sp.mesh.tolist()}"
    )


def _nodes(state: ModelState) -> str:
    """Return how the ep group is spread over nodes; "" without hierarchical dispatch."""
    meshes = state.meshes
    if meshes is None or state.config.dispatcher != "hierarchical" or meshes.ep_size == 1:
        return ""
    in_node = ranks_in_node([meshes.ep.mesh.tolist()], meshes.node_size)
    grid = f"{meshes.ep_size // in_node} x {in_node}"
    if meshes.nodes is None:
        return f" (nodes x ranks: {grid}, so hierarchical dispatch is the same as all_to_all)"
    return f" (nodes x ranks: {grid}, a token is sent to each node at most once)"


# What sp_size does not divide, by how a mixer is divided (`Split` in sequence/gather.py).
_NOT_DIVIDED = {
    "not": "gathered for {}; the computation and activations of these modules are not divided",
    "queries": "keys gathered for {}; the keys and values of these modules are not divided",
    "heads": "heads split in {}; everything is divided",
    "halo": "tokens of the previous rank sent for {}; everything is divided",
}


def _sequence(state: ModelState) -> list[str]:
    """Return the lines about the modules that mix tokens outside of attention, if there are any."""
    return [
        f"  sequence   {_NOT_DIVIDED[split].format(', '.join(f'{n} ({c})' for n, c in modules))} "
        f"by sp_size {state.config.sp_size}"
        for split, modules in state.mixers.items()
    ]


def _mtp(state: ModelState) -> list[str]:
    """Return the line about the head for multi-token prediction, if it is trained."""
    num_layers, weight = state.config.mtp_layers, state.config.mtp_loss_weight
    layers = f"{num_layers} layer{'s' if num_layers > 1 else ''}"
    return [f"  mtp        {layers}, loss weight {weight:g}"] if num_layers else []


def _balance(state: ModelState) -> list[str]:
    """Return the line about the methods that balance the load of the experts, if any is used."""
    methods = []
    if (rate := state.config.bias_update_rate) is not None:
        num_biases = sum(layer.correction is not None for layer in state.moe_layers)
        methods.append(f"biases of {num_biases} routers move by {rate:g} after each optimizer step")
    if state.config.aux_loss_per_layer:
        weight = state.plan.aux_loss_coef
        methods.append(f"mean of the layers' aux losses times {weight}, trains only routers")
    if num_moved := sum(layer.placement is not None for layer in state.moe_layers):
        methods.append(f"experts of {num_moved} layers were moved by balance_experts")
    return [f"  balance    {'; '.join(methods)}"] if methods else []


def _parameters(model: nn.Module) -> str:
    """Return the line about the number of parameters, in the model and on this rank."""
    # A byte of a quantised matrix counts as the values that it encodes. Scales do not count.
    values_per_element: dict[int, int] = {}
    for name, stored, quantisation in quantised_matrices(model):
        values_per_element |= {id(tensor): 0 for tensor in stored.by_name(name).values()}
        values_per_element[id(stored.values)] = quantisation.values_per_byte
    whole = local = 0
    for parameter in model.parameters():
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        num_values = values_per_element.get(id(parameter), 1)
        whole += parameter.numel() * num_values
        local += shard.numel() * num_values
    return f"  parameters {whole:,} in the model, {local:,} on this rank"


def _precision(model: nn.Module, state: ModelState) -> str:
    """Return the line about the dtypes of parameters, computation and gradient reduction."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    policy = state.policy
    compute_dtype = policy.param_dtype if policy is not None else None
    reduce_dtype = policy.reduce_dtype if policy is not None else None
    return (
        f"  precision  stored {', '.join(dtypes)}; compute {compute_dtype or 'as stored'}; "
        f"gradients reduced {reduce_dtype or 'as computed'}; {units} FSDP2 modules"
    ).replace("torch.", "")
