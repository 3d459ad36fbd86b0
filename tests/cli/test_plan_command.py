"""`hf-moe-ep plan` lists the layouts that fit, best first, and refuses what training refuses."""

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.architectures.models import tiny as tiny_of_type
from support.ranks import run_ranks
from support.tiny_models import batch, tiny

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2
from hf_moe_ep.cli.main import main
from hf_moe_ep.cli.plan import (
    _choose_mixed_precision,
    _format_context_note,
    _format_needed_gpus,
    format_launch_config,
)
from hf_moe_ep.planner import search
from hf_moe_ep.planner.counted import OPTIMIZER
from hf_moe_ep.planner.extrapolate import FEW_LAYERS
from hf_moe_ep.planner.hardware import ASSUMED, find_hardware, read_known_hardware
from hf_moe_ep.planner.held import plan_memory
from hf_moe_ep.planner.search import (
    Layout,
    LayoutRequest,
    PlannedLayout,
    SearchResult,
    _count_experts,
    _iterate_grids,
    _Search,
    count_received_bytes,
    explain_refusal,
    find_layouts,
)
from hf_moe_ep.planner.step import StepPlan

LARGE = 2**40
RATES = ("memory_bandwidth", "in_node_bandwidth", "between_nodes_bandwidth")
LATENCIES = ("in_node_latency", "between_nodes_latency", "host_seconds")


def make_request(**more: Any) -> LayoutRequest:
    return LayoutRequest(
        **({"model": tiny().config, "gpus": 4, "limit": LARGE, "seq": 16, "batch": 8} | more)
    )


@pytest.mark.slow
def test_layouts_that_fit_are_sorted_and_others_are_too_large() -> None:
    """With 1 TiB, all four layouts of one GPU fit. With a low limit, only the smaller two fit."""
    unlimited = find_layouts(make_request(gpus=1, ep=1))
    assert not unlimited.too_large and not unlimited.illegal
    layouts = [(p.layout.checkpointing, p.layout.per_forward) for p in unlimited.fit]
    assert layouts == [(False, 8), (False, 1), (True, 8), (True, 1)]
    assert all(p.layout.per_forward * p.layout.accumulated == 8 for p in unlimited.fit)
    peaks = sorted(p.step.peak for p in unlimited.fit)
    assert all(p.left == LARGE - p.step.peak for p in unlimited.fit)
    limited = find_layouts(make_request(gpus=1, ep=1, limit=peaks[1]))
    assert sorted(p.step.peak for p in limited.fit) == peaks[:2]
    assert {*peaks[2:]} <= {p.step.peak for p in limited.too_large}
    assert all(p.left < 0 for p in limited.too_large)
    assert not find_layouts(make_request(gpus=1, ep=1, sp=1, limit=peaks[0] - 1)).fit


@pytest.mark.slow
def test_with_a_gpu_the_fastest_comes_first() -> None:
    """Layouts are sorted by planned seconds. The fastest layout is planned again with 2 and 4
    dispatch chunks. On a GPU with half the rates and twice the latencies, the order is the same,
    and a step takes twice as long.
    """
    h100 = find_hardware("h100")
    slower = replace(
        h100,
        matmul_flops={name: rate / 2 for name, rate in h100.matmul_flops.items()},
        **{name: getattr(h100, name) / 2 for name in RATES},
        **{name: getattr(h100, name) * 2 for name in LATENCIES},
    )
    on_h100, on_slower = (
        [
            (p.layout, p.time.seconds)
            for p in find_layouts(make_request(ep=4, hardware=gpu)).fit
            if p.time
        ]
        for gpu in (h100, slower)
    )
    assert [layout for layout, _ in on_h100] == [layout for layout, _ in on_slower]
    seconds = [step for _, step in on_h100]
    assert seconds == sorted(seconds)
    assert [step for _, step in on_slower] == pytest.approx([2 * step for step in seconds])
    assert {layout.chunks for layout, _ in on_h100} == {1, 2, 4}


@pytest.mark.slow
def test_the_largest_power_of_two_of_sequences_that_fits_is_planned() -> None:
    """A rank has 8 sequences per step and memory for about 6. Two forwards of 4 are planned."""
    unlimited = find_layouts(make_request(gpus=1, ep=1, seq=128))
    peaks = {(p.layout.checkpointing, p.layout.per_forward): p.step.peak for p in unlimited.fit}
    # This limit fits 6.8 sequences if memory grows linearly from 1 to 8 sequences.
    for_six = (peaks[True, 1] + 5 * peaks[True, 8]) // 6
    limited = find_layouts(make_request(gpus=1, ep=1, seq=128, limit=for_six))
    assert Layout(1, 1, 1, 4, 2, checkpointing=True) in [p.layout for p in limited.fit]


