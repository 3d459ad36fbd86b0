"""Routing that is recorded and replayed in one process, compared with stock that is made to choose.

Record and replay are bit-equal; random choices equal stock with the same choices forced on it.
"""

import copy
import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import parity
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.forced import forced_topk, forced_weights, random_ids
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from hf_moe_ep import Routes, RoutingReplay, patch, unpatch
from hf_moe_ep.routing import recording

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def _pair(**overrides: Any) -> tuple[nn.Module, nn.Module]:
    """A patched model, and stock with the same weights; the layer between is dense."""
    sizes = {"num_hidden_layers": LAYERS, "mlp_only_layers": [1]} | overrides
    return patch(tiny(**sizes)), tiny(**sizes)


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _routes(ids: Tensor) -> Routes:
    return Routes(ids, (0, 2))


def _assert_same_grads(model: nn.Module, stock: nn.Module) -> None:
    parity.assert_same_gradients("replayed", model, stock, lambda _: FP64_MODEL)


def _left_padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.flip(1) for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("backend", "use_reentrant"),
    [("torch", None), ("torch", False), ("torch", True), ("eager", False)],
)
def test_a_record_replayed_is_bit_equal(backend: str, use_reentrant: bool | None) -> None:
    """With the same weights, logits and all gradients are equal bit by bit."""
    model = patch(tiny(num_hidden_layers=LAYERS), experts_backend=backend)
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    inputs = batch(model, 2, 9, pad=3)
    live = model(**inputs)
    live.loss.backward()
    want = _grads(model)
    model.zero_grad()
    replay = RoutingReplay(model)
    with replay.record() as routes:
        recorded = model(**inputs)
    assert torch.equal(recorded.logits, live.logits)
    assert routes.ids.dtype == torch.uint8 and routes.ids.shape == (2, 9, LAYERS, TOP_K)
    assert routes.layers == tuple(range(LAYERS))
    with replay.replay(routes):
        again = model(**inputs)
    again.loss.backward()  # behind the block
    assert torch.equal(again.logits, live.logits)
    assert all(torch.equal(grad, want[name]) for name, grad in _grads(model).items())
    report = replay.last
    assert (report.replayed, report.live, report.agreement) == (2 * 9 * LAYERS, 0, 1.0)
    assert report.by_layer == dict.fromkeys(range(LAYERS), 1.0)


@pytest.mark.parametrize(
    ("side", "use_reentrant"), [("left", None), ("right", False), ("right", True)]
)
def test_random_routes_equal_stock_made_to_choose_them(
    side: str, use_reentrant: bool | None
) -> None:
    """Any choice of experts, some of them -1. Loss and gradients are those of stock to 1e-10."""
    model, stock = _pair()
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    inputs = batch(model, 3, 7, pad=3)
    inputs = inputs if side == "right" else _left_padded(inputs)
    ids = random_ids(3, 7, 2, EXPERTS, TOP_K)
    ids[inputs["attention_mask"] == 0] = -1
    ids[0, 2:4, 1] = -1
    with forced_topk(EXPERTS, ids) as lives:
        want = stock(**inputs)
    want.loss.backward()
    replay = RoutingReplay(model)
    with replay.replay(_routes(ids)):
        got = model(**inputs)
    got.loss.backward()
    assert_close("logits", got.logits, want.logits, FP64_MODEL)
    assert_close("loss", got.loss, want.loss, FP64_MODEL)
    _assert_same_grads(model, stock)
    given = [place[place[:, 0] >= 0] for place in ids.long().flatten(0, 1).unbind(1)]
    live = [x[ids.flatten(0, 1)[:, i, 0] >= 0] for i, x in enumerate(lives)]
    alike = sum(
        (a[:, :, None] == b[:, None]).any(2).sum() for a, b in zip(given, live, strict=True)
    )
    rows = sum(map(len, given))
    report = replay.last
    assert (report.replayed, report.live) == (rows, 2 * 3 * 7 - rows)
    assert report.agreement == alike / (rows * TOP_K) < 0.9


