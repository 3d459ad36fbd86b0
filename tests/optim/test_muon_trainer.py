"""Compare the Trainer with a patched model and Muon with a stock model, torch's Muon and AdamW.

Both run in fp64. Otherwise Newton-Schulz would run in bf16, and a rounding error of a gradient
could change the last bit of an update.
"""

from pathlib import Path

import pytest
import torch
from support.close import assert_close
from support.jobs.trainer import Case, launch
from support.launched import FP32_BUDGET
from support.scripts import CPU_4
from support.trainer_runs import SAVE, assert_resumed, assert_same_log


@pytest.mark.slow
def test_the_trainer_on_ranks_equals_stock(tmp_path: Path) -> None:
    common = {"muon": True, "dtype": torch.float64}
    half = {"ep": 2, **common, "arguments": SAVE, "stop_after": 3}
    folder, other = tmp_path / "half", tmp_path / "half of ep 2"
    stock = launch([Case("stock", **common)], tmp_path / "stock")
    ranks = launch(
        [
            Case("ep2", ep=2, **common, arguments=SAVE),
            Case("half", folder=folder, **half),
            Case("resumed", ("resume",), ep=2, seed=1, **common, arguments=SAVE, folder=folder),
            Case("half of ep 2", folder=other, **half),
            Case("at ep 1", ("resume",), ep=1, seed=1, **common, arguments=SAVE, folder=other),
        ],
        tmp_path / "ranks",
        CPU_4,
    )
    got, want = ranks["ep2"][0], stock["stock"][0]
    assert_same_log(got, want)
    assert got.params.keys() == want.params.keys()
    for name, parameter in want.params.items():
        assert_close(name, got.params[name], parameter, FP32_BUDGET)
    assert_resumed(ranks["resumed"][0], ranks["ep2"][0])
    assert_same_log(ranks["at ep 1"][0], stock["stock"][0])
