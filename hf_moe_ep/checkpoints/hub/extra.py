"""Extra tensors: tensors of a checkpoint that the model's class ignores, carried by reference.

Checkpoints of Qwen3-Next, Qwen3.5, DeepSeek-V3, GLM-4.5 and MiMo have layers for multi-token
prediction (`mtp.layers.0..`, or `model.layers.61..` behind the last layer). transformers ignores
them, so a checkpoint that stock saves has lost them, and an inference engine that drafts tokens
with these layers cannot use it.

Here a model remembers in which files its extra tensors lie (`storage/references.py`), in
`ModelState.extra`. Everything that writes a checkpoint copies them from there, byte for byte,
under their old keys. They are never loaded into the model and do not change. The output head of a
causal LM is not one of them: TRL lets reward models ignore it, and no checkpoint of these has it.

    loaded by                        extra tensors are
    from_pretrained of this package  what the class ignores or `ignore_unexpected` matches
    stock's from_pretrained          what the class ignores; `patch` looks for them

Rank 0 writes checkpoints, so only the references of rank 0 are used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.fp8 import scaled_keys
from hf_moe_ep.checkpoints.hub.layout import Layout, hub_layout, list_names
from hf_moe_ep.checkpoints.hub.pieces import whole_piece
from hf_moe_ep.checkpoints.hub.write import TensorGroup
from hf_moe_ep.checkpoints.storage.references import FileReferences
from hf_moe_ep.checkpoints.storage.safetensors_file import (
    FileTensor,
    Reader,
    read_index,
)
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.together import StillHere, is_first, rank_of_launch
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.hub import (
    base_prefix,
    file_name,
    folders_of_loaded,
    ignored_patterns,
    is_base_model,
    unexpected_keys,
)
from hf_moe_ep.upstream.models import (
    OUTPUT_HEAD,
    is_quantized,
    output_head,
    persistent_buffers,
    source_of,
)

_logger = logging.getLogger("hf_moe_ep")
# The number of parameters by which a model is compared with the commits in the hub's cache.
_SAMPLES = 32


def check_patterns(ignore_unexpected: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns; raise ValueError if they are not a list of regular expressions."""
    if isinstance(ignore_unexpected, str):
        raise ValueError(
            f"ignore_unexpected={ignore_unexpected!r} is one text; pass a list of regular "
            f"expressions, [{ignore_unexpected!r}]"
        )
    for pattern in ignore_unexpected:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"ignore_unexpected: {pattern!r} is no regular expression: {error}"
            ) from error
    return tuple(ignore_unexpected)


def refer_to(
    model: nn.Module, folder: Path, tensors: Mapping[str, FileTensor]
) -> FileReferences | None:
    """Return references to the extra tensors of a checkpoint; None without any."""
    stock = without_adapters(model)
    if output_head(stock) is None:
        tensors = {key: t for key, t in tensors.items() if not key.startswith(OUTPUT_HEAD)}
    return FileReferences.of(folder, tensors, source_of(stock)) if tensors else None


def find_extra(model: nn.Module, plan: ModelPlan) -> FileReferences | None:
    """Find the extra tensors of a model that stock's from_pretrained has loaded.

    Only rank 0 looks for them. A warning says so if it cannot find the checkpoint any more.
    """
    stock = without_adapters(model)
    if rank_of_launch() != 0:
        return None
    # A base model writes other keys than a checkpoint with a head has, and a model that is held
    # quantised is not saved.
    if not ignored_patterns(stock) or is_base_model(stock) or is_quantized(stock):
        return None
    try:
        loaded = find_loaded(stock)
    except (ValueError, OSError) as error:
        _logger.warning(
            "%s ignores some tensors of checkpoints (layers for multi-token prediction). Whether "
            "its checkpoint has such tensors is unknown, so saved checkpoints will not have them: "
            "%s",
            type(stock).__name__,
            error,
        )
        return None
    if loaded is None:
        return None
    folder, tensors = loaded
    candidates = tensors.keys() - set(unexpected_keys(stock, tensors))
    if not candidates:
        return None
    shapes = {
        file_name(name): tuple(tensor.shape)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *persistent_buffers(model),
        )
    }
    own_keys = _own_keys(hub_layout(model, plan, shapes), base_prefix(stock))
    extra = {key: t for key, t in tensors.items() if key in candidates - own_keys}
    return refer_to(stock, folder, extra)


def find_loaded(stock: nn.Module) -> tuple[Path, dict[str, FileTensor]] | None:
    """Return the folder from which stock's from_pretrained has loaded a model, and its tensors.

    The result is None if the model was not loaded.

    Raises:
        ValueError: the folder does not exist any more, or it is unclear which folder it is.
    """
    folders = {folder: read_index(folder) for folder in folders_of_loaded(stock)}
    return _choose_loaded(stock, folders) if folders else None


def _choose_loaded(
    model: nn.Module, folders: Mapping[Path, dict[str, FileTensor]]
) -> tuple[Path, dict[str, FileTensor]]:
    """Choose the folder whose weights the model has, by samples of some parameters.

    Raises:
        ValueError: there are several folders, and none or more than one has the samples.
    """
    if len(folders) == 1:
        return next(iter(folders.items()))
    fitting = [folder for folder, tensors in folders.items() if _has_values(model, tensors)]
    if len(fitting) != 1:
        names = ", ".join(map(str, folders))
        raise ValueError(
            f"{len(fitting)} of {len(folders)} folders in the cache have the weights of this "
            f"model: {names}; load the model from a folder, or delete the commits that are not used"
        )
    return fitting[0], folders[fitting[0]]


