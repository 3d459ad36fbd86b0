"""Test that with pp_size > 1 the Trainer does the same as stock in one process.

The Trainer trains, clips, evaluates and predicts. The patched model runs under `accelerate launch`
on 4 ranks: 2 pipeline stages with ep_size 2, and 4 stages.
"""

from typing import Any

import pytest
import torch
from support.close import assert_close
from support.jobs.trainer import Case, Result, launch, load_stock
from support.scripts import CPU_4
from support.trainer_runs import (
    AFTER_ADAMW,
    EVALUATE,
    FP32_BUDGET,
    FULL,
    Results,
    assert_same_after_training,
    assert_same_evaluation,
)

STEPS = 4
LAYERS = {"num_hidden_layers": 4}
ARGUMENTS = EVALUATE | {"include_num_input_tokens_seen": "non_padding", "max_steps": STEPS}
ALL_STEPS = ("train", "evaluate", "predict", "predict 21")
UNCLIPPED = {"max_grad_norm": 0.0, "max_steps": 3}
OWN_LOSS = {"max_steps": 3}
LONG = ARGUMENTS | {"max_steps": 10}
STAGES: dict[str, Any] = {"ep": 2, "pp": 2, "microbatches": 3}
TIED = {"tie_word_embeddings": True}
OPTIONS: dict[str, Any] = {"model": LAYERS, "rows": "padded"}
LOSS: dict[str, Any] = {"own_loss": True, "arguments": OWN_LOSS, **OPTIONS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_stages")
    stock = [Case("stock", ALL_STEPS, arguments=ARGUMENTS, **OPTIONS)]
    ranks = [Case("pp2", ALL_STEPS, ep=2, pp=2, arguments=ARGUMENTS, **OPTIONS)]
    return {
        **launch(stock, folder / "stock"),
        **launch(ranks, folder / "ranks", CPU_4),
    }


@pytest.fixture(scope="module")
def slow_runs(runs: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_stages_slow")
    stock = [
        Case("stock long", arguments=LONG, **OPTIONS),
        Case("stock unclipped", arguments=UNCLIPPED, **OPTIONS),
        Case("stock own loss", ("train", "evaluate"), **LOSS),
        Case("stock tied", model=LAYERS | TIED, arguments={"max_steps": 4}),
    ]
    ranks = [
        Case("pp2 long", ep=2, pp=2, arguments=LONG, **OPTIONS),
        Case("pp4", ALL_STEPS, ep=1, pp=4, microbatches=4, arguments=ARGUMENTS, **OPTIONS),
        Case("pp2 sp2", ep=2, pp=2, sp=2, arguments=ARGUMENTS, **OPTIONS),
        Case("unclipped", ep=2, pp=2, arguments=UNCLIPPED, **OPTIONS),
        Case("own loss", ("train", "evaluate"), **STAGES, **LOSS),
        Case("own loss sp", sp=2, fails=True, **STAGES, **LOSS),
        Case("tied", ep=2, pp=2, model=LAYERS | TIED, arguments={"max_steps": 4}),
    ]
    return {
        **runs,
        **launch(stock, folder / "stock"),
        **launch(ranks, folder / "ranks", CPU_4, timeout=600),
    }


SAVED = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


@pytest.fixture(scope="module")
def resumed_runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each run stops after 3 steps and continues at the other layout."""
    folder = tmp_path_factory.mktemp("trainer_stages_resumed")
    options: dict[str, Any] = {"model": LAYERS, "arguments": SAVED}
    tied = {"model": LAYERS | TIED, "arguments": SAVED}
    adapted = {"lora": 3, "lora_on": "a layer", **options}
    first, second = folder / "of_stages", folder / "of_ep4"
    ranks = [
        Case("whole", ep=2, pp=2, **options),
        Case("saved pp2", ep=2, pp=2, folder=first, stop_after=3, **options),
        Case("resumed ep4", ("resume", "save"), ep=4, folder=first, **options),
        Case("saved ep4", ep=4, folder=second, stop_after=3, **options),
        Case("resumed pp2", ("resume", "save"), ep=2, pp=2, folder=second, **options),
        Case("full", ep=2, pp=2, fails=True, environment=FULL, **options),
    ]
    for kind, options in {"tied": tied, "adapted": adapted}.items():
        first, second = folder / f"of_stages_{kind}", folder / f"of_ep4_{kind}"
        ranks += [
            Case(f"whole {kind}", ep=2, pp=2, **options),
            Case(f"saved pp2 {kind}", ep=2, pp=2, folder=first, stop_after=3, **options),
            Case(f"resumed ep4 {kind}", ("resume",), ep=4, folder=first, **options),
            Case(f"saved ep4 {kind}", ep=4, folder=second, stop_after=3, **options),
            Case(f"resumed pp2 {kind}", ("resume",), ep=2, pp=2, folder=second, **options),
        ]
    return launch(ranks, folder / "ranks", CPU_4, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resumed ep4", "resumed pp2"])
def test_runs_continue_at_another_number_of_stages(resumed_runs: Results, name: str) -> None:
    got, want = resumed_runs[name][0], resumed_runs["whole"][0]
    for key in ("loss", "grad_norm"):
        assert_close(key, got.series(key), want.series(key), FP32_BUDGET)
    for key, parameter in want.params.items():
        assert_close(key, got.params[key], parameter, AFTER_ADAMW)
    loaded = load_stock(got.values["save"])
    for key, parameter in loaded.state_dict().items():
        assert torch.equal(parameter, got.params[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "adapted"])
@pytest.mark.parametrize("name", ["resumed ep4", "resumed pp2"])
def test_runs_with_tied_weights_and_with_one_adapted_layer_continue(
    resumed_runs: Results, name: str, kind: str
) -> None:
    """A tied weight is on two stages; with adapters on one layer, a stage trains nothing."""
    got, want = resumed_runs[f"{name} {kind}"][0], resumed_runs[f"whole {kind}"][0]
    for key in ("loss", "grad_norm"):
        assert_close(key, got.series(key), want.series(key), FP32_BUDGET)
    assert got.params.keys() == want.params.keys()
    for key, parameter in want.params.items():
        assert_close(key, got.params[key], parameter, AFTER_ADAMW)


@pytest.mark.slow
def test_full_state_dicts_are_refused(resumed_runs: Results) -> None:
    for result in resumed_runs["full"]:
        assert "FULL_STATE_DICT saves what rank 0 can gather" in result.error


def assert_same_training(got: Result, want: Result, steps: int = STEPS) -> None:
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        assert_close(f"gradient of {name}", got.grads[name], grad, FP32_BUDGET)
    for key in ("loss", "grad_norm"):
        assert len(want.series(key)) == len(got.series(key)) == steps
        for step, pair in enumerate(zip(got.series(key), want.series(key), strict=True), start=1):
            assert_close(f"{key} of step {step}", *pair, FP32_BUDGET)


def test_two_stages_train_as_one_process(runs: Results) -> None:
    assert_same_training(runs["pp2"][0], runs["stock"][0])
    clipped = runs["stock"][0].series("grad_norm") > 0.5
    assert clipped.any(), "no gradient was clipped"


def test_two_stages_evaluate_and_predict_as_one_process(runs: Results) -> None:
    num_evaluations = len(runs["stock"][0].series("eval_loss"))
    assert num_evaluations > STEPS // 3
    for result in runs["pp2"]:
        assert_same_evaluation(result, runs["stock"][0], num_evaluations)
        assert_same_after_training(result, runs["stock"][0])
        got, want = (r.values["predict 21"] for r in (result, runs["stock"][0]))
        assert got.shape == want.shape and len(got) == 21


def test_counts_of_tokens_and_flos_equal_one_process(runs: Results) -> None:
    stock, stages = runs["stock"][0], runs["pp2"][0]
    for key in ("num_input_tokens_seen", "total_flos", "epoch"):
        got, want = stages.series(key), stock.series(key)
        assert torch.equal(got, want), f"{key}: {got}, want {want}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp4", "pp2 sp2"])
def test_other_layouts_train_as_one_process(slow_runs: Results, name: str) -> None:
    assert_same_training(slow_runs[name][0], slow_runs["stock"][0])


@pytest.mark.slow
def test_ten_steps_equal_one_process(slow_runs: Results) -> None:
    assert_same_training(slow_runs["pp2 long"][0], slow_runs["stock long"][0], 10)


@pytest.mark.slow
def test_norms_are_logged_without_clipping(slow_runs: Results) -> None:
    assert_same_training(slow_runs["unclipped"][0], slow_runs["stock unclipped"][0], 3)


@pytest.mark.slow
def test_tied_embeddings_stay_equal(slow_runs: Results) -> None:
    """`support.jobs.trainer.whole` compares the copies of the two stages."""
    assert_same_training(slow_runs["tied"][0], slow_runs["stock tied"][0], 4)


@pytest.mark.slow
def test_the_last_stage_computes_compute_loss_func(slow_runs: Results) -> None:
    """A loss function that reads logits trains and evaluates as with stock."""
    got, want = slow_runs["own loss"], slow_runs["stock own loss"][0]
    assert_same_training(got[0], want, 3)
    for result in got:
        assert_close("eval_loss", result.series("eval_loss"), want.series("eval_loss"), FP32_BUDGET)
    model_loss = slow_runs["stock unclipped"][0].series("loss")
    assert (want.series("loss") / model_loss < 0.99).all(), "the model's own loss was used"
    for result in slow_runs["own loss sp"]:
        assert "2 ranks share each batch; use sp_size=1 and cp_size=1" in result.error
