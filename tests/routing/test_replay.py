"""In one process the routing of a model is recorded and replayed exactly.

A replay of recorded routes gives the same bits as the recorded forward. A replay of random routes
equals a stock model whose topk is forced to return the same experts (support/forced.py).
"""

import copy
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import parity
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.forced import draw_random_ids, force_topk, force_weights
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from hf_moe_ep import Routes, RoutingReplay, patch, unpatch
from hf_moe_ep.routing import recording
from hf_moe_ep.routing.check_routes import check_ids
from hf_moe_ep.routing.layers import RoutedLayers
from hf_moe_ep.state import STATE, ModelState

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def _make_models(**overrides: Any) -> tuple[nn.Module, nn.Module]:
    """Make a patched model and a stock model with the same weights. Layer 1 is dense."""
    sizes = {"num_hidden_layers": LAYERS, "mlp_only_layers": [1]} | overrides
    return patch(tiny(**sizes)), tiny(**sizes)


def _clone_grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _make_routes(ids: Tensor) -> Routes:
    return Routes(ids, (0, 2))


def _assert_same_grads(model: nn.Module, stock: nn.Module) -> None:
    parity.assert_same_gradients("replayed", model, stock, lambda _: FP64_MODEL)


def _pad_left(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.flip(1) for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("backend", "use_reentrant"),
    [("torch", None), ("torch", False), ("torch", True), ("eager", False)],
)
def test_a_replay_of_recorded_routes_gives_the_same_bits(
    backend: str, use_reentrant: bool | None
) -> None:
    """The weights are the same, so logits and all gradients are equal bit by bit."""
    model = patch(tiny(num_hidden_layers=LAYERS), experts_backend=backend)
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    inputs = batch(model, 2, 9, pad=3)
    live = model(**inputs)
    live.loss.backward()
    want = _clone_grads(model)
    model.zero_grad()
    replay = RoutingReplay(model)
    with replay.record() as routes:
        recorded = model(**inputs)
    assert torch.equal(recorded.logits, live.logits)
    assert routes.ids.dtype == torch.uint8 and routes.ids.shape == (2, 9, LAYERS, TOP_K)
    assert routes.layers == tuple(range(LAYERS))
    with replay.replay(routes):
        repeated = model(**inputs)
    repeated.loss.backward()  # backward may run after the block
    assert torch.equal(repeated.logits, live.logits)
    assert all(torch.equal(grad, want[name]) for name, grad in _clone_grads(model).items())
    report = replay.last
    assert (report.replayed, report.live, report.agreement) == (2 * 9 * LAYERS, 0, 1.0)
    assert report.by_layer == dict.fromkeys(range(LAYERS), 1.0)


@pytest.mark.parametrize(
    ("side", "use_reentrant"), [("left", None), ("right", False), ("right", True)]
)
def test_random_routes_equal_stock_with_the_same_routes(
    side: str, use_reentrant: bool | None
) -> None:
    """Some ids are -1, so the router chooses for these tokens."""
    model, stock = _make_models()
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    inputs = batch(model, 3, 7, pad=3)
    inputs = inputs if side == "right" else _pad_left(inputs)
    ids = draw_random_ids(3, 7, 2, EXPERTS, TOP_K)
    ids[inputs["attention_mask"] == 0] = -1
    ids[0, 2:4, 1] = -1
    with force_topk(EXPERTS, ids) as live_ids:
        want = stock(**inputs)
    want.loss.backward()
    replay = RoutingReplay(model)
    with replay.replay(_make_routes(ids)):
        got = model(**inputs)
    got.loss.backward()
    assert_close("logits", got.logits, want.logits, FP64_MODEL)
    assert_close("loss", got.loss, want.loss, FP64_MODEL)
    _assert_same_grads(model, stock)
    # The agreement is the share of replayed ids that the router would have chosen as well.
    replayed = [layer_TK[layer_TK[:, 0] >= 0] for layer_TK in ids.long().flatten(0, 1).unbind(1)]
    live = [x[ids.flatten(0, 1)[:, i, 0] >= 0] for i, x in enumerate(live_ids)]
    num_equal = sum(
        (a[:, :, None] == b[:, None]).any(2).sum() for a, b in zip(replayed, live, strict=True)
    )
    rows = sum(map(len, replayed))
    report = replay.last
    assert (report.replayed, report.live) == (rows, 2 * 3 * 7 - rows)
    assert report.agreement == num_equal / (rows * TOP_K) < 0.9


