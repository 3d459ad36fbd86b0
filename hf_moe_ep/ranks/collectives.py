"""Run the collectives of forward and backward, and name the layer and missing ranks in errors.

start_counts         start an all-to-all of a few counts; `Transfer.read` copies them to the host
gather_counts        all-gather a few counts, with a host sync
start_all_to_all     start an all-to-all of rows; call `wait` where the rows are needed
swap_slices          send a slice to each rank by an all-to-all (sequence parallelism)
all_gather           all-gather tensors of equal size (sequence parallelism)
start_all_gather     the same, started (keys and values of context parallelism)
start_swap           start to send a slice to each rank (the gradients of such an all-gather)
send_to_next         start to send a tensor to the next rank and to receive one (ring attention)
sum_over_ranks       sum a value over the ranks, without a gradient
max_over_ranks       compute the maximum of a value over the ranks, without a gradient

Gloo raises an error when an exchange of counts or rows fails, either because a rank died or because
a rank did not start the exchange within the timeout of the process group. Gloo's error names
neither the layer nor the rank. `start_counts`, `gather_counts` and `start_all_to_all` replace this
error by an error that names the missing ranks and the layer. `send_to_next`, `start_all_gather` and
`start_swap` name only the ranks, because they do not know the layer. The other functions leave
gloo's error as it is.

NCCL raises no Python error. Its watchdog aborts the process after the same timeout, and prints the
collective and the name of the process group. torch's flight recorder also records which collective
each rank has reached. Enable it before the run starts, and print its files with torchfrtrace:

    TORCH_FR_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/tmp/fr/rank_ \\
        torchrun ...
    torchfrtrace --prefix rank_ /tmp/fr
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks.timeouts import explain_timeout
from hf_moe_ep.upstream.process_groups import all_gather_single as _all_gather


@dataclass(frozen=True)
class _Exchange:
    """One exchange, for errors. `__str__` makes the text only when an error needs the text."""

    where: object
    what: str
    group: dist.ProcessGroup

    def __str__(self) -> str:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self.group)))
        return f"{self.where}: {self.what}, group {self.group.group_desc} of ranks {ranks}"


@contextmanager
def _describe_errors(exchange: _Exchange) -> Iterator[None]:
    """Replace an error that is raised inside the block by an error that names the exchange."""
    failure, goal = ", could not be exchanged", "this layer"
    try:
        with explain_timeout(exchange, exchange.group, failure, goal=goal):
            yield
    except torch.AcceleratorError as error:
        raise RuntimeError(
            f"{exchange}: the GPU of this rank stopped before this exchange, and the host noticed "
            f"it here; the cause is printed above on stderr, as `Assertion ... failed` if it was a "
            f"check of this package ({error})"
        ) from error


@dataclass(frozen=True)
class Transfer:
    """A transfer that may still run. This object keeps the sent and received tensors alive."""

    _works: Sequence[dist.Work]
    received: Tensor  # must not be read before `wait`
    _sent: Tensor
    _exchange: _Exchange

    def wait(self) -> Tensor:
        """Return the received tensor, which later operators on this device may read.

        With NCCL, these operators wait for the transfer, and the host does not.
        """
        with _describe_errors(self._exchange):
            for work in self._works:
                work.wait()
        return self.received

    def read(self, numbers: Tensor) -> list[Any]:
        """Copy `numbers`, computed from the received tensor, to the host. This is a host sync.

        A GPU error of the transfer may be raised only here.
        """
        with _describe_errors(self._exchange):
            values: list[Any] = numbers.tolist()
        return values


def start_all_to_all(
    received_RX: Tensor,
    rows_NX: Tensor,
    *,
    send_counts: list[int],
    recv_counts: list[int],
    group: dist.ProcessGroup,
    where: object,
) -> Transfer:
    """Start to send `send_counts[d]` consecutive rows of `rows_NX` to each rank d of `group`.

    The rows from all ranks are written to `received_RX`, ordered by rank: `recv_counts[s]` rows
    from rank s. The text of `where` names the layer for errors.
    """
    rows_NX = rows_NX.contiguous()
    exchange = _Exchange(where, "rows", group)
    with _describe_errors(exchange):
        work = dist.all_to_all_single(
            received_RX, rows_NX, recv_counts, send_counts, group=group, async_op=True
        )
    assert work is not None
    return Transfer([work], received_RX, rows_NX, exchange)


def swap_slices(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `slices[r]` to rank r of `group` and return the slices received, ordered by rank.

    This function has no gradient.
    """
    slices = slices.contiguous()
    received = torch.empty_like(slices)
    dist.all_to_all_single(received, slices, group=group)
    return received


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stack the `x` of all ranks of `group`: (ranks, *x.shape). This function has no gradient."""
    gathered = x.new_empty((dist.get_world_size(group), *x.shape))
    _all_gather(gathered.view(-1), x.contiguous().view(-1), group=group)
    return gathered


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Start to do what `all_gather` does."""
    x = x.contiguous()
    gathered = x.new_empty((dist.get_world_size(group), *x.shape))
    exchange = _Exchange("context parallelism", "keys and values", group)
    with _describe_errors(exchange):
        work = _all_gather(gathered.view(-1), x.view(-1), group=group, async_op=True)
    return Transfer([work], gathered, x, exchange)


