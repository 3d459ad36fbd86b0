"""The DeepEP dispatcher gives the results of all-to-all dispatch on 2 and 4 ranks.

support/fakes/deepep.py replaces the package `deep_ep`. With both dispatchers each rank must receive
the same rows, ids and weights, and outputs and gradients must be the same.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support import parity
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.fakes import deepep as fake_deepep
from support.forced import draw_random_ids
from support.tiny_models import batch, tiny
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_moe_ep import Routes, RoutingReplay, apply_ep_fsdp2, patch
from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll, AllToAllExchange
from hf_moe_ep.moe.dispatch.async_exchange import Exchange
from hf_moe_ep.moe.dispatch.deepep import DeepEP, GroupBuffer, load_deep_ep
from hf_moe_ep.moe.dispatch.overlap import OverlappedChunks
from hf_moe_ep.state import STATE

HIDDEN = 48
BYTES = 2 * HIDDEN
# Both dispatchers round the same fp32 sum to bf16 once, with an error of at most eps / 2 each.
BF16_SUMS = torch.finfo(torch.bfloat16).eps
HEADER = Header(
    forward=1,
    layer=0,
    training=True,
    grad=True,
    checkpointed=False,
    recompute=False,
    top_k=2,
    itemsize=2,
)
Group = dist.ProcessGroup
Exchanges = Sequence[Exchange]


@dataclass(frozen=True)
class Case:
    """A random routing: `tokens` has the number of tokens of each rank.

    If `only` is given, tokens choose only these experts.
    """

    name: str
    tokens: tuple[int, ...]
    experts: int
    top_k: int
    only: tuple[int, ...] = ()

    def ids_TK(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 + rank)
        pool = torch.tensor(self.only or range(self.experts))
        order_TE = torch.rand(self.tokens[rank], len(pool), generator=generator).argsort(1)
        return _make_column_major(pool[order_TE[:, : self.top_k]])

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(20 + rank)
        tokens = self.tokens[rank]
        x_TH = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        w_TK = torch.rand(tokens, self.top_k, generator=generator) + 0.1
        return x_TH.requires_grad_(), w_TK.requires_grad_()


CASES = [
    Case("different tokens per rank", (7, 3), 6, 3),
    Case("rank 1 has no tokens", (5, 0), 4, 2),
    Case("no rank has tokens", (0, 0), 4, 2),
    Case("all to rank 0", (4, 6), 6, 3, only=(0, 1, 2)),
    Case("all to rank 1", (4, 6), 6, 2, only=(3, 4, 5)),
    Case("every expert", (3, 5), 4, 4),
    Case("one token, three chunks", (1, 1), 2, 1),
    Case("4 ranks", (7, 1, 3, 5), 12, 3),
    Case("4 ranks, two without tokens", (0, 9, 0, 2), 8, 5),
    Case("4 ranks, all to rank 2", (2, 3, 4, 5), 8, 2, only=(4, 5)),
]


def _make_column_major(tensor: Tensor) -> Tensor:
    """Return the same values in a column-major layout, which DeepEP's kernels refuse."""
    return tensor.t().contiguous().t()


def _plan_exchanges(
    case: Case, rank: int, group: Group, buffer: GroupBuffer | None, chunks: int
) -> Exchanges:
    ids_TK, experts = case.ids_TK(rank), case.experts
    if buffer is None:
        return AllToAll(group, experts, chunks).start_plan(ids_TK, HEADER).finish()
    return DeepEP(buffer, experts, chunks).start_plan(ids_TK, HEADER, hidden_bytes=BYTES).finish()


