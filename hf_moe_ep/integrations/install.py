"""The one seam into Accelerate and the Trainer.

`patch` calls `install`, which wraps functions once per process. The wrappers that are given a
model ask first whether it is patched, and otherwise call what was there before:

    accelerate.accelerator.fsdp2_prepare_model   shards with EP where Accelerate would shard with
                                                 FSDP2 alone; the optimizer swap before and after
                                                 it, clip, no_sync and DCP are then Accelerate's own
    Accelerator.prepare                          refuses launch configs under which nothing would
                                                 be sharded
    AcceleratorState.__init__                    `fsdp_on_cpu`, for every Accelerator made after
                                                 the first patch: no model is known there yet
    Accelerator.get_state_dict                   packs adapters of experts as PEFT does
    fsdp_utils._set_model_state_dict             loads into sharded parameters, whatever ran last
    Trainer.save_model                           writes hub layout under SHARDED_STATE_DICT too,
                                                 where stock writes nothing
    PreTrainedModel.save_pretrained              writes a sharded model's gathered state dict in hub
                                                 layout; without one, where stock dies in its
                                                 writer, says what to call instead
    PeftModel.save_pretrained                    gathers a sharded model's adapters; on every rank
    PeftModel._get_base_model_class              the class that adapter_config.json names
    the Trainer's checkpoints                    are complete or not there
                                                 (`trainer_checkpoints.py`)
    what counts processes                        counts ranks with batches of their own, under
                                                 sequence parallelism (`shared_batches.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate.accelerator
import accelerate.utils.fsdp_utils
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor

from hf_moe_ep.checkpoints.hub.save import gather_state_dict, save_pretrained, save_state_dict
from hf_moe_ep.config import launched_with_fsdp, launched_world_size
from hf_moe_ep.integrations import shared_batches, trainer_checkpoints
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.ranks.together import together
from hf_moe_ep.sharding.shard import ShardOptions, shard_model
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.adapters import canonical_modules, has_adapters, peft_classes
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.sharded_models import stock_class
from hf_moe_ep.upstream.training_frameworks import declare_fsdp, save_beside
from hf_moe_ep.upstream.wrap import wrap_once


def install() -> None:
    """Wrap the functions of the table above, once per process."""
    wrap_once(accelerate.accelerator, "fsdp2_prepare_model", _prepare_model)
    wrap_once(Accelerator, "prepare", _prepare)
    wrap_once(AcceleratorState, "__init__", _init_state)
    wrap_once(Accelerator, "get_state_dict", _get_state_dict)
    wrap_once(accelerate.utils.fsdp_utils, "_set_model_state_dict", _set_model_state_dict)
    wrap_once(transformers.Trainer, "save_model", _save_model)
    wrap_once(transformers.PreTrainedModel, "save_pretrained", _save_in_hub_layout)
    if classes := peft_classes():
        wrap_once(classes[0], "save_pretrained", _save_adapters)
        wrap_once(classes[0], "_get_base_model_class", _base_model_class)
    wrap_once(Accelerator, "_prepare_device_mesh", shared_batches.loader_mesh)
    wrap_once(Accelerator, "prepare_data_loader", shared_batches.prepare_data_loader)
    wrap_once(Accelerator, "prepare_scheduler", shared_batches.prepare_scheduler)
    wrap_once(Accelerator, "gather_for_metrics", shared_batches.gather_for_metrics)
    trainer = transformers.Trainer
    trainer_checkpoints.install()
    wrap_once(trainer, "create_accelerator_and_postprocess", shared_batches.create_accelerator)
    wrap_once(trainer, "call_model_init", shared_batches.call_model_init)
    wrap_once(trainer, "get_tp_size", shared_batches.get_tp_size)
    wrap_once(trainer, "_get_num_items_in_batch", shared_batches.get_num_items_in_batch)
    wrap_once(trainer, "floating_point_ops", shared_batches.floating_point_ops)
    wrap_once(trainer, "prediction_step", shared_batches.prediction_step)
    wrap_once(trainer, "_track_num_input_tokens", shared_batches.track_num_input_tokens)


def fsdp_on_cpu(state: AcceleratorState, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Let FSDP2 run on CPU ranks, where Accelerate starts plain multi-process training.

    Only where the launch config asks for FSDP (`distributed_type: FSDP`, `use_cpu: true`): then
    the same path as on GPUs runs, sharding, clip, checkpoints and all.
    """
    if state.distributed_type != DistributedType.MULTI_CPU or not launched_with_fsdp():
        return
    plugin = plugin or FullyShardedDataParallelPlugin()
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    declare_fsdp(state)


def _init_state(
    original: Callable[..., Any], self: AcceleratorState, *args: Any, **kw: Any
) -> None:
    original(self, *args, **kw)
    fsdp_on_cpu(self, kw.get("fsdp_plugin"))


