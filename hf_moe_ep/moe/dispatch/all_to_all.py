"""Send each token to the ranks that own its experts, and send the results back, by all-to-all.

Dispatch sends a token once to every other rank that owns at least one of its experts, together with
its expert ids and routing weights. The receiver computes its experts and adds up their weighted
outputs to one row. Combine sends this row back. Rows that stay on their rank are copied, never
sent. For example, two ranks own the experts {0 1} and {2 3}, and rank 0 has two tokens (top-2):

    expert_ids_TK = [[0, 3], [2, 3]]     rows to rank 1: t0, t1      (experts 3; 2 and 3)
                                         rows that stay: t0          (expert 0)

Sent rows are ordered by destination, then by token, and the rows that stay follow:
`token_of_row_N = [0, 1, 0]`. Received rows are ordered by sender, and the rows that stayed follow.

A row and its routing are one message (`dispatcher.Tokens`, `ops/columns.py`): the routing weights
and the expert ids are stored after the hidden states. Likewise the gradients of the routing weights
are sent after the gradient of their row. Each chunk of tokens therefore has four transfers: rows,
results, and the gradients of both. One more transfer has the counts of all chunks.

`AllToAll.start_plan` computes the destination of every row. Before any row is sent, each rank sends
a small vector to every other rank (`counts.py`): the number of rows that the receiver will get from
it, and the number of its pairs for each of the receiver's experts. The device adds up the pairs of
all ranks, and the host reads the sums. This is the layer's only host sync. After the sync the
device is idle until the host launches the next kernel. All kernels that do not need the counts are
therefore launched before the sync; only the selection of rows is left between the sync and the
first transfer.

`async_exchange.py` shows which calls start a transfer and which wait, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.async_exchange import DispatchedRows, Wire
from hf_moe_ep.moe.dispatch.constants import Constants
from hf_moe_ep.moe.dispatch.counts import CountsExchange, exchange_counts
from hf_moe_ep.ops.columns import join_columns, split_columns
from hf_moe_ep.ops.permute import add_rows, count_pairs
from hf_moe_ep.ranks.collectives import start_all_to_all


@dataclass(frozen=True)
class AllToAll:
    """The dispatcher of one ep group; see `hf_moe_ep.dispatcher.Dispatcher`.

    Args:
        num_experts: the number of experts on all ranks together; rank r owns experts r * L to
            (r + 1) * L - 1.
        num_chunks: the number of chunks into which the tokens of a layer are split.
        max_rows: the largest number of rows that a rank may receive in one layer; None for no
            limit.
        triton_sums: False if torch sums the rows of each token, although a Triton kernel could.
    """

    group: dist.ProcessGroup
    num_experts: int
    num_chunks: int = 1
    max_rows: int | None = None
    triton_sums: bool = True

    constants: Constants = field(default_factory=Constants, compare=False, repr=False)

    def start_plan(
        self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int = 0
    ) -> AllToAllPlanning:
        """Plan the exchanges of all chunks from one exchange of counts."""
        num_ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        num_local = self.num_experts // num_ranks
        sends_DT = find_destinations(expert_ids_TK // num_local, num_ranks)
        sends_of_chunks = sends_DT.tensor_split(self.num_chunks, dim=1)
        ids_of_chunks = expert_ids_TK.tensor_split(self.num_chunks)
        rows_of_chunks = [sends.sum(1) for sends in sends_of_chunks]
        pairs_of_chunks = [
            count_pairs(ids, self.num_experts + 1)[: self.num_experts] for ids in ids_of_chunks
        ]
        tables = [
            table
            for rows_D, pairs_E in zip(rows_of_chunks, pairs_of_chunks, strict=True)
            for table in (rows_D.unsqueeze(1), pairs_E.view(num_ranks, num_local))
        ]
        counts = exchange_counts(tables, rows_of_chunks, self.group, header, self.max_rows)
        # While the counts are exchanged, the device computes everything that does not need them.
        rows_per_token = min(num_ranks, expert_ids_TK.shape[1])
        device = expert_ids_TK.device
        return AllToAllPlanning(
            self.group,
            rank,
            counts,
            rows_of_chunks,
            pairs_of_chunks,
            [order_rows(sends, rank, rows_per_token, self.constants) for sends in sends_of_chunks],
            self.constants.number_experts(self.num_experts, num_local, rank, device),
            self.triton_sums,
        )

    @property
    def leaves_out_padding(self) -> bool:
        return True

    def prepare(self, tokens: Tokens) -> None:
        tokens.join()

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAll:
        """Share the process group with a copy of the model."""
        return self


@dataclass(frozen=True)
class AllToAllPlanning:
    """A plan whose counts are being exchanged; see `hf_moe_ep.dispatcher.Planning`.

    Attributes:
        rows_of_chunks, pairs_of_chunks: for each chunk, the number of rows that this rank sends to
            each rank, and the number of this rank's pairs for each expert.
        orders: the order of the rows of each chunk.
    """

    group: dist.ProcessGroup
    rank: int
    counts: CountsExchange
    rows_of_chunks: Sequence[Tensor]
    pairs_of_chunks: Sequence[Tensor]
    orders: Sequence[Order]
    local_id_E: Tensor
    triton_sums: bool

    @property
    def pairs_E(self) -> Tensor:
        return sum(self.pairs_of_chunks[1:], start=self.pairs_of_chunks[0])

    def finish(self) -> list[AllToAllExchange]:
        values = self.counts.read(self._summarise)
        return [
            AllToAllExchange.from_counts(
                order,
                self.group,
                self.rank,
                sends=sends,
                receives=receives,
                local_id_E=self.local_id_E,
                counts_L=counts_L,
                where=self.counts.header,
                triton_sums=self.triton_sums,
            )
            for order, sends, receives, counts_L in zip(
                self.orders, values[::3], values[1::3], values[2::3], strict=True
            )
        ]

    def _summarise(self, counts_DX: Tensor) -> list[Tensor]:
        """Return three vectors for each chunk.

        The vectors have the number of rows to each rank, the number of rows from each rank, and the
        number of pairs of each local expert on all ranks. Line r of `counts_DX` has the counts that
        rank r has sent.
        """
        summed_X = counts_DX.sum(0)
        size = len(summed_X) // len(self.orders)
        vectors = []
        for index, rows_D in enumerate(self.rows_of_chunks):
            first = index * size
            vectors += [rows_D, counts_DX[:, first], summed_X[first + 1 : first + size]]
        return vectors


@dataclass(frozen=True)
class AllToAllExchange:
    """The planned exchange of one chunk: the rows that this rank sends, keeps and receives.

    Attributes:
        token_of_row_N: the token of each row that is sent or stays, in the order of the module
            docstring; int32.
        row_TJ: the rows of each token (`ops/permute.py`); int32.
        local_id_E: the number of each expert on this rank; L for experts of other ranks, and for
            the additional id E, which means "no expert".
        send_counts, recv_counts: the numbers of rows to and from each rank of the ep group; 0 for
            this rank.
        num_own: the number of rows that stay on this rank.
        counts_L: (row, expert) pairs per local expert.
        where: the position in the model. Its text is made only for an error.
        triton_sums: see `AllToAll`.
    """

    group: dist.ProcessGroup
    token_of_row_N: Tensor
    row_TJ: Tensor
    local_id_E: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    num_own: int
    counts_L: list[int]
    where: object
    triton_sums: bool

    @classmethod
    def from_counts(
        cls,
        order: Order,
        group: dist.ProcessGroup,
        rank: int,
        *,
        sends: Sequence[int],
        receives: Sequence[int],
        local_id_E: Tensor,
        counts_L: list[int],
        where: object,
        triton_sums: bool,
    ) -> AllToAllExchange:
        """Make an exchange from the order of its rows and from the number of rows per rank.

        `sends` and `receives` count the rows that stay on this rank as well.
        """
        return cls(
            group=group,
            token_of_row_N=order.token_X[: sum(sends)],
            row_TJ=order.row_TJ,
            local_id_E=local_id_E,
            send_counts=[*sends[:rank], 0, *sends[rank + 1 :]],
            recv_counts=[*receives[:rank], 0, *receives[rank + 1 :]],
            num_own=sends[rank],
            counts_L=counts_L,
            where=where,
            triton_sums=triton_sums,
        )

    def start(self, tokens: Tokens) -> DispatchedRows:
        """Start to send every token to the ranks of its experts."""
        return DispatchedRows(_RowWire(self), tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.row_TJ)

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

    def make_combine_wire(self) -> _RowWire:
        return _RowWire(self.exchange)

    def send_tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        return tokens.split_messages(self._send_tokens(tokens.take_messages()))

    def convert_ids(self, ids_RK: Tensor) -> Tensor:
        return self.exchange.local_id_E.take(ids_RK.long())

    def send_row_grads(self, grad_RH: Tensor | None, grad_RK: Tensor | None) -> list[Tensor | None]:
        if grad_RH is None or grad_RK is None:
            grads = (grad_RH, grad_RK)
            return [None if grad is None else self.send_results(grad) for grad in grads]
        received_NI = self.send_results(join_columns(grad_RH, grad_RK))
        hidden, top_k = grad_RH.shape[1], grad_RK.shape[1]
        return list(split_columns(received_NI, hidden, top_k, grad_RK.dtype))

    def send_results(self, rows_RX: Tensor) -> Tensor:
        return self._send_rows(rows_RX, self.exchange.recv_counts, self.exchange.send_counts)

    def add_results(self, rows_NX: Tensor, dtype: torch.dtype) -> Tensor:
        token_of_row_N, row_TJ = self.exchange.token_of_row_N, self.exchange.row_TJ
        triton = self.exchange.triton_sums
        return add_rows(rows_NX, token_of_row_N, row_TJ, dtype, triton=triton)

    def send_result_grads(self, grad_TH: Tensor) -> Tensor:
        return self._send_tokens(grad_TH)

    def _send_tokens(self, x_TX: Tensor) -> Tensor:
        """Start to send tokens to the ranks of their experts, and copy the tokens that stay."""
        exchange = self.exchange
        sent, received = exchange.num_sent, exchange.num_received
        received_RX = x_TX.new_empty(received + exchange.num_own, x_TX.shape[1])
        rows_NX = x_TX.index_select(0, exchange.token_of_row_N[:sent])
        self._start(rows_NX, received_RX[:received], exchange.send_counts, exchange.recv_counts)
        torch.index_select(x_TX, 0, exchange.token_of_row_N[sent:], out=received_RX[received:])
        return received_RX

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
    """Compute sends_DT, which is True where the rank owns at least one expert of the token.

    In `rank_of_pair_TK`, `num_ranks` means "no rank": such a pair is not sent.
    """
    shape = rank_of_pair_TK.shape[0], num_ranks + 1
    sends_TX = rank_of_pair_TK.new_zeros(shape, dtype=torch.bool)
    return sends_TX.scatter_(1, rank_of_pair_TK, True).t()[:num_ranks]


class Order(NamedTuple):
    """The numbers of the rows that this rank sends or keeps.

    A table has one line per rank and one column per token. A cell with an x is a row: the token is
    sent to the rank of this line (or stays). Rows are numbered line by line; the line of this rank
    is the last. On rank 0 of the module's example:

        table    t0 t1     numbers    t0 t1     row_TJ = [[0, 2],    token_X = [0, 1, 0, ...]
        rank 1    x  x                 0  1                 [1, 3]]
        rank 0    x  .                 2  3

    All other cells get the number N, which means "no row" in `row_TJ`. The host does not know the
    number of rows N before the counts are received: `token_X` has room for the largest possible N,
    and its first N entries are `token_of_row_N`.
    """

    token_X: Tensor
    row_TJ: Tensor


def order_rows(sends_DT: Tensor, rank: int, rows_per_token: int, constants: Constants) -> Order:
    """Number the rows that `rank` sends or keeps, without a host sync.

    `rows_per_token` is the largest number of rows that a token can have. Until backward, this many
    int32 numbers per token stay in memory.
    """
    num_ranks, num_tokens = sends_DT.shape
    sends_DT = torch.cat([sends_DT[:rank], sends_DT[rank + 1 :], sends_DT[rank : rank + 1]])
    end_Y = sends_DT.flatten().cumsum(0)
    num_rows = end_Y[-1:] if len(end_Y) else end_Y.new_zeros(1)
    row_DT = torch.where(sends_DT, end_Y.view(num_ranks, num_tokens) - 1, num_rows)
    token_Y = constants.list_cell_tokens(num_ranks, num_tokens, row_DT.device)
    token_X = token_Y.new_zeros(num_tokens * rows_per_token + 1)
    token_X.scatter_(0, row_DT.flatten(), token_Y)
    row_TJ = row_DT.t().to(torch.int32, memory_format=torch.contiguous_format)
    if rows_per_token < num_ranks:
        # Cells that are not rows have the largest number, so they are sorted to the end.
        row_TJ = row_TJ.sort(1).values[:, :rows_per_token].contiguous()
    return Order(token_X, row_TJ)
