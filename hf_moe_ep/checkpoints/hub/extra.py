"""Keep references to extra tensors, which a checkpoint has and the model's class ignores.

Checkpoints of Qwen3-Next, Qwen3.5, DeepSeek-V3, GLM-4.5 and MiMo have layers for multi-token
prediction (`mtp.layers.0..`, or `model.layers.61..` after the last layer). transformers ignores
these layers, so checkpoints that stock saves lack them, and an inference engine that drafts tokens
with these layers cannot use such checkpoints.

`ModelState.extra` stores in which files the extra tensors of a model are (`storage/references.py`).
Every save copies these tensors byte for byte under their old keys (`copy_groups` describes the
copies, `write.py` makes them). They are never loaded into the model and do not change. A head for
multi-token prediction that is trained (`mtp_layers`) is a part of the model, and is saved with the
model's tensors. The output head of a causal LM is not an extra tensor: TRL lets reward models
ignore the head, and checkpoints of reward models do not have it.

    model loaded by                  extra tensors
    from_pretrained of this package  tensors that the class ignores or `ignore_unexpected` matches
    stock's from_pretrained          tensors that the class ignores. `patch` looks for them in the
                                     folder that the config names, and compares values, because the
                                     folder may contain other weights, too

Rank 0 writes checkpoints, so only the references of rank 0 are used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.fp8 import list_fp8_keys
from hf_moe_ep.checkpoints.hub.layout import (
    find_hub_layout,
    list_names,
    list_possible_keys,
    list_shapes,
)
from hf_moe_ep.checkpoints.hub.pieces import make_whole_piece
from hf_moe_ep.checkpoints.hub.write import TensorGroup
from hf_moe_ep.checkpoints.storage.references import FileReferences
from hf_moe_ep.checkpoints.storage.safetensors_file import (
    INDEX,
    SINGLE,
    FileTensor,
    Reader,
    read_files,
    read_header,
    read_index,
    read_weights,
)
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.all_ranks import StillHere, get_rank_of_launch, is_first
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.hub import (
    find_old_buffers,
    find_unexpected_keys,
    get_base_prefix,
    get_checkpoint_name,
    is_base_model,
    list_folders_of_loaded,
    list_ignored_patterns,
)
from hf_moe_ep.upstream.models import (
    OUTPUT_HEAD,
    get_output_head,
    get_source,
    is_quantized,
)

_logger = logging.getLogger("hf_moe_ep")
_LOADED_FILES = "_hf_moe_ep_loaded_files"
# The names of weights in one file, and of indexes, with or without a variant.
_WEIGHTS = re.compile(
    r"model(\.(?![^.]*-of-)[^.]+)?\.safetensors|model\.safetensors\.index(\.[^.]+)?\.json"
)


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
                f"ignore_unexpected: {pattern!r} is not a regular expression: {error}"
            ) from error
    return tuple(ignore_unexpected)


def refer_to(
    model: nn.Module, folder: Path, tensors: Mapping[str, FileTensor]
) -> FileReferences | None:
    """Return references to the extra tensors of a checkpoint; None without any.

    Raises:
        ValueError: two files have an extra tensor of the same key.
    """
    stock = without_adapters(model)
    if get_output_head(stock) is None:
        tensors = {key: t for key, t in tensors.items() if not key.startswith(OUTPUT_HEAD)}
    _check_stored_once(tensors, {*_get_loaded_files(stock), *(t.file for t in tensors.values())})
    return FileReferences.of(folder, tensors, get_source(stock)) if tensors else None


def find_extra(model: nn.Module, plan: ModelPlan) -> FileReferences | None:
    """Find the extra tensors of a model that stock's from_pretrained has loaded.

    Only rank 0 looks for them. It logs a warning if the checkpoint is gone, or has other weights
    than the model.

    Raises:
        ValueError: two files of the checkpoint have an extra tensor of the same key.
    """
    stock = without_adapters(model)
    if get_rank_of_launch() != 0:
        return None
    # A base model saves other keys than the checkpoint of a model with a head has, and a quantised
    # model is not saved.
    if not list_ignored_patterns(stock) or is_base_model(stock) or is_quantized(stock):
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
    candidates = (
        tensors.keys()
        - set(find_unexpected_keys(stock, tensors))
        - find_old_buffers(stock, tensors)
    )
    if not candidates:
        return None
    keys = list_possible_keys(
        find_hub_layout(model, plan, list_shapes(model)), get_base_prefix(stock)
    )
    candidates -= {part for key in keys for part in list_fp8_keys(key)}
    extra = {key: t for key, t in tensors.items() if key in candidates}
    return refer_to(stock, folder, extra)


def remember_files(model: nn.Module, files: Sequence[Path]) -> None:
    """Store the files from which stock's from_pretrained has loaded a model, for `find_loaded`."""
    setattr(model, _LOADED_FILES, tuple(files))


