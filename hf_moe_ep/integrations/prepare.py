"""Check the launch and shard the model when `accelerator.prepare` is given a patched model.

Of the functions with which Accelerate shards a model, only `fsdp2_prepare_model` is replaced.
Accelerate's own code then gives the sharded parameters to the optimizer, and accumulates gradients.
If Accelerate is configured to compile a model, `compile_layers` compiles the model's layers
instead. `enable_fsdp_on_cpu` lets Accelerate use FSDP2 on CPU ranks. Other files wrap the clipping
of gradients (`optimizers.py`) and the saves (`accelerate_states.py`, `saving.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from hf_moe_ep.checkpoints.hub.unread import cut_before_sharding, shard_and_read
from hf_moe_ep.compiled.layers import compile_layers
from hf_moe_ep.compiled.options import check_compile_kwargs
from hf_moe_ep.config import get_launched_world_size, is_launched_with_fsdp
from hf_moe_ep.integrations import shared_batches
from hf_moe_ep.integrations.uneven_loaders import check_batches_are_even
from hf_moe_ep.ranks.all_ranks import run_on_all
from hf_moe_ep.sharding.options import ShardOptions, list_kept_whole
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.accelerate_and_trainer import (
    count_as_shards,
    declare_fsdp,
    distinct_data_ptrs,
    has_checkpointed_modules,
    has_chunked_loss,
)
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.frameworks import (
    check_sequence_parallelism,
    has_option_of_size,
    how_to_shard,
    name_option_of_size,
)
from hf_moe_ep.upstream.models import (
    list_declared_layers,
    list_packed_parameters,
    text_config,
)
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.replaced import replaced
from hf_moe_ep.upstream.sharded_models import gather_in_dtypes_of_shards


def enable_fsdp_on_cpu(
    state: AcceleratorState, plugin: FullyShardedDataParallelPlugin | None
) -> None:
    """Let FSDP2 run on CPU ranks if the launch config asks for FSDP.

    With `distributed_type: FSDP` and `use_cpu: true`, stock Accelerate trains on several CPU
    processes without FSDP. After this call sharding, clipping and checkpoints work as on GPUs.
    """
    if state.distributed_type != DistributedType.MULTI_CPU or not is_launched_with_fsdp():
        return
    plugin = plugin or FullyShardedDataParallelPlugin()
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    declare_fsdp(state)


def init_accelerator_state(
    original: Callable[..., Any], self: AcceleratorState, *args: Any, **kw: Any
) -> None:
    """Wrap `AcceleratorState.__init__`: let FSDP2 run on CPU ranks if the launch asks for FSDP."""
    original(self, *args, **kw)
    enable_fsdp_on_cpu(self, kw.get("fsdp_plugin"))


def prepare(original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Prepare a patched model, after checking that this launch shards it.

    Raises:
        ValueError: the launch or its parallelism_config would not shard the model, or would shard
            it differently; or a data loader has more batches for one rank than for another.
    """
    models = [arg for arg in args if isinstance(arg, nn.Module)]
    if all(find_state(model) is None for model in models):
        return original(self, *args, **kwargs)
    enable_fsdp_on_cpu(self.state, None)
    check_launch(self)
    _check_not_replicated(self, models)
    take_over_sizes(self.parallelism_config, models)
    states = [state for model in models if (state := find_state(model)) is not None]
    state = states[0]
    check_parallelism(self.parallelism_config, state)
    if self.num_processes > 1:
        for model in models:
            _check_loss(model)
    shared_batches.share_batches(self, state)
    # In a single CPU process the state has no fsdp_plugin (accelerate 1.15).
    plugin = getattr(self.state, "fsdp_plugin", None)
    if plugin is not None and self.is_fsdp2:
        for model in models:
            _remove_other_stages(self, model, args)
    patched = [model for model in models if find_state(model) is not None]
    with distinct_data_ptrs(patched), without_dynamo(self) as compile_kwargs:
        if compile_kwargs is not None:
            for patched_state in states:
                _choose_compilation(patched_state, compile_kwargs)
        if plugin is None:
            prepared = original(self, *args, **kwargs)
        else:
            is_sharded = state.meshes is not None
            if is_sharded:
                check = partial(_check_no_activation_checkpointing, models, plugin)
                run_on_all("accelerator.prepare", check)
            # Accelerate would search for the layer classes of its wrap policy, of which a model may
            # lack some. Only its activation checkpointing needs the policy. A sharded model must
            # not be checkpointed a second time. All settings are restored for the next model, such
            # as a stock reference.
            checkpoints = plugin.activation_checkpointing and not is_sharded
            policy = plugin.auto_wrap_policy if checkpoints else None
            classes = _list_layer_classes(plugin, models)
            with (
                replaced(plugin, "auto_wrap_policy", policy),
                replaced(plugin, "transformer_cls_names_to_wrap", classes),
                replaced(plugin, "activation_checkpointing", checkpoints),
            ):
                prepared = original(self, *args, **kwargs)
        if compile_kwargs is not None:
            for model in models:
                _compile_as_configured(model)
    check_batches_are_even(self)
    return prepared


