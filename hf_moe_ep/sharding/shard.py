"""Turn a patched model into FSDP2 units: experts split over ep, then everything sharded.

    unit                 mesh                          gradient
    experts of a layer,  ep_fsdp, after Shard(0) / ep  summed; 1/world applied in our backward
    and their adapters
    decoder layer        fsdp                          averaged by FSDP2
    vision block, tower  fsdp
    embedding            fsdp
    final norm + head    fsdp, kept gathered between forward and backward
    root (the rest)      fsdp

With tied weights embedding, norm and head are one unit, because a parameter may live in one only.
Expert weights stay DTensors of global shape [E, ...] on (ep_fsdp, ep), so a checkpoint of them
can be loaded at any other layout.

Every parameter and buffer starts with rank 0's value, unit by unit: each rank builds a random
head or adapter from its own seed, and with memory-efficient loading only rank 0 has weights at
all. Nothing larger than one unit is ever whole on a device. Parameters that are on the meta device
on every rank stay there, to be read from a checkpoint (`hub_read.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from hf_moe_ep.lora.computed import stackers
from hf_moe_ep.moe.dispatch.choose import make_dispatcher
from hf_moe_ep.ranks.mesh import Meshes, build_meshes
from hf_moe_ep.sharding.units import find_units, keep_last_layer, set_prefetch
from hf_moe_ep.state import STATE, ModelState, MoELayer
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.models import is_quantized, model_config_fields
from hf_moe_ep.upstream.module_names import canonical_name
from hf_moe_ep.upstream.modules import own_buffers
from hf_moe_ep.upstream.sharded_models import forget_finished_backward, mark_fsdp_managed


@dataclass(frozen=True)
class ShardOptions:
    """How `fully_shard` is called: the user's or Accelerate's choices.

    Attributes:
        mp_policy: FSDP2's mixed precision.
        offload_policy: FSDP2's CPU offload.
        fp32_masters: hold trainable parameters in fp32.
        reshard_after_forward: as in `fully_shard`.
        ignored_params: parameters FSDP2 leaves alone.
        empty_params: parameters on the meta device, which stay there, the same on every rank.
    """

    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    fp32_masters: bool
    reshard_after_forward: bool
    ignored_params: frozenset[nn.Parameter] = frozenset()
    empty_params: frozenset[nn.Parameter] = frozenset()

    def fully_shard_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "mp_policy": self.mp_policy,
            "offload_policy": self.offload_policy,
            "reshard_after_forward": self.reshard_after_forward,
        }
        if self.ignored_params:
            kwargs["ignored_params"] = set(self.ignored_params)
        return kwargs


def default_policy(model: nn.Module) -> tuple[MixedPrecisionPolicy, bool]:
    """Own loops: compute in the dtype the model was loaded in; (policy, fp32 masters).

    A bf16 or fp16 model trains in that dtype with fp32 master weights and fp32 gradient
    reduction; an fp32 or fp64 model is left as it is.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    low = sorted(dtypes & {torch.bfloat16, torch.float16}, key=str)
    if not low:
        return MixedPrecisionPolicy(), False
    return MixedPrecisionPolicy(param_dtype=low[0], reduce_dtype=torch.float32), True