@pytest.mark.parametrize("all_live", [True, False])
def test_tokens_without_routes_are_as_if_nothing_was_replayed(all_live: bool) -> None:
    """All ids are -1, or those of one row of a batch."""
    model, _ = _pair()
    inputs = batch(model, 2, 6)
    ids = random_ids(2, 6, 2, EXPERTS, TOP_K)
    ids[0 if not all_live else slice(None)] = -1
    live = model(**inputs)
    live.loss.backward()
    want = _grads(model)
    model.zero_grad()
    replay = RoutingReplay(model)
    with replay.replay(_routes(ids)):
        got = model(**inputs)
        got.loss.backward()
    assert torch.equal(got.logits[0], live.logits[0])
    assert torch.equal(got.logits[1], live.logits[1]) is all_live
    if all_live:
        assert all(torch.equal(grad, want[name]) for name, grad in _grads(model).items())
        assert replay.last.replayed == 0 and np.isnan(replay.last.agreement)


def test_weights_that_moved_keep_the_recorded_experts_and_their_gradient() -> None:
    """The router learns from the scores of the recorded experts."""
    model, stock = _pair()
    inputs = batch(model, 2, 9)
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.record() as routes:
        model(**inputs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for mine, its in zip(model.parameters(), stock.parameters(), strict=True):
            moved = 0.3 * torch.randn(mine.shape, generator=generator, dtype=mine.dtype)
            mine += moved * mine.std()
            its.copy_(mine)
    seen: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[i].mlp.experts.register_forward_pre_hook(
            lambda module, args, i=i: seen.update({i: args[1]})
        )
        for i in routes.layers
    ]
    with replay.replay(routes):
        model(**inputs).loss.backward()
    for hook in hooks:
        hook.remove()
    for place, layer in enumerate(routes.layers):
        assert torch.equal(seen[layer], routes.ids[:, :, place].flatten(0, 1).long())
    assert replay.last.agreement < 0.95
    with forced_topk(EXPERTS, routes.ids.long()):
        stock(**inputs).loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 1e-6
    _assert_same_grads(model, stock)


@pytest.mark.parametrize("use_reentrant", [None, False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_from_elsewhere_replace_the_routers(use_reentrant: bool | None) -> None:
    """`Routes.weights` weigh the experts; the router learns from other tokens."""
    model, stock = _pair()
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    inputs = batch(model, 2, 5)
    ids = random_ids(2, 5, 2, EXPERTS, TOP_K)
    ids[1, 3:] = -1
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2))
    experts = [stock.model.layers[layer].mlp.experts for layer in (0, 2)]
    with forced_topk(EXPERTS, ids), forced_weights(experts, ids, weights):
        want = stock(**inputs)
    want.loss.backward()
    with RoutingReplay(model).replay(Routes(ids, (0, 2), weights)):
        got = model(**inputs)
    got.loss.backward()
    assert_close("loss", got.loss, want.loss, FP64_MODEL)
    _assert_same_grads(model, stock)


@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_micro_batches_with_routes_of_their_own_are_one_batch(use_reentrant: bool) -> None:
    """Replays of different lengths, one backward and a step."""
    (model, _), (other, _) = _pair(), _pair()
    for one in (model, other):
        parity.checkpointing(one, use_reentrant)
    inputs = {name: x.flip(0) for name, x in batch(model, 4, 6, pad=3).items()}
    count = inputs["labels"][:, 1:].ne(-100).sum()
    routes = _routes(random_ids(4, 6, 2, EXPERTS, TOP_K))
    with RoutingReplay(other).replay(routes):
        other(**inputs, num_items_in_batch=count).loss.backward()
    want = _grads(other)
    replay, losses = RoutingReplay(model), []
    for start, length in ((0, 4), (2, 6)):  # the first two rows end in two tokens of padding
        part = {name: x[start : start + 2, :length] for name, x in inputs.items()}
        its_own = _routes(routes.ids[start : start + 2, :length])
        with replay.replay(its_own):
            losses.append(model(**part, num_items_in_batch=count).loss)
        with torch.no_grad():
            model(**part)  # live, between them
    sum(losses).backward()
    assert _grads(model).keys() == want.keys()
    for name, grad in _grads(model).items():
        assert_close(name, grad, want[name], FP64_MODEL)
    for one in (model, other):
        torch.optim.AdamW(one.parameters(), lr=1e-3, foreach=False).step()
    for (name, got), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(f"{name} after a step", got.detach(), wanted.detach(), FP64_MODEL)


