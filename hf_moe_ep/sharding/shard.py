"""Shard a patched model: split experts over ep, then make FSDP2 units of all modules.

    unit                 mesh                          gradient
    experts of a layer,  ep_fsdp, after Shard(0) / ep  divided by the world in our backward, then
    and their adapters                                 summed; fp16 and "eager": see below
    decoder layer, and   fsdp                          averaged by FSDP2
    weights that all its
    experts share
    vision block, tower  fsdp                          averaged by FSDP2
    encoder              fsdp; `vision/encoders.py`    averaged by FSDP2, at the end of backward
                         gathers it
    embedding            fsdp                          averaged by FSDP2
    final norm + head    fsdp; stays gathered between  averaged by FSDP2
                         forward and backward
    root (the rest)      fsdp                          averaged by FSDP2
    correction biases    not sharded; in the dtype in  none
                         which they were loaded

`grad_divisors` (`sharding/options.py`) chooses the divisor of our backward. With fp16 it is smaller
than the world, and the rest is applied after the sum. The code of the model itself
(experts_backend="eager") does not divide, so FSDP2 averages the gradients of its experts.

With tied weights embedding, norm and head are one unit, because a parameter can be in one unit
only. Expert weights stay DTensors of global shape [E, ...] on (ep_fsdp, ep), so a checkpoint can be
loaded with any other layout.

In some models a norm follows each expert, with one weight for all experts of a layer. A rank
applies the norm to the outputs of its own experts, for the tokens of its whole ep group, so each
pair of a token and an expert adds to the gradient on exactly one rank. Averaging over all ranks is
therefore right for this weight, as for any other weight of the layer, and it belongs to the unit of
the layer. A unit of FSDP2 cannot hold a parameter of a module that is a unit itself. So the layer
becomes a unit before its experts do, and ignores the other parameters of the experts.

Frozen experts that `ParallelConfig.experts_dtype` quantises become bytes and scales when they get
their values. Their unit is gathered without a cast.

Every parameter and buffer starts with the value of rank 0 (`values.py`), one unit after another, so
a device never holds more than one whole unit. Parameters that are on the meta device on every rank
stay there, and are read from a checkpoint later (`checkpoints/hub/read.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
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
    allow_reentrant_checkpoints,
    find_units,
    keep_last_layer,
    set_prefetch,
)
from hf_moe_ep.sharding.values import (
    ParameterEntries,
    ParameterEntry,
    broadcast_correction_biases,
    broadcast_unsharded,
    find_entries,
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
        ValueError: on every rank, if ranks disagree, sizes do not divide the world, or weights are
            missing.
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
    """Shard a model over `meshes`, without comparing the ranks."""
    keep_forwards(state)
    units = find_units(model, state.plan)
    check_frozen(model, units.all_experts)
    entries = find_entries(model, units.all_experts, state.plan, options)
    check_quantised_frozen(model, entries)
    check_packed(model, options)
    keep_packing(model)
    for experts in units.all_experts:
        _check_shared(experts, entries, state)
        _check_expert_shard_dim(experts, entries, state, meshes)
    state.dtypes = {canonical_name(name): p.dtype for name, p in model.named_parameters()}
    broadcast_unsharded(model, options, meshes.device)
    biases = broadcast_correction_biases(model, options, meshes.device)
    options = replace(options, ignored_params=options.ignored_params | biases)
    fill = partial(_fill, entries=entries, meshes=meshes, options=options)
    shard = partial(fully_shard, mesh=meshes.dense, **options.fully_shard_kwargs())
    for index, layer in enumerate(units.layers):
        of_layer = units.experts.get(index, ())
        without_experts = _ignoring(options, _owned_by_experts(of_layer, entries))
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
    allow_reentrant_checkpoints(units)
    set_prefetch(units)
    mark_fsdp_managed(model)
    keep_recorded_outputs(model)
    state.meshes, state.policy = meshes, options.mp_policy
    return model


def _fill(
    modules: Iterable[nn.Module], entries: ParameterEntries, meshes: Meshes, options: ShardOptions
) -> ParameterEntries:
    """Give the parameters of one unit their values, and remove their entries from `entries`.

    Returns the new parameters with the entries of the old ones.
    """
    found = (p for module in modules for p in module.parameters())
    parameters = dict.fromkeys(p for p in found if p not in options.ignored_params)
    check_dtypes(parameters, options)
    filled: ParameterEntries = {}
    for parameter in parameters:
        # A tied parameter that an earlier unit holds has its value, and no entry any more.
        entry = entries.pop(parameter, None)
        if entry is None:
            continue
        filled |= dict.fromkeys(materialize(entry, meshes, options), entry)
    return filled


def _shard_experts(
    experts: nn.Module,
    filled: ParameterEntries,
    state: ModelState,
    meshes: Meshes,
    options: ShardOptions,
) -> None:
    shard_dim = state.config.expert_shard_dim

    def placement(parameter: nn.Parameter) -> Shard:
        shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
        entry = filled.get(parameter)
        if entry is not None and entry.quantisation is not None:
            return _quantised_placement(entry, shard_dim, meshes)
        is_factor = entry is not None and entry.stack is not None
        return _expert_placement(shape, "auto" if is_factor else shard_dim, meshes.ep_fsdp_size)

    quantised = [entry for entry in filled.values() if entry.quantisation is not None]
    kwargs = options.fully_shard_kwargs()
    # Routing weights are fp32 and must not be cast.
    kwargs["mp_policy"] = replace(options.mp_policy, cast_forward_inputs=False)
    if quantised:
        # FSDP2 would round the scales, and torch 2.11 the bytes too. `moe/experts.py` casts the
        # other parameters of the unit after the all-gather.
        kwargs["mp_policy"] = replace(kwargs["mp_policy"], param_dtype=None)
    with bytes_as_parameters() if quantised else nullcontext():
        fully_shard(experts, mesh=meshes.ep_fsdp, shard_placement_fn=placement, **kwargs)
    if state.config.experts_backend == "eager":
        return
    assert isinstance(experts, FSDPModule)
    # A plain sum: run_experts divides by the world. FSDP2's own divisor would become PREMUL_SUM,
    # which gloo rejects and NCCL zeroes in bf16 (https://github.com/pytorch/pytorch/issues/190747).
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    loaded = quantised[0].parameter if quantised else next(experts.parameters())
    dtype = options.mp_policy.param_dtype or loaded.dtype
    # `experts` may be the wrapper of an adapter, with the patched module inside.
    layer: MoELayer = next(vars(m)[STATE] for m in experts.modules() if STATE in vars(m))
    layer.grad_divisor, after = grad_divisors(
        dtype,
        options.mp_policy.reduce_dtype or dtype,
        ep_size=meshes.ep_size,
        world_size=meshes.world_size,
    )
    if after > 1:
        # FSDP2's own divisor would be applied twice if ep_fsdp has one rank (torch 2.13).
        experts.set_all_reduce_hook(partial(_divide, by=after))


def _divide(reduced: torch.Tensor, by: int) -> None:
    reduced.div_(by)


def _is_shared(parameter: nn.Parameter, entries: ParameterEntries) -> bool:
    """Return True if a parameter of an experts module belongs to all of its experts."""
    return parameter in entries and not entries[parameter].over_ep


def _owned_by_experts(experts: Iterable[nn.Module], entries: ParameterEntries) -> set[nn.Parameter]:
    parameters = {parameter for module in experts for parameter in module.parameters()}
    return {parameter for parameter in parameters if not _is_shared(parameter, entries)}


def _sharded(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a module that other units have already sharded."""
    return {parameter for parameter in module.parameters() if isinstance(parameter, DTensor)}


