"""A LoRA adapter into its base model: a checkpoint of the hub, in one process, piece by piece.

    Qwen3-30B-A3B                  16 files, model-00001-of-00016.safetensors, ..
    out/adapter                    as this package, PEFT or transformers save it
    -> out/model                   files of the same names, config and tokenizer of the base

A stack of experts of which several files have a part goes to the first of them, whole; a file that
is left empty by that is not written.

The model is built on the meta device and PEFT puts its own layers around it there: which module has
an adapter, of which rank and scale, is PEFT's to say. Then each parameter is read, a few experts or
rows at a time, what the adapter adds is computed of the factors that lie in its file, and it is
written. Keys, dtypes and the places where values are rounded are those of `merge_and_unload()` and
`save_pretrained()` on a CPU:

    base fp32    W + scale * B A, all in fp32
    base bf16    B A in fp32, from factors in fp32 (PEFT's autocast_adapter_dtype); to a Linear it
                 is added in fp32, and the sum is rounded; for an embedding, a stack of experts and
                 any other of target_parameters it is rounded to bf16 and added in bf16

The sums of a product B A may run in another order than PEFT's, as a slab is a smaller matrix and a
BLAS chooses its way by the shape. In fp32 that moves the last bits of a value. In bf16 one value in
some thousands is rounded to its other neighbour. Tensors that the adapter does not change keep
every bit.

The size of a slab depends on memory alone: beside the factors of one parameter a slab is in memory,
with what is added to it. Not here: adapters that are no product of two factors, quantized weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from filecmp import cmp
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.convert import check_room, is_of_model, left_behind
from hf_moe_ep.checkpoints.hub.configs import CONFIG
from hf_moe_ep.checkpoints.hub.gather import slabs_for_all
from hf_moe_ep.checkpoints.hub.in_files import InFiles
from hf_moe_ep.checkpoints.hub.layout import distinct_tensors, list_names
from hf_moe_ep.checkpoints.hub.mxfp4 import Packed
from hf_moe_ep.checkpoints.hub.pieces import whole_piece
from hf_moe_ep.checkpoints.hub.read import (
    described_model,
    dtype_of_weights,
    find_weights,
)
from hf_moe_ep.checkpoints.hub.write import Source, sources_of, write_checkpoint
from hf_moe_ep.checkpoints.storage.atomic import check_can_appear, whole_folder
from hf_moe_ep.checkpoints.storage.boxes import Box, local_box
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry, Reader, read_index
from hf_moe_ep.lora.adapter_config import CONFIG as ADAPTER_CONFIG
from hf_moe_ep.lora.export import WEIGHTS
from hf_moe_ep.lora.merged import Update, add_updates, with_experts_in_front
from hf_moe_ep.lora.names import SINGLE_KEY
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.upstream.adapter_files import (
    attach_without_values,
    factor_dtype,
    read_lora_config,
    saved_tensors,
    with_prefix,
)
from hf_moe_ep.upstream.adapters import (
    LowRank,
    check_mergeable,
    left_out_by_merging,
    updates_of,
)
from hf_moe_ep.upstream.hub import local_folder, read_object
from hf_moe_ep.upstream.models import persistent_buffers

_SLAB = 2**28  # bytes of a parameter that are computed at a time
_PICKLED = "adapter_model.bin"


@dataclass(frozen=True)
class Merged:
    """What was written.

    Attributes:
        bytes: of all tensors.
        files: that hold them.
        changed: parameters of the model that the adapter changes.
        parameters: of the model, tied ones once.
        notes: what a user may not expect.
    """

    bytes: int
    files: int
    changed: int
    parameters: int
    notes: list[str]


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_bytes: int = _SLAB,
) -> Merged:
    """Write a model with a LoRA adapter merged into it, in the hub's layout.

    Args:
        base: folder of the model that was trained, or its name on the hub, from the cache if it is
            there.
        adapter: folder with adapter_config.json and adapter_model.safetensors, or its index and the
            files that this names.
        target: missing or empty; appears whole or not at all.
        max_bytes: of a parameter, to be computed at a time; one expert of a stack at least, or one
            row of a matrix. In bf16 the process takes about five times that, as products and sums
            are in fp32.

    Raises:
        ValueError: no such folders; an adapter of another base, or that is no product of two
            factors; a quantized base, or one in a layout that cannot be read; too little room.
    """
    learnt_in, out = Path(adapter).resolve(), Path(target).resolve()
    check_can_appear(out)
    if not (learnt_in / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{adapter} is no adapter folder: it has no {ADAPTER_CONFIG}")
    folder = local_folder(base, {})
    if not {folder.resolve(), learnt_in}.isdisjoint((out, *out.parents)):
        raise ValueError(f"target {target} lies in {base} or in {adapter}; name another folder")
    _check_not_quantized(folder)
    config = read_lora_config(learnt_in)
    in_file = _read_adapter(learnt_in)
    model, plan = described_model(folder, partial(dtype_of_weights, folder))
    stored, num_apart = _of_base(model, folder, plan), len(distinct_tensors(model))
    try:
        model = attach_without_values(model, config)
        learnt = _match(model, in_file)
    except ValueError as error:
        trained_on = config.base_model_name_or_path or "a model that its config does not name"
        raise ValueError(
            f"{adapter} does not fit {base}: {error}; it was trained on {trained_on}: merge it "
            f"into that one, with the {ADAPTER_CONFIG} that was saved with it"
        ) from error
    check_mergeable(model)
    tensors = distinct_tensors(model, left_out_by_merging(model))
    updates = updates_of(model, tensors.values())
    small = _small_files(folder)
    with Reader() as reader:
        merging = _Merging(reader, stored | learnt, updates, max_bytes)
        sources = sources_of(
            model, plan, tensors, lambda _, tensor: tensor.dtype, lambda _, one: merging.slabs(one)
        )
        size = sum(source.bytes for source in sources)
        check_room(out, size + sum(path.stat().st_size for path in small))
        files = _in_files_of_base(sources, stored.values())
        with whole_folder(out) as beside:
            what = f"merging into {target}"
            write_checkpoint(beside, list(files.values()), names=list(files), what=what)
            for path in small:
                _copy(path, beside / path.relative_to(folder))
    changed = sum(id(tensor) in updates.keys() | learnt.keys() for tensor in tensors.values())
    notes = _of_another_base(config, base, folder) + _notes(folder, learnt_in, small, out)
    if len(tensors) > num_apart:
        notes.append(
            f"tied weights of the base are apart now, one is trained; set tie_word_embeddings to "
            f"false in {out / CONFIG}: some servers go by that"
        )
    return Merged(size, len(files), changed, len(tensors), notes)


def _check_not_quantized(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no model: it has no {CONFIG}")
    config = read_object(folder / CONFIG)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]  # text_config
    for part in parts:
        if found := part.get("quantization_config"):
            method = dict(found).get("quant_method", "an unknown method")
            raise ValueError(
                f"{folder} holds weights quantized by {method}, to which nothing can be added; "
                f"name the bf16 checkpoint of this model, or make it: load it in transformers with "
                f"a quantization_config that has dequantize=True (fp8, mxfp4), and save_pretrained"
            )


def _read_adapter(folder: Path) -> dict[str, Entry]:
    """Find the tensors of an adapter, by the keys that PEFT gives them."""
    if (folder / _PICKLED).is_file() and not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} holds a pickle, {_PICKLED}; open it in PEFT and save it, which writes "
            f"{WEIGHTS}"
        )
    entries = read_index(folder, WEIGHTS)
    if any(SINGLE_KEY.fullmatch(key) for key in entries):
        raise ValueError(
            f"{folder} is LoRA on single experts, and the model has stacks of them; rewrite it: "
            f"hf-moe-ep export-adapter {folder} FOLDER --to fused"
        )
    return {key: entries[name] for key, name in with_prefix(entries).items()}


def _of_base(model: nn.Module, folder: Path, plan: ModelPlan) -> dict[int, InFiles]:
    """Find where each parameter and buffer of a model lies, by its `id`."""
    held = dict(model.named_parameters()) | dict(persistent_buffers(model))
    found = find_weights(model, folder, plan, [name for name, _ in model.named_parameters()])
    return {id(held[name]): stored for name, stored in found.items()}


def _match(model: nn.Module, in_file: Mapping[str, Entry]) -> dict[int, InFiles]:
    """Find what of a model with adapters lies in the adapter's files, by the `id` of the tensor.

    Raises:
        ValueError: names what is missing, misshapen, or nothing of this model.
    """
    own, of_base = saved_tensors(model)
    known = own | of_base
    misshapen = [
        f"{key} {entry.shape} instead of {tuple(known[key].shape)}"
        for key, entry in in_file.items()
        if key in known and entry.shape != known[key].shape
    ]
    problems = [
        list_names("missing", sorted(own.keys() - in_file.keys())),
        list_names("misshapen", misshapen),
        list_names("unexpected", sorted(in_file.keys() - known.keys())),
    ]
    if any(problems):
        raise ValueError("; ".join(filter(None, problems)))
    return {
        id(known[key]): InFiles([(whole_piece(key, entry.shape), entry)], entry.dtype)
        for key, entry in in_file.items()
    }


@dataclass(frozen=True)
class _Merging:
    """Computes merged parameters, part by part, of what lies in files.

    Attributes:
        stored: where each tensor of the model with adapters lies, by its `id`.
        updates: what is added to a parameter, by its `id`.
        max_bytes: of a part.
    """

    reader: Reader
    stored: Mapping[int, InFiles]
    updates: Mapping[int, list[LowRank]]
    max_bytes: int

    def slabs(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the merged values of a parameter that is on meta, cut along dim 0."""
        updates = [self._read_factors(update) for update in self.updates.get(id(tensor), ())]
        change = partial(self._merged, tensor, updates)
        return slabs_for_all(tensor, tensor.dtype, change, self.max_bytes)

    def _merged(self, tensor: Tensor, updates: list[Update], box: Box, _: Tensor) -> Tensor:
        values = self._read(tensor, box, tensor.dtype)
        return add_updates(values, tuple(slice(start, stop) for start, stop in box), updates)

    def _read_factors(self, update: LowRank) -> Update:
        dtype = factor_dtype(update.parameter.dtype)
        a, b = (self._read(factor, local_box(factor), dtype) for factor in (update.a, update.b))
        if update.num_experts:
            a, b = with_experts_in_front(a, b, update.num_experts)
        return Update(a, b, update.scale, update.turned, update.casts)

    def _read(self, tensor: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
        values = torch.empty([stop - start for start, stop in box], dtype=dtype)
        self.stored[id(tensor)].read_into(values, box, self.reader)
        return values


def _in_files_of_base(
    sources: Iterable[Source], of_base: Iterable[InFiles]
) -> dict[str, list[Source]]:
    """Deal sources to files, by name, as the base has them; in one if they are in several there."""
    places = {
        piece.key: entry.file.name
        for stored in of_base
        if not isinstance(stored.parts, Packed)
        for piece, entry in stored.parts
    }
    files: dict[str, list[Source]] = {}
    name = next(iter(places.values()))
    for source in sources:
        # What only the adapter has goes to the file of its neighbour.
        name = next((places[key] for key in source.tensors if key in places), name)
        files.setdefault(name, []).append(source)
    return files


def _small_files(folder: Path) -> list[Path]:
    """List what describes a model beside its weights, config.json last: without it nothing loads.

    Of folders those without weights, like additional_chat_templates.
    """
    found: list[Path] = []
    for path in folder.iterdir():
        inside = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        if not path.name.startswith(".") and all(map(is_of_model, inside)):
            found += inside
    return sorted(found, key=lambda path: (path == folder / CONFIG, path))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _of_another_base(config: Any, base: str | os.PathLike[str], folder: Path) -> list[str]:
    """Say where an adapter names another base: its copy elsewhere, in bf16, or one it was not for.

    A folder is that of a name of the hub if it is called like it, or lies in the hub's cache.
    """
    named = (config.base_model_name_or_path or "").rstrip("/")
    cached = f"models--{named.replace('/', '--')}"
    own = {Path(base).name, folder.name, folder.resolve().name}
    if not named or Path(named).name in own or cached in folder.parts:
        return []
    return [f"the adapter was trained on {named}; what is merged is right if {base} has its values"]


def _notes(folder: Path, learnt_in: Path, small: list[Path], out: Path) -> list[str]:
    """Say what the new folder has not got, and what lies beside it."""
    notes = []
    for path in small:
        other = learnt_in / path.relative_to(folder)
        if path.name != "README.md" and other.is_file() and not cmp(path, other, shallow=False):
            notes.append(f"{path.name} is that of the base; the adapter's folder has another one")
    if old := left_behind(out):
        notes.append(f"{old} is of a run that was killed, and can go")
    return notes