def test_packed_rows_have_the_routes_of_their_tokens() -> None:
    """Results are those of each document alone."""
    model, _ = _pair()
    lengths = [4, 7, 5]
    inputs = batch(model, 3, 7)
    routes = _routes(random_ids(3, 7, 2, EXPERTS, TOP_K))
    replay = RoutingReplay(model)
    alone = []
    for row, length in enumerate(lengths):
        mine = Routes(routes.ids[row : row + 1, :length], (0, 2))
        with torch.no_grad(), replay.replay(mine):
            alone.append(model(input_ids=inputs["input_ids"][row : row + 1, :length]).logits)
    tokens = torch.cat([inputs["input_ids"][row, :n] for row, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for told in (lengths, positions):
        packed = routes.pack(told)
        with torch.no_grad(), replay.replay(packed):
            got = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        assert_close("logits", got, torch.cat(alone, dim=1), FP64_MODEL)


def test_adapters_that_are_switched_off_inside_route_live() -> None:
    """The policy's routes do not apply to its reference."""
    model = get_peft_model(
        tiny(num_hidden_layers=2),
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
    )
    patch(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.5)
    inputs = batch(model, 2, 6)
    routes = Routes(random_ids(2, 6, 2, EXPERTS, TOP_K), (0, 1))
    replay = RoutingReplay(model)
    with torch.no_grad(), model.disable_adapter():
        want = model(**inputs).logits
    with torch.no_grad(), replay.replay(routes):
        policy = model(**inputs).logits
        with model.disable_adapter():
            got = model(**inputs).logits
        again = model(**inputs).logits
    assert torch.equal(got, want)
    assert torch.equal(policy, again)
    assert replay.last.replayed == 2 * 2 * 6 * 2
    with torch.no_grad():
        assert not torch.equal(policy, model(**inputs).logits)


def test_another_model_routes_live_while_the_policy_replays() -> None:
    model, _ = _pair()
    reference = patch(tiny(num_hidden_layers=LAYERS, mlp_only_layers=[1], seed=1))
    inputs = batch(model, 2, 6)
    with torch.no_grad():
        want = reference(**inputs).logits
        with RoutingReplay(model).replay(_routes(random_ids(2, 6, 2, EXPERTS, TOP_K))):
            model(**inputs)
            assert torch.equal(reference(**inputs).logits, want)


def test_the_load_balancing_loss_counts_what_the_router_itself_would_choose() -> None:
    """Stock's aux loss calls topk outside of the layers, and replay does not answer that call."""
    model, _ = _pair(output_router_logits=True, num_experts_per_tok=2)
    inputs = batch(model, 2, 6)
    ids = random_ids(2, 6, 2, EXPERTS, TOP_K)
    ids[:, :, 1] = -1  # the logits of the last layer do depend on what the first one chose
    with RoutingReplay(model).replay(_routes(ids)):
        got = model(**inputs)
    logits = [logits.softmax(-1) for logits in got.router_logits]
    chosen = torch.cat([p.topk(TOP_K).indices for p in logits])
    fraction = torch.nn.functional.one_hot(chosen, EXPERTS).double().mean(0)
    want = EXPERTS * (fraction * torch.cat(logits).mean(0)).sum()
    assert_close("aux loss", got.aux_loss.double(), want, FP32_INSIDE)


def test_nothing_is_left_outside_of_the_blocks() -> None:
    """No hook and no state are left, and unpatch gives back a stock model."""
    model, _ = _pair()
    inputs = batch(model, 1, 4)

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = hooks()
    replay = RoutingReplay(model)
    assert hooks() == before
    with replay.record() as routes:
        model(**inputs)
        assert hooks() > before
    with replay.replay(routes), pytest.raises(ZeroDivisionError):
        hook = model.model.layers[2].mlp.gate.register_forward_hook(lambda *_: 1 / 0)
        model(**inputs)
    hook.remove()
    assert torch.overrides._len_torch_function_stack() == 0
    assert hooks() == before
    with torch.no_grad():
        want = model(**inputs).logits
    unpatch(model)
    assert_close("unpatched", model(**inputs).logits, want, FP64_MODEL)


def test_an_interrupted_forward_leaves_nothing() -> None:
    """After KeyboardInterrupt torch calls no forward hook, and topk is torch's again."""
    model, _ = _pair()
    inputs = batch(model, 2, 6)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        want = model(**inputs).logits
    hook = model.model.layers[2].mlp.gate.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), RoutingReplay(model).replay(_routes(IDS)):
        model(**inputs)
    hook.remove()
    assert torch.overrides._len_torch_function_stack() == 0
    assert model._hf_moe_ep.routing is None
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, want)


