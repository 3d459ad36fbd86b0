"""LoRA through the stock Trainer on 4 ranks, against stock PEFT in one process."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.adapters import TARGETS
from support.close import assert_close
from support.jobs.trainer import Case, launch
from support.scripts import CPU_4
from support.tiny_models import batch, tiny
from support.trainer_runs import FP32_BUDGET, SAVE, Results, assert_same_log, assert_same_training

# Every rank with every target and every ep once; accumulation over 2 micro-batches in all.
SQUARE = [
    (r, what, (1, 2, 4)[(row + column) % 3])
    for row, r in enumerate((1, 8, 16))
    for column, what in enumerate(TARGETS)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_lora")
    stock = [Case(f"stock {r} {what}", lora=r, lora_on=what) for r, what, _ in SQUARE]
    ranks = [Case(f"{r} {what}", ep=ep, lora=r, lora_on=what) for r, what, ep in SQUARE]
    ranks.append(Case("saved", ("train", "save"), ep=2, lora=8))
    ranks.append(Case("after", ("train", "save"), ep=2, lora=8, lora_after=True))
    killed = Case("killed", ep=4, lora=8, arguments=SAVE, folder=folder / "half", kill_after=3)
    # The checkpoint holds adapters alone; untrained ones would log the losses of steps 1 to 3.
    again = [Case("resumed", ("resume",), ep=2, lora=8, arguments=SAVE, folder=folder / "half")]
    with pytest.raises(AssertionError, match=r"SIGKILL|Signal 9"):
        launch([killed], folder / "killed", CPU_4)
    assert [path.name for path in (folder / "half").iterdir()] == ["checkpoint-3"]
    return {
        **launch(stock, folder / "stock"),
        **launch(ranks, folder / "ranks", CPU_4, timeout=500),
        **launch(again, folder / "again", CPU_4),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("r", "what", "ep"), SQUARE)
def test_training_equals_stock(runs: Results, r: int, what: str, ep: int) -> None:
    got, want = runs[f"{r} {what}"][0], runs[f"stock {r} {what}"][0]
    trained = {key for key in want.grads if "lora_" in key}
    assert len(trained) == 2 * 2 * (4 if what == "both" else 2)
    assert trained == set(want.grads)
    assert_same_training(got, want)


@pytest.mark.slow
def test_adapters_attached_behind_patch_equal_stock(runs: Results) -> None:
    assert_same_training(runs["after"][0], runs["stock 8 both"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saved", "after"])
def test_saved_adapter_opens_in_stock_peft(runs: Results, name: str) -> None:
    result = runs[name][0]
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
def test_killed_and_resumed_at_another_ep_size(runs: Results) -> None:
    assert_same_log(runs["resumed"][0], runs["stock 8 both"][0])
    for name, parameter in runs["saved"][0].params.items():
        if "lora_" in name:
            # AdamW turns rounding into steps where a gradient is close to zero.
            assert_close(name, runs["resumed"][0].params[name], parameter, 100 * FP32_BUDGET)
