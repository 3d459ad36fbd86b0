"""A sharded model in one call.

    apply_ep_fsdp2(model)                  a model that from_pretrained has loaded
    apply_ep_fsdp2(model, weights=folder)  one on the meta device: each rank reads its shards
    from_pretrained(name, ep_size=8)       builds that model from the folder's config first

With Accelerate or the Trainer none of them is needed, as a model is sharded in `prepare`; the last
one saves memory there too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hf_moe_ep.checkpoints.hub.read import dtype_of_weights, find_weights, load_weights
from hf_moe_ep.config import ParallelConfig, launched_local_rank
from hf_moe_ep.integrations.install import wrap_adapters
from hf_moe_ep.patch import check_unsharded, patch
from hf_moe_ep.ranks.together import is_distributed, together
from hf_moe_ep.sharding.options import ShardOptions, default_device, default_policy, kept_whole
from hf_moe_ep.sharding.shard import shard_model
from hf_moe_ep.state import STATE, ModelState
from hf_moe_ep.upstream.adapter_files import check_attachable
from hf_moe_ep.upstream.adapters import attach_adapters, without_adapters
from hf_moe_ep.upstream.hub import (
    download_options,
    empty_model,
    forget_quantization,
    local_folder,
)
from hf_moe_ep.upstream.models import set_source


def apply_ep_fsdp2(
    model: nn.Module,
    config: ParallelConfig | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    **overrides: Any,
) -> nn.Module:
    """Shard a model over all ranks of the default process group, in place; returns it.

    For a training loop of your own. Create the optimizer afterwards: parameters are replaced.

    Args:
        model: patched, or a stock model, which is patched first with `config` and `overrides`.
        weights: a folder with a safetensors checkpoint, for a model with parameters on the meta
            device: each rank reads its part of those alone. Others, such as adapters attached to
            such a model, start with rank 0's values.
        mp_policy: FSDP2's policy; None computes in the dtype the model was loaded in, with fp32
            masters and fp32 gradient reduction where that is bf16 or fp16.
        offload_policy: FSDP2's policy; None keeps parameters on the device.

    Raises:
        ValueError: no process group; sizes that do not fit the world; ranks that disagree, or
            would share a GPU; missing weights; a checkpoint that is not whole or does not fit; and
            all that `patch` raises.
    """
    # First: under NCCL no other collective gets through where ranks share a GPU.
    device = default_device() if is_distributed() else torch.device("cpu")

    def prepare() -> tuple[ModelState, ShardOptions, list[str]]:
        state = _patched(model, config, overrides)
        _check_group("apply_ep_fsdp2")
        empty = {n: p for n, p in model.named_parameters() if p.is_meta and weights is not None}
        if weights is not None:
            _prepare_to_read(model, weights, empty)
        return state, _options(model, state, empty.values(), mp_policy, offload_policy), [*empty]

    # What is wrong on one rank alone, such as a package that it lacks, is told to all.
    state, options, empty = together("apply_ep_fsdp2", prepare)
    if weights is None:
        return shard_model(model, state, options, device)
    found = find_weights(model, weights, state.plan, empty)
    shard_model(model, state, options, device)
    offloaded = isinstance(options.offload_policy, CPUOffloadPolicy)
    load_weights(model, found, torch.device("cpu") if offloaded else device)
    return model


def _patched(
    model: nn.Module, config: ParallelConfig | None, overrides: dict[str, Any]
) -> ModelState:
    state: ModelState | None = getattr(model, STATE, None)
    if state is None or config is not None or overrides:
        patch(model, config, **overrides)
        state = getattr(model, STATE)
    else:
        check_unsharded(model)
        wrap_adapters(model, state)
    assert state is not None
    return state


def _options(
    model: nn.Module,
    state: ModelState,
    empty: Iterable[nn.Parameter],
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
) -> ShardOptions:
    policy, fp32_masters = default_policy(model)
    if mp_policy is not None:
        policy, fp32_masters = mp_policy, mp_policy.param_dtype is not None
    return ShardOptions(
        mp_policy=policy,
        offload_policy=offload_policy or OffloadPolicy(),
        fp32_masters=fp32_masters,
        reshard_after_forward=state.config.reshard_after_forward,
        ignored_params=kept_whole(model),
        empty_params=frozenset(empty),
    )


def _prepare_to_read(
    model: nn.Module, weights: str | os.PathLike[str], empty: dict[str, nn.Parameter]
) -> None:
    if not empty:
        raise ValueError(
            f"weights={os.fspath(weights)!r} is for a model on the meta device, and every "
            f"parameter of this one has values; leave it out to train on with those"
        )
    # A config that a folder was read into by hand; what is quantized there is read decoded.
    config_of_model = getattr(without_adapters(model), "config", None)
    forget_quantization(config_of_model, os.fspath(weights))


def from_pretrained(
    name_or_dir: str | os.PathLike[str],
    *,
    model_class: Any = None,
    config: ParallelConfig | None = None,
    peft_config: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    **options: Any,
) -> nn.Module:
    """Load a model sharded: each rank reads, from a folder that all of them see, its shards alone.

    Beside its shards a rank needs memory for one part of one tensor, and with `experts_dtype` for
    one matrix of one expert. Accelerate and the Trainer take the model as it is; make the
    Accelerator or TrainingArguments first: the process group.

    Args:
        name_or_dir: a folder, or a model of the hub, which the first rank of each machine downloads
            into the cache.
        model_class: of transformers; None is the one that the folder's config names.
        config: as in `patch`; its fields may also be given by name, such as `ep_size=8`.
        peft_config: a LoraConfig; the adapters it describes are attached before sharding. Other
            adapters, and those whose first values come from the weights, need a loaded model.
        mp_policy: as in `apply_ep_fsdp2`.
        offload_policy: as in `apply_ep_fsdp2`.
        options: as in transformers' `from_pretrained`: `dtype` (by default that of the checkpoint),
            `attn_implementation`, `revision`, `token`, `cache_dir`, .., and fields of its config.

    Raises:
        ValueError: as `apply_ep_fsdp2`.
    """
    _check_group("from_pretrained")
    sizes = {f.name for f in fields(ParallelConfig)}
    overrides = {name: options.pop(name) for name in sizes & options.keys()}

    download = download_options(options)
    what = f"from_pretrained({os.fspath(name_or_dir)!r})"

    def fetch() -> Path | None:
        if peft_config is not None:
            check_attachable(peft_config)
        is_first_here = launched_local_rank() in (None, 0)
        return local_folder(name_or_dir, download) if is_first_here else None

    def build() -> tuple[Path, nn.Module]:
        folder = fetched or local_folder(name_or_dir, download, after_another=True)
        model = empty_model(folder, model_class, partial(dtype_of_weights, folder), options)
        # The name, not the folder in the cache: PEFT writes it into the config of an adapter.
        set_source(model, os.fspath(name_or_dir))
        if peft_config is not None:
            model = attach_adapters(model, peft_config)
        return folder, model

    # 512 ranks that ask the hub at once would be refused by it.
    fetched = together(what, fetch)
    folder, model = together(what, build)
    return apply_ep_fsdp2(
        model,
        config,
        weights=folder,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        **overrides,
    )


def _check_group(caller: str) -> None:
    if not is_distributed():
        raise ValueError(
            f"{caller} shards over a process group and there is none; start the script with "
            "torchrun or accelerate launch and call torch.distributed.init_process_group()"
        )