def test_few_experts_are_split_over_more_ranks_with_etp() -> None:
    """2 experts are split over 4 and 8 ranks as ep 2 x etp 2 and ep 2 x etp 4."""
    grids = list(_iterate_grids(make_request(gpus=8), 1, 1, 2, 1))
    assert [(grid.ep, grid.etp) for grid in grids] == [(1, 1), (2, 1), (2, 2), (2, 4)]
    assert grids[-1].format_patch_line() == "patch(model, ep_size=2, etp_size=4)"
    assert {grid.etp for grid in _iterate_grids(make_request(gpus=8), 1, 1, 8, 1)} == {1}
    given = list(_iterate_grids(make_request(gpus=8, ep=2, etp=2), 1, 1, 2, 1))
    assert [(grid.ep, grid.etp) for grid in given] == [(2, 2)]


def test_no_grid_is_planned_twice() -> None:
    """12 GPUs are one and a half nodes of 8, so the only number of replicas is 1."""
    grids = list(_iterate_grids(make_request(gpus=12, hardware=find_hardware("h100")), 1, 1, 8, 1))
    assert len(set(grids)) == len(grids)


def test_larger_ep_sizes_are_tried_if_gathered_experts_need_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ep 1, all experts of a layer are gathered at once. With ep 4, a quarter is gathered."""

    def plan(layout: Layout, request: LayoutRequest, few: Any) -> PlannedLayout:
        gathered = 3 * LARGE // layout.ep
        step = StepPlan({OPTIMIZER: gathered}, {OPTIMIZER: {"parameters": held}}, 1, (1,))
        return PlannedLayout(layout, step, request.limit - gathered)

    monkeypatch.setattr(search, "_plan", plan)
    held = LARGE // 2
    assert {p.layout.ep for p in find_layouts(make_request(sp=1, cp=1)).fit} == {4}
    held = 3 * LARGE  # for every layout
    assert {p.layout.ep for p in find_layouts(make_request(sp=1, cp=1)).too_large} == {1}


def test_experts_after_many_dense_layers_are_counted() -> None:
    layers = {"num_hidden_layers": 8, "num_dense_layers": 6, "layer_types": ["full_attention"] * 8}
    config = tiny_of_type("afmoe").config
    for name, value in layers.items():
        setattr(config, name, value)
    assert _count_experts(make_request(model=config)) == 8


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_experts_of_a_model_with_few_layers_are_counted(name: str) -> None:
    """The config lists the type of each layer, so the model cannot get more layers."""
    config = tiny_of_type(name).config
    assert config.num_hidden_layers < FEW_LAYERS[-1]
    assert _count_experts(make_request(model=config)) == 8


@pytest.mark.slow
def test_layouts_with_etp_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ep 2 x etp 2, a rank holds as much as with ep 2, and gathers no expert."""
    few = tiny(num_experts=2, num_experts_per_tok=1, hidden_size=64, moe_intermediate_size=512)
    found = find_layouts(make_request(model=few.config, gpus=4))
    assert not found.illegal
    peaks = {
        (p.layout.ep, p.layout.etp): p.step.peak
        for p in found.fit
        if p.layout.checkpointing and p.layout.per_forward == 1 and p.layout.chunks == 1
    }
    assert set(peaks) == {(1, 1), (2, 1), (2, 2)}
    assert peaks[2, 2] < peaks[2, 1] < peaks[1, 1]
    few.config.save_pretrained(tmp_path)
    arguments = ["--gpus", "4", "--gpu-memory", "1", "--seq", "16", "--batch", "8"]
    arguments += ["--etp-size", "2"]
    assert main(["plan", str(tmp_path), *arguments]) == 0
    assert "2 x etp 2" in capsys.readouterr().out


