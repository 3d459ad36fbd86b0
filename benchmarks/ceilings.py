"""Measure a GPU's highest rates: FLOP/s of a matrix product, bytes/s of its memory and L2 cache.

    python benchmarks/ceilings.py     prints lines of JSON; on a CPU, sizes are small, and the L2
                                      cache is not measured

A matrix-product kernel takes at least the largest of three times: its operations over the FLOP/s,
its bytes of device memory over the memory's bytes/s, and the bytes that its tiles load over the
bytes/s of the L2 cache. With 64 values of the inner dimension, a tile of 128 x 256 loads 48 KB of
bf16 for 4.2 million operations, whatever the matrices: 85 operations per byte.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from timing import milliseconds

PROGRAMS_PER_SM = 4
BLOCK = 4096
# The L2 cache has 50 MB (H100) or 60 MB (H200), so this buffer fits easily.
L2_BYTES = 20 * 2**20


@triton.jit
def _read_kernel(x, out, size, REPEAT: tl.constexpr, BLOCK: tl.constexpr):
    """Read the buffer `x` in every program, block by block; each starts at another offset."""
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * 131 * BLOCK
    for step in range(REPEAT):
        start = (first + step * BLOCK) % size
        # ".cg" bypasses the L1 cache.
        total += tl.load(x + start + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def median_ms(run: Callable[[], Any], cuda: bool, repeats: int = 20) -> float:
    times = [milliseconds(run, cuda) for _ in range(repeats + 3)]
    return statistics.median(times[3:])


def product(device: torch.device, size: int) -> float:
    """Return the TFLOP/s of a square product of random numbers (zeros take less power and time)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device.type == "cuda") / 1e9


def copy(device: torch.device, numel: int) -> float:
    """Return the TB/s of a copy; bytes that are read and bytes that are written both count."""
    x = torch.randn(numel, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / median_ms(lambda: y.copy_(x), device.type == "cuda") / 1e9


def l2_read(device: torch.device, repeat: int = 2000) -> float:
    """Return the TB/s at which all multiprocessors read a buffer that fits into the L2 cache."""
    properties: Any = torch.cuda.get_device_properties(device)
    programs = PROGRAMS_PER_SM * properties.multi_processor_count
    size = L2_BYTES // 4 // BLOCK * BLOCK
    x = torch.randn(size, device=device)
    out = torch.empty(programs * BLOCK, device=device)

    def read() -> None:
        _read_kernel[(programs,)](x, out, size, REPEAT=repeat, BLOCK=BLOCK, num_warps=8)

    return programs * repeat * BLOCK * 4 / median_ms(read, True, 8) / 1e9


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else "cpu"
    line: dict[str, Any] = {"ceilings": name, "torch": torch.__version__}
    line["triton"] = triton.__version__
    line["product_tflops"] = product(device, 8192 if cuda else 512)
    line["copy_tb_per_s"] = copy(device, 2**30 if cuda else 2**20)
    print(json.dumps(line), flush=True)
    if cuda:
        print(json.dumps({"ceilings": name, "l2_read_tb_per_s": l2_read(device)}), flush=True)


if __name__ == "__main__":
    main()
