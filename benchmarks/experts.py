"""Time the experts of one layer with hf_moe_ep and with transformers' own implementations.

    python benchmarks/experts.py                             CPU: one small fp32 shape
    python benchmarks/experts.py --write benchmarks/results  also writes a table and a plot
    python benchmarks/experts.py --shapes qwen3-30b --tokens 4096 32768        (with a GPU: bf16)
    python benchmarks/experts.py --json                      prints each row as JSON as well

Liger's fused experts are included if Liger is installed. Before a shape is timed, outputs and
gradients must agree with transformers' eager loop (with grouped_mm if eager runs out of memory). If
an implementation disagrees, fails or runs out of memory, its row says so, and the other
implementations are timed.

    ms          forward, and forward + backward with gradients of rows, router and weights; median
                (min .. max). Implementations take turns, so a busy machine slows down all of them.
                On a GPU only the time of the device counts (`timing.py`)
    TFLOP/s     computed with 6 T K H F FLOPs for forward (2 T K H F each for gate, up and down) and
                18 T K H F with backward
    saved       bytes per token that are kept for backward, without parameters
    peak        GPU memory above the inputs and weights; not measured on a CPU
    ceiling     one large matrix product of torch in the same dtype, which the plot shows

`skewed` routing draws experts by a Zipf law (the busiest of 128 experts gets about a tenth of the
tokens). `ep8` is the work of one of 8 ranks: E / 8 experts and the rows from 8 ranks.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmark_text import describe_machine, spread
from timing import milliseconds
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_moe_ep.moe.experts import choose_compute, run_experts
from hf_moe_ep.state import Compute

IMPLEMENTATIONS = ("ours", "eager", "grouped_mm", "liger")
# The first of these implementations that runs is the truth for all other implementations.
TRUTHS = ("eager", "grouped_mm")
# Largest allowed difference, relative to the largest element. It covers the rounding of the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer: E experts with three matrices of H x F each, K experts per token."""

    name: str
    experts: int
    top_k: int
    hidden: int
    ffn: int
    routing: str = "uniform"
    gpt_oss: bool = False

    def flops(self, tokens: int, backward: bool) -> float:
        return (18.0 if backward else 6.0) * tokens * self.top_k * self.hidden * self.ffn


CPU_SHAPES = [Shape("small", 16, 4, 256, 128)]
# Qwen3-VL-30B-A3B has the same sizes.
_QWEN3_30B = Shape("qwen3-30b", 128, 8, 2048, 768)
GPU_SHAPES = [
    _QWEN3_30B,
    replace(_QWEN3_30B, name="qwen3-30b-skewed", routing="skewed"),
    # One of 8 ranks has 16 experts, and computes all (token, expert) pairs that choose them.
    replace(_QWEN3_30B, name="qwen3-30b-ep8", experts=16),
    Shape("qwen3-235b", 128, 8, 4096, 1536),
    Shape("mixtral", 8, 2, 4096, 14336),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, gpt_oss=True),
]


@dataclass
class Problem:
    """The tensors of one shape and number of tokens. `compute` runs the experts on our side."""

    shape: Shape
    experts: Any
    compute: Compute
    rows: Tensor
    ids: Tensor
    weights: Tensor
    upstream: Tensor

    def forward(self, name: str) -> Tensor:
        if name == "ours":
            return run_experts(
                self.experts,
                self.compute,
                self.rows,
                self.ids,
                self.weights,
                counts_L=None,
                grad_scale=1.0,
            )
        if name == "liger":
            from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

            up, down = self.experts.gate_up_proj, self.experts.down_proj
            return LigerFusedMoEFunction.apply(self.rows, up, down, self.ids.int(), self.weights)
        self.experts.config._experts_implementation = name
        return self.experts(self.rows, self.ids, self.weights)

    def leaves(self) -> list[Tensor]:
        return [self.rows, self.weights, *self.experts.parameters()]

    def both(self, name: str) -> tuple[Tensor, ...]:
        out = self.forward(name)
        return out, *torch.autograd.grad(out, self.leaves(), self.upstream)