@pytest.mark.parametrize("all_live", [True, False])
def test_tokens_without_routes_route_live(all_live: bool) -> None:
    """Either all ids are -1, or only the ids of row 0 of the batch."""
    model, _ = _make_models()
    inputs = batch(model, 2, 6)
    ids = draw_random_ids(2, 6, 2, EXPERTS, TOP_K)
    ids[0 if not all_live else slice(None)] = -1
    live = model(**inputs)
    live.loss.backward()
    want = _clone_grads(model)
    model.zero_grad()
    replay = RoutingReplay(model)
    with replay.replay(_make_routes(ids)):
        got = model(**inputs)
        got.loss.backward()
    assert torch.equal(got.logits[0], live.logits[0])
    assert torch.equal(got.logits[1], live.logits[1]) is all_live
    if all_live:
        assert all(torch.equal(grad, want[name]) for name, grad in _clone_grads(model).items())
        assert replay.last.replayed == 0 and np.isnan(replay.last.agreement)


def test_after_a_weight_update_the_recorded_experts_are_replayed() -> None:
    """The router's gradient comes from its new scores of the recorded experts."""
    model, stock = _make_models()
    inputs = batch(model, 2, 9)
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.record() as routes:
        model(**inputs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter, copied in zip(model.parameters(), stock.parameters(), strict=True):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.3 * noise * parameter.std()
            copied.copy_(parameter)
    experts_ids: dict[int, Tensor] = {}  # layer -> the ids that its experts received
    hooks = [
        model.model.layers[i].mlp.experts.register_forward_pre_hook(
            lambda module, args, i=i: experts_ids.update({i: args[1]})
        )
        for i in routes.layers
    ]
    with replay.replay(routes):
        model(**inputs).loss.backward()
    for hook in hooks:
        hook.remove()
    for index, layer in enumerate(routes.layers):
        assert torch.equal(experts_ids[layer], routes.ids[:, :, index].flatten(0, 1).long())
    assert replay.last.agreement < 0.95
    with force_topk(EXPERTS, routes.ids.long()):
        stock(**inputs).loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 1e-6
    _assert_same_grads(model, stock)


@pytest.mark.parametrize("use_reentrant", [None, False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_of_routes_replace_the_routers_weights(use_reentrant: bool | None) -> None:
    """Only tokens without routes (ids of -1) give the router a gradient."""
    model, stock = _make_models()
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    inputs = batch(model, 2, 5)
    ids = draw_random_ids(2, 5, 2, EXPERTS, TOP_K)
    ids[1, 3:] = -1
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2))
    experts = [stock.model.layers[layer].mlp.experts for layer in (0, 2)]
    with force_topk(EXPERTS, ids), force_weights(experts, ids, weights):
        want = stock(**inputs)
    want.loss.backward()
    with RoutingReplay(model).replay(Routes(ids, (0, 2), weights)):
        got = model(**inputs)
    got.loss.backward()
    assert_close("loss", got.loss, want.loss, FP64_MODEL)
    _assert_same_grads(model, stock)


@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_replay_per_micro_batch_equals_one_replay_of_the_whole_batch(use_reentrant: bool) -> None:
    """Two replays of different lengths are followed by one backward and an optimizer step."""
    (model, _), (reference, _) = _make_models(), _make_models()
    for checkpointed in (model, reference):
        parity.checkpointing(checkpointed, use_reentrant)
    inputs = {name: x.flip(0) for name, x in batch(model, 4, 6, pad=3).items()}
    count = inputs["labels"][:, 1:].ne(-100).sum()
    routes = _make_routes(draw_random_ids(4, 6, 2, EXPERTS, TOP_K))
    with RoutingReplay(reference).replay(routes):
        reference(**inputs, num_items_in_batch=count).loss.backward()
    want = _clone_grads(reference)
    replay, losses = RoutingReplay(model), []
    for start, length in ((0, 4), (2, 6)):  # the first two rows end in two tokens of padding
        micro = {name: x[start : start + 2, :length] for name, x in inputs.items()}
        with replay.replay(_make_routes(routes.ids[start : start + 2, :length])):
            losses.append(model(**micro, num_items_in_batch=count).loss)
        with torch.no_grad():
            model(**micro)  # a forward outside of the block routes live
    sum(losses).backward()
    assert _clone_grads(model).keys() == want.keys()
    for name, grad in _clone_grads(model).items():
        assert_close(name, grad, want[name], FP64_MODEL)
    for trained in (model, reference):
        torch.optim.AdamW(trained.parameters(), lr=1e-3, foreach=False).step()
    for (name, got), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(f"{name} after a step", got.detach(), expected.detach(), FP64_MODEL)


def test_packed_routes_give_each_document_its_own_logits() -> None:
    """`Routes.pack` takes the lengths of the documents or their position ids."""
    model, _ = _make_models()
    lengths = [4, 7, 5]
    inputs = batch(model, 3, 7)
    routes = _make_routes(draw_random_ids(3, 7, 2, EXPERTS, TOP_K))
    replay = RoutingReplay(model)
    document_logits = []
    for row, length in enumerate(lengths):
        routes_of_row = Routes(routes.ids[row : row + 1, :length], (0, 2))
        with torch.no_grad(), replay.replay(routes_of_row):
            tokens = inputs["input_ids"][row : row + 1, :length]
            document_logits.append(model(input_ids=tokens).logits)
    tokens = torch.cat([inputs["input_ids"][row, :n] for row, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for boundaries in (lengths, positions):
        packed = routes.pack(boundaries)
        with torch.no_grad(), replay.replay(packed):
            got = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        assert_close("logits", got, torch.cat(document_logits, dim=1), FP64_MODEL)


def test_a_forward_with_disabled_adapters_routes_live() -> None:
    """With disabled adapters the model is the reference, which must not replay routes."""
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
    routes = Routes(draw_random_ids(2, 6, 2, EXPERTS, TOP_K), (0, 1))
    replay = RoutingReplay(model)
    with torch.no_grad(), model.disable_adapter():
        want = model(**inputs).logits
    with torch.no_grad(), replay.replay(routes):
        policy = model(**inputs).logits
        with model.disable_adapter():
            got = model(**inputs).logits
        repeated = model(**inputs).logits
    assert torch.equal(got, want)
    assert torch.equal(policy, repeated)
    assert replay.last.replayed == 2 * 2 * 6 * 2
    with torch.no_grad():
        assert not torch.equal(policy, model(**inputs).logits)


def test_another_model_routes_live_while_the_policy_replays() -> None:
    model, _ = _make_models()
    reference = patch(tiny(num_hidden_layers=LAYERS, mlp_only_layers=[1], seed=1))
    inputs = batch(model, 2, 6)
    with torch.no_grad():
        want = reference(**inputs).logits
        with RoutingReplay(model).replay(_make_routes(draw_random_ids(2, 6, 2, EXPERTS, TOP_K))):
            model(**inputs)
            assert torch.equal(reference(**inputs).logits, want)


def test_the_load_balancing_loss_counts_the_routers_own_choice() -> None:
    """Stock's aux loss calls topk outside of the layers, where replay does not replace topk."""
    model, _ = _make_models(output_router_logits=True, num_experts_per_tok=2)
    inputs = batch(model, 2, 6)
    ids = draw_random_ids(2, 6, 2, EXPERTS, TOP_K)
    ids[:, :, 1] = -1  # the last layer routes live, on hidden states of the replayed first layer
    with RoutingReplay(model).replay(_make_routes(ids)):
        got = model(**inputs)
    logits = [logits.softmax(-1) for logits in got.router_logits]
    chosen = torch.cat([p.topk(TOP_K).indices for p in logits])
    fraction = torch.nn.functional.one_hot(chosen, EXPERTS).double().mean(0)
    want = EXPERTS * (fraction * torch.cat(logits).mean(0)).sum()
    assert_close("aux loss", got.aux_loss.double(), want, FP32_INSIDE)


def test_hooks_exist_only_inside_of_the_blocks() -> None:
    """An error inside of a block removes the hooks too, and unpatch then restores a stock model."""
    model, _ = _make_models()
    inputs = batch(model, 1, 4)

    def count_hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = count_hooks()
    replay = RoutingReplay(model)
    assert count_hooks() == before
    with replay.record() as routes:
        model(**inputs)
        assert count_hooks() > before
    with replay.replay(routes), pytest.raises(ZeroDivisionError):
        hook = model.model.layers[2].mlp.gate.register_forward_hook(lambda *_: 1 / 0)
        model(**inputs)
    hook.remove()
    assert torch.overrides._len_torch_function_stack() == 0
    assert count_hooks() == before
    with torch.no_grad():
        want = model(**inputs).logits
    unpatch(model)
    assert_close("unpatched", model(**inputs).logits, want, FP64_MODEL)


def test_after_an_interrupted_forward_the_model_routes_live() -> None:
    """After KeyboardInterrupt torch calls no forward hook, but torch.topk must be restored."""
    model, _ = _make_models()
    inputs = batch(model, 2, 6)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        want = model(**inputs).logits
    hook = model.model.layers[2].mlp.gate.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), RoutingReplay(model).replay(_make_routes(IDS)):
        model(**inputs)
    hook.remove()
    assert torch.overrides._len_torch_function_stack() == 0
    assert model._hf_moe_ep.routing is None
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, want)


def test_a_replay_made_before_unpatch_is_refused() -> None:
    """unpatch removes the hooks, even inside of a block."""
    model, _ = _make_models()
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
        replay.replay(_make_routes(IDS)),
    ):
        pass
    unpatch(model)
    functions = [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
    assert all("hf_moe_ep" not in repr(m._gradient_checkpointing_func) for m in functions)


@pytest.mark.slow
def test_generate_records_its_last_forward_and_cannot_be_replayed() -> None:
    """generate() runs one forward for each new token, and routes belong to one forward."""
    model, _ = _make_models()
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
        replay.replay(_make_routes(IDS)),
    ):
        model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options), want)


