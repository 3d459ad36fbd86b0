"""`plan_memory` equals, to the byte, the memory of real ranks after one optimizer step."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.adapters import with_lora
from support.architectures.models import tiny as tiny_of_type
from support.quantised import SIZES
from support.ranks import run_ranks
from support.tiny_models import batch, tiny, vision_batch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2, patch
from hf_moe_ep.cli.main import main
from hf_moe_ep.mtp_head import find_head
from hf_moe_ep.planner.config import build_meta_model, find_config
from hf_moe_ep.planner.held import MemoryPlan, plan_memory
from hf_moe_ep.planner.options import read_published_configs
from hf_moe_ep.state import STATE, iterate_quantised_matrices, patched_state

H = 32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Case:
    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of plan_memory
    lora: dict[str, Any] | None = None  # arguments of with_lora that make the adapters of `options`

    def build_stock(self) -> nn.Module:
        dtype = self.options.get("dtype", torch.bfloat16)
        if self.parallel.get("mtp_layers"):
            return tiny_of_type("glm4_moe", dtype=dtype)
        return tiny(**({"dtype": dtype} | self.model))

    def make_plan(self, world: int) -> MemoryPlan:
        parallel = ParallelConfig(**self.parallel)
        return plan_memory(self.build_stock().config, parallel, world_size=world, **self.options)


FP32 = {"dtype": torch.float32}


def make_quantised_case(name: str, kind: str, targets: str = "both", **parallel: Any) -> Case:
    """Build a case with experts quantised to `kind` and adapters on `targets`."""
    model = SIZES[kind] | parallel.pop("model", {})
    lora = {
        "both": {"modules": PROJECTIONS},
        "attention": {"modules": PROJECTIONS, "parameters": ()},
    }
    options = {"lora_rank": 3, "lora_targets": targets} | parallel.pop("options", {})
    return Case(
        f"{kind}, {name}", parallel | {"experts_dtype": kind}, model, options, lora[targets]
    )


TWO_RANKS = [
    Case("ep 1, bf16 with fp32 masters"),
    Case("ep 2, bf16 alone", {"ep_size": 2}, options={"masters": "model"}),
    Case("fp32, 3 experts on 2 ranks", {"expert_shard_dim": 0}, {"num_experts": 3}, FP32),
    Case("not resharded", {"reshard_after_forward": False}),
    make_quantised_case("nested, ep 2", "nf4", ep_size=2, experts_double_quant=True),
    make_quantised_case("ep 1", "fp8"),
]
FOUR_RANKS = [
    Case("ep 1"),
    Case("ep 2", {"ep_size": 2}, options=FP32),
    Case("ep 4, tied", {"ep_size": 4}, {"tie_word_embeddings": True}),
    Case("HSDP", {"dp_replicate_size": 2}, {"num_experts": 3, "moe_intermediate_size": 25}),
    Case("HSDP, ep 2", {"dp_replicate_size": 2, "ep_size": 2}),
    Case("sp 2, ep 2", {"sp_size": 2, "ep_size": 2}, options={"optimizer": "sgd"}),
    Case("dim 1", {"ep_size": 2, "expert_shard_dim": 1}),
    Case("ep 2 x etp 2", {"ep_size": 2, "etp_size": 2}),
    Case(
        "LoRA, etp 2, an expert over ep_fsdp",
        {"etp_size": 2},
        {"num_experts": 1, "num_experts_per_tok": 1},
        options={"lora_rank": 2, "lora_targets": "experts"},
        lora={"modules": ()},
    ),
    Case("3 experts on 4 ranks", {}, {"num_experts": 3, "moe_intermediate_size": 25}),
    Case(
        "ep outside, 3 experts on 2 ranks",
        {"ep_size": 2, "ep_outside": True, "expert_shard_dim": 0},
        {"num_experts": 6},
    ),
    Case("LoRA", {"ep_size": 2}, options={"lora_rank": 3}, lora={"modules": PROJECTIONS}),
    *(
        Case(f"fixed buffers{name}", {"fsdp_double_buffer": True} | layout, *more)
        for name, layout, *more in (
            ("", {"ep_size": 2}),
            (", ep 4", {"ep_size": 4}),
            (", HSDP", {"dp_replicate_size": 2}, {"num_hidden_layers": 1}),
            (", tied", {"ep_size": 2}, {"tie_word_embeddings": True}),
        )
    ),
    Case(
        "LoRA, experts, bf16",
        {"ep_size": 4},
        options={"lora_rank": 2, "lora_targets": "experts", "masters": "model"},
        lora={"modules": ()},
    ),
    Case(
        "LoRA, attention",
        options={"lora_rank": 5, "lora_targets": "attention"},
        lora={"modules": PROJECTIONS, "parameters": ()},
    ),
    make_quantised_case("ep 2", "nf4", ep_size=2),
    make_quantised_case("attention, HSDP", "nf4", "attention", dp_replicate_size=2, ep_size=2),
    make_quantised_case("bf16 adapters", "nf4", ep_size=2, options={"masters": "model"}),
    make_quantised_case("6 experts on 4 ranks, rows cut", "nf4", model={"num_experts": 6}),
    make_quantised_case(
        "6 experts on 4 ranks, padded", "fp8", expert_shard_dim=0, model={"num_experts": 6}
    ),
    make_quantised_case("not resharded", "fp8", ep_size=4, reshard_after_forward=False),
    Case("pictures", {"ep_size": 2}, {"name": "qwen3_vl_moe"}),
    *(
        Case(name, {"mtp_from_scratch": True, "ep_size": 2} | parallel)
        for name, parallel in (
            ("MTP", {"mtp_layers": 1}),
            ("MTP of 2 layers, fixed buffers", {"mtp_layers": 2, "fsdp_double_buffer": True}),
        )
    ),
]


def count_bytes(tensors: Iterable[Any]) -> int:
    """Count the bytes of the storages of tensors. A shared storage counts once."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def count_gathered_bytes(modules_of_part: Iterable[nn.Module]) -> int:
    """Count the bytes of the parameters of modules after their FSDP2 units are all-gathered."""
    modules = [module for part in modules_of_part for module in part.modules()]
    units = [module for module in modules if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    ungathered = {id(p) for p in list_ungathered_weights(modules)}
    parameters = (p for part in modules_of_part for p in part.parameters())
    size = count_bytes(p for p in parameters if id(p) not in ungathered)
    for unit in units:
        unit.reshard()
    return size


def list_ungathered_weights(modules: Iterable[nn.Module]) -> list[DTensor]:
    """List the expert weights that FSDP2 does not manage."""
    layers = [(module, vars(module).get(STATE)) for module in modules]
    return [
        getattr(module, name)
        for module, layer in layers
        for name in getattr(layer, "whole_weights", ())
    ]


def count_cast_bytes(layer: nn.Module) -> int:
    """Count the bytes of the bf16 copies that a layer makes of its experts' fp32 masters."""
    masters = [p for p in list_ungathered_weights(layer.modules()) if p.dtype == torch.float32]
    return sum(2 * p.to_local().numel() for p in masters)


def find_most_gathered_bytes(model: Any, case: Case) -> int:
    """Return the largest number of bytes that are gathered at a time.

    The parts of a model are the embedding, the layers, and the final norm with the head. Two
    neighbouring parts are gathered at a time. In a vision tower, two neighbouring blocks are
    gathered, and the tower's parameters outside the blocks. In a head for multi-token prediction
    with one or two layers, the whole head and the output head are gathered.
    """
    cast = 0
    if case.options.get("dtype") != torch.float32:
        cast = max(map(count_cast_bytes, _list_layers(model)))
    inner = model.get_base_model() if case.lora is not None else model
    text = getattr(inner.model, "language_model", inner.model)
    layers = [[layer] for layer in text.layers]
    embedding, tail = [text.embed_tokens], [text.norm, inner.lm_head]
    if not case.parallel.get("reshard_after_forward", True):
        return count_gathered_bytes([model]) + cast
    if case.model.get("tie_word_embeddings"):
        tied = count_gathered_bytes([text.embed_tokens, text.norm])
        return tied + sum(map(count_gathered_bytes, layers)) + cast
    parts = [*map(count_gathered_bytes, (embedding, *layers, tail))]
    pairs = [a + b for a, b in pairwise(parts)]
    if hasattr(inner.model, "visual"):
        tower = inner.model.visual
        blocks = [count_gathered_bytes([block]) for block in tower.blocks]
        outside_blocks = count_gathered_bytes([tower]) - sum(blocks)
        pairs += [outside_blocks + a + b for a, b in pairwise(blocks)]
    head = find_head(inner)
    if head is not None:
        blocks = [count_gathered_bytes([block]) for block in head.blocks]
        outside_blocks = count_gathered_bytes([head]) - sum(blocks)
        pairs.append(count_gathered_bytes(tail) + outside_blocks + sum(blocks))
    return max(pairs) + cast


def _list_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


def train_one_step(case: Case) -> dict[str, int]:
    """Train one step on this rank. Returns the bytes that the rank holds afterwards."""
    model = patch(case.build_stock(), **case.parallel)
    if case.lora is not None:
        low = case.options.get("masters") == "model"
        model = with_lora(model, r=case.options["lora_rank"], fp32=not low, **case.lora)
    policy = MixedPrecisionPolicy() if case.options.get("masters") == "model" else None
    apply_ep_fsdp2(model, mp_policy=policy)
    if case.model.get("name"):
        inputs = vision_batch(model, [[5, (4, 4), 3]])
    else:
        inputs = batch(model, 2, 10)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if case.options.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**inputs).loss.backward()
    optimizer.step()
    buffers = patched_state(model).buffers
    num_buffer_bytes = 0 if buffers is None else buffers.num_bytes
    states = [value for state in optimizer.state.values() for value in state.values()]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        "parameters": count_bytes(model.parameters()),
        "gradients": count_bytes(p.grad for p in trained),
        "optimizer": count_bytes(value for value in states if isinstance(value, Tensor)),
        "gathered": find_most_gathered_bytes(model, case),
        "experts": count_bytes(list_quantised_tensors(model)),
        "buffers": num_buffer_bytes,
    }


