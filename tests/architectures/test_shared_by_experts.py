"""Muse-Spark has one norm behind all experts of a layer; this shared norm trains as in stock.

A rank applies the norm to the outputs of its own experts, for tokens of all ranks of its ep group.
The gradient of the norm on a rank therefore comes from other tokens than the gradients of all other
parameters outside of experts. Stock computes norms in fp32, and the rounding error is as large as
the effect of a small mistake. In these tests, the fp32 parts of stock therefore compute in fp64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.adapters import with_lora
from support.architectures import recording
from support.architectures.steps import (
    adamw,
    assert_same_step,
    batches,
    build,
    count_tokens,
    loss_of_sum,
)
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.jobs.resume import Run, assert_equal, everything
from support.parity import CHECKPOINT, REENTRANT
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.checkpoints.training.load import load_checkpoint
from hf_moe_ep.checkpoints.training.save import save_checkpoint
from hf_moe_ep.state import find_state

MUSE_SPARK = "muse_spark"
pytestmark = pytest.mark.skipif(
    MUSE_SPARK not in CONFIG_MAPPING, reason="this version of transformers has no muse_spark"
)
NORM = "post_expert_norm"
Prepare = Callable[[nn.Module], Any]


def _compare_step_with_stock(
    rank: int, world: int, *, prepare: Prepare | None = None, lora: bool = False, **config: Any
) -> list[float]:
    """Compare loss, gradients, their norm and a step with stock, and return the errors."""
    with FP64():
        model, stock = build(MUSE_SPARK, seed=rank), build(MUSE_SPARK)
        if prepare is not None:
            prepare(model)
        if lora:
            model, stock = _add_lora(model, seed=rank), _add_lora(stock, seed=0)
        apply_ep_fsdp2(model, **config)
        _assert_norms_are_on_the_dense_mesh(model)
        return assert_same_step(MUSE_SPARK, (model, stock), (adamw(model), adamw(stock)))


def _add_lora(model: nn.Module, seed: int) -> nn.Module:
    """Add LoRA to experts and attention, and unfreeze the shared norms, which PEFT has frozen."""
    adapted = with_lora(model, r=3, seed=seed)
    for name, parameter in adapted.named_parameters():
        if name.endswith("post_expert_norm.weight"):
            parameter.requires_grad_(True)
    return adapted


def _assert_norms_are_on_the_dense_mesh(model: nn.Module) -> None:
    state = find_state(model)
    assert state is not None and state.meshes is not None
    norms = [parameter for name, parameter in model.named_parameters() if NORM in name]
    assert any(norm.requires_grad for norm in norms), "no shared norm is trainable"
    for norm in norms:
        assert isinstance(norm, DTensor) and norm.device_mesh == state.meshes.dense


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 1": (2, {"ep_size": 1}),
    "stock experts": (2, {"ep_size": 1, "experts_backend": "eager"}),
    "checkpoint": (2, {"ep_size": 2, "prepare": CHECKPOINT}),
    "reentrant": (2, {"ep_size": 2, "prepare": REENTRANT}),
    "2 chunks": (2, {"ep_size": 2, "dispatch_chunks": 2, "prepare": CHECKPOINT}),
    "no resharding": (2, {"ep_size": 2, "reshard_after_forward": False}),
    "ep_fsdp 2": (4, {"ep_size": 2}),
    "HSDP": (4, {"ep_size": 2, "dp_replicate_size": 2, "prepare": CHECKPOINT}),
    "ep 4, reentrant": (4, {"ep_size": 4, "prepare": REENTRANT}),
    "shard dim 1": (4, {"ep_size": 2, "expert_shard_dim": 1}),
}
STEPS = [
    Check(
        name,
        world,
        partial(_compare_step_with_stock, **options),
        slow=name != "ep 2",
        timeout=120.0,
    ).as_parameter()
    for name, (world, options) in LAYOUTS.items()
]


@pytest.mark.parametrize("claim", STEPS)
def test_a_step_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def lora_factors_train_with_the_shared_norms(rank: int, world: int) -> None:
    """Train LoRA factors of the experts together with the shared norms."""
    with recording(MUSE_SPARK, "lora") as errors:
        errors += _compare_step_with_stock(rank, world, lora=True, ep_size=2)


def norms_resume_at_another_layout(rank: int, world: int, folder: str) -> None:
    """Save norms that are sharded over two ranks, and resume with whole norms on each rank."""
    with recording(MUSE_SPARK, "resume") as errors:
        saved = _start_run(0, ep_size=2)
        resumed = _start_run(1, ep_size=1, dp_replicate_size=2)
        _train(saved, seed=0)
        _train(resumed, seed=9)  # load_checkpoint must replace this state
        save_checkpoint(f"{folder}/saved", saved.model, saved.optimizer, saved.scheduler)
        load_checkpoint(f"{folder}/saved", resumed.model, resumed.optimizer, resumed.scheduler)
        expected = everything(saved)
        assert any(NORM in name for name in expected)
        assert_equal("resumed", everything(resumed), expected)
        _train(saved, seed=1)
        _train(resumed, seed=1)
        actual = everything(resumed)
        for name, tensor in everything(saved).items():
            if isinstance(tensor, Tensor):
                errors.append(assert_close(f"next step: {name}", actual[name], tensor, FP64_MODEL))


def _start_run(seed: int, **config: Any) -> Run:
    model = build(MUSE_SPARK, seed=seed)
    apply_ep_fsdp2(model, **config)
    optimizer = adamw(model)
    return Run(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


def _train(run: Run, seed: int) -> None:
    """Take one optimizer step, each rank on its own batch, with fp64 instead of fp32."""
    with FP64():
        all_batches = batches(run.model, dist.get_world_size(), seed)
        loss = loss_of_sum(run.model, all_batches[dist.get_rank()], count_tokens(all_batches))
        (loss * dist.get_world_size()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2, lora_factors_train_with_the_shared_norms, norms_resume_at_another_layout, slow=True
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
