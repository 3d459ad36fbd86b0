"""Compile every Triton kernel for a GPU that need not be there, and report what came out.

    python compile_kernels.py          one JSON line per kernel, variant and table row
    python compile_kernels.py --some   per kernel and generation of GPU: its first launch in SOME

The launchers run on meta tensors of real sizes with a recorder in place of each kernel, so what is
compiled are the arguments, block sizes and alignments that a launch on the GPU would specialise
for. Runs as a process of its own: under TRITON_INTERPRET there is nothing to compile.
"""

import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia_backend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.kernels import blocks, dgated, grouped_mm, outer, reduce, sort_pairs, up

KERNEL_MODULES = (dgated, grouped_mm, outer, reduce, sort_pairs, up)
CUOBJDUMP = Path(nvidia_backend).parent / "bin" / "cuobjdump"
MATRICES_AND_BIASES = {"up", "up_bias", "down", "down_bias"}
ADAPTERS = {"up_a", "up_b", "down_a", "down_b"}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass
class Case:
    """One call of the expert MLP, forward and backward, in one formula."""

    name: str
    formula: ExpertFormula = field(default_factory=ExpertFormula)
    hidden: int = 2048
    ffn: int = 768
    experts: int = 128
    top_k: int = 8
    tokens: int = 4096
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    transposed: bool = False
    rank: int = 0

    def launches(self) -> list[Launch]:
        pre_size = 2 * self.ffn if self.formula.gated else self.ffn

        def weight(rows: int, columns: int) -> Tensor:
            if self.transposed:
                return self.meta(self.experts, columns, rows).transpose(1, 2)
            return self.meta(self.experts, rows, columns)

        weights = ExpertWeights(
            weight(pre_size, self.hidden),
            self.meta(self.experts, pre_size) if self.bias else None,
            weight(self.hidden, self.ffn),
            self.meta(self.experts, self.hidden) if self.bias else None,
            *self.adapters(pre_size),
        )
        rows = self.meta(self.tokens, self.hidden)
        scores = self.meta(self.tokens, self.top_k).float()
        ids = torch.empty(self.tokens, self.top_k, dtype=torch.int64, device="meta")
        with Recorder() as recorder:
            routing = triton_mlp.route(ids, None, weights)
            out, pre = triton_mlp.forward(rows, scores, weights, routing, self.formula, True)
            trained = ADAPTERS if self.rank else MATRICES_AND_BIASES
            need = {"rows", "weights", *trained.intersection(weights.named_tensors())}
            triton_mlp.backward(
                out, rows, scores, weights, routing, pre, self.formula, grad_scale=0.5, need=need
            )
        return recorder.launches

    def adapters(self, pre_size: int) -> list[Tensor | None]:
        """Factors a and b of up and of down, beside a frozen base."""
        if not self.rank:
            return [None] * 4
        return [
            self.meta(self.experts, self.rank, self.hidden),
            self.meta(self.experts, pre_size, self.rank),
            self.meta(self.experts, self.rank, self.ffn),
            self.meta(self.experts, self.hidden, self.rank),
        ]

    def meta(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


class Recorder:
    """Replaces every kernel of KERNEL_MODULES by one that notes its arguments."""

    def __enter__(self) -> "Recorder":
        self.launches: list[Launch] = []
        self.kernels = [
            (module, name, kernel)
            for module in KERNEL_MODULES
            for name, kernel in vars(module).items()
            if isinstance(kernel, JITFunction) and name.endswith("_kernel")
        ]
        for module, name, kernel in self.kernels:
            setattr(module, name, _Recorded(kernel, self.launches))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, kernel in self.kernels:
            setattr(module, name, kernel)


@dataclass
class _Recorded:
    kernel: JITFunction
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {k: kwargs.pop(k) for k in ("num_warps", "num_stages") if k in kwargs}
            names = [parameter.name for parameter in self.kernel.params]
            arguments = dict(zip(names, args)) | kwargs
            assert list(arguments) == names and all(size > 0 for size in grid)
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


def compile_launch(launch: Launch, arch: int) -> dict[str, Any]:
    """What the compiler says of one kernel: registers, spilled and shared bytes, instructions."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        kind, aligned = _kind(value)
        if parameter.is_constexpr or value is None or (kind == "i32" and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
            continue
        signature[name] = kind
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "shared": built.metadata.shared,
        "dots": built.asm["ttir"].count("tt.dot "),
        "wgmma": len(re.findall(r"wgmma\.mma_async", built.asm["ptx"])),
        "mma": len(re.findall(r"\bmma\.sync", built.asm["ptx"])),
    }


def _kind(value: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether its launcher would find it divisible by 16."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype], True
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return "constexpr", False
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0


def cases() -> list[Case]:
    gpt_oss = ExpertFormula(interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0)
    ungated = ExpertFormula(gated=False, activation="relu2")
    return [
        Case("qwen3-30b"),
        Case("qwen3-30b few rows", tokens=512),
        Case("qwen3-30b fp32", dtype=torch.float32),
        Case("gpt-oss-20b", gpt_oss, 2880, 2880, 32, 4, bias=True, transposed=True),
        Case("gpt-oss-20b few rows", gpt_oss, 2880, 2880, 32, 4, 256, bias=True, transposed=True),
        Case("transposed", transposed=True),
        Case("ungated", ungated),
        Case("gelu, bias", ExpertFormula(activation="gelu"), bias=True),
        Case("odd sizes", hidden=2064, ffn=784),
        Case("qwen3-30b r=16", rank=16),
        Case("qwen3-30b r=64", rank=64),
        Case("qwen3-30b r=16 fp32", dtype=torch.float32, rank=16),
        Case("gpt-oss-20b r=16", gpt_oss, 2880, 2880, 32, 4, bias=True, transposed=True, rank=16),
        Case("ungated r=128", ungated, rank=128),
        Case("odd sizes r=4 few rows", hidden=2064, ffn=784, tokens=512, rank=4),
    ]


# The case of each generation that stands for all: together they have every kernel, the longest
# epilogue (clamped, interleaved, biased) and an adapter.
SOME = {80: "qwen3-30b r=16", 90: "gpt-oss-20b"}


def _jobs(some: bool) -> Iterator[tuple[str, int, int, int]]:
    """(case, architecture, number of the case, number of the launch), nothing compiled twice."""
    seen = set()
    for arch, (index, case) in itertools.product((80, 90), enumerate(cases())):
        if some and case.name != SOME[arch]:
            continue
        blocks.generation = lambda device, arch=arch: f"sm_{arch}"
        for number, launch in enumerate(case.launches()):
            key = repr((launch.kernel.__name__, arch, launch.options, _shape_of(launch)))
            if some:
                key = repr((launch.kernel.__name__, arch))
            if key not in seen:
                seen.add(key)
                yield case.name, arch, index, number


def _shape_of(launch: Launch) -> list[Any]:
    """What a compilation depends on: two launches that agree in it are compiled once."""
    kinds = []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        number = isinstance(value, int) and not isinstance(value, bool)
        fixed = parameter.is_constexpr or value is None or (number and value == 1)
        kinds.append(value if fixed else _kind(value))
    return kinds


def _compile_job(job: tuple[str, int, int, int]) -> str:
    name, arch, index, number = job
    blocks.generation = lambda device: f"sm_{arch}"
    launch = cases()[index].launches()[number]
    report = compile_launch(launch, arch)
    return json.dumps({"case": name, "arch": arch, "kernel": launch.kernel.__name__, **report})


if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        for line in pool.imap(_compile_job, list(_jobs(some="--some" in sys.argv))):
            print(line, flush=True)
