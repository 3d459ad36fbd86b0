"""`plan_step` predicts the peak, FLOPs and traffic of a real training step.

On one rank, the peaks are equal to the byte. On four ranks, they differ by at most 5 %.
"""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan as bench
import pytest
import torch
import torch.distributed as dist
from support.architectures.models import tiny as tiny_of_type
from support.needs import needs_bf16_attention
from support.quantised import SIZES
from support.ranks import run_ranks
from support.tiny_models import tiny
from torch import Tensor

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2, mtp_loss, patch
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.cli.main import main
from hf_moe_ep.cli.memory import _plan_one_step, add_parser
from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.planner import fake
from hf_moe_ep.planner.choices import Choices
from hf_moe_ep.planner.counted import OPTIMIZER, count_step, make_optimizer
from hf_moe_ep.planner.shrink import CHANGES, Options, shrink
from hf_moe_ep.planner.step import Batch, plan_step
from hf_moe_ep.planner.work import HOST_COPY, ON_HOST, PURPOSES, StepWork, WorkCounter
from hf_moe_ep.ranks import collectives
from hf_moe_ep.routing.load import ExpertLoad
from hf_moe_ep.upstream.models import enable_checkpointing, has_fused_head

SIZES_OF_BENCH = bench.Sizes(
    seq=96, hidden=128, layers=2, experts=8, top_k=2, intermediate=128, vocab=200
)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Initialise a real process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