def _ignoring(options: ShardOptions, parameters: set[nn.Parameter]) -> ShardOptions:
    return replace(options, ignored_params=options.ignored_params | parameters)


def _check_shared(experts: nn.Module, entries: ParameterEntries, state: ModelState) -> None:
    """Raise if experts share a trainable parameter that `run_experts` does not apply."""
    if state.config.experts_backend == "eager":
        return
    norms = filter(None, map(post_expert_norm, experts.modules()))
    applied = {parameter for norm in norms for parameter in norm.parameters()}
    for name, parameter in experts.named_parameters():
        trained = parameter.requires_grad and parameter not in applied
        if trained and _is_shared(parameter, entries):
            raise ValueError(
                f"{name} of {type(experts).__name__} belongs to all experts of a layer, and the "
                f"only such parameter that can be applied and trained here is that of a norm after "
                f"each expert (post_expert_norm); freeze it (requires_grad_(False)) if it is not "
                f"used, or run the model's own code: experts_backend='eager', ep_size=1"
            )


def _check_expert_shard_dim(
    experts: nn.Module, entries: ParameterEntries, state: ModelState, meshes: Meshes
) -> None:
    """Raise if weights cannot be sharded along `expert_shard_dim`, which factors ignore."""
    for weight in experts.parameters():
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
    """Choose the dim along which FSDP2 shards an expert weight of (ep-local) `shape`.

    "auto" is dim 0 if ep_fsdp divides it: along any other dim FSDP2 copies every expert weight once
    more, in the all-gather and in the reduce-scatter. Otherwise it is dim 1, because with a padded
    dim 0 some ranks would have no shard.
    """
    even = len(shape) > 1 and shape[1] % ep_fsdp_size == 0
    if shard_dim == 1 and not even:
        raise ValueError(
            f"expert_shard_dim=1 shards dim 1 of an expert weight {tuple(shape)} evenly over "
            f"ep_fsdp ({ep_fsdp_size}), which does not divide it; try expert_shard_dim='auto'"
        )
    use_dim_1 = shard_dim == 1 or (shard_dim == "auto" and shape[0] % ep_fsdp_size != 0)
    return Shard(1) if even and use_dim_1 else Shard(0)