WRONG = {
    "gpu": (
        ["--gpu", "v100"],
        "no rates are known for GPU 'v100'; choose one of a100, h100, h200, b200",
    ),
    "no memory": ([], "add --gpu-memory GIB (or --gpu NAME, one of a100"),
    "rates": (
        ["--gpu-memory", "1", "--calibrate", "x.json"],
        "--calibrate has no effect without --gpu",
    ),
    "file": (["--gpu", "h100", "--calibrate", "/no/file"], "--calibrate /no/file is not a file"),
    "negative": (["--gpu", "h100", "--ep-size", "-2"], r"--ep-size (-2) must be more than 0"),
    "infinite": (["--gpu-memory", "inf"], "--gpu-memory (inf) must be more than 0 and finite"),
    "adapters": (
        ["--gpu", "h100", "--lora-targets", "experts"],
        "--lora-targets experts chooses the layers of adapters, and this plan trains all weights",
    ),
    "folder of --write": (
        ["--gpu", "h100", "--write", "/no/folder/x.yaml"],
        "--write /no/folder/x.yaml: the folder /no/folder does not exist",
    ),
    "folder of --plot": (
        ["--gpu", "h100", "--plot", "/no/folder/x.png"],
        "--plot /no/folder/x.png: the folder /no/folder does not exist",
    ),
    "infinite tokens": (
        ["--gpu", "h100", "--train-tokens", "inf"],
        "--train-tokens (inf) must be more than 0 and finite",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_wrong_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    more, words = WRONG[name]
    arguments = ["--gpus", "8", "--seq", "16", "--batch", "8", *more]
    assert main(["plan", "Qwen/Qwen3-30B-A3B", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_every_rate_of_a_gpu_has_a_source() -> None:
    """A source is a web address, an error of torch, a measurement or an assumption."""
    for hardware in read_known_hardware().values():
        rates = {rate.name for rate in fields(hardware)} - {"name", "node_size", "host_ahead"}
        assert set(hardware.sources) == rates - {"sources"}
        named = ("https://", "benchmarks/results/", "torch reports")
        assert all(
            text.startswith(ASSUMED) or any(name in text for name in named)
            for text in hardware.sources.values()
        )


@pytest.mark.slow
def test_a_plan_of_1024_gpus_takes_less_than_4_gib() -> None:
    """For Qwen3-235B, at most 14 layouts are planned.

    The weights of a layer's experts, 3.2 GB, are allocated before they are moved to meta. They are
    not written, so they count towards the limit of the process, but not towards the 4 GiB in use.
    """
    shape = ["Qwen/Qwen3-235B-A22B", "--gpus", "1024", "--gpu", "h100", "--seq", "4096"]
    command = [sys.executable, "-m", "hf_moe_ep", "plan", *shape, "--batch", "2048", "--json"]
    output = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30)),
    ).stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # in KiB
    printed = json.loads(output)
    assert printed["fit"] and printed["fit"][0]["time"]["seconds"] > 0
    assert len(printed["fit"]) + len(printed["too_large"]) <= 14


def test_long_sequences_are_split_over_heads_in_a_node_and_over_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sequences of 262,144 tokens for 16 GPUs: 8 GPUs share a sequence, of which a node has 4.

    The model has 4 heads. With 2 heads, sp_size is 2, and cp_size is 4.
    """

    def plan(layout: Layout, request: LayoutRequest, few: Any) -> PlannedLayout:
        step = StepPlan({OPTIMIZER: 1}, {OPTIMIZER: {"parameters": 1}}, 1, (1,))
        return PlannedLayout(layout, step, request.limit - 1)

    monkeypatch.setattr(search, "_plan", plan)
    monkeypatch.setattr(search, "choose_layers_to_run", lambda request: (1,))
    hardware = replace(find_hardware("h100"), node_size=4)
    for heads, want in ((4, (4, 2)), (2, (2, 4))):
        config = tiny(num_attention_heads=heads).config
        sizes: dict[str, Any] = {"model": config, "gpus": 16, "ep": 4, "hardware": hardware}
        request = make_request(**sizes, seq=262_144, batch=2)
        found = _Search(request, 1, SearchResult([], [], {}))
        found.plan_grids()
        assert {(p.layout.sp, p.layout.cp) for p in found.result.fit} == {want}
        best = found.result.fit[0].layout
        patch_line = f"patch(model, ep_size=4, sp_size={want[0]}, cp_size={want[1]}"
        assert best.format_patch_line().startswith(patch_line)


@pytest.mark.parametrize("sp", [1, 2])
def test_latents_are_gathered_for_the_tokens_of_a_rank(sp: int) -> None:
    """With sp 2, a rank has half of the tokens of its cp rank when latents are gathered."""
    config = tiny_of_type("deepseek_v3").config
    layout = Layout(ep=1, sp=sp, dp_replicate=1, cp=2)
    request = make_request(model=config, gpus=2 * sp, seq=64, batch=1)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert count_received_bytes(layout, request) == 64 // 2 // sp * width * 2


@pytest.mark.slow
def test_context_parallelism_is_tried_if_nothing_fits_without_it() -> None:
    """A GPU receives half of the keys and values, 2 x 2 heads of 8 values in bf16."""
    sizes: dict[str, Any] = {"gpus": 2, "ep": 2, "sp": 1, "seq": 2048, "batch": 2}
    without = find_layouts(make_request(**sizes))
    assert all(planned.layout.cp == 1 for planned in without.fit)
    request = make_request(**sizes, limit=min(planned.step.peak for planned in without.fit) - 1)
    found = find_layouts(request)
    assert found.fit and all(planned.layout.cp == 2 for planned in found.fit)
    best = found.fit[0].layout
    assert best.format_patch_line() == "patch(model, ep_size=2, cp_size=2)"
    received = count_received_bytes(best, request)
    assert received == best.per_forward * 1024 * 2 * 2 * 8 * 2
    (line,) = _format_context_note(best, request)
    assert f"up to {received / 2**20:,.1f} MiB per layer" in line
    assert "attention hides up to three quarters of this transfer" in line


REFUSED = {
    "experts": (Layout(3, 1, 1), {"gpus": 6, "batch": 6}, r"ep_size \(3\) must divide.*\(8\)"),
    "ranks": (Layout(4, 1, 1), {"gpus": 2}, r"ep_size \(4\) must divide world size"),
    "heads": (Layout(1, 8, 1), {"gpus": 8}, r"sp_size \(8\)"),
    "replicas": (Layout(1, 1, 3), {}, r"dp_replicate_size \(3\) must divide"),
    "batch": (Layout(1, 1, 1), {"batch": 6}, r"batch \(6\) is not a multiple.*= 4\); try 4 or 8"),
    "context": (Layout(1, 1, 1, cp=3), {}, r"cp_size \(3\) must divide world size"),
    "context, batch": (Layout(1, 1, 1, cp=2), {"batch": 5}, r"4 GPUs / cp_size 2 / sp_size 1 = 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_training_refuses_raise(name: str) -> None:
    layout, more, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        sizes = {"ep": layout.ep, "sp": layout.sp, "cp": layout.cp}
        find_layouts(make_request(**sizes, dp_replicate=layout.dp_replicate, **more))
    assert not explain_refusal(Layout(1, 1, 1), make_request())


GRIDS = [
    *(
        Layout(ep, sp, replicate)
        for ep in (1, 2, 3, 4, 8)
        for sp in (1, 2, 4)
        for replicate in (1, 2, 3)
    ),
    *(Layout(ep, 1, 1, chunks=chunks) for ep in (1, 2, 4) for chunks in (2, 4)),
    *(Layout(ep, 1, 1, node_size=nodes) for ep in (2, 4) for nodes in (1, 2, 3)),
]


def _train(rank: int, world: int) -> list[str]:
    """Run one forward and backward in each layout of GRIDS. Returns each error, or ""."""
    errors = []
    for grid in GRIDS:
        model = tiny()
        try:
            apply_ep_fsdp2(model, **grid.sizes())
            model(**batch(model, 2, 16)).loss.backward()
        except ValueError as error:
            errors.append(str(error))
            continue
        errors.append("")
    return errors


@pytest.mark.slow
def test_the_plan_refuses_what_training_refuses_with_the_same_error() -> None:
    """Four real ranks train 57 layouts. `explain_refusal` gives the same error for each of them."""
    (first, *others) = run_ranks(_train, 4, timeout=500.0)
    assert all(other == first for other in others)
    planned = [explain_refusal(grid, make_request(batch=4)) for grid in GRIDS]
    assert planned == first
    assert 0 < sum(map(bool, planned)) < len(GRIDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny().config.save_pretrained(path)
    return path


def test_command_prints_and_writes_the_best_layout(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accelerate can read the file, and its comments show the call of `patch`."""
    from accelerate.commands.config.config_args import load_config_from_file

    written = tmp_path / "fsdp.yaml"
    arguments = ["--gpus", "2", "--gpu-memory", "1", "--seq", "16", "--batch", "2"]
    arguments += ["--ep-size", "2", "--gpu", "h100", "--train-tokens", "1e6"]
    assert main(["plan", str(folder), *arguments, "--write", str(written)]) == 0
    out = capsys.readouterr().out
    assert "Best layout: patch(model, ep_size=2)" in out and "s/step" in out
    (shares,) = (line for line in out.splitlines() if line.startswith("Parts of its step: "))
    percentages = [
        int(word.rstrip(",%")) for word in shares.split() if word.rstrip(",").endswith("%")
    ]
    assert 95 <= sum(percentages) <= 105 and percentages == sorted(percentages, reverse=True)
    assert "  exposed     share of the step" in out and "host, GiB" not in out
    assert "% slower: " in out and "not measured" in out and "1e+06 tokens at " in out
    config = load_config_from_file(str(written))
    assert (config.num_processes, config.num_machines) == (2, 1)
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_activation_checkpointing"] is False
    assert written.read_text().startswith(
        "# patch(model, ep_size=2)\n# sequences per forward of a data rank: 1, "
    )


@pytest.mark.slow
def test_command_plans_compiled_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "2", "--gpu", "h100", "--seq", "16", "--batch", "4", "--ep-size", "2"]
    assert main(["plan", str(folder), *arguments, "--compile-layers"]) == 0
    assert "Best layout: patch(model, ep_size=2, compile_layers=True)" in capsys.readouterr().out


