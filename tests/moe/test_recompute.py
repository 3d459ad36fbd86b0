"""With activation checkpointing, a recompute uses the counts and experts of the first run.

Gradients equal the gradients without checkpointing, with both implementations of torch (reentrant
and not).
"""

import copy
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from support import architectures, parity
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.counting import EXCHANGES, counting
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch._dynamo.convert_frame import input_codes
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.moe import recompute
from hf_moe_ep.moe.layer import ForwardGuard
from hf_moe_ep.moe.padding import RealTokens
from hf_moe_ep.moe.recompute import CheckpointedRouting, CheckpointWatch
from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.ops.torch_mlp import _add_expert_grads
from hf_moe_ep.ranks.collectives import Transfer
from hf_moe_ep.sequence.mixers import LayerSlice, _checkpoint_slice, _WithSlice
from hf_moe_ep.state import STATE, RoutingSession

LAYERS = 2
WATCHED = {**EXCHANGES, "item": (Tensor, "item")}


def _make_gate_noisy(gate: nn.Module, noise: float) -> None:
    """Give experts 0 and 1 equal logits. In a recompute, noise chooses one of the two."""
    with torch.no_grad():
        gate.weight[1] = gate.weight[0]
    calls = Counter()

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden_states, gate.weight)
        if torch._C._current_graph_task_id() != -1:
            calls["recompute"] += 1
            sign = torch.tensor([1.0, -1.0]).to(logits)
            generator = torch.Generator().manual_seed(calls["recompute"])
            flip = torch.randint(2, (len(logits), 1), generator=generator) * 2 - 1
            logits = logits + noise * flip * functional.pad(sign, (0, logits.shape[1] - 2))
        top, ids = torch.topk(logits.softmax(-1, dtype=torch.float), gate.top_k, dim=-1)
        return logits, (top / top.sum(-1, keepdim=True)).to(logits.dtype), ids

    gate.forward = forward


def _make_model(config: dict[str, Any], use_reentrant: bool | None, noise: float = 0) -> nn.Module:
    model = tiny(num_hidden_layers=LAYERS)
    for layer in model.model.layers if noise else ():
        _make_gate_noisy(layer.mlp.gate, noise)
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    return apply_ep_fsdp2(model, **({"ep_size": 2} | config))


