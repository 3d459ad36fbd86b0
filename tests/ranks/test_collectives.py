"""If the GPU of a rank has failed, the error of its next collective says so."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks

from hf_moe_ep.ranks import collectives
from hf_moe_ep.ranks.collectives import gather_counts


def gpu_errors_do_not_blame_another_rank(rank: int, world: int) -> None:
    """A device-side assertion that failed earlier is raised by the next collective."""

    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    match = r"^here: counts, group default_pg of ranks 0, 1: .* stderr.*device-side"
    for all_gather in (fail, lambda *_, **__: SimpleNamespace(wait=fail)):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(collectives, "_all_gather", all_gather)
            with pytest.raises(RuntimeError, match=match) as caught:
                gather_counts(torch.zeros(1), dist.group.WORLD, where="here")
        assert "never reached" not in str(caught.value)


@pytest.mark.parametrize("claim", on_ranks(2, gpu_errors_do_not_blame_another_rank))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
