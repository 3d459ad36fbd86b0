"""Compile every Triton kernel for a GPU that need not be there, and report what came out.

    python compile_kernels.py          one JSON line per kernel, variant and table row
    python compile_kernels.py --some   per kernel, with an adapter and without, and generation of
                                       GPU: its first launch in SOME
    python compile_kernels.py --layouts   what each case has of an experts module's layout
    python compile_kernels.py --candidates   for each candidate of the table what it changes
    python compile_kernels.py --write  all of them, into benchmarks/results/ahead_of_time.json
                                       (what the tests compare with) and the table beside it;
                                       with --before as the figures to compare with there, with
                                       --new only those of launches that are not on file yet

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
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from ahead_of_time import IN_TABLE, on_file, record
from expert_cases import layout_of
from machine_code import product_loops
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia_backend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertGrads, ExpertWeights
from hf_moe_ep.ops.kernels import blocks, dgated, grouped_mm, outer, reduce, sort_pairs, up
from hf_moe_ep.ops.quantised import Quantisation, empty_stack

KERNEL_MODULES = (dgated, grouped_mm, outer, reduce, sort_pairs, up)
CUOBJDUMP = Path(nvidia_backend).parent / "bin" / "cuobjdump"
# A100, H100 and RTX 50xx: CUDA's programming guide, "Technical specifications per capability".
SHARED_PER_SM = {80: 164 * 1024, 90: 228 * 1024, 120: 100 * 1024}
THREADS_PER_SM = {80: 2048, 90: 2048, 120: 1536}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
MATRICES_AND_BIASES = {"up", "up_bias", "down", "down_bias"}
ADAPTERS = {"up_a", "up_b", "down_a", "down_b"}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    def role(self) -> str:
        """What a kernel that has several duties is launched for."""
        if self.kernel.__name__ == "grouped_mm_kernel":
            gathers = "" if self.arguments["row_of_position"] is None else ", gathers"
            return f"thin{gathers}" if self.arguments["SCALED"] else "wide"
        if self.kernel.__name__ == "outer_kernel":
            left = "gathers left" if self.arguments["GATHER_LEFT"] else ""
            return "gathers right" if self.arguments["GATHER_RIGHT"] else left or "gathers nothing"
        return ""


@dataclass
class Case:
    """One call of the expert MLP, forward and backward, in one formula.

    `chunks`: its gradients are added to those of an earlier call. `quantised`: its matrices are
    bytes, and frozen.
    """

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
    chunks: bool = False
    quantised: str = ""

    def launches(self) -> list[Launch]:
        pre_size = 2 * self.ffn if self.formula.gated else self.ffn

        weights = ExpertWeights(
            **self.matrix("up", pre_size, self.hidden),
            up_bias=self.meta(self.experts, pre_size) if self.bias else None,
            **self.matrix("down", self.hidden, self.ffn),
            down_bias=self.meta(self.experts, self.hidden) if self.bias else None,
            **self.adapters(pre_size),
            quantised=self.quantised,
        )
        rows = self.meta(self.tokens, self.hidden)
        scores = self.meta(self.tokens, self.top_k).float()
        ids = torch.empty(self.tokens, self.top_k, dtype=torch.int64, device="meta")
        with Recorder() as recorder:
            routing = triton_mlp.route(ids, None, weights, rows)
            out, pre = triton_mlp.forward(rows, scores, weights, routing, self.formula, True)
            trained = ADAPTERS if self.rank or self.quantised else MATRICES_AND_BIASES
            need = {"rows", "weights", *trained.intersection(weights.named_tensors())}
            step = (out, rows, scores, weights, routing, pre, self.formula)
            _, finish = triton_mlp.backward(*step, grad_scale=0.5, need=need, later=True)
            assert finish is not None
            grads = ExpertGrads(wide=self.chunks)
            for _ in range(2 if self.chunks else 1):
                finish(grads)
        return recorder.launches

    def matrix(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        """The matrices `name` of all experts, or their bytes with scales."""
        shape = (self.experts, rows, columns)
        if self.quantised:
            return empty_stack(shape, Quantisation(self.quantised), "meta").by_name(name)
        if self.transposed:
            return {name: self.meta(self.experts, columns, rows).transpose(1, 2)}
        return {name: self.meta(*shape)}

    def adapters(self, pre_size: int) -> dict[str, Tensor]:
        """Factors a and b of up and of down, beside a frozen base."""
        if not self.rank:
            return {}
        return {
            "up_a": self.meta(self.experts, self.rank, self.hidden),
            "up_b": self.meta(self.experts, pre_size, self.rank),
            "down_a": self.meta(self.experts, self.rank, self.ffn),
            "down_b": self.meta(self.experts, self.hidden, self.rank),
        }

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
            options = {k: kwargs[k] for k in OPTIONS if kwargs.get(k)}
            kwargs = {k: v for k, v in kwargs.items() if k not in OPTIONS}
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
        if _is_fixed(parameter, value):
            signature[name], constants[(index,)] = "constexpr", value
            continue
        signature[name] = kind
        if aligned and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = _dump("--dump-resource-usage", cubin.name)
        listing = _dump("--dump-sass", cubin.name)
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    warps = built.metadata.num_warps
    stages = launch.options.get("num_stages", 1)
    return {
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "shared": built.metadata.shared,
        "block": describe_block(launch),
        "stages": stages,
        "programs": programs_per_sm(numbers["REG"], built.metadata.shared, warps, arch),
        "dots": built.asm["ttir"].count("tt.dot "),
        "wgmma": len(re.findall(r"wgmma\.mma_async", built.asm["ptx"])),
        "mma": len(re.findall(r"\bmma\.sync", built.asm["ptx"])),
        "loops": [asdict(loop) for loop in product_loops(listing)],
    }


def describe_block(launch: Launch) -> str:
    """Rows x columns x step along the sum, warps and stages of a product; "" for the others."""
    if not {"BLOCK_M", "BLOCK_N", "BLOCK_K"} <= launch.arguments.keys():
        return ""
    sizes = " x ".join(str(launch.arguments[f"BLOCK_{x}"]) for x in "MNK")
    return f"{sizes}, {launch.options['num_warps']}w {launch.options['num_stages']}s"


def programs_per_sm(registers: int, shared: int, warps: int, arch: int) -> int:
    """Programs that fit on a multiprocessor: of registers, shared memory and threads the scarcest.

    Registers are given out in eights per thread; a program takes 1 KiB of shared memory on top.
    """
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED_PER_SM[arch] // (shared + 1024)
    return min(by_registers, by_shared, THREADS_PER_SM[arch] // (32 * warps))


def _dump(what: str, cubin: str) -> str:
    return subprocess.run(
        [str(CUOBJDUMP), what, cubin], capture_output=True, text=True, check=True
    ).stdout


def _is_fixed(parameter: Any, value: Any) -> bool:
    """Whether a kernel is compiled for this value of an argument."""
    if parameter.is_constexpr or value is None:
        return True
    one = isinstance(value, int) and not isinstance(value, bool) and value == 1
    return one and not parameter.do_not_specialize


def _kind(value: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether its launcher would find it divisible by 16."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype], True
    if isinstance(value, TensorDescriptor):
        kind = POINTERS[value.base.dtype].removeprefix("*")
        return f"tensordesc<{kind}[{','.join(map(str, value.block_shape))}]>", False
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return "constexpr", False
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0


def cases() -> list[Case]:
    gpt_oss = ExpertFormula(interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0)
    in_halves = ExpertFormula(alpha=1.702, limit=7.0, up_offset=1.0)
    ungated = ExpertFormula(gated=False, activation="relu2")
    return [
        Case("qwen3-30b"),
        Case("qwen3-30b few rows", tokens=512),
        Case("qwen3-30b chunks", chunks=True),
        Case("qwen3-30b fp32", dtype=torch.float32),
        Case("gpt-oss-20b", gpt_oss, 2880, 2880, 32, 4, bias=True, transposed=True),
        Case("gpt-oss-20b few rows", gpt_oss, 2880, 2880, 32, 4, 256, bias=True, transposed=True),
        Case("transposed", transposed=True),
        Case("ungated", ungated),
        Case("gelu, bias", ExpertFormula(activation="gelu"), bias=True),
        Case("odd sizes", hidden=2064, ffn=784),
        Case("qwen3-30b r=16", rank=16),
        Case("qwen3-30b r=64", rank=64),
        Case("qwen3-30b chunks r=16", rank=16, chunks=True),
        Case("qwen3-30b r=16 fp32", dtype=torch.float32, rank=16),
        Case("gpt-oss-20b r=16", gpt_oss, 2880, 2880, 32, 4, bias=True, transposed=True, rank=16),
        Case("ungated r=128", ungated, rank=128),
        Case("odd sizes r=4 few rows", hidden=2064, ffn=784, tokens=512, rank=4),
        # Behind the others, whose launches these have too: what is new are gates.
        Case("clamped", ExpertFormula(limit=10.0)),
        Case("gelu_tanh", ExpertFormula(activation="gelu_tanh")),
        Case("gpt-oss in halves", in_halves),
        Case("privacy filter", in_halves, bias=True, transposed=True),
        # Frozen bytes; gpt-oss has columns that no block divides.
        Case("qwen3-30b nf4", quantised="nf4"),
        Case("qwen3-30b nf4 r=16", quantised="nf4", rank=16),
        Case("qwen3-30b nf4 few rows", quantised="nf4", tokens=512),
        Case("qwen3-30b nf4 r=16 fp32", quantised="nf4", rank=16, dtype=torch.float32),
        Case("gpt-oss-20b nf4", gpt_oss, 2880, 2880, 32, 4, bias=True, quantised="nf4"),
        Case("qwen3-30b fp8 r=16", quantised="fp8", rank=16),
        Case("qwen3-30b fp8 few rows", quantised="fp8", tokens=512),
        Case("qwen3-30b fp8 r=16 fp32", quantised="fp8", rank=16, dtype=torch.float32),
    ]


# What sm_120 (RTX 50xx) takes: the rows of sm_80, since its shared memory is as small.
ROWS_OF = {80: "sm_80", 90: "sm_90", 120: "sm_80"}
# The cases of each generation that stand for all: together they have every kernel, the longest
# epilogue (clamped, interleaved, biased), adapters and bytes.
SOME = {80: ("qwen3-30b r=16",), 90: ("gpt-oss-20b", "qwen3-30b r=16", "qwen3-30b nf4 r=16")}


@dataclass(frozen=True)
class Job:
    """One compilation: launch number `launch` of case number `case`.

    `names` are those of all launches that are compiled the same, this one's first.
    """

    names: list[str]
    arch: int
    case: int
    launch: int
    candidate: int | None = None


def jobs(some: bool) -> list[Job]:
    """Every launch on every architecture, none compiled twice."""
    found: dict[str, Job] = {}
    for arch, (index, case) in itertools.product(SOME if some else ROWS_OF, enumerate(cases())):
        if (some and case.name not in SOME[arch]) or (arch == 120 and case.name not in IN_TABLE):
            continue
        _use_rows_of(arch)
        taken: Counter[str] = Counter()
        for number, launch in enumerate(case.launches()):
            kernel = launch.kernel.__name__
            place = " ".join(part for part in (kernel, launch.role()) if part)
            taken[place] += 1
            name = f"{case.name} | {place} | {taken[place]}"
            arguments = launch.arguments
            key = [kernel, arch, bool(arguments.get("RANK")), bool(arguments.get("KIND"))]
            if not some:
                key += [launch.options, _shape_of(launch)]
            found.setdefault(repr(key), Job([], arch, index, number)).names.append(name)
    return list(found.values())


def candidate_jobs() -> list[Job]:
    """The launches of Qwen3-30B that a candidate for its row of the table changes."""
    found = []
    for number, candidate in enumerate(blocks.CANDIDATES):
        generation, _, bucket = candidate.row
        arch = 90 if generation == "sm_90" else 80
        _use_rows_of(arch)
        name = "qwen3-30b" if bucket == "many" else "qwen3-30b few rows"
        (index,) = (i for i, case in enumerate(cases()) if case.name == name)
        before = [(x.options, _shape_of(x)) for x in cases()[index].launches()]
        _use_candidate(number)
        for launch, x in enumerate(cases()[index].launches()):
            if (x.options, _shape_of(x)) != before[launch]:
                found.append(Job([f"{candidate.field} {x.role()}"], arch, index, launch, number))
        _use_candidate(None)
    return found


def _use_candidate(number: int | None) -> None:
    """Put a candidate into its row of the table, or the table's own rows back."""
    blocks.TABLE.update(_OWN_ROWS)
    if number is not None:
        candidate = blocks.CANDIDATES[number]
        blocks.TABLE[candidate.row] = candidate.blocks()


