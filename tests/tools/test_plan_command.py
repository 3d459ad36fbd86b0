"""Layouts that a plan calls legal train, those that it refuses raise; what fits comes first."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.tiny_models import batch, tiny

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.tools.cli import main
from hf_moe_ep.tools.layouts import Asked, Layout, find_layouts, refusal
from hf_moe_ep.tools.plan_command import launch_config

LARGE = 2**40


def asked(**more: Any) -> Asked:
    return Asked(
        **({"shape": tiny().config, "gpus": 4, "limit": LARGE, "seq": 16, "batch": 8} | more)
    )


@pytest.mark.slow
def test_what_fits_is_ordered_and_the_rest_is_too_large() -> None:
    """On one grid: 8 sequences at a time, layers once; then what a limit leaves of the four."""
    one = asked(gpus=1, ep=1)
    everything = find_layouts(one)
    assert not everything.too_large and not everything.illegal
    found = [(p.layout.checkpointing, p.layout.per_forward) for p in everything.fit]
    assert found == [(False, 8), (False, 1), (True, 8), (True, 1)]
    assert all(p.layout.per_forward * p.layout.accumulated == 8 for p in everything.fit)
    peaks = sorted(p.step.peak for p in everything.fit)
    assert all(p.left == LARGE - p.step.peak for p in everything.fit)
    limited = find_layouts(asked(gpus=1, ep=1, limit=peaks[1]))
    assert sorted(p.step.peak for p in limited.fit) == peaks[:2]
    assert sorted(p.step.peak for p in limited.too_large) == peaks[2:]
    assert not find_layouts(asked(gpus=1, ep=1, sp=1, limit=peaks[0] - 1)).fit


REFUSED = {
    "experts": (Layout(3, 1, 1), {"gpus": 6, "batch": 6}, r"ep_size \(3\) must divide.*\(8\)"),
    "ranks": (Layout(4, 1, 1), {"gpus": 2}, r"ep_size \(4\) must divide world size"),
    "heads": (Layout(1, 8, 1), {"gpus": 8}, r"sp_size \(8\)"),
    "replicas": (Layout(1, 1, 3), {}, r"dp_replicate_size \(3\) must divide"),
    "batch": (Layout(1, 1, 1), {"batch": 6}, r"batch \(6\) is not a multiple.*= 4\); try 4 or 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_training_refuses_is_illegal(name: str) -> None:
    layout, more, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        find_layouts(asked(ep=layout.ep, sp=layout.sp, dp_replicate=layout.dp_replicate, **more))
    assert not refusal(Layout(1, 1, 1), asked())


GRIDS = [
    Layout(ep, sp, replicate)
    for ep in (1, 2, 3, 4, 8)
    for sp in (1, 2, 4)
    for replicate in (1, 2, 3)
]


def _train(rank: int, world: int) -> list[str]:
    said = []
    for grid in GRIDS:
        model = tiny()
        try:
            apply_ep_fsdp2(model, **grid.sizes())
        except ValueError as error:
            said.append(str(error))
            continue
        model(**batch(model, 2, 16)).loss.backward()
        said.append("")
    return said


@pytest.mark.slow
def test_legal_layouts_train_and_others_raise_the_same() -> None:
    """45 grids on four real ranks: what the plan says of each is what sharding says."""
    (first, *others) = run_ranks(_train, 4, timeout=500.0)
    assert all(other == first for other in others)
    planned = [refusal(grid, asked(batch=4)) for grid in GRIDS]
    assert planned == first
    assert 0 < sum(map(bool, planned)) < len(GRIDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny().config.save_pretrained(path)
    return path


def test_command_prints_and_writes_the_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accelerate reads what is written: processes, checkpointing; `patch` stands in it."""
    from accelerate.commands.config.config_args import load_config_from_file

    written = tmp_path / "fsdp.yaml"
    arguments = ["--gpus", "2", "--gpu-memory", "1", "--seq", "16", "--batch", "4", "--ep", "2"]
    assert main(["plan", str(folder), *arguments, "--write", str(written)]) == 0
    out = capsys.readouterr().out
    assert "the first one: patch(model, ep_size=2)" in out and "seconds are not planned" in out
    config = load_config_from_file(str(written))
    assert (config.num_processes, config.num_machines) == (2, 1)
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_activation_checkpointing"] is False
    assert written.read_text().startswith("# patch(model, ep_size=2)\n# 2 sequences per forward")


def test_two_machines_are_launched_as_such(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    written = tmp_path / "fsdp.yaml"
    layout = Layout(8, 1, 2, 1, 4, checkpointing=True)
    written.write_text(launch_config(layout, 16, experts_dtype="nf4"))
    config = load_config_from_file(str(written))
    assert (config.num_processes, config.num_machines, config.rdzv_backend) == (16, 2, "static")
    assert config.fsdp_config["fsdp_activation_checkpointing"] is True
    first, second, *_ = written.read_text().splitlines()
    assert first == "# patch(model, ep_size=8, dp_replicate_size=2, experts_dtype='nf4')"
    assert second.endswith("gradient_accumulation_steps 4")


def test_command_says_that_none_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "1", "--gpu-memory", "1e-6", "--seq", "16", "--batch", "1", "--json"]
    assert main(["plan", str(folder), *arguments]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fit"] and found["too_large"][0]["left"] < 0
    assert main(["plan", str(folder), *arguments[:-2], "0"]) == 2
    assert "--batch (0) must be more than 0" in capsys.readouterr().err
