"""The hierarchical dispatcher is exact for random routing over grids of nodes and ranks.

The ranks are threads of one process (support/threaded_ranks.py), which counts the bytes of every
link. Each expert multiplies tokens by its own factor, so one formula gives the expected results.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.close import assert_close
from support.messages import message_columns
from support.threaded_ranks import Network
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.dispatcher import Dispatcher, Header, Tokens
from hf_moe_ep.moe.dispatch import all_to_all
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.moe.dispatch.hierarchical import Hierarchical
from hf_moe_ep.moe.dispatch.make_dispatcher import make_dispatcher
from hf_moe_ep.moe.dispatch.overlap import OverlappedChunks
from hf_moe_ep.ops.permute import add_rows

HIDDEN = 29  # odd, so that a row never has as many bytes as its routing (2 K columns)
HEADER = Header(1, 0, True, True, False, False, 2, 8)
GRIDS = [(2, 2), (2, 4), (4, 2), (3, 2), (2, 3)]


@dataclass(frozen=True)
class Case:
    """A random routing over `nodes` with `ranks_per_node` ranks each.

    `tokens` has the number of tokens of each rank. A token chooses its experts from `groups_drawn`
    of the `groups` of consecutive experts.
    """

    seed: int
    nodes: int
    ranks_per_node: int
    experts: int
    top_k: int
    chunks: int
    tokens: tuple[int, ...]
    groups: int = 1
    groups_drawn: int = 1

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def local(self) -> int:
        return self.experts // self.world

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def ids_TK(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(3 * self.seed + rank)
        scores_TX = torch.rand(self.tokens[rank], self.groups, generator=generator)
        open_TX = torch.zeros_like(scores_TX).scatter(
            1, scores_TX.topk(self.groups_drawn, dim=1).indices, 1.0
        )
        open_TE = open_TX.repeat_interleave(self.experts // self.groups, 1)
        scores_TE = torch.rand(self.tokens[rank], self.experts, generator=generator) + 1
        return (scores_TE * open_TE).topk(self.top_k, dim=1).indices

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7 * self.seed + rank)
        tokens = self.tokens[rank]
        x_TH = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
        w_TK = torch.rand(tokens, self.top_k, dtype=torch.float64, generator=generator) + 0.1
        # The first two columns of a token are its rank and its number, which identify it later.
        x_TH[:, 0], x_TH[:, 1] = rank, torch.arange(tokens)
        return x_TH.requires_grad_(), w_TK.requires_grad_()

    def factors_E(self) -> Tensor:
        return torch.linspace(0.5, 2.5, self.experts, dtype=torch.float64)

    def visits(self, rank: int) -> list[set[int]]:
        """List the ranks of each token's experts."""
        return [{expert // self.local for expert in ids} for ids in self.ids_TK(rank).tolist()]


def _make_case(seed: int) -> Case:
    """Make a random case. Every 4th case has k = E, and every 3rd has a rank without tokens."""
    rng = random.Random(seed)
    nodes, ranks_per_node = GRIDS[seed % len(GRIDS)]
    experts = nodes * ranks_per_node * rng.randint(1, 3)
    top_k = experts if seed % 4 == 0 else rng.randint(1, experts)
    tokens = [rng.randint(0, 40) for _ in range(nodes * ranks_per_node)]
    if seed % 3 == 0:
        tokens[rng.randrange(len(tokens))] = 0
    return Case(seed, nodes, ranks_per_node, experts, top_k, rng.randint(1, 3), tuple(tokens))


# The fast tests take every 7th case, and have all kinds of cases: 7 is not a multiple of 3 or 4.
CASES = [_make_case(seed) for seed in range(40)]
# A router like DeepSeek-V3's: each token uses 2 of 4 groups of experts, one group per node.
LIMITED = Case(0, 4, 2, 16, 4, 2, (30,) * 8, groups=4, groups_drawn=2)


@dataclass(frozen=True)
class Result:
    """The results of one rank. `arrived` has (sender, token, expert) of each received pair."""

    arrived: list[tuple[int, int, int]]
    weights: list[float]
    counts_L: list[int]
    out_TH: Tensor
    grads: tuple[Tensor, ...]


def _make_dispatcher(
    kind: str, case: Case, network: Network, rank: int, **options: Any
) -> Dispatcher:
    group: Any = network.group(range(case.world), rank)
    options = {"num_chunks": case.chunks, **options}
    if kind == "all_to_all":
        return AllToAll(group, case.experts, **options)
    first_of_node = rank - rank % case.ranks_per_node
    inside: Any = network.group(range(first_of_node, first_of_node + case.ranks_per_node), rank)
    between: Any = network.group(
        range(rank % case.ranks_per_node, case.world, case.ranks_per_node), rank
    )
    return Hierarchical(group, between, inside, case.experts, **options)


def _run_layer(
    kind: str,
    case: Case,
    network: Network,
    rank: int,
    *,
    recompute: bool = False,
    **options: Any,
) -> Result:
    """Run forward and backward of a layer on one rank; `recompute` runs its exchanges twice."""
    dispatcher = _make_dispatcher(kind, case, network, rank, **options)
    ids_TK, (x_TH, w_TK) = case.ids_TK(rank), case.inputs(rank)
    factors_E = case.factors_E().requires_grad_()
    factors_L = factors_E[rank * case.local : (rank + 1) * case.local]
    exchanges = dispatcher.start_plan(ids_TK, HEADER, hidden_bytes=8 * HIDDEN).finish()
    tokens = Tokens(x_TH, w_TK, ids_TK)
    arrived, weights, counts = [], [], torch.zeros(case.local, dtype=torch.int64)
    for _ in range(2 if recompute else 1):
        arrived, weights, counts = [], [], torch.zeros_like(counts)
        with OverlappedChunks() as chunks:
            for arriving in chunks.start_chunks(exchanges, tokens):
                rows_RH, w_RK, ids_RK = arriving.finish()
                counts += torch.tensor(arriving.counts_L)
                local_pairs = (ids_RK < case.local).nonzero().tolist()
                for row, slot in local_pairs:
                    sender, token = rows_RH[row, :2].tolist()
                    expert = rank * case.local + int(ids_RK[row, slot])
                    arrived.append((int(sender), int(token), expert))
                    weights.append(w_RK[row, slot].item())
                factor_RK = torch.cat([factors_L, factors_L.new_zeros(1)])[ids_RK]
                chunks.send_back(arriving, rows_RH * (factor_RK * w_RK).sum(1, keepdim=True))
        out_TH = chunks.finish()
    (out_TH * (x_TH.detach() + rank)).sum().backward()
    assert x_TH.grad is not None and w_TK.grad is not None and factors_E.grad is not None
    grads = (x_TH.grad, w_TK.grad, factors_E.grad)
    return Result(arrived, weights, counts.tolist(), out_TH.detach(), grads)


def _run_all_ranks(kind: str, case: Case, **options: Any) -> tuple[list[Result], Network]:
    network = Network(case.world)
    return network.run(partial(_run_layer, kind, case, network, **options)), network


def _check_arrivals(case: Case, results: list[Result]) -> None:
    """Check that each (token, expert) pair reaches its expert's rank once, with its weight."""
    for rank, result in enumerate(results):
        first_expert, expected = rank * case.local, {}
        for sender in range(case.world):
            weights = case.inputs(sender)[1].tolist()
            for token, experts in enumerate(case.ids_TK(sender).tolist()):
                for slot, expert in enumerate(experts):
                    if first_expert <= expert < first_expert + case.local:
                        expected[sender, token, expert] = weights[token][slot]
        received = dict(zip(result.arrived, result.weights, strict=True))
        assert len(result.arrived) == len(received), f"{case}: a pair arrived twice"
        assert received == expected, case
        counts = Counter(expert - first_expert for *_, expert in received)
        assert result.counts_L == [counts[expert] for expert in range(case.local)], case


def _check_results(case: Case, results: list[Result]) -> None:
    """Compare outputs and gradients with the formula."""
    factors_E = case.factors_E().requires_grad_()
    for rank, result in enumerate(results):
        x_TH, w_TK = case.inputs(rank)
        want_TH = x_TH * (factors_E[case.ids_TK(rank)] * w_TK).sum(1, keepdim=True)
        (want_TH * (x_TH.detach() + rank)).sum().backward()
        for name, got, want in (
            ("out", result.out_TH, want_TH.detach()),
            ("grad of x", result.grads[0], x_TH.grad),
            ("grad of weights", result.grads[1], w_TK.grad),
        ):
            assert_close(f"{case}: {name} of rank {rank}", got, want, 1e-12)
    assert factors_E.grad is not None
    total_E = sum(result.grads[2] for result in results)
    assert_close(f"{case}: grad of the experts", total_E, factors_E.grad, 1e-12)


def _count_expected_bytes(case: Case) -> Counter[tuple[int, int, int]]:
    """Count the bytes of each (sender, receiver, bytes of a row), one token at a time."""
    rows: Counter[tuple[int, int]] = Counter()
    for sender in range(case.world):
        sender_node, local_rank = case.node_of(sender), sender % case.ranks_per_node
        for ranks in case.visits(sender):
            for node in {case.node_of(rank) for rank in ranks}:
                relay = node * case.ranks_per_node + local_rank
                if node != sender_node:
                    rows[sender, relay] += 1
                for rank in ranks:
                    if case.node_of(rank) == node and rank != relay:
                        rows[relay, rank] += 1
    sent: Counter[tuple[int, int, int]] = Counter()
    for (sender, receiver), number in rows.items():
        for a, b in ((sender, receiver), (receiver, sender)):
            # Results are sent back, and their gradients in the direction of the tokens.
            sent[a, b, 8 * HIDDEN] += number * 8 * HIDDEN
        # Weights and ids are sent behind the tokens; only the weights have a gradient.
        row_bytes = 8 * message_columns(HIDDEN + 2 * case.top_k)
        grad_bytes = 8 * message_columns(HIDDEN + case.top_k)
        sent[sender, receiver, row_bytes] += number * row_bytes
        sent[receiver, sender, grad_bytes] += number * grad_bytes
    return sent


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_pair_is_received_once_and_no_row_is_sent_twice(every: int) -> None:
    """The test compares pairs, weights, counts, results and the bytes of every link."""
    for case in CASES[::every]:
        results, network = _run_all_ranks("hierarchical", case)
        _check_arrivals(case, results)
        _check_results(case, results)
        assert +network.sent == +_count_expected_bytes(case), case
        assert set(network.counted.values()) == {1}, case


def _sum_bytes_between_nodes(case: Case, network: Network) -> int:
    """Sum the bytes of results and of their gradients that were sent between nodes."""
    return sum(
        number
        for (a, b, size), number in network.sent.items()
        if case.node_of(a) != case.node_of(b) and size == 8 * HIDDEN
    )


def test_a_router_limited_to_groups_sends_fewer_bytes_between_nodes() -> None:
    """A router like DeepSeek-V3's chooses a token's experts from few groups.

    If each group is on one node, a token is sent to few nodes. Here each token uses 2 of 4 nodes.
    For about half of the tokens its own node is one of them, to which nothing is sent.
    """
    results, network = _run_all_ranks("hierarchical", LIMITED)
    _check_arrivals(LIMITED, results)
    nodes = [
        {LIMITED.node_of(rank) for rank in ranks} - {LIMITED.node_of(sender)}
        for sender in range(LIMITED.world)
        for ranks in LIMITED.visits(sender)
    ]
    assert max(map(len, nodes)) <= LIMITED.groups_drawn
    pairs = sum(map(len, nodes))
    limited_bytes = _sum_bytes_between_nodes(LIMITED, network)
    assert limited_bytes == 2 * pairs * 8 * HIDDEN
    unlimited = replace(LIMITED, groups=1, groups_drawn=1)
    _, network = _run_all_ranks("hierarchical", unlimited)
    assert limited_bytes < 0.75 * _sum_bytes_between_nodes(unlimited, network)
    # all_to_all sends a token once to each rank with one of its experts, so it sends more rows.
    _, network = _run_all_ranks("all_to_all", LIMITED)
    assert limited_bytes < 0.75 * _sum_bytes_between_nodes(LIMITED, network)


def test_a_recompute_sends_the_same_rows_without_new_counts() -> None:
    case = CASES[1]
    plain, network = _run_all_ranks("hierarchical", case)
    recomputed, other_network = _run_all_ranks("hierarchical", case, recompute=True)
    for first, second in zip(plain, recomputed, strict=True):
        assert first.arrived == second.arrived and torch.equal(first.out_TH, second.out_TH)
        assert all(torch.equal(a, b) for a, b in zip(first.grads, second.grads, strict=True))
    assert network.counted == other_network.counted


class _HostSyncs(TorchDispatchMode):
    """Lists the operators for whose result the host must wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        # `x[mask]` and `int(x)` call such operators.
        if any(word in name for word in ("local_scalar", "nonzero", "masked_select", "unique")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_layer_has_only_one_host_sync() -> None:
    """The host reads the counts. Neither the exchange inside nodes nor backward needs a sync."""
    case = CASES[1]
    lists: list[Any] = []
    tolist = Tensor.tolist

    def run_layer(rank: int) -> list[str]:
        dispatcher = _make_dispatcher("hierarchical", case, network, rank)
        ids_TK, (x_TH, w_TK) = case.ids_TK(rank), case.inputs(rank)
        with _HostSyncs() as syncs:
            exchanges = dispatcher.start_plan(ids_TK, HEADER, hidden_bytes=0).finish()
            tokens = Tokens(x_TH, w_TK, ids_TK)
            with OverlappedChunks() as chunks:
                for arriving in chunks.start_chunks(exchanges, tokens):
                    rows_RH, w_RK, _ = arriving.finish()
                    chunks.send_back(arriving, rows_RH * w_RK.sum(1, keepdim=True))
            chunks.finish().sum().backward()
        return syncs.names

    def counted(tensor: Tensor) -> Any:
        lists.append(tensor.shape)
        return tolist(tensor)

    network = Network(case.world)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Tensor, "tolist", counted)
        assert network.run(run_layer) == [[]] * case.world
    # The host reads whether headers differ. For each chunk it reads the number of rows to and from
    # nodes, of rows to and from the ranks of its node, and of pairs of its experts.
    numbers = 2 * case.nodes + 2 * case.ranks_per_node + case.local
    assert lists == [(1 + case.chunks * numbers,)] * case.world


def test_two_runs_give_the_same_bits() -> None:
    for case in (CASES[2], LIMITED):
        runs = [_run_all_ranks("hierarchical", case)[0] for _ in range(2)]
        for first, second in zip(*runs, strict=True):
            assert torch.equal(first.out_TH, second.out_TH)
            assert all(torch.equal(a, b) for a, b in zip(first.grads, second.grads, strict=True))


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_no_dispatcher_uses_triton_if_torch_was_requested(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: list[bool] = []

    def record_choice(*args: Any, triton: bool) -> Tensor:
        choices.append(triton)
        return add_rows(*args, triton=triton)

    monkeypatch.setattr(all_to_all, "add_rows", record_choice)
    nodes = SimpleNamespace(between=_Mesh(), inside=_Mesh()) if kind == "hierarchical" else None
    meshes: Any = SimpleNamespace(dispatch=_Mesh(), nodes=nodes, etp_size=1)
    for backend in ("torch", "auto", "triton"):
        config = ParallelConfig(experts_backend=backend)
        requested: Any = make_dispatcher(config, meshes, num_experts=8)
        choices.clear()
        _run_all_ranks(kind, CASES[0], triton_sums=requested.triton_sums)
        assert set(choices) == {backend != "torch"}


class _Mesh:
    """Stands for a mesh of two ranks."""

    def size(self) -> int:
        return 2

    def get_group(self) -> None:
        return None


def test_two_rows_leave_the_node_in_the_example_of_the_docstring() -> None:
    """all_to_all would send three rows."""
    case = Case(0, 2, 2, 4, 2, 1, (2, 0, 0, 0))
    ids_TK = torch.tensor([[2, 3], [1, 3]])
    rows: dict[str, Counter[tuple[int, int]]] = {}
    for kind in ("hierarchical", "all_to_all"):
        network = Network(4)

        def dispatch(rank: int, kind: str = kind, network: Network = network) -> list[int]:
            own_ids_TK = ids_TK if rank == 0 else ids_TK[:0]
            dispatcher = _make_dispatcher(kind, case, network, rank)
            (exchange,) = dispatcher.start_plan(own_ids_TK, HEADER, hidden_bytes=0).finish()
            x_TH = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[: exchange.num_tokens]
            w_TK = torch.ones(exchange.num_tokens, 2)
            tokens = Tokens(x_TH, w_TK, own_ids_TK)
            return exchange.start(tokens).finish()[0][:, 0].tolist()

        assert network.run(dispatch) == [[], [4.0], [1.0], [1.0, 4.0]]
        rows[kind] = Counter()
        for (sender, receiver, size), number in network.sent.items():
            if size == 4 * message_columns(3 + 2 * 2):
                rows[kind][sender, receiver] += number // size
    assert +rows["hierarchical"] == Counter({(0, 2): 2, (2, 3): 2, (0, 1): 1})
    assert +rows["all_to_all"] == Counter({(0, 1): 1, (0, 2): 1, (0, 3): 2})


def test_max_rows_counts_only_rows_for_the_ranks_own_experts() -> None:
    """Rows that a rank forwards to other ranks of its node do not count. Every rank raises."""
    case = Case(0, 2, 2, 4, 1, 2, (2, 3, 0, 4))
    ids_of_expert_1 = torch.ones(4, 1, dtype=torch.int64)

    def plan(kind: str, limit: int, network: Network, rank: int) -> str:
        dispatcher = _make_dispatcher(kind, case, network, rank, max_rows=limit)
        try:
            ids_TK = ids_of_expert_1[: case.tokens[rank]]
            dispatcher.start_plan(ids_TK, HEADER, hidden_bytes=0).finish()
        except RuntimeError as error:
            return str(error)
        return ""

    for kind in ("hierarchical", "all_to_all"):
        network = Network(4)
        assert network.run(partial(plan, kind, 9, network)) == [""] * 4
        network = Network(4)
        for message in network.run(partial(plan, kind, 8, network)):
            assert "rank 1 would get 9 rows, more than max_tokens_per_rank=8 " in message


def test_the_cases_contain_all_edge_cases() -> None:
    assert {(case.nodes, case.ranks_per_node) for case in CASES} == set(GRIDS)
    assert sum(case.top_k == case.experts for case in CASES) >= 8
    assert sum(0 in case.tokens for case in CASES) >= 10
    assert sum(min(case.tokens) < case.chunks for case in CASES) >= 10
    assert sum(case.experts == case.world for case in CASES) >= 5