ON_ONE_RANK = {
    "fp32, sgd": bench.Configuration("", optimizer="sgd"),
    "bf16, nf4, adapters, checkpointing": bench.Configuration(
        "",
        {"experts_dtype": "nf4", "experts_double_quant": True},
        torch.bfloat16,
        checkpointing=True,
        batch=2,
        lora_rank=3,
        lora_targets="attention",
        optimizer="adamw_fused",
    ),
    "bf16, on the host": bench.Configuration("", dtype=torch.bfloat16, offload=True),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_bf16_attention) if "bf16" in n else n for n in ON_ONE_RANK],
)
def test_a_plan_for_one_rank_is_exact_to_the_byte(name: str) -> None:
    """FLOPs and kernel launches are exactly equal. The plan does not know how many rows each expert
    gets. On one rank, only the activations of adapters depend on these numbers.
    """
    configuration = ON_ONE_RANK[name]
    planned = configuration.planned(SIZES_OF_BENCH, world=1)
    with group_of_one():
        step = bench.measure(configuration, SIZES_OF_BENCH)
    measured = step.peaks
    pairs = {key: (planned.peaks[key], size) for key, size in measured.items()}
    assert planned.peak == max(measured.values()), pairs
    if configuration.lora_rank is None:
        assert planned.peaks == measured
    assert sum(planned.parts.values()) == planned.peak
    assert planned.host_peak == step.host_peak
    for kind in ("matmul", "grouped", "attention"):
        assert planned.work.flops(kind) == step.work.flops(kind) > 0, kind
    assert planned.work.launches() == step.work.launches()
    # The plan assumes another dtype for some copies of frozen weights into FSDP2's buffers.
    assert planned.work.nbytes() == pytest.approx(step.work.nbytes(), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_plan_with_a_head_for_multi_token_prediction_is_exact(checkpointing: bool) -> None:
    """On one rank, the plan and a real step have the same peaks, to the byte, and the same work."""
    model = tiny_of_type("glm4_moe", dtype=torch.float32)
    options = {"mtp_layers": 2}
    planned = plan_step(
        model.config,
        ParallelConfig(**options),
        world_size=1,
        batch=Batch(24, 2, checkpointing),
        dtype=torch.float32,
        like_gpu=False,
    )
    assert planned.layers == model.config.num_hidden_layers + 2 == planned.layers_run[0]
    with group_of_one():
        patch(model, mtp_from_scratch=True, **options)
        layers = find_parts(model).layers
        apply_ep_fsdp2(model).train()
        if checkpointing:
            enable_checkpointing(model)
        optimizer = make_optimizer("adamw_fused", model.parameters())
        ids = torch.randint(model.config.vocab_size, (2, 24))
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        for _ in range(2):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mtp_loss(model)  # the first forward after this call adds to no sum, as in the plan
        step = count_step(model, layers, optimizer, inputs)
    assert planned.peaks == step.peaks()
    for kind in ("matmul", "grouped", "attention"):
        assert planned.work.flops(kind) == step.work.flops(kind) > 0, kind
    assert planned.work.launches() == step.work.launches()


def test_a_plan_for_the_trainer_holds_no_logits() -> None:
    """The plan has the same peaks as a real step with `fused_loss=True`."""
    model = tiny(num_hidden_layers=1, vocab_size=999).float()
    options: dict[str, Any] = {"world_size": 1, "dtype": torch.float32, "like_gpu": False}
    whole = plan_step(model.config, batch=Batch(300, 2), **options)
    planned = plan_step(model.config, batch=Batch(300, 2, only_loss_is_read=True), **options)
    with group_of_one():
        layers = find_parts(model).layers
        apply_ep_fsdp2(model, fused_loss=True).train()
        optimizer = make_optimizer("adamw_fused", model.parameters())
        ids = torch.randint(999, (2, 300))
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        for _ in range(2):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        step = count_step(model, layers, optimizer, inputs)
    assert planned.peaks == step.peaks()
    assert planned.peak < 0.75 * whole.peak


@pytest.mark.skipif(not has_fused_head(), reason="needs TRL 1.15")
@pytest.mark.slow
def test_the_peak_with_trls_head_is_exact() -> None:
    """The peak is in TRL's chunked head. Adapters in fp32 need more memory than in bf16."""
    head = replace(
        ON_ONE_RANK["bf16, nf4, adapters, checkpointing"], masters="model", fused_head=True
    )
    planned = head.planned(SIZES_OF_BENCH, world=1)
    with group_of_one():
        measured = max(bench.measure(head, SIZES_OF_BENCH).peaks.values())
    assert planned.where == "backward, head"
    assert planned.peak == measured
    in_fp32 = replace(head, masters="fp32").planned(SIZES_OF_BENCH, world=1)
    assert planned.parts["optimizer state"] < 0.6 * in_fp32.parts["optimizer state"]
    assert planned.peak < in_fp32.peak


@pytest.mark.slow
def test_offload_keeps_only_copies_on_the_device() -> None:
    """The device holds copies of parameters, which are made in forward and again in backward, and
    gradients until they are copied to the host. The host holds parameters, gradients, the two
    moments and the step counters.
    """
    config = SIZES_OF_BENCH.config()
    on_device, on_host, accumulated = (
        plan_step(
            config,
            ParallelConfig(ep_size=2),
            world_size=4,
            batch=Batch(96, accumulates=accumulates),
            offload=offload,
        )
        for offload, accumulates in ((False, False), (True, False), (True, True))
    )
    num_bytes = on_device.parts["parameters"]
    assert on_device.host_peak == 0 and 4 * num_bytes < on_host.host_peak < 5 * num_bytes
    assert not {"parameters", "gradients", "optimizer state"} & set(on_host.parts)
    assert on_host.peak < on_device.peak - 2 * num_bytes
    copied = {
        name: sum(copy.nbytes * n for copy, n in phase.collectives if copy.kind == HOST_COPY)
        for name, phase in on_host.work.phases.items()
    }
    assert sum(size for name, size in copied.items() if name.startswith("forward")) == num_bytes
    assert copied[OPTIMIZER] == 0 and 2 * num_bytes < sum(copied.values()) < 3 * num_bytes
    for plan, where in ((on_device, set()), (on_host, {OPTIMIZER}), (accumulated, None)):
        phases_on_host = {
            name.partition(",")[0]
            for name, phase in plan.work.phases.items()
            if any(operator.kind == ON_HOST for operator, _ in phase.operators)
        }
        # With gradient accumulation, backward adds to the gradients that are on the host.
        assert phases_on_host == ({"backward", OPTIMIZER} if where is None else where)


ON_FOUR_RANKS = [
    *(
        case
        for case in bench.CONFIGURATIONS
        if case.name in ("ep 1", "ep 2, sp 2, two sequences", "ep 4, checkpointing")
    ),
    bench.Configuration("ep 2, etp 2", {"ep_size": 2, "etp_size": 2}, batch=2),
    bench.Configuration("etp 4, checkpointing", {"etp_size": 4}, checkpointing=True, batch=2),
]


def _measure(rank: int, world: int) -> list[bench.Measured]:
    return bench.measure_rank(rank, bench.Sizes(layers=3), ON_FOUR_RANKS)


@pytest.mark.slow
def test_a_plan_for_four_ranks_is_within_5_percent() -> None:
    """The plan for the peak gets the expert load of the real step."""
    measured = run_ranks(_measure, bench.WORLD, timeout=500.0)
    for index, case in enumerate(ON_FOUR_RANKS):
        name = case.name
        largest = max(rank[index].peak for rank in measured)
        planned = case.planned(bench.Sizes(layers=3), load=measured[0][index].load)
        peak = planned.peak
        print(f"{name}: planned / measured {peak / largest:.3f}")
        assert abs(peak / largest - 1) <= 0.05, f"{name}: planned {peak}, measured {largest}"
        even_work = case.planned(bench.Sizes(layers=3)).work
        _assert_same_work(name, even_work, [rank[index].work for rank in measured])


def _assert_same_work(name: str, planned: StepWork, counted: list[StepWork]) -> None:
    """Compare the planned work of a rank with the work of real ranks.

    Work that does not depend on routes must be exactly equal. The FLOPs of experts and the
    dispatched rows are summed over all ranks and compared with a tolerance.
    """
    world = len(counted)
    expert_flops = sum(work.flops("grouped") for work in counted)
    # Both have the same number of (token, expert) pairs, but real routes spread them less evenly.
    assert planned.flops("grouped") * world == pytest.approx(expert_flops, rel=0.02), name
    for work in counted:
        for kind in ("matmul", "attention"):
            assert planned.flops(kind) == work.flops(kind) > 0, (name, kind)
        for purpose in {*PURPOSES} - {"rows"}:
            # First all ranks are on one node, then each rank is on a separate node.
            for node_size in (world, 1):
                sent, real = planned.sent(purpose, node_size), work.sent(purpose, node_size)
                assert sent == real, (name, purpose)
    # A real router prefers some experts, so more of a token's experts are on the same rank.
    sent_rows = sum(map(_count_sent_row_bytes, counted))
    assert _count_sent_row_bytes(planned) * world == pytest.approx(sent_rows, rel=0.1), name


def _count_sent_row_bytes(work: StepWork) -> int:
    return sum(
        collective.nbytes * number
        for phase in work.phases.values()
        for collective, number in phase.collectives
        if collective.purpose == "rows"
    )


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "ep 2, no checkpointing": ({"ep_size": 2}, {}, False),
    "nf4": ({"experts_dtype": "nf4", "ep_size": 2}, {"lora_rank": 4}, True),
    "sp, chunks": ({"sp_size": 2, "ep_size": 2, "dispatch_chunks": 2}, {"optimizer": "sgd"}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_few_layers_are_extrapolated_to_many(name: str) -> None:
    """Runs of 4 and 5 layers give the peak, its parts and the work of all 7, to the byte."""
    parallel, options, checkpointing = LAYOUTS[name]
    model = tiny(num_hidden_layers=7, **(SIZES["nf4"] if name == "nf4" else {}))
    few, whole = (
        plan_step(
            model.config,
            ParallelConfig(**parallel),
            world_size=4,
            batch=Batch(24, 2, checkpointing),
            all_layers=all_layers,
            **options,
        )
        for all_layers in (False, True)
    )
    assert (few.layers_run, whole.layers_run) == ((4, 5), (7,))
    assert few.peak == whole.peak and few.parts == whole.parts
    for kind in ("matmul", "grouped", "attention"):
        assert few.work.flops(kind) == whole.work.flops(kind) > 0, kind
    assert few.work.launches() == whole.work.launches()
    assert few.work.nbytes() == whole.work.nbytes()
    for purpose in PURPOSES:
        assert few.work.sent(purpose, 2) == whole.work.sent(purpose, 2), purpose
    assert set(few.peaks.values()) <= set(whole.peaks.values())


@pytest.mark.slow
def test_three_experts_of_a_block_are_extrapolated_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak and the work equal, to the byte, a plan that runs every expert."""
    config = tiny(num_hidden_layers=2, **SIZES["fp8"]).config
    plans = []
    stock = torch_mlp.Block.split

    def split_in_all(block: torch_mlp.Block, *tensors: Tensor, work: WorkCounter) -> Any:
        return stock(block, *tensors)

    for split in (fake.select_three_experts, split_in_all):
        monkeypatch.setattr(fake, "select_three_experts", split)
        parallel = ParallelConfig(experts_dtype="fp8")
        plans.append(
            plan_step(config, parallel, world_size=1, batch=Batch(96), lora_rank=4, like_gpu=False)
        )
    few, whole = plans
    assert few.peaks == whole.peaks
    for kind in ("matmul", "grouped", "attention"):
        assert few.work.flops(kind) == whole.work.flops(kind) > 0, kind
    assert few.work.nbytes() == whole.work.nbytes()
    assert few.work.launches() == whole.work.launches()


def test_experts_are_drawn_as_often_as_the_load_says() -> None:
    """Of the 4 experts of layer 0, one gets every token, one half of them, and two get a quarter.

    No token gets the same expert twice.
    """
    counts = torch.tensor([[40, 20, 10, 10], [20, 20, 20, 20]])
    load = ExpertLoad(counts, ("a", "b"), ep_size=2)
    choices = Choices.of_load(load, 2, 2)
    for layer, counts_E in enumerate(counts):
        ids_TK = choices.draw(layer, 5000)
        assert bool((ids_TK[:, 0] != ids_TK[:, 1]).all())
        share_E = ids_TK.flatten().bincount(minlength=4) / 10_000
        assert (share_E - counts_E / 80).abs().max() < 0.02
    assert choices.find_busiest_rank(2) == 0
    flipped = ExpertLoad(counts.flip(1), ("a", "b"), 2)
    assert Choices.of_load(flipped, 2, 2).find_busiest_rank(2) == 1
    assert Choices.evenly(4, 2).find_busiest_rank(2) == 0
    with pytest.raises(ValueError, match=r"load has 2 MoE layers.*the model has 3"):
        Choices.of_load(load, 2, 3)


@pytest.mark.parametrize(
    ("counts_E", "share_E"),
    [
        ([70, 10, 10, 10], [1, 1 / 3, 1 / 3, 1 / 3]),
        ([90, 60, 6, 4], [1, 6 / 7, 6 / 70, 4 / 70]),
        ([90, 0, 0, 0], [1, 1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_a_load_of_another_top_k_is_drawn_with_two_experts_per_token(
    counts_E: list[int], share_E: list[float]
) -> None:
    """With top_k 2, the first expert of each load would have a share above 1."""
    load = ExpertLoad(torch.tensor([counts_E]), ("a",), ep_size=2)
    choices = Choices.of_load(load, 2, 1)
    assert torch.allclose(choices.share_LE, torch.tensor([share_E], dtype=torch.float64))
    ids_TK = choices.draw(0, 5000)
    assert bool((ids_TK[:, 0] != ids_TK[:, 1]).all())


def test_tokens_choose_experts_of_a_few_groups() -> None:
    """Each token draws its experts from two of 4 groups. All experts are drawn equally often."""
    ids_TK = Choices.evenly(8, 3, groups=4, groups_per_token=2).draw(0, 5000)
    assert all(len(set(ids)) == 3 for ids in ids_TK.tolist())
    assert all(len({expert // 2 for expert in ids}) == 2 for ids in ids_TK.tolist())
    share_E = ids_TK.flatten().bincount(minlength=8) / 15_000
    assert (share_E - 1 / 8).abs().max() < 0.01


@pytest.mark.slow
def test_a_token_is_sent_only_to_the_ranks_of_its_groups() -> None:
    """If a token of DeepSeek-V3 uses one of two groups, all its experts are on one rank."""
    tokens, config = 64, tiny_of_type("deepseek_v3").config
    rows = {}
    for used in (1, 2):
        config.n_group, config.topk_group = 2, used
        work = plan_step(
            config, ParallelConfig(ep_size=2), world_size=2, batch=Batch(tokens), optimizer="none"
        ).work
        rows[used] = sum(work.sent("rows", 2))
    assert rows[1] < 0.7 * rows[2]
    # The rows of half the tokens and their results are sent in forward, and their gradients in
    # backward.
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace
    size = config.hidden_size * torch.bfloat16.itemsize
    assert rows[1] == pytest.approx(4 * moe_layers * tokens / 2 * size, rel=0.25)


@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_latent_attention_needs_no_matrix_of_scores(cp: int) -> None:
    """The values of latent attention are narrower than the keys. A CPU would make the matrix."""
    config = tiny_of_type("deepseek_v3").config
    options: dict[str, Any] = {"world_size": cp, "optimizer": "none"}
    plans = {
        tokens: plan_step(config, ParallelConfig(cp_size=cp), batch=Batch(tokens), **options)
        for tokens in (256, 512)
    }
    held = {
        tokens: plan.peak - plan.made_of[OPTIMIZER]["parameters"] for tokens, plan in plans.items()
    }
    assert held[512] < 2.2 * held[256]
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    # Forward has two products and backward five, each over half of the scores.
    per_layer = config.num_attention_heads * 512**2 * widths
    assert plans[512].work.flops("attention") == pytest.approx(
        3.5 / cp * config.num_hidden_layers * per_layer, rel=0.1
    )


def test_all_layers_run_if_they_differ() -> None:
    """With a dense layer among MoE layers, bytes do not grow linearly with the number of layers."""
    config = tiny(num_hidden_layers=6, mlp_only_layers=[0]).config
    assert plan_step(config, world_size=1, batch=Batch(8)).layers_run == (6,)


@pytest.mark.slow
def test_a_model_with_a_tower_is_planned_on_text() -> None:
    """On several ranks, a collective in the forward finds out which ranks have pictures.

    No token of the text stands for a picture, although the text is longer than the vocabulary.
    """
    config = tiny("qwen3_vl_moe").config
    flops_of_two_ranks, flops_of_one_rank = (
        plan_step(config, world_size=world, batch=Batch(200)).work.flops() for world in (2, 1)
    )
    assert flops_of_two_ranks == flops_of_one_rank > 0


def test_planning_leaves_no_global_state() -> None:
    stock = vars(collectives)["_all_gather"], torch.UntypedStorage.resize_, torch.get_rng_state()
    plan_step(tiny().config, world_size=1, batch=Batch(8), offload=True)
    with pytest.raises(ValueError, match=r"ep_size \(8\).*6 / 1 = 6"):
        plan_step(tiny().config, ParallelConfig(ep_size=8), world_size=6, batch=Batch(8))
    assert vars(collectives)["_all_gather"] is stock[0] and not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is stock[1] and "to" not in vars(Tensor)
    assert torch.equal(torch.get_rng_state(), stock[2])


def test_shrink_keeps_changes_that_help_until_the_step_fits() -> None:
    """In `peak_of`, adamw_fused saves 10 of 100, and adapters on attention only save 20."""
    options: Options = {
        "checkpointing": True,
        "optimizer": "adamw",
        "batch": 1,
        "experts_dtype": None,
        "experts_double_quant": False,
        "lora_rank": 4,
        "lora_targets": "both",
        "masters": "model",
        "fused_head": True,
        "whole_logits": False,
    }

    def peak_of(options: Options) -> int:
        saved = 10 * (options["optimizer"] == "adamw_fused") + 20 * (
            options["lora_targets"] != "both"
        )
        return 100 - saved

    changes = [(change.flag, peak) for change, peak in shrink(options, 75, peak_of)]
    assert changes == [("--optimizer adamw_fused", 90), ("--lora-targets attention", 70)]
    assert [peak for _, peak in shrink(options, 95, peak_of)] == [90]
    assert not list(shrink(options, 100, peak_of))
    assert {change.name for change in CHANGES} <= options.keys()
    large = options | {"fused_head": False, "whole_logits": True, "masters": "fp32"}
    tried = []

    def lower_peak_each_time(options: Options) -> int:
        tried.append(options)
        return 100 - len(tried)

    flags = [change.flag for change, _ in shrink(large, 0, lower_peak_each_time)]
    assert flags[:2] == ["without --whole-logits", "--fused-head"]
    assert flags[-2:] == ["--masters model", "--lora-targets attention"]
    without = [
        change.flag for change, _ in shrink(large, 0, lower_peak_each_time, without=["fused_head"])
    ]
    assert without == [flags[0], *flags[2:]]


@pytest.mark.parametrize("error", [ValueError, ImportError])
def test_shrink_leaves_out_changes_that_training_refuses(error: type[Exception]) -> None:
    """Training may refuse fp8 because of its blocks, and bitsandbytes may not be installed."""
    options: Options = dict.fromkeys(change.name for change in CHANGES) | {
        "checkpointing": True,
        "fused_head": True,
        "whole_logits": False,
        "batch": 1,
        "lora_rank": 4,
        "lora_targets": "attention",
        "masters": "model",
    }

    def peak_of(options: Options) -> int:
        if options["experts_dtype"] == "fp8":
            raise error("refused")
        return 50 if options["experts_dtype"] == "nf4" else 100

    changes = [change.flag for change, _ in shrink(options, 60, peak_of)]
    assert changes == ["--experts-dtype nf4"]


def test_a_smaller_batch_accumulates_gradients() -> None:
    """The other rows of `--batch` run in further forwards, between which gradients are kept."""
    options = {"model": tiny().config, "gpus": 1, "seq": 16, "batch": 1, "rows": 4}
    options |= {"checkpointing": True, "fused_head": False, "whole_logits": False}
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    defaults = vars(parser.parse_args(["memory", "model"]))
    config = tiny().config
    expected = plan_step(
        config, batch=Batch(16, 1, True, accumulates=True, only_loss_is_read=True), world_size=1
    )
    got = _plan_one_step(defaults | options)
    assert got.peaks == expected.peaks
    once = plan_step(config, batch=Batch(16, 1, True, only_loss_is_read=True), world_size=1)
    assert _plan_one_step(defaults | options | {"rows": 1}).peaks == once.peaks
    assert once.peaks["forward, before layers"] < expected.peaks["forward, before layers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny().config.save_pretrained(path)
    return path


@pytest.mark.slow
def test_the_command_names_options_that_make_the_step_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpus", "2", "--ep-size", "2", "--seq", "64", "--batch", "4"]
    arguments += ["--gpu-memory", "1e-4"]
    assert main(["memory", str(folder), *arguments]) == 0
    out = capsys.readouterr().out
    parallel = ParallelConfig(ep_size=2)
    batch = Batch(64, 2, only_loss_is_read=True)
    plan = plan_step(tiny().config, parallel, world_size=2, batch=batch)
    recomputed = replace(batch, checkpointing=True)
    less = plan_step(tiny().config, parallel, world_size=2, batch=recomputed)
    assert re.search(rf"^sum +{plan.peak / 2**30:.3f}$", out, re.MULTILINE)
    assert "does not fit in 0.0001 GiB" in out and "--checkpointing" in out
    assert f"{less.peak / 2**30:.3f} GiB" in out and f"in: {plan.where}" in out


@pytest.mark.parametrize("options", [["--checkpointing"], ["--batch", "2"], ["--whole-logits"]])
def test_options_of_a_step_need_seq(
    options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", str(folder), "--gpus", "2", *options]) == 2
    assert f"{' '.join(options)} is an option of a training step" in capsys.readouterr().err
