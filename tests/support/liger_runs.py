"""Training runs that the tests of Liger and of its fake share."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_moe_ep import patch
from support.parity import full_tensor
from support.tiny_models import batch

ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
ROWS, LENGTH, RATE = 4, 9, 0.5
Steps = list[tuple[float, float]]


def whole_batch(model: nn.Module) -> dict[str, Tensor]:
    """Make a batch whose rows have different numbers of labels, so the ranks' means differ."""
    whole = batch(model, ROWS, LENGTH, seed=3, pad=5)  # type: ignore[arg-type]
    whole["labels"][0, 3:] = -100
    return whole


def steps_of_one_process(model: Any, steps: int) -> tuple[Steps, dict[str, Tensor]]:
    """Train with SGD. Return (loss, gradient norm) of each step, and the last gradients."""
    whole = whole_batch(model)
    count = whole["labels"][:, 1:].ne(-100).sum()
    results = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(**whole, num_items_in_batch=count).loss
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        results.append((float(loss.detach()), float(norm)))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return results, gradients


def own_rows(model: nn.Module, rank: int, world: int) -> dict[str, Tensor]:
    """Return this rank's rows of the whole batch."""
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return {key: value[rows] for key, value in whole_batch(model).items()}


def gradients_on_ranks(model: Any, rank: int, world: int) -> dict[str, Tensor]:
    """Run this rank's rows, and return the gathered gradients of the whole batch."""
    count = whole_batch(model)["labels"][:, 1:].ne(-100).sum()
    loss = model(**own_rows(model, rank, world), num_items_in_batch=count).loss
    (loss * world).backward()
    return {name: full_tensor(p.grad) for name, p in model.named_parameters()}


def trained(model: Any, world: int, folder: str, **options: Any) -> Trainer:
    """Patch a model, and train it for three steps of the Trainer with `use_liger_kernel=True`."""
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=ROWS // world,
        logging_steps=1,
        logging_first_step=True,
        report_to=[],
        save_strategy="no",
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        use_liger_kernel=True,
        **options,
    )
    whole = whole_batch(model)
    data = [{key: value[row] for key, value in whole.items()} for row in range(ROWS)]
    trainer = Trainer(model=patch(model, ep_size=world), args=args, train_dataset=data)
    trainer.train()
    return trainer


def assert_logged(trainer: Trainer, wanted: Steps) -> None:
    """Compare the logged losses and norms. Budgets allow for fp32 rounding, which grows by step."""
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == len(wanted)
    for log, (loss, norm) in zip(logs, wanted, strict=True):
        assert log["loss"] == pytest.approx(loss, rel=1e-5)
        assert log["grad_norm"] == pytest.approx(norm, rel=1e-4)
