"""Send each token to a node once, and inside it to each rank once; results come home likewise.

Links between nodes are many times slower than those inside one. So a token crosses to another node
at most once, however many ranks there hold experts of it: to the rank of its own place on that
node, which passes it on to the others. Results are added up inside their node first, and one row
for each token and node comes home. Nodes {0 1} and {2 3}, one expert per rank, rank 0's tokens:

            experts    crosses to    is passed on there to    in its own node
    t0      2 3        rank 2        3, and stays             -
    t1      1 3        rank 2        3                        to 1

Two rows leave the node, and `all_to_all.py` would send three. Both ways together, forward and
backward, four rows cross for each distinct (token, other node) pair, the fewest that can. A router
that draws a token's experts from few groups, as DeepSeek-V3's from 4 of 8, makes such pairs rarer
where no group lies on two nodes; nothing has to be told of it.

Each leg is an exchange of `all_to_all.py`, autograd nodes and all: the first between the ranks of
one place, a node for a destination; the second between the ranks of a node, whose tokens are the
rows of the first, those of other nodes in front, own ones last. Backward takes the legs from the
end: gradients too are added up inside a node before they cross.

One exchange of counts plans both: every rank tells its rows per node and per rank, and from all of
them each reads off what it is going to pass on. Which rows those are stands in the expert ids that
ride along; the device puts them in order once they are there, and the host asks nothing.

Rows cross nodes while experts run, as with `all_to_all.py`; inside a node nothing runs meanwhile.
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
    """A rank's place on its node, in an ep group of `nodes` times `places` ranks, node by node."""

    nodes: int
    places: int
    node: int
    place: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.places

    def column(self, place: int) -> list[int]:
        """List the ranks that have this place on their nodes."""
        return [node * self.places + place for node in range(self.nodes)]

    def neighbours(self) -> list[int]:
        """List the ranks of this node."""
        return [self.node * self.places + place for place in range(self.places)]


