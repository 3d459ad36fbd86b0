"""Which optimizers train a sharded model as one process does, and how the others are named."""

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

from hf_moe_ep.integrations.optimizers import WORKING

RATE = 1e-2
# Of the way that all weights went. Those of Adam's kind begin with signs: noise near zero.
BUDGET = 1e-2


def working_optimizers_train_as_in_one_process(rank: int, world: int) -> None:
    """Three steps of each on two ranks: the weights of one process on both batches."""
    for name in WORKING:
        kind = getattr(torch.optim, name)
        stock = tiny(dtype=torch.float32)
        before = {key: value.clone() for key, value in stock.state_dict().items()}
        wanted = kind(stock.parameters(), lr=RATE)
        batches = [batch(stock, 2, 7, seed=r) for r in range(world)]
        count = sum(int(one["labels"][:, 1:].ne(-100).sum()) for one in batches)
        with launched():
            accelerator, model, optimizer = prepared(
                tiny(dtype=torch.float32),
                make_optimizer=lambda params, lr, kind=kind: kind(params, lr=RATE),
                ep_size=world,
            )
            for _ in range(3):
                for one in batches:
                    stock(**one, num_items_in_batch=count).loss.backward()
                wanted.step()
                wanted.zero_grad()
                loss = model(**batches[rank], num_items_in_batch=count).loss
                accelerator.backward(loss * world)
                optimizer.step()
                optimizer.zero_grad()
        way, error = 0.0, 0.0
        for (key, got), want in zip(model.named_parameters(), stock.parameters(), strict=True):
            way += float((want.detach() - before[key]).square().sum())
            error += float((full_tensor(got.detach()) - want.detach()).square().sum())
        assert way > 0 and math.sqrt(error / way) < BUDGET, (name, way, error)


def _adafactor_of_transformers(params: Any, lr: float) -> torch.optim.Optimizer:
    return transformers.Adafactor(params, lr=lr, relative_step=False, scale_parameter=False)


REFUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    r"transformers\.optimization\.Adafactor": _adafactor_of_transformers,
    r"torch\.optim\.Adafactor": torch.optim.Adafactor,
    r"torch\.optim\.rprop\.Rprop": torch.optim.Rprop,
}
# Since some torch between 2.13 and 2.15.
TRAINED_BY_NEWER_TORCH = (torch.optim.Rprop,)


def _refuses(name: str, optimizer: Any) -> None:
    inner = optimizer.optimizer
    try:
        optimizer.step()
    except ValueError as error:
        assert re.search(rf"{name} cannot train .*\(.*aten.*these can: .*Adam", str(error)), error
    else:
        assert isinstance(inner, TRAINED_BY_NEWER_TORCH) and torch.__version__ >= "2.14", name


def others_are_named_at_their_first_step(rank: int, world: int) -> None:
    """With those that work, and what torch said."""
    for name, make in REFUSED.items():
        with launched():
            model = tiny(dtype=torch.float32)
            accelerator, model, optimizer = prepared(model, make_optimizer=make, ep_size=world)
            accelerator.backward(model(**batch(tiny(), 2, 7, seed=rank)).loss)
            _refuses(name, optimizer)


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, others_are_named_at_their_first_step),
        *on_ranks(2, working_optimizers_train_as_in_one_process, slow=True),
    ],
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
