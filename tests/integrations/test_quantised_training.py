"""Compare LoRA on quantised experts, with the Trainer and Accelerate, with stock PEFT.

The experts of the stock model have the dequantised values.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.jobs.trainer import Case, launch
from support.launched import launched, prepared
from support.parity import full_tensor
from support.quantised import SIZES, dequantise_experts
from support.scripts import CPU_4
from support.tiny_models import batch, tiny
from support.trainer_runs import SAVE, Results, assert_same_log, assert_same_training
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.lora.factors import pack_factors

NF4: dict[str, Any] = {"lora": 8, "held": "nf4", "model": SIZES["nf4"]}
FP8: dict[str, Any] = {"lora": 8, "held": "fp8", "model": SIZES["fp8"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer_quantised")
    stock = [Case("stock nf4", **NF4), Case("stock fp8", **FP8)]
    half = {"arguments": SAVE, "folder": folder / "half"}
    ranks = [
        Case("nf4", ("train", "save"), ep=2, **NF4),
        Case("fp8", ep=4, **FP8),
    ]
    killed = Case("killed", ep=4, kill_after=3, **NF4, **half)
    resumed = [
        Case("other base", ("resume",), ep=2, seed=7, fails=True, **NF4, **half),
        Case("other format", ("resume",), ep=2, fails=True, lora=8, model=SIZES["nf4"], **half),
        Case("resumed", ("resume",), ep=2, **NF4, **half),
    ]
    with pytest.raises(AssertionError, match=r"SIGKILL|Signal 9"):
        launch([killed], folder / "killed", CPU_4)
    return {
        **launch(stock, folder / "stock"),
        **launch(ranks, folder / "ranks", CPU_4, timeout=500),
        **launch(resumed, folder / "again", CPU_4, timeout=500),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_training_equals_stock_on_the_same_values(runs: Results, kind: str) -> None:
    actual, expected = runs[kind][0], runs[f"stock {kind}"][0]
    assert set(expected.grads) == {key for key in expected.params if "lora_" in key}
    assert_same_training(actual, expected)


@pytest.mark.slow
def test_stock_peft_loads_the_saved_adapter(runs: Results) -> None:
    result = runs["nf4"][0]
    folder: Path = result.values["save"]
    opened = PeftModel.from_pretrained(tiny(dtype=torch.float32, **SIZES["nf4"]), folder)
    factors = {name: p for name, p in opened.named_parameters() if "lora_" in name}
    assert factors
    for name, parameter in factors.items():
        assert torch.equal(parameter, result.params[name]), name


@pytest.mark.slow
def test_a_killed_run_resumes_at_another_ep_size(runs: Results) -> None:
    assert_same_log(runs["resumed"][0], runs["stock nf4"][0])


@pytest.mark.slow
def test_another_base_is_an_error_on_every_rank(runs: Results) -> None:
    """A base has other weights of the same shapes, or the same weights without quantisation."""
    assert len(runs["other base"]) == 4
    for result in runs["other base"]:
        assert "another base" in result.error and "gate_up_proj" in result.error, result.error
    for result in runs["other format"]:
        assert "experts_dtype='nf4'" in result.error and "experts_dtype=None" in result.error


WORLD, STEPS = 2, 3


def _train(model: nn.Module, rank: int, **options: Any) -> dict[str, Tensor]:
    with launched():
        accelerator = Accelerator(cpu=True, **options)
        accelerator, model, optimizer = prepared(
            model, accelerator, torch.optim.SGD, ep_size=2, experts_dtype="nf4"
        )
        dtypes = _record_gathered_dtypes(model)
        for step in range(STEPS):
            loss = model(**batch(model, 3, 9, seed=10 * step + rank, ignore=0.0)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert dtypes == {
        ("gate_up_proj", torch.uint8),
        ("gate_up_proj_block_scale", torch.float32),
        ("down_proj", torch.uint8),
        ("down_proj_block_scale", torch.float32),
    }
    factors = {n: full_tensor(p.detach()) for n, p in model.named_parameters() if "lora_" in n}
    return {n: x for n, x in pack_factors(model, factors).items() if x is not None}


def _record_gathered_dtypes(model: nn.Module) -> set[tuple[str, torch.dtype]]:
    """Record the names and dtypes of the experts' parameters while FSDP2 has gathered them."""
    dtypes: set[tuple[str, torch.dtype]] = set()
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.register_forward_pre_hook(
                lambda module, args: dtypes.update(
                    (name, p.dtype) for name, p in module.named_parameters(recurse=False)
                )
            )
    return dtypes


def _train_stock(dtype: torch.dtype, *, bf16: bool = False) -> dict[str, Tensor]:
    model = with_lora(tiny(dtype=torch.float32, **SIZES["nf4"]), seed=0)
    dequantise_experts(model, "nf4")
    model = model.to(dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        for rank in range(WORLD):
            inputs = batch(model, 3, 9, seed=10 * step + rank, ignore=0.0)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**inputs).loss
            (loss / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}


def accelerate_in_bf16_is_as_close_as_stock(rank: int, world: int) -> None:
    """FSDP2 does not cast codes and scales. The adapters' error is at most twice stock's."""
    model = with_lora(tiny(dtype=torch.float32, **SIZES["nf4"]), seed=0)
    actual = _train(model, rank, mixed_precision="bf16")
    truth = _train_stock(torch.float64)
    stock_error = _compute_distance(_train_stock(torch.float32, bf16=True), truth)
    own_error = _compute_distance(actual, truth)
    assert 0 < own_error <= 2 * stock_error, f"error {own_error:.3e}, stock's is {stock_error:.3e}"


def _compute_distance(factors: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    squares = [(factors[name].double() - value).square().sum() for name, value in truth.items()]
    return torch.stack(squares).sum().sqrt().item()


def a_loop_without_accelerate_trains_a_bf16_model(rank: int, world: int) -> None:
    """Adapters have fp32 masters and codes are not cast, also with a given mp_policy."""
    policies = [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
    losses = []
    for policy in policies:
        model = with_lora(tiny(dtype=torch.bfloat16, **SIZES["fp8"]), seed=0)
        apply_ep_fsdp2(model, ep_size=2, mp_policy=policy, experts_dtype="fp8")
        dtypes = _record_gathered_dtypes(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses_of_run = []
        for _ in range(STEPS):
            loss = model(**batch(model, 3, 9, seed=rank)).loss
            loss.backward()
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained)
            optimizer.step()
            optimizer.zero_grad()
            losses_of_run.append(loss.item())
        assert losses_of_run[-1] < losses_of_run[0], "the loss must fall"
        assert {dtype for _, dtype in dtypes} == {torch.uint8, torch.float32}
        losses.append(losses_of_run)
    assert losses[0] == losses[1]


ON_TWO_RANKS = [
    accelerate_in_bf16_is_as_close_as_stock,
    a_loop_without_accelerate_trains_a_bf16_model,
]


@pytest.mark.parametrize("claim", on_ranks(WORLD, *ON_TWO_RANKS, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
