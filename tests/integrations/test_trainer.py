"""Test that the Trainer trains a patched model on 4 ranks like a stock model in one process.

Both runs have the same rows in the same order. The batch of the single process is 4 times the
per-device batch of the ranks. Every launch runs a table of cases (see support/jobs/trainer.py), and
each test reads the results that it needs.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.close import assert_close
from support.generation import assert_same, continuations
from support.jobs.trainer import Case, Result, launch
from support.scripts import CPU_4
from support.tiny_models import batch, tiny
from support.trainer_runs import (
    AUX_LOSS,
    BEST,
    EVALUATE,
    FP32_BUDGET,
    FULL,
    NO_ACCUMULATION,
    SAVE,
    Results,
    assert_loads_in_stock,
    assert_resumed,
    assert_same_after_training,
    assert_same_evaluation,
    assert_same_log,
    assert_same_training,
)

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.integrations.prepare import cast_for_full_eval

# AdamW's first steps are signs of gradients, so a rounding error can move a parameter by twice the
# learning rate. Steps of SGD are proportional to gradients. The error of one loss is random, so 24
# losses are compared.
BF16 = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 24}
SMOOTHED = BF16 | {"label_smoothing_factor": 0.1}
FULL_EVAL = {"bf16_full_eval": True}

# A compiled layer has one graph on each side of its experts. The third graph is the cross-entropy
# of the Trainer's fused loss.
NUM_GRAPHS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer")
    stock = [
        Case("stock", ("train", "evaluate", "predict"), arguments=EVALUATE),
    ]
    after = ("evaluate", "predict", "save", "generate")
    ranks = [
        Case("ep2", ("train", *after), ep=2, arguments=EVALUATE),
        Case("half", ep=2, arguments=SAVE, folder=folder / "half", stop_after=3),
        Case("resumed", ("resume",), ep=2, seed=1, arguments=SAVE, folder=folder / "half"),
    ]
    return {
        **launch(stock, folder / "stock"),
        **launch(ranks, folder / "ranks", CPU_4),
    }


def _slow_cases(folder: Path) -> list[Case]:
    checkpointing = {
        f"gradient checkpointing, use_reentrant={reentrant}": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
        }
        for reentrant in (True, False)
    }
    fsdp_checkpointing = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
    return [
        *(
            Case(f"ep{n}", ("train", "evaluate", "predict"), ep=n, arguments=EVALUATE)
            for n in (1, 4)
        ),
        *(Case(f"bf16 ep{n}", ep=n, arguments=BF16 | {"bf16": True}) for n in (1, 2, 4)),
        Case("bf16 smoothed", ep=2, arguments=SMOOTHED | {"bf16": True}),
        Case("aux ep2", ep=2, model=AUX_LOSS, rows="padded", arguments=EVALUATE),
        Case("aux ep4", ep=4, model=AUX_LOSS, rows="padded", arguments=EVALUATE),
        Case("aux single", ep=2, model=AUX_LOSS, rows="padded", arguments=NO_ACCUMULATION),
        *(Case(name, ("train", "inspect"), ep=2, arguments=a) for name, a in checkpointing.items()),
        Case("FSDP checkpointing", ("train", "inspect"), ep=2, environment=fsdp_checkpointing),
        Case("offload", ("train", "inspect"), ep=2, environment={"FSDP_OFFLOAD_PARAMS": "true"}),
        Case("full eval", ("train", "evaluate", "predict"), ep=2, arguments=FULL_EVAL),
        Case("loaded", ep=2, load=folder / "model"),
        Case("best", ("train", "evaluate"), ep=2, arguments=BEST),
        Case("best full", ("train", "evaluate"), ep=2, arguments=BEST, environment=FULL),
        Case("full", ("train", "save", "inspect"), ep=2, environment=FULL),
        Case("half 4", ep=4, arguments=SAVE, folder=folder / "half 4", stop_after=3),
        Case(
            "half full",
            ep=2,
            arguments=SAVE,
            environment=FULL,
            folder=folder / "full",
            stop_after=3,
        ),
    ]


@pytest.fixture(scope="module")
def slow_runs(runs: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_slow")
    tiny(dtype=torch.float32).save_pretrained(folder / "model")
    stock = [
        Case("stock aux", model=AUX_LOSS, rows="padded", arguments=EVALUATE),
        Case("stock aux single", model=AUX_LOSS, rows="padded", arguments=NO_ACCUMULATION),
        Case("stock fp64", dtype=torch.float64, arguments=BF16),
        Case("stock fp64 smoothed", dtype=torch.float64, arguments=SMOOTHED),
        Case("stock bf16 smoothed", arguments=SMOOTHED | {"bf16": True}),
        Case("stock full eval", ("train", "evaluate", "predict"), arguments=FULL_EVAL),
        Case("stock bf16", arguments=BF16 | {"bf16": True}),
    ]
    resumed = [
        Case("resumed at ep2", ("resume",), ep=2, seed=1, arguments=SAVE, folder=folder / "half 4"),
        Case(
            "resumed full",
            ("resume",),
            ep=2,
            seed=1,
            arguments=SAVE,
            environment=FULL,
            folder=folder / "full",
        ),
        Case(
            "compiled",
            ("train", "evaluate", "save", "inspect"),
            ep=2,
            arguments={"torch_compile": True},
        ),
    ]
    return {
        **runs,
        **launch(stock, folder / "stock"),
        **launch(_slow_cases(folder), folder / "ranks", CPU_4, timeout=500),
        **launch(resumed, folder / "again", CPU_4, timeout=500),
    }


def test_training_equals_stock(runs: Results) -> None:
    assert_same_training(runs["ep2"][0], runs["stock"][0])


def test_evaluation_equals_stock(runs: Results) -> None:
    """The model is evaluated in and after training. "half" trains the same steps without it."""
    assert_same_evaluation(runs["ep2"][0], runs["stock"][0], count=3)
    assert_same_after_training(runs["ep2"][0], runs["stock"][0])
    half = runs["half"][0].series("loss")
    assert len(half) == 3 and torch.equal(half, runs["ep2"][0].series("loss")[:3])


@pytest.mark.slow
def test_aux_loss_of_padded_rows_equals_stock(slow_runs: Results) -> None:
    assert_same_training(slow_runs["aux ep2"][0], slow_runs["stock aux"][0])
    assert_same_evaluation(slow_runs["aux ep2"][0], slow_runs["stock aux"][0], count=2)


def test_a_new_trainer_resumes_as_if_never_interrupted(runs: Results) -> None:
    """Both trainers run in the same processes. Another test resumes in a new launch."""
    assert len(runs["half"][0].series("loss")) == 3
    assert_resumed(runs["resumed"][0], runs["ep2"][0])


def test_saved_model_loads_in_stock(runs: Results, tmp_path: Path) -> None:
    """The runs use SHARDED_STATE_DICT, with which the stock Trainer saves no model."""
    loaded = assert_loads_in_stock(runs["ep2"][0], tmp_path)
    for rank, result in enumerate(runs["ep2"]):
        assert_same(f"rank {rank}", result.values["generate"], continuations(loaded, rank))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep1", "ep4"])
def test_training_at_other_sizes_equals_stock(slow_runs: Results, name: str) -> None:
    actual, expected = slow_runs[name][0], slow_runs["stock"][0]
    assert_same_training(actual, expected)
    assert_same_evaluation(actual, expected, count=3)
    assert_same_after_training(actual, expected)


@pytest.mark.slow
def test_aux_loss_at_other_sizes_equals_stock(slow_runs: Results) -> None:
    assert_same_training(slow_runs["aux ep4"][0], slow_runs["stock aux"][0])
    assert_same_evaluation(slow_runs["aux ep4"][0], slow_runs["stock aux"][0], count=2)
    assert_same_training(slow_runs["aux single"][0], slow_runs["stock aux single"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16 ep1", "bf16 ep2", "bf16 ep4"])
def test_bf16_is_as_close_to_the_truth_as_stock(slow_runs: Results, name: str) -> None:
    """The errors are 2-norms of differences from fp64, for losses, gradients and parameters."""
    truth, stock = slow_runs["stock fp64"][0], slow_runs["stock bf16"][0]
    actual = slow_runs[name][0]

    def error(result: Result, kind: str, key: str) -> float:
        pick = result.series if kind == "log" else getattr(result, kind).__getitem__
        expected = truth.series(key) if kind == "log" else getattr(truth, kind)[key]
        return (pick(key).double() - expected.double()).norm().item()

    assert len(truth.series("loss")) == 24
    measured = [("log", "loss")]
    measured += [(kind, key) for kind in ("grads", "params") for key in truth.params]
    for kind, key in measured:
        own_error, stock_error = error(actual, kind, key), error(stock, kind, key)
        assert stock_error > 0, f"{kind} {key}: stock in bf16 is exact, so nothing ran in bf16"
        assert 0 < own_error <= 2 * stock_error, (
            f"{kind} {key}: error {own_error:.3e}, of stock {stock_error:.3e}"
        )


@pytest.mark.slow
def test_smoothed_losses_in_bf16_are_as_close_to_the_truth_as_stock(slow_runs: Results) -> None:
    """In one process Accelerate converts the logits to fp32 before the Trainer smooths labels."""
    truth, stock, actual = (
        slow_runs[name][0].series("loss").double()
        for name in ("stock fp64 smoothed", "stock bf16 smoothed", "bf16 smoothed")
    )
    assert len(truth) == 24
    stock_error = (stock - truth).norm()
    assert 0 < (actual - truth).norm() <= 2 * stock_error


@pytest.mark.slow
def test_an_evaluation_after_training_can_be_in_bf16(slow_runs: Results) -> None:
    """The Trainer casts the whole model, which has trained in fp32, before the first evaluation."""
    actual, expected = slow_runs["full eval"][0], slow_runs["stock full eval"][0]
    assert {p.dtype for p in actual.params.values()} == {torch.bfloat16}
    for loss in (actual.values["evaluate"], actual.values["predict"]["loss"]):
        precision = 2**-8  # of bf16
        assert loss == pytest.approx(expected.values["evaluate"], rel=precision)


def test_a_model_that_has_run_in_fp32_is_gathered_in_bf16_after_a_cast() -> None:
    """FSDP2 alone still gathers fp32. On several ranks it raises an error about dtypes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = apply_ep_fsdp2(tiny(dtype=torch.float32)).eval()
        inputs = batch(model, 2, 7)
        inputs.pop("labels")
        with torch.no_grad():
            assert model(**inputs).logits.dtype == torch.float32
            args = SimpleNamespace(bf16_full_eval=True, fp16_full_eval=False)
            cast_for_full_eval(SimpleNamespace(model=model, args=args, is_in_train=False))
            actual = model(**inputs).logits
            expected = apply_ep_fsdp2(tiny(dtype=torch.float32).bfloat16()).eval()(**inputs).logits
    finally:
        dist.destroy_process_group()
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_equals_stock(slow_runs: Results, reentrant: bool) -> None:
    result = slow_runs[f"gradient checkpointing, use_reentrant={reentrant}"][0]
    assert result.values["inspect"]["gradient_checkpointing"]
    assert_same_training(result, slow_runs["stock"][0])


