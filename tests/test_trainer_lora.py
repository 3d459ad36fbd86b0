"""LoRA through the stock Trainer on 4 ranks, against stock PEFT in one process."""

from pathlib import Path

import pytest
import torch
from close import assert_close
from peft import PeftModel
from run_script import CPU_4
from test_trainer import FP32_BUDGET, SAVE, Results, assert_same_log, assert_same_training
from tiny_models import batch, tiny
from trainer_job import Case, launch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_lora")
    ranks = [
        Case("ep2", ("train", "save"), ep=2, lora=8),
        Case("ep4", ep=4, lora=8),
        Case("half", ep=4, lora=8, arguments=SAVE, folder=folder / "half", stop_after=3),
    ]
    # The checkpoint holds adapters alone; untrained ones would log the losses of steps 1 to 3.
    again = [Case("resumed", ("resume",), ep=2, lora=8, arguments=SAVE, folder=folder / "half")]
    return {
        **launch([Case("stock", lora=8)], folder / "stock"),
        **launch(ranks, folder / "ranks", CPU_4),
        **launch(again, folder / "again", CPU_4),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep2", "ep4"])
def test_training_equals_stock(runs: Results, name: str) -> None:
    got, want = runs[name][0], runs["stock"][0]
    trained = {key for key in want.grads if "lora_" in key}
    assert len(trained) == 2 * 2 * (2 + 2)
    assert_same_training(got, want)


@pytest.mark.slow
def test_saved_adapter_opens_in_stock_peft(runs: Results) -> None:
    result = runs["ep2"][0]
    folder: Path = result.values["save"]
    assert (folder / "adapter_model.safetensors").exists()
    opened = PeftModel.from_pretrained(tiny(dtype=torch.float32), folder)
    for name, parameter in opened.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, result.params[name]), name
    with torch.no_grad():
        inputs = batch(opened, 2, 9)
        plain = tiny(dtype=torch.float32)(**inputs).logits
        assert (opened(**inputs).logits - plain).abs().max() > 0.01, "the adapter does something"


@pytest.mark.slow
def test_resume_at_another_ep_size(runs: Results) -> None:
    assert_same_log(runs["resumed"][0], runs["stock"][0])
    for name, parameter in runs["ep2"][0].params.items():
        if "lora_" in name:
            # AdamW turns rounding into steps where a gradient is close to zero.
            assert_close(name, runs["resumed"][0].params[name], parameter, 100 * FP32_BUDGET)
