"""With stages, counts, biases, replay, balancing and Muon give the results of one process."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.adapters import with_lora
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.jobs.trainer import focal_loss
from support.parity import full_tensor
from support.stages import compare, four_layers, rows_of, state_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from hf_moe_ep import (
    Muon,
    Routes,
    RoutingReplay,
    apply_ep_fsdp2,
    balance_experts,
    data_parallel_rank,
    data_parallel_size,
    expert_load,
    experts_in_hub_order,
    global_token_count,
    patch,
    save_pretrained,
    update_router_bias,
)
from hf_moe_ep.pipeline.caller_loss import CallerLoss
from hf_moe_ep.pipeline.run import Pipeline

ONE_PROCESS: dict[str, Any] = {"experts_backend": "torch"}


def run_step(model: nn.Module, reference: nn.Module, number: int) -> None:
    """Compute the gradients of one step of both models, for the batches of all data ranks."""
    size, rank = data_parallel_size(model), data_parallel_rank(model)
    batches = [rows_of(5)(reference, other, number)[0] for other in range(size)]
    count = global_token_count(model, batches[rank]["labels"])
    with FP64():
        (model(**batches[rank], num_items_in_batch=count.view(1)).loss * size).backward()
        for rows in batches:
            reference(**rows, num_items_in_batch=count).loss.backward()


def counts_every_token_once(sizes: dict[str, Any], rank: int, world: int) -> None:
    model = apply_ep_fsdp2(four_layers(rank, mlp_only_layers=[0]), **sizes)
    reference = patch(four_layers(0, mlp_only_layers=[0]), **ONE_PROCESS)
    run_step(model, reference, 0)
    got, want = expert_load(model), expert_load(reference)
    assert got.layers == want.layers == tuple(f"model.layers.{i}.mlp.experts" for i in (1, 2, 3))
    assert torch.equal(got.counts, want.counts)
    assert expert_load(model).counts.sum() == 0, "the counts were reset"


def biases_follow_the_load(rank: int, world: int) -> None:
    options: dict[str, Any] = {"bias_update_rate": 0.1}
    model = apply_ep_fsdp2(build("deepseek_v3", seed=rank), pp_size=2, **options)
    reference = patch(build("deepseek_v3"), **ONE_PROCESS, **options)
    for number in range(2):
        run_step(model, reference, number)
        update_router_bias(model)
        update_router_bias(reference)
    wanted = {name: x for name, x in reference.named_buffers() if "bias" in name}
    own = {name: x for name, x in model.named_buffers() if name in wanted}
    assert own and all(x.abs().max() > 0 for x in own.values())
    for name, bias in own.items():
        assert torch.equal(bias, wanted[name]), name


def muon_trains_every_matrix(rank: int, world: int) -> None:
    config = {"tie_word_embeddings": True}
    model = apply_ep_fsdp2(four_layers(rank, **config), pp_size=2, ep_size=world // 2)
    reference = patch(four_layers(0, **config), **ONE_PROCESS)
    optimizers = [Muon(x, 1e-2) for x in (model, reference)]
    for number in range(2):
        run_step(model, reference, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    aliases, wanted = state_of(model).stage.aliases, dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        name = aliases.get(name, name)
        assert_close(name, full_tensor(parameter.detach()), wanted[name], FP64_MODEL)


def _make_routes(model: nn.Module, data_rank: int, number: int) -> Routes:
    """Make routes for `rows_of(5)`. At every third token the router chooses by itself (-1)."""
    (rows,) = rows_of(5)(model, data_rank, number)
    shape = rows["input_ids"].shape
    generator = torch.Generator().manual_seed(10 * number + data_rank)
    order = torch.rand(*shape, 4, model.config.num_experts, generator=generator).argsort(-1)
    ids = order[..., : model.config.num_experts_per_tok].to(torch.int16)
    ids[:, ::3] = -1
    return Routes(ids, (0, 1, 2, 3))


def routes_are_replayed(
    sizes: dict[str, Any], dense: list[int], checkpointed: bool, rank: int, world: int
) -> None:
    """Record and replay with micro-batches over stages: choices, losses, gradients and report."""
    model = four_layers(rank, mlp_only_layers=dense)
    # With the fused loss one process leaves out padding too, so its routers see the same inputs.
    reference = patch(four_layers(0, mlp_only_layers=dense), **ONE_PROCESS, fused_loss=True)
    if checkpointed:
        for trained in (model, reference):
            trained.gradient_checkpointing_enable()
    apply_ep_fsdp2(model, **sizes, pp_microbatches=3)
    ours, stock = RoutingReplay(model), RoutingReplay(reference)
    size, own = data_parallel_size(model), data_parallel_rank(model)
    batches = [rows_of(5)(reference, other, 0)[0] for other in range(size)]
    count = global_token_count(model, batches[own]["labels"])
    routed = [layer for layer in range(4) if layer not in dense]
    given = [_make_routes(reference, other, 0) for other in range(size)]
    given = [Routes(x.ids[:, :, routed], tuple(routed)) for x in given]
    with FP64(), ours.replay(given[own]):
        loss = model(**batches[own], num_items_in_batch=count).loss
        (loss * size).backward()
    losses = []
    with FP64():
        for other, rows in enumerate(batches):
            with stock.replay(given[other]):
                wanted = reference(**rows, num_items_in_batch=count).loss
                wanted.backward()
            losses.append(wanted.detach())
            if other == own:
                want = stock.last
    assert_close("loss", loss.detach(), losses[own], FP64_MODEL)
    compare("gradient of", model, reference, lambda p: p.grad, FP64_MODEL)
    pairs = {layer: pair for layer, pair in want.pairs.items() if layer in ours.last.pairs}
    if "sp_size" not in sizes:
        assert ours.last.pairs == pairs
    assert set(ours.last.over_ranks().pairs) == set(routed)
    for training in (True, False):
        model.train(training)
        reference.train(training)
        with torch.no_grad(), ours.record() as got:
            model(**batches[own])
        with torch.no_grad(), stock.record() as chosen:
            reference(**batches[own])
        assert got.layers == chosen.layers == tuple(routed)
        assert torch.equal(got.ids, chosen.ids), f"training {training}"
    model.train()
    with ours.record() as got:
        model(**batches[own])
    with ours.replay(got):
        model(**batches[own])
    assert ours.last.over_ranks().agreement == 1.0
    assert ours.last.agreement == 1.0 or (math.isnan(ours.last.agreement) and not ours.last.pairs)


def routes_that_do_not_fit_raise_on_every_stage(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(four_layers(0), pp_size=2)
    (rows,) = rows_of(5)(model, 0, 0)
    replay, routes = RoutingReplay(model), _make_routes(model, 0, 0)
    short = Routes(routes.ids[:4], routes.layers)
    with (
        pytest.raises(ValueError, match=r"routes of 4 rows of 6 tokens.*forward of 5 rows"),
        replay.replay(short),
    ):
        model(**rows)
    other = _make_routes(model, rank, rank)  # each stage has other routes
    with (
        pytest.raises(ValueError, match=r"pipeline column were given different batches"),
        replay.replay(Routes(other.ids[:5, :6], other.layers)),
    ):
        model(**rows)
    with replay.replay(routes):
        assert torch.isfinite(model(**rows).loss)


def moved_experts_train_alike(sizes: dict[str, Any], rank: int, world: int, folder: str) -> None:
    """Balanced layers of all stages train as before, and files are in the hub's order."""
    model = apply_ep_fsdp2(four_layers(rank, mlp_only_layers=[0]), **sizes)
    reference = patch(four_layers(0, mlp_only_layers=[0]), **ONE_PROCESS)
    optimizers = [torch.optim.AdamW(x.parameters(), foreach=False) for x in (model, reference)]
    moved = torch.zeros(3, dtype=torch.bool)
    for number in range(3):
        run_step(model, reference, number)
        with experts_in_hub_order(model, optimizers[0]):
            compare(f"gradient {number} of", model, reference, lambda p: p.grad, FP64_MODEL)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        load = expert_load(model)
        balanced = balance_experts(model, optimizers[0], load)
        slots: list[Any] = [None] * world
        dist.all_gather_object(slots, balanced.slots.tolist())
        assert all(other == slots[0] for other in slots), "ranks disagree about the experts"
        assert (balanced.rank_max_over_mean <= load.rank_max_over_mean).all()
        moved |= (balanced.slots != torch.arange(load.counts.shape[1])).any(1)
    assert moved.all(), "the experts of a layer were never moved"
    with experts_in_hub_order(model, optimizers[0]):
        compare("after 3 steps", model, reference, lambda p: p, FP64_MODEL)
        own = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    save_pretrained(model, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for name, value in own.items():
        assert torch.equal(loaded.get_parameter(name), value), name


def computes_a_loss_of_the_caller(rank: int, world: int) -> None:
    """The last stage calls a function of logits and labels for each micro-batch."""
    model = apply_ep_fsdp2(four_layers(rank), pp_size=2, pp_microbatches=3)
    reference = patch(four_layers(0), **ONE_PROCESS)
    (rows,) = rows_of(5)(reference, 0, 0)
    labels = rows.pop("labels")
    count = labels[:, 1:].ne(-100).sum()
    state = state_of(model)
    with FP64():
        state.caller_loss = CallerLoss(focal_loss, labels, count)
        loss = model(**rows).loss
        with pytest.raises(
            ValueError, match=r"aux loss depends on all.*output_router_logits=False"
        ):
            model(**rows, output_router_logits=True)
        state.caller_loss = None
        loss.backward()
        want = focal_loss(reference(**rows), labels, count)
        want.backward()
    assert_close("loss", loss.detach(), want.detach(), FP64_MODEL)
    compare("gradient of", model, reference, lambda p: p.grad, FP64_MODEL)


def forwards_may_interleave(rank: int, world: int) -> None:
    """Two forwards may run before a backward, with an evaluation and a second model between."""
    models = [apply_ep_fsdp2(four_layers(seed + rank), pp_size=2) for seed in (0, 10)]
    references = [patch(four_layers(seed), **ONE_PROCESS) for seed in (0, 10)]
    first, second = (rows_of(5)(references[0], 0, number)[0] for number in range(2))

    def run(model: nn.Module, other: nn.Module) -> None:
        loss = model(**first).loss
        other_loss = other(**second).loss
        model.eval()
        with torch.no_grad():
            evaluated = model(**second).loss
        model.train()
        later = model(**second).loss
        assert_close("evaluated", evaluated, later.detach(), FP64_MODEL)
        (3 * other_loss).backward()
        (loss + 0.5 * later).backward()

    with FP64():
        run(*models)
        run(*references)
    for model, reference in zip(models, references, strict=True):
        compare("gradient of", model, reference, lambda p: p.grad, FP64_MODEL)


def backward_runs_outside_of_autocast(rank: int, world: int) -> None:
    """A caller runs the forward under autocast, but not backward. Stages must do the same."""
    model = apply_ep_fsdp2(four_layers(rank, dtype=torch.float32), pp_size=2)
    (rows,) = rows_of(4)(model, 0, 0)
    seen: list[tuple[str, bool]] = []

    def watch(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(("forward", torch.is_autocast_enabled("cpu")))
        output.register_hook(lambda _: seen.append(("backward", torch.is_autocast_enabled("cpu"))))

    model.model.layers[2 * rank].register_forward_hook(watch)
    with torch.autocast("cpu", torch.bfloat16):
        model(**rows)
    assert sorted(set(seen)) == [("backward", False), ("forward", True)], seen
    assert len(seen) == 2 * 2, "two micro-batches"


def every_backward_is_the_last(rank: int, world: int) -> None:
    """FSDP2 waits for reductions only in a last backward, which a loop may not have announced."""
    model = apply_ep_fsdp2(four_layers(rank), pp_size=2)
    (rows,) = rows_of(4)(model, 0, 0)
    model.set_is_last_backward(False)
    with mock.patch.object(FSDPModule, "set_is_last_backward", autospec=True) as announce:
        model(**rows)
    announce.assert_called_once_with(model, True)


def router_logits_may_be_switched(rank: int, world: int) -> None:
    """With router logits one more tensor is sent, which a stage must not take for hidden states."""
    config = {"router_aux_loss_coef": 0.3}
    model = apply_ep_fsdp2(four_layers(rank, **config), pp_size=2, pp_microbatches=1)
    reference = four_layers(0, **config)
    (rows,) = rows_of(4)(reference, 0, 0)
    for wants_logits in (False, True, False, True):
        options = {"output_router_logits": wants_logits}
        for trained in (model, reference):
            trained.zero_grad()
        with FP64():
            loss, want = model(**rows, **options).loss, reference(**rows, **options).loss
            loss.backward()
            want.backward()
        assert_close(f"loss {wants_logits}", loss.detach(), want.detach(), FP64_MODEL)
        compare("gradient of", model, reference, lambda p: p.grad, FP64_MODEL)
    model.config.output_router_logits = True
    assert_close("config", model(**rows).loss.detach(), want.detach(), 1e-6)
    match = r"rank 0 and rank 1 of one pipeline column pass different numbers, flags or texts"
    with pytest.raises(ValueError, match=match):
        model(**rows, output_router_logits=rank == 0)
    with torch.autocast("cpu", torch.bfloat16, rank == 0), pytest.raises(ValueError, match=match):
        model(**rows)


def adapters_of_one_stage_can_be_disabled(rank: int, world: int) -> None:
    """The second stage has no layer with an adapter, which PEFT would take for an error."""
    options: dict[str, Any] = {"parameters": (), "modules": ("0.self_attn.q_proj",)}
    stock, model = (with_lora(four_layers(0), r=3, seed=5, **options) for _ in range(2))
    apply_ep_fsdp2(model, pp_size=2)
    (rows,) = rows_of(4)(stock, 0, 0)
    losses = []
    for each in (model.eval(), stock.eval()):
        with FP64(), torch.no_grad(), each.disable_adapter():
            losses.append(each(**rows).loss)
        with FP64(), torch.no_grad():
            losses.append(each(**rows).loss)
    assert_close("loss without adapters", losses[0], losses[2], FP64_MODEL)
    assert_close("loss with adapters", losses[1], losses[3], FP64_MODEL)
    assert losses[2] != losses[3]
    assert len(model.get_layer_status()) == (1 if rank == 0 else 0)
    assert model.get_model_status().enabled is True


TWO_RANKS = {
    "disabled adapters": adapters_of_one_stage_can_be_disabled,
    "router logits": router_logits_may_be_switched,
    "last": every_backward_is_the_last,
    "interleaved": forwards_may_interleave,
    "autocast": backward_runs_outside_of_autocast,
    "counts": partial(counts_every_token_once, {"pp_size": 2}),
    "a loss of the caller": computes_a_loss_of_the_caller,
}
SLOW_TWO_RANKS = {
    "biases": biases_follow_the_load,
    "replay": partial(routes_are_replayed, {"pp_size": 2}, [0], False),
}
FOUR_RANKS = {
    "replay, ep 2": partial(routes_are_replayed, {"pp_size": 2, "ep_size": 2}, [1], True),
    "replay, sp 2": partial(routes_are_replayed, {"pp_size": 2, "sp_size": 2}, [], False),
    "replay, a dense stage": partial(routes_are_replayed, {"pp_size": 4}, [0], True),
    "experts are moved": partial(moved_experts_train_alike, {"pp_size": 2, "ep_size": 2}),
    "counts, ep 2": partial(counts_every_token_once, {"pp_size": 2, "ep_size": 2}),
    "counts, ep_fsdp 2": partial(counts_every_token_once, {"pp_size": 2}),
    "Muon": muon_trains_every_matrix,
}


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, TWO_RANKS, routes_that_do_not_fit_raise_on_every_stage),
        *on_ranks(2, SLOW_TWO_RANKS, slow=True),
        *on_ranks(4, FOUR_RANKS, slow=True),
    ],
)
def test_features_of_stages(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


class _RecordedChannel:
    """Records the order in which a stage starts its transfers."""

    started: ClassVar[list[str]] = []

    def __init__(self, *args: Any) -> None:
        pass

    def send_known(self, tensors: list[Tensor], what: str) -> None:
        self.started.append("send")

    def receive_known(self, forms: list[Any], what: str) -> Any:
        self.started.append("receive")
        return SimpleNamespace(wait=lambda: [torch.ones(*form.shape) for form in forms])

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("is_first", [True, False])
def test_one_of_two_stages_receives_the_tied_gradient_first(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both sent first, both would wait forever for their first transfer with NCCL."""
    monkeypatch.setattr("hf_moe_ep.pipeline.run.Channel", _RecordedChannel)
    _RecordedChannel.started.clear()
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    stages = SimpleNamespace(size=3, find_rank_in=int, forwards=None, backwards=None)
    meshes = SimpleNamespace(device=torch.device("cpu"), stages=stages)
    stage: Any = SimpleNamespace(tied_weight=weight, size=3, is_first=is_first, index=0)
    pipeline: Any = SimpleNamespace(state=SimpleNamespace(meshes=meshes))
    Pipeline._add_tied_gradients(pipeline, stage)
    order = ["send", "receive"]
    assert _RecordedChannel.started == (order if is_first else order[::-1])
    assert weight.grad is not None and bool((weight.grad == 1).all())
