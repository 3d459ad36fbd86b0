"""`apply_ep_fsdp2` and `from_pretrained`: shard a model in one call.

    apply_ep_fsdp2(model)                  shards a model that stock's from_pretrained has loaded
    apply_ep_fsdp2(model, weights=folder)  shards a model on the meta device, then each rank reads
                                           its shards from the folder
    from_pretrained(name, ep_size=8)       builds the model on the meta device and calls
                                           apply_ep_fsdp2 with the folder of the weights

Accelerate and the Trainer shard a patched model in `prepare`, so a script that uses them needs none
of these calls. With `from_pretrained` such a script needs less memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hf_moe_ep.checkpoints.hub.extra import check_patterns, refer_to
from hf_moe_ep.checkpoints.hub.read import choose_dtype_of_weights, find_weights, load_weights
from hf_moe_ep.checkpoints.hub.unread import shard_and_read
from hf_moe_ep.config import ParallelConfig, get_launched_local_rank, resolve_config
from hf_moe_ep.integrations.install import wrap_adapters
from hf_moe_ep.patch import check_unsharded, patch_model
from hf_moe_ep.ranks.all_ranks import (
    PATIENCE_OF_LOADING,
    check_everyone_calls,
    is_distributed,
    run_on_all,
)
from hf_moe_ep.sharding.options import (
    ShardOptions,
    choose_default_device,
    choose_default_policy,
    list_kept_whole,
)
from hf_moe_ep.sharding.shard import shard_model
from hf_moe_ep.state import STATE, ModelState
from hf_moe_ep.upstream.adapter_files import check_attachable, check_no_adapter_is_lost
from hf_moe_ep.upstream.adapters import attach_adapters, without_adapters
from hf_moe_ep.upstream.conversion import remember_conversions
from hf_moe_ep.upstream.hub import (
    build_empty_model,
    find_local_folder,
    forget_quantization,
    pop_download_options,
)
from hf_moe_ep.upstream.models import set_source

# How long ranks wait while another rank downloads a model.
_PATIENCE_OF_DOWNLOAD = timedelta(hours=24)


def apply_ep_fsdp2(
    model: nn.Module,
    config: ParallelConfig | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignore_unexpected: Sequence[str] = (),
    **overrides: Any,
) -> nn.Module:
    """Shard a model over all ranks of the default process group, in place, and return it.

    This function is for a training loop of your own. Create the optimizer after this call, which
    replaces the parameters; a step of an older optimizer raises a ValueError.

    Args:
        model: a patched model, or a stock model, which is first patched with `config` and
            `overrides`.
        weights: a folder with a safetensors checkpoint, for a model with parameters on the meta
            device. Each rank reads its shards of these parameters. All other parameters, such as
            adapters, start with the values of rank 0.
        mp_policy: FSDP2's policy. If it is None, the model computes in the dtype in which it was
            loaded. If this dtype is bf16 or fp16, master weights and gradient reduction use fp32.
        offload_policy: FSDP2's policy. If it is None, the parameters stay on the device.
        ignore_unexpected: regular expressions. Tensors of `weights` that do not belong to the model
            raise an error unless the model's class ignores them or a pattern is found in their
            keys. Ignored tensors are not loaded, but `save_pretrained` copies them.

    Raises:
        ValueError: there is no process group; the sizes do not fit the number of ranks; ranks have
            different models or settings, or share a GPU; weights are missing; the checkpoint is
            incomplete or does not fit the model; or `patch` raises a ValueError.
    """
    # If ranks share a GPU, NCCL's collectives fail. choose_default_device checks this, so this call
    # comes before any collective.
    device = choose_default_device() if is_distributed() else torch.device("cpu")

    def prepare() -> tuple[ModelState, ShardOptions, list[str]]:
        patterns = check_patterns(ignore_unexpected)
        if patterns and weights is None:
            raise ValueError(
                "ignore_unexpected= is for the checkpoint that weights= names. This model is "
                "already loaded: its saves copy the tensors that its class ignores, without this "
                "argument"
            )
        state = _patch_if_needed(model, config, overrides, weights)
        _check_process_group("apply_ep_fsdp2")
        to_read = {n: p for n, p in model.named_parameters() if p.is_meta and weights is not None}
        if weights is not None:
            _prepare_to_read(model, weights, to_read)
        shard_options = _make_shard_options(
            model, state, to_read.values(), mp_policy, offload_policy
        )
        return state, shard_options, [*to_read]

    # If one rank fails, for example because it lacks a package, all ranks raise its error.
    state, options, names_to_read = run_on_all("apply_ep_fsdp2", prepare)
    if weights is None:
        return shard_and_read(model, state, options, device)
    found = find_weights(model, weights, state.plan, names_to_read, ignore_unexpected)
    state.extra = refer_to(model, Path(weights), found.extra)
    remember_conversions(model, found.file_tensors)
    shard_model(model, state, options, device)
    offloaded = isinstance(options.offload_policy, CPUOffloadPolicy)
    load_weights(model, found.stored, torch.device("cpu") if offloaded else device)
    return model


def _patch_if_needed(
    model: nn.Module,
    config: ParallelConfig | None,
    overrides: dict[str, Any],
    weights: str | os.PathLike[str] | None,
) -> ModelState:
    state: ModelState | None = getattr(model, STATE, None)
    if state is None or config is not None or overrides:
        settings = {name: value for name, value in overrides.items() if name != "plan"}
        patch_model(
            model,
            resolve_config(config, settings),
            overrides.get("plan"),
            None if weights is None else Path(weights),
        )
    elif state.process != os.getpid():
        # A model that was unpickled in another process lacks the wraps there.
        patch_model(model, state.config)
    else:
        check_unsharded(model)
        wrap_adapters(model, state)
    state = getattr(model, STATE)
    assert state is not None
    return state


def _make_shard_options(
    model: nn.Module,
    state: ModelState,
    empty: Iterable[nn.Parameter],
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
) -> ShardOptions:
    policy, fp32_masters = choose_default_policy(model)
    if mp_policy is not None:
        policy, fp32_masters = mp_policy, mp_policy.param_dtype is not None
    return ShardOptions(
        mp_policy=policy,
        offload_policy=offload_policy or OffloadPolicy(),
        fp32_masters=fp32_masters,
        reshard_after_forward=state.config.reshard_after_forward,
        ignored_params=list_kept_whole(model),
        empty_params=frozenset(empty),
    )


def _prepare_to_read(
    model: nn.Module, weights: str | os.PathLike[str], empty: dict[str, nn.Parameter]
) -> None:
    if not empty:
        raise ValueError(
            f"weights={os.fspath(weights)!r} is for a model on the meta device, but every "
            f"parameter of this model has values; leave out weights= to train with these values"
        )
    # The model's config, if it was read from the folder, may declare quantized weights. This
    # declaration is removed, because load_weights decodes the weights.
    model_config = getattr(without_adapters(model), "config", None)
    forget_quantization(model_config, os.fspath(weights))


def from_pretrained(
    name_or_dir: str | os.PathLike[str],
    *,
    model_class: Any = None,
    config: ParallelConfig | None = None,
    peft_config: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignore_unexpected: Sequence[str] = (),
    **options: Any,
) -> nn.Module:
    """Load a model in shards: each rank reads only its own shards.

    Besides its shards, a rank needs memory for a part of one tensor, and with `experts_dtype` for
    one matrix of one expert. The model can be passed to Accelerate or the Trainer. Create the
    Accelerator or the TrainingArguments before this call: they initialise the process group.

    Args:
        name_or_dir: a folder that all ranks can read, or the name of a model on the hub, which the
            first rank of each machine downloads into the cache of that machine. Without LOCAL_RANK
            every rank downloads.
        model_class: a model class of transformers; by default, the class that the config names.
        config: as in `patch`; its fields may also be passed by name, such as `ep_size=8`.
        peft_config: a LoraConfig, whose adapters are attached before sharding. Only plain LoRA
            that is not on embeddings is accepted, with initial values that do not depend on the
            weights. All other adapters need a model that stock's from_pretrained has loaded, and so
            do trained adapters, which are not read from the folder.
        mp_policy: as in `apply_ep_fsdp2`.
        offload_policy: as in `apply_ep_fsdp2`.
        ignore_unexpected: as in `apply_ep_fsdp2`, for keys that the model's class does not ignore.
        options: as in transformers' `from_pretrained`: `dtype` (default: the checkpoint's dtype),
            `attn_implementation`, `revision`, `token`, `cache_dir`, ..., and fields of the model's
            config.

    Raises:
        ValueError: as in `apply_ep_fsdp2`.
    """
    _check_process_group("from_pretrained")
    choose_default_device()  # chooses the GPU of this rank, before any collective
    settings = {f.name for f in fields(ParallelConfig)}
    overrides = {name: options.pop(name) for name in settings & options.keys()}

    download = pop_download_options(options)
    call = f"from_pretrained({os.fspath(name_or_dir)!r})"

    def fetch() -> Path | None:
        try:
            if peft_config is not None:
                check_attachable(peft_config)
            is_first_on_machine = get_launched_local_rank() in (None, 0)
            return find_local_folder(name_or_dir, download) if is_first_on_machine else None
        finally:
            # A download may take longer than the timeout of a collective.
            check_everyone_calls("the download of from_pretrained", _PATIENCE_OF_DOWNLOAD)

    def build() -> tuple[Path, nn.Module]:
        folder = downloaded or find_local_folder(name_or_dir, download, after_another=True)
        check_no_adapter_is_lost(folder, peft_config)
        model = build_empty_model(
            folder, model_class, partial(choose_dtype_of_weights, folder), options
        )
        # PEFT writes the source into adapter configs, so it must not be the folder of the cache.
        set_source(model, os.fspath(name_or_dir))
        if peft_config is not None:
            model = attach_adapters(model, peft_config)
        return folder, model

    # The first rank of each machine downloads for the other ranks, because the hub would refuse the
    # requests of, say, 512 ranks at the same time.
    check_everyone_calls("from_pretrained", PATIENCE_OF_LOADING)
    downloaded = run_on_all(call, fetch)
    folder, model = run_on_all(call, build)
    return apply_ep_fsdp2(
        model,
        config,
        weights=folder,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignore_unexpected=ignore_unexpected,
        **overrides,
    )


def _check_process_group(caller: str) -> None:
    if not is_distributed():
        raise ValueError(
            f"{caller} needs a process group, but torch.distributed is not initialised; start the "
            "script with torchrun or accelerate launch, and before this call create "
            "TrainingArguments or an Accelerator, or call torch.distributed.init_process_group()"
        )
