"""Make FSDP2 units of experts modules: choose the dim to shard, and how gradients are reduced.

FSDP2 shards each tensor of experts along one dim over ep_fsdp (`choose_shard_dim`). With
expert_shard_dim="auto", 6 experts per rank and an ep_fsdp group of 4 ranks:

    gate_up_proj [6, 32, 48]    4 divides 32 but not 6: dim 1, each rank has [6, 8, 48]
    down_proj    [6, 33, 24]    4 divides neither: dim 0, padded; ranks have 2, 2, 2 and 0 experts

The dim of a LoRA factor of experts is chosen as with "auto", whatever the option says (with
etp_size > 1, see `_choose_dim`).

FSDP2 sums the gradients over ep_fsdp without dividing them, because our backward has divided them
(`choose_grad_divisors` in `options.py`). `shard.py` decides which modules are units, and sets the
values of their parameters before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hf_moe_ep.etp import Cut
from hf_moe_ep.ops.quantised import (
    BLOCK_SCALE,
    NESTED_SCALE,
    can_cut_rows,
    get_block_shape,
)
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.sharding.options import ShardOptions, choose_grad_divisors
from hf_moe_ep.sharding.values import ParameterEntries, ParameterEntry
from hf_moe_ep.sharding.whole_experts import can_stay_whole, keep_whole
from hf_moe_ep.state import ModelState, iterate_experts_modules
from hf_moe_ep.upstream.experts_interface import post_expert_norm
from hf_moe_ep.upstream.modules import keep_dtypes
from hf_moe_ep.upstream.sharded_models import bytes_as_parameters, fully_shard_tied


def shard_experts(
    experts: Sequence[nn.Module],
    entries: ParameterEntries,
    state: ModelState,
    meshes: Meshes,
    options: ShardOptions,
) -> None:
    """Make an experts module, or two with the same parameters, an FSDP2 unit on ep_fsdp.

    Args:
        experts: the modules with PEFT's wrappers. Their parameters are materialized.
        entries: the entries of these parameters.
    """
    shard_dim = state.config.expert_shard_dim
    # `experts` may be PEFT's wrappers, which contain the patched modules.
    inner = [module for wrapper in experts for module in wrapper.modules()]
    layers = [layer for wrapper in experts for _, _, layer in iterate_experts_modules(wrapper)]

    def placement(parameter: nn.Parameter) -> Shard:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(_choose_dim(local.shape, entries.get(parameter), shard_dim, meshes))

    quantised = [entry for entry in entries.values() if entry.quantisation is not None]
    kwargs = options.fully_shard_kwargs()
    # Routing weights may be wider than the rows, and must not be cast.
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
    divisor, after = choose_grad_divisors(
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


def choose_shard_dim(
    shape: Sequence[int],
    shard_dim: str | int,
    ranks: int,
    *,
    dims: Iterable[int] = (0, 1),
    allowed: Callable[[int], bool] = lambda dim: True,
) -> int:
    """Choose the dim along which FSDP2 shards a tensor of experts over the ranks of ep_fsdp.

    Args:
        shape: the shape of the tensor on each of these ranks.
        shard_dim: `ParallelConfig.expert_shard_dim`. "auto" takes the first of `dims` that `ranks`
            divides and that is `allowed`. Dim 0 comes first, because along other dims FSDP2 copies
            the tensor once more, in the all-gather and in the reduce-scatter. If there is no such
            dim, the shards of dim 0 are padded, and a rank may have only padding.

    Raises:
        ValueError: `shard_dim` is 1, and dim 1 cannot be sharded evenly.
    """
    even = [dim for dim in dims if dim < len(shape) and shape[dim] % ranks == 0 and allowed(dim)]
    if shard_dim == "auto":
        return even[0] if even else 0
    if shard_dim == 1 and 1 not in even:
        raise ValueError(
            f"expert_shard_dim=1 shards dim 1 of an expert weight {tuple(shape)} evenly over "
            f"ep_fsdp ({ranks}), but {ranks} does not divide dim 1; try expert_shard_dim='auto'"
        )
    return int(shard_dim)


def _choose_dim(
    shape: Sequence[int], entry: ParameterEntry | None, shard_dim: str | int, meshes: Meshes
) -> int:
    """Choose the dim along which FSDP2 shards a parameter of experts.

    `shape` is the shape that a rank holds before FSDP2 shards the parameter. A dim that etp has cut
    is not sharded again, and shards split no block of quantised values. With etp a rank often has
    few experts, so every dim may be chosen. Usually it is H: the columns of gate and up, the rows
    of down.
    """
    ranks, with_etp = meshes.ep_fsdp_size, meshes.etp_size > 1
    if entry is None:
        return choose_shard_dim(shape, shard_dim, ranks)
    cut = entry.held_cut if with_etp else Cut(None)
    assert cut is not None

    def allowed(dim: int) -> bool:
        is_cut = dim in (cut.held_dim, cut.split_dim)
        return not is_cut and _splits_no_block(entry, dim, len(shape), ranks)

    if entry.stack is not None and not with_etp:
        shard_dim = "auto"  # the option does not apply to the factors of adapters
    dims = range(len(shape)) if with_etp else (0, 1)
    return choose_shard_dim(shape, shard_dim, ranks, dims=dims, allowed=allowed)


def _splits_no_block(entry: ParameterEntry, dim: int, ndim: int, ranks: int) -> bool:
    """Return True if equal shards along a dim split no block of quantised values.

    The answer is the same for the bytes of a matrix and for its scales. Both have `ndim` dims.
    """
    if entry.quantisation is None or dim == 0:
        return True
    rows, columns = entry.matrix_shape
    if dim < ndim - 1:
        return can_cut_rows((rows, columns), entry.quantisation, ranks)
    _, block_columns = get_block_shape(entry.quantisation)
    return columns % (block_columns * ranks) == 0


def check_expert_shard_dim(
    experts: nn.Module, entries: ParameterEntries, state: ModelState, meshes: Meshes
) -> None:
    """Raise ValueError if expert_shard_dim=1 is set and a weight cannot be sharded along dim 1."""
    ranks = meshes.ep_fsdp_size
    for weight in experts.parameters() if state.config.expert_shard_dim == 1 else ():
        entry = entries.get(weight)
        if is_shared(weight, entries) or (entry is not None and entry.stack is not None):
            continue
        if entry is None or entry.quantisation is None:
            choose_shard_dim((weight.shape[0] // meshes.ep_size, *weight.shape[1:]), 1, ranks)
        elif not _splits_no_block(entry, 1, 3, ranks):
            rows, columns = entry.matrix_shape
            _, name = entry.owners[0]
            nested = " or 256 scales that share a nested scale" if entry.quantisation.nested else ""
            raise ValueError(
                f"expert_shard_dim=1 shards the {rows} rows of {name} [out {rows}, in {columns}] "
                f"over ep_fsdp ({ranks}) and would split a block of {entry.quantisation.kind} "
                f"values that share a scale{nested}; try expert_shard_dim='auto' or 0"
            )


def is_shared(parameter: nn.Parameter, entries: ParameterEntries) -> bool:
    """Return True if all experts of a module use this parameter, so it is not split over ep."""
    return parameter in entries and not entries[parameter].over_ep


def check_shared(experts: nn.Module, entries: ParameterEntries, state: ModelState) -> None:
    """Raise ValueError if experts share a trainable parameter that `run_experts` does not use."""
    if state.config.experts_backend == "eager":
        return
    norms = filter(None, map(post_expert_norm, experts.modules()))
    norm_parameters = {parameter for norm in norms for parameter in norm.parameters()}
    for name, parameter in experts.named_parameters():
        is_unused = parameter not in norm_parameters and is_shared(parameter, entries)
        if is_unused and parameter.requires_grad:
            raise ValueError(
                f"{name} of {type(experts).__name__} belongs to all experts of a layer, and the "
                f"only such parameter that hf_moe_ep can compute with and train is the weight of "
                f"post_expert_norm, a norm after each expert; if the model does not use {name}, "
                f"freeze it with requires_grad_(False), otherwise run the model's own code: "
                f"experts_backend='eager', ep_size=1"
            )


def keep_scales(experts: nn.Module) -> None:
    """Let quantised experts keep their scales in fp32, for example with `bf16_full_eval`.

    The stored bytes would stand for other numbers with rounded scales.
    """
    ends = (BLOCK_SCALE, NESTED_SCALE)
    for module in experts.modules():  # PEFT may have wrapped the experts
        named = module.named_parameters(recurse=False)
        if scales := [name for name, _ in named if name.endswith(ends)]:
            keep_dtypes(module, setattr, scales)
