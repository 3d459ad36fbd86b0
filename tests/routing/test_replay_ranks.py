"""A replay on several ranks (with ep, sp or both) equals a stock model in one process.

Stock runs the batches of all ranks one after the other, and its topk is forced to return the same
experts (support/forced.py).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import parity
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.counting import EXCHANGES, counting
from support.forced import draw_random_ids, force_topk, force_weights
from support.parity import full_tensor
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep import Routes, RoutingReplay, apply_ep_fsdp2, data_parallel_rank
from hf_moe_ep.lora.factors import pack_factors

EXPERTS, TOP_K = 8, 2
SIZES = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
LAYERS = (0, 2)
WATCHED = {
    **EXCHANGES,
    "all_reduce": (dist, "all_reduce"),
    "objects": (dist, "all_gather_object"),
}


def _make_inputs(data_rank: int, sequence: int = 7, left: bool = False) -> dict[str, Tensor]:
    """Make a padded batch. Each data rank has another number of rows."""
    inputs = batch(tiny(), 2 + data_rank, sequence, seed=data_rank, pad=3)
    return {name: x.flip(1) for name, x in inputs.items()} if left else inputs


def _draw_routes(inputs: dict[str, Tensor], seed: int = 0) -> Routes:
    """Draw random experts for each token. Padding and two tokens of row 0 route live (-1)."""
    mask = inputs["attention_mask"]
    ids = draw_random_ids(*mask.shape, len(LAYERS), EXPERTS, TOP_K, seed)
    ids[mask == 0] = -1
    ids[0, 3:5] = -1
    return Routes(ids, LAYERS)


def _make_live_ids(rows: int) -> Tensor:
    return torch.full((rows, 7, len(LAYERS), TOP_K), -1, dtype=torch.int16)


def _compare_with_stock(
    where: str,
    model: nn.Module,
    stock: nn.Module,
    everyone: list[tuple[dict[str, Tensor], Routes]],
) -> None:
    """Compare the loss and all gradients of one step on `everyone`, the batches of all data ranks.

    A rank whose routes are all -1 replays None.
    """
    data_rank = data_parallel_rank(model)
    count = torch.stack([x["labels"][:, 1:].ne(-100).sum() for x, _ in everyone]).sum()
    experts = [m for name, m in stock.named_modules() if name.endswith("mlp.experts")]
    stock_outputs = []
    for inputs, routes in everyone:
        weights = nullcontext()
        if routes.weights is not None:
            weights = force_weights(experts, routes.ids, routes.weights)
        with force_topk(EXPERTS, routes.ids), weights:
            stock_outputs.append(stock(**inputs, num_items_in_batch=count))
        stock_outputs[-1].loss.backward()
    inputs, routes = everyone[data_rank]
    replay = RoutingReplay(model)
    with replay.replay(None if (routes.ids == -1).all() else routes):
        got = model(**inputs, num_items_in_batch=count)
    (got.loss * len(everyone)).backward()
    # Stock sums the loss in fp32.
    assert_close(f"{where}: loss", got.loss, stock_outputs[data_rank].loss, FP32_INSIDE)
    grads = {n: full_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    grads = pack_factors(model, {n: x for n, x in grads.items() if x is not None})
    stock_grads = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    assert grads.keys() == stock_grads.keys()
    for name, grad in stock_grads.items():
        assert_close(f"{where}: grad of {name}", grads[name], grad, FP64_MODEL)
    report = replay.last.over_ranks()
    assert report.replayed > 0 and report.agreement < 0.9


def random_routes_equal_stock(
    rank: int,
    world: int,
    ep: int = 0,
    sp: int = 1,
    lora: bool = False,
    weights: bool = False,
) -> None:
    """The model has no checkpoints, checkpoints, or reentrant checkpoints."""
    data = world // sp
    for use_reentrant, left in ((None, False), (False, True), (True, False)):
        model, stock = tiny(seed=rank, **SIZES), tiny(seed=0, **SIZES)
        if lora:
            torch.manual_seed(rank)
            model = with_lora(model)
            torch.manual_seed(0)
            stock = with_lora(stock)
        if use_reentrant is not None:
            parity.checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=ep or world, sp_size=sp)
        batches = [_make_inputs(data_rank, left=left) for data_rank in range(data)]
        everyone = [(x, _draw_routes(x, seed)) for seed, x in enumerate(batches)]
        if weights:
            for _, routes in everyone:
                routes.weights = torch.rand(
                    routes.ids.shape, generator=torch.Generator().manual_seed(3)
                )
        where = f"ep {ep or world}, sp {sp}, reentrant {use_reentrant}"
        _compare_with_stock(where, model, stock, everyone)


def adapters_on_experts_equal_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, lora=True)


def split_sequences_equal_stock(rank: int, world: int) -> None:
    """sp (2) does not divide the 7 tokens. The padding of the last slice routes live."""
    random_routes_equal_stock(rank, world, ep=1, sp=2)


def split_sequences_and_experts_equal_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, ep=2, sp=2)


def weights_of_routes_equal_stock(rank: int, world: int) -> None:
    """The weights are dispatched with the rows, and a recomputed layer uses them again."""
    random_routes_equal_stock(rank, world, weights=True, lora=True)


def weights_of_routes_of_split_sequences_equal_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, ep=2, sp=2, weights=True)


def adapters_on_experts_with_split_sequences_equal_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, ep=2, sp=2, lora=True)


def a_rank_without_samples_replays_none(rank: int, world: int) -> None:
    """A rank without samples runs a batch without labels, while other ranks replay their routes.

    It cannot run a batch of no rows, because stock attention refuses such a batch.
    """
    unlabelled = batch(tiny(), 1, 3) | {"labels": torch.full((1, 3), -100)}
    for use_reentrant in (None, False, True):
        model, stock = tiny(seed=rank, **SIZES), tiny(seed=0, **SIZES)
        if use_reentrant is not None:
            parity.checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=2)
        inputs = _make_inputs(0)
        no_routes = Routes(torch.full((1, 3, len(LAYERS), TOP_K), -1), LAYERS)
        everyone = [(inputs, _draw_routes(inputs)), (unlabelled, no_routes)]
        _compare_with_stock(f"reentrant {use_reentrant}", model, stock, everyone)
    with pytest.raises(RuntimeError, match="reshape tensor of 0 elements"):
        stock(**{name: x[:0] for name, x in inputs.items()})


def records_contain_whole_sequences(rank: int, world: int) -> None:
    """With ep, sp or cp, each rank records the routes of its whole batch, like one process."""
    only_ep = ({"ep_size": world}, rank)
    shared = [({"ep_size": 2, size: 2}, rank // 2) for size in ("sp_size", "cp_size")]
    for sizes, data_rank in (only_ep, *shared):
        model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), **sizes)
        inputs = _make_inputs(data_rank)
        stock, live_ids = tiny(seed=0, **SIZES), _make_live_ids(2 + data_rank)
        with torch.no_grad(), force_topk(EXPERTS, live_ids) as stock_ids:
            stock(**inputs)
        replay = RoutingReplay(model)
        with replay.record() as routes:
            live = model(**inputs)
        live.loss.backward()
        want = {n: full_tensor(p.grad) for n, p in model.named_parameters()}
        model.zero_grad()
        # Experts add nothing to padding tokens, so later routers may choose other experts for them.
        real_T = inputs["attention_mask"].flatten() != 0
        ids_TLK = routes.ids.flatten(0, 1).long()
        assert torch.equal(ids_TLK[real_T], torch.stack(stock_ids, 1)[real_T]), sizes
        assert torch.equal(ids_TLK[:, 0], stock_ids[0]), sizes
        with replay.replay(routes):
            replayed = model(**inputs)
        replayed.loss.backward()
        assert torch.equal(replayed.loss, live.loss)
        for name, parameter in model.named_parameters():
            assert torch.equal(full_tensor(parameter.grad), want[name]), f"{sizes}: {name}"
        report = replay.last.over_ranks()
        assert report.agreement == 1.0
        data = world if len(sizes) == 1 else world // 2
        assert report.replayed == 2 * 7 * sum(2 + other for other in range(data))


def packed_documents_equal_stock(rank: int, world: int) -> None:
    """One row has three documents. The routes are split as the row is, by sp or by cp in zigzag."""
    positions = torch.cat([torch.arange(n) for n in (4, 6, 1)])[None]
    tokens = torch.arange(11)[None] * 7 % 90
    packed = {"input_ids": tokens, "position_ids": positions, "labels": tokens}
    # With a cache, stock treats a packed row as one document.
    inputs: dict[str, Any] = {**packed, "use_cache": False}
    padded = Routes(draw_random_ids(3, 6, 2, EXPERTS, TOP_K), LAYERS)
    layouts: tuple[dict[str, int], ...] = ({"sp_size": 2}, {"cp_size": 2}, {})
    for sizes in layouts:
        model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2, **sizes)
        stock, data = tiny(seed=0, **SIZES), 1 if sizes else 2
        _compare_with_stock(str(sizes), model, stock, [(inputs, padded.pack(positions))] * data)


def a_replay_runs_no_more_collectives(rank: int, world: int) -> None:
    """The numbers of collectives and host reads are equal with and without a replay."""
    for use_reentrant in (None, False, True):
        model = tiny(seed=rank, **SIZES)
        if use_reentrant is not None:
            parity.checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=2)
        inputs = _make_inputs(rank)
        model(**inputs).loss.backward()  # FSDP2 initialises itself in the first forward
        with counting(WATCHED) as live:
            model(**inputs).loss.backward()
        replay = RoutingReplay(model)
        with replay.replay(_draw_routes(inputs)), counting(WATCHED) as replayed:
            model(**inputs).loss.backward()
        assert live["all_to_all"] >= 5 * len(LAYERS) and live["counts"] == len(LAYERS)
        assert replayed == live, f"reentrant {use_reentrant}: {replayed}, live {live}"


def a_rank_of_padding_equals_stock(rank: int, world: int) -> None:
    """First all routes are experts of rank 0, and rank 1's batch is all padding.

    The experts of rank 1 get no row then. Later all ids are -1, and both ranks route live.
    """
    model, stock = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2), tiny(seed=0, **SIZES)
    everyone = []
    for data_rank in range(world):
        inputs = _make_inputs(data_rank)
        ids = draw_random_ids(2 + data_rank, 7, 2, EXPERTS // 2, TOP_K)  # rank 0 owns these experts
        if data_rank == 1:
            inputs["labels"] = torch.full_like(inputs["labels"], -100)
            inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
        everyone.append((inputs, Routes(ids, LAYERS)))
    _compare_with_stock("rank 0's experts", model, stock, everyone)
    inputs = _make_inputs(rank)
    with torch.no_grad():
        want = model(**inputs).logits
        with RoutingReplay(model).replay(Routes(_make_live_ids(2 + rank), LAYERS)):
            assert torch.equal(model(**inputs).logits, want)


def _catch_error(run: Callable[[], Any]) -> str:
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def one_rank_has_wrong_routes(rank: int, world: int) -> str:
    """Rank 1 names its wrong ids. Rank 0 raises in the exchange, and does not wait for rank 1."""
    model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2)
    inputs = _make_inputs(rank)
    routes = _draw_routes(inputs)
    if rank == 1:
        routes.ids[1, 2, 1] = 7

    def run() -> None:
        with RoutingReplay(model).replay(routes):
            model(**inputs)

    return _catch_error(run)


def all_ranks_have_wrong_routes(rank: int, world: int) -> str:
    model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2)
    inputs = _make_inputs(rank)

    def run() -> None:
        with RoutingReplay(model).replay(Routes(_draw_routes(inputs).ids[:, 1:], LAYERS)):
            model(**inputs)

    return _catch_error(run)


def one_rank_replays(rank: int, world: int) -> str:
    model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2)
    inputs = _make_inputs(rank)

    def run() -> None:
        if rank == 0:
            with RoutingReplay(model).replay(_draw_routes(inputs)):
                model(**inputs)
        model(**inputs)

    return _catch_error(run)


def routes_differ_in_an_sp_group(rank: int, world: int) -> str:
    model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=1, sp_size=2)
    inputs = _make_inputs(0)

    def run() -> None:
        with RoutingReplay(model).replay(_draw_routes(inputs, seed=rank)):
            model(**inputs)

    return _catch_error(run)


def one_rank_of_an_sp_group_records(rank: int, world: int) -> str:
    model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=1, sp_size=2)
    inputs = _make_inputs(0)

    def run() -> None:
        if rank == 0:
            with RoutingReplay(model).record():
                model(**inputs)
        model(**inputs)

    return _catch_error(run)


def one_rank_finds_a_wrong_length_in_a_layer(rank: int, world: int) -> str:
    """The length of the batch is unknown until the first MoE layer runs.

    The reason is that the outer forward has no argument with the name input_ids. Rank 1 raises in
    the layer, and the exchange reports the error to rank 0.
    """
    model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2)
    inputs = _make_inputs(rank)
    routes = _draw_routes(inputs)
    if rank == 1:
        routes.ids = routes.ids[:, 1:]

    def forward_decoder(tokens: Tensor) -> Any:
        return model.model(input_ids=tokens)

    def run() -> None:
        # Losses that need hidden states replace forward like this, so that FSDP's hooks run.
        model.forward = forward_decoder
        with RoutingReplay(model).replay(routes):
            model(inputs["input_ids"])

    return _catch_error(run)


def all_ranks_have_wrong_routes_but_no_forward(rank: int, world: int) -> str:
    model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2)

    def run() -> None:
        with RoutingReplay(model).replay(Routes(torch.zeros(1, 2, 2, 3).int(), LAYERS)):
            pass

    return _catch_error(run)


RIGHT = on_ranks(
    2,
    adapters_on_experts_equal_stock,
    split_sequences_and_experts_equal_stock,
    records_contain_whole_sequences,
    packed_documents_equal_stock,
    a_replay_runs_no_more_collectives,
    a_rank_of_padding_equals_stock,
)
# The errors of rank 0 and rank 1.
WRONG: dict[Callable[..., str], list[str]] = {
    all_ranks_have_wrong_routes_but_no_forward: ["K=3 experts per token", "K=3 experts per token"],
    one_rank_has_wrong_routes: [
        "RuntimeError: ranks of one ep group are at different places",
        "ValueError: row 1, token 2, decoder layer 2 of the routes, [7, 7], has an expert twice",
    ],
    all_ranks_have_wrong_routes: [
        "ValueError: routes of 2 rows of 6 tokens cannot be replayed in a forward of 2 rows of 7",
        "ValueError: routes of 3 rows of 6 tokens cannot be replayed in a forward of 3 rows of 7",
    ],
    one_rank_finds_a_wrong_length_in_a_layer: [
        "RuntimeError: ranks of one ep group are at different places",
        "ValueError: model.layers.0.mlp.gate did not choose by one torch.topk for the 18 tokens",
    ],
    one_rank_replays: ["replayed routes; top-2", "replayed routes; top-2"],
    routes_differ_in_an_sp_group: ["were given different batches", "were given different batches"],
    one_rank_of_an_sp_group_records: ["were given different batches"] * 2,
}


@pytest.mark.parametrize("claim", RIGHT)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(2, *WRONG))
def test_all_ranks_raise_for_wrong_or_different_routes(found: Found, claim: Check) -> None:
    """No rank waits for another rank."""
    for message, part in zip(found.values(claim), WRONG[claim.run], strict=True):
        assert part in message, f"{message}, want {part}"


def rank_1_gets_each_kind_of_wrong_routes(rank: int, world: int) -> list[str]:
    """Rank 1 replays one kind of wrong routes after the other. Return the errors of this rank."""
    messages = []
    for kind in range(len(KINDS_OF_WRONG_ROUTES)):
        model = apply_ep_fsdp2(tiny(seed=rank, **SIZES), ep_size=2)
        inputs = _make_inputs(0)
        routes = Routes(draw_random_ids(*inputs["input_ids"].shape, 2, EXPERTS, TOP_K), LAYERS)
        if rank == 1:
            KINDS_OF_WRONG_ROUTES[kind][0](routes)
        may_be_live = "on_missing" not in KINDS_OF_WRONG_ROUTES[kind][1]
        replay = RoutingReplay(model, on_missing="live" if may_be_live else "error")

        def run(model: nn.Module = model, replay: Any = replay, routes: Any = routes) -> None:
            with replay.replay(routes):
                model(**_make_inputs(0))

        messages.append(_catch_error(run))
    return messages


def _set_fields(routes: Routes, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(routes, name, value)


KINDS_OF_WRONG_ROUTES: list[tuple[Callable[[Routes], Any], str]] = [
    (lambda r: _set_fields(r, ids=r.ids[0]), "are [B, S, L, K], not [7, 2, 2]"),
    (lambda r: _set_fields(r, ids=r.ids.double()), "are torch.float64, not integers"),
    (lambda r: _set_fields(r, ids=r.ids[..., :1]), "K=1 experts per token"),
    (lambda r: _set_fields(r, num_experts=9), "a model with 9 experts"),
    (lambda r: _set_fields(r, layers=(0,)), "name 1 layers, but ids have L=2"),
    (lambda r: _set_fields(r, layers=(0, 3)), "L=2 layers (0, 3), and this qwen3_moe has 3"),
    (lambda r: r.ids[1, 2, 0].copy_(torch.tensor([8, 1])), "outside of the 8 experts"),
    (lambda r: r.ids[1, 2, 0].copy_(torch.tensor([1, -2])), "outside of the 8 experts"),
    (lambda r: r.ids[1, 2, 0].copy_(torch.tensor([-1, 3])), "has -1 for some of its experts"),
    (lambda r: r.ids[1, 2, 0].fill_(3), "has an expert twice"),
    (lambda r: r.ids[1, 2, 0].fill_(-1), "has at least one id of -1, but on_missing='error'"),
    (lambda r: _set_fields(r, weights=torch.ones(2, 7, 2)), "weights of routes are torch.float32"),
    (lambda r: _set_fields(r, ids=r.ids[:, :6]), "2 rows of 6 tokens cannot be replayed"),
]


@pytest.mark.parametrize("claim", on_ranks(2, rank_1_gets_each_kind_of_wrong_routes, slow=True))
def test_all_ranks_raise_for_each_kind_of_wrong_routes(found: Found, claim: Check) -> None:
    """Rank 1 raises the error of its routes. Rank 0's error says that rank 1 refuses its routes."""
    errors_0, errors_1 = found.values(claim)
    assert len(errors_1) == len(KINDS_OF_WRONG_ROUTES)
    for error_0, error_1, (_, part) in zip(errors_0, errors_1, KINDS_OF_WRONG_ROUTES, strict=True):
        assert part in error_1 and "ValueError" in error_1, f"{error_1}, want {part}"
        assert "refused routes" in error_0, error_0


