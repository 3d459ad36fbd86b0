"""Liger and `patch` work on one model in either order; other replaced forwards are refused.

Liger's kernels need a GPU, so a fake with the same interface runs here (`test_real_liger.py` runs
Liger itself). The reference is a stock model in one process, with the same fake and the whole
batch.
"""

import copy
import functools
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.fakes.liger import installed_liger
from support.launched import launched
from support.liger_runs import (
    ROUTED,
    assert_logged,
    gradients_on_ranks,
    steps_of_one_process,
    trained,
    whole_batch,
)
from support.tiny_models import tiny
from torch import Tensor, nn
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch


def the_trainer_keeps_our_experts_and_the_global_aux_loss(
    rank: int, world: int, folder: str
) -> None:
    """With `use_liger_kernel=True`, losses and gradient norms equal the values of one process.

    Liger computes norms, rotary embedding and cross-entropy. Its fused head replaces the forward of
    the causal LM, but calls our aux loss.
    """
    with installed_liger() as liger, launched():
        stock = tiny(dtype=torch.float32, **ROUTED)
        liger._apply_liger_kernel_to_instance(stock)
        wanted, _ = steps_of_one_process(stock, 3)
    with installed_liger() as liger, launched():
        trainer = trained(tiny(dtype=torch.float32, **ROUTED), world, folder)
        assert liger.CALLS.keys() == {"norm", "rope", "loss"}, liger.CALLS
    assert_logged(trainer, wanted)


def _apply_to_this_model(liger: Any) -> nn.Module:
    model = tiny(**ROUTED)
    liger._apply_liger_kernel_to_instance(model)
    return model


def _apply_to_another_model(liger: Any) -> nn.Module:
    """Apply Liger to another model: all models built later have Liger's experts class as well."""
    liger._apply_liger_kernel_to_instance(tiny())
    model = tiny(**ROUTED)
    assert type(model.model.layers[0].mlp.experts).__name__ == "LigerExperts"
    return model


def _apply_to_classes(liger: Any) -> nn.Module:
    """Apply Liger as its README says: the fused head becomes the forward of the model's class."""
    liger.apply_liger_kernel_to_qwen3_moe()
    model = tiny(**ROUTED)
    assert type(model).forward is liger.lce_forward
    return model


def _apply_all_but_experts(liger: Any) -> nn.Module:
    """Apply Liger except its experts. Liger's fused head would compute one aux loss per rank."""
    model = tiny(**ROUTED)
    liger._apply_liger_kernel_to_instance(model, swiglu=False)
    return model


FIRST: dict[str, Callable[[Any], nn.Module]] = {
    "to this model": _apply_to_this_model,
    "to another model": _apply_to_another_model,
    "to classes": _apply_to_classes,
}


def liger_may_be_applied_before_patch(rank: int, world: int) -> None:
    """Gradients equal stock's gradients. Our experts replace Liger's experts; the rest stays."""
    for name, make in {**FIRST, "all but its experts": _apply_all_but_experts}.items():
        with installed_liger() as liger:
            model = make(liger)
            want = gradients_on_ranks(copy.deepcopy(model), 0, 1)
            liger.CALLS.clear()
            apply_ep_fsdp2(model, ep_size=world)
            got = gradients_on_ranks(model, rank, world)
            assert "experts" not in liger.CALLS and liger.CALLS["norm"] > 0, (name, liger.CALLS)
        for key, gradient in want.items():
            # Liger computes the loss in fp32, as stock does.
            assert_close(f"{name}: {key}", got[key], gradient, 1e-5)


def fused_loss_of_slices_is_refused(rank: int, world: int) -> None:
    """With `sp_size` a rank has hidden states of a slice, but labels of the whole sequence."""
    with installed_liger() as liger:
        model = apply_ep_fsdp2(tiny(), sp_size=world)
        liger._apply_liger_kernel_to_instance(model)
        with pytest.raises(ValueError, match=r"slice.*fused_linear_cross_entropy': False"):
            model(**whole_batch(model))


