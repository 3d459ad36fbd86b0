"""Errors name the option of the framework that runs: axolotl, ms-swift, LLaMA-Factory or TRL.

The frameworks are not installed here. A module of the right name stands for each of them.
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import SkipBatchSampler
from accelerate.utils import ParallelismConfig
from support.tiny_models import batch, tiny
from torch.utils.data import DataLoader

from hf_moe_ep import patch
from hf_moe_ep.integrations.prepare import check_parallelism
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream import trainers

MODULES = [entry.module for entry in trainers._FRAMEWORKS]
TO_SHARD = {
    "axolotl": r"axolotl: Add `fsdp_version: 2` and `fsdp_config: ",
    "swift.arguments": r"ms-swift: Add --fsdp fsdp2 to the command",
    "llamafactory": r"LLaMA-Factory: Add `fsdp: full_shard auto_wrap` and `fsdp_config: ",
    "trl.scripts": r"TRL: Add --accelerate_config fsdp2 to the command",
    "": r"Launch with `accelerate launch --config_file`",
}


@pytest.fixture(autouse=True)
def _none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (*MODULES, "swift.sequence_parallel"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def runs(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if module:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))


@pytest.mark.parametrize("module", TO_SHARD)
def test_a_model_that_is_never_sharded(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(module, monkeypatch)
    model = patch(tiny(dtype=torch.float32), ep_size=2)
    with pytest.raises(ValueError, match=rf"ep_size=2, .* never sharded: .* {TO_SHARD[module]}"):
        model(**batch(model, 2, 7))


def test_a_framework_that_uses_trl_is_named_before_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("trl.scripts", "axolotl"):
        runs(module, monkeypatch)
    assert trainers.how_to_shard().startswith("axolotl: ")


@pytest.mark.parametrize(
    ("module", "match"),
    [
        ("axolotl", r"axolotl was given context_parallel_size=2, which .* use sp_size of hf_moe"),
        ("trl.scripts", r"the launch config's parallelism_config has cp_size=2, which does not"),
        ("", r"the launch config's parallelism_config has cp_size=2, which does not"),
    ],
)
def test_context_parallelism_of_the_launch(
    module: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(module, monkeypatch)
    state = find_state(patch(tiny(num_hidden_layers=1)))
    assert state is not None
    with pytest.raises(ValueError, match=match):
        check_parallelism(ParallelismConfig(cp_size=2), state)


def test_expert_parallelism_of_axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl adds ep_size to Accelerate's configuration (monkeypatch/accelerate)."""
    runs("axolotl", monkeypatch)
    state = find_state(patch(tiny(num_hidden_layers=1)))
    assert state is not None
    parallelism = ParallelismConfig()
    parallelism.ep_size = 8  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"axolotl was given expert_parallel_size=8, .* use ep_si"):
        check_parallelism(parallelism, state)


def test_sequence_parallelism_of_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A stand-in for the batch sampler of ms-swift, on rank 3 of 4."""

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
    """9 samples on 4 ranks: 2 steps. On 2 groups: 4 steps, and rank 3 draws as rank 2."""
    sampler: Any = SwiftSampler(9)
    loader = DataLoader(
        range(9), batch_sampler=SkipBatchSampler(sampler, 1) if resumed else sampler
    )
    assert [x.item() for x in loader] == ([7] if resumed else [3, 7])
    trainers.split_over_data_ranks(loader, 2)
    assert [x.item() for x in loader] == ([3, 5, 7] if resumed else [1, 3, 5, 7])
    with pytest.raises(ValueError, match=r"sp_size=2 .* leave out --streaming, or --sp-size"):
        trainers.split_over_data_ranks(SimpleNamespace(base_dataloader=loader), 2)
