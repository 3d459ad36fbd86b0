"""A checkpoint of the hub into a sharded model: every rank reads what it keeps, and no more.

The model is built on the meta device and sharded there; then each rank allocates its shards, and
reads the byte ranges of them. Beyond its shards a rank holds one part of one tensor at a time, and
where experts are held quantised one matrix of one expert (`quantised.py`). With
dp_replicate_size > 1 every replica reads for itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_moe_ep.architectures import find_plan
from hf_moe_ep.checkpoints.hub.fp8 import with_scales, with_stacked_scales
from hf_moe_ep.checkpoints.hub.in_files import InFiles
from hf_moe_ep.checkpoints.hub.layout import Layout, find_pieces, hub_layout, list_names
from hf_moe_ep.checkpoints.hub.mxfp4 import Packed, find_packed, packed_keys
from hf_moe_ep.checkpoints.hub.pieces import Piece
from hf_moe_ep.checkpoints.hub.quantised import held_as_bytes
from hf_moe_ep.checkpoints.storage.boxes import local_box, local_tensor
from hf_moe_ep.checkpoints.storage.safetensors_file import (
    Entry,
    Reader,
    fingerprint,
    read_index,
    same_values,
)
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.together import differing, gather, is_first, together
from hf_moe_ep.state import patched_state
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.conversion import other_names
from hf_moe_ep.upstream.hub import (
    base_prefix,
    empty_model,
    file_name,
    is_base_model,
    progress_bar,
    unexpected_keys,
)
from hf_moe_ep.upstream.models import persistent_buffers
from hf_moe_ep.upstream.modules import allocate_meta

_logger = logging.getLogger("hf_moe_ep")


def described_model(
    folder: Path, find_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
) -> tuple[nn.Module, ModelPlan]:
    """Build the model that a folder's config describes, on meta, and find its plan.

    `find_dtype` is called where the config names no dtype.
    """
    model = empty_model(folder, None, find_dtype, {})
    return model, find_plan(model)[0]


def dtype_of_weights(folder: str | os.PathLike[str]) -> torch.dtype:
    """Take the first by file and key, as transformers; a header begins with the widest dtype."""
    entries = sorted(read_index(folder).items(), key=lambda item: (item[1].file, item[0]))
    dtypes = (entry.dtype for _, entry in entries)
    found = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    return next(found, torch.get_default_dtype())


def find_weights(
    model: nn.Module, directory: str | os.PathLike[str], plan: ModelPlan, empty: Iterable[str]
) -> dict[str, InFiles]:
    """Find where the parameters `empty` and all persistent buffers lie in a checkpoint.

    Args:
        model: not sharded yet; shapes and dtypes are all that is asked of it.
        empty: names of `named_parameters`; of tied ones the first, any of whose names will do.

    Raises:
        ValueError: on every rank; a folder or a file that is no whole checkpoint; tensors that are
            missing, misshapen, or that the model has no use for (all are named); ranks that see
            other weights.
    """

    shapes = {
        file_name(name): tuple(tensor.shape)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *persistent_buffers(model),
        )
    }

    def find() -> tuple[dict[str, InFiles], str]:
        in_files = read_index(directory)
        layout = hub_layout(model, plan, shapes)
        entries: Mapping[str, Entry] = in_files
        try:
            entries = _names_of(model, with_scales(in_files, Path(directory)), layout)
            entries = with_stacked_scales(entries, layout, Path(directory))
            found = _match(model, entries, layout, plan, set(empty))
        except ValueError as error:
            kind = type(without_adapters(model)).__name__
            text = f"{directory} does not fit this {kind}: {error}"
            if not in_files.keys() & entries.keys():
                text += (
                    "; it holds a base model alone, to which transformers would add a head that "
                    "is not trained: load it there and save that model, if you want one"
                )
            raise ValueError(text) from error
        return found, fingerprint(in_files)

    found, weights = together(f"reading {directory}", find)
    _check_same_weights(weights, os.fspath(directory))
    return found


def _names_of(
    model: nn.Module, entries: Mapping[str, Entry], layout: Layout
) -> Mapping[str, Entry]:
    """Give the tensors of a checkpoint the keys that `model` is saved with, with a head or without.

    As transformers reads them: into a base model those of its kind with a head, less the head;
    into a model with a head those of its base model, which lack the head; any by older names.
    """
    stock = without_adapters(model)
    prefix = base_prefix(stock)
    own = {piece.key for pieces in layout.values() for piece in pieces} | layout.keys()
    under = {key.removeprefix(prefix): key for key in entries if key.startswith(prefix)}
    if is_base_model(stock) and own & under.keys() and not own & entries.keys():
        left_out = sorted(entries.keys() - under.values())
        if left_out and is_first():
            text = list_names("leaves out", left_out)
            _logger.warning("%s is without a head and %s", type(stock).__name__, text)
        return {key: entries[before] for key, before in under.items()}
    # A hub's own names of a part may be those that the part has in the base model.
    of_base = own & {f"{prefix}{key}" for key in entries}
    if not is_base_model(stock) and len(of_base) > len(own & entries.keys()):
        return {f"{prefix}{key}": entry for key, entry in entries.items()}
    if own <= entries.keys():
        return entries
    renamed = other_names(stock, sorted(entries.keys() - own), sorted(own - entries.keys()))
    return {renamed.get(key, key): entry for key, entry in entries.items()}


def _check_same_weights(weights: str, folder: str) -> None:
    """Raise where ranks saw other fingerprints: two models' shards make up a third."""
    seen = differing(weights)
    if seen is None:
        return
    folders = gather(folder)
    odd = [rank for rank, theirs in enumerate(seen) if theirs != seen[0]]
    if odd:
        raise ValueError(
            f"ranks see different weights: rank {odd[0]} in {folders[odd[0]]}, rank 0 in "
            f"{folders[0]}; name one folder on all, and bring copies on every node up to date"
        )


