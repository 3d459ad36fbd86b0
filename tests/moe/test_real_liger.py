"""The real Liger works with a patched model, if liger-kernel is installed.

On a CPU Triton's interpreter runs Liger's rotary embedding and its fused linear cross-entropy.
Liger's experts must never run, because our experts replace them. Liger's norms are left out,
because the interpreter has no libdevice.
"""

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import launched
from support.liger_runs import (
    ROUTED,
    assert_logged,
    gradients_on_ranks,
    own_rows,
    steps_of_one_process,
    trained,
    whole_batch,
)
from support.tiny_models import tiny
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from hf_moe_ep import apply_ep_fsdp2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"
    ),
]
_REPLACED = ("apply_rotary_pos_emb", "Qwen3MoeRMSNorm", "Qwen3MoeExperts")


@contextmanager
def real_liger() -> Iterator[Any]:
    """Yield `liger_kernel.transformers` under the interpreter; restore what Liger has replaced."""
    before = {name: getattr(modeling, name) for name in _REPLACED}
    forward = modeling.Qwen3MoeForCausalLM.forward
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        import liger_kernel.transformers

        try:
            yield liger_kernel.transformers
        finally:
            for name, value in before.items():
                setattr(modeling, name, value)
            modeling.Qwen3MoeForCausalLM.forward = forward  # type: ignore[method-assign]


def _make_stock() -> Any:
    return tiny(dtype=torch.float32, **ROUTED)


def _apply_to_the_instance(liger: Any) -> Any:
    model = _make_stock()
    liger._apply_liger_kernel_to_instance(model, rms_norm=False)
    return model


def _apply_to_its_classes(liger: Any) -> Any:
    """Apply Liger before the model is built, as its README and AutoLigerKernelForCausalLM do."""
    liger.apply_liger_kernel_to_qwen3_moe(rms_norm=False)
    model = _make_stock()
    assert type(model.model.layers[0].mlp.experts).__name__ == "LigerExperts"
    assert type(model).forward.__module__.startswith("liger_kernel")
    return model


FIRST: dict[str, Callable[[Any], Any]] = {
    "to the instance": _apply_to_the_instance,
    "to its classes": _apply_to_its_classes,
}


def liger_may_be_applied_before_patch(rank: int, world: int) -> None:
    """Gradients equal stock's gradients: our experts and the global aux loss replace Liger's."""
    _, wanted = steps_of_one_process(_make_stock(), 1)
    for name, make in FIRST.items():
        with real_liger() as liger:
            model = apply_ep_fsdp2(make(liger), ep_size=world)
            for key, gradient in gradients_on_ranks(model, rank, world).items():
                assert_close(f"{name}: {key}", gradient, wanted[key], 1e-4)
            model.eval()(**own_rows(model, rank, world))  # in evaluation the head makes logits


def the_trainer_with_liger_equals_stock(rank: int, world: int, folder: str) -> None:
    """With `use_liger_kernel=True`, losses and gradient norms equal one stock process."""
    wanted, _ = steps_of_one_process(_make_stock(), 4)
    with real_liger(), launched():
        model = _make_stock()
        trainer = trained(model, world, folder, liger_kernel_config={"rms_norm": False})
        assert (
            inspect.unwrap(model.forward).__module__ == "liger_kernel.transformers.model.qwen3_moe"
        )
        eval_loss = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert eval_loss == pytest.approx(wanted[-1][0], rel=1e-5)
    assert_logged(trainer, wanted[:3])


def fused_loss_of_slices_is_refused(rank: int, world: int) -> None:
    for make in FIRST.values():
        with real_liger() as liger:
            model = apply_ep_fsdp2(make(liger), sp_size=world)
            with pytest.raises(ValueError, match=r"slice.*fused_linear_cross_entropy': False"):
                model(**whole_batch(model))


CLAIMS = on_ranks(
    2,
    liger_may_be_applied_before_patch,
    the_trainer_with_liger_equals_stock,
    fused_loss_of_slices_is_refused,
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