ON_TWO_RANKS = [
    the_trainer_keeps_our_experts_and_the_global_aux_loss,
    liger_may_be_applied_before_patch,
    fused_loss_of_slices_is_refused,
]


@pytest.mark.parametrize("claim", on_ranks(2, *ON_TWO_RANKS))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("make", FIRST.values(), ids=FIRST.keys())
def test_after_unpatch_liger_computes_the_experts(make: Callable[[Any], nn.Module]) -> None:
    with installed_liger() as liger:
        model = make(liger)
        experts: Any = model.get_submodule("model.layers.0.mlp.experts")
        before = dict(vars(experts))
        patch(model)
        model(**whole_batch(model))
        assert "experts" not in liger.CALLS
        unpatch(model)
        assert vars(experts).keys() == before.keys()
        model(**whole_batch(model))
        assert liger.CALLS["experts"] == len(model.get_submodule("model.layers"))  # type: ignore[arg-type]


def test_the_error_for_liger_on_a_cpu_names_liger() -> None:
    """Triton does not compile for a CPU, and its own error names only drivers."""
    with installed_liger() as liger, mock.patch.dict(sys.modules):
        model = patch(tiny())
        liger._apply_liger_kernel_to_instance(model)
        sys.modules["liger_kernel.ops"] = ModuleType("liger_kernel.ops")
        with (
            mock.patch.dict("os.environ", {"TRITON_INTERPRET": "0"}),
            pytest.raises(ValueError, match=r"Liger computes .*need a GPU.*use_liger_kernel=True"),
        ):
            model(**whole_batch(model))


def _foreign_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("this must never run")


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("path", ["model.layers.1.mlp.experts", "model.layers.1.mlp"])
def test_the_error_for_a_replaced_forward_names_the_replacement(path: str) -> None:
    """After `patch` the next forward raises the error. Wrappers of our forward may stay."""
    model: Any = tiny()
    module: Any = model.get_submodule(path)
    module.forward = MethodType(_foreign_forward, module)
    with pytest.raises(
        ValueError, match=rf"forward of {path} .*replaced before patch\(\).*_foreign_forward"
    ):
        patch(model)
    del module.forward
    patch(model)
    wanted = model(**whole_batch(model)).loss
    our_forward = module.forward
    module.forward = MethodType(_foreign_forward, module)
    with pytest.raises(
        ValueError, match=rf"forward of {path} .*replaced since patch\(\).*_foreign_forward"
    ):
        model(**whole_batch(model))
    for wrapper in (
        functools.wraps(our_forward)(lambda *args: our_forward(*args)),
        lambda *args: our_forward(*args),
        lambda *args, forward=our_forward: forward(*args),
        functools.partial(_call, our_forward),
    ):
        module.forward = wrapper
        assert torch.equal(model(**whole_batch(model)).loss, wanted)


def test_the_error_for_a_replaced_forward_of_a_class_names_the_replacement() -> None:
    """The class is changed before and after `patch`. Wrappers and subclasses may stay."""
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock
    stock = block.forward
    wanted = tiny()(**whole_batch(tiny())).loss

    @functools.wraps(stock)
    def around(self: Any, hidden_states: Tensor) -> Tensor:
        return stock(self, hidden_states)

    class Own(block):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor) -> Any:
            return super().forward(hidden_states)

    with mock.patch.object(block, "forward", _foreign_forward):
        with pytest.raises(
            ValueError,
            match=r"forward of .*SparseMoeBlock, the class of .*mlp, was .*_foreign_forward",
        ):
            patch(tiny())
    model: Any = patch(tiny())
    with mock.patch.object(block, "forward", _foreign_forward):
        with pytest.raises(ValueError, match=r"replaced since patch\(\).*_foreign_forward"):
            model(**whole_batch(model))
    for owner, name, new in (
        (block, "forward", around),
        (modeling_qwen3_moe, "Qwen3MoeSparseMoeBlock", Own),
    ):
        with mock.patch.object(owner, name, new):
            model = patch(tiny())
            assert torch.equal(model(**whole_batch(model)).loss, wanted)