def list_quantised_tensors(model: nn.Module) -> list[Tensor]:
    stacks = [stack for _, stack, _ in iterate_quantised_matrices(model)]
    return [tensor for stack in stacks for tensor in stack.by_name("").values()]


def _measure(rank: int, world: int, cases: list[Case]) -> list[dict[str, int]]:
    return [train_one_step(case) for case in cases]


@pytest.mark.parametrize(
    "world, cases", [(2, TWO_RANKS), pytest.param(4, FOUR_RANKS, marks=pytest.mark.slow)]
)
def test_every_rank_holds_what_the_plan_says(world: int, cases: list[Case]) -> None:
    measured = run_ranks(_measure, world, cases)
    wrong = []
    for index, case in enumerate(cases):
        plan = case.make_plan(world)
        for rank in range(world):
            actual = measured[rank][index]
            of_rank = plan.of_rank(rank)
            expected = {
                name: getattr(of_rank, name) for name in ("parameters", "gradients", "optimizer")
            }
            expected |= {"gathered": plan.gathered, "experts": actual["experts"]}
            expected["buffers"] = plan.buffers
            if actual != expected:
                wrong.append(f"{case.name}, rank {rank}: holds {actual}, planned {expected}")
        for name in ("parameters", "gradients", "optimizer"):
            num_bytes = sum(of_rank[index][name] for of_rank in measured)
            assert plan.all_ranks(name) == num_bytes, case.name
        if plan.parallel.experts_dtype is not None:
            num_bytes = sum(of_rank[index]["experts"] for of_rank in measured)
            matrices = [p for n, p in case.build_stock().named_parameters() if ".experts." in n]
            replicas = plan.parallel.dp_replicate_size or 1
            per_parameter = num_bytes / replicas / sum(p.numel() for p in matrices)
            assert plan.expert_bytes == per_parameter, case.name
            limit = {"nf4": 0.57, "fp8": 1.01}[plan.parallel.experts_dtype]
            padding = 8 / 6 if "padded" in case.name else 1
            assert per_parameter <= limit * padding, case.name
    assert not wrong, "\n".join(wrong)