def _run_layer(
    exchanges: Exchanges, x_TH: Tensor, w_TK: Tensor, ids_TK: Tensor, received: list[Any]
) -> Tensor:
    """Run a layer whose experts use rows, ids and weights; append what they get to `received`."""
    x_TH, w_TK = _make_column_major(x_TH), _make_column_major(w_TK)
    with OverlappedChunks() as chunks:
        for arriving in chunks.start_chunks(exchanges, Tokens(x_TH, w_TK, ids_TK)):
            rows_RH, w_RK, ids_RK = arriving.finish()
            local = len(arriving.counts_L)
            received.append((rows_RH.detach(), w_RK.detach(), ids_RK, arriving.counts_L))
            # DeepEP delivers weights of other ranks' experts as 0, so only all-to-all needs a mask.
            if isinstance(exchanges[0], AllToAllExchange):
                w_RK = w_RK.masked_fill(ids_RK == local, 0)
            scale_R = (w_RK * (ids_RK + 1)).sum(1, keepdim=True)
            rows_RH = (rows_RH.float() * scale_R + rows_RH.float().square()).bfloat16()
            chunks.send_back(arriving, _make_column_major(rows_RH))
    return chunks.finish()


def _sort_rows(received: tuple[Tensor, Tensor, Tensor, list[int]]) -> list[list[float]]:
    """Sort rows of hidden states, ids and local weights, because dispatchers order rows unlike."""
    rows_RH, w_RK, ids_RK, counts_L = received
    w_RK = w_RK.masked_fill(ids_RK == len(counts_L), 0)
    return sorted(torch.cat([rows_RH.double(), ids_RK.double(), w_RK.double()], 1).tolist())


def _check_case(rank: int, group: Group, buffer: GroupBuffer, case: Case, chunks: int) -> None:
    name, ids_TK = f"{case.name}, {chunks} chunks", case.ids_TK(rank)
    runs = []
    for deepep_buffer in (None, buffer):
        x_TH, w_TK = case.inputs(rank)
        received: list[Any] = []
        out_TH = _run_layer(
            _plan_exchanges(case, rank, group, deepep_buffer, chunks), x_TH, w_TK, ids_TK, received
        )
        generator = torch.Generator().manual_seed(30 + rank)
        out_TH.backward(torch.randn(out_TH.shape, generator=generator).bfloat16())
        runs.append((received, out_TH, x_TH.grad, w_TK.grad))
    (want_received, *want), (got_received, *got) = runs
    assert len(got_received) == len(want_received) == chunks, name
    for got_chunk, want_chunk in zip(got_received, want_received):
        assert got_chunk[0].dtype == torch.bfloat16, name
        assert got_chunk[1].dtype == torch.float32 and got_chunk[2].dtype == torch.int64, name
        assert got_chunk[3] == want_chunk[3], f"{name}: counts {got_chunk[3]}, want {want_chunk[3]}"
        assert _sort_rows(got_chunk) == _sort_rows(want_chunk), name
    assert_close(f"{name}: out", got[0], want[0], BF16_SUMS)
    assert_close(f"{name}: grad of x", got[1], want[1], BF16_SUMS)
    # Each weight is used on one rank, so no sum over ranks rounds. A row's sum over HIDDEN fp32
    # products may have another order, because its position in memory differs.
    assert_close(f"{name}: grad of weights", got[2], want[2], HIDDEN * torch.finfo(torch.float).eps)
    assert got[1].dtype == torch.bfloat16 and got[2].dtype == torch.float32
    assert fake_deepep.Buffer.under_way == 0, name


def _check_example(rank: int, group: Group, buffer: GroupBuffer) -> None:
    """Check the example in the docstring of deepep.py."""
    ids_TK = torch.tensor([[0, 3], [2, 3]] if rank == 0 else []).view(-1, 2).long()
    w_TK = torch.tensor([[0.5, 0.25], [2.0, 4.0]] if rank == 0 else []).view(-1, 2)
    x_TH = torch.tensor([1.0, 2.0] if rank == 0 else []).bfloat16().unsqueeze(1).repeat(1, HIDDEN)
    (exchange,) = DeepEP(buffer, 4).start_plan(ids_TK, HEADER, hidden_bytes=BYTES).finish()
    arriving = exchange.start(Tokens(x_TH, w_TK, ids_TK))
    rows_RH, w_RK, ids_RK = arriving.finish()
    got = (rows_RH[:, 0].tolist(), ids_RK.tolist(), w_RK.tolist(), arriving.counts_L)
    if rank == 0:
        assert got == ([1], [[0, 2]], [[0.5, 0]], [1, 0])
    else:
        assert got == ([1, 2], [[2, 1], [0, 1]], [[0, 0.25], [2, 4]], [1, 2])
    out_TH = arriving.start_combine(rows_RH * 10 ** (rank + 1)).finish()
    assert out_TH[:, -1].tolist() == ([110, 200] if rank == 0 else [])