def start_swap(slices: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Start to do what `swap_slices` does."""
    slices = slices.contiguous()
    received = torch.empty_like(slices)
    exchange = _Exchange("context parallelism", "gradients of keys and values", group)
    with _describe_errors(exchange):
        work = dist.all_to_all_single(received, slices, group=group, async_op=True)
    assert work is not None
    return Transfer([work], received, slices, exchange)


def send_to_next(x: Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> Transfer:
    """Start to send `x` to the next rank of `group`, and to receive the previous rank's tensor.

    Transfers that run at the same time need different tags. This function has no gradient.
    """
    x = x.contiguous()
    received = torch.empty_like(x)
    ranks = dist.get_process_group_ranks(group)
    position = dist.get_rank(group)
    after, before = ranks[(position + 1) % len(ranks)], ranks[position - 1]
    operations = [
        dist.P2POp(dist.isend, x, after, group, tag),
        dist.P2POp(dist.irecv, received, before, group, tag),
    ]
    exchange = _Exchange("context parallelism", "a part of the ring", group)
    with _describe_errors(exchange):
        works = dist.batch_isend_irecv(operations)
    return Transfer(works, received, x, exchange)


def start_counts(counts_DX: Tensor, group: dist.ProcessGroup, *, where: object) -> Transfer:
    """Start to send the row `counts_DX[r]` (int64) to each rank r of `group`.

    The text of `where` names the layer for errors.
    """
    received_DX = torch.empty_like(counts_DX)
    exchange = _Exchange(where, "counts", group)
    with _describe_errors(exchange):
        work = dist.all_to_all_single(received_DX, counts_DX, group=group, async_op=True)
    assert work is not None
    return Transfer([work], received_DX, counts_DX, exchange)


def gather_counts(counts: Tensor, group: dist.ProcessGroup, *, where: object) -> list[list[int]]:
    """All-gather `counts` (an int64 vector) and return the counts of every rank, on the host."""
    counts = counts.contiguous()
    gathered = counts.new_empty(dist.get_world_size(group), len(counts))
    with _describe_errors(_Exchange(where, "counts", group)):
        _all_gather(gathered.view(-1), counts, group=group, async_op=True).wait()
        counts_by_rank: list[list[int]] = gathered.tolist()
    return counts_by_rank


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of `value` over the ranks of `group` (default: all), without a gradient."""
    return _reduce(value, dist.ReduceOp.SUM, group)


def max_over_ranks(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the maximum of `value` over the ranks of `group` (default: all), without a gradient.

    If one rank has nan, every rank gets nan. Gloo's own maximum drops nan, so the same all-reduce
    contains a second number per value: 1 for nan, otherwise 0.
    """
    is_nan = value.isnan()
    numbers = value.masked_fill(is_nan, 0.0)
    stacked = torch.stack([numbers, is_nan.to(value.dtype)])
    maximum, any_nan = _reduce(stacked, dist.ReduceOp.MAX, group).unbind()
    return maximum.masked_fill(any_nan > 0, float("nan"))


def _reduce(value: Tensor, operation: Any, group: dist.ProcessGroup | None) -> Tensor:
    value = value.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value, op=operation, group=group)
    return value
