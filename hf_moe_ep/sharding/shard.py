"""Turn a patched model into FSDP2 units: experts split over ep, then everything sharded.

    unit                 mesh                          gradient
    experts of a layer,  ep_fsdp, after Shard(0) / ep  summed; 1/world applied in our backward,
    and their adapters                                 under fp16 partly behind the sum
    decoder layer, and   fsdp                          averaged by FSDP2
    what its experts share
    vision block, tower  fsdp
    encoder              fsdp, gathered by `vision/encoders.py`, its gradients given away at the end
    embedding            fsdp
    final norm + head    fsdp, kept gathered between forward and backward
    root (the rest)      fsdp
    correction biases    none: whole on every rank, in the dtype that they were loaded in

With tied weights embedding, norm and head are one unit, because a parameter may live in one only.
Expert weights stay DTensors of global shape [E, ...] on (ep_fsdp, ep), so a checkpoint of them
can be loaded at any other layout.

A norm behind each expert has one weight for all experts of its layer. A rank applies it to the
outputs of its own experts, for tokens of its whole ep group: each pair of a token and an expert
adds to the gradient on one rank alone. So the average that FSDP2 takes over all ranks is that of
any other weight of the layer, and there the norm is. FSDP2 gives a unit nothing that is inside
another one: the layer becomes a unit before its experts do, and is told to ignore what is theirs.

Frozen experts that are to be held quantised (`ParallelConfig.experts_dtype`) become bytes and
scales where they get their values; their unit is gathered as it lies, in no dtype of a policy.

Every parameter and buffer starts with rank 0's value (`values.py`), unit by unit: nothing larger
than one unit is ever whole on a device. Parameters that are on the meta device on every rank stay
there, to be read from a checkpoint (`checkpoints/hub/read.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hf_moe_ep.moe.dispatch.choose import make_dispatcher
from hf_moe_ep.moe.forwards import keep_forwards
from hf_moe_ep.ops.quantised import rows_may_be_cut
from hf_moe_ep.ranks.mesh import Meshes, build_meshes
from hf_moe_ep.sharding.checks import (
    check_dtypes,
    check_frozen,
    check_nodes,
    check_packed,
    check_quantised_frozen,
    check_ranks_agree,
)
from hf_moe_ep.sharding.options import ShardOptions, grad_divisors
from hf_moe_ep.sharding.units import (
    find_units,
    handle_reentrant_checkpoints,
    keep_last_layer,
    set_prefetch,
)
from hf_moe_ep.sharding.values import (
    Place,
    Places,
    broadcast_unsharded,
    find_places,
    hold_correction_biases,
    materialize,
)
from hf_moe_ep.state import STATE, ModelState, MoELayer
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.experts_interface import post_expert_norm
from hf_moe_ep.upstream.models import keep_packing
from hf_moe_ep.upstream.module_names import canonical_name
from hf_moe_ep.upstream.sharded_models import (
    bytes_as_parameters,
    keep_recorded_outputs,
    mark_fsdp_managed,
    without_forward_hooks,
)


def shard_model(
    model: nn.Module, state: ModelState, options: ShardOptions, device: torch.device
) -> nn.Module:
    """Shard a patched model in place over the default process group; every rank calls this.

    Raises:
        ValueError: on every rank, where ranks disagree, sizes do not fit the world, or weights
            are missing.
    """
    check_ranks_agree(model, state, options)
    check_nodes(state.config)
    meshes = state.meshes_beside
    if meshes is None or not meshes.fit(state.config, device):
        meshes = build_meshes(state.config, device)
    state.dispatcher = make_dispatcher(state.config, meshes, num_experts=state.num_experts)
    return shard_units(model, state, options, meshes)


def shard_units(
    model: nn.Module, state: ModelState, options: ShardOptions, meshes: Meshes
) -> nn.Module:
    """Shard a model over `meshes`, on ranks that are known to agree."""
    keep_forwards(state)
    units = find_units(model, state.plan)
    check_frozen(model, units.all_experts)
    places = find_places(model, units.all_experts, state.plan, options)
    check_quantised_frozen(model, places)
    check_packed(model, options)
    keep_packing(model)
    for experts in units.all_experts:
        _check_shared(experts, places, state)
        _check_expert_shard_dim(experts, places, state, meshes)
    state.dtypes = {canonical_name(name): p.dtype for name, p in model.named_parameters()}
    broadcast_unsharded(model, options, meshes.device)
    biases = hold_correction_biases(model, options, meshes.device)
    options = replace(options, ignored_params=options.ignored_params | biases)
    fill = partial(_fill, places=places, meshes=meshes, options=options)
    shard = partial(fully_shard, mesh=meshes.dense, **options.fully_shard_kwargs())
    for index, layer in enumerate(units.layers):
        of_layer = units.experts.get(index, ())
        without_experts = _ignoring(options, _owned_by_experts(of_layer, places))
        fill([layer], options=without_experts)
        shard(layer, ignored_params=set(without_experts.ignored_params))
        for experts in of_layer:
            shared = _sharded(experts)
            filled = fill([experts])
            _shard_experts(experts, filled, state, meshes, _ignoring(options, shared))
    for part in units.vision:
        fill([part])
        shard(part)
    for part in units.encoders:
        fill([part])
        with without_forward_hooks(part):
            state.encoders.append(shard(part))
    if units.embedding is not None and not units.tied:
        fill([units.embedding])
        shard(units.embedding)
    if units.tail:
        fill(units.tail)
        shard(units.tail, reshard_after_forward=False)
    fill([model])
    root = _root(model)
    _shard_root(root, meshes, options)
    keep_last_layer(units, root)
    handle_reentrant_checkpoints(units, root)
    set_prefetch(units)
    mark_fsdp_managed(model)
    keep_recorded_outputs(model)
    state.meshes, state.policy = meshes, options.mp_policy
    return model


def _fill(
    modules: Iterable[nn.Module], places: Places, meshes: Meshes, options: ShardOptions
) -> Places:
    """Give one unit's parameters their values, and take their places out of `places`.

    Returns the places of what is there now.
    """
    found = (p for module in modules for p in module.parameters())
    parameters = dict.fromkeys(p for p in found if p not in options.ignored_params)
    check_dtypes(parameters, options)
    filled: Places = {}
    for parameter in parameters:
        # What another unit holds too, through a tie, has its value and its place no more.
        place = places.pop(parameter, None)
        if place is None:
            continue
        filled |= dict.fromkeys(materialize(place, meshes, options), place)
    return filled


def _shard_experts(
    experts: nn.Module,
    filled: Places,
    state: ModelState,
    meshes: Meshes,
    options: ShardOptions,
) -> None:
    shard_dim = state.config.expert_shard_dim

    def placement(parameter: nn.Parameter) -> Shard:
        shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
        place = filled.get(parameter)
        if place is not None and place.quantisation is not None:
            return _quantised_placement(place, shard_dim, meshes)
        is_factor = place is not None and place.stack is not None
        return _expert_placement(shape, "auto" if is_factor else shard_dim, meshes.ep_fsdp_size)

    quantised = [place for place in filled.values() if place.quantisation is not None]
    kwargs = options.fully_shard_kwargs()
    # Routing weights arrive in fp32 and stay so.
    kwargs["mp_policy"] = replace(options.mp_policy, cast_forward_inputs=False)
    if quantised:
        kwargs["mp_policy"] = _gathered_as_it_lies(kwargs["mp_policy"])
    with bytes_as_parameters() if quantised else nullcontext():
        fully_shard(experts, mesh=meshes.ep_fsdp, shard_placement_fn=placement, **kwargs)
    if state.config.experts_backend == "eager":
        return
    assert isinstance(experts, FSDPModule)
    # Sum: run_experts divides by the world. FSDP2's own factor would become PREMUL_SUM, which
    # gloo rejects and NCCL zeroes in bf16 (https://github.com/pytorch/pytorch/issues/190747).
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    loaded = quantised[0].parameter if quantised else next(experts.parameters())
    dtype = options.mp_policy.param_dtype or loaded.dtype
    # Adapters are wrapped around the module that is ours.
    layer: MoELayer = next(vars(m)[STATE] for m in experts.modules() if STATE in vars(m))
    layer.grad_divisor, after = grad_divisors(
        dtype,
        options.mp_policy.reduce_dtype or dtype,
        ep_size=meshes.ep_size,
        world_size=meshes.world_size,
    )
    if after > 1:
        # FSDP2's factor would divide twice where ep_fsdp is one rank (torch 2.13).
        experts.set_all_reduce_hook(partial(_divide, by=after))


def _gathered_as_it_lies(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of a unit with bytes: FSDP2 would round their scales, torch 2.11 the bytes.

    What lies beside them is cast behind the gather, in `moe/experts.py`.
    """
    return replace(policy, param_dtype=None)


