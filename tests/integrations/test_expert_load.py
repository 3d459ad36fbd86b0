"""`ExpertLoadCallback`: what the Trainer logs of the expert load, where, and the picture of it."""

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
from hf_moe_ep.integrations.expert_load import _Map

NAMES = {
    "expert_load/worst_layer",
    "expert_load/mean_layer",
    "expert_load/worst_rank",
    "expert_load/dead_experts",
    "expert_load/relative_entropy",
}
PAIRS_OF_A_ROW = 9 * 2


class _Tracker(TrainerCallback):
    """Stands where tensorboard's and wandb's callbacks stand: before those of the user."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def _train(
    folder: Path | str, callback: ExpertLoadCallback, *, steps: int = 4, **given: Any
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
    args = TrainingArguments(**(defaults | given.get("arguments", {})))
    one = batch(tiny(), 32, 9)
    rows = [{name: value[row] for name, value in one.items()} for row in range(32)]
    tracker = _Tracker()
    trainer = Trainer(
        model=given.get("model") or patch(tiny(dtype=torch.float32)),
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[tracker, callback],
    )
    trainer.train(**given.get("train", {}))
    return trainer, tracker


def test_it_is_logged_with_the_loss_before_trackers_see_it(tmp_path: Path) -> None:
    trainer, tracker = _train(tmp_path, ExpertLoadCallback())
    for logs in (trainer.state.log_history, tracker.seen):
        losses = [entry for entry in logs if "loss" in entry]
        assert len(losses) == 4
        assert all(entry.keys() >= NAMES for entry in losses)
        assert not any(NAMES & entry.keys() for entry in logs if "loss" not in entry)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            assert 1 <= entry["expert_load/mean_layer"] <= entry["expert_load/worst_layer"] <= 4
            assert 0 < entry["expert_load/relative_entropy"] <= 1
            assert entry["expert_load/worst_rank"] == 1  # of one rank
    # Evaluation in between is not counted, and the callback's zero is its own.
    assert expert_load(trainer.model).counts.sum(1).tolist() == [4 * 2 * PAIRS_OF_A_ROW] * 2


def test_every_second_step_and_the_figures_of_the_steps_between(tmp_path: Path) -> None:
    callback = ExpertLoadCallback(every=2, heat_map=tmp_path / "maps" / "load.png")
    model = patch(tiny(dtype=torch.float32))
    model(**batch(model, 2, 5)).loss.backward()  # before training, which begins at zero
    trainer, _ = _train(tmp_path, callback, steps=5, model=model)
    steps = [e["step"] for e in trainer.state.log_history if NAMES & e.keys()]
    assert steps == [2, 4]
    assert (tmp_path / "maps" / "load.png").read_bytes().startswith(b"\x89PNG")
    for one, want in zip(callback._maps, [(1, 2), (3, 4)], strict=True):
        assert (one.first, one.last) == want
        assert one.counts.sum(1).tolist() == [2 * 2 * PAIRS_OF_A_ROW] * 2


@pytest.mark.slow
def test_adapters_on_experts_are_no_obstacle(tmp_path: Path) -> None:
    model = patch(with_lora(tiny(dtype=torch.float32), 2))
    trainer, _ = _train(tmp_path, ExpertLoadCallback(), model=model)
    assert sum(entry.keys() >= NAMES for entry in trainer.state.log_history) == 4
    load = expert_load(trainer.model)
    assert load.layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert load.counts.sum(1).tolist() == [4 * 2 * PAIRS_OF_A_ROW] * 2


def test_maps_of_a_long_run_are_merged_and_lose_nothing(tmp_path: Path) -> None:
    callback = ExpertLoadCallback(heat_map=tmp_path / "load.png")
    for step in range(1, 15):
        callback._remember(_Map(step, step, torch.tensor([[step, 1]])))
    assert [(one.first, one.last) for one in callback._maps][5:] == [(11, 12), (13, 13), (14, 14)]
    assert sum(one.counts for one in callback._maps).tolist() == [[15 * 7, 14]]
    assert len(callback._maps) <= 12


def test_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_plot_without_matplotlib_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
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


def _on_ranks(config: dict[str, Any], rank: int, world: int, folder: str) -> None:
    """The same values on all ranks, one picture; of all ranks' tokens, resumed as well."""
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
        padded = 10 if config.get("sp_size", 1) == 2 else 9
        for one in callback._maps:
            assert one.counts.sum(1).tolist() == [rows * padded * 2] * 2
    assert picture.exists()
    with launched():
        other = patch(tiny(dtype=torch.float32, seed=3), **config)
        resume = {"train": {"resume_from_checkpoint": f"{folder}/checkpoint-2"}}
        trainer, _ = _train(folder, ExpertLoadCallback(), model=other, **options, **resume)
    again = [e for e in trainer.state.log_history if NAMES & e.keys()]
    assert [{name: e[name] for name in NAMES} for e in again] == [
        {name: e[name] for name in NAMES} for e in logged
    ]


CHECKS = on_ranks(
    2,
    {
        "ep 2": partial(_on_ranks, {"ep_size": 2}),
        "sp 2": partial(_on_ranks, {"ep_size": 1, "sp_size": 2}),
    },
    slow=True,
)


@pytest.mark.parametrize("claim", CHECKS)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
