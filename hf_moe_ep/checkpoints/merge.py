"""Merge a LoRA adapter into its base model and write a hub checkpoint, in one process.

    folder    example         content
    base      Qwen3-30B-A3B   16 files, model-00001-of-00016.safetensors, ..
    adapter   out/adapter     saved by this package, PEFT or transformers
    result    out/model       files with the names of the base; the base's config and tokenizer

If the base stores the experts of a stack in several files, the whole merged stack is written to the
first of these files. A file that becomes empty is not written.

The model is built on the meta device, and PEFT attaches its layers there. PEFT therefore decides
which modules have an adapter, with which rank and scale. Then `merge_adapter` reads each parameter,
a few experts or rows at a time (a slab), adds the product of its factors, and writes the sum. Keys,
dtypes and rounding are the same as with `merge_and_unload()` and `save_pretrained()` on a CPU:

    base fp32    W + scale * B A, all in fp32
    base bf16    B A in fp32, from factors in fp32 (PEFT's autocast_adapter_dtype). In a Linear, B A
                 is added in fp32 and the sum is rounded. In an embedding, a stack of experts and
                 other target_parameters, B A is rounded to bf16 and added in bf16

A slab is a smaller matrix than the parameter, and a BLAS library chooses its algorithm by the
shape, so the products in B A may be summed in another order than in PEFT. In fp32 this changes the
last bits of a value; in bf16 about one value in a thousand is rounded to its other neighbour.
A tensor that the adapter does not change keeps all its bits if it is stored in the dtype in which
transformers loads it. So does every tensor that the class ignores.

The process needs memory for one slab, its product, and the factors of one parameter. Quantised
weights are not supported, nor are adapters that are not a product of two factors.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from filecmp import cmp
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.convert import check_room, describes_model, list_leftovers
from hf_moe_ep.checkpoints.hub.configs import CONFIG
from hf_moe_ep.checkpoints.hub.extra import check_patterns, copy_groups
from hf_moe_ep.checkpoints.hub.gather import iterate_slabs_for_all
from hf_moe_ep.checkpoints.hub.layout import list_distinct_tensors, list_names
from hf_moe_ep.checkpoints.hub.pieces import make_whole_piece
from hf_moe_ep.checkpoints.hub.read import (
    build_model_from_config,
    choose_dtype_of_weights,
    find_weights,
)
from hf_moe_ep.checkpoints.hub.stored_parameter import StoredParameter
from hf_moe_ep.checkpoints.hub.write import TensorGroup, group_tensors, write_checkpoint
from hf_moe_ep.checkpoints.storage.atomic import check_folder_can_be_made, make_folder_atomically
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor, Reader, read_index
from hf_moe_ep.lora.adapter_config import CONFIG as ADAPTER_CONFIG
from hf_moe_ep.lora.export import WEIGHTS
from hf_moe_ep.lora.merged import add_updates, gather_whole_factors
from hf_moe_ep.lora.names import SINGLE_KEY
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.boxes import Box, get_box_sizes, get_local_box
from hf_moe_ep.upstream.adapter_files import (
    attach_without_values,
    choose_factor_dtype,
    list_saved_tensors,
    map_prefixed_keys,
    read_lora_config,
)
from hf_moe_ep.upstream.adapters import (
    LowRank,
    check_mergeable,
    group_updates_by_parameter,
    list_names_lost_by_merging,
)
from hf_moe_ep.upstream.conversion import remember_conversions
from hf_moe_ep.upstream.hub import find_local_folder, read_object
from hf_moe_ep.upstream.models import iterate_persistent_buffers
from hf_moe_ep.upstream.named_weights import WEIGHTS_FIELD

_SLAB_BYTES = 2**28  # the part of a parameter that is merged at a time
_PICKLED = "adapter_model.bin"


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Attributes:
        bytes: the size of all tensors.
        files: the number of files.
        changed: the number of parameters that the adapter changes.
        parameters: the number of parameters and persistent buffers of the model; tied parameters
            count once.
        notes: sentences about results that a user may not expect.
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
    max_bytes: int = _SLAB_BYTES,
    ignore_unexpected: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Merged:
    """Write a model with a LoRA adapter merged into it, in the hub's layout.

    Args:
        base: the folder of the model that was trained, or the model's name on the hub. The hub's
            cache is used if it has the model.
        adapter: a folder with adapter_config.json and adapter_model.safetensors, or with several
            files and their index.
        target: a folder that is missing or empty; it appears complete or not at all.
        max_bytes: the size of a slab, the part of a parameter that is merged at a time. A slab has
            at least one expert of a stack, or one row of a matrix. With a bf16 base the process
            needs about five times this memory, because products and sums are in fp32.
        ignore_unexpected: regular expressions. Tensors of the base that do not belong to the model
            are copied if the model's class ignores them or a pattern is found in their keys.
        trust_remote_code: run the Python files of the base if its config names a class in them.

    Raises:
        ValueError: a folder is missing; the adapter belongs to another base, or is not a product of
            two factors; the base is quantised or its layout cannot be read; the disk has too little
            free space.
    """
    adapter_folder, out = Path(adapter).resolve(), Path(target).resolve()
    check_folder_can_be_made(out)
    if not (adapter_folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{adapter} is not an adapter folder: it has no {ADAPTER_CONFIG}")
    folder = find_local_folder(base, {})
    if not {folder.resolve(), adapter_folder}.isdisjoint((out, *out.parents)):
        raise ValueError(f"target {target} lies in {base} or in {adapter}; name another folder")
    _check_not_quantized(folder)
    config = read_lora_config(adapter_folder)
    adapter_tensors = _read_adapter(adapter_folder)
    model, plan = build_model_from_config(
        folder, partial(choose_dtype_of_weights, folder), trust_remote_code=trust_remote_code
    )
    patterns = check_patterns(ignore_unexpected)
    stored, extra = _find_base(model, folder, plan, patterns)
    num_in_base = len(list_distinct_tensors(model))
    try:
        model = attach_without_values(model, config)
        trained = _match_adapter(model, adapter_tensors)
    except ValueError as error:
        trained_on = config.base_model_name_or_path or "a model that its config does not name"
        raise ValueError(
            f"{adapter} does not fit {base}: {error}; it was trained on {trained_on}: merge it "
            f"into that model, with the {ADAPTER_CONFIG} that was saved with it"
        ) from error
    check_mergeable(model)
    tensors = list_distinct_tensors(model, list_names_lost_by_merging(model))
    updates = group_updates_by_parameter(model, tensors.values())
    small_files = _list_small_files(folder)
    with Reader() as reader:
        merger = _Merger(reader, stored | trained, updates, max_bytes)
        groups = group_tensors(
            model,
            plan,
            tensors,
            lambda _, tensor: tensor.dtype,
            lambda _, tensor: merger.merge_slabs(tensor),
        )
        groups += copy_groups(extra)
        size = sum(group.num_bytes for group in groups)
        check_room(out, size + sum(path.stat().st_size for path in small_files))
        files = _assign_files(groups, stored.values(), extra)
        with make_folder_atomically(out) as new_folder:
            what = f"merging into {target}"
            write_checkpoint(new_folder, list(files.values()), names=list(files), what=what)
            for path in small_files:
                _copy_small_file(path, new_folder / path.relative_to(folder))
    changed = sum(id(tensor) in updates.keys() | trained.keys() for tensor in tensors.values())
    notes = _note_other_base(config, base, folder)
    notes += _note_files(folder, adapter_folder, small_files, out)
    if len(tensors) > num_in_base:
        notes.append(
            f"the base ties weights that are separate now, because one of them was trained; set "
            f"tie_word_embeddings to false in {out / CONFIG}, which some servers read"
        )
    return Merged(size, len(files), changed, len(tensors), notes)


def _check_not_quantized(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a model: it has no {CONFIG}")
    config = read_object(folder / CONFIG)
    # A part, such as text_config, may have a quantization_config of its own.
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        if quantization := part.get("quantization_config"):
            method = dict(quantization).get("quant_method", "an unknown method")
            raise ValueError(
                f"{folder} holds weights quantized by {method}, so no adapter can be merged; "
                f"name a bf16 checkpoint of this model; to make one from fp8 or mxfp4, load the "
                f"model in transformers with a quantization_config that has dequantize=True, and "
                f"call save_pretrained"
            )


def _read_adapter(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of an adapter by the keys that PEFT gives them."""
    if (folder / _PICKLED).is_file() and not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} holds a pickle, {_PICKLED}; load it in PEFT and save it again, which writes "
            f"{WEIGHTS}"
        )
    tensors = read_index(folder, WEIGHTS)
    if any(SINGLE_KEY.fullmatch(key) for key in tensors):
        raise ValueError(
            f"{folder} is LoRA on single experts, and the model stacks its experts; rewrite it: "
            f"hf-moe-ep export-adapter {folder} FOLDER --to fused"
        )
    return {key: tensors[name] for key, name in map_prefixed_keys(tensors).items()}