@pytest.mark.slow
def test_command_plans_fixed_buffers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The buffers of a stage are printed, and the peak contains them."""
    arguments = ["plan", str(folder), "--gpus", "4", "--gpu-memory", "1", "--seq", "16"]
    arguments += ["--batch", "4", "--ep", "1", "--pp", "2"]
    peaks = []
    for more in ([], ["--fsdp-double-buffer"]):
        assert main([*arguments, *more, "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["fit"][0]["peak"])
    parallel = ParallelConfig(ep_size=1, fsdp_double_buffer=True)
    stage = tiny(num_hidden_layers=1).config
    held = plan_memory(stage, parallel, world_size=2).buffers
    assert peaks[0] < peaks[1] < peaks[0] + 1.2 * held
    assert main([*arguments, "--fsdp-double-buffer"]) == 0
    assert f"a GPU holds {held / 2**20:,.1f} MiB of them" in capsys.readouterr().out


@pytest.mark.slow
def test_command_plans_whole_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(vocab_size=999).config.save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--gpus", "1", "--gpu-memory", "1", "--seq", "600"]
    arguments += ["--batch", "1", "--json"]
    peaks = []
    for options in ([], ["--whole-logits"]):
        assert main([*arguments, *options]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["fit"][0]["peak"])
    assert peaks[0] < peaks[1]


@pytest.mark.slow
def test_command_plans_a_head_for_multi_token_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head takes memory, and a type without a tested head is refused as in training."""
    tiny_of_type("glm4_moe").config.save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--gpus", "2", "--gpu-memory", "1", "--seq", "16"]
    arguments += ["--batch", "2", "--ep-size", "2"]
    peaks = []
    for layers in ("0", "1"):
        assert main([*arguments, "--mtp-layers", layers, "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["fit"][0]["peak"])
    assert peaks[0] < peaks[1]
    assert main([*arguments, "--mtp-layers", "1"]) == 0
    assert "Best layout: patch(model, ep_size=2, mtp_layers=1)" in capsys.readouterr().out
    tiny().config.save_pretrained(tmp_path)
    assert main([*arguments, "--mtp-layers", "1"]) == 2
    assert "were tested on" in capsys.readouterr().err


@pytest.mark.slow
def test_command_plans_parameters_on_the_host(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU is too small without --offload. With it, the table shows the memory of the host."""
    from accelerate.commands.config.config_args import load_config_from_file

    arguments = ["plan", str(folder), "--gpus", "1", "--seq", "16", "--batch", "1"]
    assert main([*arguments, "--gpu-memory", "1", "--json"]) == 0
    smallest = min(layout["peak"] for layout in json.loads(capsys.readouterr().out)["fit"])
    arguments += ["--gpu", "h100", "--gpu-memory", str((smallest - 1) / 2**30)]
    assert main(arguments) == 1
    assert "help, or add --offload" in capsys.readouterr().out
    written = tmp_path / "fsdp.yaml"
    assert main([*arguments, "--offload", "--write", str(written)]) == 0
    out = capsys.readouterr().out
    assert "host, GiB" in out and "on the host of each GPU: parameters, gradients" in out
    assert load_config_from_file(str(written)).fsdp_config["fsdp_offload_params"] is True


def test_the_launch_config_of_two_machines_can_be_read(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    written = tmp_path / "fsdp.yaml"
    layout = Layout(8, 1, 2, 1, 4, checkpointing=True)
    written.write_text(format_launch_config(layout, 16, experts_dtype="nf4"))
    config = load_config_from_file(str(written))
    assert (config.num_processes, config.num_machines, config.rdzv_backend) == (16, 2, "static")
    assert config.fsdp_config["fsdp_activation_checkpointing"] is True
    assert "  # call model.gradient_checkpointing_enable() in the script.\n" in written.read_text()
    first, second, *_ = written.read_text().splitlines()
    assert first == "# patch(model, ep_size=8, dp_replicate_size=2, experts_dtype='nf4')"
    assert second.endswith("gradient_accumulation_steps: 4")
    assert "{'gradient_accumulation_kwargs': {'sync_each_batch': True}}" in written.read_text()
    assert "sync_each_batch" not in format_launch_config(replace(layout, accumulated=1), 16)
    assert config.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("masters", "dtype", "expected"),
    [
        ("model", "bfloat16", "no"),
        ("fp32", "float32", "no"),
        ("fp32", "float16", "fp16"),
        ("fp32", "bfloat16", "bf16"),
    ],
)
def test_the_launch_config_trains_in_the_planned_dtypes(
    masters: str, dtype: str, expected: str, tmp_path: Path
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    written = tmp_path / "fsdp.yaml"
    mixed = _choose_mixed_precision(argparse.Namespace(masters=masters, dtype=dtype))
    written.write_text(format_launch_config(Layout(1, 1, 1), 1, mixed_precision=mixed))
    assert load_config_from_file(str(written)).mixed_precision == expected


def test_masters_of_the_models_dtype_need_less_memory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "fsdp.yaml"
    arguments = ["--gpus", "1", "--gpu-memory", "1", "--seq", "16", "--batch", "1", "--ep", "1"]
    arguments += ["--masters", "model", "--json", "--write", str(written)]
    assert main(["plan", str(folder), *arguments]) == 0
    best = json.loads(capsys.readouterr().out)["fit"][0]
    held = best["step"]["made_of"][OPTIMIZER]
    numel = sum(p.numel() for p in tiny().parameters())
    assert held["parameters"] == 2 * numel and held["optimizer state"] >= 4 * numel
    assert held["optimizer state"] < 5 * numel  # two moments in bf16, and the steps
    assert "mixed_precision: 'no'" in written.read_text()


def test_the_number_of_gpus_that_hold_the_state_equals_a_count_by_hand() -> None:
    """60 + 10 + 30 GiB do not fit in 49 or 50 GiB, and half of them does not fit. A quarter fits.

    Buffers do not count, because they are not sharded. Layouts with replicas (HSDP) do not count.
    """
    gib = 2**30
    made_of = {"parameters": 60, "gradients": 10, "optimizer state": 30, "buffers": 99}
    step = StepPlan({}, {OPTIMIZER: {kind: n * gib for kind, n in made_of.items()}}, 1, (1,))
    replicas = PlannedLayout(Layout(8, 1, 2), replace(step, made_of={}), -1)
    result = SearchResult([], [replicas, PlannedLayout(Layout(8, 1, 1), step, -1)], {})
    for limit in (49, 50):
        assert _format_needed_gpus(result, 32, limit * gib) == [
            "Parameters, gradients and optimizer state take 100.0 GiB on each of 32 GPUs; on 128 "
            "GPUs they would take 25.0 GiB."
        ]
    assert _format_needed_gpus(result, 32, 101 * gib) == []
    assert _format_needed_gpus(SearchResult([], [replicas], {}), 32, 49 * gib) == []


def test_command_fails_if_no_layout_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "1", "--gpu-memory", "1e-6", "--seq", "16", "--batch", "1", "--json"]
    assert main(["plan", str(folder), *arguments]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["fit"] and printed["too_large"][0]["left"] < 0
    assert main(["plan", str(folder), *arguments[:-2], "0"]) == 2
    assert "--batch (0) must be more than 0" in capsys.readouterr().err
