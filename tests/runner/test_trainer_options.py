"""Errors name the option of the framework that runs: axolotl, ms-swift, LLaMA-Factory or TRL.

The tests do not need the frameworks. An empty module with the right name replaces each of them.
"""

import sys
from collections.abc import Iterator
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import SkipBatchSampler
from accelerate.utils import ParallelismConfig
from support.fakes.axolotl_steps import Configuration, Data, configure, installed_axolotl, run
from support.needs import needs_tower_in_blocks
from support.tiny_models import batch, tiny
from torch.utils.data import DataLoader

from hf_moe_ep import patch
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.integrations.prepare import check_parallelism, take_over_sizes
from hf_moe_ep.integrations.shared_batches import compute_loss_of_swift
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream import frameworks

MODULES = [entry.module for entry in frameworks._FRAMEWORKS]
TO_SHARD = {
    "axolotl": r"axolotl: Add `fsdp_version: 2` and `fsdp_config: ",
    "swift.arguments": r"ms-swift: Add --fsdp fsdp2 to the command",
    "llamafactory": r"LLaMA-Factory: Add `fsdp: full_shard auto_wrap` and `fsdp_config: ",
    "trl.scripts": r"TRL: Add --accelerate_config fsdp2 to the command",
    "": r"Launch with `accelerate launch --config_file`",
}


@pytest.fixture(autouse=True)
def _remove_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (*MODULES, "swift.sequence_parallel"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def pretend_to_run(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if module:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))


