"""Test dispatch with random routing on 4 ranks: results, bytes, repeated runs, and max_rows.

The expected results come from one process that runs every expert on every token in fp64 and
multiplies by the routing weights (0 for experts that were not chosen).
"""

import os
import random
import re
import signal
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from support.close import assert_close
from support.messages import message_columns
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights

HIDDEN, FFN = 37, 3  # not multiples of 16, so that messages are filled up
NUM_CASES = 200
FORMULA = ExpertFormula()


@dataclass(frozen=True)
class Case:
    """A random routing with `tokens[r]` tokens on rank r of the ep group, and experts of `pool`."""

    seed: int
    ep: int
    tokens: tuple[int, ...]
    experts: int
    top_k: int
    chunks: int
    pool: tuple[int, ...]

    @property
    def local(self) -> int:
        return self.experts // self.ep

    def ids_TK(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(3 * self.seed + rank)
        order = torch.rand(self.tokens[rank], len(self.pool), generator=generator).argsort(1)
        return torch.tensor(self.pool)[order[:, : self.top_k]]

    def inputs(self, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7 * self.seed + rank)
        x_TH = torch.randn(self.tokens[rank], HIDDEN, dtype=torch.float64, generator=generator)
        w_TK = torch.rand(self.tokens[rank], self.top_k, dtype=torch.float64, generator=generator)
        return x_TH.to(dtype).requires_grad_(), w_TK.to(dtype).requires_grad_()

    def weights(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = ((self.experts, 2 * FFN, HIDDEN), (self.experts, HIDDEN, FFN))
        return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]

    def header(self) -> Header:
        return Header(self.seed, 0, True, True, False, False, self.top_k, 8)


def _draw_case(seed: int) -> Case:
    """Draw a case: every 4th has k = E, every 5th a rank without tokens, every 3rd few experts."""
    rng = random.Random(seed)
    ep = rng.choice([2, 4])
    experts = ep * rng.randint(1, 4)
    top_k = experts if seed % 4 == 0 else rng.randint(1, experts)
    tokens = [rng.randint(0, 300) for _ in range(ep)]
    if seed % 5 == 0:
        tokens[rng.randrange(ep)] = 0
    pool = list(range(experts))
    if seed % 3 == 0:
        pool = sorted(rng.sample(pool, rng.randint(top_k, experts)))
    return Case(seed, ep, tuple(tokens), experts, top_k, rng.randint(1, 4), tuple(pool))


def _run(
    case: Case, group: dist.ProcessGroup, weights: list[Tensor] | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Return the output and the gradients of tokens and routing weights.

    Without `weights` of experts, the received rows are sent back unchanged.
    """
    rank = dist.get_rank(group)
    x_TH, w_TK = case.inputs(rank, options.get("dtype", torch.float64))
    ids_TK = options.get("ids_TK", case.ids_TK(rank))
    dispatcher = AllToAll(group, case.experts, case.chunks, options.get("max_rows"))
    exchanges = dispatcher.start_plan(ids_TK, case.header()).finish()
    chunks = Tokens(x_TH, w_TK, ids_TK).split([exchange.num_tokens for exchange in exchanges])
    arriving = [exchange.start(chunk) for exchange, chunk in zip(exchanges, chunks, strict=True)]
    returning = []
    for arrived in arriving:
        rows_RH, w_RK, ids_RK = arrived.finish()
        if weights is not None:
            experts = ExpertWeights(weights[0], None, weights[1], None)
            rows_RH = expert_mlp(rows_RH, ids_RK, w_RK, experts, FORMULA, counts_L=arrived.counts_L)
        returning.append(arrived.start_combine(rows_RH))
    out_TH = torch.cat([rows.finish() for rows in returning])
    (out_TH * (x_TH.detach() + rank)).sum().backward()
    assert x_TH.grad is not None
    return out_TH, x_TH.grad, torch.zeros(0) if w_TK.grad is None else w_TK.grad


def _run_every_expert(
    x_TH: Tensor, ids_TK: Tensor, w_TK: Tensor, up_EGH: Tensor, down_EHF: Tensor
) -> Tensor:
    gate_ETF, up_ETF = torch.einsum("th,egh->etg", x_TH, up_EGH).chunk(2, dim=2)
    y_ETH = torch.einsum("etf,ehf->eth", functional.silu(gate_ETF) * up_ETF, down_EHF)
    w_TE = x_TH.new_zeros(len(x_TH), len(up_EGH)).scatter(1, ids_TK, w_TK)
    return torch.einsum("te,eth->th", w_TE, y_ETH)


def _check_numbers(case: Case, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    local_experts = slice(rank * case.local, (rank + 1) * case.local)
    all_weights = [w.requires_grad_() for w in case.weights()]
    weights = [w.detach()[local_experts].clone().requires_grad_() for w in all_weights]
    got = _run(case, group, weights)
    for other, tokens in enumerate(case.tokens):
        if tokens:
            x, w = case.inputs(other)
            out = _run_every_expert(x, case.ids_TK(other), w, *all_weights)
            (out * (x.detach() + other)).sum().backward()
            if other == rank:
                names = ("out", "grad of x", "grad of weights")
                for name, got_tensor, want in zip(names, got, (out, x.grad, w.grad), strict=True):
                    assert_close(f"{case}: {name}", got_tensor, want, 1e-12)
    for name, got_tensor, want in zip(("gate_up", "down"), weights, all_weights, strict=True):
        grad = torch.zeros_like(want) if want.grad is None else want.grad
        assert_close(f"{case}: grad of {name}", got_tensor.grad, grad[local_experts], 1e-11)


class _CountSent(TorchDispatchMode):
    """Count the bytes that this rank sends, by kind and by the bytes of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func) == "c10d.alltoall_base_.default":
            group, splits = dist.ProcessGroup.unbox(args[2]), args[4]
            if not args[1].is_floating_point():
                self.sent["counts", 0] += args[1].nbytes // group.size() * (group.size() - 1)
                return func(*args, **(kwargs or {}))
            rows_to_itself = splits[group.rank()]
            assert rows_to_itself == 0, f"a rank sends {rows_to_itself} rows to itself"
            size = args[1].shape[1] * args[1].element_size()
            self.sent["rows", size] += sum(splits) * size
        return func(*args, **(kwargs or {}))


def _check_bytes(case: Case, group: dist.ProcessGroup) -> None:
    """A token is sent once to each other rank of its experts, and its result is sent back once. The
    gradients of both are sent in the same way.
    """
    rank = dist.get_rank(group)
    weights = [w[: case.local].clone().requires_grad_() for w in case.weights()]
    with _CountSent() as mode:
        _run(case, group, weights)
    sent = received = 0
    for other in range(case.ep):
        for experts in case.ids_TK(other).tolist():
            owners = {expert // case.local for expert in experts}
            sent += len(owners - {rank}) if other == rank else 0
            received += rank in owners if other != rank else 0
    # The fields of the header, and for each chunk the rows and the pairs of each expert there.
    numbers = 9 + case.chunks * (1 + case.local)
    want = Counter({("counts", 0): (case.ep - 1) * numbers * 8})
    # This rank sends tokens and the gradients of their results. For received tokens it sends their
    # results and the gradients of the tokens. Weights and ids are sent behind tokens, gradients of
    # weights behind the tokens' gradients, in messages of a multiple of 16 columns.
    for columns, num_rows in (
        (HIDDEN, sent + received),
        (message_columns(HIDDEN + 2 * case.top_k), sent),
        (message_columns(HIDDEN + case.top_k), received),
    ):
        want["rows", columns * 8] += num_rows * columns * 8
    assert +mode.sent == +want, f"{case}: {mode.sent}, want {want}"


def _check_repetition(case: Case, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    runs = []
    for _ in range(10):
        weights = [w.float()[: case.local].clone().requires_grad_() for w in case.weights()]
        runs.append((*_run(case, group, weights, dtype=torch.float32), *(w.grad for w in weights)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True)), case
    # With about twice the tokens on the last rank, the rows of other ranks have the same results.
    longer = Case(**{**vars(case), "tokens": (*case.tokens[:-1], 2 * case.tokens[-1] + 1)})
    weights = [w.float()[: case.local].clone() for w in case.weights()]
    for expert_weights in (None, weights):
        base, extended = (
            _run(c, group, expert_weights, dtype=torch.float32) for c in (case, longer)
        )
        if rank < case.ep - 1:
            for a, b in zip(base, extended, strict=True):
                # Experts get more rows, and a matrix product of another size may round differently.
                assert_close(
                    f"{case}: with more tokens", b, a, 0 if expert_weights is None else 1e-6
                )


def _check_max_rows(group: dist.ProcessGroup) -> None:
    """Rank 1 would get 2 + 3 + 0 + 4 = 9 rows. max_rows=9 accepts this, and max_rows=8 does not."""
    case = Case(0, 4, (2, 3, 0, 4), 4, 1, 2, (1,))
    _run(case, group, max_rows=9)
    want = (
        r"MoE layer 0 of forward 0 .*rank 1 would get 9 rows, more than max_tokens_per_rank=8 "
        r"\(rows by rank: 0: 0, 1: 9, 2: 0, 3: 0\)"
    )
    with pytest.raises(RuntimeError, match=want):
        _run(case, group, max_rows=8)


def _check_random_cases(rank: int, world: int, every: int) -> None:
    assert dist.group.WORLD is not None
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {4: dist.group.WORLD, 2: pairs[rank // 2]}
    for seed in range(0, NUM_CASES, every):
        case = _draw_case(seed)
        _check_numbers(case, groups[case.ep])
        if seed % 5 == 0:
            _check_bytes(case, groups[case.ep])
        if seed % 40 == 0:
            _check_repetition(case, groups[case.ep])
    _check_max_rows(dist.group.WORLD)


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_results_bytes_and_repetitions_of_random_cases(every: int) -> None:
    run_ranks(_check_random_cases, 4, every, timeout=300)


def test_cases_include_idle_ranks_and_experts() -> None:
    cases = [_draw_case(seed) for seed in range(NUM_CASES)]
    assert sum(case.top_k == case.experts for case in cases) >= 20
    assert sum(0 in case.tokens for case in cases) >= 30
    assert sum(min(case.tokens) < case.chunks for case in cases) >= 30
    assert sum(case.experts == case.ep for case in cases) >= 20
    idle = [c for c in cases if len({expert // c.local for expert in c.pool}) < c.ep]
    assert len(idle) >= 5  # cases in which nobody chooses an expert of some rank


def _die_in_the_second_step(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(), ep_size=2, dispatch_chunks=2)
    for step in range(3):
        if step == 1 and rank == 1:  # rank 1 dies in the first MoE layer of this step
            AllToAll.start_plan = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        model(**batch(model, 2, 7, seed=rank)).loss.backward()


@pytest.mark.slow
def test_after_a_kill_the_other_ranks_raise() -> None:
    outcomes = run_ranks(
        _die_in_the_second_step, 4, timeout=120, group_timeout=20, expect_errors=True
    )
    assert outcomes[1][:2] == ("error", "ProcessDied")
    for rank in (0, 2, 3):
        assert outcomes[rank][0] == "error", outcomes[rank]
    # Rank 0 is in the ep group of the killed rank 1, so its error names the MoE layer.
    match = r"^MoE layer 0 of forward 2 .*: counts, group mesh_ep of ranks 0, 1, could not be exch"
    assert re.match(match, outcomes[0][2]), outcomes[0]
