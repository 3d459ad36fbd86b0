"""Measure the highest rates of a GPU: FLOP/s of a matrix product, and bytes/s of its memory.

    python benchmarks/ceilings.py     prints a line of JSON; on a CPU, sizes are small

A matrix-product kernel takes at least the larger of two times: its FLOPs divided by the FLOP/s, and
its bytes of device memory divided by the bytes/s of the memory. The rate of the L2 cache is a limit
as well, but it is not measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
from timing import milliseconds


def median_ms(run: Callable[[], Any], cuda: bool, repeats: int = 20) -> float:
    times = [milliseconds(run, cuda) for _ in range(repeats + 3)]
    return statistics.median(times[3:])


def product(device: torch.device, size: int) -> float:
    """Measure the TFLOP/s of a square product of random numbers. Zeros would take less power."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device.type == "cuda") / 1e9


def copy(device: torch.device, numel: int) -> float:
    """Measure the TB/s of a copy, as the sum of the bytes that are read and written."""
    x = torch.randn(numel, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / median_ms(lambda: y.copy_(x), device.type == "cuda") / 1e9


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else "cpu"
    line: dict[str, Any] = {"ceilings": name, "torch": torch.__version__}
    line["triton"] = triton.__version__
    line["product_tflops"] = product(device, 8192 if cuda else 512)
    line["copy_tb_per_s"] = copy(device, 2**30 if cuda else 2**20)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
