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

"Our backward" is the backward of `run_experts`. `choose_grad_divisors` (`options.py`) returns its
divisor. With fp16 this divisor may be smaller than the world size; the sum is then divided by the
remaining factor. Stock's experts code (experts_backend="eager") does not divide in backward, so
FSDP2 averages the gradients.

If ep_size * etp_size is the number of ranks, each rank holds its experts whole, and their weights
are not part of a unit. `whole_experts.py` lists the exceptions.

When transformers loads a model in bf16, some modules stay in fp32: the routers of many models
(DeepSeek, GLM-4), because rounding changes the choice of experts, and the head of HY-V4. Such a
module is a unit of its own, and so is a head that TRL has cast to fp32. In the unit of its layer,
or of the final norm, it would be cast to bf16. Such a head is gathered when the final norm runs
(`gather_with_norm`). Other fp32 parameters, such as sinks in a layer with bf16 weights, are cast.

If the layers are compiled (`compile_layers`) and no tokens are dispatched, the experts are part of
the unit of their layer, and FSDP2 averages their gradients like the gradients of other weights.
They remain units of their own if they are quantised, have adapters or run stock's code, or if the
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

from collections.abc import Callable, Iterable, Mapping
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
from hf_moe_ep.plan import make_name_in_layer, matches
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.sharding.buffers import use_buffers
from hf_moe_ep.sharding.checks import (
    RefuseAdded,
    RefuseUnfrozen,
    check_adapters_of_layers_unshared,
    check_adapters_separate,
    check_dtypes,
    check_experts_split,
    check_experts_unshared,
    check_frozen,
    check_no_gradient_hooks,
    check_nodes,
    check_packed,
    check_quantised_frozen,
    check_ranks_agree,
)
from hf_moe_ep.sharding.expert_units import (
    check_expert_shard_dim,
    check_shared,
    choose_shard_dim,
    is_shared,
    keep_scales,
    shard_experts,
)
from hf_moe_ep.sharding.gathered import ReshardHooks
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.refused_calls import refuse_calls
from hf_moe_ep.sharding.stages import cut_into_stages, find_parts_of_stage
from hf_moe_ep.sharding.units import (
    Units,
    allow_reentrant_checkpoints,
    gather_for_caches,
    gather_with_norm,
    keep_last_layer,
    list_units,
    set_prefetch,
)
from hf_moe_ep.sharding.values import (
    ParameterEntries,
    ReceivedValues,
    broadcast_correction_biases,
    broadcast_unsharded,
    find_entries,
    materialize,
)
from hf_moe_ep.sharding.whole_experts import can_stay_whole
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.adapters import refuse_unmerge, without_adapters
from hf_moe_ep.upstream.hub import list_kept_in_fp32
from hf_moe_ep.upstream.models import is_cast_to_fp32, keep_packing
from hf_moe_ep.upstream.module_names import (
    get_canonical_name,
    get_stock_name,
    remove_names_of_copies,
)
from hf_moe_ep.upstream.sharded_models import (
    fully_shard_tied,
    keep_class_names,
    keep_recorded_outputs,
    share_infinities,
    without_forward_hooks,
)

# Materializes the parameters of some modules: `_materialize_unit` with all other arguments bound.
Fill = Callable[..., ParameterEntries]


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
    check_no_gradient_hooks(model, options)
    check_ranks_agree(model, state, options)
    check_nodes(state.config)
    meshes = state.shared_meshes.find_or_build(state.config, device)
    if meshes.stages is not None:
        cut_into_stages(model, state, options, meshes)
    return meshes


