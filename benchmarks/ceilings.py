"""What the card does at best: one large product, a copy in its memory, reads that hit its L2.

    python benchmarks/ceilings.py         one line of JSON; on a CPU small sizes, and no L2

A kernel of matrix products is bound by the largest of three times: operations over the first rate,
bytes of device memory over the second, bytes its tiles load over the third. A tile of 128 x 256
loads 48 KB of bf16 for 4.2 million operations, whatever the matrices: 85 operations a byte.
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
# Of 50 (H100) and 60 MB (H200): what fits with room to spare.
L2_BYTES = 20 * 2**20


@triton.jit
def _read_kernel(x, out, size, REPEAT: tl.constexpr, BLOCK: tl.constexpr):
    """Every program reads the whole buffer, each from a place of its own on."""
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * 131 * BLOCK
    for step in range(REPEAT):
        start = (first + step * BLOCK) % size
        # Past the first level of cache.
        total += tl.load(x + start + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def median_ms(run: Callable[[], Any], cuda: bool, repeats: int = 20) -> float:
    times = [milliseconds(run, cuda) for _ in range(repeats + 3)]
    return statistics.median(times[3:])


def product(device: torch.device, size: int) -> float:
    """TFLOP/s of a square product of random numbers: zeros take less power, and less time."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device.type == "cuda") / 1e9


def copy(device: torch.device, numel: int) -> float:
    """TB/s of a copy, what is read and what is written."""
    x = torch.randn(numel, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / median_ms(lambda: y.copy_(x), device.type == "cuda") / 1e9


def l2_read(device: torch.device, repeat: int = 2000) -> float:
    """TB/s that all multiprocessors read together from a buffer that lies in L2."""
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
