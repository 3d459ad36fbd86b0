"""FSDP2 units that stay gathered never use old weights, and recomputed units reduce gradients."""

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

Batch = dict[str, Tensor]
Prepare = Callable[[nn.Module], None]
_reentrant = partial(checkpointing, use_reentrant=True)


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
    """Take three steps and return their losses; `between` runs before each optimizer step."""
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


def _check_losses(between: Callable[[nn.Module, Batch], None], rank: int, world: int) -> None:
    want = _losses(rank, _no_forward)
    for step, loss in enumerate(_losses(rank, between)):
        assert torch.equal(loss, want[step]), (step, loss, want[step])


def _checkpoint_blocks(model: nn.Module) -> None:
    """Make each MoE block call a reentrant checkpoint in its own code, as some models do."""
    for layer in model.model.layers:
        stock = layer.mlp.forward
        layer.mlp.forward = partial(checkpoint, stock, use_reentrant=True)


def two_forwards_before_one_backward(prepare: Prepare | None, rank: int, world: int) -> None:
    """The second forward reshards units that the first one left gathered for its backward."""
    gradients = []
    for one_backward in (True, False):
        model = tiny()
        if prepare is not None:
            prepare(model)
        apply_ep_fsdp2(model, ep_size=2)
        losses = []
        for k in range(2):
            losses.append(model(**batch(model, 2, 7, seed=2 * k + rank)).loss)
            if not one_backward:
                losses.pop().backward()
        if one_backward:
            sum(losses).backward()
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        assert_close(name, grad, gradients[1][name], 1e-10)


CHECKS = on_ranks(
    2,
    {
        "in training": partial(_check_losses, _in_training),
        "in evaluation": partial(_check_losses, _in_evaluation),
        "without gradients": partial(_check_losses, _without_gradients),
    },
    {
        "two forwards": partial(two_forwards_before_one_backward, None),
        "two forwards, reentrant": partial(two_forwards_before_one_backward, _reentrant),
        "two forwards, reentrant in the model's code": partial(
            two_forwards_before_one_backward, _checkpoint_blocks
        ),
    },
)


@pytest.mark.parametrize("claim", CHECKS)
def test_other_forwards_do_not_change_losses_or_gradients(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
