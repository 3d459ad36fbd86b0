"""Test that the Trainer with etp_size > 1 trains as stock does, and resumes at another size."""

from pathlib import Path

import pytest
import torch
from support.close import assert_close
from support.jobs.trainer import Case, launch
from support.scripts import CPU_4
from support.trainer_runs import FP32_BUDGET, SAVE, assert_same_log

ETP = {"HF_MOE_EP_ETP_SIZE": "2"}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 8])
def test_the_trainer_with_etp_equals_stock_and_resumes_at_another_size(
    tmp_path: Path, lora: int
) -> None:
    """Losses and gradient norms are compared, also after another layout has resumed the run."""
    stock = launch([Case("stock", lora=lora)], tmp_path / "stock")["stock"][0]
    halves = {"etp": ETP, "ep": {}}
    first = [
        Case(
            f"half {name}",
            ep=2,
            lora=lora,
            arguments=SAVE,
            environment=environment,
            folder=tmp_path / name,
            stop_after=3,
        )
        for name, environment in halves.items()
    ]
    whole = Case("whole", ep=2, lora=lora, environment=ETP)
    runs = launch([whole, *first], tmp_path / "first", CPU_4, timeout=500)
    assert_same_log(runs["whole"][0], stock)
    resumed = [
        Case(
            name,
            ("resume",),
            ep=ep,
            lora=lora,
            seed=0 if lora else 1,  # a checkpoint of adapters has no base
            arguments=SAVE,
            environment=halves[other],
            folder=tmp_path / saved,
        )
        for name, saved, other, ep in (("from etp", "etp", "ep", 4), ("to etp", "ep", "etp", 2))
    ]
    for name, results in launch(resumed, tmp_path / "again", CPU_4, timeout=500).items():
        for key in ("loss", "grad_norm"):
            got = results[0].series(key)
            assert isinstance(got, torch.Tensor)
            assert_close(f"{key}, {name}", got, stock.series(key), FP32_BUDGET)
