"""Dispatch and combine by all-to-all have exact indices, gradients and errors on 2 and 4 ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll, AllToAllExchange, order_rows
from hf_moe_ep.moe.dispatch.async_exchange import DispatchedRows
from hf_moe_ep.moe.dispatch.constants import Constants
from hf_moe_ep.ops import reference
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.permute import count_pairs

HIDDEN, FFN = 5, 3
HEADER = Header(
    forward=3,
    layer=1,
    training=True,
    grad=True,
    checkpointed=False,
    recompute=False,
    top_k=2,
    itemsize=4,
)
Group = dist.ProcessGroup


class DispatchedChunk(NamedTuple):
    """The dispatch of one chunk: its plan, its rows and the counts of local experts."""

    exchange: AllToAllExchange
    rows: DispatchedRows
    counts_L: list[int]


def dispatch(
    x_TH: Tensor, ids_TK: Tensor, w_TK: Tensor, *, num_experts: int, group: Group, header: Header
) -> tuple[Tensor, Tensor, Tensor, DispatchedChunk]:
    """Dispatch one chunk. Returns the received rows, their ids and weights, and the chunk."""
    dispatcher, tokens = AllToAll(group, num_experts), Tokens(x_TH, w_TK, ids_TK)
    planning = dispatcher.start_plan(ids_TK, header)
    dispatcher.prepare(tokens)
    (exchange,) = planning.finish()
    arriving = exchange.start(tokens)
    rows_RH, w_RK, ids_RK = arriving.finish()
    return rows_RH, ids_RK, w_RK, DispatchedChunk(exchange, arriving, arriving.counts_L)


def combine(rows_RH: Tensor, arrived: DispatchedChunk, group: Group) -> Tensor:
    return arrived.rows.start_combine(rows_RH).finish()


@dataclass(frozen=True)
class Case:
    """A random routing: `tokens` has the number of tokens of each rank.

    If `only` is given, tokens choose only these experts.
    """

    name: str
    world: int
    tokens: tuple[int, ...]
    experts: int
    top_k: int
    only: tuple[int, ...] = ()

    def ids_TK(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 + rank)
        pool = torch.tensor(self.only or range(self.experts))
        order_TE = torch.rand(self.tokens[rank], len(pool), generator=generator).argsort(1)
        return pool[order_TE[:, : self.top_k]]

    def inputs(self, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(20 + rank)
        tokens = self.tokens[rank]
        x_TH = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
        w_TK = torch.rand(tokens, self.top_k, dtype=torch.float64, generator=generator) + 0.1
        return x_TH.to(dtype).requires_grad_(), w_TK.requires_grad_()


CASES = [
    Case("different tokens per rank", 2, (7, 3), 6, 3),
    Case("rank 1 has no tokens", 2, (5, 0), 4, 2),
    Case("no rank has tokens", 2, (0, 0), 4, 2),
    Case("all to rank 0", 2, (4, 6), 6, 3, only=(0, 1, 2)),
    Case("all to rank 1", 2, (4, 6), 6, 2, only=(3, 4, 5)),
    Case("one expert", 2, (3, 5), 4, 1, only=(2,)),
    Case("every expert", 2, (3, 5), 4, 4),
    Case("one expert per rank", 2, (3, 5), 2, 2),
    Case("4 ranks", 4, (7, 1, 3, 5), 12, 3),
    Case("4 ranks, two without tokens", 4, (0, 9, 0, 2), 8, 5),
    Case("4 ranks, all to rank 2", 4, (2, 3, 4, 5), 8, 2, only=(4, 5)),
    Case("4 ranks, all to others", 4, (6, 0, 0, 0), 8, 3, only=(2, 3, 4, 5, 6, 7)),
    Case("4 ranks, top-1", 4, (3, 3, 3, 3), 4, 1),
]


def _check_example(rank: int, group: Group) -> None:
    """Check the example of all_to_all.py, with a token for experts 1 and 2 on rank 1."""
    ids_TK = torch.tensor([[0, 3], [2, 3]] if rank == 0 else [[1, 2]])
    x_TH = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]] if rank == 0 else [[7.0, 8.0, 9.0]])
    w_TK = torch.tensor([[0.5, 0.25], [2.0, 4.0]] if rank == 0 else [[8.0, 16.0]])
    rows, ids, weights, arrived = dispatch(
        x_TH, ids_TK, w_TK, num_experts=4, group=group, header=HEADER
    )
    sent = (
        arrived.exchange.token_of_row_N.tolist(),
        arrived.exchange.row_TJ.tolist(),
        arrived.exchange.send_counts,
        arrived.exchange.num_own,
    )
    received = (arrived.exchange.recv_counts, arrived.counts_L)
    if rank == 0:
        assert sent == ([0, 1, 0], [[0, 2], [1, 3]], [0, 2], 1)  # 3 = "no row"
        assert received == ([0, 1], [1, 1])
        assert rows.tolist() == [[7, 8, 9], [1, 2, 3]]  # the rows that stayed are the last
        assert ids.tolist() == [[1, 2], [0, 2]]  # 2 = "not on this rank"
        assert weights.tolist() == [[8, 16], [0.5, 0.25]]
    else:
        assert sent == ([0, 0], [[0, 1]], [1, 0], 1)
        assert received == ([2, 0], [2, 2])
        assert rows.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        assert ids.tolist() == [[2, 1], [0, 1], [2, 0]]
        assert weights.tolist() == [[0.5, 0.25], [2, 4], [8, 16]]
    combined = combine(rows * (10 ** (rank + 1)), arrived, group)
    want = [[110, 220, 330], [400, 500, 600]] if rank == 0 else [[770, 880, 990]]
    assert combined.tolist() == want


def test_order_rows_gives_the_table_of_its_docstring() -> None:
    sends_DT = torch.tensor([[True, False], [True, True]])
    order = order_rows(sends_DT, rank=0, rows_per_token=2, constants=Constants())
    assert order.token_X.tolist()[:3] == [0, 1, 0]
    assert order.row_TJ.tolist() == [[0, 2], [1, 3]]
    # On rank 1, token 1 has no row for rank 0. Its entry is 3 ("no row"), behind the rows 0 to 2.
    order = order_rows(sends_DT, rank=1, rows_per_token=2, constants=Constants())
    assert order.token_X.tolist()[:3] == [0, 0, 1]
    assert order.row_TJ.tolist() == [[0, 1], [3, 2]]
    # With three ranks and at most two rows per token, "no row" (3) is the last entry of a token.
    sends_DT = torch.tensor([[True, False], [False, True], [True, False]])
    order = order_rows(sends_DT, rank=1, rows_per_token=2, constants=Constants())
    assert order.token_X.tolist()[:3] == [0, 0, 1]
    assert order.row_TJ.tolist() == [[0, 1], [2, 3]]


@contextmanager
def _count_rows() -> Iterator[list[tuple[int, int]]]:
    """Yield a list of (rows sent, bytes per row), one entry for each all-to-all of rows."""
    calls: list[tuple[int, int]] = []
    original = dist.all_to_all_single

    def count_and_call(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.is_floating_point():
            calls.append((rows.shape[0], rows[:1].nbytes if rows.shape[0] else 0))
        return original(out, rows, *args, **kwargs)

    dist.all_to_all_single = count_and_call
    try:
        yield calls
    finally:
        dist.all_to_all_single = original


def _check_rows(case: Case, rank: int, group: Group) -> None:
    ranks, local = dist.get_world_size(group), case.experts // dist.get_world_size(group)
    ids_TK, (x_TH, w_TK) = case.ids_TK(rank), case.inputs(rank)
    with _count_rows() as calls:
        rows_RH, ids_RK, w_RK, arrived = dispatch(
            x_TH, ids_TK, w_TK, num_experts=case.experts, group=group, header=HEADER
        )
        out_TH = combine(rows_RH, arrived, group)
        out_TH.sum().backward()
    # Count the distinct (token, rank) pairs, one token at a time.
    visits = [{expert // local for expert in experts} for experts in ids_TK.tolist()]
    distinct = [sum(other in ranks_of_token for ranks_of_token in visits) for other in range(ranks)]
    assert arrived.exchange.num_own == distinct[rank], case.name
    distinct[rank] = 0
    assert arrived.exchange.send_counts == distinct, case.name
    # Forward sends rows with their routing, then results. Backward sends the gradients of results,
    # then the gradients of rows. A rank sends no rows to itself.
    sent, received = sum(distinct), rows_RH.shape[0] - arrived.exchange.num_own
    numbers = [rows for rows, _ in calls]
    assert numbers == [sent, received, sent, received], f"{case.name}: {numbers}"
    visits_T = torch.tensor([len(ranks_of_token) for ranks_of_token in visits], dtype=torch.float64)
    assert_close("identity experts", out_TH, x_TH * visits_T.unsqueeze(1), 1e-15)
    assert x_TH.grad is not None
    assert torch.equal(x_TH.grad, visits_T.unsqueeze(1).expand_as(x_TH))
    # A received id is a local expert or "no expert", and each row has at least one local expert.
    assert ids_RK.shape == (received + arrived.exchange.num_own, case.top_k)
    assert ids_RK.dtype == torch.int64
    assert ((ids_RK >= 0) & (ids_RK <= local)).all() and (ids_RK < local).any(1).all()
    assert count_pairs(ids_RK, local + 1)[:local].tolist() == arrived.counts_L
    assert w_RK.dtype == torch.float64


def _check_gradients(case: Case, rank: int, group: Group) -> None:
    """Compare the output and all gradients with one process that holds all experts."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((case.experts, 2 * FFN, HIDDEN), (case.experts, HIDDEN, FFN))
    all_weights = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    local = case.experts // dist.get_world_size(group)
    local_experts = slice(rank * local, (rank + 1) * local)
    weights = [w[local_experts].clone().requires_grad_() for w in all_weights]
    ids_TK, (x_TH, w_TK) = case.ids_TK(rank), case.inputs(rank)
    rows, ids_RK, w_RK, arrived = dispatch(
        x_TH, ids_TK, w_TK, num_experts=case.experts, group=group, header=HEADER
    )
    experts, formula = ExpertWeights(weights[0], None, weights[1], None), ExpertFormula()
    rows = expert_mlp(rows, ids_RK, w_RK, experts, formula, counts_L=arrived.counts_L)
    out_TH = combine(rows, arrived, group)
    (out_TH * (x_TH.detach() + rank)).sum().backward()

    all_weights = [w.requires_grad_() for w in all_weights]
    for source, tokens in enumerate(case.tokens):
        if not tokens:
            continue
        x, w = case.inputs(source)
        all_experts = ExpertWeights(all_weights[0], None, all_weights[1], None)
        want = reference.expert_mlp(x, case.ids_TK(source), w, all_experts, formula)
        (want * (x.detach() + source)).sum().backward()
        if source == rank:
            assert_close(f"{case.name}: out", out_TH, want, 1e-12)
            assert_close(f"{case.name}: grad of x", x_TH.grad, x.grad, 1e-12)
            assert_close(f"{case.name}: grad of weights", w_TK.grad, w.grad, 1e-12)
    for name, got, want in zip(("gate_up", "down"), weights, all_weights):
        want_grad = torch.zeros_like(want) if want.grad is None else want.grad
        assert_close(f"{case.name}: grad of {name}", got.grad, want_grad[local_experts], 1e-12)