def every_expert_on_each_rank_equals_stock(rank: int, world: int) -> None:
    """With ep 1 ranks exchange no tokens."""
    random_routes_equal_stock(rank, world, ep=1)


def ep_4_equals_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, ep=4)


def ep_2_of_4_equals_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, ep=2)


def sp_2_ep_4_equals_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, ep=4, sp=2)


def sp_2_ep_2_of_4_equals_stock(rank: int, world: int) -> None:
    random_routes_equal_stock(rank, world, ep=2, sp=2)


def records_of_4_ranks_contain_whole_sequences(rank: int, world: int) -> None:
    records_contain_whole_sequences(rank, world)


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(
            2,
            random_routes_equal_stock,
            every_expert_on_each_rank_equals_stock,
            split_sequences_equal_stock,
            weights_of_routes_equal_stock,
            weights_of_routes_of_split_sequences_equal_stock,
            adapters_on_experts_with_split_sequences_equal_stock,
            a_rank_without_samples_replays_none,
            slow=True,
        ),
        *on_ranks(
            4,
            ep_4_equals_stock,
            ep_2_of_4_equals_stock,
            sp_2_ep_4_equals_stock,
            sp_2_ep_2_of_4_equals_stock,
            records_of_4_ranks_contain_whole_sequences,
            slow=True,
        ),
    ],
)
def test_on_more_layouts(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