def test_replay_of_none_routes_live() -> None:
    """A rank without samples calls replay(None) while other ranks replay their routes."""
    model, _ = _make_models()
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
def test_adapters_added_after_the_replay_object_can_be_disabled() -> None:
    model, _ = _make_models()
    replay = RoutingReplay(model)
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    inputs = batch(model, 2, 6)
    with torch.no_grad(), policy.disable_adapter():
        want = policy(**inputs).logits
    with torch.no_grad(), replay.replay(_make_routes(IDS)), policy.disable_adapter():
        assert torch.equal(policy(**inputs).logits, want)


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_the_scores_of_a_single_group_of_experts_are_not_replayed(
    use_reentrant: bool | None,
) -> None:
    """GLM scores a group by its top two experts.

    With one group, this topk over all experts looks like the choice of experts.
    """
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
    ids = draw_random_ids(2, 5, 2, EXPERTS, TOP_K)
    ids[1, 3:] = -1
    # Stock skips its groups then: the scores stay the same, and it calls topk once.
    for layer in stock.model.layers:
        layer.mlp.gate.num_group = layer.mlp.gate.topk_group = 2
        layer.mlp.gate.num_experts = EXPERTS
    with force_topk(EXPERTS, ids):
        want = stock(input_ids=tokens, labels=tokens).loss
    want.backward()
    replay = RoutingReplay(model)
    with replay.replay(Routes(ids, (0, 1))):
        got = model(input_ids=tokens, labels=tokens).loss
    got.backward()
    assert_close("loss", got, want, FP32_INSIDE)
    for name, grad in _clone_grads(stock).items():
        assert_close(name, _clone_grads(model)[name], grad, FP32_INSIDE)
    assert replay.last.replayed == 2 * 8


