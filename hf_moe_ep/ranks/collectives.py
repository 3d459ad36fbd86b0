"""The only collectives of forward and backward.

`start_all_to_all` sends rows and returns at once; what it returns is waited for where the rows are
needed. `start_gathering` is the one small exchange that precedes it, and its `wait` is where the
host waits for a device. `swap_slices` and `all_gather` trade equal parts (sequence parallelism).
`sum_over_ranks` and `max_over_ranks` reduce numbers that carry no gradient.

Where rows and counts cannot be exchanged under gloo (a rank died, or never came and the process
group's timeout passed), the error is raised again with the place, which the backend's message
lacks. NCCL raises none: its watchdog aborts the process after that timeout, and `places.py` has
the place told then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks.missing import name_the_missing
from hf_moe_ep.ranks.places import Place, enter

# Renamed in torch 2.13, where the old name warns at every call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@contextmanager
def _naming(place: Place) -> Iterator[None]:
    """Raise again, with the place, what goes wrong there."""
    try:
        yield
    except torch.AcceleratorError as error:
        place.leave()
        raise RuntimeError(
            f"{place}: the GPU of this rank had stopped before, here the host noticed; what "
            f"stopped it stands above on stderr, as `Assertion ... failed` where it was a check "
            f"of this package ({error})"
        ) from error
    except RuntimeError as error:
        place.leave()
        raise RuntimeError(
            f"{place}, could not be exchanged; {name_the_missing(str(place), place.group)} "
            f"stopped, or never reached this layer within the process group's timeout ({error})"
        ) from error


class Transfer:
    """Rows on their way; holds what is read and written until `wait` has returned."""

    def __init__(self, work: dist.Work, tensors: tuple[Tensor, Tensor], place: Place) -> None:
        self._work, self._tensors, self._place = work, tensors, place

    def wait(self) -> None:
        """Let whatever runs next on this device see the rows; on a GPU the host goes on."""
        received, _ = self._tensors
        with _naming(self._place):
            self._work.wait()
            self._place.leave(on_gpu=received.is_cuda)


def start_all_to_all(
    received_RX: Tensor,
    rows_NX: Tensor,
    *,
    send_counts: list[int],
    recv_counts: list[int],
    group: dist.ProcessGroup,
    where: str,
) -> Transfer:
    """Send `send_counts[d]` consecutive rows to rank d of `group`, filling `received_RX`."""
    rows_NX = rows_NX.contiguous()
    place = enter(where, "rows", group)
    with _naming(place):
        work = dist.all_to_all_single(
            received_RX, rows_NX, recv_counts, send_counts, group=group, async_op=True
        )
    assert work is not None
    return Transfer(work, (received_RX, rows_NX), place)


def swap_slices(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `slices[r]` to rank r of `group`; `[r]` of the result came from it; no gradient."""
    slices = slices.contiguous()
    received = torch.empty_like(slices)
    dist.all_to_all_single(received, slices, group=group)
    return received


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stack `x` of every rank of `group`: (ranks, *x.shape); no gradient."""
    gathered = x.new_empty((dist.get_world_size(group), *x.shape))
    _all_gather(gathered.view(-1), x.contiguous().view(-1), group=group)
    return gathered


class Gathering:
    """Small vectors of all ranks on their way; holds what is read and written until `wait`."""

    def __init__(self, work: dist.Work, tensors: tuple[Tensor, Tensor], place: Place) -> None:
        self._work, self._tensors, self._place = work, tensors, place

    def wait(self) -> list[list[int]]:
        """Wait, on a GPU too, for the vector of every rank."""
        gathered, _ = self._tensors
        with _naming(self._place):
            self._work.wait()
            told: list[list[int]] = gathered.tolist()
        self._place.leave()
        return told


def start_gathering(counts: Tensor, group: dist.ProcessGroup, *, where: str) -> Gathering:
    """Send `counts` (one int64 vector) to every rank of `group`."""
    counts = counts.contiguous()
    gathered = counts.new_empty(dist.get_world_size(group), len(counts))
    place = enter(where, "counts", group)
    with _naming(place):
        work = _all_gather(gathered.view(-1), counts, group=group, async_op=True)
    return Gathering(work, (gathered, counts), place)


def gather_counts(counts: Tensor, group: dist.ProcessGroup, *, where: str) -> list[list[int]]:
    """Gather `counts` (one int64 vector) of every rank of `group`, on the host."""
    return start_gathering(counts, group, where=where).wait()


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum `value` over the ranks of `group` (default: all), without a gradient."""
    return _reduce(value, dist.ReduceOp.SUM, group)


def max_over_ranks(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Find the maximum of `value` over the ranks of `group` (default: all), without a gradient.

    nan on one rank gives nan on all: gloo's own maximum loses it, so a flag travels beside.
    """
    lost = value.isnan()
    known = value.masked_fill(lost, 0.0)
    both = _reduce(torch.stack([known, lost.to(value.dtype)]), dist.ReduceOp.MAX, group)
    return both[0].masked_fill(both[1] > 0, float("nan"))


def _reduce(value: Tensor, operation: Any, group: dist.ProcessGroup | None) -> Tensor:
    value = value.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value, op=operation, group=group)
    return value
