"""`patch` and `unpatch`: read this file first.

`patch` changes one model instance; other models keep running stock code. It first finds the parts
of the model (`architectures.py`). Then all features check that they can do what the config asks
for. If no check fails, the features attach themselves:

    mtp        with mtp_layers, a head for multi-token prediction runs after the model in training
                                                                              (`mtp/attach.py`)
    moe        every experts module calls our forward; a model that needs sharding raises an error
               if it runs before it is sharded; the router's aux loss counts the tokens of all ranks
                                                                              (`moe/attach.py`)
    sequence   with sp_size > 1 (sequence parallelism) sp_size ranks share each sequence: a rank
               gets some of its tokens, but in attention all tokens and some of the heads; with
               cp_size > 1 (context parallelism) it keeps its tokens in attention as well, and
               receives the keys and values of other ranks                (`sequence/attach.py`)
    loss       with fused_loss, head and loss are computed without the logits of a whole batch
                                                                            (`loss/attach.py`)
    vision     if one rank runs the vision tower (the encoder of pictures), all ranks run it
                                                                           (`vision/attach.py`)
    bias       with bias_update_rate, every MoE layer stores the correction bias of its router
                                                                            (`routing/bias.py`)
    pipeline   with pp_size > 1, each group of ranks holds some of the layers; the model is cut when
               it is sharded                                             (`pipeline/attach.py`)
    compiled   with compile_layers, torch.compile compiles the layers around their experts
                                                                         (`compiled/attach.py`)

A new feature is a folder or a file with the functions `check` and `attach`, and one line in
`FEATURES`. All its hooks inherit `PackageHook`, and `attach` sets attributes of stock modules by
`ModelState.replace`. `unpatch` then undoes the feature. A hook may set an attribute while the model
runs, if it restores the attribute itself, after Ctrl-C in `PackageHook.end_interrupted`. `_detach`
undoes all that `replace` cannot, such as wrapped functions that checkpoint layers.

PEFT attaches adapters (`lora/`); for them, `integrations/install.py` wraps functions of PEFT. That
file also wraps the functions of Accelerate and the Trainer that receive a model. With a stock
model, a wrapper only calls the stock function.

`patch` checks the model, but not the number of ranks. `sharding/` checks that ep_size, sp_size,
cp_size and dp_replicate_size fit the number of ranks, when `apply_ep_fsdp2`, or Accelerate or the
Trainer through `integrations/`, shards the model.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_moe_ep.architectures import Parts, find_block, find_parts
from hf_moe_ep.checkpoints.hub.extra import find_extra
from hf_moe_ep.checkpoints.hub.head import add_head, remove_head
from hf_moe_ep.checkpoints.hub.unread import read_whole
from hf_moe_ep.compiled import attach as compiled
from hf_moe_ep.compiled.subclasses import restore_classes
from hf_moe_ep.config import (
    ParallelConfig,
    get_launched_local_world_size,
    get_launched_rank,
    resolve_config,
)
from hf_moe_ep.integrations.install import install
from hf_moe_ep.lora.computed import check_gets_whole_rows
from hf_moe_ep.loss import attach as loss
from hf_moe_ep.moe import attach as moe
from hf_moe_ep.moe.aux_loss import detach_aux_loss
from hf_moe_ep.moe.recompute import unwatch_checkpoints
from hf_moe_ep.moe.stacked import stack_experts, unstack_experts
from hf_moe_ep.mtp import attach as mtp
from hf_moe_ep.pipeline import attach as pipeline
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.all_ranks import get_rank_of_launch, get_world_size_of_launch
from hf_moe_ep.ranks.mesh import check_world
from hf_moe_ep.routing import bias
from hf_moe_ep.sequence import attach as sequence
from hf_moe_ep.state import STATE, ModelState, PackageHook, check_is_model, iterate_experts_modules
from hf_moe_ep.upstream.adapter_files import check_supported
from hf_moe_ep.upstream.modules import list_forward_hooks, remove_hooks
from hf_moe_ep.upstream.requirements import warn_of_versions
from hf_moe_ep.upstream.sharded_models import is_distributed_by_transformers, list_devices_of_parts
from hf_moe_ep.vision import attach as vision

_logger = logging.getLogger("hf_moe_ep")


# The two functions of each feature. `check(parts, state)` raises ValueError if the model cannot do
# what the config asks for, and changes no module. `attach(parts, state)` changes the modules and
# must not fail. Hooks run in the order of this table.
FEATURES = (
    (mtp.check, mtp.attach),
    (loss.check, loss.attach),
    (sequence.check, sequence.attach),
    (moe.check, moe.attach),
    (vision.check, vision.attach),
    (bias.check, bias.attach),
    (pipeline.check, pipeline.attach),
    (compiled.check, compiled.attach),
)

# `patch` warns if each of several processes holds more bytes of parameters than this.
LARGE_MODEL_BYTES = 8 * 2**30


def patch(
    model: nn.Module,
    config: ParallelConfig | None = None,
    *,
    plan: ModelPlan | None = None,
    **overrides: Any,
) -> nn.Module:
    """Prepare a stock MoE model in place for expert parallelism, and return it.

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")
        patch(model, ep_size=8)
        trainer = Trainer(model=model, ...)              # shards it, under `accelerate launch`

    Create the optimizer after this call if a plan describes the MoE blocks of the model
    (`ModelPlan.block`: DBRX, JetMoE, LongCat-Flash): their parameters are replaced by stacked ones.

    In a training loop of your own, call `apply_ep_fsdp2(model)` instead of the last line. If each
    of several processes has loaded all parameters of a large model, a warning says how much memory
    they take together, and advises `hf_moe_ep.from_pretrained`.

    Args:
        model: a Transformers model with stacked experts (transformers' experts interface), as
            `from_pretrained` returns it; neither sharded nor wrapped in DDP.
        config: the settings; `overrides` are fields of the config by name.
        plan: the names of the model's modules, for an architecture whose plan cannot be derived.

    Patching a patched model again with the same config changes nothing. With another config, or if
    another process has pickled the patched model, the model is unpatched and patched again. A
    given plan is kept.

    Raises:
        ValueError: the architecture has no stacked experts, or its parts are ambiguous; the number
            of layers or experts differs from the model's config; `ep_size` does not divide the
            number of experts; no backend implements the gated activation of the experts; this
            machine cannot run `experts_backend="triton"`; the model is sharded.
        ImportError: `dispatcher="deepep"` is set, but DeepEP is not installed.
    """
    return patch_model(model, resolve_config(config, overrides), plan)


def patch_model(
    model: nn.Module,
    config: ParallelConfig,
    plan: ModelPlan | None = None,
    weights: Path | None = None,
) -> nn.Module:
    """Patch a model with a config whose sizes are all set.

    `weights` is the folder with the checkpoint of a model on the meta device.
    """
    check_is_model(model)
    warn_of_versions()
    old_state: ModelState | None = getattr(model, STATE, None)
    if plan is None and old_state is not None and old_state.plan.origin == "given":
        plan = old_state.plan
    if (
        old_state is not None
        and old_state.meshes is None
        and old_state.config == config
        and old_state.process == os.getpid()
        and plan in (None, old_state.plan)
    ):
        return model
    check_unsharded(model)
    _end_interrupted(model)
    _warn_of_whole_model(model)
    parts, state = _check_model(model, config, plan, weights)
    state.patch_alike = partial(patch, config=config, plan=plan)
    if old_state is not None:
        state.adapts_experts = old_state.adapts_experts
        state.is_reported = old_state.is_reported
        state.shared_meshes = old_state.shared_meshes
        state.unread, old_state.unread = old_state.unread, None
        state.extra = old_state.extra
        if config.mtp_layers != old_state.config.mtp_layers:
            state.extra = find_extra(model, state.plan)
        _detach(model, old_state)
    else:
        state.extra = find_extra(model, state.plan)
    for _, attach in FEATURES:
        attach(parts, state)
    setattr(parts.root, STATE, state)
    install(model, state)
    _log_summary(parts, state)
    return model


def _check_model(
    model: nn.Module, config: ParallelConfig, plan: ModelPlan | None, weights: Path | None = None
) -> tuple[Parts, ModelState]:
    """Find the parts of a model, and run all checks of `patch`.

    Experts that do not use transformers' experts interface are replaced by modules that use it
    (`moe/stacked.py`). With `mtp_layers` the model gets its head for multi-token prediction. If a
    check fails, the model is unchanged.
    """
    was_patched = hasattr(model, STATE)
    adapters = (getattr(model, "peft_config", None) or {}).values()
    for adapter in adapters:
        check_supported(adapter)
    stack_experts(model, find_block(model, plan))
    try:
        add_head(model, config, plan, weights)
        parts = find_parts(model, plan)
        state = ModelState(config, parts.plan, parts.num_experts)
        _check_tied_layers(parts, config)
        check_gets_whole_rows(config, adapters)
        for check, _ in FEATURES:
            check(parts, state)
    except BaseException:
        if not was_patched:
            remove_head(model)
            unstack_experts(model)
        raise
    return parts, state


def _check_tied_layers(parts: Parts, config: ParallelConfig) -> None:
    """Raise ValueError if layers run twice per forward, and a setting needs them to run once."""
    if not parts.tied_modules:
        return
    allowed = {"sp_size": 1, "cp_size": 1, "pp_size": 1, "bias_update_rate": None}
    for name, value in allowed.items():
        asked = getattr(config, name)
        if asked not in (None, value):
            raise ValueError(
                f"{name}={asked} needs decoder layers that run once per forward, but "
                f"{type(parts.root).__name__} ({parts.plan.model_type}) has two towers that share "
                f"the parameters of their layers, and the second tower attends to the tokens of "
                f"the first; leave {name} out (ep_size, etp_size and FSDP2 work)"
            )


def check_loadable(model: nn.Module, config: ParallelConfig) -> Parts:
    """Check a model on meta before its weights are loaded, and return its parts.

    Raises:
        ValueError: `patch` would raise it later; or the sizes do not divide the number of processes
            that the launcher started.
    """
    config = replace(resolve_config(config, {}), mtp_layers=0, mtp_from_scratch=False)
    parts, _ = _check_model(model, config, None)
    unstack_experts(model)
    world_size = get_world_size_of_launch()
    if world_size > 1:
        check_world(config, world_size)
    return parts


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch` in place, and return the model.

        patch(model, experts_backend="torch")
        unpatch(model)                                   # the model runs stock code, without hooks

    If parameters were to be read when the model is sharded (`hf-moe-ep run`), they are read now. A
    head for multi-token prediction (`mtp_layers`) is removed with its trained values.

    Raises:
        ValueError: the model is not patched, or it is sharded.
    """
    check_is_model(model)
    state: ModelState | None = getattr(model, STATE, None)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not patched; nothing to undo")
    if state.meshes is not None:
        raise ValueError(
            f"this model is sharded over {state.meshes.world_size} ranks; unpatch it before "
            "apply_ep_fsdp2 or accelerator.prepare"
        )
    _end_interrupted(model)
    read_whole(model)
    _detach(model, state)
    remove_head(model)
    unstack_experts(model)
    return model


def _detach(model: nn.Module, state: ModelState) -> None:
    """Undo what the features have attached."""
    detach_aux_loss(model)
    restore_classes(model)
    for module in model.modules():
        remove_hooks(module, lambda hook: isinstance(hook, PackageHook))
    unwatch_checkpoints(model)
    bias.restore_dtypes(state)
    state.restore()
    for module in model.modules():
        vars(module).pop(STATE, None)


def _end_interrupted(model: nn.Module) -> None:
    """Let our hooks restore what a forward had changed when Ctrl-C ended it."""
    for module in model.modules():
        for hook in list_forward_hooks(module):
            if isinstance(hook, PackageHook):
                hook.end_interrupted(module)


def check_unsharded(model: nn.Module) -> None:
    """Raise ValueError if the model, or a part of it, is sharded or wrapped already."""
    fix = "pass the model as from_pretrained returns it, patch it, then shard it once"
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise ValueError(f"the model is wrapped in {type(model).__name__}; {fix}")
    if devices := list_devices_of_parts(model):
        raise ValueError(
            f"from_pretrained(device_map=...) placed parts of this model on {', '.join(devices)}, "
            f"but every rank needs the whole model; load it without device_map=, patch it, then "
            f"shard it"
        )
    if is_distributed_by_transformers(model):
        raise ValueError(f"transformers sharded this model while it loaded the weights; {fix}")
    state: ModelState | None = getattr(model, STATE, None)
    if state is not None and state.meshes is not None:
        raise ValueError(f"the model is sharded by hf_moe_ep already; {fix}")
    if any(layer.model is not state for _, _, layer in iterate_experts_modules(model)):
        raise ValueError(
            f"this {type(model).__name__} is part of a patched model; patch or unpatch the whole "
            f"model"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"FSDP2 shards parts of this model already; {fix}")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(f"FSDP1 wraps parts of this model; {fix}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(f"the model has DTensor parameters already; {fix}")


def _warn_of_whole_model(model: nn.Module) -> None:
    """Warn on one rank if each of several processes has loaded all parameters of a large model.

    Parameters on the meta device need no memory, so a model that `hf_moe_ep.from_pretrained` builds
    causes no warning. If a host has several processes, the second one warns, because some loaders
    read the weights only in the first process of each host. With stock's from_pretrained every
    process reads all weights, even with Accelerate's `cpu_ram_efficient_loading`.
    """
    world_size = get_world_size_of_launch()
    processes = get_launched_local_world_size() or world_size
    num_bytes = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    if world_size == 1 or num_bytes <= LARGE_MODEL_BYTES:
        return
    if get_rank_of_launch() != min(1, processes - 1):
        return
    gib = num_bytes / 2**30
    warnings.warn(
        f"every process holds the whole {type(model).__name__}: {gib:.1f} GiB x {processes} "
        f"processes on this host = {gib * processes:.1f} GiB of memory. Load it with "
        f"hf_moe_ep.from_pretrained(...) instead: each rank then reads only its own shards",
        stacklevel=4,
    )


def _log_summary(parts: Parts, state: ModelState) -> None:
    if get_launched_rank() != 0:
        return
    names = list(parts.experts)
    compute = state.moe_layers[0].compute
    _logger.info(
        "patched %s: %d MoE layers (%s .. %s) of %d experts, ep_size %d, experts backend %s",
        type(parts.root).__name__,
        len(names),
        names[0],
        names[-1],
        state.num_experts,
        state.config.ep_size,
        "eager" if compute is None else compute.backend,
    )