def _get_loaded_files(stock: nn.Module) -> tuple[Path, ...]:
    return getattr(stock, _LOADED_FILES, ())


def _check_stored_once(extra: Mapping[str, FileTensor], files: Iterable[Path]) -> None:
    """Raise ValueError if two files have an extra tensor of the same key.

    Of two tensors of the model with one key, stock reads the tensor in the last file. For extra
    tensors no such rule exists.
    """
    for file in files:
        for key in extra.keys() & read_header(file)[0].keys():
            if extra[key].file != file:
                raise ValueError(
                    f"two tensors are called {key}: one in {file}, and one in {extra[key].file}; "
                    f"remove one of them from the checkpoint"
                )


def find_loaded(stock: nn.Module) -> tuple[Path, dict[str, FileTensor]] | None:
    """Return the folder from which stock's from_pretrained has loaded a model, and its tensors.

    The result is None if the model was not loaded. Unless `remember_files` was called, only the
    name that was passed to from_pretrained is known. The folder of this name may also contain other
    weights, which `subfolder=` or `variant=` choose or which were written later. Therefore values
    are compared.

    Raises:
        ValueError: the folder does not exist any more, or it is unclear which weights the model
            has.
    """
    if files := _get_loaded_files(stock):
        return files[0].parent, read_files(files)
    folders = list_folders_of_loaded(stock)
    if len(folders) > 1:
        return _choose_commit(stock, folders)
    return _choose_weights(stock, folders[0]) if folders else None


def _choose_commit(model: nn.Module, folders: list[Path]) -> tuple[Path, dict[str, FileTensor]]:
    """Choose the commit of the hub's cache that has the weights of the model.

    The cache also has a folder for each commit from which only the config or the tokenizer was
    loaded, and for each commit that changed other files. In the second folder the weights are links
    to the same files, so both folders fit.

    Raises:
        ValueError: no commit has all values that are compared, or several commits with different
            files of weights have them.
    """
    read: dict[Path, dict[str, FileTensor]] = {}
    for folder in folders:
        # from_pretrained cannot have loaded a folder without complete weights either.
        with contextlib.suppress(ValueError, OSError):
            read[folder] = read_index(folder)
    fitting = [folder for folder, tensors in read.items() if _compare(model, tensors).is_exact]
    files = [_follow_links(read[folder]) for folder in fitting]
    if not fitting or any(others != files[0] for others in files):
        names = ", ".join(map(str, folders))
        raise ValueError(
            f"{len(fitting)} of {len(folders)} folders in the cache have the weights of this "
            f"model: {names}; load the model from a folder, or delete the commits that are not used"
        )
    return fitting[0], read[fitting[0]]


def _follow_links(tensors: Mapping[str, FileTensor]) -> dict[str, Path]:
    """Return the file of each tensor by key; links are followed."""
    targets = {file: file.resolve() for file in {tensor.file for tensor in tensors.values()}}
    return {key: targets[tensor.file] for key, tensor in tensors.items()}


def _choose_weights(model: nn.Module, folder: Path) -> tuple[Path, dict[str, FileTensor]]:
    """Choose the checkpoint, in a folder or its subfolders, from which the model was loaded.

    The user may have changed some tensors since then, for example by merging an adapter. If no
    checkpoint has all values of the model, the checkpoint with most equal tensors is chosen,
    provided that more than half of the compared tensors are equal.

    Raises:
        ValueError: every checkpoint has too few equal tensors, or several have the same number.
    """
    tensors = read_index(folder)
    comparison = _compare(model, tensors)
    if comparison.is_exact:
        return folder, tensors
    candidates = [(comparison, folder, tensors)]
    for file in _list_other_weights(folder, tensors):
        try:
            others = read_weights(file.parent, file.name)
        except (ValueError, OSError):
            continue  # from_pretrained cannot have loaded this file either
        candidates.append((_compare(model, others), file.parent, others))
    if comparison.total == 0 and len(candidates) == 1:
        return folder, tensors
    most = max(compared.equal for compared, _, _ in candidates)
    nearest = [candidate for candidate in candidates if candidate[0].equal == most]
    best, best_folder, best_tensors = nearest[0]
    if len(nearest) == 1 and 2 * best.equal > best.total:
        return best_folder, best_tensors
    rows = ", ".join(f"{path} ({x.equal} of {x.total})" for x, path, _ in candidates)
    raise ValueError(
        f"the weights in {folder} are not those of this model, which may have been loaded with "
        f"subfolder= or variant=, or changed since. Compared tensors that are equal: {rows}. Name "
        f"the folder of the weights in from_pretrained, and patch the model before its weights "
        f"are changed"
    )