def test_a_model_that_is_unpatched_in_between_is_left_alone() -> None:
    """unpatch removes the hooks. An older RoutingReplay is refused."""
    model, _ = _pair()
    inputs = batch(model, 2, 6)
    replay = RoutingReplay(model)
    with pytest.raises(ValueError, match="nothing was recorded"), replay.record():
        unpatch(model)
        model(**inputs)
    parity.checkpointing(model, False)
    with pytest.raises(ValueError, match="before the model was unpatched"), replay.record():
        pass
    patch(model)
    with (
        pytest.raises(ValueError, match="before the model was unpatched"),
        replay.replay(_routes(IDS)),
    ):
        pass
    unpatch(model)
    functions = [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
    assert all("hf_moe_ep" not in repr(m._gradient_checkpointing_func) for m in functions)


@pytest.mark.slow
def test_generate_is_recorded_forward_by_forward_and_replayed_not_at_all() -> None:
    """Each new token is a forward of its own."""
    model, _ = _pair()
    model.eval()
    tokens = batch(model, 2, 6)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    want = model.generate(tokens, **options)
    replay = RoutingReplay(model)
    with replay.record() as routes:
        assert torch.equal(model.generate(tokens, **options), want)
    assert routes.ids.shape == (2, 1, 2, TOP_K)
    with (
        pytest.raises(ValueError, match=r"2 rows of 6 tokens .* 2 rows of 1: one replay"),
        replay.replay(_routes(IDS)),
    ):
        model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options), want)


def test_no_routes_at_all_are_no_replay() -> None:
    """A rank without samples opens such a block."""
    model, _ = _pair()
    inputs = batch(model, 2, 6)
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.replay(None):
        got = model(**inputs).logits
        assert torch.equal(model(**batch(model, 1, 3)).logits, model(**batch(model, 1, 3)).logits)
    with torch.no_grad():
        assert torch.equal(got, model(**inputs).logits)
    assert replay.last.replayed == 0 and np.isnan(replay.last.agreement)
    with (
        pytest.raises(ValueError, match="no routes to replay, but on_missing='error'"),
        RoutingReplay(model, on_missing="error").replay(None),
    ):
        pass


@pytest.mark.slow
def test_adapters_that_came_later_are_switched_off_as_well() -> None:
    model, _ = _pair()
    replay = RoutingReplay(model)
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    inputs = batch(model, 2, 6)
    with torch.no_grad(), policy.disable_adapter():
        want = policy(**inputs).logits
    with torch.no_grad(), replay.replay(_routes(IDS)), policy.disable_adapter():
        assert torch.equal(policy(**inputs).logits, want)


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_one_group_of_experts_of_which_two_are_chosen(use_reentrant: bool | None) -> None:
    """GLM scores groups by their top two, which looks like a choice of experts."""
    options: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    }
    torch.manual_seed(0)
    stock = Glm4MoeForCausalLM(Glm4MoeConfig(**options, experts_implementation="eager")).double()
    for layer in stock.model.layers:
        nn.init.normal_(layer.mlp.gate.weight)
    model = patch(copy.deepcopy(stock.train()))
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    tokens = torch.arange(10).view(2, 5)
    ids = random_ids(2, 5, 2, EXPERTS, TOP_K)
    ids[1, 3:] = -1
    # Stock without groups: the same scores, and topk is called once.
    for layer in stock.model.layers:
        layer.mlp.gate.num_group = layer.mlp.gate.topk_group = 2
        layer.mlp.gate.num_experts = EXPERTS
    with forced_topk(EXPERTS, ids):
        want = stock(input_ids=tokens, labels=tokens).loss
    want.backward()
    replay = RoutingReplay(model)
    with replay.replay(Routes(ids, (0, 1))):
        got = model(input_ids=tokens, labels=tokens).loss
    got.backward()
    assert_close("loss", got, want, FP32_INSIDE)
    for name, grad in _grads(stock).items():
        assert_close(name, _grads(model)[name], grad, FP32_INSIDE)
    assert replay.last.replayed == 2 * 8


