"""Send each token to the ranks that own its experts, and bring the results home.

Dispatch and combine are inverses. A token travels once to every other rank that holds at least one
of its experts, with its expert ids and routing weights beside it; the receiver runs its experts
and returns one row, already weighted and summed. Rows that stay on their rank are copied, never
sent. Two ranks, experts {0 1} and {2 3}, top-2, rank 0 has two tokens:

    expert_ids_TK = [[0, 3], [2, 3]]     rows to rank 1: t0, t1      (experts 3; 2 and 3)
                                         rows kept:      t0          (expert 0)

Rows lie destination by destination, in token order within one, those that stay last:
`token_of_row_N = [0, 1, 0]`. Rows that arrive lie in the order of their senders, own ones last.

`AllToAll.plan` decides what goes where. Before any row travels, ranks gather one small vector each
(`counts.py`): rows per destination, pairs per expert. It tells every rank how much it receives. It
is the layer's only host sync, behind which the device has nothing to do: so whatever can be is done
before it, and cutting the rows out alone stands between the counts and the first transfer.

`start` and `start_combine` return at once, `finish` waits. Each is an autograd node
(`async_exchange.py`), so backward starts a transfer where forward waited for it and waits where
forward started it: what overlaps in forward overlaps in backward.

    forward     start  >  finish  >  experts  >  start_combine  >  finish
    backward    wait   <  start   <  experts  <      wait       <  start

Between the last two of backward the gradients of the experts' weights are computed
(`ops/expert_mlp.py`, `postpone_grads`): the rows' gradients travel meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header
from hf_moe_ep.moe.dispatch.async_exchange import DispatchedRows, Wire
from hf_moe_ep.moe.dispatch.counts import check_max_rows, start_counts
from hf_moe_ep.ops.permute import add_rows, count_pairs
from hf_moe_ep.ranks.collectives import start_all_to_all


@dataclass(frozen=True)
class AllToAll:
    """The dispatcher of one ep group; see `hf_moe_ep.dispatcher.Dispatcher`.

    Args:
        num_experts: of all ranks together, the first ones on the first rank.
        num_chunks: parts in which the tokens travel.
        max_rows: what a rank may receive in one layer; None = no limit.
    """

    group: dist.ProcessGroup
    num_experts: int
    num_chunks: int = 1
    max_rows: int | None = None

    def plan(
        self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int = 0
    ) -> list[AllToAllExchange]:
        """Plan an exchange per chunk, all from one exchange of counts."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        local = self.num_experts // ranks
        sends_DT = find_destinations(expert_ids_TK // local, ranks)
        sends_of_chunks = sends_DT.tensor_split(self.num_chunks, dim=1)
        ids_of_chunks = expert_ids_TK.tensor_split(self.num_chunks)
        counts = []
        for sends, ids in zip(sends_of_chunks, ids_of_chunks, strict=True):
            counts += [sends.sum(1), count_pairs(ids, self.num_experts)]
        told = start_counts(torch.cat(counts), self.group, header)
        # While counts travel, the device prepares whatever needs none of them: once they are there
        # nothing stands between the host and the first rows.
        num_slots = min(ranks, expert_ids_TK.shape[1])
        orders = [order_rows(sends, rank, num_slots) for sends in sends_of_chunks]
        local_id_E = number_experts(self.num_experts, local, rank, expert_ids_TK.device)
        gathered = told.wait()
        size = ranks + self.num_experts
        # tables[chunk][r] is what rank r told: rows per destination, then pairs per expert.
        tables = [
            [told[first : first + size] for told in gathered]
            for first in range(0, self.num_chunks * size, size)
        ]
        where = str(header)
        if self.max_rows is not None:
            everything = [told for table in tables for told in table]
            rows_D = [sum(told[rank] for told in everything) for rank in range(ranks)]
            check_max_rows(rows_D, self.max_rows, self.group, where)
        return [
            self._exchange(order, table, rank, local_id_E, where)
            for order, table in zip(orders, tables, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAll:
        """The copy of a model runs in the same group."""
        return self

    def _exchange(
        self, order: Order, table: list[list[int]], rank: int, local_id_E: Tensor, where: str
    ) -> AllToAllExchange:
        """Read off what goes where, now that every rank has told; asks nothing of the device."""
        ranks = len(table)
        local = self.num_experts // ranks
        first = ranks + rank * local
        return AllToAllExchange.of_counts(
            order,
            self.group,
            rank,
            sends=table[rank][:ranks],
            receives=[told[rank] for told in table],
            local_id_E=local_id_E,
            counts_L=[sum(told[first + expert] for told in table) for expert in range(local)],
            where=where,
        )


@dataclass(frozen=True)
class AllToAllExchange:
    """Where the rows of some tokens go, and what this rank gets.

    Attributes:
        token_of_row_N: token of each row that is sent or kept, in the module's order; int32.
        slots_TJ: rows of each token, see `ops/permute.py`; int32.
        local_id_E: what each expert is called on this rank, L where it is not here.
        send_counts, recv_counts: rows to and from each rank of the ep group; own rank: 0.
        num_own: rows that stay.
        counts_L: (row, expert) pairs per local expert.
        where: the place in the model, for errors.
    """

    group: dist.ProcessGroup
    token_of_row_N: Tensor
    slots_TJ: Tensor
    local_id_E: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    num_own: int
    counts_L: list[int]
    where: str

    @classmethod
    def of_counts(
        cls,
        order: Order,
        group: dist.ProcessGroup,
        rank: int,
        *,
        sends: Sequence[int],
        receives: Sequence[int],
        local_id_E: Tensor,
        counts_L: list[int],
        where: str,
    ) -> AllToAllExchange:
        """Cut an order of rows to those that are; `sends` and `receives` count own ones too."""
        return cls(
            group=group,
            token_of_row_N=order.token_X[: sum(sends)],
            slots_TJ=order.slots_TJ,
            local_id_E=local_id_E,
            send_counts=[*sends[:rank], 0, *sends[rank + 1 :]],
            recv_counts=[*receives[:rank], 0, *receives[rank + 1 :]],
            num_own=sends[rank],
            counts_L=counts_L,
            where=where,
        )

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> DispatchedRows:
        """Send every token to the ranks of its experts; weights in fp32 or wider."""
        return DispatchedRows(_RowWire(self), x_TH, weights_TK, expert_ids_TK)

    @property
    def num_tokens(self) -> int:
        return len(self.slots_TJ)

    @property
    def num_sent(self) -> int:
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)


class _RowWire(Wire):
    """Rows by all-to-all, tokens expanded into rows before and added up behind it."""

    def __init__(self, exchange: AllToAllExchange) -> None:
        super().__init__()
        self.exchange, self.counts_L = exchange, exchange.counts_L

    def homeward(self) -> _RowWire:
        return _RowWire(self.exchange)

    def send_tokens(
        self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        exchange, top_k = self.exchange, ids_TK.shape[1]
        rows_RH = self._send_out(x_TH)
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        # Ids ride along as floats (exact below 2**24): one message less per layer.
        routing_TX = torch.cat([weights_TK.to(wide), ids_TK.to(wide)], dim=1)
        routing_NX = routing_TX.index_select(0, exchange.token_of_row_N)
        routing_RX = self._travel(routing_NX, exchange.send_counts, exchange.recv_counts)
        return rows_RH, routing_RX[:, :top_k], routing_RX[:, top_k:]

    def local_ids(self, ids_RK: Tensor) -> Tensor:
        return self.exchange.local_id_E.take(ids_RK.long())

    def send_row_grads(self, grad_RH: Tensor | None, grad_RK: Tensor | None) -> list[Tensor | None]:
        return [None if grad is None else self.send_results(grad) for grad in (grad_RH, grad_RK)]

    def send_results(self, rows_RX: Tensor) -> Tensor:
        return self._travel(rows_RX, self.exchange.recv_counts, self.exchange.send_counts)

    def add_results(self, rows_NX: Tensor) -> Tensor:
        return add_rows(rows_NX, self.exchange.token_of_row_N, self.exchange.slots_TJ)

    def send_result_grads(self, grad_TH: Tensor) -> Tensor:
        return self._send_out(grad_TH)

    def _send_out(self, x_TH: Tensor) -> Tensor:
        """Send tokens to the ranks of their experts; what stays is copied meanwhile."""
        exchange, sent, here = self.exchange, self.exchange.num_sent, self.exchange.num_received
        received_RH = x_TH.new_empty(here + exchange.num_own, x_TH.shape[1])
        rows_NH = x_TH.index_select(0, exchange.token_of_row_N[:sent])
        self._start(rows_NH, received_RH[:here], exchange.send_counts, exchange.recv_counts)
        torch.index_select(x_TH, 0, exchange.token_of_row_N[sent:], out=received_RH[here:])
        return received_RH

    def _travel(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Send rows as they are, those that stay being the last ones on both sides."""
        gone, come = sum(sends), sum(receives)
        received = rows.new_empty(come + len(rows) - gone, *rows.shape[1:])
        self._start(rows[:gone], received[:come], sends, receives)
        received[come:] = rows[gone:]
        return received

    def _start(self, rows: Tensor, out: Tensor, sends: list[int], receives: list[int]) -> None:
        transfer = start_all_to_all(
            out,
            rows,
            send_counts=sends,
            recv_counts=receives,
            group=self.exchange.group,
            where=self.exchange.where,
        )
        self.transfers.append(transfer)


def find_destinations(rank_of_pair_TK: Tensor, ranks: int) -> Tensor:
    """Mark in sends_DT which rank gets which token."""
    sends_TD = rank_of_pair_TK.new_zeros(rank_of_pair_TK.shape[0], ranks, dtype=torch.bool)
    return sends_TD.scatter_(1, rank_of_pair_TK, True).t()


def number_experts(num_experts: int, local: int, rank: int, device: torch.device) -> Tensor:
    """Number the experts of `rank` from its first one, and give all others the number L."""
    local_id_E = torch.full((num_experts,), local, device=device)
    local_id_E[rank * local : (rank + 1) * local] = torch.arange(local, device=device)
    return local_id_E


class Order(NamedTuple):
    """In which order rows lie: numbers for the cells (place, token) of a table that are rows.

    Places are the ranks in order but the own one last. Rank 0 of the module's example:

        table    t0 t1     numbers    t0 t1     slots_TJ = [[0, 2],    token_X = [0, 1, 0, ...]
        rank 1    x  x                 0  1                 [1, 3]]
        rank 0    x  .                 2  3

    The cell that is no row has the number after the last row's, which `slots_TJ` means by "no
    row". How many rows there are only the counts say: `token_X` has room for all there can be, and
    its first N are `token_of_row_N`.
    """

    token_X: Tensor
    slots_TJ: Tensor


def order_rows(sends_DT: Tensor, rank: int, num_slots: int) -> Order:
    """Order the rows that `rank` sends or keeps, without asking the device how many there are.

    `num_slots` is the most rows that a token can have. What backward keeps of the order is int32,
    `num_slots` numbers a token each.
    """
    ranks, num_tokens = sends_DT.shape
    sends_DT = torch.cat([sends_DT[:rank], sends_DT[rank + 1 :], sends_DT[rank : rank + 1]])
    end_Y = sends_DT.flatten().cumsum(0)
    num_rows = end_Y[-1:] if len(end_Y) else end_Y.new_zeros(1)
    row_DT = torch.where(sends_DT, end_Y.view(ranks, num_tokens) - 1, num_rows)
    token_DT = torch.arange(num_tokens, device=row_DT.device, dtype=torch.int32).expand_as(row_DT)
    token_X = token_DT.new_zeros(num_tokens * num_slots + 1)
    token_X.scatter_(0, row_DT.flatten(), token_DT.flatten())
    slots_TJ = row_DT.t().to(torch.int32)
    if num_slots < ranks:
        # Those that are no rows have the largest number.
        slots_TJ = slots_TJ.sort(1).values[:, :num_slots]
    return Order(token_X, slots_TJ.contiguous())
