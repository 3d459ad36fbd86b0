"""Write a checkpoint in the hub's layout: rank 0 writes, one slab of a parameter at a time.

With pipeline stages the first rank of each stage writes the files of its stage, and rank 0 commits
(`StageFiles`). A slab is the part of a parameter that a range of dim 0 selects. A save has four
steps:

    files                                              step
    .configs-../config.json, .., tokenizer             are written into a temporary folder
    model-3f9c21ab-00001-of-00013.safetensors, ..      are written; no earlier checkpoint has these
                                                       names
    config.json, generation_config.json, tokenizer,    are all replaced at one moment, the commit
    model.safetensors.index.json
    shards that the index does not name                are removed

If a process is killed or fails, the folder contains these files:

    before the commit    the previous checkpoint, and possibly some new shards
    after the commit     the new checkpoint, and possibly some old shards

The next save removes the shards that the index does not name.

If the folder has no config.json yet, or has an index already and the same configs, the commit is
the rename of the index. Otherwise `storage/switch.py` replaces configs and index with one rename of
a link; it also removes a model.safetensors, which readers would prefer to the index. On a file
system without links, configs, index and model.safetensors are changed one after the other within
milliseconds, and a warning says that a kill in between leaves a folder that cannot be loaded. The
index also stores a hash of every shard, for `hf-moe-ep verify`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.configs import CONFIG, publish
from hf_moe_ep.checkpoints.hub.layout import PADDING, find_hub_layout, group_by_shared_tensors
from hf_moe_ep.checkpoints.hub.pieces import Piece, cut_pieces, find_filled_box
from hf_moe_ep.checkpoints.storage.atomic import write_atomically
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, SINGLE, FileTensor, Writer
from hf_moe_ep.checkpoints.storage.switch import list_changed_files, settle, switch_files
from hf_moe_ep.etp import get_stock_shape, map_ids_to_split_dims
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.all_ranks import gather_on_first, is_first
from hf_moe_ep.ranks.boxes import Box, get_box_sizes, make_slices
from hf_moe_ep.upstream.hub import get_checkpoint_name, list_kept_in_fp32, make_progress_bar
from hf_moe_ep.upstream.models import is_correction_bias

_logger = logging.getLogger("hf_moe_ep")

# Two fields of the index. The first has the sha256 of each file with tensors of the model. The
# second has, for each file with copied tensors, one sha256 of its header and of the tensors' hashes
# (`Writer.sha256_of_tensors`).
HASHES = "hf_moe_ep_sha256"
HASHES_OF_COPIES = "hf_moe_ep_sha256_of_tensors"
# The names of shards that this package and transformers write. Files with other names, such as
# model-ema.safetensors, belong to the user.
_SHARD = re.compile(r"model-(?:[0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


# The slabs of a parameter, in order: (box, values). A box is the index range in each dim. While a
# checkpoint is written, every rank of a pipeline stage iterates to the end, but only its first rank
# uses the values.
Slabs = Iterable[tuple[Box, Tensor | None]]


@dataclass(frozen=True)
class TensorGroup:
    """Checkpoint tensors that are written together, and the parameters that fill them.

    A group has one parameter (experts.gate_up_proj fills experts.0.gate_proj, experts.0.up_proj,
    ..), or several if they share a checkpoint tensor.

    Attributes:
        parameters: for each parameter, its pieces in order (a piece fills a box of one checkpoint
            tensor), and a function that yields the slabs of the parameter. Zeros that pad a
            checkpoint tensor are listed like a parameter.
        dtype: the dtype in the checkpoint.
        names: the names of the parameters in the model.
        source: None, or a tensor in another file that is copied byte for byte. A group with a
            source has only this tensor, and no slabs are read.
        sha256: the hash of `source`, if it is known.
        stage: the pipeline stage that holds the parameters.
    """

    parameters: Sequence[tuple[list[Piece], Callable[[], Slabs]]]
    dtype: torch.dtype
    names: tuple[str, ...] = ()
    source: FileTensor | None = None
    sha256: bytes | None = None
    stage: int = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the checkpoint tensors by key, in order."""
        return {piece.key: piece.shape for pieces, _ in self.parameters for piece in pieces}

    @property
    def num_bytes(self) -> int:
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def slabs(self) -> Iterator[tuple[list[Piece], Box, Tensor | None]]:
        """Yield the slabs of all parameters, each with the pieces of its parameter."""
        for pieces, slabs_of in self.parameters:
            for box, slab in slabs_of():
                yield pieces, box, slab
                del slab


