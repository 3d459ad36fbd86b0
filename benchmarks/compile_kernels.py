"""Compile every Triton kernel ahead of time, without a GPU, and check the machine code.

    python benchmarks/compile_kernels.py            compiles the launches of all cases for three
                                                    GPU architectures, each distinct kernel once,
                                                    and prints one JSON line per compiled kernel
    python benchmarks/compile_kernels.py --check    also compiles launches with the block sizes of
                                                    `block_candidates.py`; exits with 1 if it finds
                                                    a problem
    python benchmarks/compile_kernels.py --write    writes the figures to `results/`
                                                    (`ahead_of_time.py`)
        --write --before                            stores the figures as those of the kernels
                                                    before a change, for a comparison
        --write --new                               adds only launches without recorded figures

`make gpu-rehearsal` runs the check (about seven minutes on two cores). The check finds kernels that
would be slow on a GPU or could not start there.

The launchers of the kernels run on meta tensors of real sizes, while a `Recorder` replaces the
kernels and stores the arguments of each launch. A kernel is therefore compiled for the same
arguments, block sizes and alignments as on a GPU. Nothing is compiled under TRITON_INTERPRET=1.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import triton
from ahead_of_time import IN_TABLE, figures, record, recorded, recorded_figures, version
from block_candidates import CANDIDATES, requiring_tma
from machine_code import product_loops
from stub_driver import CUOBJDUMP
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertGrads, ExpertWeights
from hf_moe_ep.ops.kernels import blocks, dgated, gate_up, grouped_mm, outer, reduce, sort_pairs
from hf_moe_ep.ops.quantised import Quantisation, allocate_stack

KERNEL_MODULES = (dgated, gate_up, grouped_mm, outer, reduce, sort_pairs)
# For A100, H100 and RTX 50xx: CUDA's programming guide, "Technical specifications per capability".
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
        """Return the purpose of this launch if its kernel has several purposes, or ""."""
        if self.kernel.__name__ == "grouped_mm_kernel":
            gathers = "" if self.arguments["row_of_position"] is None else ", gathers"
            return f"thin{gathers}" if self.arguments["SCALED"] else "wide"
        if self.kernel.__name__ == "outer_kernel":
            if self.arguments["GATHER_RIGHT"]:
                return "gathers right"
            return "gathers left" if self.arguments["GATHER_LEFT"] else "gathers nothing"
        return ""


@dataclass
class Inputs:
    """The tensors of a call. `need` names those whose gradients are computed."""

    rows: Tensor
    scores: Tensor
    ids: Tensor
    weights: ExpertWeights
    need: set[str]


@dataclass
class Case:
    """One call of the expert MLP. Its forward and backward launch the kernels to compile.

    With `chunks`, it also launches the kernels that add to the weight gradients of earlier chunks.
    `quantised` is the format of quantised (frozen) matrices, or "".
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
        forward, backward = self.make_step("meta")
        with Recorder() as recorder:
            backward(forward())
        return recorder.launches

    def make_step(
        self, device: str
    ) -> tuple[Callable[[], tuple[Any, ...]], Callable[[tuple[Any, ...]], None]]:
        """Return forward, and backward of what forward returns. The tensors have any values."""
        inputs = self.make_inputs(device)
        rows, scores, weights = inputs.rows, inputs.scores, inputs.weights

        def forward() -> tuple[Any, ...]:
            routing = triton_mlp.route(inputs.ids, None, weights, rows)
            out, pre = triton_mlp.forward(rows, scores, weights, routing, self.formula, True)
            return out, rows, scores, weights, routing, pre, self.formula

        def backward(step: tuple[Any, ...]) -> None:
            options = {"grad_scale": 0.5, "need": inputs.need, "postpone": True}
            _, finish = triton_mlp.backward(*step, **options)
            assert finish is not None
            grads = ExpertGrads(wide=self.chunks)
            for _ in range(2 if self.chunks else 1):
                finish(grads)

        return forward, backward

    def make_inputs(self, device: str) -> "Inputs":
        pre_size = 2 * self.ffn if self.formula.gated else self.ffn

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device=device)

        weights = ExpertWeights(
            **self._make_matrix("up", pre_size, self.hidden, make),
            up_bias=make(self.experts, pre_size) if self.bias else None,
            **self._make_matrix("down", self.hidden, self.ffn, make),
            down_bias=make(self.experts, self.hidden) if self.bias else None,
            **self._make_adapters(pre_size, make),
            quantised=self.quantised,
        )
        scores = torch.empty(self.tokens, self.top_k, device=device)
        ids = torch.empty(self.tokens, self.top_k, dtype=torch.int64, device=device)
        trained = ADAPTERS if self.rank or self.quantised else MATRICES_AND_BIASES
        need = {"rows", "weights", *trained.intersection(weights.named_tensors())}
        return Inputs(make(self.tokens, self.hidden), scores, ids, weights, need)

    def _make_matrix(
        self, name: str, rows: int, columns: int, make: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Return the stacked matrices `name`, or their bytes and scales if they are quantised."""
        shape = (self.experts, rows, columns)
        if self.quantised:
            device = make(0).device
            return allocate_stack(shape, Quantisation(self.quantised), device).by_name(name)
        if self.transposed:
            return {name: make(self.experts, columns, rows).transpose(1, 2)}
        return {name: make(*shape)}

    def _make_adapters(self, pre_size: int, make: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the LoRA factors of up and down, whose own matrices are then frozen."""
        if not self.rank:
            return {}
        return {
            "up_a": make(self.experts, self.rank, self.hidden),
            "up_b": make(self.experts, pre_size, self.rank),
            "down_a": make(self.experts, self.rank, self.ffn),
            "down_b": make(self.experts, self.hidden, self.rank),
        }


class Recorder:
    """Replaces every kernel of KERNEL_MODULES by a function that records its arguments."""

    def __enter__(self) -> "Recorder":
        self.launches: list[Launch] = []
        self.kernels = [
            (module, name, kernel)
            for module in KERNEL_MODULES
            for name, kernel in vars(module).items()
            if isinstance(kernel, JITFunction) and name.endswith("_kernel")
        ]
        for module, name, kernel in self.kernels:
            setattr(module, name, _RecordedKernel(kernel, self.launches))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, kernel in self.kernels:
            setattr(module, name, kernel)


@dataclass
class _RecordedKernel:
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
    """Compile one launch. Returns its registers, spilled bytes, shared memory and loops."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        kind, aligned = _find_triton_type(value)
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
        usage = _cuobjdump("--dump-resource-usage", cubin.name)
        listing = _cuobjdump("--dump-sass", cubin.name)
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    warps = built.metadata.num_warps
    stages = launch.options.get("num_stages", 1)
    return {
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "shared": built.metadata.shared,
        "block": describe_block(launch),
        "stages": stages,
        "programs": count_programs_per_sm(numbers["REG"], built.metadata.shared, warps, arch),
        "dots": built.asm["ttir"].count("tt.dot "),
        "wgmma": len(re.findall(r"wgmma\.mma_async", built.asm["ptx"])),
        "mma": len(re.findall(r"\bmma\.sync", built.asm["ptx"])),
        "loops": [asdict(loop) for loop in product_loops(listing)],
    }


def describe_block(launch: Launch) -> str:
    """Describe the block of a launch as rows x columns x step along the sum, warps and stages.

    The result looks like "128 x 256 x 64, 8w 3s". It is "" for a kernel without matrix products.
    """
    if not {"BLOCK_M", "BLOCK_N", "BLOCK_K"} <= launch.arguments.keys():
        return ""
    sizes = " x ".join(str(launch.arguments[f"BLOCK_{x}"]) for x in "MNK")
    return f"{sizes}, {launch.options['num_warps']}w {launch.options['num_stages']}s"


def count_programs_per_sm(registers: int, shared: int, warps: int, arch: int) -> int:
    """Return how many programs fit on a multiprocessor.

    The number is limited by registers, shared memory and threads. Registers are allocated in
    multiples of eight per thread, and each program needs 1 KiB of additional shared memory.
    """
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED_PER_SM[arch] // (shared + 1024)
    return min(by_registers, by_shared, THREADS_PER_SM[arch] // (32 * warps))


def _cuobjdump(option: str, cubin: str) -> str:
    return subprocess.run(
        [str(CUOBJDUMP), option, cubin], capture_output=True, text=True, check=True
    ).stdout


def _is_fixed(parameter: Any, value: Any) -> bool:
    """Return True if Triton compiles the value of this argument into the kernel."""
    if parameter.is_constexpr or value is None:
        return True
    is_one = isinstance(value, int) and not isinstance(value, bool) and value == 1
    return is_one and not parameter.do_not_specialize


def _find_triton_type(value: Any) -> tuple[str, bool]:
    """Return the Triton type of an argument, and True if Triton would treat it as 16-divisible."""
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


def list_cases() -> list[Case]:
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
        # The next cases differ from earlier cases only in the formula between up and down.
        Case("clamped", ExpertFormula(limit=10.0)),
        Case("gelu_tanh", ExpertFormula(activation="gelu_tanh")),
        Case("gpt-oss in halves", in_halves),
        Case("privacy filter", in_halves, bias=True, transposed=True),
        # Quantised matrices. The 2880 columns of gpt-oss are not a multiple of a block of 128.
        Case("qwen3-30b nf4", quantised="nf4"),
        Case("qwen3-30b nf4 r=16", quantised="nf4", rank=16),
        Case("qwen3-30b nf4 few rows", quantised="nf4", tokens=512),
        Case("qwen3-30b nf4 r=16 fp32", quantised="nf4", rank=16, dtype=torch.float32),
        Case("gpt-oss-20b nf4", gpt_oss, 2880, 2880, 32, 4, bias=True, quantised="nf4"),
        Case("qwen3-30b fp8 r=16", quantised="fp8", rank=16),
        Case("qwen3-30b fp8 few rows", quantised="fp8", tokens=512),
        Case("qwen3-30b fp8 r=16 fp32", quantised="fp8", rank=16, dtype=torch.float32),
    ]


# The rows of the block table that an architecture uses. sm_120 (RTX 50xx) has too little shared
# memory for the rows of sm_90.
ROWS_OF = {80: "sm_80", 90: "sm_90", 120: "sm_80"}


@dataclass(frozen=True)
class Job:
    """One compilation: launch number `launch` of case number `case`.

    `names` lists all launches that compile to the same code, beginning with this launch.
    """

    names: list[str]
    arch: int
    case: int
    launch: int
    candidate: int | None = None


def list_jobs() -> list[Job]:
    """List a job for each launch and architecture. Launches with the same code share a job."""
    found: dict[str, Job] = {}
    for arch, (index, case) in itertools.product(ROWS_OF, enumerate(list_cases())):
        if arch == 120 and case.name not in IN_TABLE:
            continue
        _use_rows_of(arch)
        occurrences: Counter[str] = Counter()
        for number, launch in enumerate(case.launches()):
            kernel = launch.kernel.__name__
            purpose = " ".join(part for part in (kernel, launch.role()) if part)
            occurrences[purpose] += 1
            name = f"{case.name} | {purpose} | {occurrences[purpose]}"
            key = [kernel, arch, launch.options, _make_compile_key(launch)]
            found.setdefault(repr(key), Job([], arch, index, number)).names.append(name)
    return list(found.values())


def list_candidate_jobs() -> list[Job]:
    """List a job for every launch of Qwen3-30B that a candidate changes, for each candidate."""
    found = []
    for number, candidate in enumerate(CANDIDATES):
        generation, _, bucket = candidate.row
        arch = 90 if generation == "sm_90" else 80
        _use_rows_of(arch)
        name = "qwen3-30b" if bucket == "many" else "qwen3-30b few rows"
        (index,) = (i for i, case in enumerate(list_cases()) if case.name == name)
        before = [(x.options, _make_compile_key(x)) for x in list_cases()[index].launches()]
        _use_candidate(number)
        with requiring_tma():
            launches = list_cases()[index].launches()
        for launch, x in enumerate(launches):
            if (x.options, _make_compile_key(x)) != before[launch]:
                found.append(Job([f"{candidate.field} {x.role()}"], arch, index, launch, number))
        _use_candidate(None)
    return found


def _use_candidate(number: int | None) -> None:
    """Write the block of a candidate to the block table. None restores the table.

    The cases have 256 or 32 rows per expert, so none of them uses the row "many". The code of a
    kernel does not depend on the number of rows, so a candidate for "many" is written to "some".
    """
    blocks.TABLE.update(_OWN_ROWS)
    if number is not None:
        candidate = CANDIDATES[number]
        generation, itemsize, bucket = candidate.row
        row = generation, itemsize, "some" if bucket == "many" else bucket
        changed: dict[str, Any] = {candidate.field: candidate.block}
        blocks.TABLE[row] = replace(blocks.TABLE[row], **changed)


_OWN_ROWS = dict(blocks.TABLE)


def _use_rows_of(arch: int) -> None:
    blocks.generation = lambda device: ROWS_OF[arch]


def _make_compile_key(launch: Launch) -> list[Any]:
    """Return the types, alignments and fixed values of arguments, which determine the code."""
    found = []
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        kind, aligned = _find_triton_type(value)
        specialised = kind, aligned and not parameter.do_not_specialize
        found.append(value if _is_fixed(parameter, value) else specialised)
    return found


def run_job(job: Job) -> dict[str, Any]:
    _use_rows_of(job.arch)
    _use_candidate(job.candidate)
    case = list_cases()[job.case]
    launch = case.launches()[job.launch]
    named = {"names": job.names, "arch": job.arch, "case": case.name, "candidate": job.candidate}
    return named | {"kernel": launch.kernel.__name__, **compile_launch(launch, job.arch)}


# `check` fails if it has not compiled all of these kernels.
KERNELS = {
    *("up_kernel", "grouped_mm_kernel", "dgated_kernel", "outer_kernel"),
    *("bias_dots_kernel", "combine_kernel", "weight_grads_kernel", "segment_sum_kernel"),
    *("_count_kernel", "_scan_kernel", "_place_kernel", "_tiles_kernel"),
}
# Bytes of shared memory that a program may use. sm_86, sm_89 and sm_120 also use the rows of sm_80,
# and have less shared memory than an A100.
SHARED_LIMIT = {80: 101376, 90: 232448, 120: 101376}
# Bytes that a thread of a kernel may spill. All other kernels may spill 8 bytes (one address).
# After its loop, `dgated_kernel` needs a gate value, an up value, their gradients and a routing
# weight at the same time.
SPILL_LIMIT = {"dgated_kernel": 64}
# The only launch that may wait for its loads: rows of an adapter of rank 4 have 8 bytes, and sm_80
# cannot prefetch loads of this size.
NOT_PREFETCHED = ("odd sizes r=4 few rows", 80, "outer_kernel")
# The largest allowed ratio of instructions per loop step to the recorded number.
MOST_GROWTH = 1.1


def list_problems(report: dict[str, Any]) -> list[str]:
    """List the rules that a compiled kernel breaks, as texts.

    Candidates may spill more bytes. A candidate with wide tiles may spill once per tile, after its
    loop, and still be faster.
    """
    found = []
    loops, arch, is_candidate = report["loops"], report["arch"], report["candidate"] is not None
    if not is_candidate and report["spilled"] > SPILL_LIMIT.get(report["kernel"], 8):
        found.append(f"spills {report['spilled']} bytes per thread")
    if any(loop["spills"] > 2 for loop in loops):
        found.append("spills registers in a loop")
    if report["shared"] > SHARED_LIMIT[arch]:
        found.append(f"needs {report['shared']} bytes of shared memory, limit {SHARED_LIMIT[arch]}")
    if report["dots"] and report["stages"] > 1:
        if not loops:
            found.append("has no loop of matrix products")
        launch = (report["case"], arch, report["kernel"])
        if any(loop["steps_ahead"] == 0 for loop in loops) and launch != NOT_PREFETCHED:
            found.append("does not prefetch: a loop step waits for its own loads")
    if any(loop["serial"] for loop in loops):
        found.append("waits for each matrix product before it starts the next one")
    # Exact fp32 products do not use tensor cores.
    instructions = report["wgmma" if arch == 90 else "mma"]
    if report["dots"] and "fp32" not in report["case"] and not instructions:
        found.append("does not use the tensor cores")
    return found if is_candidate else found + list_growth(report)


def list_growth(report: dict[str, Any]) -> list[str]:
    """List the figures that are worse than the recorded figures of this version of Triton."""
    lines = recorded()
    if not any(triton_version == version() for triton_version, _, _ in lines):
        return []
    line = lines.get((version(), report["arch"], report["names"][0]))
    if line is None:
        return ["is not recorded; run compile_kernels.py --write --new"]
    was, now = line["now"], figures(report)
    found = []
    if (now["instructions"] or 0) > MOST_GROWTH * (was["instructions"] or 0):
        found.append(
            f"has {now['instructions']} instructions per step (recorded: {was['instructions']})"
        )
    if now["programs"] < was["programs"]:
        found.append(
            f"fits {now['programs']} times on a multiprocessor (recorded: {was['programs']})"
        )
    return found


def check(reports: Iterable[dict[str, Any]]) -> int:
    """Print the problems of each report when it arrives.

    Return 1 if there are problems, or if a kernel was not compiled.
    """
    num_kernels = num_problems = 0
    kernels = set()
    if not any(triton_version == version() for triton_version, _, _ in recorded()):
        print(f"no figures are recorded for Triton {version()}, so growth is not checked")
    for report in reports:
        num_kernels += 1
        kernels.add(report["kernel"])
        for problem in list_problems(report):
            num_problems += 1
            print(f"{report['names'][0]} on sm_{report['arch']} {problem}", flush=True)
    missing = sorted(KERNELS - kernels)
    print(f"{num_kernels} kernels compiled, {num_problems} problems, not compiled: {missing}")
    return int(bool(num_problems or missing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a rule is broken")
    parser.add_argument("--write", action="store_true", help="record the figures")
    parser.add_argument(
        "--before",
        action="store_true",
        help="with --write: store the figures as the figures before a change",
    )
    parser.add_argument(
        "--new", action="store_true", help="compile only launches that are not recorded yet"
    )
    args = parser.parse_args()
    chosen = list_jobs() + (list_candidate_jobs() if args.check else [])
    if args.new:
        chosen = [job for job in chosen if not recorded_figures(job.names, job.arch)]
    with multiprocessing.Pool(os.cpu_count()) as pool:
        reports = pool.imap(run_job, chosen)
        if args.check:
            return check(reports)
        if not args.write:
            for report in reports:
                print(json.dumps(report), flush=True)
            return 0
        written = list(reports)
    if args.new:
        written += [asdict(job) for job in list_jobs() if recorded_figures(job.names, job.arch)]
    record(written, "before" if args.before else "now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