@pytest.mark.parametrize("module", TO_SHARD)
def test_the_error_for_an_unsharded_model_names_the_option(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_run(module, monkeypatch)
    model = patch(tiny(dtype=torch.float32), ep_size=2)
    with pytest.raises(ValueError, match=rf"ep_size=2, .* never sharded: .* {TO_SHARD[module]}"):
        model(**batch(model, 2, 7))


def test_a_framework_that_uses_trl_is_named_before_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("trl.scripts", "axolotl"):
        pretend_to_run(module, monkeypatch)
    assert frameworks.how_to_shard().startswith("axolotl: ")


def test_context_parallelism_of_axolotl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl splits sequences itself."""
    pretend_to_run("axolotl", monkeypatch)
    match = r"axolotl was given context_parallel_size=2, which .* use cp_size of hf_moe"
    with pytest.raises(ValueError, match=match):
        take_over_sizes(ParallelismConfig(cp_size=2), [patch(tiny(num_hidden_layers=1))])


@pytest.mark.parametrize("module", ["trl.scripts", ""])
def test_context_parallelism_of_the_launch_is_used(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_run(module, monkeypatch)
    model, parallelism = patch(tiny(num_hidden_layers=1)), ParallelismConfig(cp_size=2)
    take_over_sizes(parallelism, [model])
    state = find_state(model)
    assert state is not None and state.config.cp_size == 2
    assert (parallelism.cp_size, parallelism.dp_shard_size, parallelism.total_size) == (1, 2, 2)
    assert "cp" not in parallelism.non_dp_dim_names


def test_later_models_get_the_sizes_of_the_launch_as_well() -> None:
    """`Trainer(model_init=)` builds a model in `__init__`, and another one in `train`."""
    parallelism = ParallelismConfig(cp_size=2)
    for _ in range(2):
        model = patch(tiny(num_hidden_layers=1))
        for _ in range(2):  # the Trainer and accelerator.prepare both take the sizes over
            take_over_sizes(parallelism, [model])
        state = find_state(model)
        assert state is not None and state.config.cp_size == 2
    assert (parallelism.cp_size, parallelism.dp_shard_size) == (1, 2)


def test_the_option_that_keeps_all_logits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frameworks.how_to_keep_all_logits() == "leave logits_to_keep out"
    pretend_to_run("swift.arguments", monkeypatch)
    words = frameworks.how_to_keep_all_logits()
    assert words == "ms-swift: add --use_logits_to_keep false to the command"


def test_axolotls_kernels_plugin_may_set_only_eager_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """axolotl's loader calls this method of a patched model, with "eager" if it has no kernel."""
    model = patch(tiny(num_hidden_layers=1, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"use patch\(model, experts_backend="):
        model.set_experts_implementation("eager")
    pretend_to_run("axolotl", monkeypatch)
    before = model(**batch(model, 2, 7)).loss
    model.set_experts_implementation("eager")
    assert torch.equal(model(**batch(model, 2, 7)).loss, before)
    with pytest.raises(ValueError, match=r"axolotl: leave .* use_sonicmoe out of the YAML file"):
        model.set_experts_implementation("scattermoe")


@needs_tower_in_blocks
def test_the_tower_is_found_if_ms_swift_replaces_the_forward() -> None:
    """ms-swift's forward passes the arguments that it does not know to the forward of the class."""
    model = patch(tiny("qwen3_vl_moe"))
    own = model.model.forward

    def forward(self: Any, pixel_values: Any = None, **others: Any) -> Any:
        return own(pixel_values=pixel_values, **others)

    model.model.forward = MethodType(forward, model.model)
    state = find_state(model)
    assert state is not None
    assert find_parts(model, state.plan).tower is not None


def test_expert_parallelism_of_axolotl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl adds ep_size to Accelerate's configuration (monkeypatch/accelerate)."""
    pretend_to_run("axolotl", monkeypatch)
    state = find_state(patch(tiny(num_hidden_layers=1)))
    assert state is not None
    parallelism = ParallelismConfig()
    parallelism.ep_size = 8  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"axolotl was given expert_parallel_size=8, .* use ep_si"):
        check_parallelism(parallelism, state)


def test_sequence_parallelism_of_ms_swift_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("swift.sequence_parallel")
    module.sequence_parallel = SimpleNamespace(world_size=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swift.sequence_parallel", module)
    state = find_state(patch(tiny(num_hidden_layers=1)))
    assert state is not None
    check_parallelism(None, state)
    module.sequence_parallel.world_size = 4
    with pytest.raises(ValueError, match=r"--sequence_parallel_size 4, .* run --sp-size 4"):
        check_parallelism(None, state)


class SwiftSampler:
    """A replacement of ms-swift's batch sampler, on rank 3 of 4."""

    def __init__(self, num_samples: int) -> None:
        self.tp_size = 1
        self.total_samples = num_samples // self.world_size

    @property
    def world_size(self) -> int:
        return 4 // self.tp_size

    def __iter__(self) -> Iterator[list[int]]:
        rank = 3 // self.tp_size
        for index in range(rank, self.total_samples * self.world_size, self.world_size):
            yield [index]

    def __len__(self) -> int:
        return self.total_samples


@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_of_an_sp_group_draw_the_same_samples_from_ms_swift(resumed: bool) -> None:
    """4 ranks share 9 samples in 2 steps. 2 groups need 4 steps, and rank 3 draws like rank 2."""
    sampler: Any = SwiftSampler(9)
    loader = DataLoader(
        range(9), batch_sampler=SkipBatchSampler(sampler, 1) if resumed else sampler
    )
    assert [x.item() for x in loader] == ([7] if resumed else [3, 7])
    frameworks.split_over_data_ranks(loader, 2)
    assert [x.item() for x in loader] == ([3, 5, 7] if resumed else [1, 3, 5, 7])
    with pytest.raises(ValueError, match=r"sp_size=2 .* leave out --streaming, or --sp-size"):
        frameworks.split_over_data_ranks(SimpleNamespace(base_dataloader=loader), 2)


def test_a_loss_is_multiplied_by_the_number_of_data_ranks() -> None:
    """ms-swift multiplies by 4 processes. Two of them share a batch, so the factor must be 2."""
    accelerator = SimpleNamespace(_hf_moe_ep_sharing=2)
    args = SimpleNamespace(average_tokens_across_devices=True)
    trainer: Any = SimpleNamespace(accelerator=accelerator, args=args)

    def theirs(self: Any, model: Any, inputs: Any, return_outputs: bool, num_items: Any) -> Any:
        loss = 3.0 if num_items is None else 4 * 3.0
        return (loss, "outputs") if return_outputs else loss

    for accepts in (True, False):
        trainer.model_accepts_loss_kwargs = accepts
        for num_items, want in ((None, 3.0), (7, 6.0 if accepts else 12.0)):
            for with_outputs in (True, False):
                call = (theirs, trainer, None, {}, with_outputs, num_items)
                got = compute_loss_of_swift(*call)
                assert got == ((want, "outputs") if with_outputs else want)


def test_trainers_of_ms_swift_that_read_logits_are_refused() -> None:
    sft, dpo = type("Seq2SeqTrainer", (), {}), type("DPOTrainer", (), {})
    sft.__module__ = "swift.trainers.seq2seq_trainer"
    dpo.__module__ = "swift.rlhf_trainers.dpo_trainer"
    frameworks.check_reads_no_logits(sft())
    with pytest.raises(ValueError, match=r"DPOTrainer reads .* leave --sp-size out \(swift sft"):
        frameworks.check_reads_no_logits(dpo())


# Keys of axolotl's configuration -> (max_steps, warmup_steps, logging_steps), counted with a batch
# for each of 8 ranks, and then if two ranks share a batch. A data set has 8,000 samples, which are
# packed into 4,001 rows.
WITH_EFFICIENCY = {"sample_packing": True, "sample_packing_eff_est": 0.99}
STEPS_OF_AXOLOTL: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "an epoch": ({}, (500, 15, 2), (1000, 30, 5)),
    "a ratio": ({"warmup_ratio": 0.1, "logging_steps": 7}, (500, 50, 7), (1000, 100, 7)),
    "warm-up is set": ({"warmup_steps": 15}, (500, 15, 2), (1000, 15, 5)),
    "max_steps below": ({"max_steps": 300}, (300, 9, 1), (300, 9, 1)),
    "max_steps between": ({"max_steps": 700}, (700, 15, 2), (700, 21, 3)),
    "max_steps above": ({"max_steps": 5000}, (5000, 15, 2), (5000, 30, 5)),
    "all are set": (
        {"max_steps": 700, "warmup_steps": 3, "logging_steps": 4},
        (700, 3, 4),
        (700, 3, 4),
    ),
    "packed": ({"sample_packing": True}, (500, 15, 2), (1000, 30, 5)),
    "packed by an estimate": (WITH_EFFICIENCY, (499, 14, 2), (999, 29, 4)),
    "a stream": ({"streaming": True, "max_steps": 50}, (50, 0, 500), (50, 0, 500)),
    "dpo": ({"rl": "dpo"}, (500, 15, 2), (1000, 30, 5)),
    "dpo, max_steps": ({"rl": "dpo", "max_steps": 400}, (400, 15, 2), (400, 30, 5)),
    "grpo": ({"rl": "grpo"}, (-1, 0, 500), (-1, 0, 500)),
}


def train_by_axolotl(keys: dict[str, Any], world_size: int, others: int = 0) -> tuple[int, ...]:
    """Train with two ranks per batch. Returns the three arguments that the Trainer then has.

    `others`: steps that a plugin adds to axolotl's count.
    """
    cfg = Configuration(
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        num_epochs=1,
        total_num_tokens=4_001_000,
        sequence_len=500,
        **keys,
    )
    data, names = Data(8000, num_packed=4001), ("max_steps", "warmup_steps", "logging_steps")
    args = SimpleNamespace(max_steps=-1, warmup_steps=0, logging_steps=500, eval_steps=None)
    trainer = SimpleNamespace(args=args)
    counted = configure(cfg, args, data, world_size)
    if others and counted:
        counted += others
        args.max_steps = cfg.max_steps or counted
    with installed_axolotl():
        before = tuple(getattr(args, name) for name in names)
        run(cfg, data, counted, lambda: frameworks.recount_steps(trainer, 1, ""))
        assert tuple(getattr(args, name) for name in names) == before
        for _ in range(2):  # a second training changes nothing
            run(cfg, data, counted, lambda: frameworks.recount_steps(trainer, 2, "sp_size=2"))
    assert args.eval_steps is None
    return (*before, *(getattr(args, name) for name in names))


@pytest.mark.parametrize("case", STEPS_OF_AXOLOTL)
def test_steps_of_axolotl_are_counted_for_shared_batches(case: str) -> None:
    keys, counted, right = STEPS_OF_AXOLOTL[case]
    assert train_by_axolotl(keys, world_size=8) == (*counted, *right)


def test_steps_that_axolotl_did_not_count_are_refused() -> None:
    match = r"counted 509 steps .* sp_size=2 2 ranks share one batch; write `max_steps: 1018`, `war"
    with pytest.raises(ValueError, match=match):
        train_by_axolotl({}, world_size=8, others=9)
    keys = {"max_steps": 700, "warmup_steps": 3, "logging_steps": 4}
    assert train_by_axolotl(keys, world_size=8, others=9)[3:] == (700, 3, 4)
    trainer = type("AxolotlTrainer", (), {"args": SimpleNamespace(max_steps=500)})
    trainer.__module__ = "axolotl.core.trainers.base"
    with installed_axolotl(), pytest.raises(ValueError, match=r"start .* by axolotl\.train\.train"):
        frameworks.recount_steps(trainer(), 2, "sp_size=2")