def _check_frozen(case: Case, rank: int, group: Group) -> None:
    """Check the gradients if only x, only the weights, or neither needs a gradient."""
    for x_needs, w_needs in ((True, False), (False, True), (False, False)):
        x_TH, w_TK = (t.detach() for t in case.inputs(rank))
        x_TH.requires_grad_(x_needs)
        w_TK.requires_grad_(w_needs)
        rows_RH, _, w_RK, arrived = dispatch(
            x_TH, case.ids_TK(rank), w_TK, num_experts=case.experts, group=group, header=HEADER
        )
        out_TH = combine(rows_RH * w_RK.sum(1, keepdim=True), arrived, group)
        assert out_TH.requires_grad == (x_needs or w_needs)
        if out_TH.requires_grad:
            out_TH.sum().backward()
        assert (x_TH.grad is not None) == x_needs and (w_TK.grad is not None) == w_needs


# {top-k: columns of a message in bf16}. A row of 5 takes 6 columns, each of the 2 K fp32 numbers
# takes 2, and the sum is rounded up to a multiple of 16.
MIXED_COLUMNS = {1: 16, 2: 16, 3: 32, 4: 32, 5: 32}


def _check_mixed_dtypes(case: Case, rank: int, group: Group) -> None:
    """Check that bf16 rows are sent in bf16, and weights in fp32 without rounding."""
    for weights_dtype in (torch.float32, torch.bfloat16):
        x_TH, w_TK = case.inputs(rank, torch.bfloat16)
        w_TK = w_TK.detach().to(weights_dtype).requires_grad_()
        with _count_rows() as calls:
            rows_RH, _, w_RK, arrived = dispatch(
                x_TH, case.ids_TK(rank), w_TK, num_experts=case.experts, group=group, header=HEADER
            )
        assert rows_RH.dtype == torch.bfloat16 and w_RK.dtype == torch.float32
        if calls[0][0]:
            assert [size for _, size in calls] == [2 * MIXED_COLUMNS[case.top_k]]
        weights_of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(weights_of_ranks, w_TK.detach(), group=group)
        sent = {float(w) for weights in weights_of_ranks for w in weights.double().flatten()}
        assert {float(w) for w in w_RK.detach().double().flatten()} <= sent
        combine(
            rows_RH * w_RK.sum(1, keepdim=True).to(rows_RH.dtype), arrived, group
        ).sum().backward()
        assert x_TH.grad is not None and x_TH.grad.dtype == torch.bfloat16
        assert w_TK.grad is not None and w_TK.grad.dtype == weights_dtype