def _quantised_placement(entry: ParameterEntry, shard_dim: str | int, meshes: Meshes) -> Shard:
    """Choose the dim along which FSDP2 shards the bytes of a stacked matrix and their scales.

    The rule is that of `_expert_placement`, and dim 1 must not split a block of values that share a
    scale.
    """
    quantisation, parts = entry.quantisation, meshes.ep_fsdp_size
    assert quantisation is not None
    experts, *shape_OI = entry.local_LOI(meshes.ep_size)
    rows, columns = shape_OI
    may_cut = rows_may_be_cut((rows, columns), quantisation, parts)
    if shard_dim == 1 and not may_cut:
        _, name = entry.owners[0]
        nested = ", of which 256 share a nested scale" if quantisation.nested else ""
        raise ValueError(
            f"expert_shard_dim=1 shards the {rows} rows of {name} [out {rows}, in {columns}] over "
            f"ep_fsdp ({parts}) and would split a block of {quantisation.kind}{nested}; try "
            f"expert_shard_dim='auto' or 0"
        )
    use_dim_1 = shard_dim == 1 or (shard_dim == "auto" and experts % parts != 0)
    return Shard(1) if may_cut and use_dim_1 else Shard(0)


def _shard_root(root: nn.Module, meshes: Meshes, options: ShardOptions) -> None:
    kwargs = options.fully_shard_kwargs()
    del kwargs["reshard_after_forward"]  # FSDP2's default for a root: it stays gathered
    # A low-precision output_dtype would round the loss.
    kwargs["mp_policy"] = replace(options.mp_policy, output_dtype=None)
    fully_shard(root, mesh=meshes.dense, **kwargs)


def _root(model: nn.Module) -> nn.Module:
    """Find the module for the root unit: in a PeftModel that is the model that `generate` calls."""
    inner: nn.Module = without_adapters(model)
    inside = {id(parameter) for parameter in inner.parameters()}
    return inner if all(id(parameter) in inside for parameter in model.parameters()) else model