def test_routes_are_on_the_host_before_a_model_of_the_host_replays_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy from a GPU with `non_blocking=True` returns before the ids are in host memory."""
    model = patch(tiny())
    inputs = batch(model, 2, 7)
    ids = draw_random_ids(2, 7, 2, EXPERTS, TOP_K)
    routes = Routes(ids, (0, 1), weights=torch.rand(ids.shape))
    shapes = []
    stock_to = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "non_blocking" in kwargs:
            assert not kwargs["non_blocking"]
            shapes.append(self.shape)
        return stock_to(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)
    with torch.no_grad(), RoutingReplay(model).replay(routes):
        model(**inputs)
    assert shapes == [ids.shape, ids.shape]


@pytest.mark.slow
def test_a_record_of_48_layers_and_8192_tokens_copies_3_mib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8192 tokens x 48 layers x 8 ids of one byte are 3 MiB, copied once for each forward."""
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


def test_a_record_waits_for_the_stream_of_the_models_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may be on another GPU than the current GPU, whose stream does not copy the ids."""

    class OnSecondGPU(Tensor):
        is_cuda = True
        device = torch.device("cuda", 1)

    layers = RoutedLayers("m", 1, EXPERTS, TOP_K, (0,), (0,), ())
    state: ModelState = getattr(patch(tiny()), STATE)
    recorder = recording.Recording(state, layers)
    streams = []
    event = SimpleNamespace(record=lambda stream="of the current GPU": streams.append(stream))
    stock_empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda shape, dtype, device, pin_memory: stock_empty(shape, dtype=dtype, device=device),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    ids = draw_random_ids(2, 7, 2, EXPERTS, TOP_K)
    host = recorder._to_host(ids.as_subclass(OnSecondGPU))
    assert torch.equal(host, ids) and streams == [OnSecondGPU.device]


def _set_id(ids: Tensor, value: int, *index: int) -> Tensor:
    ids = ids.clone()
    ids[index] = value
    return ids


IDS = draw_random_ids(2, 6, 2, EXPERTS, TOP_K)
WRONG: dict[str, tuple[Routes, str]] = {
    "shape": (Routes(IDS[0], (0, 2)), r"\[B, S, L, K\], not \[6, 2, 2\]"),
    "floats": (Routes(IDS.double(), (0, 2)), "float64, not integers"),
    "K": (Routes(IDS[..., :1], (0, 2)), "K=1 experts per token, but routers of qwen3_moe choose 2"),
    "another number of experts": (
        Routes(IDS, (0, 2), num_experts=16),
        "16 experts .* in a model with 8",
    ),
    "names and L": (Routes(IDS, (0,)), "name 1 layers, but ids have L=2"),
    "L": (
        Routes(draw_random_ids(2, 6, 4, EXPERTS, TOP_K), (0, 1, 2, 3)),
        r"L=4 layers \(0, 1, 2, 3\), and this qwen3_moe has 3 decoder layers, 2 of them with",
    ),
    "another layer": (Routes(IDS, (0, 3)), r"L=2 layers \(0, 3\), and this qwen3_moe has 3"),
    "too large": (
        Routes(_set_id(IDS, 8, 1, 4, 1, 0), (0, 2)),
        "row 1, token 4, decoder layer 2",
    ),
    "too small": (Routes(_set_id(IDS, -2, 0, 3, 0, 1), (0, 2)), "outside of the 8 experts"),
    "some ids are -1": (
        Routes(_set_id(IDS, -1, 0, 3, 0, 1), (0, 2)),
        "has -1 for some of its experts",
    ),
    "an expert twice": (
        Routes(torch.zeros_like(IDS), (0, 2)),
        r"an expert twice; .* \(24 of 24 choices\)",
    ),
    "weights": (Routes(IDS, (0, 2), torch.ones(2, 6, 2)), r"weights of routes .* \[2, 6, 2\]"),
    "weights of integers": (Routes(IDS, (0, 2), IDS), "weights of routes are torch.int16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_routes_that_do_not_fit_are_refused_on_entry(case: str) -> None:
    model, _ = _make_models()
    routes, message = WRONG[case]
    with pytest.raises(ValueError, match=message), RoutingReplay(model).replay(routes):
        raise AssertionError("entered")
    assert model._hf_moe_ep.routing is None


def test_strict_false_checks_only_shapes() -> None:
    model, _ = _make_models()
    inputs = batch(model, 2, 6)
    repeated_expert = Routes(torch.zeros_like(IDS), (0, 2))  # strict=True refuses it
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.replay(repeated_expert, strict=False):
        model(**inputs)
    assert replay.last.replayed == 24
    with pytest.raises(ValueError, match="K=1"), replay.replay(WRONG["K"][0], strict=False):
        pass


def test_the_id_255_in_uint8_is_an_expert_and_not_a_missing_choice() -> None:
    """`record` stores ids in uint8 for up to 256 experts, and in uint8 the number -1 is 255."""
    layers = RoutedLayers("m", 1, 256, 2, (0,), (0,), ())
    ids = torch.tensor([[[[255, 0]]]], dtype=torch.uint8)
    for strict in (True, False):
        check_ids(ids, layers, allow_live=False, strict=strict)
    with pytest.raises(ValueError, match=r"\[-1, -1\], has at least one id of -1"):
        check_ids(torch.full((1, 1, 1, 2), -1), layers, allow_live=False, strict=True)


def test_routes_are_freed_after_their_block() -> None:
    model, _ = _make_models()
    ids = draw_random_ids(2, 6, 2, EXPERTS, TOP_K).clone()
    routes, freed = Routes(ids, (0, 2)), weakref.ref(ids)
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.replay(routes):
        model(**batch(model, 2, 6))
    del routes, ids
    gc.collect()
    assert freed() is None and replay.last.replayed == 24


def test_misuse_is_refused() -> None:
    model, stock = _make_models()
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
        replay.replay(_make_routes(IDS)),
    ):
        model(**{name: x[:, :5] for name, x in inputs.items()})
    with (
        pytest.raises(ValueError, match="open already"),
        replay.replay(_make_routes(IDS)),
        RoutingReplay(model).record(),
    ):
        pass
    with (
        pytest.raises(ValueError, match="call the model itself"),
        replay.record(),
    ):
        model.model(input_ids=inputs["input_ids"])
    with (
        pytest.raises(ValueError, match=r"id of -1, .*on_missing='error' .*\(1 of 24 choices"),
        RoutingReplay(model, on_missing="error").replay(_make_routes(_set_id(IDS, -1, 0, 0, 0))),
    ):
        pass


def test_weights_are_refused_for_checkpointed_layers_with_the_eager_backend() -> None:
    """If the model's own loop over experts recomputes a layer, it cannot use the weights."""
    model = patch(tiny(num_hidden_layers=LAYERS, mlp_only_layers=[1]), experts_backend="eager")
    inputs = batch(model, 2, 6)
    weighted = Routes(IDS, (0, 2), torch.rand(IDS.shape))
    replay = RoutingReplay(model)
    with replay.replay(weighted):
        model(**inputs).loss.backward()
    parity.checkpointing(model, False)
    with (
        pytest.raises(ValueError, match="checkpointed and experts_backend='eager'"),
        replay.replay(weighted),
    ):
        model(**inputs)
    # After an error, torch 2.11 keeps a checkpoint's hooks as long as the frames of the traceback.
    gc.collect()
    with replay.replay(_make_routes(IDS)):
        model(**inputs).loss.backward()


