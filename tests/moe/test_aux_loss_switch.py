"""`AuxLossSwitch` computes the right loss for each model, and the last `unpatch` removes it.

`patch` replaces a function in a file of transformers by the switch. Stock and patched models of one
class in one process share this switch, and a forward may be interrupted.
"""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.close import assert_close
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.moe.aux_loss import AuxLossSwitch

MODEL = {"router_aux_loss_coef": 2.0, "output_router_logits": True}
FUNCTION = "load_balancing_loss_func"


def _make_inputs(seed: int = 0) -> dict[str, Tensor]:
    return batch(tiny(), 2, 7, seed=seed, pad=2)


def _find_function() -> Any:
    return vars(modeling_qwen3_moe)[FUNCTION]


def _interrupt(model: nn.Module, **more: Tensor) -> None:
    """Interrupt a forward before the head: no aux loss is computed, and no later hook runs."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(**_make_inputs(), **more)
    handle.remove()


def test_models_of_one_class_each_have_their_own_loss() -> None:
    """A stock model, a patched model, and a model with a loss per layer run in turns."""
    stock, inputs = tiny(**MODEL), _make_inputs()
    plain = patch(tiny(**MODEL))
    per_layer = patch(tiny(**MODEL), aux_loss_per_layer=True)
    want = per_layer(**inputs).aux_loss
    assert not torch.equal(want, stock(**inputs).aux_loss)
    for _ in range(2):
        assert torch.equal(plain(**inputs).aux_loss, stock(**inputs).aux_loss)
        assert torch.equal(per_layer(**inputs).aux_loss, want)
        _interrupt(per_layer)
        outputs = stock(**inputs)
    assert type(outputs.router_logits) is tuple
    assert type(per_layer(**inputs).router_logits) is tuple


def test_unpatching_the_last_model_restores_stocks_function() -> None:
    gc.collect()
    unpatch(patch(tiny(**MODEL)))  # removes the switch if a model of another test left it
    stock, inputs = _find_function(), _make_inputs()
    assert not isinstance(stock, AuxLossSwitch)
    first, second = (patch(tiny(**MODEL), aux_loss_per_layer=True) for _ in range(2))
    copied = copy.deepcopy(second)
    switch, want = _find_function(), first(**inputs).aux_loss
    assert isinstance(switch, AuxLossSwitch) and switch.stock is stock
    _interrupt(second)
    unpatch(second)
    assert _find_function() is switch
    assert torch.equal(first(**inputs).aux_loss, want)
    unpatch(first)
    assert _find_function() is stock
    assert torch.equal(copied(**inputs).aux_loss, want), "a copy must install the switch again"
    unpatch(copied)
    assert _find_function() is stock


def test_a_model_can_be_copied_after_an_interrupted_forward() -> None:
    """The copy leaves out the router logits of the forward, because torch cannot copy them."""
    model, inputs = patch(tiny(**MODEL), aux_loss_per_layer=True), _make_inputs()
    want = model(**inputs).aux_loss
    _interrupt(model)
    copied = copy.deepcopy(model)
    for other in (copied, model):
        assert torch.equal(other(**inputs).aux_loss, want)


def _interrupt_on_ranks(rank: int, world: int) -> None:
    model, count = apply_ep_fsdp2(tiny(**MODEL), ep_size=2), torch.tensor(20)
    inputs = _make_inputs(rank)
    before = model(**inputs, num_items_in_batch=count)
    assert type(before.router_logits) is tuple
    coefficients = []
    handle = model.lm_head.register_forward_pre_hook(
        lambda *_: coefficients.append(model.router_aux_loss_coef)
    )
    _interrupt(model, num_items_in_batch=count)
    handle.remove()
    assert coefficients == [MODEL["router_aux_loss_coef"]] == [model.router_aux_loss_coef]
    stock = tiny(**MODEL)
    want = stock(**inputs).aux_loss
    assert torch.equal(want, tiny(**MODEL)(**inputs).aux_loss)
    dist.barrier()
    after = model(**inputs, num_items_in_batch=count)
    assert torch.equal(after.loss, before.loss) and torch.equal(after.aux_loss, before.aux_loss)
    added = before.loss - model(**inputs, num_items_in_batch=count, output_router_logits=False).loss
    share = MODEL["router_aux_loss_coef"] * before.aux_loss / world
    assert_close("aux loss in the loss", added, share, 1e-6)  # HF's cross-entropy is in fp32


def test_an_interrupted_forward_on_two_ranks_changes_neither_coefficient_nor_loss() -> None:
    run_ranks(_interrupt_on_ranks, 2)