def _check_recompute(rank: int, group: Group, buffer: GroupBuffer, case: Case) -> None:
    """Check that a recomputed layer, which starts its exchanges twice, gets the same tensors."""
    exchanges, ids_TK = _plan_exchanges(case, rank, group, buffer, 2), case.ids_TK(rank)
    runs = []
    for recompute in (False, True):
        x_TH, w_TK = case.inputs(rank)
        received: list[Any] = []
        inputs = (exchanges, x_TH, w_TK, ids_TK, received)
        run: Callable[..., Tensor] = _run_layer
        if recompute:
            run = partial(checkpoint, _run_layer, use_reentrant=False)
        out_TH = run(*inputs)
        out_TH.square().sum().backward()
        assert len(received) == (4 if recompute else 2)
        runs.append((out_TH, x_TH.grad, w_TK.grad, *(t for chunk in received for t in chunk[:3])))
        counts = [chunk[3] for chunk in received]
        assert counts[:2] == counts[-2:]
    first, second = runs
    assert all(torch.equal(a, b) for a, b in zip(first, second[:9], strict=True)), case.name
    assert all(torch.equal(a, b) for a, b in zip(first[3:], second[9:], strict=True)), case.name
    # A recompute stops as soon as backward has its tensors, here while the results of chunk 0 are
    # being sent. The layer has to wait for this transfer.
    assert fake_deepep.Buffer.under_way == 0, case.name


def _check_frozen(rank: int, group: Group, buffer: GroupBuffer, case: Case) -> None:
    """Check that only the inputs that need gradients get them: x, the weights, or neither."""
    ids_TK = case.ids_TK(rank)
    for needs in ((True, False), (False, True), (False, False)):
        grads = []
        for deepep_buffer in (None, buffer):
            x_TH, w_TK = (t.detach() for t in case.inputs(rank))
            x_TH.requires_grad_(needs[0])
            w_TK.requires_grad_(needs[1])
            exchanges = _plan_exchanges(case, rank, group, deepep_buffer, 1)
            rows_RH, w_RK, _ = exchanges[0].start(Tokens(x_TH, w_TK, ids_TK)).finish()
            assert (rows_RH.requires_grad, w_RK.requires_grad) == needs
            out_TH = _run_layer(exchanges, x_TH, w_TK, ids_TK, [])
            assert out_TH.requires_grad == any(needs)
            if any(needs):
                out_TH.sum().backward()
            grads.append((x_TH.grad, w_TK.grad))
        for want, got, needed in zip(*grads, needs):
            assert (got is not None) == needed
            if needed:
                assert_close(f"{case.name}: {needs}", got, want, BF16_SUMS)


def _check_weight_dtypes(rank: int, group: Group, buffer: GroupBuffer, case: Case) -> None:
    """Check that bf16 weights, which are sent as fp32, have gradients in bf16."""
    x_TH, w_TK = case.inputs(rank)
    w_TK = w_TK.detach().bfloat16().requires_grad_()
    _run_layer(
        _plan_exchanges(case, rank, group, buffer, 1), x_TH, w_TK, case.ids_TK(rank), []
    ).sum().backward()
    assert w_TK.grad is not None and w_TK.grad.dtype == torch.bfloat16
    assert w_TK.grad.isfinite().all() and (w_TK.grad != 0).any()


