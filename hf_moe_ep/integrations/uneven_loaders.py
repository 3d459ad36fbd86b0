"""Refuse data loaders that would give ranks different numbers of batches.

All ranks of a sharded model must run every forward together. With `even_batches=False` Accelerate
gives the last batches of an epoch only to the first ranks. With 7 batches on 2 ranks:

    rank 0   0 2 4 6     waits in the experts' all-to-all of batch 6
    rank 1   1 3 5       ends its epoch

Streams have no length, so they are not checked, although they can be uneven. For example, with
`dispatch_batches=False` each rank reads other files of a streaming data set of `datasets`.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard

from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.accelerate_and_trainer import list_prepared_loaders, list_prepared_models


def check_batches_are_even(accelerator: Accelerator) -> None:
    """Check all data loaders that `accelerator` has prepared so far.

    Raises:
        ValueError: ranks of a patched model would get different numbers of batches.
    """
    if not any(find_state(model) for model in list_prepared_models(accelerator)):
        return
    for loader in list_prepared_loaders(accelerator):
        for sampler in (loader.batch_sampler, loader.sampler):
            numbers = _count_batches(sampler)
            if len(set(numbers)) > 1:
                raise ValueError(
                    f"even_batches=False gives rank 0 {numbers[0]} batches and rank "
                    f"{len(numbers) - 1} {numbers[-1]}, but ranks of a patched model run every "
                    f"forward together; set even_batches=True, which pads the last batches with "
                    f"rows of the first batches, or drop_last=True in the DataLoader"
                )


def _count_batches(sampler: Any) -> list[int]:
    """Return the number of batches of each rank, or [] if all ranks have the same number."""
    if not isinstance(sampler, BatchSamplerShard) or sampler.even_batches or sampler.drop_last:
        return []
    batches, num_ranks = sampler.batch_sampler, sampler.num_processes
    # Only the first `num_longer` ranks get a batch in the last round.
    if not sampler.split_batches:
        num_longer = len(batches) % num_ranks if isinstance(batches, Sized) else 0
    else:
        rows = getattr(batches, "sampler", None)
        if not isinstance(rows, Sized):
            return []
        rows_per_rank = sampler.batch_size // num_ranks
        num_longer = -(-(len(rows) % sampler.batch_size) // rows_per_rank)
    if num_longer == 0:
        return []
    shortest = len(batches) - 1 if sampler.split_batches else len(batches) // num_ranks
    return [shortest + (rank < num_longer) for rank in range(num_ranks)]
