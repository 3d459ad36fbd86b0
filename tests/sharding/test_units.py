"""FSDP2 units: those kept gathered never use old weights, and hooks for reentrant checkpoints."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.parity import checkpointing
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.upstream.modules import pre_forward_hooks
from hf_moe_ep.upstream.sharded_models import forget_finished_backward, may_checkpoint_reentrantly

Batch = dict[str, Tensor]


def _no_forward(model: nn.Module, inputs: Batch) -> None:
    pass


def _in_training(model: nn.Module, inputs: Batch) -> None:
    model(**inputs)


def _in_evaluation(model: nn.Module, inputs: Batch) -> None:
    model.eval()
    model(**inputs)
    model.train()


def _without_gradients(model: nn.Module, inputs: Batch) -> None:
    with torch.no_grad():
        model(**inputs)


def _losses(rank: int, between: Callable[[nn.Module, Batch], None]) -> list[Tensor]:
    """Losses of three steps, each with a forward without backward before the optimizer's step."""
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        inputs, others = (batch(model, 2, 7, seed=10 * step + 2 * k + rank) for k in range(2))
        loss = model(**inputs).loss
        loss.backward()
        between(model, others)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _check(between: Callable[[nn.Module, Batch], None], rank: int, world: int) -> None:
    want = _losses(rank, _no_forward)
    for step, loss in enumerate(_losses(rank, between)):
        assert torch.equal(loss, want[step]), (step, loss, want[step])


def two_forwards_before_one_backward(rank: int, world: int) -> None:
    """The second forward reshards what the first one left for its backward."""
    sums = []
    for together in (True, False):
        model = apply_ep_fsdp2(tiny(), ep_size=2)
        losses = []
        for k in range(2):
            losses.append(model(**batch(model, 2, 7, seed=2 * k + rank)).loss)
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        sums.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, grad in sums[0].items():
        assert_close(name, grad, sums[1][name], 1e-10)


def _hooked_units(model: nn.Module) -> int:
    hooks = (hook for module in model.modules() for hook in pre_forward_hooks(module))
    return sum(hook is forget_finished_backward for hook in hooks)


def only_reentrant_checkpoints_hook_units(rank: int, world: int) -> None:
    """2 layers with experts are 4 units; a forward in evaluation computes nothing twice."""
    for ep_size in (1, 2):
        model = apply_ep_fsdp2(tiny(), ep_size=ep_size)
        inputs = batch(model, 2, 7, seed=rank)
        hooked = []
        for use_reentrant, training in ((None, True), (False, True), (True, False), (True, True)):
            model.train(training)
            if use_reentrant is not None:
                checkpointing(model, use_reentrant)
            model(**inputs)
            hooked.append(_hooked_units(model))
        model(**inputs)
        assert [*hooked, _hooked_units(model)] == [0, 0, 0, 4, 4], hooked


def test_a_function_that_is_not_known_may_be_reentrant() -> None:
    for function, may in (
        (None, False),
        (partial(checkpoint, use_reentrant=False), False),
        (partial(print, partial(checkpoint, use_reentrant=False)), False),
        (partial(checkpoint, use_reentrant=True), True),
        (partial(print, partial(checkpoint, use_reentrant=True)), True),
        (checkpoint, True),
    ):
        module = nn.Identity()
        module.checkpoint_fn = function
        assert may_checkpoint_reentrantly(module) is may, function


CHECKS = on_ranks(
    2,
    {
        "in training": partial(_check, _in_training),
        "in evaluation": partial(_check, _in_evaluation),
        "without gradients": partial(_check, _without_gradients),
    },
    two_forwards_before_one_backward,
    only_reentrant_checkpoints_hook_units,
)


@pytest.mark.parametrize("claim", CHECKS)
def test_a_forward_without_backward(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