@dataclass(frozen=True)
class Hierarchical:
    """The dispatcher of one ep group on several nodes; see `hf_moe_ep.dispatcher.Dispatcher`.

    Args:
        group: the ep group, node by node, with equally many ranks on each.
        between: the ranks that have this one's place on their nodes.
        inside: the ranks of this node.
        num_experts: of all ranks together, the first ones on the first rank.
        num_chunks: parts in which the tokens travel.
        max_rows: what a rank may receive in one layer for its own experts; None = no limit.
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
        """Plan an exchange per chunk, all from one exchange of counts."""
        seat, top_k = self._seat(), expert_ids_TK.shape[1]
        chunks = [
            find_crossings(ids, seat, self.num_experts)
            for ids in expert_ids_TK.tensor_split(self.num_chunks)
        ]
        told = start_counts(torch.cat([chunk.told for chunk in chunks]), self.group, header)
        # Meanwhile the device prepares whatever needs no counts, as in `all_to_all.py`.
        num_slots = min(seat.nodes, top_k)
        orders = [order_rows(chunk.crossing_VT, seat.node, num_slots) for chunk in chunks]
        numbers = number_twice(seat, self.num_experts, expert_ids_TK.device)
        gathered = told.wait()
        size = seat.nodes + seat.ranks + self.num_experts
        tables = [
            [Told.read(row[first : first + size], seat) for row in gathered]
            for first in range(0, self.num_chunks * size, size)
        ]
        where = str(header)
        if self.max_rows is not None:
            everything = [told for table in tables for told in table]
            rows_D = [sum(told.rows_D[rank] for told in everything) for rank in range(seat.ranks)]
            check_max_rows(rows_D, self.max_rows, self.group, where)
        return [
            self._exchange(seat, order, read_counts(table, seat), numbers, where)
            for order, table in zip(orders, tables, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Hierarchical:
        """The copy of a model runs in the same groups."""
        return self

    def _exchange(
        self, seat: Seat, order: Order, counts: LegCounts, numbers: Numbers, where: str
    ) -> HierarchicalExchange:
        """Put both legs together; asks nothing of the device."""
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
    """Where the tokens of a chunk go.

    Attributes:
        crossing_VT: which node gets which token, the own one among them.
        told: rows per node, rows per rank, pairs per expert.
    """

    crossing_VT: Tensor
    told: Tensor


def find_crossings(expert_ids_TK: Tensor, seat: Seat, num_experts: int) -> Crossings:
    """Find the nodes and ranks of each token."""
    local = num_experts // seat.ranks
    sends_DT = find_destinations(expert_ids_TK // local, seat.ranks)
    crossing_VT = sends_DT.unflatten(0, (seat.nodes, seat.places)).any(1)
    told = [crossing_VT.sum(1), sends_DT.sum(1), count_pairs(expert_ids_TK, num_experts)]
    return Crossings(crossing_VT, torch.cat(told))


@dataclass(frozen=True)
class Told:
    """What a rank has told of a chunk: rows per node, rows per rank, pairs per expert."""

    rows_V: Sequence[int]
    rows_D: Sequence[int]
    pairs_E: Sequence[int]

    @classmethod
    def read(cls, numbers: list[int], seat: Seat) -> Told:
        """Read what `find_crossings` put together."""
        end = seat.nodes + seat.ranks
        return cls(numbers[: seat.nodes], numbers[seat.nodes : end], numbers[end:])


@dataclass(frozen=True)
class LegCounts:
    """Rows of both legs; the own node and the own place count those that stay.

    Attributes:
        to_nodes, from_nodes: rows of the first leg.
        to_places, from_places: rows of the second.
        counts_L: (row, expert) pairs per local expert.
    """

    to_nodes: Sequence[int]
    from_nodes: list[int]
    to_places: list[int]
    from_places: list[int]
    counts_L: list[int]


def read_counts(table: list[Told], seat: Seat) -> LegCounts:
    """Read off what this rank sends, gets and passes on; `table` is by rank of the ep group."""
    rank = seat.neighbours()[seat.place]
    mine = seat.column(seat.place)
    local = len(table[0].pairs_E) // seat.ranks
    experts = range(rank * local, (rank + 1) * local)
    return LegCounts(
        to_nodes=table[rank].rows_V,
        from_nodes=[table[sender].rows_V[seat.node] for sender in mine],
        # What is passed on to a neighbour are the tokens for it of all ranks of this place.
        to_places=[
            sum(table[sender].rows_D[neighbour] for sender in mine)
            for neighbour in seat.neighbours()
        ],
        from_places=[
            sum(table[sender].rows_D[rank] for sender in seat.column(place))
            for place in range(seat.places)
        ],
        counts_L=[sum(told.pairs_E[expert] for told in table) for expert in experts],
    )


class Numbers(NamedTuple):
    """What experts are called on the way.

    Attributes:
        in_node_E: their numbers on this node; experts of other nodes share the one behind the last.
        here_X: by these numbers those on this rank, L where it is not here.
    """

    in_node_E: Tensor
    here_X: Tensor


def number_twice(seat: Seat, num_experts: int, device: torch.device) -> Numbers:
    """Number the experts of a rank's node, and of these its own."""
    local = num_experts // seat.ranks
    of_node = local * seat.places
    return Numbers(
        number_experts(num_experts, of_node, seat.node, device),
        number_experts(of_node + 1, local, seat.place, device),
    )


@dataclass(frozen=True)
class InNode:
    """The second leg, as far as it is known before the rows of the first are there.

    Attributes:
        group, place: the ranks of this node, and which of them this is.
        counts: of both legs.
        here_X: see `Numbers`.
        where: the place in the model, for errors.
    """

    group: dist.ProcessGroup
    place: int
    counts: LegCounts
    here_X: Tensor
    where: str

    def exchange(self, ids_ZK: Tensor) -> AllToAllExchange:
        """Plan how rows are passed on, without asking the device; ids are those of the node."""
        places, local = len(self.counts.to_places), len(self.counts.counts_L)
        # An expert that is not on this node is on the place behind the last one.
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
    """Where the rows of some tokens go, and what this rank gets and passes on."""

    to_nodes: AllToAllExchange
    in_node: InNode

    @property
    def num_tokens(self) -> int:
        return self.to_nodes.num_tokens

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> PassedOnRows:
        """Send every token to the nodes of its experts; weights in fp32 or wider."""
        return PassedOnRows(self.in_node, self.to_nodes.start(x_TH, weights_TK, expert_ids_TK))


class PassedOnRows:
    """Rows on their way to a node, then to the ranks of their experts there."""

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
        """Let both transfers end."""
        self._crossing.abandon()
        if self._inside is not None:
            self._inside.abandon()

    def start_combine(self, rows_RH: Tensor) -> CombinedRows:
        """Add up results inside the node, and send the sums to the nodes of their tokens."""
        assert self._inside is not None
        return self._crossing.start_combine(self._inside.start_combine(rows_RH).finish())
