"""One layer's experts: this package against transformers' own implementations, in one run.

    python benchmarks/experts.py                             CPU: one small fp32 shape
    python benchmarks/experts.py --write benchmarks/results  and a table and plots beside the others
    python benchmarks/experts.py --shapes qwen3-30b --tokens 4096 32768        (with a GPU: bf16)

Before a shape is timed, outputs and gradients must agree with transformers' eager loop.

    ms          forward, and forward + backward with gradients of rows, router and weights; median
                (min .. max); implementations take turns, so a busy machine slows all
    TFLOP/s     6 T K H F operations forward (gate, up and down, 2 each), 18 T K H F with backward
    saved       bytes kept for backward per token, parameters left out
    peak        GPU memory above what inputs and weights hold; not measured on a CPU
    ceiling     one large matrix product of the library in the same dtype, drawn into the plot

`skewed` routing draws experts from a Zipf law (the busiest gets about a tenth of the tokens of 128
experts); `ep8` is what one of 8 ranks computes: E / 8 experts and the rows of 8 ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from figures import setting, spread
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_moe_ep.moe.experts import choose_compute, run_experts

IMPLEMENTATIONS = ("ours", "eager", "grouped_mm")
# Largest difference to eager, relative to the largest element: roundings of the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Shape:
    """E experts of H x F, K per token; all 2 F + F matrices of one layer."""

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
# Qwen3-VL-30B-A3B has the same.
_QWEN3_30B = Shape("qwen3-30b", 128, 8, 2048, 768)
GPU_SHAPES = [
    _QWEN3_30B,
    replace(_QWEN3_30B, name="qwen3-30b-skewed", routing="skewed"),
    # A rank's share: 16 experts, and of 8 ranks' tokens the pairs that go to them.
    replace(_QWEN3_30B, name="qwen3-30b-ep8", experts=16),
    Shape("qwen3-235b", 128, 8, 4096, 1536),
    Shape("mixtral", 8, 2, 4096, 14336),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, gpt_oss=True),
]


@dataclass
class Problem:
    """One shape at one number of tokens, on the device."""

    shape: Shape
    experts: Any
    rows: Tensor
    ids: Tensor
    weights: Tensor
    upstream: Tensor

    def forward(self, name: str) -> Tensor:
        if name == "ours":
            compute = choose_compute(self.experts, "auto", recompute=False)
            return run_experts(
                self.experts,
                compute,
                self.rows,
                self.ids,
                self.weights,
                counts_L=None,
                grad_scale=1.0,
            )
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
        # The top-k of scores disturbed by Gumbel noise: k draws without replacement.
        noise = -torch.empty(tokens, shape.experts).exponential_().log()
        ids = (likelihood.log() + noise).topk(shape.top_k, dim=1).indices
        weights = (weights / weights.sum(1, keepdim=True)).to(dtype)
    return Problem(shape, experts, rows.requires_grad_(), ids, weights.requires_grad_(), upstream)


def check(problem: Problem, names: list[str]) -> None:
    """Raise unless all implementations compute what eager does."""
    want = [x.detach().clone() for x in problem.both("eager")]
    limit = TOLERANCE[problem.rows.dtype]
    for name in names:
        for index, (got, true) in enumerate(zip(problem.both(name), want, strict=True)):
            error = ((got - true).abs().max() / true.abs().max()).item()
            if not error <= limit:
                raise AssertionError(f"{name}: tensor {index} is off by {error:.1e} > {limit:.0e}")


def timed(
    problem: Problem, names: list[str], backward: bool, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of every repeat, by implementation; they take turns."""
    run: Callable[[str], Any] = problem.both if backward else problem.forward
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names * 2:
        run(name)
    for _ in range(repeats):
        for name in names:
            with torch.set_grad_enabled(backward):
                times[name].append(_once(lambda name=name: run(name), problem.rows.is_cuda))
    return times


