"""Sum over all ranks how often experts were chosen since a reader's last reset.

The counts of a rank (`moe/counting.py`) only grow. A reader is the name of a function that reads
these counts, such as "expert_load". Its reset stores a copy of the counts, the reader's baseline.
The reader gets (counts - baseline), summed over all ranks by one all-reduce:

    counts of two experts on one rank    reset at [5, 3], read at [9, 3]: this rank adds [4, 0]
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState


def reset_counts(state: ModelState, reader: str) -> None:
    """Set the baseline of a reader to the present counts of this rank."""
    if state.choice_counts is not None:
        state.count_baselines[reader] = state.choice_counts.clone()


def sum_counts(state: ModelState, reader: str, *numbers: int) -> tuple[Tensor, list[Tensor]]:
    """Sum the counts since the reader's last reset over all ranks; every rank calls this.

    The same all-reduce sums `numbers` over all ranks. Both results stay on the device.
    """
    counts = _subtract_baseline(state, reader)
    # Copying the numbers to the device would be a host sync. Filling a tensor there is not.
    extra = [counts.new_full((1,), number) for number in numbers]
    sums = torch.cat([counts.flatten(), *extra])
    if state.meshes is not None:
        sums = sum_over_ranks(sums)
    count_sums, number_sums = sums.split([counts.numel(), len(numbers)])
    return count_sums.view_as(counts), list(number_sums.unbind())


def _subtract_baseline(state: ModelState, reader: str) -> Tensor:
    counts, baseline = state.choice_counts, state.count_baselines.get(reader)
    if counts is None:
        shape = (len(state.moe_layers), state.num_experts)
        return torch.zeros(shape, dtype=torch.int64, device=state.mesh_device)
    return counts if baseline is None else counts - baseline.to(counts.device)