def test_ranks_with_different_bytes_are_planned_separately() -> None:
    """A vocabulary of 97 on 4 ranks gives 25, 25, 25 and 22 rows. All other shards are equal."""
    plan = Case("", {"ep_size": 2}, options=FP32).make_plan(4)
    assert [kind.ranks for kind in plan.kinds] == [(0, 1, 2), (3,)]
    assert (plan.largest, plan.smallest) == (plan.of_rank(0), plan.of_rank(3))
    rows = 2 * H * 4  # bytes of one row of the embedding and of the head
    assert plan.largest.optimizer - plan.smallest.optimizer == 2 * 3 * rows
    assert plan.all_ranks("parameters") == 4 * plan.total + 3 * rows, "padded to 100 rows"
    tensors = plan.all_ranks("optimizer") - 2 * 4 * plan.total
    assert tensors == 4 * 4 * len(list(tiny().parameters())), "counters; moments are unpadded"


def test_the_environment_adds_no_stages_to_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pp_size of 2 in the environment, the plan is still for all ranks."""
    expected = plan_memory(tiny().config, world_size=4)
    monkeypatch.setenv("HF_MOE_EP_PP_SIZE", "2")
    assert plan_memory(tiny().config, world_size=4) == expected


def test_replicas_are_counted_and_even_shards_are_not_padded() -> None:
    even = {"vocab_size": 96}
    for replicas in (1, 2):
        case = Case("", {"ep_size": 2, "dp_replicate_size": replicas}, even)
        plan = case.make_plan(8)
        assert len(plan.kinds) == 1
        assert plan.trained == plan.total == sum(p.numel() for p in case.build_stock().parameters())
        assert plan.all_ranks("parameters") == 4 * plan.total * replicas
        assert plan.all_ranks("gradients") == plan.all_ranks("parameters")
        assert plan.all_ranks("held") == 4 * plan.all_ranks("parameters") + 8 * 4 * len(
            list(tiny().parameters())
        )


def test_the_plan_counts_parameters_with_adapters() -> None:
    options = {"lora_rank": 3, "lora_targets": "experts"}
    plan = Case("", options=options).make_plan(1)
    model = with_lora(tiny(), r=3, modules=())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert plan.trained == trained == 2 * 8 * 3 * (32 + 48 + 24 + 32)
    assert plan.total == sum(p.numel() for p in model.parameters())
    routed = 2 * 8 * 3 * 24 * 32 + trained  # each token is routed to 2 of 8 experts
    assert plan.active == plan.total - routed + routed // 4


def test_quantised_experts_have_as_many_parameters_as_in_bf16() -> None:
    """The scales of quantised experts are not counted as parameters."""
    sizes = SIZES["nf4"] | {"num_experts": 6}
    options = {"lora_rank": 3}
    plain = Case("", {}, sizes, options).make_plan(2)
    for nested in (False, True):
        parallel = {"experts_dtype": "nf4", "experts_double_quant": nested}
        quantised_plan = Case("", parallel, sizes, options).make_plan(2)
        for name in ("total", "trained", "active"):
            assert getattr(quantised_plan, name) == getattr(plain, name), name
        assert plain.expert_bytes == 2
        assert quantised_plan.expert_bytes == pytest.approx(0.5161 if nested else 0.5625, abs=1e-3)


# The published number of parameters, exact and in billions. Qwen3-VL-235B has the text model of
# Qwen3-235B and the tower of Qwen3-VL-30B, whose four mergers have 4096 output columns instead of
# 2048.
_TOWER = 31_070_754_032 - 30_532_122_624 + 4 * (4 * 1152 + 1) * 2048
PUBLISHED = {
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 30.5),
    "Qwen/Qwen3-235B-A22B": (235_093_634_560, 235.1),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (31_070_754_032, 31.1),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (235_093_634_560 + _TOWER, 235.7),
}


def test_known_models_have_the_published_size() -> None:
    assert set(read_published_configs()) == set(PUBLISHED)
    for name, (exact, billions) in PUBLISHED.items():
        model = build_meta_model(find_config(name), torch.bfloat16)
        count = sum(p.numel() for p in model.parameters())
        assert (count, round(count / 1e9, 1)) == (exact, billions), name
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


def test_planning_leaves_no_global_state() -> None:
    before = dict(os.environ), torch.get_rng_state(), torch.get_default_dtype()
    with pytest.raises(ValueError, match=r"ep_size \(8\).*6 / 1 = 6"):
        plan_memory(tiny().config, ParallelConfig(ep_size=8), world_size=6)
    assert not dist.is_initialized(), "the fake process group stays after an error"
    plan_memory(tiny().config, world_size=3)
    assert not dist.is_initialized()
    assert os.environ == before[0] and torch.get_default_dtype() == before[2]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_real_process_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="a real one of 1 ranks"):
            plan_memory(tiny().config, world_size=2)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny().config.save_pretrained(path)
    return path


def run_command(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["memory", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_command_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_command(capsys, folder, "--gpus", 4, "--ep-size", 2, "--gpu-memory", 0.5)
    plan = Case("", {"ep_size": 2}).make_plan(4)
    assert f"{plan.total:,} parameters, {plan.trained:,} trained, {plan.active:,} active" in out
    assert "4 ranks = dp_replicate 1 x ep_fsdp 2 x ep 2, sp 1; bfloat16, masters fp32" in out
    assert "rank 0" in out and "rank 3" in out
    free = 0.5 - (plan.largest.held + plan.gathered) / 2**30
    assert f"fits in 0.5 GiB: {free:.3f} GiB are left" in out
    assert "not counted: activations," in out and max(map(len, out.splitlines())) <= 120


def test_command_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", 8, "--ep-size", 2, "--sp-size", 2, "--dp-replicate-size", 2, "--json")
    training = ("--dtype", "float16", "--masters", "model", "--optimizer", "sgd")
    lora = ("--lora-rank", 3, "--lora-targets", "attention", "--gpu-memory", 5e-5)
    printed = json.loads(run_command(capsys, folder / "config.json", *options, *training, *lora))
    plan = plan_memory(
        tiny().config,
        ParallelConfig(ep_size=2, sp_size=2, dp_replicate_size=2),
        world_size=8,
        dtype=torch.float16,
        masters="model",
        optimizer="sgd",
        lora_rank=3,
        lora_targets="attention",
    )
    assert printed["parallel"] == vars(plan.parallel)
    assert printed["trained"] == plan.trained < printed["total"] == plan.total
    for kind, entry in zip(plan.kinds, printed["kinds"], strict=True):
        assert entry == vars(kind) | {"ranks": list(kind.ranks), "held": kind.held}
    assert printed["all_ranks"]["held"] == plan.all_ranks("held")
    free = int(5e-5 * 2**30) - plan.largest.held - plan.gathered
    assert printed["left"] == free < 0
    out = run_command(capsys, folder, *options[:-1], *training, *lora)
    assert f"does not fit in 5e-05 GiB: {-free / 2**30:.3f} GiB are missing" in out


def test_command_plans_etp_and_fixed_buffers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = ParallelConfig(ep_size=2, etp_size=2, fsdp_double_buffer=True)
    plan = plan_memory(tiny().config, parallel, world_size=8)
    arguments = ("--gpus", 8, "--ep-size", 2, "--etp-size", 2, "--fsdp-double-buffer")
    out = run_command(capsys, folder, *arguments)
    assert "8 ranks = dp_replicate 1 x ep_fsdp 2 x ep 2 x etp 2, sp 1; " in out
    assert f"fixed buffers{plan.buffers / 2**30:>20.3f}" in out and plan.buffers > 0
    printed = json.loads(run_command(capsys, folder, *arguments, "--json"))
    assert (printed["buffers"], printed["gathered"]) == (plan.buffers, plan.gathered)


@pytest.mark.slow
def test_command_plans_a_head_for_multi_token_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_of_type("glm4_moe").config
    config.save_pretrained(tmp_path)
    arguments = ("--gpus", 2, "--ep-size", 2, "--json", "--seq", 16)
    without, with_head = (
        json.loads(run_command(capsys, tmp_path, *arguments, "--mtp-layers", n)) for n in (0, 1)
    )
    model = patch(tiny_of_type("glm4_moe"), mtp_layers=1, mtp_from_scratch=True)
    assert with_head["total"] == sum(p.numel() for p in model.parameters()) > without["total"]
    assert with_head["step"]["peak"] > without["step"]["peak"]
    assert (
        "layers" in without["step"] and with_head["step"]["layers"] == 1 + config.num_hidden_layers
    )


def test_short_spellings_of_the_sizes_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny().config.save_pretrained(tmp_path)
    long = ("--ep-size", 2, "--etp-size", 2, "--sp-size", 2, "--cp-size", 1)
    short = ("--ep", 2, "--etp", 2, "--sp", 2, "--cp", 1, "--dp-replicate", 2)
    plans = [
        run_command(capsys, tmp_path, "--gpus", 8, *sizes)
        for sizes in ((*long, "--dp-replicate-size", 2), short)
    ]
    assert plans[0] == plans[1]
    assert "8 ranks = dp_replicate 2 x ep_fsdp 1 x ep 2 x etp 2, sp 2" in plans[0]


ERRORS = {
    "no world": (["{}"], "needs --gpus"),
    "batch": (
        ["{}", "--gpus", "4", "--sp-size", "2", "--seq", "8", "--batch", "3"],
        r"--batch \(3\) counts all GPUs .* 2 data ranks of --gpus 4 --sp-size 2; try --batch 4",
    ),
    "no such shape": (
        ["Qwen9", "--gpus", "2"],
        "'Qwen9' is not a known model.*Qwen/Qwen3-30B-A3B",
    ),
    "no ranks": (["{}", "--gpus", "0"], r"world_size \(0\)"),
    "experts": (["{}", "--gpus", "6", "--ep-size", "3"], r"ep_size \(3\) must divide.*\(8\)"),
    "ranks": (["{}", "--gpus", "6", "--ep-size", "4"], r"ep_size \(4\) must divide.*6 / 1"),
    "replicas": (["{}", "--gpus", "4", "--dp-replicate-size", "3"], r"\(3\).*\(4\)"),
    "heads": (["{}", "--gpus", "8", "--sp-size", "8"], r"sp_size \(8\)"),
    "rank": (["{}", "--gpus", "2", "--lora-rank", "0"], r"lora_rank \(0\)"),
    "memory": (["{}", "--gpus", "2", "--gpu-memory", "-1"], r"--gpu-memory \(-1\)"),
    "infinite memory": (
        ["{}", "--gpus", "2", "--seq", "8", "--gpu-memory", "inf"],
        r"--gpu-memory \(inf\) must be more than 0 and finite.*try --gpu-memory 80",
    ),
    "trained bytes": (
        ["{}", "--gpus", "2", "--experts-dtype", "nf4"],
        "nf4 quantises frozen experts.*--lora-rank 16",
    ),
    "no head of this type": (
        ["{}", "--gpus", "2", "--mtp-layers", "1"],
        "mtp_layers=1: heads for multi-token prediction were tested on .*, not on qwen3_moe",
    ),
    "blocks": (
        ["{}", "--gpus", "2", "--experts-dtype", "nf4", "--lora-rank", "2"],
        r"blocks of 64.*\[out 48, in 32\] has 32",
    ),
    "nested fp8": (
        ["{}", "--gpus", "2", *["--experts-dtype", "fp8", "--lora-rank", "2"]] + ["--double-quant"],
        "experts_double_quant=True.*'fp8'",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_arguments_give_one_line_that_names_them(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = ERRORS[case]
    assert main(["memory", *(argument.format(folder) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err


def test_unknown_options_of_plan_memory_are_refused() -> None:
    for wrong in ({"masters": "fp16"}, {"optimizer": "adam"}, {"lora_rank": 2, "lora_targets": ""}):
        with pytest.raises(ValueError, match=f"{list(wrong)[-1]}=.* is unknown; use "):
            plan_memory(tiny().config, world_size=2, **wrong)