def _once(fn: Callable[[], Any], cuda: bool) -> float:
    if not cuda:
        start = time.perf_counter()
        fn()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def saved_per_token(problem: Problem, name: str) -> float:
    """Bytes kept for backward, storages counted once, parameters left out."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        problem.forward(name)
    own = {parameter.untyped_storage().data_ptr() for parameter in problem.experts.parameters()}
    return sum(size for at, size in saved.items() if at not in own) / problem.rows.shape[0]


def peak_mib(problem: Problem, name: str) -> float | None:
    if not problem.rows.is_cuda:
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    problem.both(name)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of one large square product: the best this machine does."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [_once(lambda: a @ b, device.type == "cuda") for _ in range(20)]
    return 2 * size**3 / statistics.median(times[5:]) / 1e9


def measure(problem: Problem, repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(implementation, its figures); one that cannot run this shape is left out and named."""
    names = []
    for name in IMPLEMENTATIONS:
        try:
            problem.both(name)
            names.append(name)
        except torch.cuda.OutOfMemoryError:
            print(f"  {problem.shape.name}: {name} runs out of memory")
    check(problem, [name for name in names if name != "eager"])
    forward = timed(problem, names, backward=False, repeats=repeats)
    both = timed(problem, names, backward=True, repeats=repeats)
    for name in names:
        yield (
            name,
            {
                "forward": forward[name],
                "both": both[name],
                "saved": saved_per_token(problem, name),
                "peak": peak_mib(problem, name),
            },
        )


def table_row(shape: Shape, tokens: int, name: str, figures: dict[str, Any], base: Any) -> str:
    def tflops(times: list[float], backward: bool) -> str:
        return f"{shape.flops(tokens, backward) / statistics.median(times) / 1e9:.3g}"

    def ratio(key: str) -> str:
        return spread([a / b for a, b in zip(figures[key], base[key], strict=True)])

    cells = [
        shape.name,
        str(tokens),
        name,
        spread(figures["forward"]),
        tflops(figures["forward"], False),
        ratio("forward"),
        spread(figures["both"]),
        tflops(figures["both"], True),
        ratio("both"),
        f"{figures['saved']:,.0f}",
        "-" if figures["peak"] is None else f"{figures['peak']:,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| shape | tokens | implementation | forward, ms | TFLOP/s | / ours | forward + backward, ms "
    "| TFLOP/s | / ours | saved, bytes per token | peak, MiB |\n|" + "---|" * 11
)


def plot(results: dict[Any, Any], top: float, path: Path) -> None:
    """TFLOP/s of forward + backward over tokens, one panel per shape, the ceiling drawn in."""
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(shape for shape, _, _ in results))
    figure, axes = pyplot.subplots(
        1, len(shapes), figsize=(4.2 * len(shapes), 3.6), squeeze=False, layout="constrained"
    )
    for shape, axis in zip(shapes, axes[0], strict=True):
        for name in IMPLEMENTATIONS:
            points = [
                (tokens, shape.flops(tokens, True) / statistics.median(figures["both"]) / 1e9)
                for (other, tokens, which), figures in results.items()
                if other == shape and which == name
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
        axis.axhline(top, color="grey", linestyle="--", label="one large product")
        axis.set(title=shape.name, xlabel="tokens", ylabel="TFLOP/s, forward + backward")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
    axes[0][0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    cuda = torch.cuda.is_available()
    shapes = {shape.name: shape for shape in (GPU_SHAPES if cuda else CPU_SHAPES)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=list(shapes))
    default = [1024, 4096, 8192, 32768] if cuda else [2048]
    parser.add_argument("--tokens", nargs="+", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--write", type=Path, help="folder for the table and the plot")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    top = ceiling(device, dtype)
    machine = torch.cuda.get_device_name() if cuda else "cpu"
    print(f"{machine}, {dtype}, one large product: {top:.3g} TFLOP/s\n{HEADER}", flush=True)
    lines, results = [], {}
    for shape in (shapes[name] for name in args.shapes):
        for tokens in args.tokens:
            problem = build(shape, tokens, device, dtype)
            figures = dict(measure(problem, args.repeats))
            for name, values in figures.items():
                results[shape, tokens, name] = values
                lines.append(table_row(shape, tokens, name, values, figures["ours"]))
                print(lines[-1], flush=True)
            del problem
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    if args.write:
        slug = machine.lower().replace(" ", "-")
        text = [
            "# One layer's experts: hf_moe_ep against transformers",
            "",
            *setting("benchmarks/experts.py", load, 1),
            f"- device: {machine}, {dtype}; one large matrix product: {top:.3g} TFLOP/s",
            "",
            HEADER,
            *lines,
            "",
            "Median (min .. max); `/ ours` is taken run by run, above 1 is slower than ours. Every "
            "figure is explained at the top of `benchmarks/experts.py`.",
            "",
        ]
        (args.write / f"experts-{slug}.md").write_text("\n".join(text))
        plot(results, top, args.write / f"experts-{slug}.png")


if __name__ == "__main__":
    main()