def build(shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    config = SimpleNamespace(
        num_experts=shape.experts,
        num_local_experts=shape.experts,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        intermediate_size=shape.ffn,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="eager",
    )
    with torch.device(device):
        experts = (GptOssExperts if shape.gpt_oss else Qwen3MoeExperts)(config).to(dtype)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(std=shape.hidden**-0.5)
        rows = torch.randn(tokens, shape.hidden, dtype=dtype)
        weights = torch.rand(tokens, shape.top_k)
        upstream = torch.randn(tokens, shape.hidden, dtype=dtype)
        likelihood = torch.ones(shape.experts)
        if shape.routing == "skewed":
            likelihood = 1 / torch.arange(1.0, shape.experts + 1)
        # The top-k of log-likelihoods plus Gumbel noise are k draws without replacement.
        noise = -torch.empty(tokens, shape.experts).exponential_().log()
        ids = (likelihood.log() + noise).topk(shape.top_k, dim=1).indices
        weights = (weights / weights.sum(1, keepdim=True)).to(dtype)
    # `patch` also chooses only once. It detects the formula of the experts on the CPU.
    compute = choose_compute(experts, "auto", recompute=False)
    leaves = rows.requires_grad_(), ids, weights.requires_grad_()
    return Problem(shape, experts, compute, *leaves, upstream)


@dataclass
class Row:
    """The figures of one implementation at one shape. If it failed, `error` has the reason.

    `checked` is True if its results were compared with the truth, or if it is the truth.
    """

    shape: Shape
    tokens: int
    name: str
    checked: bool = False
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    saved: float | None = None
    peak: float | None = None
    error: str = ""

    @property
    def failed(self) -> bool:
        """Return True if results were wrong or an unexpected error was raised."""
        return self.error not in ("", OUT_OF_MEMORY, NOT_COVERED)

    def line(self) -> dict[str, Any]:
        """Return the row as one line of JSON."""
        times: dict[str, Any] = {}
        for kind, ms in (("forward", self.forward), ("both", self.both)):
            if ms:
                median = statistics.median(ms)
                times[f"{kind}_ms"] = round(median, 4)
                times[f"{kind}_spread_ms"] = [round(min(ms), 4), round(max(ms), 4)]
                flops = self.shape.flops(self.tokens, kind == "both")
                times[f"{kind}_tflops"] = round(flops / median / 1e9, 4)
        about = {"shape": self.shape.name, "sizes": asdict(self.shape), "tokens": self.tokens}
        memory = {"saved_bytes_per_token": self.saved, "peak_mib": self.peak}
        status = {"checked": self.checked, "error": self.error}
        return {**about, "implementation": self.name, **times, **memory, **status}


OUT_OF_MEMORY = "out of memory"
NOT_COVERED = "does not cover this shape"


def why_not(error: Exception) -> str:
    """Format an error as one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def find_difference(problem: Problem, name: str, truth: list[Tensor]) -> str:
    """Describe the first tensor that differs from the truth. Returns "" if all tensors agree."""
    limit = TOLERANCE[problem.rows.dtype]
    for index, (actual, true) in enumerate(zip(problem.both(name), truth, strict=True)):
        error = ((actual - true).abs().max() / true.abs().max()).item()
        if not error <= limit:
            return f"tensor {index} is off by {error:.1e} > {limit:.0e}"
    return ""


def check(problem: Problem, rows: dict[str, Row]) -> None:
    """Run the implementation of each row, and compare it with the first of TRUTHS that runs.

    The function sets `checked` and `error` of the rows. If none of TRUTHS can run, because the
    shape is too large, the other implementations are not checked.
    """
    truth: list[Tensor] = []
    truths_first = [name for name in TRUTHS if name in rows]
    for name in truths_first + [name for name in rows if name not in TRUTHS]:
        row = rows[name]
        if name == "liger" and problem.shape.gpt_oss:
            row.error = NOT_COVERED
            continue
        try:
            if truth:
                row.error = find_difference(problem, name, truth)
                row.checked = True
            elif name in TRUTHS:
                truth = [x.detach().clone() for x in problem.both(name)]
                row.checked = True
            else:
                problem.both(name)
        except Exception as error:  # noqa: BLE001  the error ends only this row
            row.error = why_not(error)


def time_rows(problem: Problem, rows: dict[str, Row], backward: bool, repeats: int) -> None:
    """Add the milliseconds of every repeat to the rows. Their implementations take turns."""
    run: Callable[[str], Any] = problem.both if backward else problem.forward
    for turn in range(-2, repeats):  # two to warm up
        for name, row in rows.items():
            if row.error:
                continue
            try:
                with torch.set_grad_enabled(backward):
                    ms = milliseconds(lambda name=name: run(name), problem.rows.is_cuda)
            except Exception as error:  # noqa: BLE001  the error ends only this row
                row.error = why_not(error)
                continue
            if turn >= 0:
                (row.both if backward else row.forward).append(ms)


def count_saved_per_token(problem: Problem, name: str) -> float:
    """Count the bytes per token that are kept for backward, without the parameters.

    Tensors that share a storage count once.
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        problem.forward(name)
    parameters = {p.untyped_storage().data_ptr() for p in problem.experts.parameters()}
    num_bytes = sum(size for pointer, size in saved.items() if pointer not in parameters)
    return num_bytes / problem.rows.shape[0]


def measure_peak_mib(problem: Problem, name: str) -> float | None:
    if not problem.rows.is_cuda:
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    problem.both(name)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the TFLOP/s of one large square product, an upper limit for this machine."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [milliseconds(lambda: a @ b, device.type == "cuda") for _ in range(20)]
    return 2 * size**3 / statistics.median(times[5:]) / 1e9


def measure(
    shape: Shape,
    tokens: int,
    names: list[str],
    repeats: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Row]:
    """Measure one shape and number of tokens. Returns a row for every implementation."""
    rows = {name: Row(shape, tokens, name) for name in names}
    try:
        problem = build(shape, tokens, device, dtype)
    except torch.OutOfMemoryError as error:
        for row in rows.values():
            row.error = why_not(error)
        return list(rows.values())
    check(problem, rows)
    time_rows(problem, rows, backward=False, repeats=repeats)
    time_rows(problem, rows, backward=True, repeats=repeats)
    for name, row in rows.items():
        if not row.error:
            try:
                row.saved = count_saved_per_token(problem, name)
                row.peak = measure_peak_mib(problem, name)
            except Exception as error:  # noqa: BLE001  the error ends only this row
                row.error = why_not(error)
    return list(rows.values())


def format_table_row(row: Row, ours: Row | None) -> str:
    name = row.name if row.checked or row.error else f"{row.name} (unchecked)"
    cells = [row.shape.name, str(row.tokens), name]
    for kind in ("forward", "both"):
        times, base = getattr(row, kind), getattr(ours, kind, [])
        if not times:
            cells += [row.error or "-", "-", "-"]
            continue
        flops = row.shape.flops(row.tokens, kind == "both")
        ratios = [a / b for a, b in zip(times, base, strict=False)]
        cells += [spread(times), f"{flops / statistics.median(times) / 1e9:.3g}"]
        cells += [spread(ratios) if ratios else "-"]
    cells += ["-" if x is None else f"{x:,.0f}" for x in (row.saved, row.peak)]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| shape | tokens | implementation | forward, ms | TFLOP/s | / ours | forward + backward, ms "
    "| TFLOP/s | / ours | saved, bytes per token | peak, MiB |\n|" + "---|" * 11
)


