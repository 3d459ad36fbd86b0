"""Read the counts of `moe/counting.py`, summed over all ranks, since a reader's last reset.

counts of a rank       only grow
zero of a reader       a copy of the counts at the reader's last reset; each reader has its own
result for a reader    (counts - its zero), summed over all ranks by one all-reduce
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState


def count_anew(state: ModelState, reader: str) -> None:
    """Set a reader's zero to the present counts of this rank."""
    if state.choice_counts is not None:
        state.counted[reader] = state.choice_counts.clone()


def counts_of_all_ranks(
    state: ModelState, reader: str, *numbers: int
) -> tuple[Tensor, list[Tensor]]:
    """Sum the counts since the reader's zero over all ranks; every rank of the model calls this.

    Returns the sums of the counts, and the sum of each of the further `numbers`, on the device.
    """
    counts = _since(state, reader)
    further = torch.tensor(numbers, dtype=torch.int64, device=counts.device)
    sums = torch.cat([counts.flatten(), further])
    if state.meshes is not None:
        sums = sum_over_ranks(sums)
    summed_counts, further = sums.split([counts.numel(), len(numbers)])
    return summed_counts.view_as(counts), list(further.unbind())


def _since(state: ModelState, reader: str) -> Tensor:
    counts, zero = state.choice_counts, state.counted.get(reader)
    if counts is None:
        shape = (len(state.moe_layers), state.num_experts)
        return torch.zeros(shape, dtype=torch.int64, device=state.device)
    return counts if zero is None else counts - zero.to(counts.device)
