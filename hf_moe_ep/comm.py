"""The only collectives of forward and backward.

`exchange_rows` is an all-to-all whose gradient is the all-to-all back; `gather_counts` is the
one small exchange that precedes it, and the only place where the host waits for a device.
`sum_over_ranks` and `max_over_ranks` reduce numbers that carry no gradient.

A collective that fails (a rank died, or never came and the process group's timeout passed) is
raised again with the place in the model, because the backend's own message names neither.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        send_counts: list[int],
        recv_counts: list[int],
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.send_counts, ctx.recv_counts = group, send_counts, recv_counts
        return tuple(_all_to_all(tensor, send_counts, recv_counts, group) for tensor in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (
            _all_to_all(grad, ctx.recv_counts, ctx.send_counts, ctx.group) if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad[3:], strict=True)
        )
        return (None, None, None, *back)


def exchange_rows(
    rows: tuple[Tensor, ...],
    *,
    send_counts: list[int],
    recv_counts: list[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Send `send_counts[d]` consecutive rows of every tensor to rank d of `group`.

    Several tensors share one autograd node, so their gradients return in one fixed order on
    every rank.
    """
    return _ExchangeRows.apply(group, send_counts, recv_counts, *rows)


def gather_counts(counts: Tensor, group: dist.ProcessGroup, *, where: str) -> list[list[int]]:
    """`counts` (one int64 vector) of every rank of `group`, on the host."""
    gathered = [torch.empty_like(counts) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(gathered, counts, group=group)
        return torch.stack(gathered).tolist()
    except RuntimeError as error:
        raise RuntimeError(
            f"{where}: the exchange of token counts failed; a rank of this ep group stopped, or "
            f"never reached this layer within the process group's timeout ({error})"
        ) from error


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of `value` over the ranks of `group` (default: all), without a gradient."""
    return _reduce(value, dist.ReduceOp.SUM, group)


def max_over_ranks(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The maximum of `value` over the ranks of `group` (default: all), without a gradient.

    nan on one rank gives nan on all: gloo's own maximum loses it.
    """
    lost = _reduce(value.isnan().to(value.dtype), dist.ReduceOp.MAX, group)
    return _reduce(value, dist.ReduceOp.MAX, group).masked_fill(lost > 0, float("nan"))


def _reduce(value: Tensor, operation: Any, group: dist.ProcessGroup | None) -> Tensor:
    value = value.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value, op=operation, group=group)
    return value


def _all_to_all(
    rows: Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), recv_counts, send_counts, group=group)
    return received
