"""Test that with cp_size > 1 the Trainer does the same as stock in one process.

The Trainer trains, evaluates, saves and resumes. The patched model runs under `accelerate launch`
on 4 ranks, of which 2 or all 4 share each batch. Accelerate's own cp_size and sp_size have the same
effect as the sizes of `patch`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.jobs.trainer import STEPS, Case, launch
from support.launched import FP32_BUDGET, launched
from support.scripts import CPU_4
from support.tiny_models import batch, tiny
from support.trainer_runs import (
    EVALUATE,
    SAVE,
    Results,
    assert_same_after_training,
    assert_same_evaluation,
    assert_same_log,
    assert_same_training,
)

from hf_moe_ep import data_parallel_size, global_token_count, patch
from hf_moe_ep.integrations.prepare import take_over_sizes
from hf_moe_ep.state import find_state

ARGUMENTS = EVALUATE | {"include_num_input_tokens_seen": "non_padding"}
# In fp32 the norms differ by 1.4e-5 after four steps, so these runs compute in fp64.
PADDED: dict[str, Any] = {"rows": "padded", "dtype": torch.float64, "exact": True}
ALL_STEPS = ("train", "evaluate", "predict")
# `accelerate launch` sets these variables for `parallelism_config_cp_size: 2`.
IN_LAUNCH = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_CP_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer_cp")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Results:
    half = folder / "half"
    stock = [Case("stock", ALL_STEPS, arguments=ARGUMENTS), Case("stock padded", **PADDED)]
    first = [
        Case("cp2", ALL_STEPS, ep=2, cp=2, arguments=ARGUMENTS),
        Case("padded cp2 sp2", ep=4, cp=2, sp=2, **PADDED),
        Case("in launch", ep=2, shares=2, environment=IN_LAUNCH),
        Case("half", ep=2, cp=2, arguments=SAVE, folder=half, stop_after=3),
    ]
    second = [Case("resumed", ("resume 3",), ep=4, sp=2, seed=1, arguments=SAVE, folder=half)]
    results = launch(stock, folder / "stock") | launch(first, folder / "first", CPU_4)
    return results | launch(second, folder / "second", CPU_4)


@pytest.mark.slow
def test_training_and_evaluation_equal_stock(runs: Results) -> None:
    actual, expected = runs["cp2"][0], runs["stock"][0]
    assert_same_training(actual, expected)
    assert_same_evaluation(actual, expected, count=3)
    for key in ("epoch", "step", "num_input_tokens_seen"):
        assert torch.equal(actual.series(key)[:STEPS], expected.series(key)[:STEPS]), key
    for rank in runs["cp2"]:
        assert_same_after_training(rank, expected)


@pytest.mark.slow
def test_training_of_padded_rows_on_all_ranks_equals_stock(runs: Results) -> None:
    assert_same_training(runs["padded cp2 sp2"][0], runs["stock padded"][0])


@pytest.mark.slow
def test_cp_size_of_a_launch_config_is_used(runs: Results) -> None:
    assert_same_training(runs["in launch"][0], runs["stock"][0])


@pytest.mark.slow
def test_a_run_resumes_with_sp_instead_of_cp(runs: Results) -> None:
    assert_same_log(runs["resumed"][0], runs["stock"][0])


def _accelerate_trains_as_stock(sizes: dict[str, int], rank: int, world: int) -> None:
    stock = tiny(dtype=torch.float32)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    with launched():
        model = patch(tiny(dtype=torch.float32, seed=rank), ep_size=2)
        # Accelerate refuses FSDP if both dp_shard_size and cp_size are 1, and does not compare the
        # product with the number of ranks if sp_size is larger.
        parallelism = ParallelismConfig(**sizes, dp_shard_size=sizes.get("sp_size", 1))
        accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
        ours = torch.optim.SGD(model.parameters(), lr=0.1)
        model, ours = accelerator.prepare(model, ours)
        state = find_state(model)
        assert state is not None
        assert {name: getattr(state.config, name) for name in sizes} == sizes
        assert (parallelism.cp_size, parallelism.sp_size) == (1, 1)
        for step in range(3):
            micro = batch(stock, 2, 11, seed=step, pad=3)
            num_tokens = global_token_count(model, micro["labels"])
            loss = model(**micro, num_items_in_batch=num_tokens).loss
            accelerator.backward(loss * data_parallel_size(model))
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            want = stock(**micro, num_items_in_batch=num_tokens).loss
            want.backward()
            expected = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
            assert_close(f"loss of step {step}", loss, want, FP32_BUDGET)
            assert_close(f"norm of step {step}", torch.as_tensor(norm), expected, FP32_BUDGET)
            for trained in (ours, optimizer):
                trained.step()
                trained.zero_grad()


CASES: dict[str, Callable[[int, int], None]] = {
    "cp_size": partial(_accelerate_trains_as_stock, {"cp_size": 2}),
    "sp_size": partial(_accelerate_trains_as_stock, {"sp_size": 2}),
}


@pytest.mark.parametrize("claim", on_ranks(2, CASES))
def test_sizes_of_accelerate_are_used(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_sizes_of_accelerate_that_contradict_patch_are_refused() -> None:
    model = patch(tiny(), cp_size=4)
    with pytest.raises(ValueError, match=r"cp_size=2, .* with cp_size=4; write patch\(model, cp_s"):
        take_over_sizes(ParallelismConfig(cp_size=2), [model])
