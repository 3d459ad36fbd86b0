"""Settings of Trainer runs, and functions that compare the results of two runs."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from support.close import assert_close
from support.hub_files import assert_equal, read_all
from support.jobs.trainer import MAX_GRAD_NORM, STEPS, Result, load_stock
from support.tiny_models import batch, tiny

# Rounding errors in fp32 (6e-8) grow over 6 steps of AdamW. A wrong factor would be 2 or 4.
FP32_BUDGET = 1e-5
# AdamW divides a gradient by its own size. If this size is close to zero, a rounding error changes
# the parameter, and therefore logits, by up to 1e-4.
AFTER_ADAMW = 1e-4
EVALUATE = {"eval_strategy": "steps", "eval_steps": 3}
NO_ACCUMULATION = {"gradient_accumulation_steps": 1}
SAVE = {"save_strategy": "steps", "save_steps": 3}
AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
# The loss falls, so with "greater is better" the first evaluation is the best, not the last one.
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}
FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
Results = dict[str, list[Result]]


def assert_same_log(got: Result, want: Result, *, clips: bool = True) -> None:
    assert (want.series("grad_norm").max() > MAX_GRAD_NORM) == clips, "is a step clipped?"
    for key in ("loss", "grad_norm"):
        assert len(want.series(key)) == STEPS
        for step, pair in enumerate(zip(got.series(key), want.series(key), strict=True), start=1):
            assert_close(f"{key} of step {step}", *pair, FP32_BUDGET)


def assert_same_training(got: Result, want: Result, *, clips: bool = True) -> None:
    """Compare every gradient of the first step, and every logged loss and norm.

    `clips` says if the norm of at least one step is so large that gradients are clipped.
    """
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        assert_close(f"gradient of {name}", got.grads[name], grad, FP32_BUDGET)
    assert_same_log(got, want, clips=clips)


def assert_same_evaluation(got: Result, want: Result, count: int) -> None:
    losses = want.series("eval_loss")
    assert len(losses) == count
    for index, pair in enumerate(zip(got.series("eval_loss"), losses, strict=True)):
        assert_close(f"evaluation {index}", *pair, FP32_BUDGET)


def assert_same_after_training(got: Result, want: Result) -> None:
    for key in ("evaluate", "predict"):
        assert key in want.values
    for loss in ("evaluate", "predict"):
        pair = [torch.as_tensor(_loss(result.values[loss])) for result in (got, want)]
        assert_close(f"loss of {loss}", *pair, FP32_BUDGET)
    logits = [result.values["predict"]["logits"] for result in (got, want)]
    assert_close("predicted logits", *logits, AFTER_ADAMW)


def _loss(value: float | dict[str, float]) -> float:
    return value["loss"] if isinstance(value, dict) else value


def assert_loads_in_stock(result: Result, tmp_path: Path) -> PreTrainedModel:
    """Check that save_model has written the same bits as stock would for these weights."""
    folder = result.values["save"]
    loaded = load_stock(folder)
    stock = tiny(dtype=torch.float32)
    stock.load_state_dict(result.params)
    assert loaded.state_dict().keys() == result.params.keys()
    for name, parameter in result.params.items():
        assert torch.equal(loaded.state_dict()[name], parameter), f"{name} differs after loading"
    inputs = batch(stock, 3, 9, pad=2)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, stock.eval()(**inputs).logits)
    stock.config.use_cache = False  # the stock Trainer sets this
    stock.save_pretrained(tmp_path / "stock")
    got, want = (
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "stock")
    )
    assert got == want and "hf_moe_ep" not in str(got)
    got = read_all(folder)
    assert_equal(got, load_file(tmp_path / "stock" / "model.safetensors"))
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in got
    return loaded


def assert_resumed(got: Result, want: Result) -> None:
    """Check that a resumed run has the same bits as a run that was never interrupted."""
    assert [entry["step"] for entry in got.log if "loss" in entry] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert_close(f"{key} after resuming", got.series(key), want.series(key), 0.0)
    for name, parameter in want.params.items():
        assert_close(f"{name} after resuming", got.params[name], parameter, 0.0)
