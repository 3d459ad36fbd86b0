"""Test that `SUPPORTED_OPTIMIZERS` train as in one process, and that others raise an error."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.checks import Check, Found, on_ranks
from support.launched import launched, prepared
from support.parity import full_tensor
from support.tiny_models import batch, tiny

from hf_moe_ep.integrations.optimizers import SUPPORTED_OPTIMIZERS

RATE = 1e-2
# The tolerance is relative to the distance that the weights moved. The first steps of Adam-like
# optimizers are signs of gradients, which rounding flips near zero.
BUDGET = 1e-2


def working_optimizers_train_as_in_one_process(rank: int, world: int) -> None:
    """After three steps on two ranks, the weights equal one process on both batches."""
    for name in SUPPORTED_OPTIMIZERS:
        optimizer_class = getattr(torch.optim, name)
        stock = tiny(dtype=torch.float32)
        before = {key: value.clone() for key, value in stock.state_dict().items()}
        stock_optimizer = optimizer_class(stock.parameters(), lr=RATE)
        batches = [batch(stock, 2, 7, seed=r) for r in range(world)]
        count = sum(int(inputs["labels"][:, 1:].ne(-100).sum()) for inputs in batches)
        with launched():
            accelerator, model, optimizer = prepared(
                tiny(dtype=torch.float32),
                make_optimizer=lambda params, lr, make=optimizer_class: make(params, lr=RATE),
                ep_size=world,
            )
            for _ in range(3):
                for inputs in batches:
                    stock(**inputs, num_items_in_batch=count).loss.backward()
                stock_optimizer.step()
                stock_optimizer.zero_grad()
                loss = model(**batches[rank], num_items_in_batch=count).loss
                accelerator.backward(loss * world)
                optimizer.step()
                optimizer.zero_grad()
        moved, error = 0.0, 0.0
        for (key, parameter), stock_parameter in zip(
            model.named_parameters(), stock.parameters(), strict=True
        ):
            moved += float((stock_parameter.detach() - before[key]).square().sum())
            error += float(
                (full_tensor(parameter.detach()) - stock_parameter.detach()).square().sum()
            )
        assert moved > 0 and math.sqrt(error / moved) < BUDGET, (name, moved, error)


def _create_transformers_adafactor(params: Any, lr: float) -> torch.optim.Optimizer:
    return transformers.Adafactor(params, lr=lr, relative_step=False, scale_parameter=False)


REFUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    r"transformers\.optimization\.Adafactor": _create_transformers_adafactor,
    r"torch\.optim\.Adafactor": torch.optim.Adafactor,
    r"torch\.optim\.rprop\.Rprop": torch.optim.Rprop,
}
# A version of torch between 2.13 and 2.15 added support for DTensors to these.
TRAINED_BY_NEWER_TORCH = (torch.optim.Rprop,)


def _check_refusal(name: str, optimizer: Any) -> None:
    inner = optimizer.optimizer
    try:
        optimizer.step()
    except ValueError as error:
        message = str(error)
        assert re.search(rf"{name} cannot train .*\(.*aten.*Use one of .*Adam", message), error
    else:
        assert isinstance(inner, TRAINED_BY_NEWER_TORCH) and torch.__version__ >= "2.14", name


def other_optimizers_raise_at_their_first_step(rank: int, world: int) -> None:
    """The error names the optimizer, torch's operator and optimizers that work."""
    for name, make in REFUSED.items():
        with launched():
            model = tiny(dtype=torch.float32)
            accelerator, model, optimizer = prepared(model, make_optimizer=make, ep_size=world)
            accelerator.backward(model(**batch(tiny(), 2, 7, seed=rank)).loss)
            _check_refusal(name, optimizer)


def _create_torch_muon(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr)


def torchs_muon_is_refused(rank: int, world: int) -> None:
    with launched(), pytest.raises(ValueError, match=r"torch.optim.Muon .* use hf_moe_ep.Muon"):
        prepared(tiny(dtype=torch.float32), make_optimizer=_create_torch_muon, ep_size=world)


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, other_optimizers_raise_at_their_first_step, torchs_muon_is_refused),
        *on_ranks(2, working_optimizers_train_as_in_one_process, slow=True),
    ],
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