@pytest.mark.slow
def test_48_layers_of_8192_tokens_copy_3_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are copied to the host as uint8, once for each forward, and no wider tensor is copied."""
    sizes = {"hidden_size": 8, "head_dim": 2, "moe_intermediate_size": 2, "vocab_size": 9}
    model = patch(
        tiny(
            num_hidden_layers=48,
            num_experts=16,
            num_experts_per_tok=8,
            dtype=torch.float32,
            **sizes,
        )
    )
    copied: list[int] = []
    original = recording.Recording._to_host
    monkeypatch.setattr(
        recording.Recording,
        "_to_host",
        lambda self, ids: copied.append(ids.nbytes) or original(self, ids),
    )
    with torch.no_grad(), RoutingReplay(model).record() as routes:
        model(input_ids=torch.arange(8192).view(512, 16) % 9, use_cache=False)
    assert copied == [3 * 2**20] == [routes.ids.nbytes]
    assert routes.ids.shape == (512, 16, 48, 8)


def _deep(ids: Tensor, value: int, *place: int) -> Tensor:
    ids = ids.clone()
    ids[place] = value
    return ids


IDS = random_ids(2, 6, 2, EXPERTS, TOP_K)
WRONG: dict[str, tuple[Routes, str]] = {
    "shape": (Routes(IDS[0], (0, 2)), r"\[B, S, L, K\], not \[6, 2, 2\]"),
    "floats": (Routes(IDS.double(), (0, 2)), "float64, not integers"),
    "K": (Routes(IDS[..., :1], (0, 2)), "K=1 experts per token, but routers of qwen3_moe choose 2"),
    "experts of another": (Routes(IDS, (0, 2), num_experts=16), "16 experts .* in a model with 8"),
    "names and L": (Routes(IDS, (0,)), "name 1 layers, but ids have L=2"),
    "L": (
        Routes(random_ids(2, 6, 4, EXPERTS, TOP_K), (0, 1, 2, 3)),
        r"L=4 layers \(0, 1, 2, 3\), and this qwen3_moe has 3 decoder layers, 2 of them with",
    ),
    "another layer": (Routes(IDS, (0, 3)), r"L=2 layers \(0, 3\), and this qwen3_moe has 3"),
    "too large": (Routes(_deep(IDS, 8, 1, 4, 1, 0), (0, 2)), "row 1, token 4, decoder layer 2"),
    "too small": (Routes(_deep(IDS, -2, 0, 3, 0, 1), (0, 2)), "outside of the 8 experts"),
    "in part": (Routes(_deep(IDS, -1, 0, 3, 0, 1), (0, 2)), "has -1 for some of its experts"),
    "twice": (
        Routes(torch.zeros_like(IDS), (0, 2)),
        r"an expert twice; .* \(24 of 24 choices\)",
    ),
    "weights": (Routes(IDS, (0, 2), torch.ones(2, 6, 2)), r"weights of routes .* \[2, 6, 2\]"),
    "weights of integers": (Routes(IDS, (0, 2), IDS), "weights of routes are torch.int16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_routes_that_do_not_fit_are_refused_on_entry(case: str) -> None:
    model, _ = _pair()
    routes, message = WRONG[case]
    with pytest.raises(ValueError, match=message), RoutingReplay(model).replay(routes):
        raise AssertionError("entered")
    assert model._hf_moe_ep.routing is None


def test_strict_false_looks_at_shapes_alone() -> None:
    model, _ = _pair()
    inputs = batch(model, 2, 6)
    same = Routes(torch.zeros_like(IDS), (0, 2))
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.replay(same, strict=False):
        model(**inputs)
    assert replay.last.replayed == 24
    with pytest.raises(ValueError, match="K=1"), replay.replay(WRONG["K"][0], strict=False):
        pass


def test_misuse_is_refused() -> None:
    model, stock = _pair()
    inputs = batch(model, 2, 6)
    replay = RoutingReplay(model)
    with pytest.raises(ValueError, match="not patched"):
        RoutingReplay(stock)
    with pytest.raises(ValueError, match="on_missing='no'"):
        RoutingReplay(model, on_missing="no")
    with pytest.raises(ValueError, match="nothing was recorded"), replay.record():
        pass
    with pytest.raises(ValueError, match="no replay"):
        _ = replay.last
    with (
        pytest.raises(ValueError, match=r"routes of 2 rows of 6 tokens .* of 2 rows of 5"),
        replay.replay(_routes(IDS)),
    ):
        model(**{name: x[:, :5] for name, x in inputs.items()})
    with (
        pytest.raises(ValueError, match="open already"),
        replay.replay(_routes(IDS)),
        RoutingReplay(model).record(),
    ):
        pass
    with (
        pytest.raises(ValueError, match="call the model itself"),
        replay.record(),
    ):
        model.model(input_ids=inputs["input_ids"])
    with (
        pytest.raises(ValueError, match=r"has no experts .*on_missing='error' .*\(1 of 24 choices"),
        RoutingReplay(model, on_missing="error").replay(_routes(_deep(IDS, -1, 0, 0, 0))),
    ):
        pass


def test_weights_that_a_recompute_would_not_have_are_refused() -> None:
    """The model's own loop over experts gets no such weights in backward."""
    model = patch(tiny(num_hidden_layers=LAYERS, mlp_only_layers=[1]), experts_backend="eager")
    inputs = batch(model, 2, 6)
    weighed = Routes(IDS, (0, 2), torch.rand(IDS.shape))
    replay = RoutingReplay(model)
    with replay.replay(weighed):
        model(**inputs).loss.backward()
    parity.checkpointing(model, False)
    with (
        pytest.raises(ValueError, match="checkpointed and experts_backend='eager'"),
        replay.replay(weighed),
    ):
        model(**inputs)
    gc.collect()  # torch 2.11 keeps a checkpoint's hooks as long as the frames it was aborted in
    with replay.replay(_routes(IDS)):
        model(**inputs).loss.backward()


