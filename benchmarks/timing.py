"""Time the work of a function on its device, or a step that all ranks run.

    milliseconds         times the work of a function on its device, without the time of the host
    seconds_of_step      times a step of all ranks, between two barriers

A GPU executes kernels after the host has launched them. `spin` keeps the GPU busy while the host
launches the timed kernels, so that the GPU never waits for Python while its time is measured. If a
function synchronises with the host, as stock's eager loop over experts does, its waits are timed as
well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# This is longer than the host needs to launch a layer's forward and backward: 10 ms at 2 GHz.
SPIN_CYCLES = 20_000_000


def milliseconds(run: Callable[[], Any], cuda: bool, times: int = 1) -> float:
    """Measure the mean of `times` consecutive runs once, in milliseconds."""
    if not cuda:
        start = time.perf_counter()
        for _ in range(times):
            run()
        return 1e3 * (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    spin()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def seconds_of_step(step: Callable[[], Any]) -> float:
    """Run a step that all ranks begin together. Returns the seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def spin() -> None:
    """Keep the current device busy for SPIN_CYCLES cycles."""
    torch.cuda._sleep(SPIN_CYCLES)
