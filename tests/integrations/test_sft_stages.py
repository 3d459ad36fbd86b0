"""Test that SFTTrainer on 2 pipeline stages with ep_size 2 logs what one stock process logs."""

import os
from pathlib import Path

import pytest
import torch
from support.close import assert_close
from support.scripts import CPU_4, run_script
from support.sft_runs import FP32_BUDGET, JOB, logged, run_job

pytest.importorskip("trl", minversion="1.15")

STAGES = ("--parallel", "--pp", "2")


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_sft_equals_stock(rows: str, tmp_path: Path) -> None:
    """Packed rows are joined to a single row, so they are one micro-batch.

    A subclass that calls SFTTrainer's loss trains them.
    """
    options = ("--padded",) if rows == "padded" else ()
    own_loss = () if rows == "padded" else ("--own-loss",)
    sizes = ("4", "2") if rows == "padded" else ("2", "1")
    want = run_job(tmp_path / "stock", None, "--batch", sizes[0], *options)
    got = run_job(tmp_path / "ranks", CPU_4, "--batch", sizes[1], *options, *own_loss, *STAGES)
    for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "aux_loss"):
        pairs = zip(logged(got, key), logged(want, key), strict=True)
        for step, pair in enumerate(pairs, start=1):
            assert_close(f"{key} of step {step}", *pair, FP32_BUDGET)
    for key in ("num_tokens", "epoch", "learning_rate"):
        assert torch.equal(logged(got, key), logged(want, key)), key


@pytest.mark.slow
def test_a_data_rank_without_labels_keeps_the_gradients_of_the_others(tmp_path: Path) -> None:
    """Each rank has a shard of the sum over all data ranks, whether its own batch has labels."""
    options = ("--padded", "--unlabelled")
    want = run_job(tmp_path / "stock", None, "--batch", "2", *options)
    got = run_job(tmp_path / "ranks", CPU_4, "--batch", "1", *options, *STAGES)
    for key in ("loss", "grad_norm"):
        pairs = zip(logged(got, key), logged(want, key), strict=True)
        for step, pair in enumerate(pairs, start=1):
            assert_close(f"{key} of step {step}", *pair, FP32_BUDGET)


@pytest.mark.slow
def test_sft_continues_at_another_number_of_stages(tmp_path: Path) -> None:
    """A run of ten steps changes from two stages with ep 2 to ep 4, and back to stages."""
    options = ("--padded", "--steps", "10")
    want = run_job(tmp_path / "stock", None, "--batch", "4", *options)
    ranks, save = tmp_path / "ranks", ("--save", "--resume")
    run_job(ranks, CPU_4, "--batch", "2", *options, *STAGES, "--save", "--stop-after", "4")
    whole = ("--batch", "1", "--parallel", "--ep", "4", "--stop-after", "8")
    run_job(ranks, CPU_4, *options, *whole, *save)
    got = run_job(ranks, CPU_4, "--batch", "2", *options, *STAGES, *save)
    for key in ("loss", "grad_norm", "aux_loss"):
        pairs = zip(logged(got, key, 10), logged(want, key, 10), strict=True)
        for step, pair in enumerate(pairs, start=1):
            assert_close(f"{key} of step {step}", *pair, FP32_BUDGET)


@pytest.mark.slow
def test_a_loss_that_weighs_tokens_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    arguments = [os.fspath(tmp_path), "--batch", "1", *STAGES, "--loss", "dft"]
    with pytest.raises(AssertionError, match="exit code 1"):
        run_script(JOB, *arguments, output=output, config_file=CPU_4)
    assert "the loss of this backward " in output.read_text()
