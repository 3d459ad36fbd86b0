"""Send each token to a node once, then inside the node to each rank once; results likewise.

Links between nodes are many times slower than links inside a node. A token is therefore sent to
another node at most once, however many ranks of that node own experts of the token. It goes to the
rank that has the sender's local rank on that node, and this rank forwards it to the others. Results
are added up inside their node first, so one row per token and node is sent back. With nodes {0 1}
and {2 3}, one expert per rank, these are the tokens of rank 0:

            experts    crosses to    is forwarded there to    in its own node
    t0      2 3        rank 2        3, and stays             -
    t1      1 3        rank 2        3                        to 1

Two rows leave the node, where `all_to_all.py` would send three. Dispatch and combine, forward and
backward together send four rows between nodes for each distinct (token, other node) pair, which is
the minimum. A router that chooses a token's experts from few groups, as DeepSeek-V3 does from 4 of
8, makes such pairs rarer if every group lies on one node. The dispatcher needs no option for that.

Each of the two legs is an exchange of `all_to_all.py`, with its autograd nodes. The first leg runs
between the ranks that have one local rank; its destinations are nodes. The second leg runs between
the ranks of a node; its tokens are the rows of the first leg, first those of other nodes, then
those of this rank. Backward runs the legs in reverse: gradients as well are added up inside a node
before they are sent to another.

One exchange of counts plans both legs. Every rank sends its numbers of rows per node and per rank,
and from those of all ranks each rank computes how many rows it will forward. The expert ids that
are sent with the rows say which rows these are; the device orders the rows after they were
received, without a host sync.

Rows are sent between nodes while experts run, as in `all_to_all.py`. The second leg does not
overlap with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header
from hf_moe_ep.moe.dispatch.all_to_all import (
    AllToAllExchange,
    Order,
    find_destinations,
    number_experts,
    order_rows,
)
from hf_moe_ep.moe.dispatch.async_exchange import CombinedRows, DispatchedRows
from hf_moe_ep.moe.dispatch.counts import check_max_rows, start_counts
from hf_moe_ep.ops.permute import count_pairs


@dataclass(frozen=True)
class Seat:
    """The node of a rank, and its place (local rank) there.

    The ep group has `nodes` times `places` ranks, node by node.
    """

    nodes: int
    places: int
    node: int
    place: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.places

    def column(self, place: int) -> list[int]:
        """List the ranks that have this local rank on their nodes."""
        return [node * self.places + place for node in range(self.nodes)]

    def neighbours(self) -> list[int]:
        """List the ranks of this node."""
        return [self.node * self.places + place for place in range(self.places)]


@dataclass(frozen=True)
class Hierarchical:
    """The dispatcher of one ep group on several nodes; see `hf_moe_ep.dispatcher.Dispatcher`.

    Args:
        group: the ep group, node by node, with equally many ranks on each.
        between: the ranks that have the local rank of this one on their nodes.
        inside: the ranks of this node.
        num_experts: the number of experts on all ranks together; the first rank owns the first.
        num_chunks: the number of chunks in which the tokens of a layer are sent.
        max_rows: the most rows that a rank may receive in one layer for its own experts; None for
            no limit.
    """

    group: dist.ProcessGroup
    between: dist.ProcessGroup
    inside: dist.ProcessGroup
    num_experts: int
    num_chunks: int = 1
    max_rows: int | None = None

    def plan(
        self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int = 0
    ) -> list[HierarchicalExchange]:
        """Plan the exchanges of all chunks from one exchange of counts."""
        seat, top_k = self._seat(), expert_ids_TK.shape[1]
        chunks = [
            find_crossings(ids, seat, self.num_experts)
            for ids in expert_ids_TK.tensor_split(self.num_chunks)
        ]
        counts = torch.cat([chunk.counts for chunk in chunks])
        counts_exchange = start_counts(counts, self.group, header)
        # Meanwhile the device computes everything that needs no counts, as in `all_to_all.py`.
        num_slots = min(seat.nodes, top_k)
        orders = [order_rows(chunk.crossing_VT, seat.node, num_slots) for chunk in chunks]
        numbers = number_twice(seat, self.num_experts, expert_ids_TK.device)
        gathered = counts_exchange.wait()
        size = seat.nodes + seat.ranks + self.num_experts
        tables = [
            [RankCounts.from_list(row[first : first + size], seat) for row in gathered]
            for first in range(0, self.num_chunks * size, size)
        ]
        where = str(header)
        if self.max_rows is not None:
            of_ranks = [one for table in tables for one in table]
            rows_D = [sum(one.rows_D[rank] for one in of_ranks) for rank in range(seat.ranks)]
            check_max_rows(rows_D, self.max_rows, self.group, where)
        return [
            self._exchange(seat, order, read_counts(table, seat), numbers, where)
            for order, table in zip(orders, tables, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Hierarchical:
        """A copy of the model uses the same process groups."""
        return self

    def _exchange(
        self, seat: Seat, order: Order, counts: LegCounts, numbers: Numbers, where: str
    ) -> HierarchicalExchange:
        """Make the exchange of one chunk from both legs, without a host sync."""
        to_nodes = AllToAllExchange.of_counts(
            order,
            self.between,
            seat.node,
            sends=counts.to_nodes,
            receives=counts.from_nodes,
            local_id_E=numbers.in_node_E,
            counts_L=[],
            where=where,
        )
        in_node = InNode(self.inside, seat.place, counts, numbers.here_X, where)
        return HierarchicalExchange(to_nodes, in_node)

    def _seat(self) -> Seat:
        return Seat(
            nodes=dist.get_world_size(self.between),
            places=dist.get_world_size(self.inside),
            node=dist.get_rank(self.between),
            place=dist.get_rank(self.inside),
        )


@dataclass(frozen=True)
class Crossings:
    """The destinations of the tokens of a chunk.

    Attributes:
        crossing_VT: true where a node, this one included, receives a token.
        counts: rows per node, rows per rank, pairs per expert.
    """

    crossing_VT: Tensor
    counts: Tensor


def find_crossings(expert_ids_TK: Tensor, seat: Seat, num_experts: int) -> Crossings:
    """Find the nodes and ranks of each token."""
    local = num_experts // seat.ranks
    sends_DT = find_destinations(expert_ids_TK // local, seat.ranks)
    crossing_VT = sends_DT.unflatten(0, (seat.nodes, seat.places)).any(1)
    counts = [crossing_VT.sum(1), sends_DT.sum(1), count_pairs(expert_ids_TK, num_experts)]
    return Crossings(crossing_VT, torch.cat(counts))


@dataclass(frozen=True)
class RankCounts:
    """The counts of one rank for a chunk: rows per node, rows per rank, pairs per expert."""

    rows_V: Sequence[int]
    rows_D: Sequence[int]
    pairs_E: Sequence[int]

    @classmethod
    def from_list(cls, numbers: list[int], seat: Seat) -> RankCounts:
        """Split the numbers that `find_crossings` has concatenated."""
        end = seat.nodes + seat.ranks
        return cls(numbers[: seat.nodes], numbers[seat.nodes : end], numbers[end:])


@dataclass(frozen=True)
class LegCounts:
    """The numbers of rows of both legs, including the rows that stay.

    Attributes:
        to_nodes, from_nodes: rows of the first leg.
        to_places, from_places: rows of the second leg.
        counts_L: (row, expert) pairs per local expert.
    """

    to_nodes: Sequence[int]
    from_nodes: list[int]
    to_places: list[int]
    from_places: list[int]
    counts_L: list[int]


def read_counts(table: list[RankCounts], seat: Seat) -> LegCounts:
    """Compute what this rank sends, receives and forwards; `table` has one entry per ep rank."""
    rank = seat.neighbours()[seat.place]
    mine = seat.column(seat.place)
    local = len(table[0].pairs_E) // seat.ranks
    experts = range(rank * local, (rank + 1) * local)
    return LegCounts(
        to_nodes=table[rank].rows_V,
        from_nodes=[table[sender].rows_V[seat.node] for sender in mine],
        # A neighbour gets from this rank the tokens of all ranks with this local rank.
        to_places=[
            sum(table[sender].rows_D[neighbour] for sender in mine)
            for neighbour in seat.neighbours()
        ],
        from_places=[
            sum(table[sender].rows_D[rank] for sender in seat.column(place))
            for place in range(seat.places)
        ],
        counts_L=[sum(one.pairs_E[expert] for one in table) for expert in experts],
    )


class Numbers(NamedTuple):
    """The numbers of the experts in both legs.

    Attributes:
        in_node_E: each expert's number on this node; experts of other nodes share the number behind
            the last.
        here_X: indexed by these numbers, the number on this rank; L for experts of other ranks.
    """

    in_node_E: Tensor
    here_X: Tensor


def number_twice(seat: Seat, num_experts: int, device: torch.device) -> Numbers:
    """Number the experts of this node, and among these the experts of this rank."""
    local = num_experts // seat.ranks
    of_node = local * seat.places
    return Numbers(
        number_experts(num_experts, of_node, seat.node, device),
        number_experts(of_node + 1, local, seat.place, device),
    )


@dataclass(frozen=True)
class InNode:
    """The part of the second leg that is known before the rows of the first leg are received.

    Attributes:
        group, place: the ranks of this node, and the local rank of this one.
        counts: the counts of both legs.
        here_X: see `Numbers`.
        where: the position in the model, for errors.
    """

    group: dist.ProcessGroup
    place: int
    counts: LegCounts
    here_X: Tensor
    where: str

    def exchange(self, ids_ZK: Tensor) -> AllToAllExchange:
        """Plan the second leg without a host sync; `ids_ZK` are numbers of experts on the node."""
        places, local = len(self.counts.to_places), len(self.counts.counts_L)
        # Experts of other nodes are numbered as if they were on one more rank of this node.
        sends_UZ = find_destinations(ids_ZK // local, places + 1)[:places]
        order = order_rows(sends_UZ, self.place, min(places, ids_ZK.shape[1]))
        return AllToAllExchange.of_counts(
            order,
            self.group,
            self.place,
            sends=self.counts.to_places,
            receives=self.counts.from_places,
            local_id_E=self.here_X,
            counts_L=self.counts.counts_L,
            where=self.where,
        )


@dataclass(frozen=True)
class HierarchicalExchange:
    """The exchange of one chunk: the first leg, and what is known of the second."""

    to_nodes: AllToAllExchange
    in_node: InNode

    @property
    def num_tokens(self) -> int:
        return self.to_nodes.num_tokens

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> PassedOnRows:
        """Send every token to the nodes of its experts, with its weights in fp32 or wider."""
        return PassedOnRows(self.in_node, self.to_nodes.start(x_TH, weights_TK, expert_ids_TK))


class PassedOnRows:
    """Rows that are being sent to a node, and then to the ranks of their experts there."""

    def __init__(self, in_node: InNode, crossing: DispatchedRows) -> None:
        self._in_node, self._crossing = in_node, crossing
        self._inside: DispatchedRows | None = None

    @property
    def counts_L(self) -> list[int]:
        return self._in_node.counts.counts_L

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        rows_ZH, weights_ZK, ids_ZK = self._crossing.finish()
        self._inside = self._in_node.exchange(ids_ZK).start(rows_ZH, weights_ZK, ids_ZK)
        return self._inside.finish()

    def abandon(self) -> None:
        """Wait for the transfers of both legs."""
        self._crossing.abandon()
        if self._inside is not None:
            self._inside.abandon()

    def start_combine(self, rows_RH: Tensor) -> CombinedRows:
        """Add up results inside the node, and send the sums to the nodes of their tokens."""
        assert self._inside is not None
        return self._crossing.start_combine(self._inside.start_combine(rows_RH).finish())