def _prepare(original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    states = [find_state(arg) for arg in args if isinstance(arg, nn.Module)]
    patched = [state for state in states if state is not None]
    if patched:
        fsdp_on_cpu(self.state, None)
        _check_launch(self)
        _check_parallelism(self.parallelism_config, patched[0])
        shared_batches.share_batches(self, patched[0])
        if patched[0].meshes is not None and self.state.fsdp_plugin is not None:
            together("accelerator.prepare", partial(_check_no_empty_shards, args))
            # Its layers have other classes now than the policy looks for, and nothing to wrap.
            self.state.fsdp_plugin.auto_wrap_policy = None
    return original(self, *args, **kwargs)


def _check_no_empty_shards(args: tuple[Any, ...]) -> None:
    """Accelerate knows an optimizer's parameters by their addresses, and nothing has none."""
    for model in args:
        for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
            if isinstance(parameter, DTensor) and parameter.to_local().numel() == 0:
                raise ValueError(
                    f"{name} {tuple(parameter.shape)} leaves a rank without a share, and "
                    f"Accelerate cannot take a model that is sharded so; load it with "
                    f"transformers' from_pretrained and call patch(model)"
                )


def _prepare_model(
    original: Callable[..., Any], accelerator: Accelerator, model: nn.Module
) -> nn.Module:
    state = find_state(model)
    if state is None:
        return original(accelerator, model)
    if state.meshes is None:
        inner = unwrap(model)
        shard_model(inner, state, _options(accelerator, inner), accelerator.device)
    return model


def _get_state_dict(
    original: Callable[..., Any], self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    state_dict = original(self, model, *args, **kwargs)
    return state_dict if find_state(model) is None else pack_factors(model, state_dict)


def _set_model_state_dict(
    original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    if find_state(model) is not None:
        # A full state dict is cut to fit parameters as they are, also while they are gathered
        # (torch/distributed/checkpoint/state_dict.py).
        reshard(model)
    return original(model, *args, **kwargs)


def _save_model(
    original: Callable[..., Any],
    self: transformers.Trainer,
    output_dir: str | None = None,
    _internal_call: bool = False,
) -> None:
    state = find_state(self.model)
    sharded = state is not None and state.meshes is not None
    if not sharded or _internal_call or not self.is_fsdp_enabled:
        original(self, output_dir, _internal_call)
        return
    folder = output_dir or self.args.output_dir
    if has_adapters(unwrap(self.model)):
        state_dict = gather_state_dict(self.model)
    else:
        state_dict = _SavedAlready()
        save_pretrained(self.model, folder)
    if self.args.should_save:
        save_beside(self, folder, state_dict)
    self.accelerator.wait_for_everyone()
    if self.args.push_to_hub:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


class _SavedAlready(dict[str, Tensor]):
    """Given to `Trainer._save` as the model's state dict, for what it saves beside the model."""


def _save_in_hub_layout(
    original: Callable[..., Any],
    self: transformers.PreTrainedModel,
    save_directory: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    state, given = find_state(self), kwargs.get("state_dict")
    meshes = None if state is None or has_adapters(self) else state.meshes
    if meshes is not None and given is None:
        raise ValueError(
            f"this model is sharded over {meshes.world_size} ranks; call "
            "hf_moe_ep.save_pretrained(model, directory) on every rank, or pass "
            "state_dict=accelerator.get_state_dict(model)"
        )
    if meshes is None or kwargs.get("push_to_hub"):
        original(self, save_directory, *args, **kwargs)
    elif isinstance(given, _SavedAlready) or not kwargs.get("is_main_process", True):
        return
    elif given is not None:
        save_state_dict(self, save_directory, given, kwargs.get("max_shard_size", "5GB"))


def _save_adapters(
    original: Callable[..., Any], self: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> None:
    state = find_state(self)
    given = kwargs.get("state_dict")
    if state is None or state.meshes is None:
        original(self, save_directory, *args, **kwargs)
    elif given is not None:
        kwargs["state_dict"] = pack_factors(self, given)
        with canonical_modules(self):
            original(self, save_directory, *args, **kwargs)
    else:
        save_pretrained(self, save_directory, *args, **kwargs)


def _base_model_class(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> type:
    return stock_class(original(self, *args, **kwargs))


def _options(accelerator: Accelerator, model: nn.Module) -> ShardOptions:
    plugin = accelerator.state.fsdp_plugin
    ignored = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    quantized = [p for p in model.parameters() if type(p).__name__ == "Params4bit"]
    # Packed 4-bit bytes do not survive being split; a floating storage dtype does.
    ignored |= {p for p in quantized if not p.requires_grad and not p.is_floating_point()}
    return ShardOptions(
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        offload_policy=_offload_policy(plugin.cpu_offload, accelerator.device),
        fp32_masters=accelerator.mixed_precision != "no" and not quantized,
        reshard_after_forward=plugin.reshard_after_forward,
        ignored_params=frozenset(ignored),
    )


def _offload_policy(policy: OffloadPolicy | None, device: torch.device) -> OffloadPolicy:
    if isinstance(policy, CPUOffloadPolicy) and device.type == "cpu":
        return CPUOffloadPolicy(pin_memory=False)  # there is no accelerator to pin memory for
    return policy or OffloadPolicy()


def _check_launch(accelerator: Accelerator) -> None:
    kind, processes = accelerator.distributed_type, launched_world_size()
    if kind == DistributedType.NO and processes > 1:
        raise ValueError(
            f"{processes} processes were launched but this Accelerator sees 1, so each would train "
            "alone; on CPU write Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        version = accelerator.state.fsdp_plugin.fsdp_version
        raise ValueError(
            f"the launch config asks for FSDP version {version}, but a patched model needs version "
            "2: write `fsdp_version: 2` in its fsdp_config"
        )


def _check_parallelism(parallelism: ParallelismConfig | None, state: ModelState) -> None:
    if parallelism is None:
        return
    for name in ("tp_size", "cp_size", "sp_size"):
        if getattr(parallelism, name, 1) > 1:
            raise ValueError(
                f"the launch config's parallelism_config has {name}={getattr(parallelism, name)}, "
                f"which does not combine with a patched model; set it to 1"
            )
    theirs, ours = parallelism.dp_replicate_size, state.config.dp_replicate_size
    if theirs not in (1, ours):
        raise ValueError(
            f"parallelism_config has dp_replicate_size={theirs} but the model was patched with "
            f"dp_replicate_size={ours}; write patch(model, dp_replicate_size={theirs})"
        )
