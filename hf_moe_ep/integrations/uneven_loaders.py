"""A check of data loaders that would give ranks different numbers of batches.

All ranks of a sharded model must run every forward together. With `even_batches=False` Accelerate
gives the last batches of an epoch to the first ranks only. With 7 batches on 2 ranks:

    rank 0   0 2 4 6
    rank 1   1 3 5       ends its epoch, while rank 0 waits in the experts' all-to-all

Streams are not checked, as they have no length (a streaming data set of `datasets`, of which every
rank reads files of its own under `dispatch_batches=False`).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard

from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.training_frameworks import prepared_loaders, prepared_models


def check_even(accelerator: Accelerator) -> None:
    """Check all data loaders that `accelerator` has prepared so far.

    Raises:
        ValueError: ranks of a patched model would get different numbers of batches.
    """
    if not any(find_state(model) for model in prepared_models(accelerator)):
        return
    for loader in prepared_loaders(accelerator):
        for sampler in (loader.batch_sampler, loader.sampler):
            numbers = _numbers_of_batches(sampler)
            if len(set(numbers)) > 1:
                raise ValueError(
                    f"even_batches=False gives rank 0 {numbers[0]} batches and rank "
                    f"{len(numbers) - 1} {numbers[-1]}, but ranks of a patched model run every "
                    f"forward together; set even_batches=True, which fills the end up with rows "
                    f"of the beginning, or drop_last=True in the DataLoader"
                )


def _numbers_of_batches(sampler: Any) -> list[int]:
    """Return the number of batches of each rank; empty if all ranks have the same number."""
    if not isinstance(sampler, BatchSamplerShard) or sampler.even_batches or sampler.drop_last:
        return []
    whole, ranks = sampler.batch_sampler, sampler.num_processes
    if not sampler.split_batches:
        left = len(whole) % ranks if isinstance(whole, Sized) else 0
    else:
        rows = getattr(whole, "sampler", None)
        share = sampler.batch_size // ranks
        left = -(-(len(rows) % sampler.batch_size) // share) if isinstance(rows, Sized) else 0
    if left == 0:
        return []
    each = len(whole) - 1 if sampler.split_batches else len(whole) // ranks
    return [each + (rank < left) for rank in range(ranks)]
