"""Liger itself under a patched model, where liger-kernel is installed; else its stand-in is all.

On a CPU Triton's interpreter runs its rotary embedding and its fused linear cross-entropy, not its
experts, which must never run here, nor its norms (libdevice), which are left out.
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
from support.parity import full_tensor
from support.tiny_models import batch, tiny
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from hf_moe_ep import apply_ep_fsdp2, patch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"
    ),
]
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
ROWS, LENGTH, RATE = 4, 9, 0.5
_REPLACED = ("apply_rotary_pos_emb", "Qwen3MoeRMSNorm", "Qwen3MoeExperts")


@contextmanager
def real_liger() -> Iterator[Any]:
    """Yield `liger_kernel.transformers`, interpreted; what it replaces for good is put back."""
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


def _whole_batch(model: Any) -> dict[str, Tensor]:
    whole = batch(model, ROWS, LENGTH, seed=3, pad=5)
    whole["labels"][0, 3:] = -100
    return whole


def _stock() -> Any:
    return tiny(dtype=torch.float32, **ROUTED)


def _to_the_instance(liger: Any) -> Any:
    model = _stock()
    liger._apply_liger_kernel_to_instance(model, rms_norm=False)
    return model


def _to_its_classes(liger: Any) -> Any:
    """As Liger's README does, and AutoLigerKernelForCausalLM: before the model is built."""
    liger.apply_liger_kernel_to_qwen3_moe(rms_norm=False)
    model = _stock()
    assert type(model.model.layers[0].mlp.experts).__name__ == "LigerExperts"
    assert type(model).forward.__module__.startswith("liger_kernel")
    return model


FIRST: dict[str, Callable[[Any], Any]] = {
    "to the instance": _to_the_instance,
    "to its classes": _to_its_classes,
}


def _wanted(steps: int = 1) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, gradient norm) of stock without Liger in one process, and the last gradients."""
    model = _stock()
    whole = _whole_batch(model)
    count = whole["labels"][:, 1:].ne(-100).sum()
    found = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(**whole, num_items_in_batch=count).loss
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        found.append((float(loss.detach()), float(norm)))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return found, gradients


def liger_first(rank: int, world: int) -> None:
    """Its norms, rotary embedding and loss, our experts, the global aux loss: stock's gradients."""
    _, wanted = _wanted()
    for name, make in FIRST.items():
        with real_liger() as liger:
            model = apply_ep_fsdp2(make(liger), ep_size=world)
            whole = _whole_batch(model)
            count = whole["labels"][:, 1:].ne(-100).sum()
            mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
            rows = {key: value[mine] for key, value in whole.items()}
            loss = model(**rows, num_items_in_batch=count).loss
            (loss * world).backward()
            for key, parameter in model.named_parameters():
                assert_close(f"{name}: {key}", full_tensor(parameter.grad), wanted[key], 1e-4)
            model.eval()(**rows)  # with logits, through the head


def the_trainer_applies_it(rank: int, world: int, folder: str) -> None:
    """`use_liger_kernel=True`: losses and gradient norms of one stock process."""
    wanted, _ = _wanted(4)
    with real_liger(), launched():
        model: Any = _stock()
        whole = _whole_batch(model)
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=3,
            per_device_train_batch_size=ROWS // world,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            optim="sgd",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1e9,
            use_liger_kernel=True,
            liger_kernel_config={"rms_norm": False},
        )
        data = [{key: value[row] for key, value in whole.items()} for row in range(ROWS)]
        trainer = Trainer(model=patch(model, ep_size=world), args=args, train_dataset=data)
        trainer.train()
        assert (
            inspect.unwrap(model.forward).__module__ == "liger_kernel.transformers.model.qwen3_moe"
        )
        at_the_end = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert at_the_end == pytest.approx(wanted[-1][0], rel=1e-5)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for log, (loss, norm) in zip(logs, wanted[:3], strict=True):
        assert log["loss"] == pytest.approx(loss, rel=1e-5)
        assert log["grad_norm"] == pytest.approx(norm, rel=1e-4)


def fused_loss_of_slices_is_refused(rank: int, world: int) -> None:
    for make in FIRST.values():
        with real_liger() as liger:
            model = apply_ep_fsdp2(make(liger), sp_size=world)
            with pytest.raises(ValueError, match=r"slices.*fused_linear_cross_entropy': False"):
                model(**_whole_batch(model))


CLAIMS = on_ranks(
    2,
    liger_first,
    the_trainer_applies_it,
    fused_loss_of_slices_is_refused,
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
