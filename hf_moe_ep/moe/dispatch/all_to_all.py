"""Send each token to the ranks that own its experts, and send the results back, by all-to-all.

Dispatch sends a token once to every other rank that owns at least one of its experts, together with
its expert ids and routing weights. The receiver computes its experts and adds up their weighted
outputs to one row. Combine sends this row back. Rows that stay on their rank are copied, never
sent. For example, two ranks own the experts {0 1} and {2 3}, and rank 0 has two tokens (top-2):

    expert_ids_TK = [[0, 3], [2, 3]]     rows to rank 1: t0, t1      (experts 3; 2 and 3)
                                         rows that stay: t0          (expert 0)

Sent rows are ordered by destination, then by token; the rows that stay come last:
`token_of_row_N = [0, 1, 0]`. Received rows are ordered by sender; the rows that stayed come last.

The expert ids and weights of all rows are sent in one message, after the hidden states. The ids are
floats in this message. The message must not be in bf16, which would round ids above 256.

`AllToAll.plan` computes the destination of every row. Before any row is sent, ranks all-gather one
small vector each (`counts.py`): rows per destination and pairs per expert. From these counts every
rank computes how many rows it receives. This is the layer's only host sync. After it the device is
idle until the host launches the next kernel. All kernels that do not need the counts are therefore
launched before the sync; only the selection of rows is left between the sync and the first
transfer.

`start` and `start_combine` return at once, `finish` waits. Each call is an autograd node
(`async_exchange.py`), so backward starts a transfer where forward waited for it, and waits where
forward started it. Transfers that overlap with computation in forward do so in backward:

    forward     start  >  finish  >  experts  >  start_combine  >  finish
    backward    wait   <  start   <  experts  <      wait       <  start

Backward computes the gradients of the experts' weights (`ops/expert_mlp.py`, `postpone_grads`)
after the last `start` and before the last `wait`, while the rows' gradients are transferred.
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
        num_experts: the number of experts on all ranks together; rank r owns experts r * L to
            (r + 1) * L - 1.
        num_chunks: the number of chunks in which the tokens of a layer are sent.
        max_rows: the largest number of rows that a rank may receive in one layer; None for no
            limit.
    """

    group: dist.ProcessGroup
    num_experts: int
    num_chunks: int = 1
    max_rows: int | None = None

    def plan(
        self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int = 0
    ) -> list[AllToAllExchange]:
        """Plan the exchanges of all chunks from one exchange of counts."""
        num_ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        num_local = self.num_experts // num_ranks
        sends_DT = find_destinations(expert_ids_TK // num_local, num_ranks)
        sends_of_chunks = sends_DT.tensor_split(self.num_chunks, dim=1)
        ids_of_chunks = expert_ids_TK.tensor_split(self.num_chunks)
        counts = []
        for sends, ids in zip(sends_of_chunks, ids_of_chunks, strict=True):
            counts += [sends.sum(1), count_pairs(ids, self.num_experts)]
        counts_exchange = start_counts(torch.cat(counts), self.group, header)
        # While the counts are exchanged, the device computes everything that does not need them.
        num_slots = min(num_ranks, expert_ids_TK.shape[1])
        orders = [order_rows(sends, rank, num_slots) for sends in sends_of_chunks]
        local_id_E = number_experts(self.num_experts, num_local, rank, expert_ids_TK.device)
        gathered = counts_exchange.wait()
        size = num_ranks + self.num_experts
        # tables[chunk][r] are the counts of rank r: rows per destination, then pairs per expert.
        tables = [
            [numbers[first : first + size] for numbers in gathered]
            for first in range(0, self.num_chunks * size, size)
        ]
        where = str(header)
        if self.max_rows is not None:
            all_counts = [counts for table in tables for counts in table]
            rows_D = [sum(counts[rank] for counts in all_counts) for rank in range(num_ranks)]
            check_max_rows(rows_D, self.max_rows, self.group, where)
        return [
            self._exchange(order, table, rank, local_id_E, where)
            for order, table in zip(orders, tables, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAll:
        """Share the process group with a copy of the model."""
        return self

    def _exchange(
        self, order: Order, table: list[list[int]], rank: int, local_id_E: Tensor, where: str
    ) -> AllToAllExchange:
        """Make the exchange of one chunk from the counts of all ranks, without a host sync."""
        num_ranks = len(table)
        num_local = self.num_experts // num_ranks
        first = num_ranks + rank * num_local
        local_experts = range(first, first + num_local)
        return AllToAllExchange.of_counts(
            order,
            self.group,
            rank,
            sends=table[rank][:num_ranks],
            receives=[counts[rank] for counts in table],
            local_id_E=local_id_E,
            counts_L=[sum(counts[expert] for counts in table) for expert in local_experts],
            where=where,
        )


@dataclass(frozen=True)
class AllToAllExchange:
    """The planned exchange of one chunk: the rows that this rank sends, keeps and receives.

    Attributes:
        token_of_row_N: the token of each row that is sent or stays, in the order of the module
            docstring; int32.
        slots_TJ: the rows of each token, see `ops/permute.py`; int32.
        local_id_E: the number of each expert on this rank; L for experts of other ranks.
        send_counts, recv_counts: the numbers of rows to and from each rank of the ep group; 0 for
            this rank.
        num_own: the number of rows that stay on this rank.
        counts_L: (row, expert) pairs per local expert.
        where: the position in the model, for errors.
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
        """Make an exchange from an order of rows and from the counts per rank.

        `sends` and `receives` include the rows that stay on this rank.
        """
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
        """Send every token to the ranks of its experts, with its weights in fp32 or wider."""
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
    """Copies tokens into rows, sends rows by all-to-all, and adds up the rows of each token."""

    def __init__(self, exchange: AllToAllExchange) -> None:
        super().__init__()
        self.exchange, self.counts_L = exchange, exchange.counts_L

    def for_combine(self) -> _RowWire:
        return _RowWire(self.exchange)

    def send_tokens(
        self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        exchange, top_k = self.exchange, ids_TK.shape[1]
        rows_RH = self._send_tokens(x_TH)
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        # Ids are sent as floats together with the weights, which saves a transfer. fp32 represents
        # all integers up to 2**24, but bf16 only those up to 256.
        routing_TX = torch.cat([weights_TK.to(wide), ids_TK.to(wide)], dim=1)
        routing_NX = routing_TX.index_select(0, exchange.token_of_row_N)
        routing_RX = self._send_rows(routing_NX, exchange.send_counts, exchange.recv_counts)
        return rows_RH, routing_RX[:, :top_k], routing_RX[:, top_k:]

    def local_ids(self, ids_RK: Tensor) -> Tensor:
        return self.exchange.local_id_E.take(ids_RK.long())

    def send_row_grads(self, grad_RH: Tensor | None, grad_RK: Tensor | None) -> list[Tensor | None]:
        return [None if grad is None else self.send_results(grad) for grad in (grad_RH, grad_RK)]

    def send_results(self, rows_RX: Tensor) -> Tensor:
        return self._send_rows(rows_RX, self.exchange.recv_counts, self.exchange.send_counts)

    def add_results(self, rows_NX: Tensor) -> Tensor:
        return add_rows(rows_NX, self.exchange.token_of_row_N, self.exchange.slots_TJ)

    def send_result_grads(self, grad_TH: Tensor) -> Tensor:
        return self._send_tokens(grad_TH)

    def _send_tokens(self, x_TH: Tensor) -> Tensor:
        """Start to send tokens to the ranks of their experts, and copy the tokens that stay."""
        exchange = self.exchange
        sent, received = exchange.num_sent, exchange.num_received
        received_RH = x_TH.new_empty(received + exchange.num_own, x_TH.shape[1])
        rows_NH = x_TH.index_select(0, exchange.token_of_row_N[:sent])
        self._start(rows_NH, received_RH[:received], exchange.send_counts, exchange.recv_counts)
        torch.index_select(x_TH, 0, exchange.token_of_row_N[sent:], out=received_RH[received:])
        return received_RH

    def _send_rows(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Start to send the first rows, and copy the last rows, which stay, to the end."""
        num_sent, num_received = sum(sends), sum(receives)
        received = rows.new_empty(num_received + len(rows) - num_sent, *rows.shape[1:])
        self._start(rows[:num_sent], received[:num_received], sends, receives)
        received[num_received:] = rows[num_sent:]
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


def find_destinations(rank_of_pair_TK: Tensor, num_ranks: int) -> Tensor:
    """Compute sends_DT, which is True where the rank owns at least one expert of the token."""
    sends_TD = rank_of_pair_TK.new_zeros(rank_of_pair_TK.shape[0], num_ranks, dtype=torch.bool)
    return sends_TD.scatter_(1, rank_of_pair_TK, True).t()


def number_experts(num_experts: int, num_local: int, rank: int, device: torch.device) -> Tensor:
    """Number the experts of `rank` from 0, and give all other experts the number L."""
    local_id_E = torch.full((num_experts,), num_local, device=device)
    first = rank * num_local
    local_id_E[first : first + num_local] = torch.arange(num_local, device=device)
    return local_id_E


class Order(NamedTuple):
    """The numbers of the rows that this rank sends or keeps.

    A table has one line per rank and one column per token. A cell with an x is a row: the token is
    sent to that rank (or stays). Rows are numbered line by line; the line of this rank is the last.
    On rank 0 of the module's example:

        table    t0 t1     numbers    t0 t1     slots_TJ = [[0, 2],    token_X = [0, 1, 0, ...]
        rank 1    x  x                 0  1                 [1, 3]]
        rank 0    x  .                 2  3

    All other cells get the number N, which means "no row" in `slots_TJ`. The host does not know the
    number of rows N before the counts are received: `token_X` has room for the largest possible N,
    and its first N entries are `token_of_row_N`.
    """

    token_X: Tensor
    slots_TJ: Tensor


def order_rows(sends_DT: Tensor, rank: int, num_slots: int) -> Order:
    """Number the rows that `rank` sends or keeps, without a host sync.

    `num_slots` is the largest number of rows that a token can have. Until backward, `num_slots`
    int32 numbers per token stay in memory.
    """
    num_ranks, num_tokens = sends_DT.shape
    sends_DT = torch.cat([sends_DT[:rank], sends_DT[rank + 1 :], sends_DT[rank : rank + 1]])
    end_Y = sends_DT.flatten().cumsum(0)
    num_rows = end_Y[-1:] if len(end_Y) else end_Y.new_zeros(1)
    row_DT = torch.where(sends_DT, end_Y.view(num_ranks, num_tokens) - 1, num_rows)
    token_DT = torch.arange(num_tokens, device=row_DT.device, dtype=torch.int32).expand_as(row_DT)
    token_X = token_DT.new_zeros(num_tokens * num_slots + 1)
    token_X.scatter_(0, row_DT.flatten(), token_DT.flatten())
    slots_TJ = row_DT.t().to(torch.int32)
    if num_slots < num_ranks:
        # Cells that are not rows have the largest number, so they are sorted to the end.
        slots_TJ = slots_TJ.sort(1).values[:, :num_slots]
    return Order(token_X, slots_TJ.contiguous())
