"""The error of an exchange after a GPU has stopped."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks

from hf_moe_ep.ranks import collectives
from hf_moe_ep.ranks.collectives import gather_counts


def an_error_of_the_gpu_is_not_blamed_on_another_rank(rank: int, world: int) -> None:
    """A failed device-side assertion is found at the next exchange, which did not cause it."""

    def stopped(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    match = r"^here: counts, group default_pg of ranks 0, 1: .* stderr.*device-side"
    for found_by in (stopped, lambda *_, **__: SimpleNamespace(wait=stopped)):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(collectives, "_all_gather", found_by)
            with pytest.raises(RuntimeError, match=match) as caught:
                gather_counts(torch.zeros(1), dist.group.WORLD, where="here")
        assert "never reached" not in str(caught.value)


@pytest.mark.parametrize("claim", on_ranks(2, an_error_of_the_gpu_is_not_blamed_on_another_rank))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
