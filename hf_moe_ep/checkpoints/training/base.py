"""Identify the base model of a run whose experts are held quantised, by hashes instead of a copy.

    quantised_base.json    {"format": 1, "model": "Qwen/Qwen3-30B-A3B", "experts_dtype": "nf4",
                            "experts_double_quant": false,
                            "hashes": {"model.layers.0.mlp.experts.gate_up_proj": "03f2...", ..}}

`describe_base` computes the hashes, `check_base` compares them. A hash is two 64-bit sums over the
words (of 1 to 8 bytes) of a stacked matrix or of its scales (`storage/checksums.py`). Each summand
depends on a word and on the position of the word in the whole tensor. The sums of the ranks
therefore add up to the sum of the whole tensor: no tensor is gathered, and every layout of ranks
gives the same hash.

If `balance_experts` has moved experts to other rows, the hash uses their positions in hub order, in
which row e is expert e.

Frozen bytes do not change, so a rank reads its shards once and stores the sums. It reads a shard
again if autograd has counted a write into the tensor, or if another tensor has replaced this
tensor. A write through `.data` is not counted. Loading a checkpoint always reads all bytes.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_moe_ep.checkpoints.storage.checksums import SEEDS, mix_bits, sum_over_shards
from hf_moe_ep.checkpoints.training.stages import join_by_name
from hf_moe_ep.placement.hub_order import map_parameters_to_slots
from hf_moe_ep.ranks.all_ranks import run_on_first
from hf_moe_ep.ranks.boxes import get_local_box, get_local_tensor, number_elements
from hf_moe_ep.state import KnownSums, find_state, iterate_quantised_matrices
from hf_moe_ep.upstream.models import get_source
from hf_moe_ep.upstream.module_names import get_stock_name, unwrap
from hf_moe_ep.upstream.sharded_models import count_writes

BASE = "quantised_base.json"
_FORMAT = 1
# A row of bytes is read in words of the first of these dtypes that divides the row.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def describe_base(model: nn.Module, *, anew: bool = False) -> dict[str, Any] | None:
    """Describe the quantised experts of a model; every rank calls this.

    Args:
        model: resharded, so its parameters are shards and not gathered.
        anew: read all bytes instead of using stored sums.

    Returns:
        The content of quantised_base.json, the same on every rank; None without quantised experts.
    """
    model = unwrap(model)
    state = find_state(model)
    if state is None:
        return None
    if anew:
        state.known_sums.clear()
    hashes = join_by_name(_hash_experts(model, state.known_sums), state)
    if not hashes:
        return None
    config = state.config
    return {
        "format": _FORMAT,
        "model": get_source(model),
        "experts_dtype": config.experts_dtype,
        "experts_double_quant": config.experts_double_quant,
        "hashes": hashes,
    }


def _hash_experts(model: nn.Module, known: dict[str, KnownSums]) -> dict[str, str]:
    """Return the hashes of the quantised experts of a model, or of this rank's pipeline stage."""
    tensors = {
        f"{get_stock_name(name)}{suffix}": tensor
        for name, matrix, _ in iterate_quantised_matrices(model)
        for suffix, tensor in matrix.by_name("").items()
    }
    if not tensors:
        return {}
    slots = map_parameters_to_slots(model)
    sums = torch.stack(
        [_find_sums(name, tensor, slots.get(id(tensor)), known) for name, tensor in tensors.items()]
    )
    totals = sum_over_shards(sums, next(iter(tensors.values()))).tolist()
    return {
        name: "".join(f"{total % 2**64:016x}" for total in two_totals)
        for name, two_totals in zip(tensors, totals, strict=True)
    }


def number_file_name(name: str, index: int) -> str:
    """Return the name of the JSON file of model `index`, numbered as Accelerate numbers files."""
    return name if index == 0 else f"{Path(name).stem}_{index}.json"


