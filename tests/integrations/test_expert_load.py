"""Test that `ExpertLoadCallback` adds the expert load to the logs, and draws a heat map."""

import builtins
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.launched import launched
from support.tiny_models import batch, tiny
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_moe_ep import ExpertLoadCallback, expert_load, patch
from hf_moe_ep.integrations.expert_load import _Panel

NAMES = {
    "expert_load/worst_layer",
    "expert_load/mean_layer",
    "expert_load/worst_rank",
    "expert_load/dead_experts",
    "expert_load/relative_entropy",
}
PAIRS_OF_A_ROW = 9 * 2


class _Tracker(TrainerCallback):
    """Records logs. Like callbacks of tensorboard and wandb, it precedes the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


class _LogByHand(TrainerCallback):
    """Logs a loss at other times than the Trainer, as users do on rank 0 alone."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.log({"loss": 0.0, "by_hand": 1.0})


class _TrainerThatResets(Trainer):
    """A Trainer that resets `should_log` before it logs, as the trainers of ms-swift do."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.control.should_log = False
        super().log(*args, **kwargs)


def _train(
    folder: Path | str, callback: ExpertLoadCallback, *, steps: int = 4, **options: Any
) -> tuple[Trainer, _Tracker]:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": steps,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    args = TrainingArguments(**(defaults | options.get("arguments", {})))
    columns = batch(tiny(), 32, 9)
    rows = [{name: value[row] for name, value in columns.items()} for row in range(32)]
    tracker = _Tracker()
    trainer = options.get("trainer", Trainer)(
        model=options.get("model") or patch(tiny(dtype=torch.float32)),
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[tracker, callback],
    )
    if options.get("logs_by_hand"):
        trainer.add_callback(_LogByHand(trainer))
    trainer.train(**options.get("train", {}))
    return trainer, tracker


def test_the_load_is_in_the_log_of_the_loss_that_trackers_get(tmp_path: Path) -> None:
    trainer, tracker = _train(tmp_path, ExpertLoadCallback())
    for logs in (trainer.state.log_history, tracker.logs):
        losses = [entry for entry in logs if "loss" in entry]
        assert len(losses) == 4
        assert all(entry.keys() >= NAMES for entry in losses)
        assert not any(NAMES & entry.keys() for entry in logs if "loss" not in entry)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            assert 1 <= entry["expert_load/mean_layer"] <= entry["expert_load/worst_layer"] <= 4
            assert 0 < entry["expert_load/relative_entropy"] <= 1
            assert entry["expert_load/worst_rank"] == 1  # there is only one rank
    # Evaluation is not counted. The callback does not reset the counts of `expert_load`.
    assert expert_load(trainer.model).counts.sum(1).tolist() == [4 * 2 * PAIRS_OF_A_ROW] * 2


def test_a_trainer_that_resets_should_log_before_it_logs_has_the_load(tmp_path: Path) -> None:
    trainer, _ = _train(tmp_path, ExpertLoadCallback(), trainer=_TrainerThatResets)
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and all(entry.keys() >= NAMES for entry in losses)


def test_a_loss_that_one_rank_logs_by_hand_needs_no_other_rank(tmp_path: Path) -> None:
    """The load is summed over all ranks, so it is in the Trainer's own logs alone."""
    options: dict[str, Any] = {"arguments": {"logging_steps": 2}, "logs_by_hand": True}
    trainer, _ = _train(tmp_path, ExpertLoadCallback(), **options)
    history = trainer.state.log_history
    assert sum("by_hand" in entry for entry in history) == 4
    assert [e["step"] for e in history if e.keys() >= NAMES and "by_hand" not in e] == [2, 4]
    assert not any("by_hand" in entry and NAMES & entry.keys() for entry in history)