def list_installed() -> list[str]:
    """List the implementations that can run on this machine."""
    has_liger = torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None
    return [name for name in IMPLEMENTATIONS if name != "liger" or has_liger]


def plot(rows: list[Row], top: float, path: Path) -> None:
    """Plot the TFLOP/s of forward + backward over tokens, and the ceiling; one panel per shape."""
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure, axes = pyplot.subplots(
        1, len(shapes), figsize=(4.2 * len(shapes), 3.6), squeeze=False, layout="constrained"
    )
    for shape, axis in zip(shapes, axes[0], strict=True):
        for name in IMPLEMENTATIONS:
            points = [
                (row.tokens, shape.flops(row.tokens, True) / statistics.median(row.both) / 1e9)
                for row in rows
                if row.shape == shape and row.name == name and row.both
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
        axis.axhline(top, color="grey", linestyle="--", label="one large product")
        axis.set(title=shape.name, xlabel="tokens", ylabel="TFLOP/s, forward + backward")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
    axes[0][0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(folder: Path, machine: str, about: list[str], lines: list[str]) -> None:
    """Write the rows so far. The old file is replaced when the new file is complete."""
    text = [
        "# One layer's experts: hf_moe_ep against transformers",
        "",
        *about,
        "",
        HEADER,
        *lines,
        "",
        "Median (min .. max); `/ ours` is taken run by run, above 1 is slower than ours. Every "
        "figure is explained at the top of `benchmarks/experts.py`.",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"experts-{machine}.md"
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(text))
    partial.replace(path)


def measure_all(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of each shape and number of tokens."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    shapes = {shape.name: shape for shape in CPU_SHAPES + GPU_SHAPES}
    for name in args.shapes:
        for tokens in args.tokens:
            yield measure(shapes[name], tokens, args.only, args.repeats, device, dtype)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    default = [shape.name for shape in (GPU_SHAPES if cuda else CPU_SHAPES)]
    names = [shape.name for shape in CPU_SHAPES + GPU_SHAPES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=names, default=default)
    tokens = [1024, 4096, 8192, 32768] if cuda else [2048]
    parser.add_argument("--tokens", nargs="+", type=int, default=tokens)
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=list_installed())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print lines of JSON as well")
    parser.add_argument("--write", type=Path, help="folder for the table and the plot")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmark. Returns 1 if an implementation was wrong or failed."""
    args = parse()
    cuda = torch.cuda.is_available()
    load = os.getloadavg()[0]
    dtype = torch.bfloat16 if cuda else torch.float32
    top = measure_ceiling(torch.device("cuda" if cuda else "cpu"), dtype)
    machine = torch.cuda.get_device_name() if cuda else "cpu"
    product = f"{machine}, {dtype}, one large product: {top:.3g} TFLOP/s"
    print(f"{product}\n{HEADER}", flush=True)
    lines: list[str] = []
    measured: list[Row] = []
    for rows in measure_all(args):
        ours = next((row for row in rows if row.name == "ours"), None)
        for row in rows:
            lines.append(format_table_row(row, ours))
            print(lines[-1], flush=True)
            if args.json:
                print(json.dumps(row.line()), flush=True)
        measured += rows
        if args.write:
            about = [*describe_machine("benchmarks/experts.py", load, 1), f"- device: {product}"]
            write(args.write, _make_slug(machine), about, lines)
    if args.write:
        plot(measured, top, args.write / f"experts-{_make_slug(machine)}.png")
    return int(any(row.failed for row in measured))


def _make_slug(machine: str) -> str:
    return machine.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
