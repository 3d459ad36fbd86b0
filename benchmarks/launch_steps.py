"""Launch the steps of expert layers without a GPU: is each launch legal, what does the host take?

    python benchmarks/launch_steps.py                   all cases of compile_kernels.py on sm_90
    python benchmarks/launch_steps.py --arch 80 --only "qwen3-30b" "gpt-oss-20b"

Triton compiles and launches the kernels as on a GPU, but `stub_driver.py` replaces CUDA's driver.
The script prints one JSON line per case and exits with 1 if a GPU would refuse a launch. Nothing
computes, and the tensors lie on the CPU, so milliseconds are those of Python, of torch's operators
and of Triton's launcher, medians of many steps:

    kernels      the sort, the forward and the backward of `triton_mlp`
    operator     `expert_mlp` as a layer calls it, with autograd and the lookup of the self-check
"""

import argparse
import ctypes
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compile_kernels import KERNELS, Case, list_cases
from stub_driver import SHARED_LIMIT, StubDriver

from hf_moe_ep.ops import self_check
from hf_moe_ep.ops.expert_mlp import expert_mlp, postpone_grads
from hf_moe_ep.ops.kernels import blocks

# Two of glibc's parameters for `mallopt`.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def launch_case(case: Case, stub: StubDriver, steps: int) -> dict[str, Any]:
    """Launch the kernels of a case twice, and measure the host's time in `steps` more steps."""
    forward, backward = case.make_step("cpu")
    stub.forget()
    stub.record(True)
    backward(forward())
    first = stub.builds
    backward(forward())
    second = stub.builds[len(first) :]
    report = {
        "case": case.name,
        "arch": stub.capability,
        "launches": len(first),
        "kernels": sorted({stub.name_of(build) for build in first}),
        "problems": stub.list_problems(),
    }
    # The first step's builds are Triton's choice, and the second step's are `launch`'s.
    if first != second:
        report["problems"].append(f"step 1 launched the builds {first}, and step 2 {second}")
    stub.record(False)
    if steps:
        report["kernels_ms"] = time_steps(forward, backward, steps)
        report["operator_ms"] = time_steps(*make_operator_step(case), steps)
    return report


def make_operator_step(case: Case) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return forward and backward of the operator, with all trained inputs of a case."""
    inputs = case.make_inputs("cpu")
    trained = [getattr(inputs.weights, name) for name in inputs.need - {"rows", "weights"}]
    trained += [inputs.rows, inputs.scores]
    for tensor in trained:
        tensor.requires_grad_()
    counts = [case.tokens * case.top_k // case.experts] * case.experts
    grad = torch.empty_like(inputs.rows)

    def forward() -> torch.Tensor:
        weights = postpone_grads(inputs.weights)
        call = (inputs.rows, inputs.ids, inputs.scores, weights, case.formula)
        return expert_mlp(*call, counts_L=counts, backend="triton")

    def backward(out: torch.Tensor) -> Any:
        return torch.autograd.grad(out, trained, grad)

    return forward, backward


def time_steps(
    forward: Callable[[], Any], backward: Callable[[Any], Any], steps: int
) -> dict[str, float]:
    """Return the median milliseconds of forward, and of forward and backward."""
    times = []
    for _ in range(steps + 5):
        start = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        grads = backward(out)
        times.append((middle - start, time.perf_counter() - start))
        del out, grads
    forward_seconds, both_seconds = (statistics.median(x) for x in zip(*times[5:], strict=True))
    return {"forward": round(1000 * forward_seconds, 3), "both": round(1000 * both_seconds, 3)}


def reuse_memory() -> None:
    """Let the CPU's allocator keep freed memory, as torch's allocator for GPUs does."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, choices=SHARED_LIMIT, default=90)
    parser.add_argument("--only", nargs="+", default=[], help="names of cases")
    parser.add_argument("--steps", type=int, default=300, help="steps to time; 0 to time none")
    args = parser.parse_args()
    names = [case.name for case in list_cases()]
    if unknown := set(args.only) - set(names):
        parser.error(f"no cases have these names: {sorted(unknown)}; the names are {names}")
    chosen = [case for case in list_cases() if not args.only or case.name in args.only]
    # The device of these tensors is a CPU, and nothing computes that a check could compare.
    rows_of = "sm_90" if SHARED_LIMIT[args.arch] >= SHARED_LIMIT[90] else "sm_80"
    blocks.generation = lambda device: rows_of
    self_check.check_both_sizes = functools.cache(lambda kind: "")
    reuse_memory()
    illegal, kernels = 0, set()
    with tempfile.TemporaryDirectory() as folder:
        stub = StubDriver(args.arch, Path(folder))
        for case in chosen:
            report = launch_case(case, stub, args.steps)
            kernels.update(report["kernels"])
            illegal += len(report["problems"])
            print(json.dumps(report), flush=True)
    missing = [] if args.only else sorted(KERNELS - kernels)
    print(f"{len(chosen)} cases, {illegal} problems, not launched: {missing}")
    return int(bool(illegal or missing))


if __name__ == "__main__":
    sys.exit(main())