def test_with_every_2_a_log_covers_two_steps(tmp_path: Path) -> None:
    callback = ExpertLoadCallback(every=2, heat_map=tmp_path / "maps" / "load.png")
    model = patch(tiny(dtype=torch.float32))
    # These tokens precede the training and must not be counted.
    model(**batch(model, 2, 5)).loss.backward()
    trainer, _ = _train(tmp_path, callback, steps=5, model=model)
    steps = [e["step"] for e in trainer.state.log_history if NAMES & e.keys()]
    assert steps == [2, 4]
    assert (tmp_path / "maps" / "load.png").read_bytes().startswith(b"\x89PNG")
    for panel, expected in zip(callback._panels, [(1, 2), (3, 4)], strict=True):
        assert (panel.first, panel.last) == expected
        assert panel.counts.sum(1).tolist() == [2 * 2 * PAIRS_OF_A_ROW] * 2


@pytest.mark.slow
def test_the_load_of_experts_with_adapters_is_logged(tmp_path: Path) -> None:
    model = patch(with_lora(tiny(dtype=torch.float32), 2))
    trainer, _ = _train(tmp_path, ExpertLoadCallback(), model=model)
    assert sum(entry.keys() >= NAMES for entry in trainer.state.log_history) == 4
    load = expert_load(trainer.model)
    assert load.layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert load.counts.sum(1).tolist() == [4 * 2 * PAIRS_OF_A_ROW] * 2


def test_merged_panels_of_a_long_run_keep_all_counts(tmp_path: Path) -> None:
    callback = ExpertLoadCallback(heat_map=tmp_path / "load.png")
    for step in range(1, 15):
        callback._add_panel(_Panel(step, step, torch.tensor([[step, 1]])))
    assert [(panel.first, panel.last) for panel in callback._panels][5:] == [
        (11, 12),
        (13, 13),
        (14, 14),
    ]
    assert sum(panel.counts for panel in callback._panels).tolist() == [[15 * 7, 14]]
    assert len(callback._panels) <= 12


def test_wrong_uses_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"every must be a whole number of steps >= 1"):
            ExpertLoadCallback(every=every)
    patch(tiny())  # installs the wrappers
    with pytest.raises(ValueError, match="this model is not patched"):
        _train(tmp_path, ExpertLoadCallback(), model=tiny(dtype=torch.float32))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(ImportError, match=r"load.png.*pip install matplotlib"):
        ExpertLoadCallback(heat_map="load.png")


def test_the_error_without_matplotlib_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_moe_ep import ExpertLoad

    stock = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return stock(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(__import__("sys").modules, "hf_moe_ep.routing.heat_map", raising=False)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        ExpertLoad(torch.ones(1, 2, dtype=torch.int64), ("a",)).plot("load.png")


def _check_log_on_ranks(config: dict[str, Any], rank: int, world: int, folder: str) -> None:
    """The log counts the tokens of all ranks, also in a run that resumes from a checkpoint."""
    with launched():
        model = patch(tiny(dtype=torch.float32), **config)
        picture = Path(folder, "load.png")
        callback = ExpertLoadCallback(heat_map=picture)
        saving = {"save_strategy": "steps", "save_steps": 2}
        options = {"arguments": saving | {"gradient_accumulation_steps": 2}}
        trainer, _ = _train(folder, callback, model=model, **options)
        logged = [e for e in trainer.state.log_history if NAMES & e.keys()]
        assert [e["step"] for e in logged] == [1, 2, 3, 4]
        data_ranks = world // config.get("sp_size", 1)
        rows = 2 * 2 * data_ranks
        for panel in callback._panels:
            assert panel.counts.sum(1).tolist() == [rows * PAIRS_OF_A_ROW] * 2
    assert picture.exists()
    with launched():
        untrained = patch(tiny(dtype=torch.float32, seed=3), **config)
        resume = {"train": {"resume_from_checkpoint": f"{folder}/checkpoint-2"}}
        trainer, _ = _train(folder, ExpertLoadCallback(), model=untrained, **options, **resume)
    logged_again = [e for e in trainer.state.log_history if NAMES & e.keys()]
    assert [{name: e[name] for name in NAMES} for e in logged_again] == [
        {name: e[name] for name in NAMES} for e in logged
    ]


CHECKS = on_ranks(
    2,
    {
        "ep 2": partial(_check_log_on_ranks, {"ep_size": 2}),
        "sp 2": partial(_check_log_on_ranks, {"ep_size": 1, "sp_size": 2}),
    },
    slow=True,
)


@pytest.mark.parametrize("claim", CHECKS)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
