"""`compile_layers` makes a few graphs for all layers, which compute what eager layers compute."""

import copy
import pickle
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as mock_patch

import pytest
import torch
from support import parity
from support.adapters import with_lora
from support.architectures import models
from support.architectures.steps import whole
from support.checks import PATIENT, Check, Found, on_ranks
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.split_rows import packed
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_config
from torch._functorch.compilers import nop
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hf_moe_ep import (
    RoutingReplay,
    apply_ep_fsdp2,
    clip_grad_norm_,
    compile_layers,
    expert_load,
    from_pretrained,
    patch,
    save_pretrained,
    unpatch,
)
from hf_moe_ep.compiled import options
from hf_moe_ep.compiled.layers import COMPILED
from hf_moe_ep.compiled.options import check_compile_kwargs
from hf_moe_ep.compiled.subclasses import get_inner_forward
from hf_moe_ep.loss import attach
from hf_moe_ep.moe.recompute import CheckpointWatch
from hf_moe_ep.upstream.modules import is_compiled

# More layers than the eight recompilations that torch.compile allows. Two layers are dense.
LAYERS = {"num_hidden_layers": 12, "mlp_only_layers": [0, 5]}
# No length equals another size of the model, because torch.compile gives equal sizes one symbol.
LENGTHS = (9, 11, 13, 10)
REENTRANT = {"no checkpoints": None, "checkpoints": False, "reentrant checkpoints": True}


def _build_model(config: dict[str, Any], use_reentrant: bool | None, **sizes: Any) -> Any:
    model = tiny(**(LAYERS | sizes))
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    if torch.distributed.is_initialized():
        return apply_ep_fsdp2(model, **config)
    return patch(model, experts_backend="torch", **config)