def _compute_grads(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _make_inputs(rank: int, tokens: int = 9) -> dict[str, Tensor]:
    return batch(tiny(), 2, tokens + 4 * rank, seed=rank)


def counts_are_exchanged_once(rank: int, world: int) -> None:
    """Forward and backward exchange rows and results per chunk, and counts only once.

    With one chunk there are five collectives per layer. A recompute repeats the exchanges of rows,
    but not the exchange of counts. Ranks that share experts (etp_size) do the same.
    """
    cases = [({}, *case) for case in itertools.product((1, 3), (None, False, True))]
    for sizes, chunks, use_reentrant in [*cases, ({"ep_size": 1, "etp_size": 2}, 1, False)]:
        name = f"{sizes}, chunks {chunks}, reentrant {use_reentrant}"
        rows_each_way = 2 * chunks * LAYERS
        model = _make_model({"dispatch_chunks": chunks, **sizes}, use_reentrant)
        for _ in range(2):  # the first forward sets FSDP2 up
            with counting(WATCHED) as forward:
                loss = model(**_make_inputs(rank)).loss
            with counting(WATCHED) as backward:
                loss.backward()
        assert forward["all_to_all"] == rows_each_way + LAYERS, f"{name}: {forward}"
        assert forward["counts"] == forward["read"] == LAYERS, f"{name}: {forward}"
        assert backward["counts"] == backward["read"] == 0, f"{name}: {backward}"
        assert backward["item"] == 0, f"{name}: {backward}"
        # A non-reentrant recompute stops before it combines any chunk.
        recomputed = {None: 0, True: 2 * chunks, False: chunks}[use_reentrant] * LAYERS
        assert backward["all_to_all"] == rows_each_way + recomputed, f"{name}: {backward}"


def _square_output(block: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook of a MoE block, whose backward needs the output of the experts."""
    return output * output


def outputs_of_experts_are_recomputed_only_if_backward_needs_them(rank: int, world: int) -> None:
    """A recompute skips the last product of each chunk.

    If a later operator needs the output, the layer that notices it (the last one, which backward
    recomputes first) computes the output of both chunks after that. All later recomputes compute
    outputs at once.
    """
    skipped: list[bool] = []

    def recording(*args: Any, skip_output: bool) -> tuple[Tensor, Tensor]:
        skipped.append(skip_output)
        return stock(*args, skip_output=skip_output)

    stock = torch_mlp.forward
    for is_needed in (False, True):
        plain, model = (_make_model({"dispatch_chunks": 2}, x) for x in (None, False))
        for layer in (*plain.model.layers, *model.model.layers) if is_needed else ():
            layer.mlp.register_forward_hook(_square_output)
        for step in range(2):
            inputs = _make_inputs(rank, 9 + step)
            want = _compute_grads(plain, inputs)
            with mock.patch.object(torch_mlp, "forward", recording):
                skipped.clear()
                got = _compute_grads(model, inputs)
            for name, grad in got.items():
                assert_close(f"{name}, needed {is_needed}", grad, want[name], 1e-12)
            at_once, in_forward = [False] * 2, [False] * 2 * LAYERS
            noticed = [True] * 2 + at_once + at_once * (LAYERS - 1)
            expected = {False: [True] * 2 * LAYERS, True: at_once * LAYERS if step else noticed}
            assert skipped == in_forward + expected[is_needed], (is_needed, step, skipped)


def weight_gradients_are_computed_while_row_gradients_are_sent(rank: int, world: int) -> None:
    events: list[str] = []

    def recording(letter: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(letter)
            return original(*args, **kwargs)

        return call

    # S: start an all-to-all, W: wait for an all-to-all, E: compute gradients of experts. First both
    # chunks send their output gradients. Then each chunk waits for its output gradients, sends the
    # gradients of rows and of routing weights together, and computes the gradients of experts. At
    # the end both chunks wait for the gradients of their rows.
    layer = "SS" + "WSE" + "WSE" + "WW"
    for use_reentrant in (None, True):
        model = _make_model({"dispatch_chunks": 2}, use_reentrant)
        loss = model(**_make_inputs(rank)).loss
        events.clear()
        with (
            mock.patch.object(dist, "all_to_all_single", recording("S", dist.all_to_all_single)),
            mock.patch.object(Transfer, "wait", recording("W", Transfer.wait)),
            mock.patch.object(torch_mlp, "_add_expert_grads", recording("E", _add_expert_grads)),
        ):
            loss.backward()
        assert "".join(events).count(layer) == LAYERS, f"{use_reentrant}: {''.join(events)}"


def a_recompute_keeps_the_experts_of_forward(rank: int, world: int) -> None:
    """In a recompute the router breaks ties differently. Gradients belong to the first choice."""
    for chunks in (1, 3):
        plain = _make_model({"dispatch_chunks": chunks}, None, noise=1e-5)
        want = _compute_grads(plain, _make_inputs(rank))
        for use_reentrant in (False, True):
            model = _make_model({"dispatch_chunks": chunks}, use_reentrant, noise=1e-5)
            for name, grad in _compute_grads(model, _make_inputs(rank)).items():
                # The noise changes gradients by about 1e-5; another expert by at least 1e-2.
                assert_close(f"{name}, reentrant {use_reentrant}", grad, want[name], 1e-3)


def _run_two_forwards(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the gradients of two forwards of different sizes; a no_grad forward runs between."""
    model.zero_grad()
    first = model(**_make_inputs(rank, 9)).loss
    with torch.no_grad():
        model(**_make_inputs(rank, 3))
    second = model(**_make_inputs(rank, 5)).loss
    (first + 2 * second).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def one_backward_of_two_forwards_has_exact_gradients(rank: int, world: int) -> None:
    want = _run_two_forwards(_make_model({}, None), rank)
    for use_reentrant in (False, True):
        got = _run_two_forwards(_make_model({"dispatch_chunks": 2}, use_reentrant), rank)
        for name, grad in got.items():
            assert_close(f"{name}, reentrant {use_reentrant}", grad, want[name], 1e-12)


def _call_checkpointed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `__call__` by its form before transformers 5.23, with hooks in the checkpoint."""
    if not (layer.gradient_checkpointing and layer.training):
        return nn.Module.__call__(layer, *args, **kwargs)

    def call(*args: Any) -> Any:
        layer.gradient_checkpointing = False
        try:
            return nn.Module.__call__(layer, *args, **kwargs)
        finally:
            layer.gradient_checkpointing = True

    return layer._gradient_checkpointing_func(call, *args)


def hooks_of_fsdp2_inside_the_checkpoint_reduce_every_gradient(rank: int, world: int) -> None:
    """Before transformers 5.23 FSDP2's hooks ran inside the checkpoint."""
    want = _run_two_forwards(_make_model({}, None), rank)
    with mock.patch.object(GradientCheckpointingLayer, "__call__", _call_checkpointed):
        for use_reentrant in (False, True):
            for name, grad in _run_two_forwards(_make_model({}, use_reentrant), rank).items():
                assert_close(f"{name}, reentrant {use_reentrant}", grad, want[name], 1e-12)


def a_rank_without_rows_saves_as_many_tensors(rank: int, world: int) -> None:
    """All tokens choose rank 0's experts, so the tensors that rank 1 saves have 0 rows."""
    model = _make_model({}, None)
    saved: list[int] = []
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate

            def forward(x: Tensor, gate: nn.Module = gate) -> tuple[Tensor, Tensor, Tensor]:
                scores = functional.linear(x, gate.weight)[:, :2].softmax(-1)
                return scores, scores, torch.tensor([0, 1]).expand(len(x), 2)

            gate.forward = forward

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**_make_inputs(rank)).loss.backward()
    counts: list[Any] = [None, None]
    dist.all_gather_object(counts, len(saved))
    assert counts[0] == counts[1], counts


def a_users_own_checkpoint_exchanges_the_counts_again(rank: int, world: int) -> None:
    """The gradients are right nevertheless."""
    want = _compute_grads(_make_model({}, None), _make_inputs(rank))
    model = _make_model({}, None)
    for layer in model.model.layers:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    with counting(WATCHED) as calls:
        got = _compute_grads(model, _make_inputs(rank))
    assert calls["counts"] == 2 * LAYERS
    for name, grad in got.items():
        assert_close(name, grad, want[name], 1e-12)


def an_indexer_is_not_a_router(rank: int, world: int) -> None:
    """DeepSeek's indexer chooses 2 of 8 keys, as each router chooses 2 of 8 experts."""
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "index_topk": 2}
    sizes |= {"n_group": 1, "topk_group": 1}
    wanted = {}
    for use_reentrant in (None, False, True):
        model = architectures.tiny("deepseek_v32", **sizes)
        if use_reentrant is not None:
            parity.checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=2)
        model(**batch(model, 2, 8, seed=rank)).loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        full_grads = {name: grad.full_tensor() for name, grad in grads.items()}
        wanted = wanted or full_grads
        assert wanted.keys() == full_grads.keys()
        for name, grad in full_grads.items():
            assert_close(f"{name}, reentrant {use_reentrant}", grad, wanted[name], 1e-12)