@pytest.mark.slow
def test_a_compiled_model_is_refused() -> None:
    """torch.compile is applied to the model, to a function that calls it, or to one layer."""
    model, _ = _make_models()
    inputs = batch(model, 2, 6)
    replay = RoutingReplay(model)
    with pytest.raises(ValueError, match="of a compiled model"):
        RoutingReplay(torch.compile(model, backend="eager"))
    compiled = torch.compile(lambda **kwargs: model(**kwargs).logits, backend="eager")
    with pytest.raises(ValueError, match=r"within torch\.compile"), replay.record():
        compiled(**inputs)
    torch._dynamo.reset()
    assert torch.overrides._len_torch_function_stack() == 0
    with replay.record() as routes:
        model(**inputs)
    assert routes.ids.shape == (2, 6, 2, TOP_K)
    model.model.layers[2].compile(backend="eager")
    with pytest.raises(ValueError, match="of a compiled model"), replay.replay(_make_routes(IDS)):
        pass


def test_a_call_of_the_decoder_replays_its_routes() -> None:
    """Liger's losses call the decoder without the language model's head."""
    model, stock = _make_models()
    tokens = batch(model, 2, 6)["input_ids"]
    with torch.no_grad(), RoutingReplay(model).replay(_make_routes(IDS)):
        got = model.model(input_ids=tokens).last_hidden_state
    with torch.no_grad(), force_topk(EXPERTS, IDS):
        want = stock.model(input_ids=tokens).last_hidden_state
    assert_close("hidden states", got, want, FP64_MODEL)


