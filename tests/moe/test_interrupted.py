"""Ctrl-C at any line of a forward, a backward or an optimizer step does not change later steps.

The interrupted line is in hf_moe_ep, in the model's file or in the optimizer's file. After the
interrupt the tests load the weights and the optimizer's state again, as a user does in a notebook.
An evaluation and ten more steps must have the results of a run without the interrupt. A stock model
of the same class must also keep its loss. Copies of the interrupted model, and the model after
`unpatch` or another `patch`, must have stock's logits.
"""

import copy
import dis
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.parity import checkpointing
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.loss.attach import BeginFusedLoss, _Forward
from hf_moe_ep.state import replace_attribute, restore_attributes

MODEL = {"router_aux_loss_coef": 2.0, "output_router_logits": True}
STEPS = 10
FILES = ("/hf_moe_ep/", "/modeling_qwen3_moe.py", "/torch/optim/adam.py")
CODE_THAT_REPLACES = [
    function.__code__
    for function in (
        BeginFusedLoss._begin,
        BeginFusedLoss.end,
        _Forward.replace_functions,
        replace_attribute,
        restore_attributes,
    )
]


def _leaves_a_with_block(frame: FrameType) -> bool:
    """Return True if the next line is a `with` statement that calls `__exit__(None, None, None)`.

    Python traces this line before the call, but handles no signal here: it looks for signals after
    calls and at jumps (CHECK_EVAL_BREAKER in Python/ceval.c).
    """
    code = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 6 : 2]
    return [dis.opname[operation] for operation in code] == ["LOAD_CONST"] * 3


class _CountTopK(TorchFunctionMode):
    """Counts the calls of topk that reach a TorchFunctionMode."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.topk
        return func(*args, **(kwargs or {}))


def _is_in_files(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in FILES)


def _replaces_functions(frame: FrameType) -> bool:
    """Return True for the code that replaces and restores functions for a fused loss."""
    return frame.f_code in CODE_THAT_REPLACES


@contextmanager
def _interrupt_at(
    line: int | None, is_traced: Callable[[FrameType], bool] = _is_in_files
) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the traced line with number `line`; None only counts lines.

    Yield a list with one number: how many traced lines have run.
    """
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_traced(frame):
            return None
        if event == "line":
            if _leaves_a_with_block(frame):
                return trace
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


