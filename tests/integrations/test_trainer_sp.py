"""Test that with sp_size > 1 the Trainer does the same as stock in one process.

The Trainer trains, evaluates, logs and counts, on text and on pictures. The patched model runs
under `accelerate launch` on 4 ranks, of which 2 or all 4 share each batch.
"""

from typing import Any

import pytest
import torch
from support.close import assert_close
from support.jobs.trainer import STEPS, Case, Result, launch
from support.needs import TOWER_IN_BLOCKS, needs_tower_in_blocks
from support.scripts import CPU_4
from support.trainer_runs import (
    AFTER_ADAMW,
    AUX_LOSS,
    EVALUATE,
    Results,
    assert_same_after_training,
    assert_same_evaluation,
    assert_same_training,
)

PICTURES = {"name": "qwen3_vl_moe"}
# The forward of the VL model takes no token count (num_items_in_batch), so the Trainer averages the
# losses of all micro-batches with equal weights. "vision sp2" has 2 data ranks with 2 micro-batches
# each, so one stock process must compute 4 micro-batches of the same samples (`split=2`).
STOCK_VISION = (
    Case("stock vision split", model=PICTURES, rows="vision", split=2),
    Case("stock vision", model=PICTURES, rows="vision"),
)
SP_VISION = (
    Case("vision sp2", ep=2, sp=2, model=PICTURES, rows="vision"),
    Case("vision sp4", ep=2, sp=4, model=PICTURES, rows="vision"),
)
# In fp32 the norms of a delta net's gradients differ by 1e-4 after six steps even between stock in
# fp32 and stock in fp64, so these runs compute in fp64.
DELTA_NET: dict[str, Any] = {
    "model": {"name": "qwen3_5_moe"},
    "rows": "vision",
    "dtype": torch.float64,
    "exact": True,
}
TEXT_ARGUMENTS = EVALUATE | {"include_num_input_tokens_seen": "non_padding"}
LABEL_SMOOTHING = {"label_smoothing_factor": 0.1}
TOKENS_PER_RANK = {"average_tokens_across_devices": False}
ONE_EPOCH = {"train_sampling_strategy": "random", "max_steps": -1, "num_train_epochs": 1}
# axolotl passes intervals as fractions, which the Trainer multiplies by max_steps.
AXOLOTL = {"lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 0.5}
ALL_STEPS = ("train", "evaluate", "predict", "predict 21")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_sp")
    stock = [Case("stock", ALL_STEPS, arguments=TEXT_ARGUMENTS)]
    ranks = [Case("sp2", ALL_STEPS, ep=2, sp=2, arguments=TEXT_ARGUMENTS)]
    return {**launch(stock, folder / "stock"), **launch(ranks, folder / "ranks", CPU_4)}


@pytest.fixture(scope="module")
def slow_runs(runs: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_sp_slow")
    stock = [
        Case("stock aux", model=AUX_LOSS, rows="padded"),
        Case("stock smoothed", arguments=LABEL_SMOOTHING),
        Case("stock per rank", arguments=TOKENS_PER_RANK, model=AUX_LOSS),
        Case("stock epoch", arguments=ONE_EPOCH),
        Case("stock axolotl", ("train by axolotl",), arguments=AXOLOTL),
        Case("stock delta net", split=2, **DELTA_NET),
        *(STOCK_VISION if TOWER_IN_BLOCKS else ()),
    ]
    ranks = [
        Case("sp4", ("train", "evaluate"), ep=2, sp=4, arguments=TEXT_ARGUMENTS),
        Case("aux sp2", ep=2, sp=2, model=AUX_LOSS, rows="padded"),
        Case("smoothed sp2", ep=2, sp=2, arguments=LABEL_SMOOTHING),
        Case("smoothed", ep=2, arguments=LABEL_SMOOTHING),
        Case("per rank sp4", ep=2, sp=4, arguments=TOKENS_PER_RANK, model=AUX_LOSS),
        Case("epoch sp4", ep=2, sp=4, arguments=ONE_EPOCH),
        Case("epoch sp2", ep=2, sp=2, arguments=ONE_EPOCH),
        Case("axolotl sp2", ("train by axolotl",), ep=2, sp=2, arguments=AXOLOTL),
        Case("delta net sp2", ep=2, sp=2, **DELTA_NET),
        *(SP_VISION if TOWER_IN_BLOCKS else ()),
    ]
    return {**runs, **launch(stock, folder / "stock"), **launch(ranks, folder / "ranks", CPU_4)}


def _assert_equals_stock(actual: Result, expected: Result) -> None:
    assert_same_training(actual, expected)
    assert_same_evaluation(actual, expected, count=3)
    for key in ("epoch", "step", "num_input_tokens_seen"):
        assert torch.equal(actual.series(key)[:STEPS], expected.series(key)[:STEPS]), key


@pytest.mark.slow
def test_training_equals_stock(runs: Results) -> None:
    _assert_equals_stock(runs["sp2"][0], runs["stock"][0])


@pytest.mark.slow
def test_training_of_one_data_rank_equals_stock(slow_runs: Results) -> None:
    _assert_equals_stock(slow_runs["sp4"][0], slow_runs["stock"][0])


@pytest.mark.slow
def test_aux_loss_equals_stock(slow_runs: Results) -> None:
    assert_same_training(slow_runs["aux sp2"][0], slow_runs["stock aux"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoothed", "smoothed sp2"])
def test_label_smoothing_equals_stock(slow_runs: Results, name: str) -> None:
    """The Trainer shifts labels if it knows the name of the model's class.

    Sharding replaces the class by a subclass of FSDP2, whose name the Trainer does not know.
    """
    assert_same_training(slow_runs[name][0], slow_runs["stock smoothed"][0])


@pytest.mark.slow
def test_training_with_token_counts_per_rank_equals_stock(slow_runs: Results) -> None:
    assert_same_training(slow_runs["per rank sp4"][0], slow_runs["stock per rank"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["epoch sp2", "epoch sp4"])
def test_a_shuffled_epoch_has_the_steps_and_samples_of_stock(slow_runs: Results, name: str) -> None:
    actual, expected = slow_runs[name][0], slow_runs["stock epoch"][0]
    assert_same_training(actual, expected)
    assert torch.equal(actual.series("epoch"), expected.series("epoch"))


@pytest.mark.slow
def test_an_epoch_has_the_steps_and_learning_rates_of_axolotls_stock(slow_runs: Results) -> None:
    """axolotl counts 3 steps on 4 ranks, with a batch for each rank, and stock has 6."""
    actual, expected = slow_runs["axolotl sp2"][0], slow_runs["stock axolotl"][0]
    want = {"train by axolotl": {"max_steps": STEPS, "warmup_steps": 3, "logging_steps": 1}}
    assert expected.values == actual.values == want
    assert_same_training(actual, expected)
    for key in ("epoch", "learning_rate"):
        assert torch.equal(actual.series(key), expected.series(key)), key
    evaluated = [[e["step"] for e in r.log if "eval_loss" in e] for r in (actual, expected)]
    assert evaluated == [[3, 6], [3, 6]]


@pytest.mark.slow
def test_evaluation_and_prediction_count_each_sample_once(runs: Results) -> None:
    for rank in runs["sp2"]:
        assert_same_after_training(rank, runs["stock"][0])
        actual, expected = (result.values["predict 21"] for result in (rank, runs["stock"][0]))
        assert actual.shape == expected.shape and actual.shape[0] == 21
        assert_close("logits of 21 samples", actual, expected, AFTER_ADAMW)


@needs_tower_in_blocks
@pytest.mark.slow
def test_vision_equals_stock(slow_runs: Results) -> None:
    assert_same_training(slow_runs["vision sp2"][0], slow_runs["stock vision split"][0])


@needs_tower_in_blocks
@pytest.mark.slow
def test_vision_of_one_data_rank_equals_stock(slow_runs: Results) -> None:
    assert_same_training(slow_runs["vision sp4"][0], slow_runs["stock vision"][0])


@pytest.mark.slow
def test_a_delta_net_with_pictures_on_some_ranks_equals_stock(slow_runs: Results) -> None:
    assert_same_training(slow_runs["delta net sp2"][0], slow_runs["stock delta net"][0])
