"""Errors name the option of the framework that runs: axolotl, ms-swift, LLaMA-Factory or TRL.

The frameworks are not installed here. A module of the right name stands for each of them.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate.utils import ParallelismConfig
from support.tiny_models import batch, tiny

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