def _remove_other_stages(accelerator: Accelerator, model: nn.Module, args: tuple[Any, ...]) -> None:
    """Remove the other ranks' pipeline stages from a model, and from the optimizers in `args`.

    Accelerate lists the parameters of the model and of the optimizer before it shards the model,
    and raises an error if one of them is missing afterwards.
    """
    state = find_state(model)
    if state is None or state.stage is not None or state.meshes is not None:
        return
    if (state.config.pp_size or 1) == 1:
        return
    inner = unwrap(model)
    cut_before_sharding(inner, state, build_options(accelerator, inner), accelerator.device)
    remaining_ids = {id(parameter) for parameter in inner.parameters()}
    for optimizer in args:
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in remaining_ids]


@contextmanager
def without_dynamo(accelerator: Accelerator) -> Iterator[dict[str, Any] | None]:
    """Switch off Accelerate's own compilation inside the block, which prepares a model.

    Accelerate compiles a model before it shards the model, either the whole model or the modules of
    every list of layers. Our layers are compiled by `compile_layers` instead.

    Yields the keyword arguments for torch.compile with which the user configured Accelerate or the
    Trainer, or None if the user asked for no compilation or the model will not be sharded.

    `dynamic=False` is left out: `accelerate launch` passes it whenever the user does not ask for
    dynamic shapes, and layers would then be compiled again for every sequence length.
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or not accelerator.is_fsdp2:
        yield None
        return
    kwargs = {name: value for name, value in plugin.to_kwargs().items() if name != "disable"}
    if kwargs.get("dynamic") is False:
        del kwargs["dynamic"]
    with replaced(plugin, "backend", DynamoBackend.NO):
        yield None if plugin.disable else kwargs


def _choose_compilation(state: ModelState, compile_kwargs: dict[str, Any]) -> None:
    """Store Accelerate's options of torch.compile in a config that has none of its own.

    Raises:
        ValueError: the model was compiled, or was patched to be compiled, with another value of an
            option of Accelerate.
    """
    wanted, own = check_compile_kwargs(compile_kwargs), state.compile_options
    if own is None and state.config.compile_kwargs is None:
        state.config = replace(state.config, compile_layers=compile_kwargs)
        return
    if own is None:
        own = check_compile_kwargs(state.config.compile_kwargs or {})
    for name in compile_kwargs:
        if own.get(name) != wanted.get(name):
            raise ValueError(
                f"Accelerate or the Trainer asks torch.compile for {name}={wanted.get(name)!r}, "
                f"but the layers of this model are compiled with {name}={own.get(name)!r} "
                f"(compile_layers); leave out compile_layers, or leave out torch_compile or "
                f"dynamo_config"
            )


def _compile_as_configured(model: nn.Module) -> None:
    """Compile the layers of a patched model, unless `patch` has done so."""
    state = find_state(model)
    if state is not None and state.compile_options is None:
        compile_layers(model, **(state.config.compile_kwargs or {}))


def _check_no_activation_checkpointing(
    models: Iterable[nn.Module], plugin: FullyShardedDataParallelPlugin
) -> None:
    """Raise ValueError if Accelerate would insert activation checkpointing into sharded layers.

    A model whose layers are wrapped already is accepted: Accelerate has sharded it, and prepares it
    again. A model that was sharded for an evaluation has no wrapped layers.
    """
    if plugin.activation_checkpointing and not all(map(has_checkpointed_modules, models)):
        raise ValueError(
            "Accelerate's fsdp_activation_checkpointing wraps layers before they are "
            "sharded, and this model is sharded already; set it to false and call "
            "model.gradient_checkpointing_enable(), or let Accelerate shard: load the model with "
            "transformers' from_pretrained and call patch(model)"
        )


def _list_layer_classes(
    plugin: FullyShardedDataParallelPlugin, models: Iterable[nn.Module]
) -> list[str]:
    """List the classes of layers that Accelerate checkpoints, without those that a model lacks.

    The class of a text model can declare classes of a tower that the model does not have, and a
    pipeline stage can have layers of some classes only. Accelerate raises an error if a class is
    missing, and still does so for a name that only the user gives.
    """
    modules = [module for model in models for module in model.modules()]
    present = {type(module).__name__ for module in modules}
    declared = {name for model in models for name in list_declared_layers(model)}
    given = plugin.transformer_cls_names_to_wrap
    return [
        name
        for name in (sorted(declared) if given is None else given)
        if name in present or name not in declared
    ]


def fsdp2_prepare_model(
    original: Callable[..., Any], accelerator: Accelerator, model: nn.Module
) -> nn.Module:
    """Wrap `fsdp2_prepare_model`: shard experts over ep, which FSDP2 alone cannot do.

    A model that is sharded already is returned as it is.
    """
    state = find_state(model)
    if state is None:
        return original(accelerator, model)
    if state.meshes is None:
        inner = unwrap(model)
        shard_and_read(inner, state, build_options(accelerator, inner), accelerator.device)
    return model


def move_to_device(
    original: Callable[..., None], self: Any, model: nn.Module, device: torch.device
) -> None:
    """Wrap `Trainer._move_model_to_device`: do not move a model that sharding moves by units.

    With `bf16_full_eval` the Trainer calls this function before the model is sharded.
    """
    if find_state(model) is None or not self.is_fsdp_enabled:
        original(self, model, device)


def cast_for_full_eval(trainer: Any) -> None:
    """Cast a sharded model for an evaluation with `bf16_full_eval` or `fp16_full_eval`.

    The Trainer does so inside its evaluation, but not while it trains. FSDP2 would then still
    gather the parameters in their earlier dtypes, and raise an error.
    """
    state, args = find_state(trainer.model), trainer.args
    is_full = args.fp16_full_eval or args.bf16_full_eval
    if state is None or state.meshes is None or not is_full or trainer.is_in_train:
        return
    reshard(trainer.model)
    trainer.model.to(torch.float16 if args.fp16_full_eval else torch.bfloat16)
    gather_in_dtypes_of_shards(trainer.model)


def build_options(accelerator: Accelerator, model: nn.Module) -> ShardOptions:
    """Translate the settings of Accelerate's FSDP plugin into our sharding options."""
    plugin = accelerator.state.fsdp_plugin
    state = find_state(model)
    ignored = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    quantized = list_packed_parameters(model)
    ignored |= list_kept_whole(model)
    return ShardOptions(
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        offload_policy=_choose_offload_policy(plugin.cpu_offload, accelerator.device),
        fp32_masters=accelerator.mixed_precision != "no" and not quantized,
        # Both settings are True by default, so each of them can switch resharding off.
        reshard_after_forward=plugin.reshard_after_forward
        and (state is None or state.config.reshard_after_forward),
        ignored_params=frozenset(ignored),
    )


