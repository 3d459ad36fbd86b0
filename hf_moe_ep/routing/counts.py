"""Counts of all ranks since a reader last set its own zero, from what `moe/counting.py` adds up.

counts of a rank         only ever grow
zero of a reader         a copy of them; two readers do not disturb each other
what a reader is told    counts - its zero, summed over all ranks: one all-reduce
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState


def count_anew(state: ModelState, reader: str) -> None:
    """Set a reader's zero to what this rank has counted by now."""
    if state.choice_counts is not None:
        state.counted[reader] = state.choice_counts.clone()


def counts_of_all_ranks(state: ModelState, reader: str, *told: int) -> tuple[Tensor, list[Tensor]]:
    """Sum counts since the reader's zero over all ranks; every rank of the model calls this.

    Returns them, and the sum of each number of `told` beside them; all still on the device.
    """
    counts = _since(state, reader)
    beside = torch.tensor(told, dtype=torch.int64, device=counts.device)
    numbers = torch.cat([counts.flatten(), beside])
    if state.meshes is not None:
        numbers = sum_over_ranks(numbers)
    summed, beside = numbers.split([counts.numel(), len(told)])
    return summed.view_as(counts), list(beside.unbind())


def _since(state: ModelState, reader: str) -> Tensor:
    counts, zero = state.choice_counts, state.counted.get(reader)
    if counts is None:
        shape = (len(state.moe_layers), state.num_experts)
        return torch.zeros(shape, dtype=torch.int64, device=state.device)
    return counts if zero is None else counts - zero.to(counts.device)
