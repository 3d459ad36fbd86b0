"""Checks before sharding, for mistakes that FSDP2 reports late, without a remedy, or never."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.config import ParallelConfig, launched_local_rank, launched_local_world_size
from hf_moe_ep.ranks.together import differing, is_first, this_rank, together
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.values import ParameterEntries
from hf_moe_ep.state import STATE, ModelState, MoELayer
from hf_moe_ep.upstream.models import is_quantized, model_config_fields, packed_parameters
from hf_moe_ep.upstream.module_names import canonical_name


def check_ranks_agree(model: nn.Module, state: ModelState, options: ShardOptions) -> None:
    """Raise on every rank if models, configs or policies differ, or if rank 0 has no weights."""
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
    # Last: most differences of a field, such as the number of layers, are clearer in the above.
    for name, value in sorted(model_config_fields(model).items()):
        mine[f"{name} of the model's config"] = repr(value)
    loaded = [p for p in model.parameters() if p not in options.empty_params]
    tensors = [*loaded, *model.buffers()]
    on_meta = [tensor for tensor in tensors if tensor.is_meta]
    by_rank = differing(mine) or [mine]
    for name, expected in by_rank[0].items():
        odd = [rank for rank, theirs in enumerate(by_rank) if theirs.get(name) != expected]
        if odd:
            theirs = by_rank[odd[0]].get(name)
            raise ValueError(
                f"ranks disagree about {name}: rank 0 has {expected}, rank {odd[0]} has {theirs}; "
                f"every rank must patch the same model with the same arguments (a size or an "
                f"environment variable may depend on the rank)"
            )
    together("sharding", partial(_check_first_has_values, len(on_meta), len(tensors)))


def _check_first_has_values(missing: int, tensors: int) -> None:
    if missing and is_first():
        raise ValueError(
            f"{missing} of {tensors} parameters and buffers of rank 0 are on the meta device "
            f"and have no values; load the model with from_pretrained before sharding, at least on "
            f"rank 0, or name the checkpoint: apply_ep_fsdp2(model, weights=directory)"
        )


def check_nodes(config: ParallelConfig) -> None:
    """Raise on every rank if the launcher did not number ranks machine by machine.

    A `node_size` that the user chose is not checked.
    """
    if config.dispatcher == "hierarchical" and (config.ep_size or 1) > 1:
        together("checking the ranks of a node", lambda: _check_local_rank(config.node_size))


def _check_local_rank(node_size: int | None) -> None:
    local_rank, rank = launched_local_rank(), this_rank()
    if node_size is None or local_rank is None or node_size != launched_local_world_size():
        return
    if rank % node_size != local_rank:
        raise ValueError(
            f"rank {rank} has LOCAL_RANK {local_rank} on a machine of {node_size} ranks, but "
            f"dispatcher='hierarchical' takes {node_size} consecutive ranks as a node, so its "
            f"local rank would be {rank % node_size}; number ranks machine by machine, as torchrun "
            f"and accelerate launch do (srun: --distribution=block), or use dispatcher='all_to_all'"
        )


def check_frozen(model: nn.Module, experts: Iterable[nn.Module]) -> None:
    """Raise if a quantized model has trainable experts, which bitsandbytes silently skipped."""
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
            f"of its experts as they were ({name}, {dtype}) and trainable; freeze them with "
            f"get_peft_model(model, lora_config), or load without the quantization_config"
        )


def check_quantised_frozen(model: nn.Module, entries: ParameterEntries) -> None:
    """Raise if a weight that `experts_dtype` quantises is trainable."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, entry in entries.items():
        if entry.quantisation is not None and parameter.requires_grad:
            kind = entry.quantisation.kind
            raise ValueError(
                f"experts_dtype={kind!r} quantises frozen experts, but {names[parameter]} is "
                f"trainable; attach adapters with get_peft_model(model, lora_config), which "
                f"freezes it, or call requires_grad_(False) on it, or leave experts_dtype out"
            )


def check_packed(model: nn.Module, options: ShardOptions) -> None:
    """Raise if FSDP2 would cast packed 4-bit weights, whose bits are codes and not numbers."""
    dtype = options.mp_policy.param_dtype
    packed = {id(parameter) for parameter in packed_parameters(model)}
    for name, parameter in model.named_parameters():
        cast = dtype is not None and parameter.dtype != dtype
        if id(parameter) in packed and parameter not in options.ignored_params and cast:
            raise ValueError(
                f"{name} stores 4-bit codes as {parameter.dtype} (bnb_4bit_quant_storage), but "
                f"parameters are gathered in {dtype}, and the cast would destroy them; load with "
                f"BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage={dtype})"
            )


def check_dtypes(parameters: Iterable[nn.Parameter], options: ShardOptions) -> None:
    """Raise if the parameters of one unit have several dtypes, which FSDP2 does not support."""
    dtypes = {
        str(p.dtype)
        for p in parameters
        if p.requires_grad and not isinstance(p, DTensor) and p not in options.ignored_params
    }
    if len(dtypes) > 1 and not options.fp32_masters:
        raise ValueError(
            f"trainable parameters of one layer have dtypes {' and '.join(sorted(dtypes))}, but "
            f"FSDP2 needs one; launch with mixed_precision: bf16 (all get fp32 masters), or create "
            f"adapters in the model's dtype: get_peft_model(..., autocast_adapter_dtype=False)"
        )