_OWN_ROWS = dict(blocks.TABLE)


def _use_rows_of(arch: int) -> None:
    blocks.generation = lambda device: ROWS_OF[arch]


def _shape_of(launch: Launch) -> list[Any]:
    """What a compilation depends on: two launches that agree in it are compiled once."""
    kinds = []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        kind, aligned = _kind(value)
        free = kind, aligned and not parameter.do_not_specialize
        kinds.append(value if _is_fixed(parameter, value) else free)
    return kinds


def run_job(job: Job) -> dict[str, Any]:
    _use_rows_of(job.arch)
    _use_candidate(job.candidate)
    case = cases()[job.case]
    launch = case.launches()[job.launch]
    named = {"names": job.names, "arch": job.arch, "case": case.name, "candidate": job.candidate}
    return named | {"kernel": launch.kernel.__name__, **compile_launch(launch, job.arch)}


if __name__ == "__main__":
    if "--layouts" in sys.argv:
        for case in cases():
            print(json.dumps(layout_of(case.formula, bias=case.bias, transposed=case.transposed)))
        sys.exit()
    reports = []
    with multiprocessing.Pool(2) as pool:
        chosen = candidate_jobs() if "--candidates" in sys.argv else jobs("--some" in sys.argv)
        if "--new" in sys.argv:
            chosen = [job for job in chosen if not on_file(job.names, job.arch)]
        for report in pool.imap(run_job, chosen):
            reports.append(report)
            if "--write" not in sys.argv:
                print(json.dumps(report), flush=True)
    if "--write" in sys.argv:
        if "--new" in sys.argv:
            reports += [asdict(job) for job in jobs(False) if on_file(job.names, job.arch)]
        record(reports, "before" if "--before" in sys.argv else "now")