def _check_headers(rank: int, group: Group) -> None:
    """Check that every rank's error names both positions if the last rank differs in one field."""
    last = dist.get_world_size(group) - 1
    ids_TK, w_TK = torch.tensor([[0, 3]]), torch.ones(1, 2)
    table = {
        "forward": (4, "MoE layer 1 of forward 4 (training;"),
        "layer": (0, "MoE layer 0 of forward 3 (training;"),
        "training": (False, "MoE layer 1 of forward 3 (evaluation;"),
        "grad": (False, "MoE layer 1 of forward 3 (training, no_grad;"),
        "checkpointed": (True, "MoE layer 1 of forward 3 (training, checkpointed;"),
        "recompute": (True, "MoE layer 1 of forward 3 (training, recompute;"),
        "top_k": (5, "MoE layer 1 of forward 3 (training; top-5, 4 bytes"),
        "itemsize": (2, "MoE layer 1 of forward 3 (training; top-2, 2 bytes"),
    }
    ranks = dist.get_process_group_ranks(group)
    for field, (value, position) in table.items():
        header = replace(HEADER, **{field: value}) if rank == last else HEADER
        with pytest.raises(RuntimeError) as caught:
            dispatch(torch.ones(1, 3), ids_TK, w_TK, num_experts=4, group=group, header=header)
        message = str(caught.value)
        assert f"rank {ranks[last]}: {position}" in message, message
        assert f"rank {ranks[0]}: MoE layer 1 of forward 3 (training;" in message, message
        dist.barrier(group)


