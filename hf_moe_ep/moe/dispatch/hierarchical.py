"""Dispatch in two legs: a token is sent to a node at most once, then to a rank there at most once.

Links between nodes are many times slower than links inside a node. A token is therefore sent to
another node at most once, even if several ranks of that node own experts of the token. The receiver
is the rank with the sender's local rank, and it forwards the token inside the node. Results are
added up inside their node first, so one row per token and node is sent back. For example, the nodes
have the ranks {0 1} and {2 3}, rank r owns expert r, and rank 0 has two tokens:

            experts    sent to the other node    forwarded there         sent inside its node
    t0      2 3        to rank 2 (expert 2)      to rank 3 (expert 3)    -
    t1      1 3        to rank 2                 to rank 3 (expert 3)    to rank 1 (expert 1)

Two rows leave the node; `all_to_all.py` would send three. For each distinct (token, other node)
pair, four rows are sent between nodes, which is the minimum: dispatch and combine each send one row
in forward and one in backward. Such pairs are rarer if a router chooses a token's experts from few
groups (DeepSeek-V3 from 4 of 8), and the experts of each group are on one node. This needs no
option.

Each leg is an exchange of `all_to_all.py`, with its autograd nodes. The first leg runs between the
ranks with the same local rank; its destinations are nodes. The second leg runs between the ranks of
a node. Its tokens are the rows that the first leg has received: first the rows from other nodes,
then the rows of this rank. Backward runs the legs in reverse order, so gradients too are added up
inside a node before they are sent to another node.

One exchange of counts plans both legs. Every rank sends to each other rank the number of its rows
for the receiver's node, and for each rank of this node. From these numbers each rank computes how
many rows it will forward. After the first leg the device finds the rows to forward by the expert
ids that were received with the rows, without a host sync.

Rows are sent between nodes while experts run, as in `all_to_all.py`. The second leg does not
overlap with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import (
    AllToAllExchange,
    Order,
    find_destinations,
    order_rows,
)
from hf_moe_ep.moe.dispatch.async_exchange import DispatchedRows, ReturningRows
from hf_moe_ep.moe.dispatch.constants import Constants
from hf_moe_ep.moe.dispatch.counts import CountsExchange, exchange_counts
from hf_moe_ep.ops.permute import count_pairs


@dataclass(frozen=True)
class NodePosition:
    """The node of this rank, and the local rank of this rank on that node.

    The ranks of the ep group are numbered node by node, with equally many ranks on each node.
    """

    num_nodes: int
    ranks_per_node: int
    node: int
    local_rank: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class Hierarchical:
    """The dispatcher of one ep group on several nodes; see `hf_moe_ep.dispatcher.Dispatcher`.

    Args:
        group: the ep group, node by node, with equally many ranks on each node.
        between: the ranks of all nodes that have the same local rank as this rank.
        inside: the ranks of this node.
        num_experts: the number of experts on all ranks together; rank r owns experts r * L to
            (r + 1) * L - 1.
        num_chunks: the number of chunks into which the tokens of a layer are split.
        max_rows: the largest number of rows that a rank may receive in one layer for its own
            experts; None for no limit. Rows that a rank only forwards do not count.
        triton_sums: see `AllToAll`.
    """

    group: dist.ProcessGroup
    between: dist.ProcessGroup
    inside: dist.ProcessGroup
    num_experts: int
    num_chunks: int = 1
    max_rows: int | None = None
    triton_sums: bool = True

    constants: Constants = field(default_factory=Constants, compare=False, repr=False)

    def start_plan(
        self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int = 0
    ) -> HierarchicalPlanning:
        """Plan the exchanges of all chunks from one exchange of counts."""
        position, top_k = self._find_position(), expert_ids_TK.shape[1]
        chunks = [
            find_destinations_of_legs(ids, position, self.num_experts)
            for ids in expert_ids_TK.tensor_split(self.num_chunks)
        ]
        tables = [table for chunk in chunks for table in chunk.make_tables(position)]
        rows_of_chunks = [chunk.rows_D for chunk in chunks]
        counts = exchange_counts(tables, rows_of_chunks, self.group, header, self.max_rows)
        # Meanwhile the device computes everything that needs no counts, as in `all_to_all.py`.
        rows_per_token, device = min(position.num_nodes, top_k), expert_ids_TK.device
        num_local = self.num_experts // position.num_ranks
        num_on_node = num_local * position.ranks_per_node
        number_experts = self.constants.number_experts
        return HierarchicalPlanning(
            self,
            position,
            counts,
            chunks,
            [
                order_rows(chunk.sends_VT, position.node, rows_per_token, self.constants)
                for chunk in chunks
            ],
            number_experts(self.num_experts, num_on_node, position.node, device),
            number_experts(num_on_node + 1, num_local, position.local_rank, device),
        )

    @property
    def leaves_out_padding(self) -> bool:
        return True

    def prepare(self, tokens: Tokens) -> None:
        tokens.join()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hierarchical:
        """Share the process groups with a copy of the model."""
        return self

    def _find_position(self) -> NodePosition:
        return NodePosition(
            num_nodes=dist.get_world_size(self.between),
            ranks_per_node=dist.get_world_size(self.inside),
            node=dist.get_rank(self.between),
            local_rank=dist.get_rank(self.inside),
        )


@dataclass(frozen=True)
class HierarchicalPlanning:
    """A plan whose counts are being exchanged; see `hf_moe_ep.dispatcher.Planning`.

    Attributes:
        chunks, orders: the destinations of each chunk, and the order of its rows in the first leg.
        on_node_E: the number of each expert on this node, from 0. All experts of other nodes have
            the same number, the number of experts on this node.
        on_rank_X: for each number in `on_node_E`, the number of the expert on this rank; L for
            experts of other ranks.
    """

    dispatcher: Hierarchical
    position: NodePosition
    counts: CountsExchange
    chunks: Sequence[LegDestinations]
    orders: Sequence[Order]
    on_node_E: Tensor
    on_rank_X: Tensor

    @property
    def pairs_E(self) -> Tensor:
        first, *others = [chunk.pairs_E for chunk in self.chunks]
        return sum(others, start=first)

    def finish(self) -> list[HierarchicalExchange]:
        values = self.counts.read(self._summarise)
        size = len(values) // len(self.chunks)
        return [
            self._make_exchange(order, LegCounts(*values[index * size : (index + 1) * size]))
            for index, order in enumerate(self.orders)
        ]

    def _summarise(self, counts_DX: Tensor) -> list[Tensor]:
        """Return the vectors of `LegCounts` for each chunk.

        Line r of `counts_DX` has the counts that rank r has sent.
        """
        vectors: list[Tensor] = []
        parts = counts_DX.tensor_split(len(self.chunks), dim=1)
        for chunk, part_DX in zip(self.chunks, parts, strict=True):
            vectors += compute_leg_counts(chunk.rows_V, part_DX, self.position)
        return vectors

    def _make_exchange(self, order: Order, counts: LegCounts) -> HierarchicalExchange:
        """Make the exchange of one chunk, without a host sync."""
        dispatcher, position, where = self.dispatcher, self.position, self.counts.header
        first_leg = AllToAllExchange.from_counts(
            order,
            dispatcher.between,
            position.node,
            sends=counts.to_nodes,
            receives=counts.from_nodes,
            local_id_E=self.on_node_E,
            counts_L=[],
            where=where,
            triton_sums=dispatcher.triton_sums,
        )
        second_leg = SecondLeg(
            dispatcher.inside,
            position.local_rank,
            counts,
            self.on_rank_X,
            where,
            dispatcher.constants,
            dispatcher.triton_sums,
        )
        return HierarchicalExchange(first_leg, second_leg)


@dataclass(frozen=True)
class LegDestinations:
    """The destinations of the tokens of a chunk.

    Attributes:
        sends_VT: True where a node receives a token; this node is one of the nodes.
        rows_V, rows_D, pairs_E: the number of this rank's rows per node and per rank, and the
            number of its pairs per expert.
    """

    sends_VT: Tensor
    rows_V: Tensor
    rows_D: Tensor
    pairs_E: Tensor

    def make_tables(self, position: NodePosition) -> list[Tensor]:
        """Return tables whose line r has the counts that rank r needs.

        Rank r needs the number of rows for its node, the number of rows for each rank of its node,
        and the number of pairs for each of its experts.
        """
        rows_VU = self.rows_D.view(position.num_nodes, position.ranks_per_node)
        per_node = torch.cat([self.rows_V.unsqueeze(1), rows_VU], dim=1)
        per_rank = per_node.repeat_interleave(position.ranks_per_node, dim=0)
        return [per_rank, self.pairs_E.view(position.num_ranks, -1)]


def find_destinations_of_legs(
    expert_ids_TK: Tensor, position: NodePosition, num_experts: int
) -> LegDestinations:
    """Find the nodes and the ranks that own experts of each token."""
    num_local = num_experts // position.num_ranks
    sends_DT = find_destinations(expert_ids_TK // num_local, position.num_ranks)
    sends_VT = sends_DT.unflatten(0, (position.num_nodes, position.ranks_per_node)).any(1)
    pairs_E = count_pairs(expert_ids_TK, num_experts + 1)[:num_experts]
    return LegDestinations(sends_VT, sends_VT.sum(1), sends_DT.sum(1), pairs_E)


class LegCounts(NamedTuple):
    """The numbers of rows of both legs, including the rows that stay on this rank.

    Attributes:
        to_nodes, from_nodes: rows of the first leg, per node.
        to_local_ranks, from_local_ranks: rows of the second leg, per rank of this node.
        counts_L: (row, expert) pairs per local expert.
    """

    to_nodes: list[int]
    from_nodes: list[int]
    to_local_ranks: list[int]
    from_local_ranks: list[int]
    counts_L: list[int]


def compute_leg_counts(
    rows_V: Tensor, counts_DX: Tensor, position: NodePosition
) -> tuple[Tensor, ...]:
    """Compute the fields of `LegCounts` on the device.

    `rows_V` has the number of rows that this rank sends to each node. Line r of `counts_DX` has the
    counts that rank r has sent to this rank (see `LegDestinations.make_tables`): its rows for this
    node, its rows for each rank of this node, and its pairs for each expert of this rank.
    """
    num_local_ranks = position.ranks_per_node
    counts_VUX = counts_DX.unflatten(0, (position.num_nodes, num_local_ranks))
    from_nodes = counts_VUX[:, position.local_rank, 0]
    # rows_UU[a][b]: the rows that local rank a of this node receives from all ranks with local rank
    # a, and forwards to local rank b of this node.
    rows_UU = counts_VUX[..., 1 : 1 + num_local_ranks].sum(0)
    return (
        rows_V,
        from_nodes,
        rows_UU[position.local_rank],
        rows_UU[:, position.local_rank],
        counts_DX[:, 1 + num_local_ranks :].sum(0),
    )


@dataclass(frozen=True)
class SecondLeg:
    """The part of the second leg that is known before the first leg has ended.

    Attributes:
        group, local_rank: the ranks of this node, and the local rank of this rank.
        counts: the counts of both legs.
        on_rank_X: see `HierarchicalPlanning`.
        where: the position in the model. Its text is made only for an error.
        triton_sums: see `AllToAll`.
    """

    group: dist.ProcessGroup
    local_rank: int
    counts: LegCounts
    on_rank_X: Tensor
    where: object
    constants: Constants
    triton_sums: bool

    def plan(self, ids_ZK: Tensor) -> AllToAllExchange:
        """Plan the second leg without a host sync; `ids_ZK` are numbers of `on_node_E`."""
        num_ranks, num_local = len(self.counts.to_local_ranks), len(self.counts.counts_L)
        # Experts of other nodes get the rank `num_ranks`, which means "no rank".
        sends_UZ = find_destinations(ids_ZK // num_local, num_ranks)
        order = order_rows(
            sends_UZ, self.local_rank, min(num_ranks, ids_ZK.shape[1]), self.constants
        )
        return AllToAllExchange.from_counts(
            order,
            self.group,
            self.local_rank,
            sends=self.counts.to_local_ranks,
            receives=self.counts.from_local_ranks,
            local_id_E=self.on_rank_X,
            counts_L=self.counts.counts_L,
            where=self.where,
            triton_sums=self.triton_sums,
        )


@dataclass(frozen=True)
class HierarchicalExchange:
    """The exchange of one chunk in two legs."""

    first_leg: AllToAllExchange
    second_leg: SecondLeg

    @property
    def num_tokens(self) -> int:
        return self.first_leg.num_tokens

    def start(self, tokens: Tokens) -> ForwardedRows:
        """Start to send every token to the nodes of its experts."""
        rows_to_nodes = self.first_leg.start(tokens)
        return ForwardedRows(rows_to_nodes, self.second_leg)


class ForwardedRows:
    """Rows that are being sent to a node; `finish` forwards them to the ranks of this node."""

    def __init__(self, rows_to_nodes: DispatchedRows, second_leg: SecondLeg) -> None:
        self._rows_to_nodes, self._second_leg = rows_to_nodes, second_leg
        self._rows_to_ranks: DispatchedRows | None = None

    @property
    def counts_L(self) -> list[int]:
        return self._second_leg.counts.counts_L

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        rows_ZH, weights_ZK, ids_ZK = self._rows_to_nodes.finish()
        exchange = self._second_leg.plan(ids_ZK)
        self._rows_to_ranks = exchange.start(Tokens(rows_ZH, weights_ZK, ids_ZK))
        return self._rows_to_ranks.finish()

    def abandon(self) -> None:
        """Wait for the transfers of both legs."""
        self._rows_to_nodes.abandon()
        if self._rows_to_ranks is not None:
            self._rows_to_ranks.abandon()

    def start_combine(self, rows_RH: Tensor) -> ReturningRows:
        """Add up results inside the node, and start to send the sums to the nodes of the tokens."""
        assert self._rows_to_ranks is not None
        sums_ZH = self._rows_to_ranks.start_combine(rows_RH).finish()
        return self._rows_to_nodes.start_combine(sums_ZH)
