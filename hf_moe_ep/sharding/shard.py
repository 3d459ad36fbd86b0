"""Shard a patched model: split experts over ep, then make FSDP2 units of all modules.

FSDP2 all-gathers the parameters of a unit together before the unit computes. The axes of the meshes
are described in `ranks/mesh.py`.

    unit                 mesh                           gradient
    experts of a layer,  ep_fsdp; dim 0 is split over   divided by the world size in our backward,
    and their adapters   ep before, another dim over    then summed; fp16 and "eager": see below
                         etp (`etp.py`)
    router or head of    fsdp; not cast, see below      averaged by FSDP2, in fp32
    fp32
    decoder layer, and   fsdp                           averaged by FSDP2
    weights that all its
    experts share
    MTP head             fsdp; its decoder layers and   averaged by FSDP2
                         experts as above
    vision block, tower  fsdp                           averaged by FSDP2
    encoder              fsdp; `vision/encoders.py`     averaged by FSDP2 at the end of backward
                         gathers it
    embedding            fsdp                           averaged by FSDP2
    final norm + head    fsdp; stays gathered between   averaged by FSDP2
                         forward and backward
    root (the rest)      fsdp                           averaged by FSDP2
    correction biases    not sharded; in the dtype in   none
                         which they were loaded

"Our backward" is that of `run_experts`. `grad_divisors` (`options.py`) returns its divisor. With
fp16 this divisor may be smaller than the world size; the sum is then divided by the remaining
factor. Stock's experts code (experts_backend="eager") does not divide in backward, so FSDP2
averages the gradients.

If ep_size * etp_size is the number of ranks, each rank holds its experts whole, and their weights
are not part of a unit. `whole_experts.py` lists the exceptions.

Transformers keeps the routers of many models in fp32 when it loads the model in bf16 (DeepSeek,
GLM-4), because rounding changes the choice of experts, and the head of HY-V4. As a part of its
layer's unit, or of the unit of the final norm, such a module would be cast to bf16. Other fp32
parameters, such as sinks beside bf16 weights, are cast.

If the layers are compiled (`compile_layers`) and no tokens are dispatched, the experts are part of
the unit of their layer, and FSDP2 averages their gradients like those of any other weight. They
remain units of their own if they are quantised, have adapters or run stock's code, or if the
parameters of the layers have several dtypes.

With tied weights embedding, norm and head are one unit, because a parameter can be in one unit
only. If a model has two towers whose layers share parameters (`ModelPlan.tied_layers`), a layer and
its tied layer are one unit, and so are their experts modules. Such a unit is gathered for each of
its two forwards (`fully_shard_tied`). The norms and embeddings of both towers belong to the unit of
the head.

Expert weights are DTensors of global shape [E, ...] on (ep_fsdp, ep), so a checkpoint can be
loaded with any other layout.

In some models a norm follows each expert, with one weight for all experts of a layer. A rank
applies the norm to the outputs of its own experts, for the tokens of its whole ep group, so each
pair of a token and an expert adds to the gradient on exactly one rank. The gradient of this weight
is therefore averaged over all ranks, as for any other weight of the layer, and the weight is part
of the layer's unit. FSDP2 leaves the parameters of nested units out of the outer unit, so the layer
becomes a unit first. It ignores all parameters of the experts except this weight. Then the experts
become units.

Frozen experts that `ParallelConfig.experts_dtype` quantises become bytes and scales when they get
their initial values. FSDP2 all-gathers bytes and scales without a cast.

Every parameter and buffer starts with the value of rank 0 (`values.py`). A unit is sharded before
the next unit gets its values, so a device holds at most one unsharded unit. Parameters that are on
the meta device on every rank stay there, and are read from a checkpoint later
(`checkpoints/hub/read.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hf_moe_ep.moe.dispatch.make_dispatcher import make_dispatcher
from hf_moe_ep.moe.forwards import keep_forwards
from hf_moe_ep.ops.quantised import (
    BLOCK_SCALE,
    NESTED_SCALE,
    rows_and_columns_of_blocks,
    rows_may_be_cut,
)
from hf_moe_ep.plan import matches, name_in_layer
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.sharding.buffers import use_buffers
from hf_moe_ep.sharding.checks import (
    RefuseUnfrozen,
    check_adapters_separate,
    check_dtypes,
    check_experts_split,
    check_experts_unshared,
    check_frozen,
    check_nodes,
    check_packed,
    check_quantised_frozen,
    check_ranks_agree,
)
from hf_moe_ep.sharding.gathered import GatheredUnits
from hf_moe_ep.sharding.options import ShardOptions, grad_divisors
from hf_moe_ep.sharding.stages import cut_into_stages, find_parts_of_stage
from hf_moe_ep.sharding.units import (
    Units,
    allow_reentrant_checkpoints,
    gather_for_caches,
    keep_last_layer,
    set_prefetch,
    units_of,
)
from hf_moe_ep.sharding.values import (
    ParameterEntries,
    ParameterEntry,
    ReceivedValues,
    broadcast_correction_biases,
    broadcast_unsharded,
    find_entries,
    materialize,
)
from hf_moe_ep.sharding.whole_experts import can_stay_whole, keep_whole
from hf_moe_ep.state import ModelState, experts_modules
from hf_moe_ep.upstream.adapters import refuse_unmerge, without_adapters
from hf_moe_ep.upstream.experts_interface import post_expert_norm
from hf_moe_ep.upstream.hub import kept_in_fp32
from hf_moe_ep.upstream.models import keep_packing
from hf_moe_ep.upstream.module_names import canonical_name, stock_name, without_copies
from hf_moe_ep.upstream.modules import keep_dtypes
from hf_moe_ep.upstream.sharded_models import (
    bytes_as_parameters,
    fully_shard_tied,
    keep_recorded_outputs,
    mark_fsdp_managed,
    share_infinities,
    without_forward_hooks,
)


def shard_model(
    model: nn.Module, state: ModelState, options: ShardOptions, device: torch.device
) -> nn.Module:
    """Shard a patched model in place over the default process group, and return the model.

    Every rank must call this function.

    Raises:
        ValueError: on every rank, if ranks disagree, sizes do not divide the world size, or rank 0
            has no weights.
    """
    meshes = state.meshes_of_stage or build_meshes_and_cut_stages(model, state, options, device)
    state.meshes_of_stage = None
    state.dispatcher = make_dispatcher(state.config, meshes, num_experts=state.num_experts)
    return shard_units(model, state, options, meshes)


def build_meshes_and_cut_stages(
    model: nn.Module, state: ModelState, options: ShardOptions, device: torch.device
) -> Meshes:
    """Create the meshes of a model, and leave this rank its pipeline stage of the model.

    Every rank must call this function. Raises as `shard_model`.
    """
    check_adapters_separate(model)
    check_ranks_agree(model, state, options)
    check_nodes(state.config)
    meshes = state.shared_meshes.find_or_build(state.config, device)
    if meshes.stages is not None:
        cut_into_stages(model, state, options, meshes)
    return meshes


def shard_units(
    model: nn.Module, state: ModelState, options: ShardOptions, meshes: Meshes
) -> nn.Module:
    """Shard a patched model in place over `meshes`, without comparing the ranks before."""
    keep_forwards(state)
    parts = find_parts_of_stage(model, state)
    units = units_of(parts)
    received = {} if state.stage is None else state.stage.values
    check_frozen(model, units.all_experts)
    entries = find_entries(model, units.all_experts, state.plan, options)
    check_quantised_frozen(model, entries)
    check_packed(model, options)
    if not can_stay_whole(state, meshes, options):
        experts_of_layers = chain(*units.experts.values())
        check_experts_unshared(model, map(units.with_tied, experts_of_layers))
    keep_packing(model)
    for experts in units.all_experts:
        if meshes.dispatch.size() > 1:
            check_experts_split(experts, entries)
        _check_shared(experts, entries, state)
        _check_expert_shard_dim(experts, entries, state, meshes)
    named = model.named_parameters(remove_duplicate=False)
    dtypes = {canonical_name(name): parameter.dtype for name, parameter in named}
    others = {} if state.stage is None else state.stage.tensors
    state.dtypes = {name: tensor.dtype for name, tensor in others.items()} | dtypes
    broadcast_unsharded(model, meshes, options)
    biases = broadcast_correction_biases(model, meshes, options, received)
    options = replace(options, ignored_params=options.ignored_params | biases)
    fill = partial(
        _materialize_unit, entries=entries, meshes=meshes, options=options, received=received
    )
    shard = partial(fully_shard, mesh=meshes.dense, **options.fully_shard_kwargs())
    shard_tied = partial(fully_shard_tied, mesh=meshes.dense, **options.fully_shard_kwargs())
    state.experts_in_layer_units = _can_join_layers(units, entries, state, meshes)
    routers = _routers_in_fp32(model, units, state, options)
    for index, layer in enumerate(units.layers):
        layers = units.with_tied(layer)
        layer_experts = [units.with_tied(module) for module in units.experts.get(index, ())]
        if state.experts_in_layer_units:
            stacked = {p for p, entry in fill(layers).items() if entry.over_ep}
            shard_tied(
                layers, shard_placement_fn=partial(_joined_placement, stacked, state, meshes)
            )
            continue
        for router in routers.get(index, ()):
            fill([router])
            fully_shard(router, mesh=meshes.dense, **_kwargs_in_fp32(options))
        layer_options = _ignore(options, _unshared_parameters(chain(*layer_experts), entries))
        fill(layers, options=layer_options)
        shard_tied(layers, ignored_params=set(layer_options.ignored_params))
        for modules in layer_experts:
            experts_options = _ignore(options, _sharded_parameters(modules))
            new_entries = fill(modules)
            _shard_experts(modules, new_entries, state, meshes, experts_options)
    if units.mtp is not None:
        fill([units.mtp])
        shard(units.mtp)
    for module in units.vision:
        fill([module])
        shard(module)
    for encoder in units.encoders:
        fill([encoder])
        with without_forward_hooks(encoder):
            state.encoders.append(shard(encoder))
    if units.embedding is not None and not units.tied:
        fill([units.embedding])
        shard(units.embedding)
    head = _head_in_fp32(model, units, state, options)
    for module in head:
        fill([module])
        in_fp32 = _kwargs_in_fp32(options) | {"reshard_after_forward": False}
        fully_shard(module, mesh=meshes.dense, **in_fp32)
    if tail := [module for module in units.tail if module not in head]:
        fill(tail)
        shard(tail, reshard_after_forward=False)
    fill([model])
    root = _find_root(model)
    _shard_root(root, meshes, options)
    for experts in units.all_experts:
        _keep_scales(experts)
    refuse_unmerge(model)
    keep_last_layer(units, routers)
    gather_for_caches(units)
    GatheredUnits(root, lists_shards=state.stage is None).attach()
    root.register_forward_pre_hook(RefuseUnfrozen(model, options))
    allow_reentrant_checkpoints(units, routers)
    set_prefetch(units, routers)
    state.buffers = use_buffers(model, units.all_experts, state.config, meshes)
    mark_fsdp_managed(model)
    keep_recorded_outputs(model)
    if meshes.etp is not None:
        share_infinities()
    state.meshes, state.policy = meshes, options.mp_policy
    return model


def _routers_in_fp32(
    model: nn.Module, units: Units, state: ModelState, options: ShardOptions
) -> dict[int, list[nn.Module]]:
    """Return the fp32 routers of the layers that compute in bf16 or fp16, by the layer's index.

    Other routers compute in the dtype of the rows, so they need the cast. A layer with two routers
    (Ernie-4.5-VL) is left out: with `fsdp_double_buffer` they would need a third buffer. PEFT's
    wrapper of a router computes with the router's weight, or with a copy of it, so the wrapper is
    the unit.
    """
    dtype = options.mp_policy.param_dtype
    if not state.plan.router:
        return {}
    names = {module: name for name, module in model.named_modules()}
    routers: dict[int, list[nn.Module]] = {}
    for index, layer in enumerate(units.layers):
        if len(units.with_tied(layer)) > 1 or all(p.dtype != dtype for p in layer.parameters()):
            continue
        found: list[nn.Module] = []
        inside: set[nn.Module] = set()
        for module in layer.modules():
            name = _name_in_layer(names[module], state)
            if module in inside or not matches(state.plan.router, name):
                continue
            inside.update(module.modules())
            if _is_kept_in_fp32(model, names[module], module, state, options):
                found.append(module)
        if len(found) == 1:
            routers[index] = found
    return routers


def _head_in_fp32(
    model: nn.Module, units: Units, state: ModelState, options: ShardOptions
) -> list[nn.Module]:
    """Return a list of the head if it computes in fp32 (HY-V4), otherwise an empty list.

    A head with the weights of the embedding computes in the dtype of the embedding.
    """
    names = {module: name for name, module in model.named_modules()}
    if units.head is None or units.tied:
        return []
    is_kept = _is_kept_in_fp32(model, names[units.head], units.head, state, options)
    return [units.head] if is_kept else []


def _is_kept_in_fp32(
    model: nn.Module, name: str, module: nn.Module, state: ModelState, options: ShardOptions
) -> bool:
    """Return True if a module's parameters are fp32, and stock keeps fp32 in a bf16 or fp16 model.

    `name` is the name of the module in `model`.
    """
    dtype = options.mp_policy.param_dtype
    kept = kept_in_fp32(model, dtype) if dtype in (torch.bfloat16, torch.float16) else []
    own = {
        parameter: _name_in_layer(f"{name}.{own_name}", state)
        for own_name, parameter in module.named_parameters()
        if parameter not in options.ignored_params
    }
    is_kept = any(pattern.search(name) for pattern in kept for name in own.values())
    return is_kept and all(parameter.dtype == torch.float32 for parameter in own)


def _name_in_layer(name: str, state: ModelState) -> str:
    """Return the name in the stock model, in layer 0 for a module of an MTP head."""
    return name_in_layer(without_copies(stock_name(name)), state.plan)


def _kwargs_in_fp32(options: ShardOptions) -> dict[str, Any]:
    """Return the arguments of `fully_shard` for a unit whose fp32 parameters are not cast."""
    kwargs = options.fully_shard_kwargs()
    kwargs["mp_policy"] = MixedPrecisionPolicy(
        reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    return kwargs


def _can_join_layers(
    units: Units, entries: ParameterEntries, state: ModelState, meshes: Meshes
) -> bool:
    """Return True if experts become part of the units of their layers.

    Compiled layers need this: torch.compile cannot trace the hooks with which FSDP2 gathers a
    separate unit. Both units lie on the same ranks only without expert parallelism.
    """
    config = state.config
    if config.compile_kwargs is None or meshes.dispatch.size() > 1:
        return False
    if config.experts_backend == "eager":
        return False
    of_experts = [p for experts in units.all_experts for p in experts.parameters()]
    has_own_layout = any(
        parameter not in entries
        or entries[parameter].stack is not None
        or entries[parameter].quantisation is not None
        for parameter in of_experts
    )
    of_layers = (parameter for layer in units.layers for parameter in layer.parameters())
    dtypes = {parameter.dtype for parameter in of_layers if parameter in entries}
    return not has_own_layout and len(dtypes) == 1


def _joined_placement(
    stacked: set[nn.Parameter], state: ModelState, meshes: Meshes, parameter: nn.Parameter
) -> Shard:
    """Choose the dim along which FSDP2 shards a parameter of a layer that includes its experts."""
    if parameter not in stacked:
        return Shard(0)
    return _expert_placement(parameter.shape, state.config.expert_shard_dim, meshes.ep_fsdp_size)


def _materialize_unit(
    modules: Iterable[nn.Module],
    entries: ParameterEntries,
    meshes: Meshes,
    options: ShardOptions,
    received: ReceivedValues,
) -> ParameterEntries:
    """Materialize the parameters of one unit, and remove their entries from `entries`.

    Returns the new parameters, each with the entry of the parameter that it replaces.
    """
    all_parameters = (p for module in modules for p in module.parameters())
    parameters = dict.fromkeys(p for p in all_parameters if p not in options.ignored_params)
    check_dtypes(parameters, options)
    new_entries: ParameterEntries = {}
    for parameter in parameters:
        # A tied parameter has no entry if an earlier unit has materialized it.
        entry = entries.pop(parameter, None)
        if entry is None:
            continue
        new_entries |= dict.fromkeys(materialize(entry, meshes, options, received), entry)
    return new_entries


def _shard_experts(
    experts: Sequence[nn.Module],
    entries: ParameterEntries,
    state: ModelState,
    meshes: Meshes,
    options: ShardOptions,
) -> None:
    """Make an experts module, or two with the same parameters, an FSDP2 unit on ep_fsdp.

    `entries` is the result of `_materialize_unit` for `experts`.
    """
    shard_dim = state.config.expert_shard_dim
    # `experts` may be PEFT's wrappers, which contain the patched modules.
    inner = [module for wrapper in experts for module in wrapper.modules()]
    layers = [layer for wrapper in experts for _, _, layer in experts_modules(wrapper)]

    def placement(parameter: nn.Parameter) -> Shard:
        shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
        entry = entries.get(parameter)
        if entry is not None and meshes.etp_size > 1:
            return _placement_with_etp(parameter, entry, shard_dim, meshes)
        if entry is not None and entry.quantisation is not None:
            return _quantised_placement(entry, shard_dim, meshes)
        is_factor = entry is not None and entry.stack is not None
        return _expert_placement(shape, "auto" if is_factor else shard_dim, meshes.ep_fsdp_size)

    quantised = [entry for entry in entries.values() if entry.quantisation is not None]
    kwargs = options.fully_shard_kwargs()
    # Routing weights are fp32 and must not be cast.
    kwargs["mp_policy"] = replace(options.mp_policy, cast_forward_inputs=False)
    if quantised:
        # With a param_dtype FSDP2 would cast the scales, and with torch 2.11 the bytes too.
        # `moe/experts.py` casts the other parameters of the unit after the all-gather.
        kwargs["mp_policy"] = replace(kwargs["mp_policy"], param_dtype=None)
    weight = quantised[0].parameter if quantised else next(experts[0].parameters())
    dtype = options.mp_policy.param_dtype or weight.dtype
    if can_stay_whole(state, meshes, options):
        whole = keep_whole(experts[0], entries, state, meshes)
        for layer in layers:
            layer.whole_weights = frozenset(whole.values())
            layer.weights_dtype = options.mp_policy.param_dtype
        kwargs["ignored_params"] = kwargs.get("ignored_params", set()) | whole.keys()
    parameters = {parameter for module in inner for parameter in module.parameters(recurse=False)}
    if parameters <= kwargs.get("ignored_params", set()):
        for layer in layers:
            layer.grad_divisor = meshes.world_size
        return
    with bytes_as_parameters() if quantised else nullcontext():
        unit = fully_shard_tied(
            experts, mesh=meshes.ep_fsdp, shard_placement_fn=placement, **kwargs
        )
    if state.config.experts_backend == "eager":
        return
    # FSDP2 sums without dividing, because run_experts divides in backward. To divide, FSDP2 would
    # use PREMUL_SUM, which gloo does not support and which gives zeros with NCCL in bf16
    # (https://github.com/pytorch/pytorch/issues/190747).
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    divisor, after = grad_divisors(
        dtype,
        options.mp_policy.reduce_dtype or dtype,
        ep_size=meshes.dispatch.size(),
        world_size=meshes.world_size,
    )
    for layer in layers:
        layer.grad_divisor = divisor
    if after > 1:
        # FSDP2 cannot divide by `after`: torch 2.13 divides twice if ep_fsdp has one rank.
        unit.set_all_reduce_hook(partial(_divide, by=after))


def _divide(reduced: torch.Tensor, by: int) -> None:
    reduced.div_(by)
    if reduced.is_cuda:
        # Before torch 2.15, FSDP2 frees this memory of its reduce-scatter stream while the stream
        # of this hook still reads it.
        reduced.record_stream(torch.cuda.current_stream(reduced.device))


def _keep_scales(experts: nn.Module) -> None:
    """Let quantised experts keep their scales in fp32, for example with `bf16_full_eval`.

    The stored bytes would stand for other numbers with rounded scales.
    """
    ends = (BLOCK_SCALE, NESTED_SCALE)
    for module in experts.modules():  # PEFT may have wrapped the experts
        named = module.named_parameters(recurse=False)
        if scales := [name for name, _ in named if name.endswith(ends)]:
            keep_dtypes(module, scales)


def _is_shared(parameter: nn.Parameter, entries: ParameterEntries) -> bool:
    """Return True if all experts of a module use this parameter, so it is not split over ep."""
    return parameter in entries and not entries[parameter].over_ep


def _unshared_parameters(
    experts: Iterable[nn.Module], entries: ParameterEntries
) -> set[nn.Parameter]:
    """Return the parameters of experts modules that belong to single experts."""
    parameters = {parameter for module in experts for parameter in module.parameters()}
    return {parameter for parameter in parameters if not _is_shared(parameter, entries)}


def _sharded_parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of modules that another unit has already sharded."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return {parameter for parameter in parameters if isinstance(parameter, DTensor)}


def _ignore(options: ShardOptions, parameters: set[nn.Parameter]) -> ShardOptions:
    return replace(options, ignored_params=options.ignored_params | parameters)


def _check_shared(experts: nn.Module, entries: ParameterEntries, state: ModelState) -> None:
    """Raise if experts share a trainable parameter that `run_experts` does not use."""
    if state.config.experts_backend == "eager":
        return
    norms = filter(None, map(post_expert_norm, experts.modules()))
    norm_parameters = {parameter for norm in norms for parameter in norm.parameters()}
    for name, parameter in experts.named_parameters():
        is_unused = parameter not in norm_parameters and _is_shared(parameter, entries)
        if is_unused and parameter.requires_grad:
            raise ValueError(
                f"{name} of {type(experts).__name__} belongs to all experts of a layer, and the "
                f"only such parameter that hf_moe_ep can compute with and train is the weight of "
                f"post_expert_norm, a norm after each expert; if the model does not use {name}, "
                f"freeze it with requires_grad_(False), otherwise run the model's own code: "
                f"experts_backend='eager', ep_size=1"
            )


def _check_expert_shard_dim(
    experts: nn.Module, entries: ParameterEntries, state: ModelState, meshes: Meshes
) -> None:
    """Raise if a weight cannot be sharded along `expert_shard_dim`.

    The factors of adapters are not checked, because the option does not apply to them.
    """
    for weight in experts.parameters() if meshes.etp_size == 1 else ():
        if _is_shared(weight, entries):
            continue
        if weight in entries and entries[weight].stack is not None:
            continue
        if weight in entries and entries[weight].quantisation is not None:
            _quantised_placement(entries[weight], state.config.expert_shard_dim, meshes)
            continue
        local = torch.Size([weight.shape[0] // meshes.ep_size, *weight.shape[1:]])
        _expert_placement(local, state.config.expert_shard_dim, meshes.ep_fsdp_size)


def _expert_placement(shape: torch.Size, shard_dim: str | int, ep_fsdp_size: int) -> Shard:
    """Choose the dim along which FSDP2 shards an expert weight, whose shape on a rank is `shape`.

    "auto" takes the first dim that ep_fsdp_size divides. This is dim 0 if possible: along dim 1
    FSDP2 copies the weight once more, in the all-gather and in the reduce-scatter. If ep_fsdp_size
    divides neither dim, the shards of dim 0 are padded, and a rank may have only padding.
    """
    dim_1_is_even = len(shape) > 1 and shape[1] % ep_fsdp_size == 0
    if shard_dim == 1 and not dim_1_is_even:
        raise ValueError(
            f"expert_shard_dim=1 shards dim 1 of an expert weight {tuple(shape)} evenly over "
            f"ep_fsdp ({ep_fsdp_size}), but {ep_fsdp_size} does not divide dim 1; try "
            f"expert_shard_dim='auto'"
        )
    use_dim_1 = shard_dim == 1 or (shard_dim == "auto" and shape[0] % ep_fsdp_size != 0)
    return Shard(1) if dim_1_is_even and use_dim_1 else Shard(0)


def _placement_with_etp(
    parameter: nn.Parameter, entry: ParameterEntry, shard_dim: str | int, meshes: Meshes
) -> Shard:
    """Choose the dim along which FSDP2 shards a tensor of experts that etp has cut.

    This is dim 0 if ep_fsdp_size divides the number of local experts, otherwise the first dim that
    etp has not cut and that ep_fsdp_size divides. A quantised matrix is cut between blocks only. If
    there is no such dim, it is dim 0, with padding. With etp a rank often has few experts, so the
    dim is usually H: the columns of gate and up, the rows of down.
    """
    cut, ep_fsdp_size = entry.held_cut, meshes.ep_fsdp_size
    assert cut is not None
    shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    if shape[0] % ep_fsdp_size == 0 or shard_dim == 0:
        return Shard(0)
    held = set() if cut.held_dim is None else {cut.held_dim}
    if cut.split_dim is not None:
        held.add(cut.split_dim)
    for dim in range(1, len(shape)):
        if dim in held or shape[dim] % ep_fsdp_size:
            continue
        if entry.quantisation is None or _shards_whole_blocks(entry, dim, shape, ep_fsdp_size):
            return Shard(dim)
    return Shard(0)


def _shards_whole_blocks(
    entry: ParameterEntry, dim: int, shape: torch.Size, ep_fsdp_size: int
) -> bool:
    """Return True if equal shards along a dim of quantised bytes or of scales split no block.

    The answer is the same for the bytes and for the scales of a matrix.
    """
    assert entry.quantisation is not None
    block_rows, block_columns = rows_and_columns_of_blocks(entry.quantisation)
    _, rows, columns = entry.local_LOI(1)
    is_last = dim == len(shape) - 1
    size, block = (columns, block_columns) if is_last else (rows, block_rows)
    return size % (block * ep_fsdp_size) == 0


def _quantised_placement(entry: ParameterEntry, shard_dim: str | int, meshes: Meshes) -> Shard:
    """Choose the dim along which FSDP2 shards the bytes of a stacked matrix and their scales.

    The rule of `_expert_placement` is used. In addition, a shard of dim 1 must not split a block of
    values that share a scale.
    """
    quantisation, ep_fsdp_size = entry.quantisation, meshes.ep_fsdp_size
    assert quantisation is not None
    experts, rows, columns = entry.local_LOI(meshes.ep_size)
    dim_1_can_be_split = rows_may_be_cut((rows, columns), quantisation, ep_fsdp_size)
    if shard_dim == 1 and not dim_1_can_be_split:
        _, name = entry.owners[0]
        nested = " or 256 scales that share a nested scale" if quantisation.nested else ""
        raise ValueError(
            f"expert_shard_dim=1 shards the {rows} rows of {name} [out {rows}, in {columns}] over "
            f"ep_fsdp ({ep_fsdp_size}) and would split a block of {quantisation.kind} values that "
            f"share a scale{nested}; try expert_shard_dim='auto' or 0"
        )
    use_dim_1 = shard_dim == 1 or (shard_dim == "auto" and experts % ep_fsdp_size != 0)
    return Shard(1) if dim_1_can_be_split and use_dim_1 else Shard(0)


def _shard_root(root: nn.Module, meshes: Meshes, options: ShardOptions) -> None:
    kwargs = options.fully_shard_kwargs()
    del kwargs["reshard_after_forward"]  # By default FSDP2 keeps a root gathered.
    # A low-precision output_dtype would round the loss.
    kwargs["mp_policy"] = replace(options.mp_policy, output_dtype=None)
    fully_shard(root, mesh=meshes.dense, **kwargs)


def _find_root(model: nn.Module) -> nn.Module:
    """Return the module that becomes the root unit.

    For a PeftModel this is the inner model, because `generate` calls only the forward of the inner
    model. A PeftModel with parameters outside of the inner model (prompts) is the root itself.
    """
    inner: nn.Module = without_adapters(model)
    inner_ids = {id(parameter) for parameter in inner.parameters()}
    return inner if all(id(parameter) in inner_ids for parameter in model.parameters()) else model