CheckOfCase = Callable[[Case, int, Group], None]
CHECKS_OF_EVERY_CASE: dict[str, CheckOfCase] = {
    "rows": _check_rows,
    "gradients": _check_gradients,
    "frozen": _check_frozen,
    "mixed dtypes": _check_mixed_dtypes,
}


def _run_check(check: CheckOfCase, case: Case, rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    check(case, rank, dist.group.WORLD)


def rows_of_the_docstrings_example_are_exact(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    _check_example(rank, dist.group.WORLD)


def ranks_at_different_positions_raise_an_error(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    _check_headers(rank, dist.group.WORLD)


class _OperatorsBeforeTransfer(TorchDispatchMode):
    """Lists the operators that are launched between the counts and the first transfer of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = False
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counting &= "alltoall" not in str(func)
        # Views and `empty` launch no kernel. `fill_` comes from support/poison.py.
        launches_nothing = func.is_view or "empty" in str(func) or "fill_" in str(func)
        if self.counting and not launches_nothing:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def only_one_operator_runs_between_counts_and_rows(rank: int, world: int) -> None:
    """Once the counts are known, the device only selects the rows before their transfer starts."""
    assert dist.group.WORLD is not None
    case = CASES[0]
    ids_TK, (x_TH, w_TK) = case.ids_TK(rank), case.inputs(rank)
    w_TK = w_TK.bfloat16()
    original = AllToAllExchange.from_counts
    with _OperatorsBeforeTransfer() as mode, pytest.MonkeyPatch.context() as patches:

        def start_counting(*args: Any, **kwargs: Any) -> AllToAllExchange:
            mode.counting = True
            return original(*args, **kwargs)

        patches.setattr(AllToAllExchange, "from_counts", start_counting)
        dispatch(x_TH, ids_TK, w_TK, num_experts=6, group=dist.group.WORLD, header=HEADER)
    assert mode.operations == ["aten.index_select.default"], mode.operations


def an_exchange_keeps_two_integers_per_possible_row(rank: int, world: int) -> None:
    """The integers are int32, and not in views of a larger tensor.

    An exchange also has one int64 for each expert, and one for "no expert".
    """
    assert dist.group.WORLD is not None
    tokens, top_k, experts = 1000, 2, 12
    case = Case("many tokens", world, (tokens,) * world, experts, top_k)
    ids_TK, (x_TH, w_TK) = case.ids_TK(rank), case.inputs(rank)
    *_, arrived = dispatch(
        x_TH, ids_TK, w_TK, num_experts=experts, group=dist.group.WORLD, header=HEADER
    )
    tensors = [value for value in vars(arrived.exchange).values() if isinstance(value, Tensor)]
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert num_bytes == 2 * 4 * tokens * top_k + 4 + 8 * (experts + 1), num_bytes


def _check_groups(grid: list[list[int]], rank: int, world: int) -> None:
    """Run the checks in two groups, in which ranks are numbered from 0."""
    groups = [dist.new_group(ranks) for ranks in grid]
    group = next(group for group, ranks in zip(groups, grid, strict=True) if rank in ranks)
    group_rank = dist.get_rank(group)
    _check_example(group_rank, group)
    _check_gradients(CASES[0], group_rank, group)
    _check_headers(group_rank, group)


def _make_checks(world: int) -> dict[str, Callable[..., None]]:
    return {
        f"{case.name}: {name}": partial(_run_check, check, case)
        for case in CASES
        if case.world == world
        for name, check in CHECKS_OF_EVERY_CASE.items()
    }


GROUPS = {
    "groups of consecutive ranks": partial(_check_groups, [[0, 1], [2, 3]]),
    "groups of every other rank": partial(_check_groups, [[0, 2], [1, 3]]),
}
TWO_RANKS = on_ranks(
    2,
    rows_of_the_docstrings_example_are_exact,
    ranks_at_different_positions_raise_an_error,
    only_one_operator_runs_between_counts_and_rows,
    _make_checks(2),
)
FOUR_RANKS = on_ranks(
    4,
    ranks_at_different_positions_raise_an_error,
    an_exchange_keeps_two_integers_per_possible_row,
    GROUPS,
    _make_checks(4),
)


@pytest.mark.parametrize("claim", TWO_RANKS + FOUR_RANKS)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
