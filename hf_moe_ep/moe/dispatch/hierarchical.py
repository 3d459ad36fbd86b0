"""Dispatch in two legs: a token is sent to a node at most once, then to a rank there at most once.

Links between nodes are many times slower than links inside a node. A token is therefore sent to
another node at most once, even if several ranks of that node own experts of the token. It is sent
to the rank that has the sender's local rank on that node, and this rank forwards it inside the
node. Results are added up inside their node first, so one row per token and node is sent back. For
example, the nodes have the ranks {0 1} and {2 3}, rank r owns expert r, and rank 0 has two tokens:

            experts    sent to the other node    forwarded there         sent inside its node
    t0      2 3        to rank 2 (expert 2)      to rank 3 (expert 3)    -
    t1      1 3        to rank 2                 to rank 3 (expert 3)    to rank 1 (expert 1)

Two rows leave the node; `all_to_all.py` would send three. Dispatch and combine, forward and
backward together send four rows between nodes for each distinct (token, other node) pair, which is
the minimum. A router that chooses a token's experts from few groups, as DeepSeek-V3 does from 4 of
8, makes such pairs rarer if the experts of each group are on one node. No option is needed.

Each leg is an exchange of `all_to_all.py`, with its autograd nodes. The first leg runs between the
ranks with the same local rank; its destinations are nodes. The second leg runs between the ranks of
a node. Its tokens are the rows of the first leg: first the rows from other nodes, then the rows of
this rank. Backward runs the legs in reverse order, so gradients too are added up inside a node
before they are sent to another node.

One exchange of counts plans both legs. Every rank sends its numbers of rows per node and per rank.
From the numbers of all ranks, each rank computes how many rows it will forward. After the first
leg the device finds these rows by the expert ids that were received with the rows, without a host
sync.

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

    def ranks_with(self, local_rank: int) -> list[int]:
        """List the ranks with this local rank, one on each node."""
        return [node * self.ranks_per_node + local_rank for node in range(self.num_nodes)]

    def ranks_of_node(self) -> list[int]:
        """List the ranks of this node."""
        first = self.node * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))


@dataclass(frozen=True)
class Hierarchical:
    """The dispatcher of one ep group on several nodes; see `hf_moe_ep.dispatcher.Dispatcher`.

    Args:
        group: the ep group, node by node, with equally many ranks on each node.
        between: the ranks of all nodes that have the local rank of this rank.
        inside: the ranks of this node.
        num_experts: the number of experts on all ranks together; rank r owns experts r * L to
            (r + 1) * L - 1.
        num_chunks: the number of chunks in which the tokens of a layer are sent.
        max_rows: the largest number of rows that a rank may receive in one layer for its own
            experts; None for no limit.
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
        position, top_k = self._find_position(), expert_ids_TK.shape[1]
        chunks = [
            find_destinations_of_legs(ids, position, self.num_experts)
            for ids in expert_ids_TK.tensor_split(self.num_chunks)
        ]
        counts = torch.cat([chunk.counts for chunk in chunks])
        counts_exchange = start_counts(counts, self.group, header)
        # Meanwhile the device computes everything that needs no counts, as in `all_to_all.py`.
        num_slots = min(position.num_nodes, top_k)
        orders = [order_rows(chunk.sends_VT, position.node, num_slots) for chunk in chunks]
        expert_numbers = number_experts_of_legs(position, self.num_experts, expert_ids_TK.device)
        gathered = counts_exchange.wait()
        size = position.num_nodes + position.num_ranks + self.num_experts
        # tables[chunk][r] are the counts of rank r.
        tables = [
            [RankCounts.from_list(row[first : first + size], position) for row in gathered]
            for first in range(0, self.num_chunks * size, size)
        ]
        where = str(header)
        if self.max_rows is not None:
            sent_rows = [rank_counts.rows_D for table in tables for rank_counts in table]
            rows_D = [sum(column) for column in zip(*sent_rows, strict=True)]
            check_max_rows(rows_D, self.max_rows, self.group, where)
        return [
            self._exchange(position, order, table, expert_numbers, where)
            for order, table in zip(orders, tables, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Hierarchical:
        """Share the process groups with a copy of the model."""
        return self

    def _exchange(
        self,
        position: NodePosition,
        order: Order,
        table: list[RankCounts],
        expert_numbers: ExpertNumbers,
        where: str,
    ) -> HierarchicalExchange:
        """Make the exchange of one chunk from the counts of all ranks, without a host sync."""
        counts = compute_leg_counts(table, position)
        first_leg = AllToAllExchange.of_counts(
            order,
            self.between,
            position.node,
            sends=counts.to_nodes,
            receives=counts.from_nodes,
            local_id_E=expert_numbers.on_node_E,
            counts_L=[],
            where=where,
        )
        second_leg = SecondLeg(
            self.inside, position.local_rank, counts, expert_numbers.on_rank_X, where
        )
        return HierarchicalExchange(first_leg, second_leg)

    def _find_position(self) -> NodePosition:
        return NodePosition(
            num_nodes=dist.get_world_size(self.between),
            ranks_per_node=dist.get_world_size(self.inside),
            node=dist.get_rank(self.between),
            local_rank=dist.get_rank(self.inside),
        )


@dataclass(frozen=True)
class LegDestinations:
    """The destinations of the tokens of a chunk.

    Attributes:
        sends_VT: True where a node (other nodes and this node) receives a token.
        counts: rows per node, rows per rank, pairs per expert.
    """

    sends_VT: Tensor
    counts: Tensor


def find_destinations_of_legs(
    expert_ids_TK: Tensor, position: NodePosition, num_experts: int
) -> LegDestinations:
    """Find the nodes and ranks of each token."""
    num_local = num_experts // position.num_ranks
    sends_DT = find_destinations(expert_ids_TK // num_local, position.num_ranks)
    sends_VT = sends_DT.unflatten(0, (position.num_nodes, position.ranks_per_node)).any(1)
    counts = [sends_VT.sum(1), sends_DT.sum(1), count_pairs(expert_ids_TK, num_experts)]
    return LegDestinations(sends_VT, torch.cat(counts))


@dataclass(frozen=True)
class RankCounts:
    """The counts of one rank for a chunk: rows per node, rows per rank, pairs per expert."""

    rows_V: Sequence[int]
    rows_D: Sequence[int]
    pairs_E: Sequence[int]

    @classmethod
    def from_list(cls, numbers: list[int], position: NodePosition) -> RankCounts:
        """Split the numbers that `find_destinations_of_legs` has concatenated."""
        num_nodes, end = position.num_nodes, position.num_nodes + position.num_ranks
        return cls(numbers[:num_nodes], numbers[num_nodes:end], numbers[end:])


@dataclass(frozen=True)
class LegCounts:
    """The numbers of rows of both legs, including the rows that stay on this rank.

    Attributes:
        to_nodes, from_nodes: rows of the first leg, per node.
        to_local_ranks, from_local_ranks: rows of the second leg, per rank of this node.
        counts_L: (row, expert) pairs per local expert.
    """

    to_nodes: Sequence[int]
    from_nodes: list[int]
    to_local_ranks: list[int]
    from_local_ranks: list[int]
    counts_L: list[int]


def compute_leg_counts(table: list[RankCounts], position: NodePosition) -> LegCounts:
    """Compute the rows that this rank sends and receives; `table` has one entry per ep rank."""
    rank = position.ranks_of_node()[position.local_rank]
    senders = position.ranks_with(position.local_rank)
    num_local = len(table[0].pairs_E) // position.num_ranks
    local_experts = range(rank * num_local, (rank + 1) * num_local)
    return LegCounts(
        to_nodes=table[rank].rows_V,
        from_nodes=[table[sender].rows_V[position.node] for sender in senders],
        # This rank forwards the tokens of all ranks that have its local rank.
        to_local_ranks=[
            sum(table[sender].rows_D[neighbour] for sender in senders)
            for neighbour in position.ranks_of_node()
        ],
        from_local_ranks=[
            sum(table[sender].rows_D[rank] for sender in position.ranks_with(local_rank))
            for local_rank in range(position.ranks_per_node)
        ],
        counts_L=[sum(counts.pairs_E[expert] for counts in table) for expert in local_experts],
    )


class ExpertNumbers(NamedTuple):
    """The numbers by which experts are identified in the two legs.

    Attributes:
        on_node_E: the number of each expert on this node, from 0; all experts of other nodes share
            the number after the last.
        on_rank_X: the number of each expert on this rank, indexed by the number on this node; L for
            experts of other ranks.
    """

    on_node_E: Tensor
    on_rank_X: Tensor


def number_experts_of_legs(
    position: NodePosition, num_experts: int, device: torch.device
) -> ExpertNumbers:
    """Number the experts of this node, and the experts of this rank."""
    num_local = num_experts // position.num_ranks
    num_on_node = num_local * position.ranks_per_node
    return ExpertNumbers(
        number_experts(num_experts, num_on_node, position.node, device),
        number_experts(num_on_node + 1, num_local, position.local_rank, device),
    )


@dataclass(frozen=True)
class SecondLeg:
    """The second leg, as far as it is known before the first leg has ended.

    Attributes:
        group, local_rank: the ranks of this node, and the local rank of this rank.
        counts: the counts of both legs.
        on_rank_X: see `ExpertNumbers`.
        where: the position in the model, for errors.
    """

    group: dist.ProcessGroup
    local_rank: int
    counts: LegCounts
    on_rank_X: Tensor
    where: str

    def plan(self, ids_ZK: Tensor) -> AllToAllExchange:
        """Plan the second leg, without a host sync; `ids_ZK` number the experts of the node."""
        num_ranks, num_local = len(self.counts.to_local_ranks), len(self.counts.counts_L)
        # Experts of other nodes are numbered as if one more rank of this node owned them.
        sends_UZ = find_destinations(ids_ZK // num_local, num_ranks + 1)[:num_ranks]
        order = order_rows(sends_UZ, self.local_rank, min(num_ranks, ids_ZK.shape[1]))
        return AllToAllExchange.of_counts(
            order,
            self.group,
            self.local_rank,
            sends=self.counts.to_local_ranks,
            receives=self.counts.from_local_ranks,
            local_id_E=self.on_rank_X,
            counts_L=self.counts.counts_L,
            where=self.where,
        )


@dataclass(frozen=True)
class HierarchicalExchange:
    """The exchange of one chunk in two legs."""

    first_leg: AllToAllExchange
    second_leg: SecondLeg

    @property
    def num_tokens(self) -> int:
        return self.first_leg.num_tokens

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> ForwardedRows:
        """Send every token to the nodes of its experts, with its weights in fp32 or wider."""
        rows_to_nodes = self.first_leg.start(x_TH, weights_TK, expert_ids_TK)
        return ForwardedRows(rows_to_nodes, self.second_leg)


class ForwardedRows:
    """Rows that are being sent to a node, and that `finish` forwards to the ranks there."""

    def __init__(self, rows_to_nodes: DispatchedRows, second_leg: SecondLeg) -> None:
        self._rows_to_nodes, self._second_leg = rows_to_nodes, second_leg
        self._rows_to_ranks: DispatchedRows | None = None

    @property
    def counts_L(self) -> list[int]:
        return self._second_leg.counts.counts_L

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        rows_ZH, weights_ZK, ids_ZK = self._rows_to_nodes.finish()
        exchange = self._second_leg.plan(ids_ZK)
        self._rows_to_ranks = exchange.start(rows_ZH, weights_ZK, ids_ZK)
        return self._rows_to_ranks.finish()

    def abandon(self) -> None:
        """Wait for the transfers of both legs."""
        self._rows_to_nodes.abandon()
        if self._rows_to_ranks is not None:
            self._rows_to_ranks.abandon()

    def start_combine(self, rows_RH: Tensor) -> CombinedRows:
        """Add up results inside the node, and start to send the sums to the tokens' nodes."""
        assert self._rows_to_ranks is not None
        sums_ZH = self._rows_to_ranks.start_combine(rows_RH).finish()
        return self._rows_to_nodes.start_combine(sums_ZH)