def _list_other_weights(folder: Path, tensors: Mapping[str, FileTensor]) -> list[Path]:
    """List the checkpoints that `subfolder=` and `variant=` could choose, files or indexes.

    The checkpoint with `tensors`, which is in `folder` itself, is left out. Subfolders and their
    subfolders are searched, but not deeper folders.
    """
    known = {tensor.file for tensor in tensors.values()}
    found: list[Path] = []
    for name, subfolders, names in os.walk(folder):
        path = Path(name)
        depth = len(path.relative_to(folder).parts)
        subfolders[:] = sorted(x for x in subfolders if x[0] != ".") if depth < 2 else []
        # Loaders prefer a single file to an index, so an index beside it is not used. The index of
        # `folder` itself has been compared already, or is not used either.
        known |= {path / INDEX} if path == folder or SINGLE in names else set()
        files = [path / file for file in sorted(names) if _WEIGHTS.fullmatch(file)]
        found += [file for file in files if file not in known]
    return found


class _Compared(NamedTuple):
    """The number of compared tensors that are equal, and the number of all compared tensors."""

    equal: int
    total: int

    @property
    def is_exact(self) -> bool:
        return 0 < self.total == self.equal


def _compare(model: nn.Module, tensors: Mapping[str, FileTensor]) -> _Compared:
    """Compare one row of some parameters with the values of the same key in files.

    Two models of one architecture may have equal embeddings, and equal norms if no training has
    changed them. Therefore matrices of layers are compared, three of each kind: from the first
    layer, the last layer and a layer in between. Quantised tensors are left out. If a model has no
    such matrices, its other tensors are compared.
    """
    named = [
        (key, parameter.detach())
        for key, parameter in (
            (get_checkpoint_name(name), p) for name, p in model.named_parameters()
        )
        if key in tensors and parameter.ndim and not parameter.is_meta
        if _is_plain(parameter.dtype) and _is_plain(tensors[key].dtype)
    ]
    in_layers = [(key, parameter) for key, parameter in named if re.search(r"\.\d+\.", key)]
    matrices = [(key, parameter) for key, parameter in in_layers if parameter.ndim > 1]
    kinds: dict[str, list[tuple[str, Tensor]]] = {}
    for key, parameter in matrices or in_layers or named:
        kinds.setdefault(re.sub(r"\d+", "N", key), []).append((key, parameter))
    samples = [
        same_kind[number]
        for same_kind in kinds.values()
        for number in sorted({0, len(same_kind) // 2, len(same_kind) - 1})
    ]
    with Reader() as reader:
        equal = sum(
            _has_equal_first_row(parameter, tensors[key], reader) for key, parameter in samples
        )
    return _Compared(equal, len(samples))


def _is_plain(dtype: torch.dtype) -> bool:
    """Return True for a dtype of values that are not quantised."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _has_equal_first_row(parameter: Tensor, tensor: FileTensor, reader: Reader) -> bool:
    """Return True if a parameter and a tensor in a file have equal values in their first row.

    The parameter may have been rounded to 16 bits when it was loaded, and cast again later.
    """
    if tensor.shape != parameter.shape:
        return False
    box = (*((0, 1) for _ in tensor.shape[1:]), (0, tensor.shape[-1]))
    stored = reader.read(tensor, box).flatten()
    row = parameter[(0,) * (parameter.ndim - 1)].cpu()
    return any(
        torch.equal(stored.to(dtype).to(row.dtype), row)
        for dtype in (row.dtype, torch.bfloat16, torch.float16)
    )


def find_to_copy(
    extra: FileReferences | None, own_keys: Container[str], *, reads: bool = True
) -> dict[str, FileTensor]:
    """Return the extra tensors to write next to the model's tensors, on the rank that writes.

    The result is sorted by key, so that the tensors of a module follow each other.

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
    return dict(sorted(tensors.items()))


def copy_groups(
    tensors: Mapping[str, FileTensor], known: Mapping[str, bytes] | None = None
) -> list[TensorGroup]:
    """Describe copies of tensors in files, in the order in which the files store them.

    `known` has the sha256 of tensors that were hashed before.
    """
    in_order = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start))
    return [
        TensorGroup(
            [([make_whole_piece(key, tensor.shape)], tuple)],
            tensor.dtype,
            source=tensor,
            sha256=(known or {}).get(key),
        )
        for key, tensor in in_order
    ]


def get_known_digests(extra: FileReferences | None) -> dict[str, bytes]:
    """Return the sha256 of each extra tensor, or {} if the hashes are not known yet."""
    return {} if extra is None else extra.get_known_digests()


def follow_copies(state: ModelState, folder: Path, copied: Mapping[str, bytes]) -> None:
    """Store the hashes of the copies, and refer to the copies if the save has replaced the sources.

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
    """Yield (key, tensor) on every rank, for tensors that are in files of rank 0.

    Every rank iterates to the end. Rank 0 reads and sends `max_bytes` at a time.

    Args:
        extra: the same on every rank; only rank 0 reads the files.
        device: the device of the yielded tensors.
        still_here: None if the model is not sharded. Then every rank reads the files itself.
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
