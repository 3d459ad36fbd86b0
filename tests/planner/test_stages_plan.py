"""Plans of pipeline stages have the layers, peaks, transfers and seconds of real stages."""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import plan as bench
import pytest
import torch
from support.ranks import run_ranks
from support.stages import state_of
from support.tiny_models import tiny
from transformers import DeepseekV3Config, GptOssConfig

from hf_moe_ep import ParallelConfig
from hf_moe_ep.cli.main import main
from hf_moe_ep.pipeline.run import Pipeline
from hf_moe_ep.planner.counted import OPTIMIZER
from hf_moe_ep.planner.hardware import find_hardware
from hf_moe_ep.planner.plot import _COLOURS
from hf_moe_ep.planner.search import LayoutRequest, find_layouts
from hf_moe_ep.planner.seconds import plan_phase_parts, plan_step_time, plan_work_time
from hf_moe_ep.planner.stages import (
    IN_FLIGHT,
    Transfers,
    add_micro_batches,
    balance_stage_layers,
    make_stage_config,
    plan_stages_time,
)
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step

SIZES = bench.Sizes(seq=128, hidden=64, layers=6, intermediate=32, vocab=512)
MICRO_BATCHES = 4


def plan_stage(pp_size: int, world: int, *, checkpointing: bool = False) -> StepPlan:
    """Plan micro-batches of one sequence on a stage."""
    config = make_stage_config(SIZES.config(), ParallelConfig(pp_size=pp_size))
    step = plan_step(
        config,
        world_size=world // pp_size,
        batch=Batch(SIZES.seq, 1, checkpointing, accumulates=True),
        dtype=torch.float32,
        like_gpu=False,
    )
    return add_micro_batches(step, config, pp_size=pp_size, micro_batches=MICRO_BATCHES)


def _measure(rank: int, world: int, pp_size: int, checkpointing: bool) -> tuple[int, int]:
    """Return the peak of a step on this rank, and the bytes that it sends to other stages."""
    parallel = {"pp_size": pp_size, "pp_microbatches": MICRO_BATCHES}
    configuration = bench.Configuration(
        "", parallel, checkpointing=checkpointing, batch=MICRO_BATCHES
    )
    training = bench.prepare(configuration, SIZES)
    pipeline: Pipeline = vars(training.model)["_call_impl"].func
    assert state_of(training.model).stage.index == rank // (world // pp_size)
    before = pipeline.num_bytes
    return bench.count(training).peak, pipeline.num_bytes - before


@pytest.mark.slow
@pytest.mark.parametrize(("pp_size", "checkpointing"), [(2, False), (2, True), (3, False)])
def test_the_plan_of_a_stage_equals_the_largest_stage(pp_size: int, checkpointing: bool) -> None:
    """The peak is within 5 % of the measured peak, and the bytes that a stage sends are exact."""
    plan = plan_stage(pp_size, pp_size, checkpointing=checkpointing)
    ranks = run_ranks(partial(_measure, pp_size=pp_size, checkpointing=checkpointing), pp_size)
    peaks, sent = zip(*ranks, strict=True)
    ratio = plan.peak / max(peaks)
    print(f"{pp_size} stages: planned / measured {ratio:.3f}, {plan.peak} of {peaks}")
    assert abs(ratio - 1) <= 0.05, (plan.peak, peaks)
    assert sum(plan.parts.values()) == plan.peak
    nbytes = SIZES.seq * SIZES.hidden * 4
    assert max(sent) == Transfers(pp_size, MICRO_BATCHES, 1, nbytes).sent


def test_no_activations_of_micro_batches_are_left_when_the_optimizer_steps() -> None:
    config = SIZES.config()
    step = plan_step(config, world_size=1, batch=Batch(SIZES.seq, accumulates=True))
    staged = add_micro_batches(step, config, pp_size=2, micro_batches=4)
    assert IN_FLIGHT not in staged.made_of[OPTIMIZER]
    assert staged.peaks[OPTIMIZER] <= step.peaks[OPTIMIZER]
    assert any(IN_FLIGHT in made_of for made_of in staged.made_of.values())
    assert IN_FLIGHT in _COLOURS


def test_a_stage_has_the_last_layers() -> None:
    """The stage has no dense layer, and its windows alternate as at the end of the model."""
    deepseek, gpt_oss = DeepseekV3Config(), GptOssConfig()
    stage = make_stage_config(deepseek, ParallelConfig(pp_size=4))
    assert (stage.num_hidden_layers, stage.first_k_dense_replace) == (16, 0)
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (61, 3)
    stage = make_stage_config(gpt_oss, ParallelConfig(pp_size=4, pp_layers=(8, 9, 9, 10)))
    assert stage.layer_types == gpt_oss.layer_types[-10:]
    with_dense = tiny(num_hidden_layers=5, mlp_only_layers=[0, 3]).config
    assert make_stage_config(with_dense, ParallelConfig(pp_size=2)).mlp_only_layers == [1]


def test_stages_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="pp_size \\(7\\) needs at least one layer per stage"):
        make_stage_config(SIZES.config(), ParallelConfig(pp_size=7))
    every_second = tiny(num_hidden_layers=6, decoder_sparse_step=2).config
    with pytest.raises(ValueError, match="cannot shorten the config of qwen3_moe to its last 3"):
        make_stage_config(every_second, ParallelConfig(pp_size=2))


