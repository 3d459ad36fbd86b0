"""Every type goes on at another layout, with its parameters and moments, to the loss it would have.

On 2 ranks, saved with the experts split over both, loaded where FSDP2 alone splits them. The next
step, on 4 ranks and of eight families: `test_families.py`.
"""

import warnings
from functools import partial

import pytest
import torch
from support.architectures import recording
from support.architectures.precision import budget
from support.architectures.steps import (
    CUT_LOGITS,
    TRAINED,
    batches,
    build,
    count_tokens,
    loss_of_sum,
    start_run,
)
from support.checks import Check, Found
from support.close import assert_close
from support.jobs.resume import Run, assert_equal, everything
from torch import Tensor

from hf_moe_ep import load_checkpoint, save_checkpoint


def _goes_on(model_type: str, rank: int, world: int, folder: str) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    everyone = batches(build(model_type), world)
    num_tokens = count_tokens(everyone)

    def loss_of(run: Run) -> Tensor:
        torch.manual_seed(rank)  # of routers that draw
        return loss_of_sum(run.model, everyone[rank], num_tokens)

    with recording(model_type, "resume") as errors:
        run = start_run(model_type, rank, ep_size=2)
        (loss_of(run) * world).backward()
        run.optimizer.step()
        run.scheduler.step()
        save_checkpoint(folder, run.model, run.optimizer, run.scheduler)
        other = start_run(model_type, 7 + rank, ep_size=1)
        load_checkpoint(folder, other.model, other.optimizer, other.scheduler)
        assert_equal(model_type, everything(other), everything(run))
        budget_of_loss = budget(model_type)
        errors.append(assert_close("next loss", loss_of(other), loss_of(run), budget_of_loss))


CHECKS = [Check(name, 2, partial(_goes_on, name), slow=True).as_parameter() for name in TRAINED]


@pytest.mark.parametrize("claim", CHECKS)
def test_goes_on_at_another_layout(found: Found, claim: Check) -> None:
    """Parameters and moments are equal bit by bit, and so is the next loss."""
    found.raise_if_failed(claim)
