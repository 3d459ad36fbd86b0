"""`ExpertLoadCallback(rebalance_every=n)` under the Trainer does not change losses or checkpoints.

Each run is compared with a run of the same seed without the callback. Moved experts sum in another
order, and AdamW increases this fp32 rounding. A wrong expert would change a loss by far more than
1e-5.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.hub_files import assert_equal, read_all
from support.launched import launched
from support.parity import whole_parameters, whole_state
from support.tiny_models import batch, tiny
from support.trainer_runs import AFTER_ADAMW, FP32_BUDGET
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_moe_ep import (
    ExpertLoadCallback,
    balance_experts,
    expert_load,
    experts_in_hub_order,
    patch,
)
from hf_moe_ep.placement.hub_order import has_moved_experts
from hf_moe_ep.state import patched_state

THRESHOLD = 1.01  # with few tokens the load always exceeds this, so every balance moves experts


def _train(
    folder: Path, *, wrap: Any = None, seed: int = 0, resume: Any = None, **options: Any
) -> Trainer:
    # A checkpoint of adapters does not hold the base model, which therefore always has seed 0.
    model: nn.Module = tiny(dtype=torch.float32, seed=0 if wrap else seed)
    if wrap is not None:
        model = wrap(model, seed=seed)
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=6,
        logging_steps=1,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    data = batch(tiny(), 48, 9)
    rows = [{name: value[row] for name, value in data.items()} for row in range(48)]
    callback = ExpertLoadCallback(**options)
    trainer = Trainer(
        model=patch(model, ep_size=2), args=args, train_dataset=rows, callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _read_losses(trainer: Trainer) -> torch.Tensor:
    log = trainer.state.log_history
    return torch.tensor([entry["loss"] for entry in log if "loss" in entry])


def _gather_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    with experts_in_hub_order(trainer.model, trainer.optimizer):
        return whole_parameters(trainer.model)


def _train_and_resume(wrap: Any, rank: int, world: int, folder: str) -> None:
    plain, moving, resuming = (Path(folder, name) for name in ("plain", "moving", "again"))
    options = {"rebalance_every": 2, "threshold": THRESHOLD}
    with launched():
        want = _train(plain, wrap=wrap)
        got = _train(moving, wrap=wrap, **options)
        got.save_model(str(moving / "final"))
        with experts_in_hub_order(got.model, got.optimizer):
            got.save_model(str(moving / "by hand"))
    assert has_moved_experts(patched_state(got.model))
    assert not has_moved_experts(patched_state(want.model))
    assert_close("losses", _read_losses(got), _read_losses(want), FP32_BUDGET)
    trained = _gather_parameters(got)
    for name, parameter in _gather_parameters(want).items():
        assert_close(name, trained[name], parameter, AFTER_ADAMW)
    if wrap is None:
        assert_equal(read_all(moving / "final"), read_all(moving / "by hand"))
    # Resume at step 3, after experts have moved: first with moves at other steps, then without.
    with launched():
        resumed = _train(
            resuming, wrap=wrap, seed=3, resume=str(moving / "checkpoint-3"), rebalance_every=5
        )
    assert_close("resumed", _read_losses(resumed)[-3:], _read_losses(got)[-3:], FP32_BUDGET)
    with launched():
        unmoved = _train(resuming, wrap=wrap, seed=4, resume=str(moving / "checkpoint-3"))
    assert_close(
        "resumed without moves", _read_losses(unmoved)[-3:], _read_losses(got)[-3:], FP32_BUDGET
    )


def _save_and_load_state(rank: int, world: int, folder: str) -> None:
    """Load a state with moved experts after another move, and in a model without moves."""
    with launched():
        accelerator = Accelerator(cpu=True)
        model, optimizer = _prepare(accelerator, seed=0)
        _run_step(accelerator, model, optimizer, rank)
        balance_experts(model, optimizer, expert_load(model))
        assert has_moved_experts(patched_state(model))
        _run_step(accelerator, model, optimizer, rank + 10)
        saved = _gather_state_in_hub_order(model, optimizer)
        accelerator.save_state(f"{folder}/state")
        state_dict = accelerator.get_state_dict(model)
        _run_step(accelerator, model, optimizer, rank + 20)
        balance_experts(model, optimizer, expert_load(model))
        later = _gather_state_in_hub_order(model, optimizer)
        accelerator.load_state(f"{folder}/state")
        assert_equal(_gather_state_in_hub_order(model, optimizer), saved)
        assert any(not torch.equal(later[name], saved[name]) for name in saved)
        if rank == 0:
            assert_equal(state_dict, {name: saved[name] for name in state_dict})
    with launched():
        accelerator = Accelerator(cpu=True)
        unmoved, unmoved_optimizer = _prepare(accelerator, seed=5)
        _run_step(accelerator, unmoved, unmoved_optimizer, rank)
        accelerator.load_state(f"{folder}/state")
        assert not has_moved_experts(patched_state(unmoved))
        assert_equal(_gather_state_in_hub_order(unmoved, unmoved_optimizer), saved)


def _prepare(accelerator: Accelerator, seed: int) -> tuple[Any, Any]:
    model = patch(tiny(dtype=torch.float32, seed=seed), ep_size=2)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def _run_step(accelerator: Accelerator, model: Any, optimizer: Any, seed: int) -> None:
    accelerator.backward(model(**batch(model, 2, 9, seed=seed)).loss)
    optimizer.step()
    optimizer.zero_grad()


def _gather_state_in_hub_order(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    with experts_in_hub_order(model, optimizer):
        return whole_state(model, optimizer)


CHECKS = on_ranks(
    2,
    {
        "Trainer": partial(_train_and_resume, None),
        "Trainer, LoRA": partial(_train_and_resume, with_lora),
        "Accelerate": _save_and_load_state,
    },
    slow=True,
)


@pytest.mark.parametrize("claim", CHECKS)
def test_a_run_with_moves_equals_a_run_without(found: Found, claim: Check) -> None:
    """A state saved after a move can be loaded into a model with any placement."""
    found.raise_if_failed(claim)


def test_invalid_options_and_unsharded_models_are_refused(tmp_path: Path) -> None:
    for steps in (0, 2.5, True):
        with pytest.raises(ValueError, match=r"rebalance_every must be a whole number of steps"):
            ExpertLoadCallback(rebalance_every=steps)
    with pytest.raises(ValueError, match=r"threshold is the load of the busiest rank.*got 0.9"):
        ExpertLoadCallback(threshold=0.9)
    model = patch(tiny())
    for call in (
        partial(balance_experts, model, None, expert_load(model)),
        partial(
            ExpertLoadCallback(rebalance_every=1).on_train_begin, None, _State(), None, model=model
        ),
    ):
        with pytest.raises(ValueError, match=r"between the ranks of an ep group.*is not sharded"):
            call()


class _State:
    global_step = 0
