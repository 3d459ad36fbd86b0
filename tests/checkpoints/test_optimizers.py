"""A checkpoint loads into the same optimizer, a subclass, or none; other optimizers are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.resume import Layout, Run, everything, start, step
from support.tiny_models import tiny

from hf_moe_ep import load_checkpoint, save_checkpoint
from hf_moe_ep.checkpoints.training.state_file import Group, OptimizerState, OptimizerValue
from hf_moe_ep.checkpoints.training.tensors import restore_optimizer

ALONE = Layout("unsharded", 1)


class OwnAdamW(torch.optim.AdamW):
    """A user's subclass that counts steps or logs."""


class SlowAdamW(torch.optim.AdamW):
    """A subclass with an option that AdamW lacks, so its state may differ, too."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["slow"] = 0.9


def _run(kind: type, seed: int = 0) -> Run:
    return start("full", ALONE, seed=seed, optimizer=lambda params: kind(params, lr=0.01))


def _save(folder: Path, kind: type) -> Run:
    run = _run(kind)
    step(run, 0)
    save_checkpoint(folder, run.model, run.optimizer, run.scheduler)
    return run


@pytest.mark.parametrize("kinds", [(torch.optim.AdamW, OwnAdamW), (OwnAdamW, torch.optim.AdamW)])
def test_subclass_and_base_resume_each_other(tmp_path: Path, kinds: tuple[type, type]) -> None:
    run = _save(tmp_path / "one", kinds[0])
    other = _run(kinds[1], seed=5)
    load_checkpoint(tmp_path, other.model, other.optimizer, other.scheduler)
    step(run, 1)
    step(other, 1)
    resumed, expected = everything(other), everything(run)
    assert resumed.keys() == expected.keys()
    for name in expected:
        if torch.is_tensor(expected[name]):
            assert torch.equal(resumed[name], expected[name]), name


@pytest.mark.parametrize(
    ("saved", "new", "message"),
    [
        (torch.optim.Adam, torch.optim.AdamW, r"saved with Adam, this optimizer is AdamW, which"),
        (torch.optim.AdamW, torch.optim.Adam, r"saved with AdamW, this optimizer is Adam, which"),
        (torch.optim.SGD, OwnAdamW, r"saved with SGD, this optimizer is OwnAdamW, which would"),
        (torch.optim.AdamW, SlowAdamW, r"only one of them has the options slow; load into AdamW"),
        (SlowAdamW, torch.optim.AdamW, r"only one of them has the options slow; load into SlowA"),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, saved: type, new: type, message: str) -> None:
    _save(tmp_path / "one", saved)
    other = _run(new, seed=5)
    before = everything(other)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, other.model, other.optimizer)
    after = everything(other)
    assert all(torch.equal(after[n], v) for n, v in before.items() if torch.is_tensor(v))


def test_a_model_saved_without_an_optimizer_loads_without_one(tmp_path: Path) -> None:
    run = _run(torch.optim.AdamW)
    save_checkpoint(tmp_path / "model", run.model, None, progress={"step": 3})
    assert not any("optimizer" in path.name for path in tmp_path.rglob("*"))
    other = _run(torch.optim.AdamW, seed=5)
    with pytest.raises(ValueError, match=r"model was saved without an optimizer; call with opt"):
        load_checkpoint(tmp_path, other.model, other.optimizer)
    assert load_checkpoint(tmp_path, other.model, None) == {"step": 3}
    expected = dict(run.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in other.model.named_parameters())


def test_only_the_model_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    run = _save(tmp_path / "one", torch.optim.AdamW)
    other = _run(torch.optim.AdamW, seed=5)
    load_checkpoint(tmp_path, other.model, None)
    expected = dict(run.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in other.model.named_parameters())
    assert not other.optimizer.state


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_steps_of_a_run_with_offload_resume_without_it(fused: bool | None, device: str) -> None:
    """A fused optimizer needs `step` on the device of the parameters, here `meta` for a GPU."""
    model = tiny().to("meta")
    weight = model.model.norm.weight
    optimizer = torch.optim.AdamW([weight], fused=fused)
    name = "model.norm.weight"
    values = {name: {"step": OptimizerValue(value=torch.tensor(3.0))}}
    saved = OptimizerState("AdamW", ["Adam"], values, [Group([name], {"fused": fused})])
    restore_optimizer(model, optimizer, saved, {})
    assert optimizer.state[weight]["step"].device.type == device
