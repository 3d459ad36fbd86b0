"""Test that LoRA trains with the Trainer on 4 ranks as stock PEFT does in one process."""

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

# The cases are a latin square: each LoRA rank occurs once with each target and each ep_size. The
# models have no layer 2, so they leave out "a layer".
SQUARE = [
    (r, targets, (1, 2, 4)[(row + column) % 3])
    for row, r in enumerate((1, 8, 16))
    for column, targets in enumerate(name for name in TARGETS if name != "a layer")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_lora")
    stock = [Case(f"stock {r} {targets}", lora=r, lora_on=targets) for r, targets, _ in SQUARE]
    ranks = [Case(f"{r} {targets}", ep=ep, lora=r, lora_on=targets) for r, targets, ep in SQUARE]
    ranks.append(Case("saved", ("train", "save"), ep=2, lora=8))
    ranks.append(Case("after", ("train", "save"), ep=2, lora=8, lora_after=True))
    killed = Case("killed", ep=4, lora=8, arguments=SAVE, folder=folder / "half", kill_after=3)
    # The checkpoint contains only adapters. If they were not loaded, the losses of
    # steps 1 to 3 would be repeated.
    resumed = [Case("resumed", ("resume",), ep=2, lora=8, arguments=SAVE, folder=folder / "half")]
    with pytest.raises(AssertionError, match=r"SIGKILL|Signal 9"):
        launch([killed], folder / "killed", CPU_4)
    assert [path.name for path in (folder / "half").iterdir()] == ["checkpoint-3"]
    return {
        **launch(stock, folder / "stock"),
        **launch(ranks, folder / "ranks", CPU_4, timeout=500),
        **launch(resumed, folder / "again", CPU_4),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("r", "targets", "ep"), SQUARE)
def test_training_equals_stock(runs: Results, r: int, targets: str, ep: int) -> None:
    actual, expected = runs[f"{r} {targets}"][0], runs[f"stock {r} {targets}"][0]
    trained = {key for key in expected.grads if "lora_" in key}
    assert len(trained) == 2 * 2 * (4 if targets == "both" else 2)
    assert trained == set(expected.grads)
    # The gradients of one rank of factors on the experts alone are too small to be clipped.
    assert_same_training(actual, expected, clips=(r, targets) != (1, "experts"))


@pytest.mark.slow
def test_adapters_attached_after_patch_equal_stock(runs: Results) -> None:
    assert_same_training(runs["after"][0], runs["stock 8 both"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saved", "after"])
def test_stock_peft_loads_the_saved_adapter(runs: Results, name: str) -> None:
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
        change = (opened(**inputs).logits - plain).abs().max()
        assert change > 0.01, "the adapter must change the logits"


@pytest.mark.slow
def test_a_killed_run_resumes_at_another_ep_size(runs: Results) -> None:
    assert_same_log(runs["resumed"][0], runs["stock 8 both"][0])
    for name, parameter in runs["saved"][0].params.items():
        if "lora_" in name:
            # AdamW makes steps of full size from rounding errors of gradients near zero.
            assert_close(name, runs["resumed"][0].params[name], parameter, 100 * FP32_BUDGET)