def _divide(reduced: torch.Tensor, by: int) -> None:
    reduced.div_(by)


def _is_shared(parameter: nn.Parameter, places: Places) -> bool:
    """Return whether a parameter in an experts module belongs to all of its experts."""
    return parameter in places and not places[parameter].over_ep


def _owned_by_experts(experts: Iterable[nn.Module], places: Places) -> set[nn.Parameter]:
    parameters = {parameter for module in experts for parameter in module.parameters()}
    return {parameter for parameter in parameters if not _is_shared(parameter, places)}


def _sharded(module: nn.Module) -> set[nn.Parameter]:
    """Collect what units that there are hold of a module that is none yet."""
    return {parameter for parameter in module.parameters() if isinstance(parameter, DTensor)}


def _ignoring(options: ShardOptions, parameters: set[nn.Parameter]) -> ShardOptions:
    return replace(options, ignored_params=options.ignored_params | parameters)


def _check_shared(experts: nn.Module, places: Places, state: ModelState) -> None:
    """Raise where experts share a parameter that `run_experts` does not apply."""
    if state.config.experts_backend == "eager":
        return
    norms = filter(None, map(post_expert_norm, experts.modules()))
    applied = {parameter for norm in norms for parameter in norm.parameters()}
    for name, parameter in experts.named_parameters():
        trained = parameter.requires_grad and parameter not in applied
        if trained and _is_shared(parameter, places):
            raise ValueError(
                f"{name} of {type(experts).__name__} belongs to all experts of a layer, and of "
                f"such parameters a norm behind each expert (post_expert_norm) is the only one "
                f"that is applied and trained here; freeze it (requires_grad_(False)) if it is "
                f"not used, or run the model's own code: experts_backend='eager', ep_size=1"
            )