def selective_checkpointing_sees_the_same_operators_twice(rank: int, world: int) -> None:
    """torch raises an error if forward and recompute call different operators."""
    want = _compute_grads(_make_model({}, None), _make_inputs(rank))
    for saved in ([torch.ops.aten.mm.default], [torch.ops.aten.cat.default]):
        contexts = partial(create_selective_checkpoint_contexts, saved)
        model = tiny(num_hidden_layers=LAYERS)
        enable = getattr(model, "activation_checkpointing_enable", None)
        options = {"use_reentrant": False, "context_fn": contexts}
        (enable or model.gradient_checkpointing_enable)(options)
        apply_ep_fsdp2(model, ep_size=2, dispatch_chunks=2)
        for name, grad in _compute_grads(model, _make_inputs(rank)).items():
            assert_close(f"{name}, {saved} saved", grad, want[name], 1e-12)


def a_compiled_model_has_the_same_gradients(rank: int, world: int) -> None:
    want = _compute_grads(_make_model({}, None), _make_inputs(rank))
    model = _make_model({"dispatch_chunks": 2}, False)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    compiled(**_make_inputs(rank)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(f"{name}, compiled", parameter.grad.full_tensor(), want[name], 1e-10)
    # FSDP2's WeakKeyDictionary holds the state of every module. Dynamo must not trace it, because
    # tracing fails if a module is freed meanwhile.
    assert WeakKeyDictionary.__getitem__.__code__ not in input_codes


ON_TWO_RANKS = [
    *on_ranks(
        2,
        counts_are_exchanged_once,
        outputs_of_experts_are_recomputed_only_if_backward_needs_them,
        a_recompute_keeps_the_experts_of_forward,
        one_backward_of_two_forwards_has_exact_gradients,
        a_rank_without_rows_saves_as_many_tensors,
    ),
    *on_ranks(
        2,
        weight_gradients_are_computed_while_row_gradients_are_sent,
        hooks_of_fsdp2_inside_the_checkpoint_reduce_every_gradient,
        a_users_own_checkpoint_exchanges_the_counts_again,
        an_indexer_is_not_a_router,
        selective_checkpointing_sees_the_same_operators_twice,
        a_compiled_model_has_the_same_gradients,
        slow=True,
    ),
]


@pytest.mark.parametrize("claim", ON_TWO_RANKS)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_unpatch_restores_the_models_own_checkpoint_function() -> None:
    model = tiny()
    parity.checkpointing(model, False)
    before = [layer._gradient_checkpointing_func for layer in model.model.layers]
    patch(model)
    state = getattr(model, STATE)
    watch = CheckpointWatch(state)
    watch.wrap_functions(model)
    watch.wrap_functions(model)
    wrapped = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert all(a is not b and a.args[1] is b for a, b in zip(wrapped, before, strict=True))
    unpatch(model)
    after = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert all(a is b for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("keywords", [{}, {"use_cache": False}])
def test_a_checkpointing_function_can_ask_for_the_module(keywords: dict[str, bool]) -> None:
    """LLaMA-Factory's function looks at the parameters of the layer that it checkpoints."""
    model = patch(tiny())
    state, layer = getattr(model, STATE), model.model.layers[0]
    state.real_tokens = RealTokens(torch.tensor([True, True, False]))
    # Inside a checkpointed function, the next call is wrapped as well.
    state.checkpointed_routing = CheckpointedRouting(state, print)
    asked = []

    def ask(function: Any, *args: Any) -> None:
        asked.append((type(function), function.__self__))

    function = partial(layer.forward, **keywords) if keywords else layer.forward
    recompute._checkpoint(state, partial(_checkpoint_slice, LayerSlice(), ask), function)
    assert asked == [(_WithSlice, layer)]
    recompute._checkpoint(state, ask, function)
    assert asked[1:] == [(CheckpointedRouting, layer)]


def test_checkpointing_switched_on_between_forwards_is_noticed() -> None:
    """The model's method or torch's wrapper switches it on, or another function replaces it."""
    model = patch(tiny(num_hidden_layers=LAYERS))
    state = getattr(model, STATE)
    watch, layers = CheckpointWatch(state), model.model.layers
    watch.wrap_functions(model)

    def checkpoints() -> list[Any]:
        return [vars(layer)["_gradient_checkpointing_func"] for layer in layers]

    for use_reentrant in (False, True):
        parity.checkpointing(model, use_reentrant)
        before = checkpoints()
        watch.wrap_functions(model)
        assert [function.args[0] for function in checkpoints()] == [state] * LAYERS
        assert [function.args[1] for function in checkpoints()] == before
    layers[1] = checkpoint_wrapper(layers[1])
    own_function = layers[1].checkpoint_fn
    watch.wrap_functions(model)
    assert layers[1].checkpoint_fn.args == (state, own_function)


def test_modules_are_searched_again_only_after_one_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = patch(tiny(num_hidden_layers=LAYERS))
    watch = CheckpointWatch(getattr(model, STATE))
    watch.wrap_functions(model)
    searches = Counter()
    monkeypatch.setattr(
        recompute, "_find_edges_to_experts", lambda root: searches.update(["search"]) or []
    )
    watch.wrap_functions(model)
    assert not searches
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    watch.wrap_functions(model)
    assert searches["search"] == 1


def test_the_watch_of_a_copied_model_wraps_the_functions_of_the_copy() -> None:
    model = patch(tiny(num_hidden_layers=LAYERS))
    (guard,) = (h for h in model._forward_pre_hooks.values() if isinstance(h, ForwardGuard))
    guard._checkpoints.wrap_functions(model)
    other = copy.deepcopy(model)
    (guard,) = (h for h in other._forward_pre_hooks.values() if isinstance(h, ForwardGuard))
    parity.checkpointing(other, False)
    guard._checkpoints.wrap_functions(other)
    functions = [layer._gradient_checkpointing_func for layer in other.model.layers]
    assert [function.args[0] for function in functions] == [getattr(other, STATE)] * LAYERS


def test_a_recompute_that_differs_from_the_first_run_is_refused() -> None:
    model = patch(tiny())
    checkpointed = CheckpointedRouting(getattr(model, STATE), lambda: None)
    ids = torch.tensor([[0, 1]])
    checkpointed.keep(0, ids, [])
    checkpointed._next = 0
    with pytest.raises(RuntimeError, match=r"MoE layer 1 .*forward ran MoE layer 0 with \(1, 2\)"):
        checkpointed.take(1, ids)
    with pytest.raises(RuntimeError, match="recomputing MoE layer 0, the router chose other"):
        checkpointed.take(0, ids + 1)


_OTHER_EXPERTS = """
from types import SimpleNamespace
import torch
from hf_moe_ep.moe.recompute import CheckpointedRouting
checkpointed = CheckpointedRouting(SimpleNamespace(checkpointed_routing=None, num_experts=4), None)
ids = torch.tensor([[0, 1]], device="cuda")
checkpointed.keep(3, ids, [])
checkpointed._next = 0
checkpointed.take(3, ids + 1)
print("the host went on", flush=True)
torch.ones(1, device="cuda").tolist()
"""


@pytest.mark.gpu
def test_other_experts_in_a_recompute_stop_a_gpu_with_a_message() -> None:
    """The device prints the layer to stderr. The host gets an error later, at its next sync."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _OTHER_EXPERTS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "the host went on" in result.stdout, result
    assert "recomputing MoE layer 3, the router chose other experts" in result.stderr, result.stderr
    assert "device-side assert triggered" in result.stderr, result.stderr


def test_topk_inside_a_nested_checkpoint_is_not_replayed() -> None:
    state = getattr(patch(tiny()), STATE)
    state.routing = RoutingSession()  # with ep_size 1 ids are stored only during a session
    ids = torch.tensor([[0, 1], [2, 3]])
    scores = torch.eye(2, 8)
    chosen = []

    def outer() -> None:
        chosen.append(torch.topk(scores, 2).indices)
        if state.checkpointed_routing.is_recompute:
            CheckpointedRouting(state, lambda: chosen.append(torch.topk(scores, 2).indices))()
        else:
            state.checkpointed_routing.keep(0, ids, [])

    checkpointed = CheckpointedRouting(state, outer)
    checkpointed()
    checkpointed()
    first, replayed, inner = chosen
    assert torch.equal(replayed, ids) and torch.equal(inner, first)
    assert not torch.equal(first, ids) and state.checkpointed_routing is None
