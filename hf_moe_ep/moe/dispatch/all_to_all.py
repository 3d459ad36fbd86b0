"""Send each token to the ranks that own its experts, and bring the results home.

Dispatch and combine are inverses. A token travels once to every other rank that holds at least one
of its experts, with its expert ids and routing weights beside it; the receiver runs its experts
and returns one row, already weighted and summed. Rows that stay on their rank are copied, never
sent. Two ranks, experts {0 1} and {2 3}, top-2, rank 0 has two tokens:

    expert_ids_TK = [[0, 3], [2, 3]]     rows to rank 1: t0, t1      (experts 3; 2 and 3)
                                         rows kept:      t0          (expert 0)

Rows lie destination by destination, in token order within one, those that stay last:
`token_of_row_N = [0, 1, 0]`. Rows that arrive lie in the order of their senders, own ones last.

`plan_dispatch` decides what goes where. Before any row travels, ranks gather one small vector each
(`header.py`): rows per destination, pairs per expert. It tells every rank how much it receives, and
it is the layer's only host sync.

`start` and `start_combine` return at once, `finish` waits. Each is an autograd node, so backward
starts a transfer where forward waited for it and waits where forward started it: what overlaps in
forward overlaps in backward.

    forward     start  >  finish  >  experts  >  start_combine  >  finish
    backward    wait   <  start   <  experts  <      wait       <  start

Between the last two of backward the gradients of the experts' weights are computed
(`ops/expert_mlp.py`, `postpone_grads`): the rows' gradients travel meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.moe.dispatch.async_exchange import CombinedRows, Wire
from hf_moe_ep.moe.dispatch.counts import Header, check_max_rows, exchange_counts
from hf_moe_ep.ops.autograd import mark_without_grad, nothing
from hf_moe_ep.ops.permute import add_rows, count_pairs, invert
from hf_moe_ep.ranks.collectives import start_all_to_all


@dataclass(frozen=True)
class DispatchPlan:
    """Where the rows of some tokens go, and what this rank gets.

    Attributes:
        token_of_row_N: token of each row that is sent or kept, in the module's order.
        destination_N: rank that each row goes to.
        slots_TJ: rows of each token, see `ops/permute.py`.
        send_counts, recv_counts: rows to and from each rank of the ep group; own rank: 0.
        num_own: rows that stay.
        counts_L: (row, expert) pairs per local expert.
        where: the place in the model, for errors.
    """

    group: dist.ProcessGroup
    token_of_row_N: Tensor
    destination_N: Tensor
    slots_TJ: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    num_own: int
    counts_L: list[int]
    where: str

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> DispatchedRows:
        """Send every token to the ranks of its experts; differentiable in tokens and weights."""
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        wire = _RowWire(self)
        *rows, ids_RK = _StartDispatch.apply(wire, x_TH, weights_TK.to(wide), expert_ids_TK)
        return DispatchedRows(wire, tuple(rows), ids_RK)

    @property
    def num_tokens(self) -> int:
        return len(self.slots_TJ)

    @property
    def num_sent(self) -> int:
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)


def plan_dispatch(
    expert_ids_TK: Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    header: Header,
    num_chunks: int = 1,
    max_rows: int | None = None,
) -> list[DispatchPlan]:
    """One plan for each of `num_chunks` consecutive parts of the tokens, from one exchange.

    Raises:
        RuntimeError: on every rank of the group, where ranks are at different places of the
            model, or where one would get more than `max_rows` rows in this layer.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sends_DT = _destinations(expert_ids_TK // (num_experts // ranks), ranks)
    parts = list(
        zip(
            sends_DT.tensor_split(num_chunks, dim=1),
            expert_ids_TK.tensor_split(num_chunks),
            strict=True,
        )
    )
    counts = [torch.cat([sends.sum(1), count_pairs(ids, num_experts)]) for sends, ids in parts]
    # All that needs no counts is asked for before the host waits for them.
    orders = [_order(sends_DT, rank) for sends_DT, _ in parts]
    gathered = exchange_counts(torch.cat(counts), group, header)
    size = ranks + num_experts
    tables = [[row[i : i + size] for row in gathered] for i in range(0, num_chunks * size, size)]
    where = Header.describe(header.as_list())
    if max_rows is not None:
        check_max_rows(tables, max_rows, group, where)
    num_slots = min(ranks, expert_ids_TK.shape[1])
    return [
        _plan(order, table, rank, num_slots, group, where)
        for order, table in zip(orders, tables, strict=True)
    ]


class DispatchedRows:
    """Rows on their way to the ranks of their experts; made by `DispatchPlan.start`."""

    def __init__(self, wire: _RowWire, rows: tuple[Tensor, Tensor], ids_RK: Tensor) -> None:
        self.plan = wire.plan
        self._wire, self._rows, self._ids_RK = wire, rows, ids_RK

    @property
    def counts_L(self) -> list[int]:
        """(row, expert) pairs per local expert; to be read after `finish`."""
        return self.plan.counts_L

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """rows_RH, weights_RK in fp32 or wider, and expert_ids_RK: local, L = "not here"."""
        rows_RH, weights_RK = _FinishDispatch.apply(self._wire, *self._rows)
        return rows_RH, weights_RK, self._ids_RK.long()

    def start_combine(self, rows_RH: Tensor) -> CombinedRows:
        """Send the experts' result of every row back to the rank of its token."""
        return CombinedRows(_RowWire(self.plan), rows_RH)


class _RowWire(Wire):
    def __init__(self, plan: DispatchPlan) -> None:
        super().__init__()
        self.plan = plan

    def send_results(self, rows_RH: Tensor) -> Tensor:
        return self.back(rows_RH)

    def take_results(self, arrived: Tensor) -> Tensor:
        return self.add(arrived)

    def send_grads(self, grad_TH: Tensor) -> Tensor:
        return self.out(grad_TH)

    def out(self, x_TX: Tensor) -> Tensor:
        """received_RX, filled once the transfer is done: tokens to the ranks of their experts."""
        plan, sent, here = self.plan, self.plan.num_sent, self.plan.num_received
        received_RX = x_TX.new_empty(here + plan.num_own, *x_TX.shape[1:])
        rows_NX = x_TX.index_select(0, plan.token_of_row_N[:sent])
        self._start(rows_NX, received_RX[:here], plan.send_counts, plan.recv_counts)
        torch.index_select(x_TX, 0, plan.token_of_row_N[sent:], out=received_RX[here:])
        return received_RX

    def out_rows(self, rows_NX: Tensor) -> Tensor:
        """The same for rows that differ by destination."""
        return self._travel(rows_NX, self.plan.send_counts, self.plan.recv_counts)

    def back(self, rows_RX: Tensor) -> Tensor:
        """received_NX, filled once the transfer is done: rows to the ranks of their tokens."""
        return self._travel(rows_RX, self.plan.recv_counts, self.plan.send_counts)

    def add(self, rows_NX: Tensor) -> Tensor:
        return add_rows(rows_NX, self.plan.token_of_row_N, self.plan.slots_TJ)

    def _travel(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        gone, come = sum(sends), sum(receives)
        received = rows.new_empty(come + len(rows) - gone, *rows.shape[1:])
        self._start(rows[:gone], received[:come], sends, receives)
        received[come:] = rows[gone:]
        return received

    def _start(self, rows: Tensor, out: Tensor, sends: list[int], receives: list[int]) -> None:
        group, where = self.plan.group, self.plan.where
        self.transfers.append(
            start_all_to_all(
                out, rows, send_counts=sends, recv_counts=receives, group=group, where=where
            )
        )


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wire: _RowWire, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.wire, plan, top_k = wire, wire.plan, ids_TK.shape[1]
        wire.needs = ctx.needs_input_grad[1:3]
        rows_RH = wire.out(x_TH)
        local = len(plan.counts_L)
        ids_NK = ids_TK.index_select(0, plan.token_of_row_N)
        ids_NK = ids_NK - (plan.destination_N * local).unsqueeze(1)
        ids_NK = ids_NK.masked_fill((ids_NK < 0) | (ids_NK >= local), local)
        weights_NK = weights_TK.index_select(0, plan.token_of_row_N)
        # Ids ride along as floats (exact below 2**24): one message less per layer.
        routing_R2K = wire.out_rows(torch.cat([weights_NK, ids_NK.to(weights_NK)], dim=1))
        weights_RK, ids_RK = routing_R2K[:, :top_k], routing_R2K[:, top_k:]
        mark_without_grad(ctx, (rows_RH, weights_RK, ids_RK), (*wire.needs, False))
        return rows_RH, weights_RK, ids_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if rows is None else ctx.wire.add(rows) for rows in ctx.wire.wait()]
        return (None, *grads, None)


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wire: _RowWire, rows_RH: Tensor, weights_RK: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.wire = wire
        ctx.set_materialize_grads(False)
        wire.wait()
        weights_RK = weights_RK.contiguous()
        ctx.like = rows_RH.new_empty(0), weights_RK.new_empty(0)
        ctx.shapes = rows_RH.shape, weights_RK.shape
        mark_without_grad(ctx, (rows_RH, weights_RK), ctx.needs_input_grad[1:])
        return rows_RH, weights_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wire: _RowWire = ctx.wire
        inputs = list(zip(grads, ctx.like, ctx.shapes, wire.needs, strict=True))
        # A gradient that is zero is sent too: every rank takes part in the same exchanges.
        wire.brought = [
            wire.back(like.new_zeros(shape) if grad is None else grad) if needed else None
            for grad, like, shape, needed in inputs
        ]
        return (
            None,
            *(nothing(like, shape) if needed else None for _, like, shape, needed in inputs),
        )


def _destinations(rank_of_pair_TK: Tensor, ranks: int) -> Tensor:
    sends_TD = rank_of_pair_TK.new_zeros(rank_of_pair_TK.shape[0], ranks, dtype=torch.bool)
    return sends_TD.scatter_(1, rank_of_pair_TK, True).t()


def _order(sends_DT: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cells (token, place of its destination, own rank last) that send a row, in the order of the
    rows and followed by those that do not; and the rows of each token before a cell's.
    """
    num_tokens = max(sends_DT.shape[1], 1)
    sends_DT = torch.cat([sends_DT[:rank], sends_DT[rank + 1 :], sends_DT[rank : rank + 1]])
    # argsort, because nonzero() would ask the device how many there are.
    cells = (~sends_DT).flatten().to(torch.uint8).argsort(stable=True)
    return cells % num_tokens, cells // num_tokens, sends_DT.cumsum(0) - 1


def _plan(
    order: tuple[Tensor, Tensor, Tensor],
    table: list[list[int]],
    rank: int,
    num_slots: int,
    group: dist.ProcessGroup,
    where: str,
) -> DispatchPlan:
    """`table[r]` is what rank r told: rows per destination, then pairs per expert."""
    token, place, slot_DT = order
    ranks, num_tokens = slot_DT.shape
    local = (len(table[0]) - ranks) // ranks
    first = ranks + rank * local
    own = table[rank][rank]
    send_counts = [0 if other == rank else table[rank][other] for other in range(ranks)]
    recv_counts = [0 if other == rank else table[other][rank] for other in range(ranks)]
    num_rows = sum(send_counts) + own
    token_of_row_N, place_N = token[:num_rows], place[:num_rows]
    destination_N = torch.where(place_N == ranks - 1, rank, place_N + (place_N >= rank))
    slots_TJ = invert(token_of_row_N, slot_DT[place_N, token_of_row_N], (num_tokens, num_slots))
    return DispatchPlan(
        group=group,
        token_of_row_N=token_of_row_N,
        destination_N=destination_N,
        slots_TJ=slots_TJ,
        send_counts=send_counts,
        recv_counts=recv_counts,
        num_own=own,
        counts_L=[sum(row[first + expert] for row in table) for expert in range(local)],
        where=where,
    )
