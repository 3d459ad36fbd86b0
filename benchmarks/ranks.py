"""Run a function of a benchmark on N gloo ranks of one thread each, and measure their peak memory.

The ranks connect through a file, so no port is needed. After `timeout` seconds they are killed.
With `environment=KEEP_FREED_MEMORY`, glibc keeps freed memory, as the caching allocator of a GPU
does. With glibc's defaults, the Linux kernel would clear new pages for every large tensor.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}


def spawn(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run `fn(rank, *args)` on each rank. Returns the results in the order of the ranks.

    Raises:
        TimeoutError: the ranks have not finished after `timeout` seconds.
        ProcessRaisedException: a rank has failed. The message contains the traceback of this rank.
    """
    # The variables are set here, because OpenMP and malloc read them when a process starts.
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="benchmark_ranks_") as folder:
        with patch.dict(os.environ, variables):
            context = mp.spawn(
                _rank_main, (folder, world, fn, args, timeout), nprocs=world, join=False
            )
        deadline = time.monotonic() + timeout
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{fn.__name__}: the ranks had not finished after {timeout} s")
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(world)]


def _rank_main(
    rank: int,
    folder: str,
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    torch.save(fn(rank, *args), f"{folder}/{rank}")
    dist.destroy_process_group()


def reset_peak() -> None:
    """Return freed memory to the system, and set the peak to the memory that is in use now.

    This works only on Linux; proc_pid_clear_refs(5) describes `/proc/self/clear_refs`.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Return the peak resident memory of this process since `reset_peak`, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