@dataclass(frozen=True)
class StageFiles:
    """The files that one pipeline stage writes, while other stages write theirs.

        round      0                1                2
        stage 0    file 0           file 1           file 2
        stage 1    file 3           file 4           (waits)

    Attributes:
        numbers: the numbers of the files of this rank's stage, in order.
        num_rounds: the number of files of the stage with most files.
    """

    numbers: Sequence[int]
    num_rounds: int


def group_tensors(
    model: Any,
    plan: ModelPlan,
    tensors: Mapping[str, Tensor],
    dtype_of: Callable[[str, Tensor], torch.dtype],
    slabs_of: Callable[[str, Tensor], Slabs],
) -> list[TensorGroup]:
    """Group the tensors of a model by the checkpoint tensors that they fill in the hub's layout.

    Args:
        model: the model to which the tensors belong.
        plan: `plan.stored` overrides the layout that transformers would write.
        tensors: parameters and buffers by their names in the model.
        dtype_of: returns the dtype in which a tensor is saved.
        slabs_of: yields the slabs of a tensor, in its stock shape.

    Raises:
        ValueError: parameters that share a checkpoint tensor have several dtypes.
    """
    name_in_model = {get_checkpoint_name(name): name for name in tensors}
    by_name = {name: tensors[in_model] for name, in_model in name_in_model.items()}
    split_dims = map_ids_to_split_dims(model)
    shapes = {name: get_stock_shape(t.shape, split_dims.get(id(t))) for name, t in by_name.items()}
    layout = find_hub_layout(model, plan, shapes)
    groups = []
    for group in group_by_shared_tensors(layout, by_name):
        dtypes = {name: dtype_of(name_in_model[name], by_name[name]) for name in group}
        if len(set(dtypes.values())) > 1:
            text = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
            raise ValueError(
                f"parameters that the hub stores in one tensor have several dtypes: {text}; pass "
                f"dtype="
            )
        parameters: list[tuple[list[Piece], Callable[[], Slabs]]] = [
            (layout[name], partial(slabs_of, name_in_model[name], by_name[name])) for name in group
        ]
        dtype = dtypes[group[0]]
        keys = {piece.key for pieces, _ in parameters for piece in pieces}
        padding = [piece for piece in layout[PADDING] if piece.key in keys]
        parameters += [([piece], partial(_make_zero_slabs, piece, dtype)) for piece in padding]
        groups.append(TensorGroup(parameters, dtype, tuple(name_in_model[name] for name in group)))
    return groups


def _make_zero_slabs(piece: Piece, dtype: torch.dtype) -> Slabs:
    dims = zip(piece.start, piece.sizes, strict=True)
    box = tuple((start, start + size) for start, size in dims)
    return [(box, torch.zeros((), dtype=dtype).expand(piece.sizes))]


