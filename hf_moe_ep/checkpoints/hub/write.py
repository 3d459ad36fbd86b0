"""A checkpoint in the hub's layout, written one slab of experts at a time, by rank 0.

    .configs-..: config.json, .., tokenizer            first, beside their places
    model-3f9c21ab-00001-of-00013.safetensors, ..      names that no earlier checkpoint has
    config.json, generation_config.json, tokenizer     describe the model; they and
    model.safetensors.index.json                       appear at one moment: the commit
    shards that the index does not name                are removed

What holds when a process is killed or fails:

    before the commit    the folder is the previous checkpoint, configs and shards
    after it             the folder is the new checkpoint; old shards may be left, unnamed

Where a checkpoint is in the folder whose configs are the same as the new ones, file by file, and
that has an index, the commit is the rename of the index. Otherwise `switch.py` replaces configs and
index and removes a model.safetensors, which readers would prefer to the index, by one rename of a
link. On a file system without links (symbolic and hard) that is not possible: there configs, index
and the removal follow each other within milliseconds, a kill between them leaves configs that do
not describe the weights, and a warning says so. The index also keeps the sha256 of every shard, for
`hf-moe-ep verify`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.configs import CONFIG, publish
from hf_moe_ep.checkpoints.hub.layout import PADDING, hub_layout, joined
from hf_moe_ep.checkpoints.hub.pieces import Piece, overlaps
from hf_moe_ep.checkpoints.hub.switch import changed_files, settle, switch_files
from hf_moe_ep.checkpoints.storage.atomic import write_atomically
from hf_moe_ep.checkpoints.storage.boxes import Box
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, SINGLE, Writer
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.upstream.hub import file_name, progress_bar

_logger = logging.getLogger("hf_moe_ep")

HASHES = "hf_moe_ep_sha256"
# Of ours and of transformers; model-ema.safetensors and its like are the user's.
_SHARD = re.compile(r"model-(?:[0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Member:
    """One parameter to be saved, or zeros with which a tensor of the checkpoint is padded.

    Attributes:
        pieces: what it is in the checkpoint, in order.
        slabs: yields its values, (box, tensor), cut along dim 0 and in order; every rank runs it
            to the end. While a checkpoint is written tensors are given to rank 0, to others None.
    """

    pieces: list[Piece]
    slabs: Callable[[], Iterable[tuple[Box, Tensor | None]]]


@dataclass(frozen=True)
class Source:
    """What is saved together: one parameter, or several that share tensors of the checkpoint.

    Attributes:
        dtype: in the checkpoint.
    """

    members: list[Member]
    dtype: torch.dtype

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors in the checkpoint, by key, in order."""
        return {piece.key: piece.shape for member in self.members for piece in member.pieces}

    @property
    def bytes(self) -> int:
        return sum(map(math.prod, self.tensors.values())) * self.dtype.itemsize


def sources_of(
    model: Any,
    plan: ModelPlan,
    tensors: Mapping[str, Tensor],
    dtype_of: Callable[[str, Tensor], torch.dtype],
    slabs_of: Callable[[str, Tensor], Iterable[tuple[Box, Tensor | None]]],
) -> list[Source]:
    """Describe tensors of a model, by name, as the hub has them.

    Args:
        model: that they are of; tensors are by their names in it.
        plan: what it says about storing goes before what transformers would do.
        dtype_of: says in which dtype each is saved.
        slabs_of: yields the values of each, as `Member.slabs`.

    Raises:
        ValueError: parameters that share a tensor of the checkpoint and are of several dtypes.
    """
    names = {file_name(name): name for name in tensors}
    shapes = {name: tuple(tensors[given].shape) for name, given in names.items()}
    layout = hub_layout(model, plan, shapes)
    sources = []
    for group in joined(layout, names):
        dtypes = {name: dtype_of(names[name], tensors[names[name]]) for name in group}
        if len(set(dtypes.values())) > 1:
            held = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
            raise ValueError(f"one tensor of the hub cannot be of two dtypes: {held}; pass dtype=")
        members = [
            Member(layout[name], partial(slabs_of, names[name], tensors[names[name]]))
            for name in group
        ]
        dtype = dtypes[group[0]]
        keys = {piece.key for member in members for piece in member.pieces}
        zeros = [piece for piece in layout[PADDING] if piece.key in keys]
        members += [Member([piece], partial(_zeros, piece, dtype)) for piece in zeros]
        sources.append(Source(members, dtype))
    return sources


