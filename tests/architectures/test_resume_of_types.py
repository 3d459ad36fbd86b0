"""Every type resumes at another layout with the same parameters, moments and next loss.

Two ranks save a model with ep 2, and load it with ep 1. `test_families.py` also compares the next
step, on 4 ranks, for eight families.
"""

import warnings
from functools import partial

import pytest
import torch
from support.architectures import MODEL_TYPES, recording
from support.architectures.precision import budget
from support.architectures.steps import (
    CUT_LOGITS,
    batches,
    build,
    count_tokens,
    exactly,
    loss_of_sum,
    start_run,
)
from support.checks import Check, Found
from support.close import assert_close
from support.jobs.resume import Run, assert_equal, everything
from torch import Tensor

from hf_moe_ep import load_checkpoint, save_checkpoint


def _resume(model_type: str, rank: int, world: int, folder: str) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    everyone = batches(build(model_type), world)
    num_tokens = count_tokens(everyone)

    def compute_loss(run: Run) -> Tensor:
        torch.manual_seed(rank)  # some routers draw random numbers
        return loss_of_sum(run.model, everyone[rank], num_tokens)

    with recording(model_type, "resume") as errors, exactly(model_type):
        run = start_run(model_type, rank, ep_size=2)
        (compute_loss(run) * world).backward()
        run.optimizer.step()
        run.scheduler.step()
        save_checkpoint(folder, run.model, run.optimizer, run.scheduler)
        resumed = start_run(model_type, 7 + rank, ep_size=1)
        load_checkpoint(folder, resumed.model, resumed.optimizer, resumed.scheduler)
        assert_equal(model_type, everything(resumed), everything(run))
        budget_of_loss = budget(model_type)
        errors.append(
            assert_close("next loss", compute_loss(resumed), compute_loss(run), budget_of_loss)
        )


CHECKS = [Check(name, 2, partial(_resume, name), slow=True).as_parameter() for name in MODEL_TYPES]


@pytest.mark.parametrize("claim", CHECKS)
def test_every_type_resumes_at_another_layout(found: Found, claim: Check) -> None:
    """Parameters and moments are equal bit by bit. The next loss is equal within its budget."""
    found.raise_if_failed(claim)