def shard_units(
    model: nn.Module, state: ModelState, options: ShardOptions, meshes: Meshes
) -> nn.Module:
    """Shard a patched model in place over `meshes`, without checks that compare ranks."""
    keep_forwards(state)
    parts = find_parts_of_stage(model, state)
    units = list_units(parts)
    received = {} if state.stage is None else state.stage.values
    check_frozen(model, units.all_experts)
    check_adapters_of_layers_unshared(model, map(units.with_tied, units.layers))
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
        check_shared(experts, entries, state)
        check_expert_shard_dim(experts, entries, state, meshes)
    named = model.named_parameters(remove_duplicate=False)
    dtypes = {get_canonical_name(name): parameter.dtype for name, parameter in named}
    others = {} if state.stage is None else state.stage.tensors
    state.dtypes = {name: tensor.dtype for name, tensor in others.items()} | dtypes
    broadcast_unsharded(model, meshes, options)
    biases = broadcast_correction_biases(model, meshes, options, received)
    options = replace(options, ignored_params=options.ignored_params | biases)
    fill: Fill = partial(
        _materialize_unit, entries=entries, meshes=meshes, options=options, received=received
    )
    state.experts_in_layer_units = _can_join_layers(units, entries, state, meshes)
    routers = _find_fp32_routers(model, units, state, options)
    _shard_layers(units, routers, entries, fill, state, meshes, options)
    _shard_other_units(model, units, fill, state, meshes, options)
    fill([model])
    root = _find_root(model)
    _shard_root(root, meshes, options)
    for experts in units.all_experts:
        keep_scales(experts)
    refuse_unmerge(model)
    keep_last_layer(units, routers)
    gather_for_caches(units)
    ReshardHooks(root, meshes.device, may_show_shards=state.stage is None).attach()
    root.register_forward_pre_hook(RefuseUnfrozen(model, options))
    if meshes.world_size > 1:
        root.register_forward_pre_hook(RefuseAdded(model, meshes.world_size))
    refuse_calls(root, meshes.world_size)
    allow_reentrant_checkpoints(units, routers)
    set_prefetch(units, routers)
    state.buffers = use_buffers(model, units.all_experts, state.config, meshes)
    keep_class_names(model)
    keep_recorded_outputs(model)
    if meshes.etp is not None:
        share_infinities()
    state.meshes, state.policy = meshes, options.mp_policy
    return model


def _shard_layers(
    units: Units,
    routers: Mapping[int, list[nn.Module]],
    entries: ParameterEntries,
    fill: Fill,
    state: ModelState,
    meshes: Meshes,
    options: ShardOptions,
) -> None:
    """Make units of the decoder layers, of their fp32 routers and of their experts."""
    shard_tied = partial(fully_shard_tied, mesh=meshes.dense, **options.fully_shard_kwargs())
    for index, layer in enumerate(units.layers):
        layers = units.with_tied(layer)
        layer_experts = [units.with_tied(module) for module in units.experts.get(index, ())]
        if state.experts_in_layer_units:
            stacked = {p for p, entry in fill(layers).items() if entry.over_ep}
            shard_tied(
                layers,
                shard_placement_fn=partial(_choose_placement_in_layer, stacked, state, meshes),
            )
            continue
        for router in routers.get(index, ()):
            fill([router])
            fully_shard(router, mesh=meshes.dense, **_make_fp32_kwargs(options))
        layer_options = _add_ignored(options, _list_unshared(chain(*layer_experts), entries))
        fill(layers, options=layer_options)
        shard_tied(layers, ignored_params=set(layer_options.ignored_params))
        for modules in layer_experts:
            experts_options = _add_ignored(options, _list_sharded_parameters(modules))
            new_entries = fill(modules)
            shard_experts(modules, new_entries, state, meshes, experts_options)


def _shard_other_units(
    model: nn.Module,
    units: Units,
    fill: Fill,
    state: ModelState,
    meshes: Meshes,
    options: ShardOptions,
) -> None:
    """Make units of all modules outside of the decoder layers, except the root."""
    shard = partial(fully_shard, mesh=meshes.dense, **options.fully_shard_kwargs())
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
    head = _find_fp32_head(model, units, state, options)
    for module in head:
        fill([module])
        in_fp32 = _make_fp32_kwargs(options) | {"reshard_after_forward": False}
        fully_shard(module, mesh=meshes.dense, **in_fp32)
        gather_with_norm(module, units.tail[0], _find_root(model))
    if tail := [module for module in units.tail if module not in head]:
        fill(tail)
        mp_policy = _make_tail_policy(options.mp_policy)
        shard(tail, mp_policy=mp_policy, reshard_after_forward=False)