def _compute_grads(
    model: nn.Module, inputs: dict[str, Tensor], *, autocast: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of one step, and the loss."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: _get_local(g).clone() for n, g in grads.items()} | {"loss": loss.detach()}


def _get_local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _record_input(
    seen: set[tuple[type, bool, bool]], kind: type, norm: nn.Module, args: tuple[Tensor]
) -> None:
    seen.add((kind, torch.is_grad_enabled(), args[0]._base is None))


def _assert_equal_to_eager(
    config: dict[str, Any],
    use_reentrant: bool | None,
    rank: int = 0,
    *,
    autocast: bool = False,
    **sizes: Any,
) -> list[int]:
    """Compare every gradient of several steps, and return the number of graphs after each step.

    `sizes` are arguments of `tiny`.

    torch 2.11's FSDP2 gives a layer a view of its input, but not the recomputed layer. A graph for
    views cannot run on other inputs, so the graphs that are made for other inputs are not counted.
    """
    torch.compiler.reset()
    counters.clear()
    eager = _build_model(config, use_reentrant, **sizes)
    seen: set[tuple[type, bool, bool]] = set()
    for layer in eager.model.layers:
        layer.input_layernorm.register_forward_pre_hook(
            partial(_record_input, seen, type(layer.mlp))
        )
    compiled = _build_model(config | {"compile_layers": "aot_eager"}, use_reentrant, **sizes)
    graphs = []
    for step, length in enumerate(LENGTHS):
        inputs = batch(eager, 2, length + 8 * rank, seed=step)
        want, got = (
            _compute_grads(model, inputs, autocast=autocast) for model in (eager, compiled)
        )
        graphs.append(_count_graphs() - len(seen) + len({key[:2] for key in seen}))
        assert want.keys() == got.keys()
        different = [name for name in want if not torch.equal(got[name], want[name])]
        assert not different, f"step {step}: {different}"
    assert torch.equal(expert_load(compiled).counts, expert_load(eager).counts)
    return graphs


@pytest.mark.parametrize(
    "checkpoints",
    [pytest.param(x, marks=[] if x == "no checkpoints" else pytest.mark.slow) for x in REENTRANT],
)
def test_each_kind_of_layer_is_one_graph_in_one_process(checkpoints: str) -> None:
    """A reentrant checkpoint first runs a layer without gradients, which needs other graphs."""
    graphs = _assert_equal_to_eager({}, REENTRANT[checkpoints])
    kinds = 2 * (2 if checkpoints == "reentrant checkpoints" else 1)
    assert graphs == [kinds] * len(LENGTHS)


def test_the_cross_entropy_of_a_fused_loss_is_one_graph_for_chunks_of_any_size() -> None:
    """A batch of 18 to 26 tokens has a chunk of 16 tokens and a smaller one."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "mlp_only_layers": []}
    with mock_patch.object(attach, "_SMALLEST_CHUNK", 16):
        graphs = _assert_equal_to_eager({"fused_loss": True}, None, **sizes)
    assert graphs == [2] * len(LENGTHS)


# Arguments of `_assert_equal_to_eager`.
LOW_PRECISION: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"dtype": torch.float32, "autocast": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", LOW_PRECISION)
def test_low_precision_equals_eager_in_one_process(precision: str) -> None:
    graphs = _assert_equal_to_eager({}, None, num_hidden_layers=3, **LOW_PRECISION[precision])
    assert graphs == [2] * len(LENGTHS)


AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.slow
def test_the_aux_loss_equals_eager_in_one_process() -> None:
    """Hooks of transformers collect the router's logits, so the MoE block is not traced."""
    graphs = _assert_equal_to_eager({}, False, num_hidden_layers=3, **AUX_LOSS)
    assert graphs == [3] * len(LENGTHS)


def _check_aux_loss(config: dict[str, Any], rank: int, world: int) -> None:
    found = _assert_equal_to_eager(config, False, rank, **AUX_LOSS)
    assert found == [3] * len(LENGTHS)


def _check_number_of_graphs(
    ep_size: int, checkpoints: str, graphs: int, rank: int, world: int, **sizes: Any
) -> None:
    found = _assert_equal_to_eager({"ep_size": ep_size}, REENTRANT[checkpoints], rank, **sizes)
    assert found == [graphs] * len(LENGTHS), found


# A dense layer is one graph. The MoE block splits a MoE layer into two graphs if ep_size is 2.
ON_RANKS = {
    f"ep {ep}, {checkpoints}": partial(_check_number_of_graphs, ep, checkpoints, graphs)
    for ep, checkpoints, graphs in (
        (1, "no checkpoints", 2),
        (2, "no checkpoints", 3),
        (2, "checkpoints", 3),
        (1, "checkpoints", 2),
        (1, "reentrant checkpoints", 4),
        (2, "reentrant checkpoints", 6),
    )
}
ON_RANKS |= {
    "aux loss, ep 1": partial(_check_aux_loss, {"ep_size": 1}),
    "aux loss, ep 2": partial(_check_aux_loss, {"ep_size": 2}),
    "aux loss per layer": partial(_check_aux_loss, {"ep_size": 2, "aux_loss_per_layer": True}),
}
# FSDP2 keeps fp32 master weights of the bf16 model, and gathers the parameters in bf16.
ON_RANKS |= {
    f"ep {ep}, {precision}, checkpoints": partial(
        _check_number_of_graphs, ep, "checkpoints", graphs, num_hidden_layers=3, **options
    )
    for precision, options in LOW_PRECISION.items()
    for ep, graphs in ((1, 2), (2, 3))
}


@pytest.mark.parametrize(
    "claim",
    on_ranks(2, ON_RANKS, slow=True, **PATIENT),
)
def test_graphs_and_gradients_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


SMALL = {"num_hidden_layers": 2}


@pytest.mark.slow
def test_shared_experts_are_traced_with_their_layer_in_one_process() -> None:
    torch.compiler.reset()
    counters.clear()
    sizes = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    eager, compiled = (models.tiny("deepseek_v3", **sizes) for _ in range(2))
    patch(eager, experts_backend="torch")
    patch(compiled, experts_backend="torch", compile_layers="aot_eager")
    inputs = batch(eager, 2, 9)
    want, got = _compute_grads(eager, inputs), _compute_grads(compiled, inputs)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert _count_graphs() == 2


def _check_shared_experts(checkpoints: str, number: int, rank: int, world: int) -> None:
    """A dense layer is one graph, a MoE layer has two, and its shared experts are one.

    A recompute runs a MoE block in a mode that repeats the choice of its router
    (`moe/chosen_topk.py`). torch.compile makes another graph of the shared experts for this mode.
    """
    torch.compiler.reset()
    counters.clear()
    sizes = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    eager, compiled = (models.tiny("deepseek_v3", **sizes) for _ in range(2))
    for model, config in ((eager, {}), (compiled, {"compile_layers": "aot_eager"})):
        if REENTRANT[checkpoints] is not None:
            parity.checkpointing(model, REENTRANT[checkpoints])
        apply_ep_fsdp2(model, ep_size=2, **config)
    graphs = []
    for step, length in enumerate(LENGTHS):
        inputs = batch(eager, 2, length + 8 * rank, seed=step)
        want, got = _compute_grads(eager, inputs), _compute_grads(compiled, inputs)
        graphs.append(_count_graphs())
        assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert any("shared_experts" in name for name in want)
    assert graphs == [number] * len(LENGTHS), graphs


SHARED_EXPERTS = {
    name: partial(_check_shared_experts, name, number)
    for name, number in (("no checkpoints", 1 + 2 + 1), ("checkpoints", 1 + 2 + 2))
}


@pytest.mark.parametrize("claim", on_ranks(2, SHARED_EXPERTS, slow=True, **PATIENT))
def test_shared_experts_are_compiled_by_themselves_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _experts_in_units_of_layers_are_saved_and_read(rank: int, world: int, folder: str) -> None:
    """With ep_size 1 the experts of compiled layers are shards of the layers' FSDP2 units."""
    inputs = batch(tiny(), 2, 9 + 8 * rank)
    model = apply_ep_fsdp2(tiny(**SMALL), compile_layers="aot_eager", expert_shard_dim=1)
    experts = model.model.layers[1].mlp.experts
    assert not isinstance(experts, FSDPModule)
    assert experts.gate_up_proj.placements == (Shard(1),)
    _compute_grads(model, inputs)
    clip_grad_norm_(model, 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    want = {name: p.full_tensor() for name, p in model.named_parameters()}
    save_pretrained(model, folder)
    for config in ({"compile_layers": "aot_eager"}, {"ep_size": 2}):
        loaded = from_pretrained(folder, experts_implementation="eager", **config)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter.full_tensor(), want[name]), f"{config}: {name}"


@pytest.mark.parametrize(
    "claim",
    on_ranks(2, _experts_in_units_of_layers_are_saved_and_read, slow=True),
)
def test_saved_files_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoints", "some_without_mask"),
    [("no checkpoints", False), ("checkpoints", False), ("no checkpoints", True)],
    ids=["no checkpoints", "checkpoints", "some without a mask"],
)
def test_200_random_lengths_make_no_graph_after_the_second_step(
    checkpoints: str, some_without_mask: bool
) -> None:
    """A batch without a mask needs one more graph of each kind of layer.

    transformers makes no mask for a batch without padding. Every fourth batch has no padding if
    `some_without_mask` is True, and every batch has padding otherwise.
    """
    torch.compiler.reset()
    counters.clear()
    sizes = {"num_hidden_layers": 3, "mlp_only_layers": [1]} if some_without_mask else LAYERS
    model = _build_model({"compile_layers": "aot_eager"}, REENTRANT[checkpoints], **sizes)
    lengths = torch.randint(3, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    graphs = []
    for step, length in enumerate(lengths):
        pad = 0 if some_without_mask and step % 4 == 3 else 1 + step % 2
        _compute_grads(model, batch(model, 2 + step % 3, length, seed=step, pad=pad))
        graphs.append(_count_graphs())
    with_mask, kinds = graphs[1], 2
    in_all = with_mask + (kinds if some_without_mask else 0)
    assert graphs[1:] == [with_mask] * 2 + [in_all] * (len(lengths) - 3), graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "checkpoints"),
    [("gpt_oss", name) for name in REENTRANT] + [("afmoe", "no checkpoints")],
)
def test_new_packed_documents_make_no_graph(model_type: str, checkpoints: str) -> None:
    """Hooks separate the documents of these models, because stock code would mix them."""
    torch.compiler.reset()
    counters.clear()
    eager, compiled = (models.tiny(model_type, output_router_logits=False) for _ in range(2))
    for model in (eager, compiled):
        if REENTRANT[checkpoints] is not None:
            parity.checkpointing(model, REENTRANT[checkpoints])
    patch(eager, experts_backend="torch")
    patch(compiled, experts_backend="torch", compile_layers="aot_eager")
    graphs = []
    for step in range(6):
        (inputs,) = packed((3 + step % 3, 8 + 2 * step), eager, 0, 1, step)
        want, got = _compute_grads(eager, inputs), _compute_grads(compiled, inputs)
        assert [name for name in want if not torch.equal(got[name], want[name])] == []
        graphs.append(_count_graphs())
    assert graphs[0] and graphs[1:] == [graphs[1]] * 5, graphs


