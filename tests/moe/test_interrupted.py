"""Ctrl-C at any line of a forward, a backward or an optimizer's step: what follows is not changed.

A line of ours, of the model's own file or of the optimizer's is interrupted. Then the weights from
before are loaded again, as a notebook's user does, and ten steps have the losses of a run that was
not interrupted. A stock model of the same class is watched as well.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from support.parity import checkpointing
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep import patch, unpatch

MODEL = {"router_aux_loss_coef": 2.0, "output_router_logits": True}
STEPS = 10
FILES = ("/hf_moe_ep/", "/modeling_qwen3_moe.py", "/torch/optim/adam.py")


@contextmanager
def _interrupted_at(line: int | None) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the n-th line of the files above; yields how many lines ran."""
    seen = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in FILES):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


class _Run:
    """A patched model with its optimizer, both of which can be reset, and a stock model."""

    def __init__(self) -> None:
        self.model, self.stock = tiny(**MODEL), tiny(**MODEL)
        checkpointing(self.model, False)
        patch(self.model, aux_loss_per_layer=True, experts_backend="torch")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.inputs = [batch(self.stock, 2, 7, seed=step, pad=2) for step in range(STEPS)]
        self.step(0)
        self.begin = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
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

    def losses(self) -> Tensor:
        """Ten losses from the weights of the beginning, and one of the stock model."""
        self.model.load_state_dict(self.begin[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.begin[1]))
        of_stock = self.stock(**self.inputs[0]).loss.detach()
        return torch.stack([*(self.step(number) for number in range(STEPS)), of_stock])


def _phases(run: _Run, phase: str) -> tuple[list[Callable[[], None]], Callable[[], None]]:
    """Return the code before the phase, and the phase."""
    phases = {"forward": run.forward, "backward": run.backward, "update": run.update}
    names = list(phases)
    return [phases[name] for name in names[: names.index(phase)]], phases[phase]


@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
@pytest.mark.parametrize("points", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_what_follows_is_not_changed(phase: str, points: int) -> None:
    run = _Run()
    want = run.losses()
    assert torch.equal(run.losses(), want)
    before, interrupted = _phases(run, phase)
    for earlier in before:
        earlier()
    with _interrupted_at(None) as seen:
        interrupted()
    for line in sorted(random.Random(0).sample(range(1, seen[0] + 1), points)):
        run.optimizer.zero_grad()
        for earlier in before:
            earlier()
        with pytest.raises(KeyboardInterrupt), _interrupted_at(line):
            interrupted()
        assert torch.equal(run.losses(), want), f"interrupted at line {line} of {seen[0]}"
    _assert_stock(unpatch(run.model), run)


def _assert_stock(model: nn.Module, run: _Run) -> None:
    """Taken out again, the model is a stock one."""
    run.stock.load_state_dict(model.state_dict())
    losses = [of(**run.inputs[0]).loss for of in (model, run.stock)]
    assert torch.equal(*losses)
