"""An optimizer that was created before its model was sharded raises an error at its first step."""

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.tiny_models import batch, tiny

from hf_moe_ep import Muon, apply_ep_fsdp2, patch

WORLD = 2


def a_step_with_parameters_from_before_sharding_is_refused(rank: int, world: int) -> None:
    model = patch(tiny(), ep_size=2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1), Muon(model, 0.1)]
    number = len(list(model.parameters()))
    apply_ep_fsdp2(model)
    for optimizer in optimizers:
        model(**batch(tiny(), 2, 5, seed=rank)).loss.backward()
        text = (
            rf"{number} of {number} parameters of this {type(optimizer).__name__} were replaced "
            r".*create the optimizer after apply_ep_fsdp2"
        )
        with pytest.raises(ValueError, match=text):
            optimizer.step()
    model.zero_grad()
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(**batch(tiny(), 2, 5, seed=rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0], losses


def a_parameter_that_another_model_trains_is_accepted(rank: int, world: int) -> None:
    model, stock = tiny(), tiny()
    stock.model.embed_tokens.weight = model.model.embed_tokens.weight
    apply_ep_fsdp2(model, ep_size=2)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    before = stock.model.embed_tokens.weight.detach().clone()
    stock(**batch(stock, 2, 5, seed=rank)).loss.backward()
    optimizer.step()
    assert not torch.equal(stock.model.embed_tokens.weight, before)


ON_TWO_RANKS = [
    a_step_with_parameters_from_before_sharding_is_refused,
    a_parameter_that_another_model_trains_is_accepted,
]


@pytest.mark.parametrize("claim", on_ranks(WORLD, *ON_TWO_RANKS))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