@pytest.mark.slow
def test_a_compiled_model_is_refused() -> None:
    """The model, a part of it or its caller is compiled, before or after the block was made."""
    model, _ = _pair()
    inputs = batch(model, 2, 6)
    replay = RoutingReplay(model)
    with pytest.raises(ValueError, match="of a compiled model"):
        RoutingReplay(torch.compile(model, backend="eager"))
    compiled = torch.compile(lambda **given: model(**given).logits, backend="eager")
    with pytest.raises(ValueError, match=r"within torch\.compile"), replay.record():
        compiled(**inputs)
    torch._dynamo.reset()
    assert torch.overrides._len_torch_function_stack() == 0
    with replay.record() as routes:
        model(**inputs)
    assert routes.ids.shape == (2, 6, 2, TOP_K)
    model.model.layers[2].compile(backend="eager")
    with pytest.raises(ValueError, match="of a compiled model"), replay.replay(_routes(IDS)):
        pass


def test_the_decoder_alone_replays_its_routes() -> None:
    """Liger's losses call the decoder and not the model with its head."""
    model, stock = _pair()
    tokens = batch(model, 2, 6)["input_ids"]
    with torch.no_grad(), RoutingReplay(model).replay(_routes(IDS)):
        got = model.model(input_ids=tokens).last_hidden_state
    with torch.no_grad(), forced_topk(EXPERTS, IDS):
        want = stock.model(input_ids=tokens).last_hidden_state
    assert_close("hidden states", got, want, FP64_MODEL)


def test_a_deep_copy_of_a_model_routes_live_beside_it() -> None:
    model, _ = _pair()
    inputs = batch(model, 2, 6)
    other = copy.deepcopy(model)
    with torch.no_grad():
        want = model(**inputs).logits
    with torch.no_grad(), RoutingReplay(model).replay(_routes(IDS)):
        inside = copy.deepcopy(model)
        replayed = model(**inputs).logits
        assert not torch.equal(replayed, want)
        assert torch.equal(other(**inputs).logits, want)
        assert torch.equal(inside(**inputs).logits, want)
    with torch.no_grad(), RoutingReplay(inside).replay(_routes(IDS)):
        assert torch.equal(inside(**inputs).logits, replayed)


def test_another_thread_chooses_for_itself() -> None:
    """A topk of the same shape in another thread is torch's own."""
    model, _ = _pair()
    scores = torch.rand(12, EXPERTS)
    found: list[Tensor] = []

    def elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(scores.topk(TOP_K).indices))
        thread.start()
        thread.join()

    want = scores.topk(TOP_K).indices
    hook = model.model.layers[0].mlp.gate.register_forward_pre_hook(elsewhere)
    with torch.no_grad(), RoutingReplay(model).replay(_routes(IDS)):
        model(**batch(model, 2, 6))
    hook.remove()
    assert len(found) == 1 and torch.equal(found[0], want)
