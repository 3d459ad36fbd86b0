"""Shared experts run while results are sent back, and their results equal stock's results."""

import gc
import pickle
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch as mock_patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures.precision import budget
from support.architectures.steps import adamw, assert_same_step, build
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.tiny_models import batch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.compiled.layers import COMPILED
from hf_moe_ep.moe.dispatch import async_exchange
from hf_moe_ep.moe.shared_experts import Deferred, SharedExperts
from hf_moe_ep.planner.count import count_tensors
from hf_moe_ep.state import STATE, MoELayer

# In stock code, qwen2_moe calls its shared experts before the routed experts, and deepseek_v3 calls
# them after the routed experts.
TYPES = ("qwen2_moe", "deepseek_v3")
SHARED = ("shared_expert", "shared_experts")


def _list_shared(model: nn.Module) -> list[SharedExperts]:
    layers = [getattr(module, STATE, None) for module in model.modules()]
    return [layer.shared for layer in layers if isinstance(layer, MoELayer)]


def _record_events(stack: ExitStack, events: list[str]) -> None:
    """Record when results are sent and awaited, and when shared experts run, in both directions."""

    def note(kind: type, name: str, event: str) -> None:
        function = getattr(kind, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return function(*args, **kwargs)

        stack.enter_context(mock_patch.object(kind, name, staticmethod(noted)))

    note(async_exchange._StartCombine, "forward", "send")
    note(async_exchange._FinishCombine, "forward", "wait")
    note(async_exchange._FinishCombine, "backward", "send gradients")
    note(async_exchange._StartCombine, "backward", "wait for gradients")
    run = SharedExperts._run

    def run_noted(self: SharedExperts, *args: Any) -> Tensor:
        events.append("shared")
        out = run(self, *args)
        out.register_hook(lambda _: events.append("gradients of shared"))
        return out

    stack.enter_context(mock_patch.object(SharedExperts, "_run", run_noted))


def _check_that_transfers_hide_shared_experts(model_type: str, rank: int, world: int) -> None:
    model = apply_ep_fsdp2(build(model_type), ep_size=world)
    layers = len(_list_shared(model))
    assert layers and all(_list_shared(model))
    events: list[str] = []
    with ExitStack() as stack:
        _record_events(stack, events)
        model(**batch(model, 2, 9 + rank)).loss.backward()
    forward = ["send", "shared", "wait"] * layers
    backward = ["send gradients", "gradients of shared", "wait for gradients"] * layers
    assert events == forward + backward, events


def _check_against_stock(
    model_type: str, use_reentrant: bool | None, rank: int, world: int
) -> None:
    model, stock = build(model_type, seed=rank), build(model_type)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    apply_ep_fsdp2(model, ep_size=world, dispatch_chunks=2)
    optimizers = adamw(model), adamw(stock)
    for step in range(2):
        assert_same_step(f"{model_type}, step {step}", (model, stock), optimizers, seed=10 * step)
    inputs = batch(stock, 2, 9 + rank)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            losses = model.eval()(**inputs).loss, stock.eval()(**inputs).loss
        assert_close(f"{model_type}, {guard.__name__}", *losses, budget(model_type))


def _check_memory(model_type: str, use_reentrant: bool | None, rank: int, world: int) -> None:
    """Check that after a backward fewer bytes are alive than one layer's hidden states.

    If an output of shared experts stayed alive, it would keep the graph of its layer alive, and in
    the recompute of a checkpointed layer all activations of the layer.
    """
    model = build(model_type)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    _check_memory_of_two_steps(apply_ep_fsdp2(model, ep_size=world))


def _check_memory_of_two_steps(model: Any) -> None:
    inputs = batch(model, 2, 32)
    num_bytes = 2 * 32 * model.config.hidden_size * model.dtype.itemsize
    with count_tensors([*model.parameters(), *model.buffers()]) as memory:
        before = memory.now
        for _ in range(2):
            model(**inputs).loss.backward()
            model.zero_grad()
        assert memory.peak - before > 4 * num_bytes
        _assert_freed(memory, before, num_bytes)


def _assert_freed(memory: Any, before: int, num_bytes: int) -> None:
    for _ in range(50):  # gloo's thread keeps the tensors of a finished transfer for a moment
        gc.collect()
        if memory.now - before < num_bytes:
            return
        time.sleep(0.1)
    assert memory.now - before < num_bytes, (memory.now - before, num_bytes)


def _set_forward_as_liger(model: nn.Module) -> nn.Module:
    """Set another forward on shared experts, as Liger's `_patch_swiglu_module` does."""
    for shared in _list_shared(model):
        module = shared._module
        module.__dict__["forward"] = MethodType(type(module).forward, module)
    return model


def _train_copies(model: nn.Module) -> nn.Module:
    """Train PEFT's copies of the shared experts."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["shared_expert"])
    return get_peft_model(model, config)


def _check_that_only_another_forward_runs(
    change: Callable[[nn.Module], nn.Module], rank: int, world: int
) -> None:
    """Check that our forward computes nothing if the block calls another forward."""
    model: Any = patch(build("qwen2_moe"), ep_size=world)
    own_shared = _list_shared(model)
    model = change(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_ep_fsdp2(model)
    runs: list[SharedExperts] = []
    run = SharedExperts._run

    def noted(self: SharedExperts, *args: Any) -> Tensor:
        runs.append(self)
        return run(self, *args)

    with mock_patch.object(SharedExperts, "_run", noted):
        _check_memory_of_two_steps(model)
    assert not [shared for shared in runs if shared in own_shared]


def _check_memory_after_an_error(model_type: str, rank: int, world: int) -> None:
    """Check the memory if a script catches a MoE layer's error, for example to skip a batch."""
    model = apply_ep_fsdp2(build(model_type), ep_size=world, max_tokens_per_rank=1)
    inputs = batch(model, 2, 32)
    num_bytes = 2 * 32 * model.config.hidden_size * model.dtype.itemsize
    with count_tensors([*model.parameters(), *model.buffers()]) as memory:
        before = memory.now
        try:
            model(**inputs)
        except RuntimeError as error:
            assert "max_tokens_per_rank" in str(error)
        else:
            raise AssertionError("no error was raised")
        _assert_freed(memory, before, num_bytes)


def shared_experts_compute_another_input_again(rank: int, world: int) -> None:
    """The block gives its shared experts another tensor than its own input."""
    model = build("deepseek_v3", seed=rank)
    kind = type(model.model.layers[1].mlp)
    stock = kind.forward

    def doubled(self: nn.Module, hidden_states: Tensor) -> Tensor:
        shared = self.shared_experts
        double = shared.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        out = stock(self, hidden_states)
        double.remove()
        return out

    doubled.__module__ = kind.__module__
    with mock_patch.object(kind, "forward", doubled):
        reference = build("deepseek_v3")
        apply_ep_fsdp2(model, ep_size=world)
        with pytest.warns(UserWarning, match="computed twice"):
            assert_same_step("doubled", (model, reference), (adamw(model), adamw(reference)))


def _check_backward_hooks(model_type: str, rank: int, world: int) -> None:
    """Check that full backward hooks of a block and of its shared experts get stock's gradients.

    The hooks also change the gradients.
    """
    by_model = {}
    for name in ("ours", "stock"):
        model = build(model_type)
        if name == "ours":
            apply_ep_fsdp2(model, ep_size=world)
        torch.manual_seed(rank)
        by_model[name] = _collect_gradients_at_hooks(model, batch(model, 2, 9 + rank))
    assert len(by_model["ours"]) == len(by_model["stock"]) > 2
    for want, got in zip(by_model["stock"], by_model["ours"], strict=True):
        assert_close("gradient at a hook", got, want, budget(model_type))


def _collect_gradients_at_hooks(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Halve gradients in backward hooks; return the hooks' gradients and the embeddings' gradient.

    The embeddings of the tokens are a leaf, so other ranks do not add to their gradient.
    """
    seen: list[Tensor] = []

    def halve(_: nn.Module, grads: tuple[Tensor, ...], __: Any) -> tuple[Tensor, ...]:
        seen.append(grads[0].detach().clone())
        return (grads[0] / 2,)

    block = model.model.layers[-1].mlp
    shared = next(child for name, child in block.named_children() if name in SHARED)
    shape = *inputs.pop("input_ids").shape, model.config.hidden_size
    embeds = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for module in (block, shared):
        handle = module.register_full_backward_hook(halve)
        model(**inputs, inputs_embeds=embeds).loss.backward()
        handle.remove()
    with warnings.catch_warnings(), register_module_full_backward_hook(lambda *_: None):
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        model(**inputs, inputs_embeds=embeds).loss.backward()
    # Without a backward hook, an autograd function in a pre-forward hook halves the gradient.
    with (
        warnings.catch_warnings(),
        block.register_forward_pre_hook(lambda _, args: (Half.apply(args[0]),)),
    ):
        warnings.filterwarnings("ignore", ".* was computed twice")
        model(**inputs, inputs_embeds=embeds).loss.backward()
    return [*seen, embeds.grad]


class Half(torch.autograd.Function):
    """Return the input, and halve the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


SLOW = {
    f"{name}, {checkpoints}{claim}": partial(check, name, use_reentrant)
    for name in TYPES
    for checkpoints, use_reentrant in {"no checkpoints": None, "reentrant": True}.items()
    for claim, check in {"": _check_against_stock, ", memory": _check_memory}.items()
}
SLOW |= {
    f"{name} runs alone": partial(_check_that_only_another_forward_runs, change)
    for name, change in {"Liger": _set_forward_as_liger, "PEFT's copy": _train_copies}.items()
}
SLOW |= {f"{name}, hooks": partial(_check_backward_hooks, name) for name in TYPES}
SLOW |= {f"{name}, an error": partial(_check_memory_after_an_error, name) for name in TYPES}
SLOW |= {f"{name}, checkpoints": partial(_check_against_stock, name, False) for name in TYPES}
CLAIMS = on_ranks(2, SLOW, shared_experts_compute_another_input_again, slow=True)
for name in TYPES:
    order = partial(_check_that_transfers_hide_shared_experts, name)
    memory = partial(_check_memory, name, False)
    claims = {f"{name}, order": order, f"{name}, memory": memory}
    CLAIMS += on_ranks(2, claims, slow=name != "deepseek_v3")


@pytest.mark.parametrize("claim", CLAIMS)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_a_deferred_tensor_is_computed_once_when_it_is_read() -> None:
    weight = torch.randn(3, requires_grad=True)
    calls: list[int] = []

    def compute() -> Tensor:
        calls.append(0)
        return 2 * weight

    deferred = Deferred(compute)
    assert isinstance(deferred, Tensor) and not calls
    (torch.ones(3) * deferred + deferred.view(3)).sum().backward()
    assert len(calls) == 1
    assert torch.equal(weight.grad, torch.full((3,), 4.0))


def test_an_autograd_function_that_reads_a_deferred_tensor_fails() -> None:
    """torch passes the `Deferred` itself, so the computed value would get no gradient."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    weight = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="invalid gradient"):
        Double.apply(Deferred(lambda: 2 * weight)).sum().backward()


def test_shared_experts_are_compiled_and_can_be_pickled() -> None:
    """`compile_layers` changes the class of shared experts after `patch` has replaced a forward."""
    model = patch(build("qwen2_moe"), ep_size=2, compile_layers="aot_eager")
    shared = _list_shared(model)[0]
    x_TH = torch.randn(3, model.config.hidden_size, dtype=torch.float64)
    with mock_patch.dict(vars(shared._module), {COMPILED: lambda module, x: -x}):
        assert torch.equal(shared._run(x_TH), -x_TH)
    other = pickle.loads(pickle.dumps(patch(build("qwen2_moe"), ep_size=2)))
    want = _list_shared(patch(build("qwen2_moe"), ep_size=2))[0]._run(x_TH)
    assert torch.equal(_list_shared(other)[0]._run(x_TH), want)


def test_patch_changes_shared_experts_only_if_rows_are_sent_and_unpatch_restores_them() -> None:
    model = build("deepseek_v3")
    patch(model)
    assert not any(_list_shared(model))
    patch(model, ep_size=2)
    block = model.model.layers[1].mlp
    assert "forward" in vars(block.shared_experts) and block._forward_pre_hooks
    unpatch(model)
    assert "forward" not in vars(block.shared_experts) and not block._forward_pre_hooks