def _check_expert_shard_dim(
    experts: nn.Module, places: Places, state: ModelState, meshes: Meshes
) -> None:
    """Raise where weights cannot be split as the config asks; factors lie as they can."""
    for weight in experts.parameters():
        if _is_shared(weight, places):
            continue
        if weight in places and places[weight].stack is not None:
            continue
        if weight in places and places[weight].quantisation is not None:
            _quantised_placement(places[weight], state.config.expert_shard_dim, meshes)
            continue
        local = torch.Size([weight.shape[0] // meshes.ep_size, *weight.shape[1:]])
        _expert_placement(local, state.config.expert_shard_dim, meshes.ep_fsdp_size)


def _expert_placement(shape: torch.Size, shard_dim: str | int, ep_fsdp_size: int) -> Shard:
    """Choose where FSDP2 splits a weight of this rank's experts; `shape` is local to the ep rank.

    Dim 0 where it divides evenly: gathering along any other dim costs FSDP2 one more copy of
    every expert weight each way. Dim 1 else, because padding dim 0 leaves ranks without a share.
    """
    even = len(shape) > 1 and shape[1] % ep_fsdp_size == 0
    if shard_dim == 1 and not even:
        raise ValueError(
            f"expert_shard_dim=1 splits dim 1 of an expert weight {tuple(shape)} evenly over "
            f"ep_fsdp ({ep_fsdp_size}), which does not divide it; try expert_shard_dim='auto'"
        )
    wants_dim_1 = shard_dim == 1 or (shard_dim == "auto" and shape[0] % ep_fsdp_size != 0)
    return Shard(1) if even and wants_dim_1 else Shard(0)


def _quantised_placement(place: Place, shard_dim: str | int, meshes: Meshes) -> Shard:
    """Choose where FSDP2 splits the bytes of a stacked matrix and their scales: all alike.

    As `_expert_placement`, and along dim 1 only where that cuts no block.
    """
    quantisation, parts = place.quantisation, meshes.ep_fsdp_size
    assert quantisation is not None
    experts, *shape_OI = place.local_LOI(meshes.ep_size)
    rows, columns = shape_OI
    may_cut = rows_may_be_cut((rows, columns), quantisation, parts)
    if shard_dim == 1 and not may_cut:
        _, name = place.owners[0]
        nested = ", whose scales share others by 256" if quantisation.nested else ""
        raise ValueError(
            f"expert_shard_dim=1 splits the {rows} rows of {name} [out {rows}, in {columns}] over "
            f"ep_fsdp ({parts}) and would cut a block of {quantisation.kind}{nested}; try "
            f"expert_shard_dim='auto' or 0"
        )
    wants_dim_1 = shard_dim == 1 or (shard_dim == "auto" and experts % parts != 0)
    return Shard(1) if may_cut and wants_dim_1 else Shard(0)


def _shard_root(root: nn.Module, meshes: Meshes, options: ShardOptions) -> None:
    kwargs = options.fully_shard_kwargs()
    del kwargs["reshard_after_forward"]  # FSDP2's own choice for a root: kept
    # A low-precision output_dtype would round the loss itself.
    kwargs["mp_policy"] = replace(options.mp_policy, output_dtype=None)
    fully_shard(root, mesh=meshes.dense, **kwargs)


def _root(model: nn.Module) -> nn.Module:
    """Find the module to make the root of: within a PeftModel, `generate` calls the inner model."""
    inner: nn.Module = without_adapters(model)
    inside = {id(parameter) for parameter in inner.parameters()}
    return inner if all(id(parameter) in inside for parameter in model.parameters()) else model
