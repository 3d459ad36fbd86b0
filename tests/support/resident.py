"""Measure by how much the resident memory of this process grows at the peak of a block."""

import ctypes
import gc
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # malloc.h
_MIB = 2**20


def return_what_is_freed() -> None:
    """Make the allocator return freed memory, so that only live tensors are resident."""
    ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _MIB)


class Resident:
    """Context manager whose `grown` is the peak of resident bytes minus those before the block."""

    def __enter__(self) -> "Resident":
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before, self.grown = _bytes("VmRSS"), 0
        return self

    def __exit__(self, *_: object) -> None:
        self.grown = _bytes("VmHWM") - self._before


def _bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