@pytest.mark.slow
def test_launch_options_equal_stock(slow_runs: Results) -> None:
    for name in ("FSDP checkpointing", "offload", "loaded"):
        assert_same_training(slow_runs[name][0], slow_runs["stock"][0])
    assert (
        "FSDPCheckpointWrapper" in slow_runs["FSDP checkpointing"][0].values["inspect"]["classes"]
    )
    assert slow_runs["offload"][0].values["inspect"]["offload"] == {"CPUOffloadPolicy"}


@pytest.mark.slow
def test_compiled_layers_equal_stock(slow_runs: Results, tmp_path: Path) -> None:
    actual, expected = slow_runs["compiled"][0], slow_runs["stock"][0]
    assert "OptimizedModule" not in actual.values["inspect"]["classes"]  # not compiled as a whole
    assert actual.values["inspect"]["graphs"] == NUM_GRAPHS
    assert_same_training(actual, expected)
    losses = [torch.as_tensor(result.values["evaluate"]) for result in (actual, expected)]
    assert_close("evaluation", *losses, FP32_BUDGET)
    assert_loads_in_stock(actual, tmp_path)


DYNAMO_CONFIG = """
dynamo_config:
  dynamo_backend: AOT_EAGER
  dynamo_use_regional_compilation: {by_regions}
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_regions", [False, True])
def test_a_launch_config_that_compiles_equals_stock(
    runs: Results, tmp_path: Path, by_regions: bool
) -> None:
    config = tmp_path / "launch.yaml"
    two_ranks = CPU_4.read_text().replace("num_processes: 4", "num_processes: 2")
    config.write_text(two_ranks + DYNAMO_CONFIG.format(by_regions=by_regions))
    case = Case("compiled", ("train", "inspect"), ep=2)
    actual = launch([case], tmp_path / "ranks", config, timeout=500)[case.name][0]
    assert actual.values["inspect"]["graphs"] == NUM_GRAPHS
    assert_same_training(actual, runs["stock"][0])


@pytest.mark.slow
def test_compilation_with_checkpoints_and_with_adapters_equals_stock_on_two_ranks(
    tmp_path: Path,
) -> None:
    """With adapters the first layer has a graph of its own, because its input has no gradient."""
    config = tmp_path / "launch.yaml"
    config.write_text(CPU_4.read_text().replace("num_processes: 4", "num_processes: 2"))
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    steps = ("train", "inspect")
    ranks = [
        Case("checkpoints", steps, ep=2, arguments=compiled | {"gradient_checkpointing": True}),
        Case("LoRA", steps, ep=2, lora=8, arguments=compiled),
    ]
    found = launch(ranks, tmp_path / "ranks", config, timeout=500)
    stock = launch([Case("stock"), Case("stock LoRA", lora=8)], tmp_path / "stock")
    assert_same_training(found["checkpoints"][0], stock["stock"][0])
    assert_same_training(found["LoRA"][0], stock["stock LoRA"][0])
    graphs = [found[case.name][0].values["inspect"]["graphs"] for case in ranks]
    assert graphs == [NUM_GRAPHS, NUM_GRAPHS + NUM_GRAPHS + 1]  # both cases in the same processes


@pytest.mark.slow
def test_a_new_launch_resumes_at_another_ep_size_and_from_a_full_state(slow_runs: Results) -> None:
    assert_same_log(slow_runs["resumed at ep2"][0], slow_runs["stock"][0])
    assert_resumed(slow_runs["resumed full"][0], slow_runs["ep2"][0])


@pytest.mark.slow
def test_the_model_is_saved_with_full_state_dict(slow_runs: Results, tmp_path: Path) -> None:
    result = slow_runs["full"][0]
    assert "FULL_STATE_DICT" in result.values["inspect"]["state_dict_type"]
    assert_loads_in_stock(result, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best", "best full"])
def test_the_best_model_is_loaded_at_the_end(slow_runs: Results, name: str) -> None:
    """Stock cannot be the reference: transformers 5.23 restores all parameters but the experts."""
    result = slow_runs[name][0]
    assert_same_training(result, slow_runs["stock"][0])
    assert result.params_at.keys() == {2, 4, 6}
    losses = result.series("eval_loss")
    assert losses[0] == losses.max() and losses[0] != losses[2]
    assert result.values["evaluate"] == losses[0]
    for key, parameter in result.params.items():
        assert torch.equal(parameter, result.params_at[2][key]), f"{key} is not from the best step"
        assert not torch.equal(parameter, result.params_at[6][key]), f"{key} was never trained"
