"""Check a model before it is sharded, for mistakes that FSDP2 reports late or not at all.

`check_ranks_agree` and `check_nodes` compare ranks, so every rank must call them. Each of the other
checks looks at the model of one rank only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.config import ParallelConfig, get_launched_local_rank, get_launched_local_world_size
from hf_moe_ep.ranks.all_ranks import find_differing, is_first, run_on_all, this_rank
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.values import ParameterEntries
from hf_moe_ep.state import ModelState, iterate_experts_modules
from hf_moe_ep.upstream.adapters import get_layer_replication, list_adapter_parameter_ids
from hf_moe_ep.upstream.autograd_modes import has_gradient_hooks, has_tensor_hooks
from hf_moe_ep.upstream.models import is_quantized, list_model_config_fields, list_packed_parameters
from hf_moe_ep.upstream.module_names import get_canonical_name
from hf_moe_ep.upstream.modules import get_own_parameters


def check_adapters_separate(model: nn.Module) -> None:
    """Raise ValueError if adapters share weights in a way that sharding would silently end.

    Sharding copies each parameter into memory of its own.
    """
    if replicated := get_layer_replication(model):
        raise ValueError(
            f"layer_replication={replicated} makes several layers share frozen weights, which "
            f"FSDP2 cannot shard; leave it out of the adapter's config"
        )
    names: dict[tuple[int, int], list[str]] = {}
    trained: set[tuple[int, int]] = set()
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        address = parameter.data_ptr(), parameter.numel()
        names.setdefault(address, []).append(get_canonical_name(name))
        if parameter.requires_grad:
            trained.add(address)
    for address, shared_names in names.items():
        if address in trained and len(shared_names) > 1:
            raise ValueError(
                f"{' and '.join(shared_names)} are views of the same numbers, and sharding would "
                f"give each of them numbers of its own; leave out ensure_weight_tying, or adapt "
                f"only one of the tied modules"
            )


def check_no_gradient_hooks(model: nn.Module, options: ShardOptions) -> None:
    """Raise ValueError if the gradients of parameters have hooks, which sharding would lose.

    Sharding replaces all parameters except those that FSDP2 ignores. All ranks raise the error,
    because a script may watch gradients on rank 0 alone.
    """
    hooked = [
        get_canonical_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in options.ignored_params
        if has_tensor_hooks(parameter) or has_gradient_hooks(parameter)
    ]
    run_on_all("sharding", partial(_check_no_hooks, hooked))


def _check_no_hooks(hooked: Sequence[str]) -> None:
    if hooked:
        raise ValueError(
            f"{hooked[0]} (one of {len(hooked)} parameters) has a hook on its gradient, which "
            f"would be lost, because sharding replaces parameters; remove the hook, and call "
            f"register_post_accumulate_grad_hook after sharding. PEFT's OSF needs its hooks: train "
            f"another adapter"
        )


def check_adapters_of_layers_unshared(
    model: nn.Module, layers: Iterable[Sequence[nn.Module]]
) -> None:
    """Raise ValueError if the adapters of two decoder layers have a parameter in common.

    FSDP2 shards a parameter in one unit. `layers` are the modules of each layer's unit.
    """
    adapters, known = list_adapter_parameter_ids(model), set[nn.Parameter]()
    for modules in layers:
        parameters = {p: None for module in modules for p in module.parameters()}
        own = [parameter for parameter in parameters if id(parameter) in adapters]
        for shared in filter(known.__contains__, own):
            names = (name for name, parameter in model.named_parameters() if parameter is shared)
            raise ValueError(
                f"{get_canonical_name(next(names))} belongs to the adapters of several decoder "
                f"layers, and FSDP2 shards a parameter in one layer; train an adapter whose layers "
                f"have parameters of their own, such as LoRA"
            )
        known.update(own)


def check_experts_unshared(model: nn.Module, experts_units: Iterable[Sequence[nn.Module]]) -> None:
    """Raise ValueError if two units of experts have a parameter in common.

    FSDP2 shards a parameter in one unit. The other unit would train a copy of the parameter, and no
    rank would add up the gradients of both.
    """
    names = {module: name for name, module in model.named_modules()}
    known: dict[nn.Parameter, str] = {}
    for modules in experts_units:
        names_in_unit: dict[nn.Parameter, str] = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                names_in_unit.setdefault(parameter, get_canonical_name(f"{names[module]}.{name}"))
        for parameter in filter(known.get, names_in_unit):
            raise ValueError(
                f"{known[parameter]} and {names_in_unit[parameter]} are one parameter, and after "
                f"sharding each of the two layers would train a copy of its own; give the layers "
                f"parameters of their own before patch, or let each rank keep its experts whole: "
                f"ep_size * etp_size must be the number of ranks, without CPU offload"
            )
        known |= names_in_unit


def check_experts_split(experts: nn.Module, entries: ParameterEntries) -> None:
    """Raise ValueError if a tensor of experts would not be split although the experts are.

    Every rank would then compute its own experts with the rows of the first experts.
    """
    for _, module, layer in iterate_experts_modules(experts):
        if layer.compute is None:
            continue
        for name in (name + end for name in layer.compute.parameters for end in ("", "_bias")):
            parameter = getattr(module, name, None)
            if parameter is None or (parameter in entries and entries[parameter].over_ep):
                continue
            raise ValueError(
                f"{name} of {type(module).__name__} is not split over the ranks that share the "
                f"experts, because FSDP's ignored_modules contain it, or because it is not in "
                f"ModelPlan(expert_weights=...); take the experts out of ignored_modules, or add "
                f"{name} to expert_weights"
            )


def check_ranks_agree(model: nn.Module, state: ModelState, options: ShardOptions) -> None:
    """Raise on every rank if models, configs or precisions differ, or if rank 0 has no weights."""
    layers = sorted(
        (layer.index, get_canonical_name(name)) for name, _, layer in iterate_experts_modules(model)
    )
    shapes = [
        (
            get_canonical_name(name),
            tuple(p.shape),
            str(p.dtype),
            p.requires_grad,
            p in options.empty_params,
        )
        for name, p in model.named_parameters()
    ]
    facts = {
        "config": str(state.config),
        "MoE layers": f"{len(layers)}: {', '.join(name for _, name in layers)}",
        "precision": f"{options.mp_policy}, fp32_masters={options.fp32_masters}",
        "parameters": f"{len(shapes)}, sha256 {hashlib.sha256(str(shapes).encode()).hexdigest()}",
    }
    # Only the first difference is reported. Config fields come last, because the facts above are
    # easier to understand. For example, the names of the MoE layers say more than the config field
    # with their number.
    for name, value in sorted(list_model_config_fields(model).items()):
        facts[f"{name} of the model's config"] = repr(value)
    loaded = [p for p in model.parameters() if p not in options.empty_params]
    tensors = [*loaded, *model.buffers()]
    on_meta = [tensor for tensor in tensors if tensor.is_meta]
    facts_by_rank = find_differing(facts) or [facts]
    for name, expected in facts_by_rank[0].items():
        values = [facts_of_rank.get(name) for facts_of_rank in facts_by_rank]
        rank = next((rank for rank, value in enumerate(values) if value != expected), None)
        if rank is not None:
            raise ValueError(
                f"ranks disagree about {name}: rank 0 has {expected}, rank {rank} has "
                f"{values[rank]}; every rank must patch the same model with the same arguments (a "
                f"size or an environment variable may depend on the rank)"
            )
    run_on_all("sharding", partial(_check_rank0_has_values, len(on_meta), len(tensors)))


def _check_rank0_has_values(num_on_meta: int, num_tensors: int) -> None:
    if num_on_meta and is_first():
        raise ValueError(
            f"{num_on_meta} of {num_tensors} parameters and buffers of rank 0 are on the meta "
            f"device and have no values; load the model with from_pretrained before sharding, at "
            f"least on rank 0, or name the checkpoint: apply_ep_fsdp2(model, weights=directory)"
        )


def check_nodes(config: ParallelConfig) -> None:
    """Raise on every rank if the ranks of a machine are not consecutive.

    The hierarchical dispatcher takes `node_size` consecutive ranks as one node. A `node_size` that
    differs from the launcher's LOCAL_WORLD_SIZE is the user's own choice and is not checked.
    """
    if config.dispatcher == "hierarchical" and (config.ep_size or 1) > 1:
        run_on_all("checking the ranks of a node", lambda: _check_local_rank(config.node_size))


def _check_local_rank(node_size: int | None) -> None:
    local_rank, rank = get_launched_local_rank(), this_rank()
    if node_size is None or local_rank is None or node_size != get_launched_local_world_size():
        return
    if rank % node_size != local_rank:
        raise ValueError(
            f"rank {rank} has LOCAL_RANK {local_rank} on a machine of {node_size} ranks, but "
            f"dispatcher='hierarchical' takes {node_size} consecutive ranks as a node, in which "
            f"rank {rank} has local rank {rank % node_size}; number ranks machine by machine, as "
            f"torchrun and accelerate launch do (srun: --distribution=block), or use "
            f"dispatcher='all_to_all'"
        )


def check_frozen(model: nn.Module, experts: Iterable[nn.Module]) -> None:
    """Raise if a model was loaded with a quantization_config and has trainable expert weights.

    bitsandbytes quantises Linear modules only, and skips stacked experts without a warning.
    """
    trainable = [
        (name, weight.dtype)
        for module in experts
        for name, weight in module.named_parameters()
        if weight.requires_grad and "lora_" not in name
    ]
    if is_quantized(model) and trainable:
        name, dtype = trainable[0]
        raise ValueError(
            f"this model was loaded with a quantization_config, but {len(trainable)} weights of "
            f"its experts are not quantized and are trainable ({name} in {dtype}); freeze them "
            f"with get_peft_model(model, lora_config), or load the model without the "
            f"quantization_config"
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


class RefuseUnfrozen:
    """Pre-forward hook of the root: raises ValueError if a trained parameter has no fp32 master.

    Parameters that are frozen when the model is sharded have no fp32 master. If they were trained,
    updates smaller than half a bf16 step would be lost.
    """

    def __init__(self, model: nn.Module, options: ShardOptions) -> None:
        # FSDP2 replaces parameters, so a parameter is found by its module and name.
        self._frozen = [
            (f"{prefix}.{name}", module, name)
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if options.fp32_masters
            and not parameter.requires_grad
            and parameter not in options.ignored_params
            and parameter.dtype in (torch.bfloat16, torch.float16)
        ]

    @torch.compiler.disable
    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        for full_name, module, name in self._frozen:
            parameter = getattr(module, name, None)
            if parameter is not None and parameter.requires_grad:
                raise ValueError(
                    f"{full_name} is trainable now, but was frozen when the model was sharded, so "
                    f"it has no fp32 master weights and its updates would be rounded to "
                    f"{parameter.dtype}; unfreeze it (or activate its adapter) before sharding, "
                    f"and freeze it afterwards, or shard a model in fp32"
                )


class RefuseAdded:
    """Pre-forward hook of the root: raises ValueError if trainable parameters were added.

    FSDP2 averages the gradients of the parameters that exist when the model is sharded. Each rank
    would train a later parameter, such as that of a new head, on its own batches alone.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self._world_size = world_size
        self._names = {module: frozenset(get_own_parameters(module)) for module in model.modules()}

    @torch.compiler.disable
    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        for module in root.modules():
            known = self._names.get(module, frozenset())
            if get_own_parameters(module).keys() <= known:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if name in known or not parameter.requires_grad or isinstance(parameter, DTensor):
                    continue
                prefix = next(prefix for prefix, x in root.named_modules() if x is module)
                raise ValueError(
                    f"{get_canonical_name(f'{prefix}.{name}')} was added after the model was "
                    f"sharded, so each of the {self._world_size} ranks would train it on its own "
                    f"batches alone; add it before apply_ep_fsdp2 or accelerator.prepare"
                )


