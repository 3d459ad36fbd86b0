"""The memory plot of a planned step shows every phase in order, even of layers that did not run."""

import sys
from pathlib import Path

import pytest
from support.tiny_models import tiny

from hf_moe_ep import ParallelConfig
from hf_moe_ep.cli.main import main
from hf_moe_ep.planner.extrapolate import keep_layers
from hf_moe_ep.planner.plot import draw_memory, list_phase_bytes
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step

FOUR_OF_SEVEN = StepPlan(
    peaks={},
    made_of={
        "forward, before layers": {"parameters": 100},
        "forward, layer 0": {"parameters": 100, "gradients": 1},
        "forward, layer 1": {"parameters": 100, "gradients": 10},
        "forward, layer -2": {"parameters": 100, "gradients": 50},
        "forward, layer -1": {"parameters": 100, "gradients": 70},
        "forward, head": {"parameters": 100},
        "backward, head": {"parameters": 100},
        "backward, layer -1": {"parameters": 100},
        "backward, layer -2": {"parameters": 100},
        "backward, layer 1": {"parameters": 100, "buffers": 40},
        "backward, layer 0": {"parameters": 100, "buffers": 90},
        "optimizer": {"parameters": 101},
    },
    layers=7,
    layers_run=(4, 5),
)


def test_layers_in_the_middle_are_interpolated() -> None:
    """The plan has the first two and last two of 7 layers. Layers 2 to 4 are between them."""
    names, parts = zip(*list_phase_bytes(FOUR_OF_SEVEN), strict=True)
    layers = [f"layer {number}" for number in range(7)]
    assert names == (
        "forward, before layers",
        *(f"forward, {layer}" for layer in layers),
        "forward, head",
        "backward, head",
        *(f"backward, {layer}" for layer in reversed(layers)),
        "optimizer",
    )
    assert [sizes.get("gradients", 0) for sizes in parts[1:8]] == [1, 10, 20, 30, 40, 50, 70]
    assert [sizes.get("buffers", 0) for sizes in parts[10:17]] == [0, 0, 10, 20, 30, 40, 90]
    assert parts[-1] == {"parameters": 101}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_plot_of_a_few_layers_equals_the_plot_of_all_layers(checkpointing: bool) -> None:
    """Runs of 4 and 5 layers give the bytes of each kind in each of 7 layers."""
    config = keep_layers(tiny().config, 7)
    few, whole = (
        plan_step(
            config,
            ParallelConfig(ep_size=2),
            world_size=4,
            batch=Batch(32, 2, checkpointing),
            all_layers=all_layers,
        )
        for all_layers in (False, True)
    )
    assert few.layers_run == (4, 5) and whole.layers_run == (7,)
    pairs = list(zip(list_phase_bytes(few), list_phase_bytes(whole), strict=True))
    assert [name for (name, _), _ in pairs] == list(whole.peaks)
    for (name, planned), (_, counted) in pairs:
        assert planned == pytest.approx(counted, abs=0.5), name
        assert sum(planned.values()) == pytest.approx(whole.peaks[name]), name


@pytest.mark.slow
def test_the_command_draws_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is a PNG. Without matplotlib, the command stops before planning begins."""
    config = tmp_path / "config.json"
    tiny().config.to_json_file(config)
    picture = tmp_path / "step.png"
    command = ["plan", str(config), "--gpus", "1", "--gpu-memory", "1", "--seq", "16", "--batch"]
    command += ["1", "--plot", str(picture)]
    assert main(command) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    low = tmp_path / "low.png"
    plan = plan_step(tiny().config, world_size=1, batch=Batch(16))
    draw_memory(plan, low, limit=plan.peak // 2)
    assert low.read_bytes() != picture.read_bytes()
    monkeypatch.delitem(sys.modules, "hf_moe_ep.planner.plot")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    planned: list[object] = []
    monkeypatch.setattr("hf_moe_ep.planner.search.find_layouts", planned.append)
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "--plot: the memory of a step is drawn by matplotlib, which is not installed" in message
    assert "pip install matplotlib" in message and not planned