@pytest.mark.slow
def test_stages_wait_for_one_micro_batch_and_its_transfers() -> None:
    """A step with two stages takes one more micro-batch, and the transfer of its hidden states and
    their gradients.
    """
    gpu, nbytes = find_hardware("h100"), 10**6
    step = plan_step(
        SIZES.config(), world_size=8, batch=Batch(SIZES.seq, accumulates=True), layers_run=(6,)
    )
    without = plan_step_time(step, gpu, micro_batches=4, tokens=512)
    far, near = (
        plan_stages_time(step, gpu, Transfers(2, 4, ranks, nbytes), tokens=512) for ranks in (8, 4)
    )
    once, twice = (plan_work_time(step.work, gpu, micro_batches=n).seconds for n in (1, 2))
    assert far.parts["bubble"] == near.parts["bubble"] == pytest.approx(twice - once)
    bandwidth = gpu.between_nodes_bandwidth * gpu.fractions["between_nodes"]
    transfer_seconds = gpu.between_nodes_latency + nbytes / bandwidth
    assert far.parts["stages"] == pytest.approx(2 * transfer_seconds) and far.seconds > near.seconds
    more = far.seconds - without.seconds
    assert more == pytest.approx(far.parts["bubble"] + far.parts["stages"])


@pytest.mark.slow
def test_layers_are_balanced_over_stages() -> None:
    """If the head takes as long as some layers, the last stage gets fewer layers."""
    gpu, layers = find_hardware("h100"), 12
    for vocab in (64, 60_000):
        step = plan_step(replace(SIZES, vocab=vocab).config(), world_size=8, batch=Batch(SIZES.seq))
        seconds = {
            part: sum(
                phase.times * sum(plan_phase_parts(phase, gpu).values())
                for name, phase in step.work.phases.items()
                if part in name
            )
            for part in ("head", "layer ")
        }
        head = seconds["head"] / (seconds["layer "] / step.layers)
        for pp_size in (2, 3, 4):
            counts = balance_stage_layers(step, gpu, layers, pp_size)
            assert sum(counts) == layers and len(counts) == pp_size and min(counts) >= 1
            times = [*counts[:-1], counts[-1] + head]
            moved = [*counts[:-2], counts[-2] - 1, counts[-1] + 1 + head]
            assert max(times) <= max(moved), (counts, head)
            if head >= 1:
                assert counts[-1] < counts[0]


def make_request(**more: Any) -> LayoutRequest:
    config = tiny(num_hidden_layers=4).config
    return LayoutRequest(config, gpus=4, limit=2**40, seq=16, batch=8, ep=2, sp=1, **more)


@pytest.mark.slow
def test_layouts_with_and_without_stages_are_listed_together() -> None:
    found = find_layouts(make_request(hardware=find_hardware("h100"), pp=(1, 2, 3)))
    stages = {planned.layout.pp for planned in found.fit}
    assert stages == {1, 2}
    (reason,) = found.illegal.values()
    assert "pp_size (3) must divide" in reason
    with_stages = [planned for planned in found.fit if planned.layout.pp == 2]
    assert {planned.layout.checkpointing for planned in with_stages} == {False, True}
    for planned in with_stages:
        layout = planned.layout
        assert (layout.per_forward, layout.micro_batches, layout.accumulated) == (4, 4, 1)
        assert layout.format_patch_line() == "patch(model, pp_size=2, pp_microbatches=4, ep_size=2)"
        assert planned.bubble == 1 / 5
        assert planned.sent == 4 * 16 * 32 * 2
    seconds = [planned.time.seconds for planned in found.fit if planned.time is not None]
    assert seconds == sorted(seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("bandwidth", "best"), [(1e7, 2), (None, 1)])
def test_stages_are_the_best_layout_on_a_slow_link_alone(
    bandwidth: float | None, best: int
) -> None:
    """Two nodes of two GPUs are linked by 80 Mbit/s, or as fast as GPUs inside a node."""
    config = tiny(
        num_hidden_layers=4, hidden_size=256, moe_intermediate_size=128, num_attention_heads=8
    ).config
    gpu = replace(find_hardware("h100"), node_size=2)
    gpu = replace(
        gpu,
        between_nodes_bandwidth=bandwidth or gpu.in_node_bandwidth,
        between_nodes_latency=gpu.in_node_latency,
    )
    sizes = {"gpus": 4, "limit": 2**40, "seq": 512, "batch": 16, "ep": 2, "sp": 1, "cp": 1}
    found = find_layouts(LayoutRequest(config, **sizes, hardware=gpu, pp=(1, 2)))
    assert {planned.layout.pp for planned in found.fit} == {1, 2}
    assert found.fit[0].layout.pp == best


@pytest.mark.slow
def test_the_command_shows_stages(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(num_hidden_layers=4).config.save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--gpus", "4", "--gpu-memory", "1", "--seq", "16"]
    arguments += ["--batch", "8", "--ep-size", "2", "--pp-size", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "  bubble      share of the step" in out and "  20.0%  " in out
    assert "Best layout: patch(model, pp_size=2, pp_microbatches=4, ep_size=2)" in out
    assert main([*arguments, "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"With pp_layers=\(\d, \d\) all stages take about equally long", out), out
    assert main([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["fit"][0]
    assert (first["layout"]["pp"], first["bubble"]) == (2, 0.2)
    assert first["sent_between_stages"] == 4 * 16 * 32 * 2
    assert main([*arguments[:-1], "0"]) == 2
    assert "--pp-size (0) must be more than 0" in capsys.readouterr().err