def default_device() -> torch.device:
    """Where the default process group communicates: this rank's GPU under NCCL, else the CPU."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shard_model(
    model: nn.Module, state: ModelState, options: ShardOptions, device: torch.device
) -> nn.Module:
    """Shard a patched model in place over the default process group; every rank calls this.

    Raises:
        ValueError: on every rank, where ranks disagree, sizes do not fit the world, or weights
            are missing.
    """
    _check_ranks_agree(model, state, options)
    meshes = build_meshes(state.config, device)
    state.dispatcher = make_dispatcher(state.config, meshes, num_experts=state.num_experts)
    return shard_units(model, state, options, meshes)


def shard_units(
    model: nn.Module, state: ModelState, options: ShardOptions, meshes: Meshes
) -> nn.Module:
    """What `shard_model` does once ranks are known to agree."""
    units = find_units(model)
    _check_frozen(model, units.experts.values())
    # Before anything is changed: fully_shard cannot be taken back.
    for experts in units.experts.values():
        factors = stackers(experts)
        for weight in experts.parameters():
            if id(weight) not in factors:
                local = torch.Size([weight.shape[0] // meshes.ep_size, *weight.shape[1:]])
                _expert_placement(local, state.config.expert_shard_dim, meshes.ep_fsdp_size)
    owners = _owners(model)
    state.dtypes = {canonical_name(name): p.dtype for name, p in model.named_parameters()}
    _broadcast_unsharded(model, options, meshes.device)
    kwargs = options.fully_shard_kwargs()
    for index, layer in enumerate(units.layers):
        if index in units.experts:
            _shard_experts(units.experts[index], state, meshes, options, owners)
        _fill([layer], meshes, options, owners)
        fully_shard(layer, mesh=meshes.dense, **kwargs)
        # A checkpoint around the unit recomputes it, hooks and all: CheckpointWrapper does that,
        # and transformers below 5.23.
        layer.register_forward_pre_hook(forget_finished_backward, prepend=True)
    for part in units.vision:
        _fill([part], meshes, options, owners)
        fully_shard(part, mesh=meshes.dense, **kwargs)
        part.register_forward_pre_hook(forget_finished_backward, prepend=True)
    if units.embedding is not None and not units.tied:
        _fill([units.embedding], meshes, options, owners)
        fully_shard(units.embedding, mesh=meshes.dense, **kwargs)
    if units.tail:
        _fill(units.tail, meshes, options, owners)
        fully_shard(units.tail, mesh=meshes.dense, **{**kwargs, "reshard_after_forward": False})
    _fill([model], meshes, options, owners)
    # A low-precision output_dtype at the root would round the loss itself.
    root_policy = replace(options.mp_policy, output_dtype=None)
    del kwargs["reshard_after_forward"]
    root = _root(model)
    fully_shard(root, mesh=meshes.dense, **{**kwargs, "mp_policy": root_policy})
    keep_last_layer(units, root)
    set_prefetch(units)
    mark_fsdp_managed(model)
    state.meshes, state.policy = meshes, options.mp_policy
    return model


def _root(model: nn.Module) -> nn.Module:
    """The model inside a PeftModel, where all parameters are in it: `generate` calls that alone."""
    inner: nn.Module = without_adapters(model)
    inside = {id(parameter) for parameter in inner.parameters()}
    return inner if all(id(parameter) in inside for parameter in model.parameters()) else model


def _check_frozen(model: nn.Module, experts: Iterable[nn.Module]) -> None:
    """bitsandbytes skips stacked experts without a word, and leaves them to be trained."""
    trained = [
        (name, weight.dtype)
        for module in experts
        for name, weight in module.named_parameters()
        if weight.requires_grad and "lora_" not in name
    ]
    if is_quantized(model) and trained:
        name, dtype = trained[0]
        raise ValueError(
            f"this model was loaded with a quantization_config, which left {len(trained)} weights "
            f"of its experts as they were ({name}, {dtype}) and trainable; freeze them by "
            f"get_peft_model(model, lora_config), or load without the quantization_config"
        )


def _shard_experts(
    experts: nn.Module,
    state: ModelState,
    meshes: Meshes,
    options: ShardOptions,
    owners: dict[int, list[tuple[nn.Module, str]]],
) -> None:
    split = stackers(experts)
    for name, parameter in experts.named_parameters():
        if name.rpartition(".")[2] in state.plan.expert_weights:
            split[id(parameter)] = _as_it_is
    _fill([experts], meshes, options, owners, split)
    factors = stackers(experts)
    kwargs = options.fully_shard_kwargs()
    # Routing weights arrive in fp32 and stay so.
    kwargs["mp_policy"] = replace(options.mp_policy, cast_forward_inputs=False)
    shard_dim = state.config.expert_shard_dim

    def placement(parameter: nn.Parameter) -> Shard:
        shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
        wanted = "auto" if id(parameter) in factors else shard_dim
        return _expert_placement(shape, wanted, meshes.ep_fsdp_size)

    fully_shard(experts, mesh=meshes.ep_fsdp, shard_placement_fn=placement, **kwargs)
    experts.register_forward_pre_hook(forget_finished_backward, prepend=True)
    if state.config.experts_backend == "eager":
        return
    assert isinstance(experts, FSDPModule)
    # Sum: run_experts divides by the world. FSDP2's own factor would become PREMUL_SUM, which
    # gloo rejects and NCCL zeroes in bf16 (https://github.com/pytorch/pytorch/issues/190747).
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def _expert_placement(shape: torch.Size, shard_dim: str | int, ep_fsdp_size: int) -> Shard:
    """Where FSDP2 splits a weight of this rank's experts; `shape` is local to the ep rank.

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


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter is registered; several places for a tied one."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    return owners