def _zeros(piece: Piece, dtype: torch.dtype) -> list[tuple[Box, Tensor | None]]:
    box = tuple((at, at + size) for at, size in zip(piece.start, piece.sizes, strict=True))
    return [(box, torch.zeros((), dtype=dtype).expand(piece.sizes))]


def saved_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in a checkpoint whose floating point ones are of `dtype`."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def parse_size(size: int | str) -> int:
    """Count the bytes of "5GB", "500MiB" or a number, as transformers' max_shard_size."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]I?B)\s*", str(size).upper())
    if isinstance(size, str) and found:
        size = int(float(found[1]) * _UNITS[found[2]])
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"max_shard_size {size!r} is no size; try '5GB' or a number of bytes")
    return size


def split_files(sources: list[Source], max_bytes: int) -> list[list[Source]]:
    """Deal sources to files, in order; one that is larger than `max_bytes` is alone."""
    files: list[list[Source]] = []
    size = 0
    for source in sources:
        if not files or size + source.bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(source)
        size += source.bytes
    return files


def first_dtype(sources: Iterable[Source]) -> torch.dtype:
    """Return what config.json calls the dtype of the model."""
    return next(source.dtype for source in sources if source.dtype.is_floating_point)


def _alone(what: str, part: Callable[[], None]) -> None:
    part()


def write_checkpoint(
    folder: Path,
    files: list[list[Source]],
    *,
    writes: bool = True,
    together: Callable[[str, Callable[[], None]], Any] = _alone,
    configs: Path | None = None,
    names: Sequence[str] | None = None,
    what: str | None = None,
) -> None:
    """Write all files, then the index; what fails on the way leaves the previous checkpoint.

    Args:
        writes: whether this process does; the others only run the slabs.
        together: runs what is to be done for a file, and the commit; where an error of the writing
            process becomes one of the others.
        configs: of `stage_configs`, published with the checkpoint or removed.
        names: of the files, in a folder that has none; None are those of no earlier checkpoint.
        what: is done, for the progress bar and errors.
    """
    writer = _HubWriter(folder, files, configs, names) if writes else None
    total = sum(source.bytes for sources in files for source in sources)
    what = what or f"saving to {folder}"
    try:
        with progress_bar(total, what, writes) as progress:
            for number, sources in enumerate(files):
                together(what, partial(_write_file, writer, number, sources, progress))
        together(what, writer.commit if writer is not None else lambda: None)
    except (OSError, RuntimeError, ValueError):
        if writer is not None:
            writer.abandon()
        raise


def _write_file(
    writer: _HubWriter | None, number: int, sources: list[Source], progress: Any
) -> None:
    slabs = _all_slabs(sources)
    if writer is None:
        for _ in slabs:
            pass
        return
    try:
        with writer.open(number, sources) as file:
            for source, member, box, slab in slabs:
                assert slab is not None
                _write_slab(file, source, member, box, slab)
                progress.update(slab.numel() * source.dtype.itemsize)
                del slab  # before the next one is allocated
        writer.done(number, file)
    finally:
        for _ in slabs:  # where writing failed, the others are still gathering
            pass


def _all_slabs(sources: list[Source]) -> Iterator[tuple[Source, Member, Box, Tensor | None]]:
    for source in sources:
        for member in source.members:
            for box, slab in member.slabs():
                yield source, member, box, slab
                del slab


def _write_slab(file: Writer, source: Source, member: Member, box: Box, slab: Tensor) -> None:
    """Write the part of each piece that a slab holds, parts of the same rows in one go."""
    for parts in overlaps(member.pieces, box):
        if parts.is_filled:
            values = torch.empty(parts.sizes, dtype=source.dtype)
            for piece, part in parts.parts:
                values[parts.inside(part)] = piece.in_view(slab[part.slices])
            file.write(parts.key, parts.view, parts.hull, values)
            continue
        for piece, part in parts.parts:
            values = piece.in_view(slab[part.slices]).to(source.dtype)
            file.write(parts.key, piece.view, part.in_file, values)


class _HubWriter:
    """Rank 0's part of a save: `write` every file in order, then `commit`."""

    def __init__(
        self,
        folder: Path,
        files: list[list[Source]],
        configs: Path | None,
        names: Sequence[str] | None,
    ) -> None:
        self._folder, self._configs = folder, configs
        tag = uuid.uuid4().hex[:8]
        self._names = names or [
            f"model-{tag}-{number:05d}-of-{len(files):05d}.safetensors"
            for number in range(1, len(files) + 1)
        ]
        self._places = {
            key: name
            for name, sources in zip(self._names, files, strict=True)
            for source in sources
            for key in source.tensors
        }
        self._total = sum(source.bytes for sources in files for source in sources)
        self._hashes: dict[str, str] = {}

    def open(self, number: int, sources: list[Source]) -> Writer:
        """Open the next file, whose header says all that `sources` will write."""
        header = [
            (key, shape, source.dtype)
            for source in sources
            for key, shape in source.tensors.items()
        ]
        return Writer(self._folder / self._names[number], header)

    def done(self, number: int, writer: Writer) -> None:
        """Note that a file is complete."""
        self._hashes[self._names[number]] = writer.sha256

    def commit(self) -> None:
        """Make the new shards the checkpoint, and remove those of earlier ones."""
        metadata = {"total_size": self._total, HASHES: self._hashes}
        index = {"metadata": metadata, "weight_map": dict(sorted(self._places.items()))}
        text = json.dumps(index, indent=2) + "\n"
        if not self._switch(text):
            if self._configs is not None:
                publish(self._configs, self._folder)
            write_atomically(self._folder / INDEX, text)
        self._remove(lambda name: name not in self._names)

    def _switch(self, index: str) -> bool:
        """Commit several files at one moment where one rename is not enough."""
        hidden = SINGLE not in self._names and (self._folder / SINGLE).is_file()
        if self._configs is None or not (self._folder / CONFIG).is_file():
            return False
        if not hidden and not changed_files(self._folder, self._configs):
            return False
        write_atomically(self._configs / INDEX, index)
        if switch_files(self._folder, self._configs, [SINGLE] if hidden else []):
            return True
        (self._configs / INDEX).unlink()
        _logger.warning(
            "%s is on a file system without links, so its configs and its index are replaced one "
            "after the other; a process killed between them leaves a folder that does not load",
            self._folder,
        )
        return False

    def abandon(self) -> None:
        """Remove what was written, unless it is the checkpoint now: others may fail after that."""
        settle(self._folder)
        if not self._is_committed():
            self._remove(lambda name: name in self._names)
            if self._configs is not None:
                shutil.rmtree(self._configs, ignore_errors=True)

    def _is_committed(self) -> bool:
        index = self._folder / INDEX
        if not index.is_file():
            return False
        named = json.loads(index.read_text("utf-8"))["weight_map"].values()
        return not set(self._names).isdisjoint(named)

    def _remove(self, unwanted: Callable[[str], bool]) -> None:
        for path in self._folder.iterdir():
            is_shard = _SHARD.fullmatch(path.name) or path.name == SINGLE
            if is_shard and unwanted(path.name):
                path.unlink()
