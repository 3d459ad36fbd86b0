"""Load a hub checkpoint into a sharded model; every rank reads only its own shards.

The model is built on the meta device, and `find_weights` finds its parameters in the checkpoint.
Then the model is sharded, and `load_weights` allocates the shards of each rank and reads their
bytes. Besides the shards a rank needs memory for its part of the tensor that is being read, or, if
experts are held quantised (`quantised.py`), for one matrix of one expert. With dp_replicate_size
> 1 every replica reads the files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hf_moe_ep.architectures import find_block, find_plan
from hf_moe_ep.checkpoints.hub.fp8 import (
    find_unjoined_weights,
    join_scales,
    join_stacked_scales,
    list_fp8_keys,
)
from hf_moe_ep.checkpoints.hub.layout import (
    Layout,
    find_copies,
    find_hub_layout,
    find_pieces,
    list_names,
    list_possible_keys,
    list_shapes,
)
from hf_moe_ep.checkpoints.hub.mxfp4 import join_blocks
from hf_moe_ep.checkpoints.hub.quantised import find_quantised_shards
from hf_moe_ep.checkpoints.hub.stored_parameter import StoredParameter
from hf_moe_ep.checkpoints.storage.safetensors_file import (
    FileTensor,
    Reader,
    compute_fingerprint,
    have_same_values,
    read_index,
)
from hf_moe_ep.etp import list_stock_parts, map_ids_to_split_dims
from hf_moe_ep.moe.stacked import stack_experts
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.all_ranks import find_differing, gather, is_first, run_on_all
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.state import find_state, patched_state
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.conversion import find_other_names
from hf_moe_ep.upstream.hub import (
    build_empty_model,
    find_old_buffers,
    find_unexpected_keys,
    get_base_prefix,
    get_checkpoint_name,
    is_base_model,
    make_progress_bar,
    may_be_missing,
)
from hf_moe_ep.upstream.models import iterate_persistent_buffers
from hf_moe_ep.upstream.module_names import get_canonical_name
from hf_moe_ep.upstream.modules import allocate_meta

_logger = logging.getLogger("hf_moe_ep")


def build_model_from_config(
    folder: Path,
    find_dtype: Callable[[], torch.dtype] = torch.get_default_dtype,
    *,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, ModelPlan]:
    """Build a model on the meta device from the config in a folder; return the model and its plan.

    Args:
        folder: the folder of config.json.
        find_dtype: called if the config names no dtype.
        trust_remote_code: run the code in the folder, if the config names a class in it.
    """
    model = build_empty_model(folder, None, find_dtype, {"trust_remote_code": trust_remote_code})
    stack_experts(model, find_block(model))
    return model, find_plan(model)


def choose_dtype_of_weights(folder: str | os.PathLike[str]) -> torch.dtype:
    """Return the dtype of the first floating point tensor, as transformers would choose it.

    Tensors with one byte per value are skipped, because they are quantised.
    """
    tensors = sorted(read_index(folder).items(), key=lambda item: (item[1].file, item[0]))
    dtypes = (tensor.dtype for _, tensor in tensors)
    candidates = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    return next(candidates, torch.get_default_dtype())


def find_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    plan: ModelPlan,
    empty: Iterable[str],
    ignore_unexpected: Sequence[str] = (),
) -> Match:
    """Find where a checkpoint stores the parameters `empty` and all persistent buffers.

    Args:
        model: not sharded yet. Only shapes and dtypes of its tensors are used.
        empty: the names of the parameters to read, as in `named_parameters`, which lists a tied
            weight under its first name only. The checkpoint may store it under another name.
        ignore_unexpected: patterns of keys that do not belong to the model and are accepted.

    Raises:
        ValueError: on every rank: the folder is not a complete checkpoint; tensors are missing,
            have another shape, or do not belong to the model (the error names them); ranks read
            different weights.
    """

    def find() -> tuple[Match, str]:
        found = match_checkpoint(model, directory, plan, empty, ignore_unexpected)
        if found.unexpected:
            raise _make_misfit_error(
                model,
                directory,
                f"{list_names('unexpected', found.unexpected)}; if the model does not need them, "
                f"pass ignore_unexpected=[regex] to from_pretrained, which copies the tensors with "
                f"matching keys into every saved checkpoint",
            )
        return found, compute_fingerprint(found.file_tensors)

    found, own_fingerprint = run_on_all(f"reading {directory}", find)
    check_same_weights(own_fingerprint, os.fspath(directory))
    return found


class Match(NamedTuple):
    """The result of `match_checkpoint`: where a checkpoint stores the parameters of a model.

    Attributes:
        stored: the parameters `empty` and all persistent buffers, by name.
        unexpected: the keys that belong to no parameter and that the model's class does not ignore.
        extra: the ignored tensors, undecoded, by the keys under which they are saved.
        file_tensors: all tensors of the checkpoint, by their keys in the files.
    """

    stored: dict[str, StoredParameter]
    unexpected: list[str]
    extra: dict[str, FileTensor]
    file_tensors: dict[str, FileTensor]


def match_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    plan: ModelPlan,
    empty: Iterable[str],
    ignore_unexpected: Sequence[str] = (),
    file_tensors: Mapping[str, FileTensor] | None = None,
) -> Match:
    """Find where a checkpoint stores parameters, on this rank alone; see `find_weights`.

    `file_tensors` are the tensors of the checkpoint; by default, they are read from `directory`.

    Raises:
        ValueError: the folder is not a complete checkpoint; tensors are missing or have another
            shape.
    """
    file_tensors = read_index(directory) if file_tensors is None else file_tensors
    layout = find_hub_layout(model, plan, list_shapes(model), copies=False, as_loaded=False)
    tensors: Mapping[str, FileTensor]
    key_in_file: dict[str, str] = {}
    try:
        ignored_scaled = _find_scaled_extra(model, file_tensors, layout, ignore_unexpected)
        joined = join_scales(
            {key: tensor for key, tensor in file_tensors.items() if key not in ignored_scaled},
            Path(directory),
        )
        key_in_file = _rename_keys(model, joined, layout)
        tensors = {key: joined[in_file] for key, in_file in key_in_file.items()}
        tensors = join_stacked_scales(tensors, layout, Path(directory))
        tensors = join_blocks(tensors, layout)
        stored, known = _match_parameters(model, tensors, layout, plan, set(empty))
    except ValueError as error:
        text = str(error)
        prefix = get_base_prefix(without_adapters(model))
        own_keys = {piece.key for pieces in layout.values() for piece in pieces}
        own, missing = own_keys & key_in_file.keys(), own_keys - key_in_file.keys()
        added = ""
        if own and all(key == f"{prefix}{key_in_file[key]}" for key in own):
            added = "it holds a base model without a head, and transformers would add a head"
        elif text.startswith("missing") and not any(key.startswith(prefix) for key in missing):
            has_base = any(key.startswith(prefix) for key in own)
            added = "transformers would add a head" if has_base else ""
        if added:
            text += (
                f"; {added} that is not trained. If you want this, load the checkpoint in "
                f"transformers and save the model"
            )
        raise _make_misfit_error(model, directory, text) from error
    known |= find_copies(model).keys()  # a save fills these keys from the embedding and the head
    others = [key for key in tensors if key not in known]
    unexpected = find_unexpected_keys(model, others, ignore_unexpected)
    ignored = set(others) - set(unexpected) - find_old_buffers(model, others)
    extra = {key: file_tensors[key_in_file.get(key, key)] for key in others if key in ignored}
    extra |= {key: file_tensors[key] for key in ignored_scaled}
    check_extra(extra, layout, stored)
    return Match(stored, sorted(unexpected), extra, dict(file_tensors))


def _find_scaled_extra(
    model: nn.Module,
    tensors: Mapping[str, FileTensor],
    layout: Layout,
    ignore_unexpected: Sequence[str],
) -> list[str]:
    """List the keys of the FP8 weights that are not part of the model, and of their scales.

    These tensors must not be decoded, because the config may lack the size of their blocks: a model
    that was loaded in FP8 is saved in bf16, but its extra tensors are saved in FP8.
    """
    own = list_possible_keys(layout, get_base_prefix(without_adapters(model)))
    weights = [key for key in find_unjoined_weights(tensors) if key not in own]
    scaled = [key for weight in weights for key in list_fp8_keys(weight) if key in tensors]
    unexpected = set(find_unexpected_keys(model, scaled, ignore_unexpected))
    return [key for key in scaled if key not in unexpected]


def check_extra(
    extra: Mapping[str, FileTensor], layout: Layout, stored: Mapping[str, StoredParameter]
) -> None:
    """Raise ValueError if a tensor that is not the model's has a key that the model writes.

    Args:
        layout: the layout in which the model is saved.
        stored: the parameters that are read from the same checkpoint. The error names their files.
    """
    own_keys = {piece.key: name for name, pieces in layout.items() for piece in pieces}
    files = {get_checkpoint_name(name): item.pieces[0][1].file for name, item in stored.items()}
    for key in sorted(extra.keys() & own_keys.keys()):
        name = own_keys[key]
        raise ValueError(
            f"two tensors are called {key}: one in {extra[key].file}, which is not part of the "
            f"model, and the one that the model saves for {name}, read from "
            f"{files.get(name, 'elsewhere')}; remove one of them from the checkpoint"
        )


def _make_misfit_error(
    model: nn.Module, directory: str | os.PathLike[str], problem: str
) -> ValueError:
    kind = type(without_adapters(model)).__name__
    return ValueError(f"{os.fspath(directory)} does not fit this {kind}: {problem}")


def _rename_keys(
    model: nn.Module, tensors: Mapping[str, FileTensor], layout: Layout
) -> dict[str, str]:
    """Map the keys under which `model` is saved to the keys in a checkpoint.

    As in transformers, a base model accepts the checkpoint of a model with a head and ignores the
    head; a model with a head accepts the keys of its base model; both accept older names. If the
    head is then missing, an error follows later, unless its weight is tied.
    """
    stock = without_adapters(model)
    prefix = get_base_prefix(stock)
    model_keys = {piece.key for pieces in layout.values() for piece in pieces} | layout.keys()
    key_in_file = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    if is_base_model(stock) and model_keys & key_in_file.keys() and not model_keys & tensors.keys():
        ignored = sorted(tensors.keys() - key_in_file.values())
        if ignored and is_first():
            text = list_names("ignores", ignored)
            _logger.warning("%s has no head and %s", type(stock).__name__, text)
        return key_in_file
    names = {key: key for key in tensors}
    # Some keys may match with the prefix and others without it; the form with more matches is used.
    with_prefix = model_keys & {f"{prefix}{key}" for key in tensors}
    if not is_base_model(stock) and len(with_prefix) > len(model_keys & tensors.keys()):
        # The head has no prefix, and no tensor of a module outside the base model has one (`mtp.`).
        modules = tuple(f"{name}." for name, _ in stock.base_model.named_children())
        keeps = {key for key in model_keys & tensors.keys() if f"{prefix}{key}" not in model_keys}
        own = {key for key in tensors if f"{prefix}{key}" in with_prefix or key.startswith(modules)}
        names |= {key: f"{prefix}{key}" for key in own - keeps}
    if missing := sorted(model_keys - set(names.values())):
        unknown = sorted(key for key, name in names.items() if name not in model_keys)
        names |= find_other_names(stock, unknown, missing)
    return {name: key for key, name in names.items()}


def check_same_weights(own_fingerprint: str, folder: str) -> None:
    """Raise ValueError if ranks read different weights, which would mix two checkpoints."""
    fingerprints = find_differing(own_fingerprint)
    if fingerprints is None:
        return
    folders = gather(folder)
    rank = next((r for r, x in enumerate(fingerprints) if x != fingerprints[0]), None)
    if rank is not None:
        raise ValueError(
            f"ranks read different weights: rank {rank} in {folders[rank]}, rank 0 in "
            f"{folders[0]}; name one folder on all ranks, and copy it to every node"
        )


def _match_parameters(
    model: nn.Module,
    tensors: Mapping[str, FileTensor],
    layout: Layout,
    plan: ModelPlan,
    empty: set[str],
) -> tuple[dict[str, StoredParameter], set[str]]:
    """Find where each parameter in `empty` and each persistent buffer is stored.

    Returns the parameters and buffers by name, and the keys in `tensors` that belong to a parameter
    of the model, in `empty` or not.
    """
    aliases: dict[int, list[str]] = {}  # all names of each parameter; tied weights have several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    # The keys of these three dicts are the names under which the checkpoint stores the tensors.
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    model_names: dict[str, list[str]] = {}
    tied_keys: set[str] = set()
    parameters = [(n, p) for n, p in model.named_parameters() if n in empty]
    ids = {id(tensor) for _, tensor in parameters}
    for name, tensor in (*parameters, *iterate_persistent_buffers(model)):
        names = [get_checkpoint_name(alias) for alias in aliases.get(id(tensor), [name])]
        present = [alias for alias in names if _find_single_key(alias, layout, tensors)]
        if not present and id(tensor) not in ids and may_be_missing(model, names[0]):
            continue  # a buffer keeps its initial value
        keys = [_find_single_key(alias, layout, tensors) for alias in present]
        _check_tied({key: tensors[key] for key in filter(None, keys)})
        tied_keys |= set(filter(None, keys[1:]))
        stored_name = (present or names)[0]
        shapes[stored_name], dtypes[stored_name] = tuple(tensor.shape), tensor.dtype
        model_names.setdefault(stored_name, []).append(name)
    model_keys = {piece.key for pieces in layout.values() for piece in pieces} | layout.keys()
    try:
        pieces_of = find_pieces(tensors, shapes, layout, plan)
    except ValueError as error:
        unknown = sorted(find_unexpected_keys(model, tensors.keys() - model_keys))
        if not unknown:
            raise
        raise ValueError(
            f"{error}; {list_names('it holds instead', unknown)}. These keys belong to another "
            f"layout: load the checkpoint in transformers and save it there, or give the layout of "
            f"the weights in a plan (plan=)"
        ) from error
    known = {piece.key for pieces in pieces_of.values() for piece in pieces} | tied_keys
    # Parameters that are not in `empty` are not read, but the checkpoint may hold them.
    unread = [name for key, names in aliases.items() if key not in ids for name in names]
    known |= {piece.key for name in unread for piece in layout[get_checkpoint_name(name)]}
    stored = {
        name: StoredParameter(
            [(piece, tensors[piece.key]) for piece in pieces], dtypes[stored_name]
        )
        for stored_name, pieces in pieces_of.items()
        for name in model_names[stored_name]
    }
    return stored, known


def _find_single_key(name: str, layout: Layout, tensors: Mapping[str, FileTensor]) -> str | None:
    """Return the key of a parameter that the checkpoint stores as one tensor, or else None."""
    keys = [piece.key for piece in layout[name]]
    present = [key for key in (*keys, name) if key in tensors]
    return present[0] if present and len(keys) == 1 else None


def _check_tied(tensors: Mapping[str, FileTensor]) -> None:
    """On rank 0, raise ValueError if tied tensors differ, because only the first one is read."""
    first, *others = tensors or [""]
    for other in others if is_first() else ():
        if not have_same_values(tensors[first], tensors[other]):
            raise ValueError(
                f"{first} and {other} have different values, but the config ties them to one "
                f"weight; load the model with tie_word_embeddings=False, or correct config.json"
            )


def _select_own_stage(
    model: nn.Module, targets: Iterable[str], weights: Mapping[str, StoredParameter]
) -> Mapping[str, StoredParameter]:
    """Select the weights that this rank's pipeline stage reads; without stages, all weights.

    The last stage reads a head that is tied to the embedding under the name of the embedding.
    """
    state = find_state(model)
    if state is None or state.stage is None:
        return weights
    aliases = state.stage.aliases
    stored_names = {name: aliases.get(get_canonical_name(name), name) for name in targets}
    return {name: weights[stored] for name, stored in stored_names.items() if stored in weights}


def load_weights(
    model: nn.Module, weights: Mapping[str, StoredParameter], device: torch.device
) -> None:
    """Allocate the tensors that are on the meta device and load them; every rank calls this.

    Args:
        model: sharded, on the meta device.
        weights: `Match.stored` from `find_weights`.
        device: the device on which parameters are stored.
    """
    allocate_meta(model, device)
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    split_dims = map_ids_to_split_dims(model)
    weights = _select_own_stage(model, targets, weights)
    quantised = find_quantised_shards(model)
    compute_device = patched_state(model).mesh_device if quantised else device
    sizes = {
        name: quantised[name].num_bytes
        if name in quantised
        else get_local_tensor(targets[name]).nbytes
        for name in weights
    }

    def read() -> None:
        with (
            Reader() as reader,
            make_progress_bar(sum(sizes.values()), "loading weights", is_first()) as progress,
        ):
            for name, stored in weights.items():
                if name in quantised:
                    quantised[name].read(stored, reader, compute_device)
                else:
                    tensor = targets[name]
                    for box, part in list_stock_parts(tensor, split_dims.get(id(tensor))):
                        stored.read_into(part, box, reader)
                progress.update(sizes[name])

    run_on_all("reading weights", read)
