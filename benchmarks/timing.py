"""Milliseconds of what a function does on its device, without the host's share in it.

A GPU works behind the host: `spin` keeps it busy while the host queues what is timed, so that
between both events the device never waits for Python. What synchronizes inside, as stock's eager
loop does, still pays for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# Longer than the host needs to queue a layer forward and backward: 10 ms at 2 GHz.
SPIN_CYCLES = 20_000_000


def milliseconds(run: Callable[[], Any], cuda: bool, times: int = 1) -> float:
    """One measurement: the mean of `times` runs, one behind the other."""
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


def spin() -> None:
    """Let the current device count cycles for a while."""
    torch.cuda._sleep(SPIN_CYCLES)