def check_base(folder: Path, model: nn.Module, index: int = 0) -> None:
    """Raise ValueError on every rank if a checkpoint was saved by a run on another base."""
    saved = run_on_first(f"reading {folder}", lambda: _read(folder / number_file_name(BASE, index)))
    base = describe_base(model, anew=True)
    if saved == base:
        return
    saved_format, base_format = _describe_format(saved), _describe_format(base)
    if saved_format != base_format:
        raise ValueError(
            f"{folder} was saved by a run whose experts were {saved_format}, but the experts of "
            f"this model are {base_format}; adapters fit one base only: patch the model with the "
            f"options of that run"
        )
    assert saved is not None and base is not None
    names = [name for name, value in base["hashes"].items() if saved["hashes"].get(name) != value]
    if names:
        first = names[0]
        raise ValueError(
            f"{folder} was saved by a run on {saved['model'] or 'a model'} with {first} "
            f"{saved['hashes'].get(first)}, and this is {base['model'] or 'a model'} with "
            f"{base['hashes'][first]} ({len(names)} of {len(base['hashes'])} tensors of experts "
            f"differ): this is another base; load the base on which the saved adapters were trained"
        )


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        number = content["format"]
        is_complete = {"model", "experts_dtype", "experts_double_quant", "hashes"} <= content.keys()
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); load an older checkpoint") from error
    if number != _FORMAT or not is_complete:
        raise ValueError(f"{path} has format {number}, this version reads {_FORMAT}")
    return content


def _describe_format(base: dict[str, Any] | None) -> str:
    if base is None:
        return "not quantised (experts_dtype=None)"
    nested = ", experts_double_quant=True" if base["experts_double_quant"] else ""
    return f"quantised (experts_dtype={base['experts_dtype']!r}{nested})"


@torch.no_grad()
def _find_sums(
    name: str, tensor: Tensor, slots: Tensor | None, known: dict[str, KnownSums]
) -> Tensor:
    """Return the sums of this rank's shard; take them from `known` if the shard is unchanged."""
    shard, written = get_local_tensor(tensor), count_writes(tensor)
    entry = known.get(name)
    if entry is not None and entry.still_hold(tensor, shard, written):
        return entry.sums
    sums = _compute_sums(tensor, slots)
    known[name] = KnownSums(weakref.ref(tensor), shard.data_ptr(), written, sums)
    return sums


@torch.no_grad()
def _compute_sums(tensor: Tensor, slots: Tensor | None = None) -> Tensor:
    """Compute the two sums of this rank's shard of a tensor.

    Args:
        slots: the row in which each expert is stored; None if experts are in hub order.
    """
    row_bytes = tensor.shape[-1] * tensor.element_size()
    word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
    total = get_local_tensor(tensor).new_zeros(2, dtype=torch.int64)
    shard_bytes = get_local_tensor(tensor).shape[-1] * tensor.element_size()
    if shard_bytes % word.itemsize:
        # A word would have bytes of two ranks, as with a few scales. One rank counts whole rows.
        tensor, counts = _gather_whole_rows(tensor)
        if not counts:
            return total
    local, box = get_local_tensor(tensor).detach(), get_local_box(tensor)
    (first_slot, _), *inner, columns = box
    sizes = [*tensor.shape[1:-1], row_bytes // word.itemsize]
    ends = [end * tensor.element_size() // word.itemsize for end in columns]
    expert_of = list(range(len(tensor))) if slots is None else slots.argsort().tolist()
    for slot, rows in enumerate(local, first_slot):
        # One expert at a time, because every word becomes several int64 values.
        words = rows.contiguous().view(torch.uint8).view(word).to(torch.int64)
        expert = torch.tensor(expert_of[slot], device=words.device)
        positions = number_elements(expert, [*inner, (ends[0], ends[1])], sizes)
        for index, seed in enumerate(SEEDS):
            total[index] += mix_bits(words + mix_bits(positions + seed)).sum()
    return total


def _gather_whole_rows(tensor: Tensor) -> tuple[Tensor, bool]:
    """Gather a tensor along its last dim; the flag is True on one of the ranks with equal rows."""
    assert isinstance(tensor, DTensor)
    mesh, placements, counts = tensor.device_mesh, list(tensor.placements), True
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard) and placement.dim == tensor.ndim - 1:
            placements[axis] = Replicate()
            counts = counts and mesh.get_local_rank(axis) == 0
    return tensor.redistribute(placements=placements), counts