def _normalise(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _route(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    weights, ids = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True), ids


def _inductor_equals_stock(
    checkpoints: str, graphs: int, rank: int = 0, world: int = 1, **config: Any
) -> None:
    """Compare the loss and the gradients of two steps with stock. All ranks have the same batch.

    Stock norms and routers compute in fp32 even in an fp64 model. Inductor sums in another order,
    so an fp32 sum would differ by 1e-7. Both models therefore get norms and routers in fp64.
    """
    torch.compiler.reset()
    counters.clear()
    with (
        mock_patch.object(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", _normalise),
        mock_patch.object(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", _route),
    ):
        sizes: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": [0]}
        model = _build_model({"compile_layers": True} | config, REENTRANT[checkpoints], **sizes)
        stock = tiny(**sizes)
        for step, length in enumerate((9, 11)):
            inputs = batch(stock, 2, length, seed=step)
            want = _compute_grads(stock, inputs)
            loss = model(**inputs).loss
            loss.backward()
            got = whole(model, {n: p.grad for n, p in model.named_parameters()}) | {"loss": loss}
            model.zero_grad()
            for name in want:
                # The loss is computed in fp32. Inductor compiles it only if it is fused.
                in_fp32 = name == "loss" or "fused_loss" in config
                budget = FP32_INSIDE if in_fp32 else FP64_MODEL
                assert_close(name, got[name], want[name], budget)
    assert _count_graphs() == graphs


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", REENTRANT)
def test_inductor_equals_stock(checkpoints: str) -> None:
    _inductor_equals_stock(checkpoints, 4 if checkpoints == "reentrant checkpoints" else 2)


INDUCTOR = {
    f"ep {ep}, {checkpoints}": partial(_inductor_equals_stock, checkpoints, graphs, ep_size=ep)
    for ep, checkpoints, graphs in (
        (1, "no checkpoints", 2),
        (1, "checkpoints", 2),
        (2, "no checkpoints", 3),
        (2, "reentrant checkpoints", 6),
    )
}
INDUCTOR["ep 2, fused loss"] = partial(
    _inductor_equals_stock, "no checkpoints", 4, ep_size=2, fused_loss=True
)


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(2, INDUCTOR, slow=True, **PATIENT))
def test_inductor_equals_stock_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _check_recorded_and_replayed_routes(
    config: dict[str, Any], use_reentrant: bool | None, rank: int = 0, world: int = 1
) -> None:
    """Compiled layers were traced with their MoE blocks before `replay` begins, if ep_size is 1."""
    torch.compiler.reset()
    eager, compiled = (
        _build_model(config | compilation, use_reentrant, **SMALL, mlp_only_layers=[])
        for compilation in ({}, {"compile_layers": "aot_eager"})
    )
    inputs = batch(eager, 2, 9 + 2 * rank)
    with RoutingReplay(compiled).record() as routes:
        recorded = _compute_grads(compiled, inputs)
    want = _compute_grads(eager, inputs)
    assert all(torch.equal(recorded[name], want[name]) for name in want)
    routes.ids = (routes.ids + 1) % 8
    results = []
    for model in (eager, compiled):
        _compute_grads(model, inputs)
        with RoutingReplay(model).replay(routes):
            loss = model(**inputs).loss
        model.zero_grad()
        loss.backward()  # the recompute runs after the block
        results.append([_get_local(p.grad) for p in model.parameters()])
    assert all(map(torch.equal, *results))
    assert not torch.equal(loss.detach(), want["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_routes_are_recorded_and_replayed(use_reentrant: bool | None) -> None:
    _check_recorded_and_replayed_routes({}, use_reentrant)


@pytest.mark.slow
def test_a_record_leaves_the_graphs_of_later_forwards_as_they_were() -> None:
    """During a record the MoE block is not traced, which splits a layer into two more graphs."""
    torch.compiler.reset()
    counters.clear()
    model = _build_model({"compile_layers": "aot_eager"}, None, **SMALL, mlp_only_layers=[])
    inputs = batch(model, 2, 9)
    _compute_grads(model, inputs)
    with RoutingReplay(model).record():
        _compute_grads(model, inputs)
    assert _count_graphs() == 1 + 2
    _compute_grads(model, inputs)
    assert _count_graphs() == 1 + 2


REPLAYED = {
    f"ep 2, {name}": partial(_check_recorded_and_replayed_routes, {"ep_size": 2}, use_reentrant)
    for name, use_reentrant in REENTRANT.items()
}


@pytest.mark.parametrize("claim", on_ranks(2, REPLAYED, slow=True, **PATIENT))
def test_routes_are_recorded_and_replayed_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_evaluation_runs_without_compilation() -> None:
    torch.compiler.reset()
    counters.clear()
    model = _build_model({"compile_layers": "aot_eager"}, None, **SMALL).eval()
    want = _build_model({}, None, **SMALL).eval()
    inputs = batch(model, 2, 9)
    assert torch.equal(model(**inputs).logits, want(**inputs).logits)
    assert _count_graphs() == 0


def test_a_forward_in_inference_mode_can_precede_training() -> None:
    """The counts of chosen experts are allocated in the first forward in training mode."""
    torch.compiler.reset()
    model = patch(tiny(), compile_layers="aot_eager", experts_backend="torch")
    inputs = batch(model, 2, 9)
    with torch.inference_mode():
        model(**inputs)
    model(**inputs).loss.backward()
    assert expert_load(model).counts.sum() == 2 * 2 * 9 * 2  # layers, rows, tokens, top-k


@pytest.mark.slow
def test_a_decoder_that_is_called_without_its_model_is_compiled_and_counted() -> None:
    """TRL's distillation trainers call the decoder alone. Its config asks for a KV cache."""
    torch.compiler.reset()
    counters.clear()
    eager, compiled = (
        _build_model(config, None, **SMALL) for config in ({}, {"compile_layers": "aot_eager"})
    )
    inputs = batch(eager, 2, 9)
    del inputs["labels"]
    with torch.no_grad():
        compiled.eval()(**inputs)  # a forward that is not counted
    compiled.train()
    results = []
    for model in (eager, compiled):
        model.model(**inputs)[0].square().sum().backward()
        results.append([p.grad for p in model.model.parameters()])
    assert all(map(torch.equal, *results))
    assert _count_graphs() == 2
    loads = [expert_load(model).counts for model in (eager, compiled)]
    assert torch.equal(*loads) and loads[0].sum() > 0


@pytest.mark.slow
def test_a_hook_keeps_only_its_own_block_out_of_the_graphs() -> None:
    """The block with the hook splits its layer into two graphs. The other layers share one."""
    torch.compiler.reset()
    counters.clear()
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "mlp_only_layers": []}
    eager, compiled = (
        _build_model(config, None, **sizes) for config in ({}, {"compile_layers": "aot_eager"})
    )
    calls = []
    for model in (eager, compiled):
        model.model.layers[1].mlp.gate.register_forward_hook(
            lambda module, args, output: calls.append(torch.compiler.is_compiling())
        )
    for step, length in enumerate((9, 11)):
        inputs = batch(eager, 2, length, seed=step)
        want, got = _compute_grads(eager, inputs), _compute_grads(compiled, inputs)
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert calls == [False] * 4
    assert _count_graphs() == 1 + 2
    assert torch.equal(expert_load(compiled).counts, expert_load(eager).counts)


HALVING_HOOKS: dict[str, Any] = {
    "forward_hook": lambda module, args, output: output / 2,
    "forward_pre_hook": lambda module, args: (args[0] / 2,),
    "full_backward_hook": lambda module, grads, output_grads: (grads[0] / 2,),
}


@pytest.mark.parametrize("kind", HALVING_HOOKS)
def test_a_hook_that_is_added_after_the_first_step_runs(kind: str) -> None:
    torch.compiler.reset()
    counters.clear()
    eager, compiled = (
        _build_model(config, None, **SMALL) for config in ({}, {"compile_layers": "eager"})
    )
    inputs = batch(eager, 2, 9)
    without_hook, _ = (_compute_grads(model, inputs) for model in (eager, compiled))
    assert _count_graphs()
    handles = [
        getattr(model.model.layers[-1].self_attn.v_proj, f"register_{kind}")(HALVING_HOOKS[kind])
        for model in (eager, compiled)
    ]
    want, got = (_compute_grads(model, inputs) for model in (eager, compiled))
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert any(not torch.equal(want[name], without_hook[name]) for name in want)
    for handle in handles:
        handle.remove()
    got = _compute_grads(compiled, inputs)
    assert [name for name in want if not torch.equal(got[name], without_hook[name])] == []


def test_a_layer_with_a_cache_runs_without_compilation_and_warns() -> None:
    torch.compiler.reset()
    counters.clear()
    model = _build_model({"compile_layers": "aot_eager"}, None, **SMALL)
    with pytest.warns(UserWarning, match=r"KV cache in training.*without use_cache=True"):
        model(**batch(model, 2, 9), use_cache=True)
    assert _count_graphs() == 0


def test_unpatch_restores_the_classes_of_all_modules() -> None:
    model = _build_model({}, None, **SMALL)
    before = {name: type(module) for name, module in model.named_modules()}
    compile_layers(model, backend="aot_eager")
    assert {name: type(module) for name, module in model.named_modules()} != before
    unpatch(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    left = [name for module in model.modules() for name in vars(module) if "hf_moe_ep" in name]
    assert not left
    inputs = batch(model, 2, 9)
    want = tiny(**(LAYERS | SMALL))
    assert torch.equal(model(**inputs).loss, want(**inputs).loss)


@pytest.mark.slow
def test_a_copy_is_compiled_and_has_its_own_weights() -> None:
    torch.compiler.reset()
    model = _build_model({"compile_layers": "aot_eager"}, None, **SMALL)
    inputs = batch(model, 2, 9)
    want = _compute_grads(model, inputs)
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    counters.clear()
    got = _compute_grads(other, inputs)
    assert _count_graphs() == 0  # the copy shares the graphs
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
def test_a_pickled_model_is_compiled() -> None:
    torch.compiler.reset()
    model = _build_model({"compile_layers": "aot_eager"}, None, **SMALL)
    inputs = batch(model, 2, 9)
    want = _compute_grads(model, inputs)
    other = pickle.loads(pickle.dumps(model))
    kinds = [{name: type(m) for name, m in x.named_modules()} for x in (model, other)]
    assert kinds[0] == kinds[1]
    counters.clear()
    got = _compute_grads(other, inputs)
    assert _count_graphs() == 2  # graphs of its own
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
def test_a_second_call_replaces_the_backend() -> None:
    torch.compiler.reset()
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph

    model = _build_model({"compile_layers": "aot_eager"}, None, **SMALL, mlp_only_layers=[])
    want = _compute_grads(model, batch(model, 2, 9))
    compile_layers(model, backend=backend)
    got = _compute_grads(model, batch(model, 2, 9))
    assert calls and all(torch.equal(got[name], want[name]) for name in want)


def test_the_method_compile_compiles_layers_only_of_a_model_that_is_sharded() -> None:
    alone, to_shard = patch(tiny(**LAYERS)), patch(tiny(**LAYERS), ep_size=2)
    for model in (alone, to_shard):
        model.compile(backend="aot_eager")
    assert (is_compiled(alone), is_compiled(to_shard)) == (True, False)
    assert not hasattr(alone.model.layers[0], COMPILED)
    assert hasattr(to_shard.model.layers[0], COMPILED)


@pytest.mark.parametrize("patches_first", [True, False], ids=["patch, PEFT", "PEFT, patch"])
def test_the_method_compile_of_a_model_with_adapters_compiles_layers_only(
    patches_first: bool,
) -> None:
    if patches_first:
        model = with_lora(patch(tiny(**SMALL), ep_size=2))
    else:
        model = patch(with_lora(tiny(**SMALL)), ep_size=2)
    model.compile(backend="aot_eager")
    assert not is_compiled(model)
    assert hasattr(model.get_base_model().model.layers[0], COMPILED)
    unpatch(model)
    assert "compile" not in vars(model)


def test_a_warning_names_layers_that_are_compiled_with_their_checkpoints() -> None:
    model = patch(tiny(**SMALL))
    parity.checkpointing(model, use_reentrant=False)
    watch = CheckpointWatch(model._hf_moe_ep)
    model._hf_moe_ep.meshes = SimpleNamespace(ep_size=2)  # as if the model was sharded
    model.model.layers[1].compile()
    with pytest.warns(UserWarning, match=r"Qwen3MoeDecoderLayer.*hf_moe_ep\.compile_layers\(model"):
        watch.wrap_functions(model)


REFUSED_ARGUMENTS = [
    ({"backend": "inductr"}, "no backend 'inductr'.*inductor"),
    ({"bakend": "inductor"}, "no argument 'bakend'.*backend"),
    ({"disable": True}, "no argument 'disable'"),
    ({"mode": "fastest"}, "mode.*fastest"),
    ({"options": {"no_such_option": 1}}, "no_such_option"),
    ({"fullgraph": True}, "fullgraph=True.*MoE block.*leave fullgraph out"),
    ({"mode": "reduce-overhead"}, "reduce-overhead.*CUDA graphs.*FSDP2.*mode='default'"),
    ({"mode": "max-autotune"}, "max-autotune'.*max-autotune-no-cudagraphs"),
    ({"backend": "cudagraphs"}, "backend='cudagraphs'"),
    ({"options": {"triton.cudagraphs": True}}, "triton.cudagraphs"),
]


@pytest.mark.parametrize(("kwargs", "match"), REFUSED_ARGUMENTS, ids=str)
def test_bad_arguments_are_refused_before_anything_is_compiled(
    kwargs: dict[str, Any], match: str
) -> None:
    model = tiny()
    with pytest.raises(ValueError, match=match):
        patch(model, compile_layers=kwargs)
    assert "_hf_moe_ep" not in vars(model)


def test_good_arguments_are_passed_on_and_lengths_are_dynamic() -> None:
    assert check_compile_kwargs({})["dynamic"] is True
    chosen = check_compile_kwargs({"backend": "inductor", "mode": None, "dynamic": False})
    chosen.pop("recompile_limit", None)  # not in every version of torch
    assert chosen == {"backend": "inductor", "dynamic": False}


def test_an_unpatched_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not patched"):
        compile_layers(tiny())


def test_a_replaced_forward_is_refused() -> None:
    model = tiny()
    layer = model.model.layers[1]
    layer.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"forward of model\.layers\.1 .*replaced"):
        patch(model, compile_layers=True)


def test_a_backend_that_fails_names_the_layer() -> None:
    torch.compiler.reset()

    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such instruction")

    model = _build_model({}, None, **SMALL)
    compile_layers(model, backend=broken)
    with pytest.raises(
        RuntimeError, match=r"(?s)failed in model\.layers\.0 .*no such instruction.*compile_layers"
    ):
        model(**batch(model, 2, 9))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_backend_that_fails_in_backward_names_the_layer(dynamic: bool) -> None:
    torch.compiler.reset()

    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such instruction")

    backend = aot_autograd(fw_compiler=nop, bw_compiler=broken)
    model = _build_model({}, None, num_hidden_layers=1, mlp_only_layers=[])
    compile_layers(model, backend=backend, dynamic=dynamic)
    with pytest.raises(
        RuntimeError, match=r"(?s)failed in model\.layers\.0 .*no such instruction.*compile_layers"
    ):
        model(**batch(model, 2, 9))
    assert not autograd_config.force_non_lazy_backward_lowering


def test_a_layer_that_cannot_be_traced_is_named() -> None:
    """Another package has disabled torch.compile for the class of the decoder layers."""
    torch.compiler.reset()
    model = _build_model({}, None, **SMALL)
    kind = type(model.model.layers[0])
    with mock_patch.object(kind, "forward", torch.compiler.disable(get_inner_forward(kind))):
        compile_layers(model, backend="aot_eager")
        with pytest.raises(RuntimeError, match=r"no graph of model\.layers\.0 .*compile_layers"):
            model(**batch(model, 2, 9))


def _normalise_by_mode(self: Any, hidden_states: Tensor) -> Tensor:
    return _normalise(self, hidden_states) * len(self.mode)


@pytest.mark.parametrize(
    "name", ["input_layernorm", pytest.param("post_attention_layernorm", marks=pytest.mark.slow)]
)
def test_a_layer_that_reaches_the_recompile_limit_is_named(name: str) -> None:
    """A graph break divides the layer, and each part has graphs of its own."""
    torch.compiler.reset()
    model = _build_model({}, None, num_hidden_layers=1, mlp_only_layers=[])
    # torch 2.11 has no such argument, and reads its config.
    with mock_patch.object(options, "_RECOMPILE_LIMIT", 2):
        compile_layers(model, backend="eager")
    layer = model.model.layers[0]
    for module in (layer.self_attn, layer.mlp):
        module.forward = torch.compiler.disable(module.forward)
    inputs = batch(model, 2, 9)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        mock_patch.object(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", _normalise_by_mode),
        mock_patch.object(modeling_qwen3_moe.Qwen3MoeRMSNorm, "mode", "x", create=True),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "torch.compile has made")
            for mode in ("x", "xy"):
                getattr(layer, name).mode = mode
                model(**inputs)
        getattr(layer, name).mode = "xyz"
        with pytest.warns(UserWarning, match=r"graphs of model\.layers\.0 .*recompile_limit"):
            model(**inputs)


def test_compilation_that_the_user_has_switched_off_is_no_error() -> None:
    torch.compiler.reset()
    model = _build_model({"compile_layers": "eager"}, None, num_hidden_layers=1, mlp_only_layers=[])
    with torch.compiler.set_stance("force_eager"):
        model(**batch(model, 2, 9)).loss.backward()
    counters.clear()
    model(**batch(model, 2, 9))
    assert _count_graphs() == 1


@pytest.mark.slow
def test_mixers_are_called_without_tracing_and_named_once(caplog: Any) -> None:
    """A delta net runs a loop over the blocks of a sequence; hooks separate its packed rows."""
    torch.compiler.reset()
    counters.clear()
    eager, compiled = (models.tiny("qwen3_next", output_router_logits=False) for _ in range(2))
    patch(eager, experts_backend="torch")
    with caplog.at_level("INFO", logger="hf_moe_ep"):
        patch(compiled, experts_backend="torch", compile_layers="aot_eager")
    assert caplog.text.count("without tracing") == 1
    assert "linear_attn (Qwen3NextGatedDeltaNet)" in caplog.text
    unpickled = pickle.loads(pickle.dumps(compiled)).model.layers[0].linear_attn
    assert type(unpickled) is type(compiled.model.layers[0].linear_attn)
    graphs = []
    for step, length in enumerate((9, 70, 130)):  # blocks of 64 tokens
        inputs = batch(eager, 2, length, seed=step)
        want, got = _compute_grads(eager, inputs), _compute_grads(compiled, inputs)
        for name in want:
            # The gradient that a delta net receives has other strides, so sums have another order.
            assert_close(name, got[name], want[name], FP64_MODEL)
        graphs.append(_count_graphs())
    # A layer with attention is one graph. A delta net splits its layer into two graphs. A dense
    # layer and a MoE layer have a delta net.
    assert graphs == [5] * 3, dict(counters["graph_break"])
