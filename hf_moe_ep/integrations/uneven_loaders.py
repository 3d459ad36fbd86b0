"""Data loaders that would give ranks different numbers of batches.

Ranks of a sharded model run every forward together. With `even_batches=False` Accelerate gives the
first ranks what is left at the end of an epoch, 7 batches on 2 ranks:

    rank 0   0 2 4 6
    rank 1   1 3 5       then goes on, and rank 0 waits for it in the experts

A stream of which every rank reads files of its own (a streaming data set of `datasets`, under
`dispatch_batches=False`) has no length, and is not looked at.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard

from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.training_frameworks import prepared_loaders, prepared_models


def check_even(accelerator: Accelerator) -> None:
    """Look at all that `accelerator` has prepared, in whatever order.

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
    """Return how many batches each rank gets; empty where all get as many."""
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