def _choose_offload_policy(policy: OffloadPolicy | None, device: torch.device) -> OffloadPolicy:
    if isinstance(policy, CPUOffloadPolicy) and device.type == "cpu":
        return CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator
    return policy or OffloadPolicy()


def check_launch(accelerator: Accelerator) -> None:
    """Raise ValueError if this launch would leave a patched model unsharded."""
    kind, processes = accelerator.distributed_type, get_launched_world_size()
    if kind == DistributedType.NO and processes > 1:
        raise ValueError(
            f"{processes} processes were launched but this Accelerator sees 1, so each process "
            "would train alone; on CPU write Accelerator(cpu=True), or "
            "TrainingArguments(use_cpu=True)"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"the launch config or the Trainer asks for {kind.value}, which does not shard the "
            f"experts of a patched model; leave it out. {how_to_shard()}"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        version = accelerator.state.fsdp_plugin.fsdp_version
        raise ValueError(
            f"the launch config asks for FSDP version {version}, but a patched model needs version "
            "2: write `fsdp_version: 2` in its fsdp_config"
        )


def _check_not_replicated(accelerator: Accelerator, models: Iterable[nn.Module]) -> None:
    """Raise ValueError if Accelerate would wrap a sharded model in DistributedDataParallel.

    A model that is not sharded raises an error in its first forward.
    """
    kind = accelerator.distributed_type
    if not accelerator.multi_device and kind != DistributedType.MULTI_CPU:
        return
    states = [find_state(model) for model in models]
    if any(state is not None and state.meshes is not None for state in states):
        raise ValueError(
            f"this patched model is sharded, but the launch config asks for {kind.value}, so "
            f"Accelerate would wrap it in DistributedDataParallel, which needs whole parameters. "
            f"{how_to_shard()}"
        )


def _check_loss(model: nn.Module) -> None:
    """Raise ValueError if an older TRL would compute a wrong loss of a model on several ranks."""
    state = find_state(model)
    if state is None:
        return
    inner = without_adapters(unwrap(model))
    if not has_chunked_loss(inner):
        return
    remedy = "write SFTConfig(loss_type='nll'), or install trl>=1.15"
    if getattr(text_config(inner.config), "output_router_logits", False):
        raise ValueError(
            f"this TRL's chunked loss adds the router's aux loss of each rank's own batch, which "
            f"differs from that of the global batch; {remedy}, or set router_aux_loss_coef=0.0"
        )
    if state.config.ranks_per_batch > 1:
        raise ValueError(
            f"this TRL's chunked loss compares the labels of whole sequences with the slices of "
            f"{state.config.sequence_sizes}; install trl>=1.15, or set sp_size=1 and cp_size=1"
        )


# The sizes that mean the same in Accelerate's ParallelismConfig and in ParallelConfig.
_SHARED_SIZES = ("cp_size", "sp_size")
# This attribute of a ParallelismConfig has the sizes that models have taken over. Models that are
# prepared later get these sizes too.
_TAKEN_SIZES = "_hf_moe_ep_taken_sizes"
# The ends of errors that ask to set a size to 1, by the name of the size.
_REMEDIES = {"ep_size": ", and use ep_size of hf_moe_ep"}


def take_over_sizes(parallelism: ParallelismConfig | None, objects: Iterable[Any]) -> None:
    """Move cp_size and sp_size from Accelerate's ParallelismConfig to the models' own configs.

    The patched models among `objects` are patched again with these sizes, and the sizes in
    `parallelism` become 1, so that Accelerate and the Trainer do not change attention or batches.
    Models that are created later, as by `Trainer(model_init=)`, get the sizes as well.

    Raises:
        ValueError: a model was patched with another size, or is sharded; or a training framework
            splits sequences by its own code.
    """
    if parallelism is None:
        return
    sizes = {name: getattr(parallelism, name, 1) for name in _SHARED_SIZES}
    asked = {name: size for name, size in sizes.items() if size > 1}
    asked = vars(parallelism).get(_TAKEN_SIZES, {}) | asked
    models = [model for model in objects if isinstance(model, nn.Module) and find_state(model)]
    for model in models if asked else ():
        state = find_state(model)
        assert state is not None and state.patch_alike is not None
        for name, size in asked.items():
            if has_option_of_size(name):
                raise ValueError(
                    f"{name_option_of_size(name)}={size}, which does not combine with a patched "
                    f"model; set it to 1, and use {name} of hf_moe_ep"
                )
        own = {name: getattr(state.config, name) or 1 for name in asked}
        if own == asked:
            continue
        for name, size in asked.items():
            if own[name] != 1 or state.meshes is not None:
                raise ValueError(
                    f"{name_option_of_size(name)}={size}, but the model was patched with {name}="
                    f"{own[name]}; write patch(model, {name}={size})"
                )
        state.patch_alike(unwrap(model), **asked)
    if asked and models:
        count_as_shards(parallelism, asked)
        setattr(parallelism, _TAKEN_SIZES, asked)


def check_parallelism(parallelism: ParallelismConfig | None, state: ModelState) -> None:
    """Raise ValueError if the launch or a framework contradicts the sizes in a patched model."""
    check_sequence_parallelism()
    if parallelism is None:
        return
    for name in ("tp_size", "ep_size"):  # axolotl adds ep_size to the class
        if getattr(parallelism, name, 1) > 1:
            raise ValueError(
                f"{name_option_of_size(name)}={getattr(parallelism, name)}, which does not combine "
                f"with a patched model; set it to 1{_REMEDIES.get(name, '')}"
            )
    in_launch, in_patch = parallelism.dp_replicate_size, state.config.dp_replicate_size
    if in_launch not in (1, in_patch):
        raise ValueError(
            f"parallelism_config has dp_replicate_size={in_launch} but the model was patched with "
            f"dp_replicate_size={in_patch}; write patch(model, dp_replicate_size={in_launch})"
        )