def choose_dtypes(
    model: Any, dtype: torch.dtype | None, loaded: Mapping[str, torch.dtype]
) -> Callable[[str, Tensor], torch.dtype]:
    """Return a function that returns the dtype in which a tensor is saved, from name and tensor.

    Floating point tensors are saved in `dtype`, with an exception: a tensor in fp32 is not rounded
    if stock's from_pretrained keeps it in fp32 in a model of this dtype (correction biases, and
    tensors that the class names). Rounding to bf16 would change the routers' choice of experts.

    Args:
        model: the model, stock or patched.
        dtype: the dtype of the saved tensors; None for the dtypes in which they were loaded.
        loaded: the dtypes in which tensors were loaded, by name, if the model has fp32 masters.
    """
    kept = [] if dtype is None else list_kept_in_fp32(model, dtype)
    loaded = {get_checkpoint_name(name): own for name, own in loaded.items()}

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        name = get_checkpoint_name(name)
        own = loaded.get(name, tensor.dtype)
        if dtype is None or not tensor.is_floating_point():
            return own
        is_kept = is_correction_bias(name) or any(pattern.search(name) for pattern in kept)
        return own if is_kept and own == torch.float32 and dtype.itemsize < 4 else dtype

    return dtype_of


def parse_size(size: int | str) -> int:
    """Parse max_shard_size, a number of bytes or a text like "5GB" or "500MiB"."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]I?B)\s*", str(size).upper())
    if isinstance(size, str) and match:
        size = int(float(match[1]) * _UNITS[match[2]])
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"max_shard_size {size!r} is not a size; try '5GB' or a number of bytes")
    return size


def split_files(groups: list[TensorGroup], max_bytes: int) -> list[list[TensorGroup]]:
    """Assign groups to files in order; a group larger than `max_bytes` gets a file of its own.

    A file has either copies or tensors of the model, and only tensors of one pipeline stage.
    """

    def kind_of(group: TensorGroup) -> tuple[bool, int]:
        return group.source is None, group.stage

    files: list[list[TensorGroup]] = []
    size = 0
    for group in groups:
        is_other_kind = bool(files) and kind_of(files[-1][-1]) != kind_of(group)
        if not files or is_other_kind or size + group.num_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(group)
        size += group.num_bytes
    return files


def get_first_dtype(groups: Iterable[TensorGroup]) -> torch.dtype:
    """Return the dtype for config.json, which is the dtype of the first floating point tensor."""
    return next(group.dtype for group in groups if group.dtype.is_floating_point)


def choose_file_names(num_files: int) -> list[str]:
    """Return names for the files of a save that differ from the names of all earlier saves."""
    tag = uuid.uuid4().hex[:8]
    return [
        f"model-{tag}-{number:05d}-of-{num_files:05d}.safetensors"
        for number in range(1, num_files + 1)
    ]


def _run_alone(what: str, step: Callable[[], None]) -> None:
    step()


def _do_nothing() -> None:
    pass


def write_checkpoint(
    folder: Path,
    files: list[list[TensorGroup]],
    *,
    writes: bool = True,
    run_on_all: Callable[[str, Callable[[], None]], Any] = _run_alone,
    configs: Path | None = None,
    names: Sequence[str] | None = None,
    what: str | None = None,
    stage: StageFiles | None = None,
) -> dict[str, bytes]:
    """Write all files, then commit the index; after an error the previous checkpoint is unchanged.

    Args:
        writes: True on the process that writes the files (with pipeline stages, on one process of
            each stage). All other processes only iterate over the slabs.
        run_on_all: runs a step on all ranks, and raises the error of one rank on every rank.
        configs: the folder that `prepare_configs` returned; the commit publishes its files, and an
            error removes it.
        names: the names of the files, the same on all ranks and not used in the folder yet. With
            None, this function chooses names.
        what: describes the work in the progress bar and in errors.
        stage: with pipeline stages, the files that this rank's stage writes.

    Returns:
        The sha256 of each copied tensor, by key, on the process that commits.
    """
    names = names or choose_file_names(len(files))
    own = range(len(files)) if stage is None else stage.numbers
    commits = writes if stage is None else is_first()
    num_waits = 0 if stage is None else stage.num_rounds - len(own)
    writer = _HubWriter(folder, files, configs, names) if writes else None
    abandon = _do_nothing
    if writer is not None:
        abandon = writer.abandon if commits else writer.remove_files
    total = sum(group.num_bytes for number in own for group in files[number])
    what = what or f"saving to {folder}"
    try:
        with make_progress_bar(total, what, commits) as progress:
            for number in own:
                run_on_all(what, partial(_write_file, writer, number, files[number], progress))
            for _ in range(num_waits):
                run_on_all(what, _do_nothing)
        if stage is not None:
            # From here on rank 0 may commit, and only rank 0 knows whether it has committed.
            abandon = abandon if commits else _do_nothing
            written = gather_on_first(what, lambda: None if writer is None else writer.written)
            for other in written or ():
                if other is not None and writer is not None:
                    writer.written.add(other)
        run_on_all(what, writer.commit if writer is not None and commits else _do_nothing)
    except (OSError, RuntimeError, ValueError):
        abandon()
        raise
    return {} if writer is None else writer.written.copied


def _write_file(
    writer: _HubWriter | None, number: int, groups: list[TensorGroup], progress: Any
) -> None:
    slabs = _iterate_slabs(groups)
    if writer is None:
        for _ in slabs:
            pass
        return
    try:
        with writer.open(number, groups) as file:
            for group, pieces, box, slab in slabs:
                if group.source is not None:
                    file.copy(pieces[0].key, group.source, group.sha256)
                    progress.update(group.source.nbytes)
                    continue
                assert slab is not None
                _write_slab(file, group.dtype, pieces, box, slab)
                progress.update(slab.numel() * group.dtype.itemsize)
                del slab
        writer.finish_file(number, file)
    finally:
        for _ in slabs:  # after an error, too, because other ranks wait in the collectives
            pass


def _iterate_slabs(
    groups: list[TensorGroup],
) -> Iterator[tuple[TensorGroup, list[Piece], Box, Tensor | None]]:
    """Yield the slabs of all groups. A group with a source is yielded once, without a slab."""
    for group in groups:
        if group.source is not None:
            yield group, group.parameters[0][0], (), None
            continue
        for pieces, box, slab in group.slabs():
            yield group, pieces, box, slab
            del slab  # its memory must be free before the next slab is allocated


def _write_slab(
    file: Writer, dtype: torch.dtype, pieces: list[Piece], box: Box, slab: Tensor
) -> None:
    """Write the part of each piece that is in a slab, and interleaved pieces with one call."""
    for key, parts in cut_pieces(pieces, box).items():
        filled = find_filled_box(parts)
        block = None if filled is None else torch.empty(get_box_sizes(filled), dtype=dtype)
        for part in parts:
            values = part.in_view(slab[part.slices_in(box)])
            if block is None or filled is None:
                file.write(key, part.view, part.box_in_view, values.to(dtype))
            else:
                block[make_slices(part.box_in_view, filled)] = values
        if block is not None and filled is not None:
            file.write(key, parts[0].view, filled, block)


@dataclass
class _FileHashes:
    """The hashes of the files that one process has written.

    Attributes:
        hashes: the sha256 of each file in which at least one tensor is not a copy.
        hashes_of_copies: for each file that has only copied tensors, the sha256 of its header and
            of the tensors' hashes.
        copied: the sha256 of each copied tensor, by key.
    """

    hashes: dict[str, str] = field(default_factory=dict)
    hashes_of_copies: dict[str, str] = field(default_factory=dict)
    copied: dict[str, bytes] = field(default_factory=dict)

    def add(self, other: _FileHashes) -> None:
        """Add the files of another process."""
        self.hashes.update(other.hashes)
        self.hashes_of_copies.update(other.hashes_of_copies)
        self.copied.update(other.copied)


class _HubWriter:
    """Writes the files of one save: `open` and `finish_file` per file, then `commit` on rank 0."""

    def __init__(
        self,
        folder: Path,
        files: list[list[TensorGroup]],
        configs: Path | None,
        names: Sequence[str],
    ) -> None:
        self._folder, self._configs, self._names = folder, configs, names
        self._file_of = {
            key: name
            for name, groups in zip(self._names, files, strict=True)
            for group in groups
            for key in group.shapes
        }
        self._total = sum(group.num_bytes for groups in files for group in groups)
        self.written = _FileHashes()

    def open(self, number: int, groups: list[TensorGroup]) -> Writer:
        """Create a file with the header of all tensors of its groups."""
        header = [
            (key, shape, group.dtype) for group in groups for key, shape in group.shapes.items()
        ]
        return Writer(self._folder / self._names[number], header, aligned_with=groups[0].source)

    def finish_file(self, number: int, writer: Writer) -> None:
        """Store the hash of a complete file for the index."""
        name = self._names[number]
        self.written.copied.update(writer.copied_hashes)
        if writer.has_only_copies:
            self.written.hashes_of_copies[name] = writer.sha256_of_tensors
        else:
            self.written.hashes[name] = writer.sha256

    def commit(self) -> None:
        """Commit the configs and the index with the new files, then remove older shards."""
        # With pipeline stages the hashes were collected in the order of the ranks.
        hashes, hashes_of_copies = (
            {name: by_name[name] for name in self._names if name in by_name}
            for by_name in (self.written.hashes, self.written.hashes_of_copies)
        )
        num_written = len(hashes) + len(hashes_of_copies)
        assert num_written == len(self._names), "a file was not written"
        metadata: dict[str, Any] = {"total_size": self._total, HASHES: hashes}
        if hashes_of_copies:
            metadata[HASHES_OF_COPIES] = hashes_of_copies
        index = {"metadata": metadata, "weight_map": dict(sorted(self._file_of.items()))}
        text = json.dumps(index, indent=2) + "\n"
        if not self._switch(text):
            if self._configs is not None:
                publish(self._configs, self._folder)
            write_atomically(self._folder / INDEX, text)
        self._remove_shards(lambda name: name not in self._names)

    def _switch(self, index: str) -> bool:
        """Replace configs and index at one moment.

        Returns:
            False if nothing was replaced, because one rename is enough or because the file system
            has no links.
        """
        # Readers would prefer an old model.safetensors to the new index.
        remove_single = SINGLE not in self._names and (self._folder / SINGLE).is_file()
        if self._configs is None or not (self._folder / CONFIG).is_file():
            return False
        if not remove_single and not list_changed_files(self._folder, self._configs):
            return False
        write_atomically(self._configs / INDEX, index)
        if switch_files(self._folder, self._configs, [SINGLE] if remove_single else []):
            return True
        (self._configs / INDEX).unlink()
        _logger.warning(
            "%s is on a file system without links, so its configs and its index are replaced one "
            "after the other; if the process is killed in between, the folder cannot be loaded",
            self._folder,
        )
        return False

    def remove_files(self) -> None:
        """Remove the files of this save."""
        self._remove_shards(lambda name: name in self._names)

    def abandon(self) -> None:
        """Remove the files of a failed save, unless the save failed after the commit."""
        settle(self._folder)
        if not self._is_committed():
            self.remove_files()
            if self._configs is not None:
                shutil.rmtree(self._configs, ignore_errors=True)

    def _is_committed(self) -> bool:
        index = self._folder / INDEX
        if not index.is_file():
            return False
        files = json.loads(index.read_text("utf-8"))["weight_map"].values()
        return not set(self._names).isdisjoint(files)

    def _remove_shards(self, is_unwanted: Callable[[str], bool]) -> None:
        for path in self._folder.iterdir():
            is_shard = _SHARD.fullmatch(path.name) or path.name == SINGLE
            if is_shard and is_unwanted(path.name):
                path.unlink(missing_ok=True)  # after an error, several ranks remove files
