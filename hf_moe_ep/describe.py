"""`describe(model)`: a report on the experts, the layout and the precision of a patched model."""

from __future__ import annotations

import math

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.pipeline.schedule import compute_bubble
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.ranks.mesh import Meshes, count_ranks_in_node
from hf_moe_ep.sequence.kv_exchange import KeyValueExchange
from hf_moe_ep.state import (
    Compute,
    ModelState,
    find_state,
    iterate_experts_modules,
    iterate_quantised_matrices,
)
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap


def describe(model: nn.Module) -> str:
    """Return a report of a few lines on a patched model.

    The report shows the experts and the groups of the calling rank.

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
    lines = [
        _describe_model(model, state),
        _describe_experts(model, state),
        _describe_layout(state),
        _describe_parameters(model),
    ]
    lines += _describe_mtp(state)
    lines += _describe_stages(state)
    lines += _describe_context(model, state)
    lines += _describe_sequence(state)
    lines += _describe_balance(state)
    lines += _describe_buffers(state)
    if state.meshes is not None:
        lines.append(_describe_precision(model, state))
    return "\n".join(lines)


def _describe_model(model: nn.Module, state: ModelState) -> str:
    """Return the first line: the class of the model, its type, and the origin of its plan."""
    name = type(model).__name__.removeprefix("FSDP")
    origin = state.plan.origin
    return f"{name} ({state.plan.model_type}), patched by hf_moe_ep; plan {origin}"


def _describe_experts(model: nn.Module, state: ModelState) -> str:
    """Return the line about the MoE layers: number, names, and the backend of the experts."""
    layers = {get_canonical_name(name): layer for name, _, layer in iterate_experts_modules(model)}
    names = list(layers)
    if not names:
        return "  experts    none: all layers of this pipeline stage are dense"
    backend = _describe_backend(layers[names[0]].compute)
    return (
        f"  experts    {len(names)} layers of {state.num_experts} ({names[0]} .. {names[-1]}), "
        f"backend {backend}{_describe_experts_dtype(model, state)}"
    )


def _describe_experts_dtype(model: nn.Module, state: ModelState) -> str:
    """Return the format and the bytes per parameter of experts, or "" if they are not quantised."""
    config = state.config
    if config.experts_dtype is None:
        return ""
    nested = ", double quantisation" if config.experts_double_quant else ""
    num_bytes = num_parameters = 0
    for name, stored, quantisation in iterate_quantised_matrices(model):
        num_bytes += sum(tensor.nbytes for tensor in stored.by_name(name).values())
        num_parameters += quantisation.num_values(stored.values)
    if not num_parameters:
        return f"; to be held in {config.experts_dtype}{nested} when the model is sharded"
    per_parameter = num_bytes / num_parameters
    return f"; held in {config.experts_dtype}{nested}, {per_parameter:.4f} bytes per parameter"


def _describe_backend(compute: Compute | None) -> str:
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


def _describe_layout(state: ModelState) -> str:
    """Return the line about the layout: mesh sizes, and the experts and groups of this rank."""
    meshes, config = state.meshes, state.config
    if meshes is None:
        always_shown = {"ep_size", "sp_size", "dp_replicate_size"}
        names = ("ep_size", "sp_size", "cp_size", "dp_replicate_size", "etp_size", "pp_size")
        asked = [
            f"{n} {config.sizes[n]}" for n in names if n in always_shown or config.sizes[n] > 1
        ]
        return f"  layout     not sharded yet; asks for {', '.join(asked)}"
    own = meshes.local_experts(state.num_experts)
    were_moved = any(layer.slots_E is not None for layer in state.moe_layers)
    held = f"{'slots' if were_moved else 'experts'} {own[0]} .. {own[-1]}"
    axes, group = f"ep {meshes.ep_size}", "ep"
    if meshes.etp_size > 1:
        held = f"part {meshes.etp_rank} of {meshes.etp_size} of {held}"
        axes, group = f"{axes} x etp {meshes.etp_size}", "dispatch"
    groups = [
        f"{group} group {meshes.dispatch.mesh.tolist()}{_describe_nodes(meshes, config)}",
        f"sp group {meshes.sp.mesh.tolist()}",
    ]
    if meshes.cp_size > 1:
        groups.append(f"cp group {meshes.cp.mesh.tolist()}")
    return (
        f"  layout     {meshes.world_size} ranks = dp_replicate {config.dp_replicate_size} x "
        f"ep_fsdp {meshes.ep_fsdp_size} x {axes}; this rank: {held}, {', '.join(groups)}"
    )


def _describe_context(model: nn.Module, state: ModelState) -> list[str]:
    """Return the lines about context parallelism: the order of tokens, and what ranks send."""
    if state.context is None:
        return []
    zigzag, exchanges = state.context
    cp_size = state.config.cp_size or 1
    order = f"cp rank i has part i of {cp_size} of each sequence"
    if zigzag:
        chunks = 2 * cp_size
        order = f"cp rank i has the chunks i and {chunks - 1} - i of {chunks} of each sequence"
    dtype = state.policy.param_dtype if state.policy is not None else None
    itemsize = (dtype or next(model.parameters()).dtype).itemsize
    return [f"  context    {order}"] + [
        _describe_exchange(exchange, cp_size, state.config.sp_size or 1, itemsize)
        for exchange in exchanges
    ]


def _describe_exchange(
    exchange: KeyValueExchange, cp_size: int, sp_size: int, itemsize: int
) -> str:
    what, window = "latents" if exchange.gathers_latents else "keys and values", exchange.window
    tokens = "of all tokens" if window is None else f"of the last {window:,} tokens"
    how = "sent to the ranks that see them" if window is not None else "all-gathered"
    how = "sent from rank to rank" if exchange.uses_ring else how
    sent = ""
    if exchange.width is not None:
        most = "" if window is None else "at most "
        # Each rank of an sp group sends the latents of its own tokens, but keys and values of all
        # tokens of the part, for some heads.
        width = exchange.width // sp_size if exchange.gathers_latents else exchange.width
        values = (cp_size - 1) * width
        forward = values * itemsize
        # A ring adds gradients in fp32.
        backward = values * max(itemsize, 4) if exchange.uses_ring else forward
        backward += 0 if exchange.keeps_received else forward
        sent = f"; sends {most}{forward:,} bytes per token of its part, {backward:,} in backward"
        if exchange.keeps_received or exchange.uses_ring:
            sent += f" ({backward + forward:,} with activation checkpointing)"
    return f"  context    {exchange.name} ({exchange.class_name}): {what} {tokens} {how}{sent}"


def _describe_stages(state: ModelState) -> list[str]:
    """Return the lines about the pipeline stages, if there are several."""
    stage, meshes, config = state.stage, state.meshes, state.config
    if stage is None or meshes is None or meshes.stages is None:
        return []
    layers, total = stage.layers, stage.num_layers
    held = [f"layers {layers.start} .. {layers.stop - 1} of {total}"]
    held += ["embedding"] if stage.is_first else []
    held += ["final norm and head"] if stage.is_last else []
    count = config.pp_microbatches or stage.size
    return [
        f"  stage      {stage.index} of {stage.size} ({', '.join(held)}), column "
        f"{meshes.stages.column.mesh.tolist()}; {config.pp_schedule}, {count} micro-batches: each "
        f"stage waits {compute_bubble(stage.size, count):.0%} of the time"
    ]


def _describe_nodes(meshes: Meshes, config: ParallelConfig) -> str:
    """Return how the ep group is spread over nodes, or "" if dispatch is not hierarchical."""
    if config.dispatcher != "hierarchical" or meshes.dispatch.size() == 1:
        return ""
    in_node = count_ranks_in_node([meshes.dispatch.mesh.tolist()], meshes.node_size)
    grid = f"{meshes.dispatch.size() // in_node} x {in_node}"
    if meshes.nodes is None:
        return f" (nodes x ranks: {grid}, so hierarchical dispatch is the same as all_to_all)"
    return f" (nodes x ranks: {grid}, a token is sent to each node at most once)"


# How the ranks that share a batch divide mixers, by their `MixerSplit` (sequence/mixers.py).
_DIVISION = {
    "whole": "gathered for {}; the computation and activations of these modules are not divided",
    "queries": "keys gathered for {}; everything, except keys, values and packed rows, is divided",
    "heads": "heads split in {}; everything, except packed rows, is divided",
    "halo": "tokens of the previous rank sent for {}; everything, except packed rows, is divided",
}


def _describe_sequence(state: ModelState) -> list[str]:
    """Return the lines about the modules that mix tokens outside of attention, if there are any."""
    return [
        f"  sequence   {_DIVISION[split].format(', '.join(f'{n} ({c})' for n, c in modules))} "
        f"by {_format_sizes(state)}"
        for split, modules in state.mixers.items()
    ]


def _describe_mtp(state: ModelState) -> list[str]:
    """Return the line about the head for multi-token prediction, if it is trained."""
    num_layers, weight = state.config.mtp_layers, state.config.mtp_loss_weight
    layers = f"{num_layers} layer{'s' if num_layers > 1 else ''}"
    return [f"  mtp        {layers}, loss weight {weight:g}"] if num_layers else []


def _format_sizes(state: ModelState) -> str:
    """Return the sizes that split sequences, such as "cp_size 2 x sp_size 4"."""
    sizes = {"cp_size": state.config.cp_size or 1, "sp_size": state.config.sp_size or 1}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _describe_balance(state: ModelState) -> list[str]:
    """Return the line about the methods that balance the load of the experts, if any is used."""
    methods = []
    if (rate := state.config.bias_update_rate) is not None:
        num_biases = sum(layer.correction is not None for layer in state.moe_layers)
        methods.append(f"biases of {num_biases} routers move by {rate:g} after each optimizer step")
    if state.config.aux_loss_per_layer:
        weight = state.plan.aux_loss_coef
        methods.append(f"mean of the layers' aux losses times {weight}, trains only routers")
    if num_moved := sum(layer.slots_E is not None for layer in state.moe_layers):
        methods.append(f"experts of {num_moved} layers were moved by balance_experts")
    return [f"  balance    {'; '.join(methods)}"] if methods else []


def _describe_buffers(state: ModelState) -> list[str]:
    """Return the line about the buffers of FSDP2 units, if an option chooses them."""
    where = ", in memory of NCCL's allocator" if state.config.nccl_ub else ""
    if state.config.fsdp_double_buffer:
        held, buffers = "", state.buffers
        if buffers is not None:
            held = f"; {buffers.num_buffers} buffers, {buffers.num_bytes / 2**20:,.1f} MiB"
        return [f"  buffers    two for FSDP2 units of the same size{where}{held}"]
    return [f"  buffers    FSDP2 gathers and reduces{where.removeprefix(',')}"] if where else []


def _describe_parameters(model: nn.Module) -> str:
    """Return the line with the numbers of parameters in the model and on this rank."""
    # A byte of a quantised matrix counts as the values that it encodes. Scales do not count.
    values_per_element: dict[int, int] = {}
    for name, stored, quantisation in iterate_quantised_matrices(model):
        values_per_element |= {id(tensor): 0 for tensor in stored.by_name(name).values()}
        values_per_element[id(stored.values)] = quantisation.values_per_byte
    whole = local = 0
    for parameter in model.parameters():
        num_values = values_per_element.get(id(parameter), 1)
        whole += parameter.numel() * num_values
        local += get_local_tensor(parameter).numel() * num_values
    state = find_state(model)
    if state is not None and state.stage is not None:
        tensors = state.stage.tensors.values()
        whole = sum(math.prod(tensor.shape) for tensor in tensors if tensor.is_parameter)
    return f"  parameters {whole:,} in the model, {local:,} on this rank"


def _describe_precision(model: nn.Module, state: ModelState) -> str:
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