def _check_order(rank: int, group: Group, buffer: GroupBuffer, case: Case) -> None:
    """Check that the next chunk is sent before the layer waits for a chunk, also in backward."""
    log = fake_deepep.Buffer.log
    x_TH, w_TK = case.inputs(rank)
    exchanges = _plan_exchanges(case, rank, group, buffer, 2)
    log.clear()
    out_TH = _run_layer(exchanges, x_TH, w_TK, case.ids_TK(rank), [])
    dispatch, combine = "dispatch", "combine"
    start, wait = "start {}".format, "wait {}".format
    chunk = [wait(dispatch), start(combine)]
    assert log == [start(dispatch), start(dispatch), *chunk, *chunk, wait(combine), wait(combine)]
    log.clear()
    out_TH.sum().backward()
    assert log == [start(dispatch), start(dispatch), *chunk, *chunk, wait(combine), wait(combine)]


def _assert_raises(
    error: type[Exception], match: str, call: Callable[[], Any], group: Group
) -> None:
    with pytest.raises(error, match=match):
        call()
    dist.barrier(group)


def _check_errors(rank: int, group: Group, buffer: GroupBuffer) -> None:
    ids_TK, w_TK = torch.tensor([[0, 1]]), torch.ones(1, 2)
    plan = partial(DeepEP(buffer, 4).start_plan, header=HEADER, hidden_bytes=BYTES)
    (exchange,) = plan(ids_TK).finish()
    for dtype in (torch.float32, torch.float16, torch.float64):
        x_TH = torch.ones(1, HIDDEN, dtype=dtype)
        match = f'torch.bfloat16 only, got {dtype}.*use dispatcher="all_to_all"'
        tokens = Tokens(x_TH, w_TK, ids_TK)
        _assert_raises(ValueError, match, lambda tokens=tokens: exchange.start(tokens), group)
    for hidden, match in ((24, "multiple of 16, got 24; try 32"), (64, "128 bytes.*_bytes=96;")):
        x_TH = torch.ones(1, hidden, dtype=torch.bfloat16)
        tokens = Tokens(x_TH, w_TK, ids_TK)
        _assert_raises(ValueError, match, lambda tokens=tokens: exchange.start(tokens), group)
    arrived = exchange.start(Tokens(torch.ones(1, HIDDEN, dtype=torch.bfloat16), w_TK, ids_TK))
    rows_RH, _, _ = arrived.finish()
    wide = rows_RH.float()
    _assert_raises(ValueError, "got torch.float32", lambda: arrived.start_combine(wide), group)
    many = torch.arange(33).unsqueeze(0)
    _assert_raises(
        ValueError,
        "at most 32 experts per token, but this router chooses 33",
        lambda: plan(many),
        group,
    )
    for num_sms in (23, 0, -2):
        match = f"even and >= 2, got {num_sms}"
        _assert_raises(ValueError, match, lambda n=num_sms: GroupBuffer(group, num_sms=n), group)


def _check_max_rows(rank: int, group: Group, buffer: GroupBuffer) -> None:
    """Check that every rank raises an error before rows are sent, which names the busiest rank."""
    ranks = dist.get_world_size(group)
    busiest = ranks - 1
    ids_TK = torch.full((3, 1), busiest)  # one expert per rank
    log = fake_deepep.Buffer.log
    for chunks in (1, 2):
        log.clear()
        match = (
            f"MoE layer 0 of forward 1 .*: rank {dist.get_process_group_ranks(group)[busiest]} "
            f"would get {3 * ranks} rows, more than max_tokens_per_rank={3 * ranks - 1} "
        )
        limited = DeepEP(buffer, ranks, chunks, 3 * ranks - 1)
        plan = partial(limited.start_plan, ids_TK, HEADER, hidden_bytes=BYTES)
        _assert_raises(RuntimeError, match, plan, group)
        assert not log
        enough = DeepEP(buffer, ranks, chunks, 3 * ranks)
        assert len(enough.start_plan(ids_TK, HEADER, hidden_bytes=BYTES).finish()) == chunks