def check_packed(model: nn.Module, options: ShardOptions) -> None:
    """Raise if FSDP2 would cast packed 4-bit weights, whose bytes are codes and not numbers."""
    dtype = options.mp_policy.param_dtype
    packed = {id(parameter) for parameter in list_packed_parameters(model)}
    for name, parameter in model.named_parameters():
        is_cast = dtype is not None and parameter.dtype != dtype
        if id(parameter) in packed and parameter not in options.ignored_params and is_cast:
            raise ValueError(
                f"{name} stores 4-bit codes as {parameter.dtype} (bnb_4bit_quant_storage), but "
                f"FSDP2 all-gathers parameters in {dtype}, and a cast would destroy the codes; "
                f"load the model with "
                f"BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage={dtype})"
            )


def check_dtypes(parameters: Iterable[nn.Parameter], options: ShardOptions) -> None:
    """Raise if trainable parameters of a unit have several dtypes; FSDP2 needs a single dtype.

    FSDP2 itself asserts this in the first forward (`_init_mp_dtypes` of FSDPParamGroup). In torch
    2.15 the gradients of a unit may have several dtypes, but its trainable parameters may not.
    """
    dtypes = {
        str(p.dtype)
        for p in parameters
        if p.requires_grad and not isinstance(p, DTensor) and p not in options.ignored_params
    }
    if len(dtypes) > 1 and not options.fp32_masters:
        raise ValueError(
            f"trainable parameters of one layer have dtypes {' and '.join(sorted(dtypes))}, but "
            f"FSDP2 needs one; launch with mixed_precision: bf16, which trains fp32 master weights "
            f"of all of them, or create adapters in the model's dtype: "
            f"get_peft_model(..., autocast_adapter_dtype=False)"
        )