def _find_base(
    model: nn.Module, folder: Path, plan: ModelPlan, ignore_unexpected: Sequence[str]
) -> tuple[dict[int, StoredParameter], dict[str, FileTensor]]:
    """Find the model's tensors in the files of the base, in whose layout the model is saved then.

    Returns:
        For the `id` of each parameter or buffer, where its values are stored; and the tensors that
        do not belong to the model.
    """
    tensors = dict(model.named_parameters()) | dict(iterate_persistent_buffers(model))
    names = [name for name, _ in model.named_parameters()]
    weights = find_weights(model, folder, plan, names, ignore_unexpected)
    remember_conversions(model, weights.file_tensors)
    return {id(tensors[name]): stored for name, stored in weights.stored.items()}, weights.extra


def _match_adapter(
    model: nn.Module, adapter_tensors: Mapping[str, FileTensor]
) -> dict[int, StoredParameter]:
    """Find the model's tensors in the files of the adapter, by the `id` of each tensor.

    Raises:
        ValueError: tensors of the adapter are missing, have another shape, or do not belong to the
            model.
    """
    adapter_parameters, base_parameters = list_saved_tensors(model)
    known = adapter_parameters | base_parameters
    misshapen = [
        f"{key} {tensor.shape} instead of {tuple(known[key].shape)}"
        for key, tensor in adapter_tensors.items()
        if key in known and tensor.shape != known[key].shape
    ]
    problems = [
        list_names("missing", sorted(adapter_parameters.keys() - adapter_tensors.keys())),
        list_names("misshapen", misshapen),
        list_names("unexpected", sorted(adapter_tensors.keys() - known.keys())),
    ]
    if any(problems):
        raise ValueError("; ".join(filter(None, problems)))
    return {
        id(known[key]): StoredParameter(
            [(make_whole_piece(key, tensor.shape), tensor)], tensor.dtype
        )
        for key, tensor in adapter_tensors.items()
    }