def _check_lifetime(rank: int, group: Group, buffer: GroupBuffer, case: Case) -> None:
    """Check that a buffer is made on first use, replaced before a backward, and freed."""
    made = fake_deepep.Buffer.made
    buffer = GroupBuffer(group, num_sms=8)
    assert fake_deepep.Buffer.made == made
    x_TH, w_TK = case.inputs(rank)
    exchanges = _plan_exchanges(case, rank, group, buffer, 1)
    small = buffer.current
    _plan_exchanges(case, rank, group, buffer, 1)
    assert fake_deepep.Buffer.made == made + 1 and buffer.current is small
    out_TH = _run_layer(exchanges, x_TH, w_TK, case.ids_TK(rank), [])
    # Another model sets its number of SMs. This must not affect the exchanges planned above.
    fake_deepep.Buffer.set_num_sms(24)
    buffer.reserve(4 * BYTES)
    assert fake_deepep.Buffer.made == made + 2 and buffer.current is not small
    assert small.destroyed and buffer.current.num_nvl_bytes > small.num_nvl_bytes
    out_TH.sum().backward()
    assert x_TH.grad is not None and x_TH.grad.isfinite().all()
    large = buffer.current
    out_TH = _run_layer(exchanges, x_TH, w_TK, case.ids_TK(rank), [])
    buffer.free()
    buffer.free()
    assert large.destroyed
    _assert_raises(RuntimeError, "buffer was freed", lambda: out_TH.sum().backward(), group)
    x, w, ids = x_TH.detach(), w_TK.detach(), case.ids_TK(rank)
    _assert_raises(
        RuntimeError,
        "^this ep group's DeepEP",
        lambda: exchanges[0].start(Tokens(x, w, ids)),
        group,
    )
    _run_layer(_plan_exchanges(case, rank, group, buffer, 1), x_TH, w_TK, ids, [])
    assert fake_deepep.Buffer.made == made + 3
    buffer.free()


def _check_group_size(rank: int, group: Group, buffer: GroupBuffer) -> None:
    """Check the error for 3 ranks, for which DeepEP has no settings."""
    # All 4 ranks must call new_group, although rank 3 is not in the group.
    group = dist.new_group([0, 1, 2])
    if rank < 3:
        with pytest.raises(ValueError, match="no settings for ep_size=3; try 2, 4, 8"):
            GroupBuffer(group)


def _check_lost_rank(rank: int, group: Group, buffer: GroupBuffer) -> None:
    """Check that the error of DeepEP's time-out names the position in the model."""
    ids_TK = torch.tensor([[0, 1]])
    (exchange,) = DeepEP(buffer, 4).start_plan(ids_TK, HEADER, hidden_bytes=BYTES).finish()
    x_TH = torch.ones(1, HIDDEN, dtype=torch.bfloat16)

    def timeout(*_: Any, **__: Any) -> None:
        raise RuntimeError("DeepEP error: CPU recv timeout")

    original, buffer.current.dispatch = buffer.current.dispatch, timeout
    match = "MoE layer 0 of forward 1 .*: .*never reached this layer.*CPU recv timeout"
    _assert_raises(
        RuntimeError, match, lambda: exchange.start(Tokens(x_TH, torch.ones(1, 2), ids_TK)), group
    )
    buffer.current.dispatch = original


def _compute_model_grads(replays: bool, **config: Any) -> dict[str, Tensor]:
    """Return the gathered gradients of a checkpointed bf16 model after one step.

    With `replays`, routes are replayed.
    """
    model = tiny(dtype=torch.bfloat16)
    parity.checkpointing(model, False)
    apply_ep_fsdp2(model, **config)
    inputs = batch(model, 2, 9 + 2 * dist.get_rank(), seed=dist.get_rank())
    ids = draw_random_ids(*inputs["input_ids"].shape, 2, 8, 2)
    with RoutingReplay(model).replay(Routes(ids, (0, 1)) if replays else None):
        model(**inputs).loss.backward()
    dispatcher = getattr(model, STATE).dispatcher
    if config["dispatcher"] == "deepep":
        assert copy.deepcopy(dispatcher).buffer is dispatcher.buffer
        dispatcher.buffer.free()
    else:
        assert copy.deepcopy(dispatcher).group is dispatcher.group
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _check_model(rank: int, group: Group, buffer: GroupBuffer) -> None:
    """Compare a whole bf16 model with dispatcher="deepep" and 2 chunks to all_to_all."""
    for replays, sizes in (
        (False, {"ep_size": 2}),
        (True, {"ep_size": 2}),
        (False, {"ep_size": 1, "etp_size": 2}),
    ):
        want = _compute_model_grads(replays, dispatcher="all_to_all", **sizes)
        calls = len(fake_deepep.Buffer.log)
        options = {"dispatcher": "deepep", "deepep_num_sms": 6, "dispatch_chunks": 2}
        got = _compute_model_grads(replays, **options, **sizes)
        assert fake_deepep.Buffer.num_sms == 6 and len(fake_deepep.Buffer.log) > calls
        for name, grad in got.items():
            # The dispatchers add rows in different orders, and two layers round to bf16 (2**-8).
            assert_close(f"{name}, {replays}", grad, want[name], 16 * 2**-8)