def test_a_deep_copy_routes_live_while_the_model_replays() -> None:
    model, _ = _make_models()
    inputs = batch(model, 2, 6)
    copied_before = copy.deepcopy(model)
    with torch.no_grad():
        want = model(**inputs).logits
    with torch.no_grad(), RoutingReplay(model).replay(_make_routes(IDS)):
        copied_inside = copy.deepcopy(model)
        replayed = model(**inputs).logits
        assert not torch.equal(replayed, want)
        assert torch.equal(copied_before(**inputs).logits, want)
        assert torch.equal(copied_inside(**inputs).logits, want)
    with torch.no_grad(), RoutingReplay(copied_inside).replay(_make_routes(IDS)):
        assert torch.equal(copied_inside(**inputs).logits, replayed)


def test_a_topk_in_another_thread_is_not_replayed() -> None:
    """The other thread's topk has the sizes of the router's topk."""
    model, _ = _make_models()
    scores = torch.rand(12, EXPERTS)
    thread_ids: list[Tensor] = []

    def topk_in_thread(*_: Any) -> None:
        thread = threading.Thread(target=lambda: thread_ids.append(scores.topk(TOP_K).indices))
        thread.start()
        thread.join()

    want = scores.topk(TOP_K).indices
    hook = model.model.layers[0].mlp.gate.register_forward_pre_hook(topk_in_thread)
    with torch.no_grad(), RoutingReplay(model).replay(_make_routes(IDS)):
        model(**batch(model, 2, 6))
    hook.remove()
    assert len(thread_ids) == 1 and torch.equal(thread_ids[0], want)