@dataclass(frozen=True)
class _Merger:
    """Reads parameters and factors from files and yields merged parameters, slab by slab.

    Attributes:
        stored: where the values of each tensor are stored, by the `id` of the tensor.
        updates: the adapters of each parameter, by the `id` of the parameter.
        max_bytes: the size of a slab.
    """

    reader: Reader
    stored: Mapping[int, StoredParameter]
    updates: Mapping[int, list[LowRank]]
    max_bytes: int

    def merge_slabs(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the merged values of a tensor in slabs along dim 0.

        `tensor` is a parameter or a buffer of the model, on the meta device.
        """
        updates = [self._read_factors(update) for update in self.updates.get(id(tensor), ())]
        change = partial(self._read_merged, tensor, updates)
        return iterate_slabs_for_all(tensor, tensor.dtype, change, self.max_bytes)

    def _read_merged(self, tensor: Tensor, updates: list[LowRank], box: Box, _: Tensor) -> Tensor:
        values = self._read(tensor, box, tensor.dtype)
        return add_updates(values, tuple(slice(start, stop) for start, stop in box), updates)

    def _read_factors(self, update: LowRank) -> LowRank:
        dtype = choose_factor_dtype(update.parameter.dtype)
        a, b = (self._read(factor, get_local_box(factor), dtype) for factor in (update.a, update.b))
        return gather_whole_factors(update, a, b)

    def _read(self, tensor: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
        values = torch.empty(get_box_sizes(box), dtype=dtype)
        stored = self.stored.get(id(tensor))
        if stored is None:  # a buffer that the base may lack has its initial value
            return values.copy_(tensor[tuple(slice(start, stop) for start, stop in box)])
        stored.read_into(values, box, self.reader)
        return values


def _assign_files(
    groups: Iterable[TensorGroup],
    stored_in_base: Iterable[StoredParameter],
    extra: Mapping[str, FileTensor],
) -> dict[str, list[TensorGroup]]:
    """Assign each group to the file in which the base stores the first tensor of the group."""
    file_of = {
        piece.key: tensor.file.name for stored in stored_in_base for piece, tensor in stored.pieces
    }
    file_of |= {key: tensor.file.name for key, tensor in extra.items()}
    files: dict[str, list[TensorGroup]] = {}
    name = next(iter(file_of.values()))
    for group in groups:
        # A tensor that the base lacks is written to the same file as the tensor before it.
        name = next((file_of[key] for key in group.shapes if key in file_of), name)
        files.setdefault(name, []).append(group)
    return files


def _list_small_files(folder: Path) -> list[Path]:
    """List the files that describe a model, such as configs, also in subfolders without weights.

    config.json is the last file of the list and is copied last. A folder without it cannot be
    loaded, so the result of a killed run cannot be mistaken for a model.
    """
    files: list[Path] = []
    for path in folder.iterdir():
        inside = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        if not path.name.startswith(".") and all(map(describes_model, inside)):
            files += inside
    return sorted(files, key=lambda path: (path == folder / CONFIG, path))


def _copy_small_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.name == CONFIG and WEIGHTS_FIELD in (config := read_object(source)):
        # The field names files of the base. The index names those of the merged model.
        del config[WEIGHTS_FIELD]
        target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _note_other_base(config: Any, base: str | os.PathLike[str], folder: Path) -> list[str]:
    """Return a note if the adapter's config names another base than `base`.

    A folder counts as the named base if it has the same name as the base on the hub, or if it is
    in the hub's cache under this name.
    """
    named = (config.base_model_name_or_path or "").rstrip("/")
    cache = f"models--{named.replace('/', '--')}"
    names = {Path(base).name, folder.name, folder.resolve().name}
    if not named or Path(named).name in names or cache in folder.parts:
        return []
    return [f"the adapter was trained on {named}; the merge is right if {base} has the same values"]


def _note_files(
    folder: Path, adapter_folder: Path, small_files: list[Path], out: Path
) -> list[str]:
    """Return notes about files that differ between base and adapter, and about killed runs.

    All files are copied from the base. The adapter may have a tokenizer of its own, for example
    with a chat template that the base lacks.
    """
    notes = []
    for path in small_files:
        in_adapter = adapter_folder / path.relative_to(folder)
        if path.name == "README.md" or not in_adapter.is_file():
            continue
        if not cmp(path, in_adapter, shallow=False):
            notes.append(f"{path.name} comes from the base; the adapter's {path.name} is different")
    base_names = {path.name for path in (*small_files, folder / "README.md")}
    if only_in_adapter := sorted(
        path.name
        for path in adapter_folder.iterdir()
        if path.is_file() and describes_model(path) and path.name not in base_names
    ):
        notes.append(
            f"only the adapter has {', '.join(only_in_adapter)}, so {out} does not; copy from "
            f"{adapter_folder} what the model needs"
        )
    if old := list_leftovers(out):
        notes.append(f"{old} is left from a killed run; delete it")
    return notes