def _run_with_buffer(check: Callable[..., None], rank: int, world: int) -> None:
    """Run a check with the fake of DeepEP and a buffer of all ranks."""
    assert dist.group.WORLD is not None
    sys.modules["deep_ep"] = fake_deepep
    buffer = GroupBuffer(dist.group.WORLD)
    check(rank=rank, group=dist.group.WORLD, buffer=buffer)
    buffer.free()


def _check_groups_of_every_other_rank(rank: int, group: Group, buffer: GroupBuffer) -> None:
    """Run checks in groups of ranks 0 2 and 1 3, in which ranks are numbered from 0."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group, group_rank = groups[rank % 2], rank // 2
    group_buffer = GroupBuffer(group, num_sms=4)
    _check_example(group_rank, group, group_buffer)
    _check_case(group_rank, group, group_buffer, case=CASES[0], chunks=2)
    _check_max_rows(group_rank, group, group_buffer)
    group_buffer.free()


def _make_checks(world: int, **more: Callable[..., None]) -> dict[str, Callable[..., None]]:
    """Return by name the checks of every case, the checks that need only one case, and `more`."""
    checks: dict[str, Callable[..., None]] = {}
    cases = [case for case in CASES if len(case.tokens) == world]
    for case in cases:
        for chunks in (1, 2, 3):
            checks[f"{case.name}, {chunks} chunks"] = partial(_check_case, case=case, chunks=chunks)
        checks[f"{case.name}, recomputed"] = partial(_check_recompute, case=case)
    checks |= {
        "frozen": partial(_check_frozen, case=cases[0]),
        "weights of other dtypes": partial(_check_weight_dtypes, case=cases[0]),
        "order": partial(_check_order, case=cases[0]),
        "errors": _check_errors,
        "max_tokens_per_rank": _check_max_rows,
        "a lost rank": _check_lost_rank,
        "lifetime of a buffer": partial(_check_lifetime, case=cases[0]),
        **more,
    }
    return {name: partial(_run_with_buffer, check) for name, check in checks.items()}


TWO_RANKS = on_ranks(2, _make_checks(2, example=_check_example, model=_check_model))
FOUR_RANKS = on_ranks(
    4,
    _make_checks(4, group_size=_check_group_size, groups=_check_groups_of_every_other_rank),
    slow=True,
)


@pytest.mark.parametrize("claim", TWO_RANKS + FOUR_RANKS)
def test_deepep_equals_all_to_all(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ImportError) as caught:
        GroupBuffer(cast(Any, None))
    for part in ("deep_ep.Buffer: import of deep_ep halted", "from source", "NVLink", "all_to_all"):
        assert part in str(caught.value)


def test_patch_refuses_deepep_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    model = tiny()
    with pytest.raises(ImportError, match=r"dispatcher=.deepep. needs the class deep_ep.Buffer"):
        patch(model, ep_size=2, dispatcher="deepep")
    assert not hasattr(model, STATE)


def test_the_error_names_a_build_without_the_legacy_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deepep)
    assert load_deep_ep() is fake_deepep.Buffer
    monkeypatch.setattr(fake_deepep, "Buffer", None)
    with pytest.raises(ImportError, match="this build lacks the legacy Buffer"):
        load_deep_ep()