def _make_tail_policy(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the mixed precision of the unit of the final norm and the head.

    TRL's fused head (trl/trainer/utils.py) and Liger's fused loss read the head's weight and do not
    call the head. torch 2.13 then completes the unit at the end of the model's forward, and would
    round the model's loss and log-probabilities to the unit's `output_dtype`. The modules of the
    unit compute in `param_dtype`, so an equal `output_dtype` is not needed.
    """
    if policy.output_dtype == policy.param_dtype:
        return replace(policy, output_dtype=None)
    return policy


def _find_fp32_routers(
    model: nn.Module, units: Units, state: ModelState, options: ShardOptions
) -> dict[int, list[nn.Module]]:
    """Return the routers that stay in fp32 while their layer computes in bf16 or fp16.

    The routers are listed by the index of their layer. All other routers compute in the dtype of
    the rows, so they need the cast. A layer with two routers (Ernie-4.5-VL) is left out, because
    with `fsdp_double_buffer` its routers would need a third buffer. PEFT's wrapper of a router
    computes with the router's weight, or with a copy of this weight, so the wrapper is the unit.
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
            name = _find_stock_name(names[module], state)
            if module in inside or not matches(state.plan.router, name):
                continue
            inside.update(module.modules())
            if _is_kept_in_fp32(model, names[module], module, state, options):
                found.append(module)
        if len(found) == 1:
            routers[index] = found
    return routers


def _find_fp32_head(
    model: nn.Module, units: Units, state: ModelState, options: ShardOptions
) -> list[nn.Module]:
    """Return a list of the head if it computes in fp32, otherwise an empty list.

    This is the head of HY-V4, and any head with `cast_lm_head_to_fp32=True` of TRL's GRPO. A head
    with the weights of the embedding computes in the dtype of the embedding.
    """
    names = {module: name for name, module in model.named_modules()}
    head = units.head
    if head is None or units.tied:
        return []
    is_kept = _is_kept_in_fp32(model, names[head], head, state, options)
    is_cast = is_cast_to_fp32(head) and all(p.dtype == torch.float32 for p in head.parameters())
    return [head] if is_kept or is_cast else []


def _is_kept_in_fp32(
    model: nn.Module, name: str, module: nn.Module, state: ModelState, options: ShardOptions
) -> bool:
    """Return True if a module's parameters are fp32, and stock keeps fp32 in a bf16 or fp16 model.

    `name` is the name of the module in `model`.
    """
    dtype = options.mp_policy.param_dtype
    kept = list_kept_in_fp32(model, dtype) if dtype in (torch.bfloat16, torch.float16) else []
    own = {
        parameter: _find_stock_name(f"{name}.{own_name}", state)
        for own_name, parameter in module.named_parameters()
        if parameter not in options.ignored_params
    }
    is_kept = any(pattern.search(name) for pattern in kept for name in own.values())
    return is_kept and all(parameter.dtype == torch.float32 for parameter in own)


def _find_stock_name(name: str, state: ModelState) -> str:
    """Return the name in the stock model; a module of an MTP head gets its name in layer 0."""
    return make_name_in_layer(remove_names_of_copies(get_stock_name(name)), state.plan)


def _make_fp32_kwargs(options: ShardOptions) -> dict[str, Any]:
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

    Compiled layers need this, because torch.compile cannot trace the hooks with which FSDP2 gathers
    a separate unit. It is only possible without expert parallelism: the experts and the rest of
    their layer are then sharded over the same ranks.
    """
    config = state.config
    if config.compile_kwargs is None or meshes.dispatch.size() > 1:
        return False
    if config.experts_backend == "eager":
        return False
    expert_parameters = [p for experts in units.all_experts for p in experts.parameters()]
    has_own_layout = any(
        parameter not in entries
        or entries[parameter].stack is not None
        or entries[parameter].quantisation is not None
        for parameter in expert_parameters
    )
    layer_parameters = (parameter for layer in units.layers for parameter in layer.parameters())
    dtypes = {parameter.dtype for parameter in layer_parameters if parameter in entries}
    return not has_own_layout and len(dtypes) == 1


def _choose_placement_in_layer(
    stacked: set[nn.Parameter], state: ModelState, meshes: Meshes, parameter: nn.Parameter
) -> Shard:
    """Choose the dim along which FSDP2 shards a parameter of a layer that includes its experts."""
    if parameter not in stacked:
        return Shard(0)
    shard_dim = state.config.expert_shard_dim
    return Shard(choose_shard_dim(parameter.shape, shard_dim, meshes.ep_fsdp_size))


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


def _list_unshared(experts: Iterable[nn.Module], entries: ParameterEntries) -> set[nn.Parameter]:
    """Return the parameters of experts modules that belong to single experts."""
    parameters = {parameter for module in experts for parameter in module.parameters()}
    return {parameter for parameter in parameters if not is_shared(parameter, entries)}


def _list_sharded_parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of modules that another unit has already sharded."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return {parameter for parameter in parameters if isinstance(parameter, DTensor)}


def _add_ignored(options: ShardOptions, parameters: set[nn.Parameter]) -> ShardOptions:
    return replace(options, ignored_params=options.ignored_params | parameters)


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
