"""Triton's own launcher without a GPU: a driver that records each launch, and runs nothing.

    stub = StubDriver(90, folder)            # as on an H100; in `folder`: the library, the kernels
    triton_mlp.forward(...)                  # with tensors on the CPU
    stub.list_problems()                     # the launches that a GPU would refuse

Triton compiles a kernel, loads it, describes blocks to TMA and launches as on a GPU, but through
`stub_driver.c` instead of CUDA's driver. Needs a C compiler. One process can have one stub driver.
"""

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.nvidia import __file__ as nvidia_backend
from triton.backends.nvidia import driver as nvidia_driver

_BACKEND = Path(nvidia_backend).parent
CUOBJDUMP = _BACKEND / "bin" / "cuobjdump"
_MOST_RECORDS = 65536
# Bytes of shared memory that a program may use on each architecture, with what CUDA reserves left
# out (CUDA's programming guide, "Technical specifications per compute capability").
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 170}
_REGISTERS = 65536
# CUDA reserves 1 KiB in each program. cuobjdump counts it, and the limits do not.
_RESERVED_SHARED = 1024
# Bytes of an element of each CUtensorMapDataType: u8, u16, u32, i32, u64, i64, fp16, fp32, fp64,
# bf16, and three more kinds of fp32.
_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
# The span of each CUtensorMapSwizzle, in bytes.
_SPAN = (None, 32, 64, 128)


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("module", "shared", "allowed_shared", "cluster")),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
    )


class Descriptor(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("type", "rank", "swizzle")),
        ("address", ctypes.c_ulonglong),
        ("sizes", ctypes.c_ulonglong * 5),
        ("strides", ctypes.c_ulonglong * 5),
        ("box", ctypes.c_uint * 5),
        ("steps", ctypes.c_uint * 5),
    )


@dataclass(frozen=True)
class _Kernel:
    """A loaded kernel: its name, registers per thread, and bytes of shared memory of its own."""

    name: str
    registers: int
    shared: int


class StubDriver:
    """Make Triton launch its kernels through a library that only records."""

    def __init__(self, capability: int, folder: Path) -> None:
        """`capability` is the architecture, for example 90. `folder` must exist."""
        library_path = folder / "libcuda.so.1"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", f"-I{_BACKEND / 'include'}"]
            + ["-Wl,-soname,libcuda.so.1", str(Path(__file__).with_suffix(".c"))]
            + ["-o", str(library_path)],
            check=True,
        )
        # Loaded before Triton asks for libcuda.so.1, so that it finds this one.
        self._library = ctypes.CDLL(str(library_path), mode=ctypes.RTLD_GLOBAL)
        self._folder = folder
        self._kernels: dict[int, _Kernel] = {}
        self.capability = capability
        self._number("stub_capability").value = capability
        self._number("stub_shared_limit").value = SHARED_LIMIT[capability]
        self._number("stub_multiprocessors").value = _MULTIPROCESSORS[capability]
        name = (ctypes.c_char * 4096).in_dll(self._library, "stub_folder")
        name.value = str(folder).encode()
        triton.knobs.nvidia.libcuda_path = str(folder)
        triton.runtime.driver.set_active(_Driver(capability))

    def record(self, recording: bool) -> None:
        """Start or stop recording. Times are measured without it."""
        self._number("stub_recording").value = recording

    def forget(self) -> None:
        """Forget the launches and descriptors recorded so far."""
        self._number("stub_num_launches").value = 0
        self._number("stub_num_descriptors").value = 0

    @property
    def builds(self) -> list[int]:
        """The numbers of the kernels launched so far, in their order."""
        return [launch.module for launch in self._launches()]

    def name_of(self, build: int) -> str:
        """Return the name of a kernel."""
        return self._kernel(build).name

    def list_problems(self) -> list[str]:
        """List what a GPU would refuse of the recorded launches and descriptors, as texts."""
        found = []
        for launch in self._launches():
            kernel = self._kernel(launch.module)
            problems = list_launch_problems(launch, kernel.registers, kernel.shared)
            found += [f"{kernel.name} {problem}" for problem in problems]
        array = (Descriptor * _MOST_RECORDS).in_dll(self._library, "stub_descriptors")
        for descriptor in array[: self._number("stub_num_descriptors").value]:
            found += list_descriptor_problems(descriptor)
        return list(dict.fromkeys(found))

    def _launches(self) -> list[Launch]:
        array = (Launch * _MOST_RECORDS).in_dll(self._library, "stub_launches")
        return array[: self._number("stub_num_launches").value]

    def _kernel(self, module: int) -> _Kernel:
        """Ask cuobjdump for the resources of a loaded kernel, once."""
        if module not in self._kernels:
            command = [CUOBJDUMP, "--dump-resource-usage", self._folder / f"{module}.cubin"]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            (name,) = re.findall(r"Function (\w+):", text)
            numbers = {k: int(v) for k, v in re.findall(r"(REG|SHARED):(\d+)", text)}
            shared = max(0, numbers["SHARED"] - _RESERVED_SHARED)
            self._kernels[module] = _Kernel(name, numbers["REG"], shared)
        return self._kernels[module]

    def _number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, name)


