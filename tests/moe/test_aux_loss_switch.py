"""The function that `patch` puts into a file of transformers: whose loss it computes, how long.

Stock models and patched ones of one class live in one process, and a forward may be interrupted.
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


def _inputs(seed: int = 0) -> dict[str, Tensor]:
    return batch(tiny(), 2, 7, seed=seed, pad=2)


def _function() -> Any:
    return vars(modeling_qwen3_moe)[FUNCTION]


def _interrupt(model: nn.Module, **more: Tensor) -> None:
    """Run a forward up to the head: the aux loss is not computed, hooks behind it do not run."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(**_inputs(), **more)
    handle.remove()


def test_models_of_one_class_each_have_their_own_loss() -> None:
    """Per layer, over all layers, and stock, in any order."""
    stock, inputs = tiny(**MODEL), _inputs()
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


def test_the_last_patched_model_gives_the_function_back() -> None:
    gc.collect()
    unpatch(patch(tiny(**MODEL)))  # clears the users that other tests have left
    stock, inputs = _function(), _inputs()
    assert not isinstance(stock, AuxLossSwitch)
    first, second = (patch(tiny(**MODEL), aux_loss_per_layer=True) for _ in range(2))
    copied = copy.deepcopy(second)
    switch, want = _function(), first(**inputs).aux_loss
    assert isinstance(switch, AuxLossSwitch) and switch.stock is stock
    _interrupt(second)
    unpatch(second)
    assert _function() is switch
    assert torch.equal(first(**inputs).aux_loss, want)
    unpatch(first)
    assert _function() is stock
    assert torch.equal(copied(**inputs).aux_loss, want), "a copy asks for the switch again"
    unpatch(copied)
    assert _function() is stock


def test_an_interrupted_model_is_copied_without_the_forward_that_was_interrupted() -> None:
    """Its router logits are part of autograd's graph, and torch copies no such tensor."""
    model, inputs = patch(tiny(**MODEL), aux_loss_per_layer=True), _inputs()
    want = model(**inputs).aux_loss
    _interrupt(model)
    copied = copy.deepcopy(model)
    for one in (copied, model):
        assert torch.equal(one(**inputs).aux_loss, want)


def _interrupted_on_ranks(rank: int, world: int) -> None:
    """The coefficient stays; the loss after an interrupted forward is the loss before it."""
    model, count = apply_ep_fsdp2(tiny(**MODEL), ep_size=2), torch.tensor(20)
    inputs = _inputs(rank)
    before = model(**inputs, num_items_in_batch=count)
    assert type(before.router_logits) is tuple
    seen = []
    handle = model.lm_head.register_forward_pre_hook(
        lambda *_: seen.append(model.router_aux_loss_coef)
    )
    _interrupt(model, num_items_in_batch=count)
    handle.remove()
    assert seen == [MODEL["router_aux_loss_coef"]] == [model.router_aux_loss_coef]
    stock = tiny(**MODEL)
    want = stock(**inputs).aux_loss
    assert torch.equal(want, tiny(**MODEL)(**inputs).aux_loss)
    dist.barrier()
    after = model(**inputs, num_items_in_batch=count)
    assert torch.equal(after.loss, before.loss) and torch.equal(after.aux_loss, before.aux_loss)
    divided = (
        before.loss - model(**inputs, num_items_in_batch=count, output_router_logits=False).loss
    )
    share = MODEL["router_aux_loss_coef"] * before.aux_loss / world
    assert_close("its share", divided, share, 1e-6)  # HF's cross-entropy is in fp32


def test_an_interrupted_forward_on_two_ranks() -> None:
    run_ranks(_interrupted_on_ranks, 2)