def _has_values(model: nn.Module, tensors: Mapping[str, FileTensor]) -> bool:
    """Compare the first values of some parameters with those of the same name in files."""
    named = [
        (parameter.detach(), tensors[file_name(name)])
        for name, parameter in model.named_parameters()
        if file_name(name) in tensors and not parameter.is_meta and parameter.ndim
    ]
    step = max(1, len(named) // _SAMPLES)
    with Reader() as reader:
        for parameter, tensor in named[::step]:
            rows = ((0, 1), *((0, size) for size in tensor.shape[1:]))
            if tensor.shape != parameter.shape:
                return False
            if not torch.equal(reader.read(tensor, rows).to(parameter.dtype), parameter[:1].cpu()):
                return False
    return bool(named)


def _own_keys(layout: Layout, prefix: str) -> set[str]:
    """Return all keys under which checkpoints store a model's weights or the scales of these."""
    keys = {piece.key for pieces in layout.values() for piece in pieces} | layout.keys()
    keys |= {f"{prefix}{key}" for key in keys} | {key.removeprefix(prefix) for key in keys}
    return {part for key in keys for part in scaled_keys(key)}


def find_to_copy(
    extra: FileReferences | None, own_keys: Container[str], *, reads: bool = True
) -> dict[str, FileTensor]:
    """Return the extra tensors to write next to the model's tensors, on the rank that writes.

    Args:
        own_keys: the keys of the model's tensors.
        reads: as in `FileReferences.check_unchanged`.

    Raises:
        ValueError: the files of the extra tensors are gone or have changed, or the model has a
            tensor of the same key.
    """
    if extra is None:
        return {}
    tensors = extra.tensors()
    try:
        extra.check_unchanged(reads=reads)
    except ValueError as error:
        names = list_names("holds", tensors)
        raise ValueError(
            f"the checkpoint {extra.source} {names}, which the model's class ignores and which "
            f"would be copied from {extra.folder}, but {error}. Nothing was written; restore the "
            f"folder, or do without these tensors: save_pretrained(model, folder, "
            f"extra_tensors=False), hf-moe-ep convert --no-extra-tensors"
        ) from error
    for key, tensor in tensors.items():
        if key in own_keys:
            raise ValueError(
                f"two tensors are called {key}: one of the model, and one in {tensor.file}, which "
                f"the model's class ignores; pass extra_tensors=False to leave out the second"
            )
    return tensors


def copy_groups(
    tensors: Mapping[str, FileTensor], known: Mapping[str, bytes] | None = None
) -> list[TensorGroup]:
    """Describe copies of tensors in files, in the order of their bytes.

    `known` has the sha256 of tensors that were hashed before.
    """
    in_order = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start))
    return [
        TensorGroup(
            [([whole_piece(key, tensor.shape)], tuple)],
            tensor.dtype,
            source=tensor,
            sha256=(known or {}).get(key),
        )
        for key, tensor in in_order
    ]


def known_digests(extra: FileReferences | None) -> dict[str, bytes]:
    """Return the sha256 of the extra tensors that are known without reading them."""
    return {} if extra is None else extra.known_digests()


def follow_copies(state: ModelState, folder: Path, copied: Mapping[str, bytes]) -> None:
    """Remember the hashes of the copies, and refer to the copies if they replace their sources.

    Args:
        copied: the sha256 of each copied tensor, by key.
    """
    extra: FileReferences | None = state.extra
    if extra is None:
        return
    if extra.tensors().keys() <= copied.keys():
        extra.learn(copied)
    if folder.resolve() == extra.folder.resolve():
        copies = read_index(folder)
        kept = extra.tensors().keys() <= copies.keys()
        state.extra = extra.moved(folder, copies) if kept else extra


def send_extra(
    extra: Mapping[str, FileTensor],
    device: torch.device,
    max_bytes: int,
    still_here: StillHere | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) of tensors in files of rank 0, on every rank.

    Every rank iterates to the end. Rank 0 reads and sends `max_bytes` at a time.

    Args:
        extra: is the same on every rank; only rank 0 reads the files.
        device: the device of the yielded tensors.
        still_here: None if the model is not sharded; every rank then reads its own files.
    """
    reads = still_here is None or is_first()
    for key, tensor in extra.items():
        values = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
        as_bytes = FileTensor(tensor.file, torch.uint8, (tensor.nbytes,), tensor.start)
        with Reader() as reader:
            for start in range(0, tensor.nbytes, max_bytes):
                end = min(start + max_bytes, tensor.nbytes)
                try:
                    if reads:
                        values[start:end] = reader.read(as_bytes, ((start, end),))
                except (ValueError, OSError):
                    if still_here is not None:
                        still_here.leave()
                    raise
                if still_here is not None:
                    still_here.check()
                    dist.broadcast(values[start:end], src=0)
        yield key, values.view(tensor.dtype).view(tensor.shape)