class _Driver(nvidia_driver.CudaDriver):
    """Triton's driver for one GPU, which asks neither torch nor CUDA for it."""

    def __init__(self, capability: int) -> None:
        self.utils = nvidia_driver.CudaUtils()
        self.launcher_cls = nvidia_driver.CudaLauncher
        pair = divmod(capability, 10)
        self.get_device_capability = lambda device: pair
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 0


def list_launch_problems(launch: Launch, registers: int, static_shared: int) -> list[str]:
    """List the limits that a launch exceeds, of CUDA's "Technical specifications"."""
    found = []
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    # A thread's registers are allocated in eights.
    needed = -(-registers // 8) * 8 * threads
    if not 0 < threads <= 1024:
        found.append(f"has {threads} threads, limit 1024")
    if needed > _REGISTERS:
        found.append(f"needs {needed} registers in {threads} threads, limit {_REGISTERS}")
    if launch.shared + static_shared > launch.allowed_shared:
        shared = f"{launch.shared} + {static_shared}"
        found.append(f"needs {shared} bytes of shared memory, allowed {launch.allowed_shared}")
    limits = (2**31 - 1, 65535, 65535)
    if any(not 0 < size <= limit for size, limit in zip(launch.grid, limits, strict=True)):
        found.append(f"has a grid of {tuple(launch.grid)}, limits {limits}")
    if launch.cluster > 8 or launch.grid[0] % launch.cluster:
        found.append(f"has clusters of {launch.cluster} in a grid of {tuple(launch.grid)}")
    return found


def list_descriptor_problems(descriptor: Descriptor) -> list[str]:
    """List the rules of `cuTensorMapEncodeTiled` (CUDA's driver API) that a descriptor breaks."""
    rank = descriptor.rank
    sizes, strides, box = (
        list(values)[:rank] for values in (descriptor.sizes, descriptor.strides, descriptor.box)
    )
    inner = box[0] * _BYTES[descriptor.type]
    span = _SPAN[descriptor.swizzle]
    rules = {
        f"begins at {descriptor.address:#x}, which 16 does not divide": descriptor.address % 16,
        f"has sizes of {sizes}": any(not 0 < size <= 2**32 for size in sizes),
        f"has strides of {strides[:-1]} bytes": any(
            stride % 16 or stride >= 2**40 for stride in strides[:-1]
        ),
        f"loads blocks of {box}": any(not 0 < size <= 256 for size in box),
        f"loads rows of {inner} bytes, which 16 does not divide": inner % 16,
        f"loads rows of {inner} bytes, more than its swizzle of {span}": span and inner > span,
        f"has steps of {list(descriptor.steps)[:rank]}": any(
            not 0 < step <= 8 for step in list(descriptor.steps)[:rank]
        ),
    }
    return [f"a TMA descriptor {text}" for text, broken in rules.items() if broken]