def _fill(
    modules: Iterable[nn.Module],
    meshes: Meshes,
    options: ShardOptions,
    owners: dict[int, list[tuple[nn.Module, str]]],
    split: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> None:
    """Give one unit's parameters rank 0's values.

    Those whose id is in `split` become Shard(0) on ep, once the function there has put their
    experts in front.
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    _check_dtypes(parameters.values(), options)
    for key, old in parameters.items():
        # A subclass carries state of its own (bitsandbytes' Params4bit) that no copy keeps.
        if isinstance(old, DTensor) or old in options.ignored_params or key not in owners:
            continue
        if type(old) is not nn.Parameter:
            continue
        places = owners.pop(key)
        empty = old in options.empty_params
        value = old.detach() if empty else _from_rank0(old.detach(), meshes.device)
        split_over_ep = key in split and meshes.ep_size > 1
        if key in split:
            value = split[key](value).contiguous()
        if split_over_ep:
            value = value.chunk(meshes.ep_size)[meshes.ep_rank].clone()
        if options.fp32_masters and old.requires_grad and old.is_floating_point():
            value = value.to(torch.float32)
        if split_over_ep:
            value = DTensor.from_local(value, meshes.ep, [Shard(0)], run_check=False)
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for module, name in places:
            setattr(module, name, new)


def _check_dtypes(parameters: Iterable[nn.Parameter], options: ShardOptions) -> None:
    """What FSDP2 would only say in the first forward."""
    dtypes = {
        str(p.dtype)
        for p in parameters
        if p.requires_grad and not isinstance(p, DTensor) and p not in options.ignored_params
    }
    if len(dtypes) > 1 and not options.fp32_masters:
        raise ValueError(
            f"parameters to be trained in one layer have dtypes {' and '.join(sorted(dtypes))}, "
            f"and FSDP2 wants one; launch with mixed_precision: bf16 (all get fp32 masters), or "
            f"make adapters in the model's dtype: get_peft_model(..., autocast_adapter_dtype=False)"
        )


def _broadcast_unsharded(model: nn.Module, options: ShardOptions, device: torch.device) -> None:
    """Rank 0's values for what no unit holds: buffers, and parameters FSDP2 is to ignore."""
    for parameter in model.parameters():
        # In place, because FSDP2 knows an ignored parameter by its identity.
        if parameter in options.ignored_params and type(parameter) is nn.Parameter:
            parameter.data = _from_rank0(parameter.detach(), device)
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                own_buffers(module)[name] = _from_rank0(buffer.detach(), device)


def _from_rank0(tensor: Tensor, device: torch.device) -> Tensor:
    if dist.get_rank() == 0:
        value = tensor.to(device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(value, src=0)
    return value


def _check_ranks_agree(model: nn.Module, state: ModelState, options: ShardOptions) -> None:
    """The same model, config and policy on every rank, and weights at least on rank 0."""
    layers = sorted(
        (getattr(module, STATE).index, canonical_name(name))
        for name, module in model.named_modules()
        if isinstance(getattr(module, STATE, None), MoELayer)
    )
    shapes = [
        (
            canonical_name(name),
            tuple(p.shape),
            str(p.dtype),
            p.requires_grad,
            p in options.empty_params,
        )
        for name, p in model.named_parameters()
    ]
    mine = {
        "config": str(state.config),
        "MoE layers": f"{len(layers)}: {', '.join(name for _, name in layers)}",
        "precision": f"{options.mp_policy}, fp32_masters={options.fp32_masters}",
        "parameters": f"{len(shapes)}, sha256 {hashlib.sha256(str(shapes).encode()).hexdigest()}",
    }
    # Last, because a field like the number of layers shows better in what stands above.
    for name, value in sorted(model_config_fields(model).items()):
        mine[f"{name} of the model's config"] = repr(value)
    loaded = [p for p in model.parameters() if p not in options.empty_params]
    tensors = [*loaded, *model.buffers()]
    on_meta = [tensor for tensor in tensors if tensor.is_meta]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, len(on_meta)))
    reference, missing = everyone[0]
    for name, expected in reference.items():
        odd = [rank for rank, (theirs, _) in enumerate(everyone) if theirs.get(name) != expected]
        if odd:
            theirs = everyone[odd[0]][0].get(name)
            raise ValueError(
                f"ranks disagree about {name}: rank 0 has {expected}, rank {odd[0]} has {theirs}; "
                f"every rank must patch the same model with the same arguments (look for a size "
                f"or an environment variable that depends on the rank)"
            )
    if missing:
        raise ValueError(
            f"{missing} of {len(tensors)} parameters and buffers of rank 0 are on the meta device "
            f"and have no values; load the model with from_pretrained before sharding, on rank 0 "
            f"at least, or name the checkpoint: apply_ep_fsdp2(model, weights=directory)"
        )
