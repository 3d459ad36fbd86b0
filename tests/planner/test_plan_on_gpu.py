"""The planned peak of a step on a GPU is compared with CUDA's peak allocation."""

from dataclasses import replace
from pathlib import Path

import plan as bench
import pytest
import torch
from support.nccl import join_nccl
from support.ranks import run_ranks

SIZES = bench.Sizes(
    seq=2048, hidden=1024, layers=4, experts=16, top_k=4, intermediate=512, vocab=32_000
)
# A plan leaves out buffers of the experts' kernels and the rounding of the allocator.
MAX_DIFFERENCE = 0.1
ON_DEVICE = bench.Configuration("", dtype=torch.bfloat16, checkpointing=True)
CONFIGURATIONS = {"on the device": ON_DEVICE, "on the host": replace(ON_DEVICE, offload=True)}


def _measure_allocated(rank: int, world: int, name: str, folder: str) -> tuple[int, int]:
    """Return the bytes that are allocated at the peak of a step and before the step."""
    join_nccl(folder)
    training = bench.prepare(CONFIGURATIONS[name], SIZES)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), before


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_peak_of_a_step_is_planned_within_10_percent(name: str, tmp_path: Path) -> None:
    """With parameters on the host, the device has almost nothing allocated between steps."""
    planned = CONFIGURATIONS[name].planned(SIZES, world=1, like_gpu=True)
    ((peak, before),) = run_ranks(_measure_allocated, 1, name, str(tmp_path), timeout=300.0)
    figures = f"planned {planned.peak:,}, allocated {peak:,}, before the step {before:,}"
    print(f"{name}: {figures}")
    assert abs(planned.peak / peak - 1) <= MAX_DIFFERENCE, figures
    assert (before < 0.05 * planned.host_peak) == CONFIGURATIONS[name].offload, figures