class _TrainingRun:
    """A patched model and its optimizer, whose states can be reset, and a stock model."""

    def __init__(self) -> None:
        self.model, self.stock = tiny(**MODEL), tiny(**MODEL)
        checkpointing(self.model, False)
        patch(self.model, aux_loss_per_layer=True, experts_backend="torch", fused_loss=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.inputs = [batch(self.stock, 2, 7, seed=step, pad=2) for step in range(STEPS)]
        self.step(0)
        self.start = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        # This batch has as many tokens as a batch of training, but no padding.
        self.evaluated = batch(self.stock, 2, 7, seed=STEPS)
        self.loss: Tensor | None = None

    def forward(self) -> None:
        self.loss = self.model(**self.inputs[0]).loss

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def step(self, number: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(**self.inputs[number]).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Return the logits of a forward without labels, and the loss of a forward with labels."""
        self.model.load_state_dict(self.start[0])
        self.model.eval()
        logits = self.model(**self.evaluated | {"labels": None}).logits
        assert logits is not None
        loss = self.model(**self.evaluated).loss
        self.model.train()
        return torch.stack([*logits.flatten(), loss])

    def compute_losses(self) -> Tensor:
        """Return the losses of ten steps from the initial weights, and one loss of stock."""
        self.model.load_state_dict(self.start[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.start[1]))
        stock_loss = self.stock(**self.inputs[0]).loss.detach()
        return torch.stack([*(self.step(number) for number in range(STEPS)), stock_loss])


def _split_at_phase(
    run: _TrainingRun, phase: str
) -> tuple[list[Callable[[], None]], Callable[[], None]]:
    """Return the functions of the phases before `phase`, and the function of `phase`."""
    phases = {"forward": run.forward, "backward": run.backward, "update": run.update}
    names = list(phases)
    return [phases[name] for name in names[: names.index(phase)]], phases[phase]


@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
@pytest.mark.parametrize("num_interrupts", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_an_interrupt_changes_no_later_step(phase: str, num_interrupts: int) -> None:
    run = _TrainingRun()
    evaluation, want = run.evaluate(), run.compute_losses()
    assert torch.equal(run.compute_losses(), want)
    before, interrupted = _split_at_phase(run, phase)
    for earlier in before:
        earlier()
    with _interrupt_at(None) as num_lines:
        interrupted()
    for line in sorted(random.Random(0).sample(range(1, num_lines[0] + 1), num_interrupts)):
        run.optimizer.zero_grad()
        for earlier in before:
            earlier()
        with pytest.raises(KeyboardInterrupt), _interrupt_at(line):
            interrupted()
        where = f"interrupted at line {line} of {num_lines[0]}"
        assert torch.equal(run.evaluate(), evaluation), where
        assert torch.equal(run.compute_losses(), want), where
        # If modes did not see topk any more, routing replay would fail in the rest of the process.
        with _CountTopK() as seen:
            torch.topk(torch.ones(2), 1)
        assert seen.count == 1, where
    _assert_stock_loss(unpatch(run.model), run)


@pytest.mark.parametrize("change", ["copy", "unpatch", "patch"])
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_model_can_be_changed_after_an_interrupt(change: str, step: int) -> None:
    """The model is changed before its next forward, which would restore the replaced functions."""
    model, stock = tiny(), tiny()
    inputs = batch(stock, 1, 3)
    unlabelled = {name: x for name, x in inputs.items() if name != "labels"}
    want = stock(**unlabelled).logits
    patch(model, fused_loss=True)
    with _interrupt_at(None, _replaces_functions) as num_lines:
        model(**inputs)
    for line in range(1, num_lines[0] + 1, step):
        with pytest.raises(KeyboardInterrupt), _interrupt_at(line, _replaces_functions):
            model(**inputs)
        if change == "copy":
            changed = copy.deepcopy(model)
        elif change == "unpatch":
            changed = unpatch(model)
        else:
            changed = patch(model, fused_loss=True, recompute_activations=True)
        where = f"interrupted at line {line} of {num_lines[0]}"
        assert torch.equal(changed(**unlabelled).logits, want), where
        patch(model, fused_loss=True)
        assert model(**inputs).logits is None, where
    _assert_same_functions(unpatch(model), stock)


INTERRUPTED_MODULES = (
    "model.layers.0",
    "model.layers.1.mlp",
    "model.layers.1.mlp.experts",
    "lm_head",
)


def an_interrupt_of_all_ranks_changes_no_later_step(rank: int, world: int) -> None:
    """Ctrl-C reaches all ranks of a terminal. All are interrupted in front of the same module."""
    model = tiny(**MODEL)
    checkpointing(model, False)
    apply_ep_fsdp2(model, ep_size=2, fused_loss=True, aux_loss_per_layer=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    inputs = [batch(model, 2, 7, seed=world * step + rank, pad=2) for step in range(3)]
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def compute_results() -> Tensor:
        """Return the logits of a forward without labels, and the losses of three steps."""
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        values = [*model(**inputs[0] | {"labels": None}).logits.detach().flatten()]
        for step_inputs in inputs:
            optimizer.zero_grad()
            loss = model(**step_inputs).loss
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        return torch.stack(values)

    want = compute_results()
    assert torch.equal(compute_results(), want)
    for name in INTERRUPTED_MODULES:
        hook = model.get_submodule(name).register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**inputs[0])
        hook.remove()
        assert torch.equal(compute_results(), want), f"interrupted in front of {name}"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "claim", on_ranks(2, an_interrupt_of_all_ranks_changes_no_later_step, slow=True)
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _assert_same_functions(model: nn.Module, stock: nn.Module) -> None:
    """Check that no module of an unpatched model has a function that stock's module lacks."""
    for module, stock_module in zip(model.modules(), stock.modules(), strict=True):
        functions = {name for name, value in vars(module).items() if callable(value)}
        assert functions <= vars(stock_module).keys()


def _assert_stock_loss(model: nn.Module, run: _TrainingRun) -> None:
    """Check that the unpatched model has the loss of a stock model."""
    run.stock.load_state_dict(model.state_dict())
    losses = [other(**run.inputs[0]).loss for other in (model, run.stock)]
    assert torch.equal(*losses)
