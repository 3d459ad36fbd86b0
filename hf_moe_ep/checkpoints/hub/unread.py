"""Read parameters from a checkpoint when the model is sharded, and not when it is loaded.

`hf-moe-ep run` lets stock's from_pretrained load a model without the parameters of its decoder
layers (`runner/load.py`). These parameters stay on the meta device, and `ModelState.unread` says
where the checkpoint stores them:

    from_pretrained       find_unread      finds the parameters in the files, and reads none
                          finish_loading   reads the buffers of the layers, which are small
    accelerator.prepare   shard_and_read   shards the model, then each rank reads its shards
    code that needs       read_whole       reads whole parameters
    their values

Before its parameters are read, the trainer may attach adapters to the model, replace embeddings or
freeze parameters. Parameters get the values that stock would have loaded, rounded to the same
dtype. If the trainer has written to an unread parameter, an error is raised, because the reading
would overwrite the written values.

With axolotl's cpu_ram_efficient_loading, only the first rank of each machine loads weights. On the
other ranks, some trainers allocate all trainable parameters without values. Such parameters count
as unread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_moe_ep.checkpoints.hub.read import check_same_weights, load_weights, match_checkpoint
from hf_moe_ep.checkpoints.hub.stored_parameter import StoredParameter
from hf_moe_ep.checkpoints.storage.safetensors_file import (
    FileTensor,
    Reader,
    compute_fingerprint,
    read_files,
)
from hf_moe_ep.config import get_launched_local_rank
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.boxes import get_local_tensor, make_whole_box
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.shard import build_meshes_and_cut_stages, shard_model
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.hub import get_checkpoint_name
from hf_moe_ep.upstream.models import iterate_persistent_buffers
from hf_moe_ep.upstream.modules import get_own_buffers
from hf_moe_ep.upstream.sharded_models import count_writes


@dataclass(frozen=True)
class Unread:
    """The unread parameters of a model, and where a checkpoint stores them.

    Attributes:
        folder: the folder of the checkpoint.
        stored: where the checkpoint stores each unread parameter, by the parameter's name in
            checkpoints.
        buffers: where the checkpoint stores each persistent buffer, by the buffer's name.
        fingerprint: identifies the files; it must be the same on all ranks.
        file_tensors: the tensors in the files that store these parameters, by key.
        write_counts: each parameter, by its name in checkpoints, with the result of
            `count_writes` at the end of from_pretrained.
    """

    folder: str
    stored: Mapping[str, StoredParameter]
    buffers: Mapping[str, StoredParameter]
    fingerprint: str
    file_tensors: Mapping[str, FileTensor]
    write_counts: Mapping[str, tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = field(
        default_factory=dict
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Unread:
        """Return this object, because a copy of the model reads the same files."""
        return self

    def read_whole(self, model: nn.Module) -> None:
        """Call the function `read_whole`. Lower folders cannot import this module to call it."""
        read_whole(model)


def find_unread(
    model: nn.Module, files: Sequence[Path], plan: ModelPlan, names: Iterable[str]
) -> Unread:
    """Find the parameters `names` of a model on meta in files of a checkpoint; read no values.

    Raises:
        ValueError: the files are not a complete checkpoint; tensors are missing or have another
            shape; or tensors are quantised, so that they must be decoded.
    """
    names = set(names)
    folder = files[0].parent
    found = match_checkpoint(model, folder, plan, names, file_tensors=read_files(files))
    for name, _ in iterate_persistent_buffers(model):
        if name not in found.stored:  # only stock's code knows the initial value
            raise ValueError(f"{name} is not in {os.fspath(folder)}")
    key_of = {id(tensor): key for key, tensor in found.file_tensors.items()}
    stored = {get_checkpoint_name(name): found.stored[name] for name in names}
    file_tensors: dict[str, FileTensor] = {}
    for parameter in stored.values():
        for piece, tensor in parameter.pieces:
            if id(tensor) not in key_of:
                raise ValueError(f"{piece.key} in {os.fspath(folder)} is quantised")
            file_tensors[key_of[id(tensor)]] = tensor
    buffers = {name: tensor for name, tensor in found.stored.items() if name not in names}
    digest = compute_fingerprint(found.file_tensors)
    return Unread(os.fspath(folder), stored, buffers, digest, file_tensors)


def finish_loading(model: nn.Module, unread: Unread) -> Unread:
    """Read the persistent buffers that from_pretrained has left on meta.

    Returns `unread` with the dtypes in which stock would have loaded the parameters.
    """
    with Reader() as reader:
        for prefix, module in model.named_modules():
            for name, buffer in get_own_buffers(module).items():
                full_name = f"{prefix}.{name}".lstrip(".")
                if buffer is None or not buffer.is_meta or full_name not in unread.buffers:
                    continue
                values = torch.empty(buffer.shape, dtype=buffer.dtype)
                unread.buffers[full_name].read_into(values, make_whole_box(buffer.shape), reader)
                get_own_buffers(module)[name] = values
    parameters = {
        get_checkpoint_name(name): parameter for name, parameter in model.named_parameters()
    }
    stored = {
        name: StoredParameter(parameter.pieces, parameters[name].dtype)
        for name, parameter in unread.stored.items()
    }
    write_counts = {
        name: (weakref.ref(parameters[name]), count_writes(parameters[name])) for name in stored
    }
    return replace(unread, stored=stored, write_counts=write_counts)


def shard_and_read(
    model: nn.Module, state: ModelState, options: ShardOptions, device: torch.device
) -> nn.Module:
    """Call `shard_model`, then let each rank read its shards of the unread parameters.

    Every rank must call this function.

    Raises:
        ValueError: `shard_model` raises an error; ranks would read different weights; or an unread
            parameter was written.
    """
    unread: Unread | None = state.unread
    if unread is None:
        return shard_model(model, state, options, device)
    parameters = _find_unread_parameters(model, unread)
    shard_model(model, state, _keep_on_meta(options, parameters), device)
    parameters = {name: p for name, p in model.named_parameters() if name in parameters}
    check_same_weights(unread.fingerprint, unread.folder)
    stored = {name: unread.stored[get_checkpoint_name(name)] for name in parameters}
    offloaded = isinstance(options.offload_policy, CPUOffloadPolicy)
    load_weights(model, stored, torch.device("cpu") if offloaded else device)
    _round_to_loaded_dtype(model, stored)
    state.unread = None
    return model


def cut_before_sharding(
    model: nn.Module, state: ModelState, options: ShardOptions, device: torch.device
) -> None:
    """Cut a model to this rank's pipeline stage, before `shard_and_read` shards it.

    Every rank must call this function. It raises the same errors as `shard_and_read`.
    """
    unread: Unread | None = state.unread
    parameters = {} if unread is None else _find_unread_parameters(model, unread)
    state.meshes_of_stage = build_meshes_and_cut_stages(
        model, state, _keep_on_meta(options, parameters), device
    )


def _keep_on_meta(options: ShardOptions, parameters: Mapping[str, nn.Parameter]) -> ShardOptions:
    """Return options with which sharding leaves these parameters on meta."""
    return replace(options, empty_params=options.empty_params | frozenset(parameters.values()))


def read_whole(model: nn.Module) -> None:
    """Read all unread parameters of a model that is not sharded, as stock would have done."""
    state = find_state(model)
    unread: Unread | None = None if state is None else state.unread
    if state is None or unread is None:
        return
    with Reader() as reader:
        for name, parameter in _find_unread_parameters(model, unread).items():
            stored = unread.stored[get_checkpoint_name(name)]
            values = torch.empty(parameter.shape, dtype=stored.dtype)
            stored.read_into(values, make_whole_box(parameter.shape), reader)
            _replace(model, parameter, values.to(parameter.dtype))
    state.unread = None


def _find_unread_parameters(model: nn.Module, unread: Unread) -> dict[str, nn.Parameter]:
    """Return the unread parameters by name.

    On a rank that loaded no weights, parameters that were allocated are first moved to meta.

    Raises:
        ValueError: an unread parameter was written.
    """
    is_first_on_machine = get_launched_local_rank() in (None, 0)
    for name, parameter in list(model.named_parameters()):
        is_allocated = get_checkpoint_name(name) in unread.stored and not parameter.is_meta
        if is_allocated and not is_first_on_machine:
            _replace(model, parameter, torch.empty_like(parameter, device="meta"))
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_meta and get_checkpoint_name(name) in unread.stored
    }
    for name, parameter in found.items():
        reference, before = unread.write_counts[get_checkpoint_name(name)]
        if reference() is parameter and count_writes(parameter) != before:
            raise ValueError(
                f"{name} was written after the model was loaded, but its values are read only when "
                f"the model is sharded, so what was written would be lost; add --stock-load to "
                f"hf-moe-ep run"
            )
    return found


@torch.no_grad()
def _round_to_loaded_dtype(model: nn.Module, stored: Mapping[str, StoredParameter]) -> None:
    """Round fp32 master weights to the dtype in which stock would have loaded them."""
    parameters = dict(model.named_parameters())
    for name, parameter in stored.items():
        if name in parameters and parameters[name].is_floating_point():
            values = get_local_tensor(parameters[name])
            if values.dtype != parameter.dtype:
                values.copy_(values.to(parameter.dtype))


def _replace(model: nn.Module, old: nn.Parameter, values: Tensor) -> None:
    """Register a parameter with `values` under every name of the parameter `old`."""
    new = nn.Parameter(values.detach(), requires_grad=old.requires_grad)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(module, name, new)
