"""If the GPU of a rank has failed, the error of its next collective says so."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from torch import Tensor

from hf_moe_ep.ranks import collectives
from hf_moe_ep.ranks.collectives import gather_counts, start_counts

COLLECTIVES = {
    "all-gather": (collectives, "_all_gather"),
    "all-to-all": (dist, "all_to_all_single"),
}
EXCHANGES: dict[str, Callable[[Tensor], Any]] = {
    "all-gather": lambda counts: gather_counts(counts[0], dist.group.WORLD, where="here"),
    "all-to-all": lambda counts: start_counts(counts, dist.group.WORLD, where="here").wait(),
}


def gpu_errors_do_not_blame_another_rank(rank: int, world: int) -> None:
    """If a device-side assertion has failed earlier, the next collective raises its error."""

    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    match = r"^here: counts, group default_pg of ranks 0, 1: .* stderr.*device-side"
    counts = torch.zeros(world, 1, dtype=torch.int64)
    for name, exchange in EXCHANGES.items():
        for collective in (fail, lambda *_, **__: SimpleNamespace(wait=fail)):
            with pytest.MonkeyPatch.context() as patches:
                patches.setattr(*COLLECTIVES[name], collective)
                with pytest.raises(RuntimeError, match=match) as caught:
                    exchange(counts)
            assert "never reached" not in str(caught.value)
    transfer = start_counts(counts, dist.group.WORLD, where="here")
    transfer.wait()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.Tensor, "tolist", fail)
        with pytest.raises(RuntimeError, match=match) as caught:
            transfer.read(counts)


@pytest.mark.parametrize("claim", on_ranks(2, gpu_errors_do_not_blame_another_rank))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