def _match(
    model: nn.Module,
    entries: Mapping[str, Entry],
    layout: Layout,
    plan: ModelPlan,
    empty: set[str],
) -> dict[str, InFiles]:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    wanted: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    owners: dict[str, list[str]] = {}
    tied: set[str] = set()
    tensors = [(n, p) for n, p in model.named_parameters() if n in empty]
    for name, tensor in (*tensors, *persistent_buffers(model)):
        keys = [file_name(alias) for alias in aliases.get(id(tensor), [name])]
        present = [key for key in keys if _stored_as(key, layout, entries)]
        in_file = [_stored_as(key, layout, entries) for key in present]
        _check_tied({key: entries[key] for key in filter(None, in_file)})
        tied |= set(filter(None, in_file[1:]))
        key = (present or keys)[0]
        wanted[key], dtypes[key] = tuple(tensor.shape), tensor.dtype
        owners.setdefault(key, []).append(name)
    packed = {
        key: weight
        for key, shape in wanted.items()
        if (weight := find_packed(layout[key][0].key, shape, entries)) is not None
    }
    in_pieces = {key: shape for key, shape in wanted.items() if key not in packed}
    try:
        found = find_pieces(entries, in_pieces, layout, plan)
    except ValueError as error:
        own = {piece.key for pieces in layout.values() for piece in pieces} | layout.keys()
        instead = sorted(unexpected_keys(model, entries.keys() - own))
        if not instead:
            raise
        raise ValueError(
            f"{error}; {list_names('it holds instead', instead)}. Keys of another layout: load it "
            f"in transformers and save it there, or say in a plan how weights are stored (plan=)"
        ) from error
    used = {piece.key for pieces in found.values() for piece in pieces}
    used |= {name for key in packed for name in packed_keys(layout[key][0].key)}
    used |= tied
    read = {id(tensor) for _, tensor in tensors}
    others = [names for key, names in aliases.items() if key not in read]
    used |= {piece.key for names in others for name in names for piece in layout[file_name(name)]}
    if unexpected := sorted(unexpected_keys(model, entries.keys() - used)):
        raise ValueError(list_names("unexpected", unexpected))
    stored: dict[str, list[tuple[Piece, Entry]] | Packed] = {
        key: [(piece, entries[piece.key]) for piece in pieces] for key, pieces in found.items()
    }
    return {
        name: InFiles(parts, dtypes[key])
        for key, parts in (stored | packed).items()
        for name in owners[key]
    }


def _stored_as(name: str, layout: Layout, entries: Mapping[str, Entry]) -> str | None:
    """Return the key of a tensor that a checkpoint holds in one, by its name there or in memory."""
    keys = [piece.key for piece in layout[name]]
    found = [key for key in (*keys, name) if key in entries]
    return found[0] if found and len(keys) == 1 else None


def _check_tied(entries: Mapping[str, Entry]) -> None:
    """Raise where tied tensors differ: one would be lost; transformers does not tie such."""
    first, *others = entries or [""]
    for other in others if is_first() else ():
        if not same_values(entries[first], entries[other]):
            raise ValueError(
                f"{first} and {other} have different values, and are one weight by the config; "
                f"load it with tie_word_embeddings=False, or correct its config.json"
            )


def load_weights(model: nn.Module, weights: Mapping[str, InFiles], device: torch.device) -> None:
    """Allocate what is on the meta device and fill it; every rank calls this.

    Args:
        model: sharded.
        weights: of `find_weights`.
        device: of the parameters.
    """
    allocate_meta(model, device)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    as_bytes = held_as_bytes(model)
    computed_on = patched_state(model).device if as_bytes else device
    sizes = {
        name: as_bytes[name].num_bytes if name in as_bytes else _bytes(held[name])
        for name in weights
    }

    def read() -> None:
        with (
            Reader() as reader,
            progress_bar(sum(sizes.values()), "loading weights", is_first()) as progress,
        ):
            for name, stored in weights.items():
                if name in as_bytes:
                    as_bytes[name].read(stored, reader, computed_on)
                else:
                    tensor = held[name]
                    stored.read_into(local_tensor(tensor), local_box(tensor), reader)
                progress.update(sizes[name])

    together("reading weights", read)


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
