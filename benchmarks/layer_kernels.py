"""Time each Triton kernel of one MoE layer separately, with the blocks of TABLE or other blocks.

    python benchmarks/layer_kernels.py --tokens 32768             every kernel, with TABLE's blocks
    python benchmarks/layer_kernels.py --tokens 32768 --sweep --seconds 120      other blocks
    python benchmarks/layer_kernels.py --adapter-rank 16          a frozen base with adapters
    python benchmarks/layer_kernels.py --adapter-rank 16 --quantised nf4         a quantised base

The layer runs forward and backward once, and every call that launches a kernel is recorded. Each
call is then repeated separately and timed, with the same arguments as in the layer.

A sweep times the blocks of `block_candidates.py` and a few other blocks. First, worker processes
compile them into Triton's cache on disk. A candidate is valid if its result differs from the result
of the table's block by at most two roundings. If a candidate fails, its line has the reason. The
table's blocks are timed first and last, because the GPU's clocks change while candidates are timed,
and the smaller time counts. Each measurement is printed immediately as one line of JSON. These are
the keys of a line, and values of "kernel":

    ms           time on the device, the median of several measurements of three calls each
    tflops       FLOPs of the product / time
    gb_per_s     minimum bytes to move / time
    off          largest difference from the result of the table's block, relative to the largest
                 element
    sum          the sum over all kernels of a direction, with the FLOPs of the whole layer
    whole        the time of the layer itself, which also includes the time between the kernels
    best         the fastest block of a kernel ("" is the table's block), with the table's times
    same         for quantised experts: the name of a tensor that is compared with the result of the
                 same kernels on the dequantised values

A kernel that loads a tensor through pointers, although its block has tma=True, is an error here.
Without a GPU the benchmark needs TRITON_INTERPRET=1, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from types import FunctionType
from typing import Any

import torch
import triton
from block_candidates import CANDIDATES, requiring_tma
from timing import milliseconds
from torch import Tensor

from hf_moe_ep.config import EXPERTS_DTYPES
from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.kernels import blocks as table
from hf_moe_ep.ops.kernels.blocks import Blocks
from hf_moe_ep.ops.reference import dequantise_matrices
from hf_moe_ep.ops.self_check import draw_quantised

KERNEL_FOLDER = "hf_moe_ep.ops.kernels"
# Allowed difference, relative to the largest element: two roundings of bf16.
ALLOWED = {torch.bfloat16: 2 * 2.0**-8, torch.float32: 1e-5}
# A block replaces the table's block only if it needs less than this fraction of the table's time.
TIE = 0.985
# Labels of the n-th call of each launching function. With adapters, `outer` has other products.
LABELS = {
    ("sort_pairs", 0): "sort",
    ("up", 0): "up",
    ("grouped_mm", 0): "down",
    ("combine", 0): "combine",
    ("dgated", 0): "dgated",
    ("weight_grads", 0): "weight grads",
    ("grouped_mm", 1): "dx",
    ("combine", 1): "combine dx",
    ("outer", 0): "dW down",
    ("outer", 1): "dW up",
}
# The field of a row of TABLE from which a labelled call takes its block.
FIELDS = {
    "up": "up",
    "down": "down",
    "dx": "rows",
    "dgated": "dgated",
    "dW down": "outer",
    "dW up": "outer",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of one layer. The default is a layer of Qwen3-30B-A3B."""

    tokens: int = 32768
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    ffn: int = 768
    adapter_rank: int = 0
    quantised: str = ""

    @property
    def frozen(self) -> bool:
        """Return True if the expert matrices are frozen."""
        return bool(self.adapter_rank or self.quantised)

    def flops(self) -> float:
        """Return the FLOPs of multiplying the rows of all pairs by a matrix of hidden x ffn."""
        return 2.0 * self.tokens * self.top_k * self.hidden * self.ffn

    def work(self, label: str, width: int) -> tuple[float, float]:
        """Return the FLOPs of a kernel and the minimum bytes that it moves, or zeros if unknown."""
        # Bytes per value of a weight, including its share of the scales.
        weight_bytes = {"": float(width), "nf4": 0.5625, "fp8": 1 + 4 / 128**2}[self.quantised]
        pairs, values = self.tokens * self.top_k, self.experts * self.hidden * self.ffn
        weights = values * weight_bytes
        x, y = self.tokens * self.hidden * width, pairs * self.hidden * width
        act, product = pairs * self.ffn * width, self.flops()
        known = {
            "sort": (0.0, 16.0 * pairs),
            "up": (2 * product, x + 2 * weights + 3 * act),
            "down": (product, act + weights + y),
            "combine": (0.0, y + x),
            "dgated": (product, x + weights + 5 * act),
            "dx": (2 * product, 2 * act + 2 * weights + y),
            "combine dx": (0.0, y + x),
            "dW down": (product, x + act + weights),
            "dW up": (2 * product, 2 * act + x + 2 * weights),
        }
        return known.get(label, (0.0, 0.0))


@dataclass
class Call:
    """One call of a function that launches kernels.

    `run(blocks)` repeats the call with the blocks of another row of TABLE; `run(None)` uses the
    blocks of the recorded call. `fills` is the output tensor that was passed to the call, if any.
    """

    label: str
    backward: bool
    run: Callable[[Blocks | None], Any]
    fills: Tensor | None = None

    def result(self, blocks: Blocks | None = None) -> Tensor:
        """Run the call. Returns the tensor that it fills, or the first tensor that it returns."""
        if self.fills is not None:
            self.fills.fill_(float("nan"))  # so that results of an earlier call are not compared
            self.run(blocks)
            return self.fills
        value = self.run(blocks)
        while not isinstance(value, Tensor):
            value = vars(value) if hasattr(value, "__dataclass_fields__") else value
            value = next(iter(value.values() if isinstance(value, dict) else value))
        return value


class Layer:
    """The experts, rows and routing of one layer. The random numbers are always the same."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        draw = functools.partial(torch.randn, device=device, dtype=self.dtype)
        tokens, experts, hidden, ffn = sizes.tokens, sizes.experts, sizes.hidden, sizes.ffn
        up = draw(experts, 2 * ffn, hidden).mul_(hidden**-0.5)
        down = draw(experts, hidden, ffn).mul_(ffn**-0.5)
        trained = [] if sizes.frozen else [up, down]
        factors: dict[str, Tensor] = {}
        if sizes.adapter_rank:
            rank = sizes.adapter_rank
            shapes = {"up_a": (rank, hidden), "up_b": (2 * ffn, rank)}
            shapes |= {"down_a": (rank, ffn), "down_b": (hidden, rank)}
            factors = {name: draw(experts, *shape) for name, shape in shapes.items()}
            trained = list(factors.values())
        self.names = ("rows", "weights", *(factors if sizes.frozen else ("up", "down")))
        base_weights = {"up": up, "down": down}
        if sizes.quantised:
            generator = torch.Generator(device).manual_seed(0)
            for name, matrix in (("up", up), ("down", down)):
                stack = draw_quantised(matrix, sizes.quantised, generator)
                base_weights |= stack.by_name(name)
        self.rows, self.grad = draw(tokens, hidden), draw(tokens, hidden)
        self.weights = torch.rand(tokens, sizes.top_k, device=device)
        scores = torch.rand(tokens, experts, device=device)
        self.ids = scores.topk(sizes.top_k, dim=1).indices
        self.leaves = [x.requires_grad_() for x in (self.rows, self.weights, *trained)]
        self.experts = ExpertWeights(
            **base_weights, up_bias=None, down_bias=None, **factors, quantised=sizes.quantised
        )

    def forward(self, experts: ExpertWeights | None = None) -> Tensor:
        formula = ExpertFormula()
        return expert_mlp(
            self.rows, self.ids, self.weights, experts or self.experts, formula, backend="triton"
        )

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.grad)

    def with_values(self) -> ExpertWeights:
        """Return a copy of the experts with dequantised matrices."""
        kind, no_scales = self.experts.quantised, {"up_block_scale": None, "down_block_scale": None}
        up, down = (
            dequantise_matrices(self.experts.stack(name), kind, self.dtype)
            for name in ("up", "down")
        )
        return replace(self.experts, up=up, down=down, quantised="", **no_scales)

    def table_row(self) -> Blocks:
        sizes = self.sizes
        num_pairs = sizes.tokens * sizes.top_k
        return table.choose_blocks(self.rows, sizes.experts, num_pairs, sizes.quantised)

    def calls(self, row: Blocks) -> list[Call]:
        """Record the calls of one forward and backward with a row of TABLE, in order."""
        calls: list[Call] = []
        with _recording_calls(calls, row, outer_is_known=not self.sizes.frozen):
            out = self.forward()
            num_forward = len(calls)
            torch.autograd.grad(out, self.leaves, self.grad)
        for call in calls[num_forward:]:
            call.backward = True
        return calls


@contextmanager
def _recording_calls(calls: list[Call], row: Blocks, *, outer_is_known: bool) -> Iterator[None]:
    """Record the calls with which `triton_mlp` launches kernels, with the blocks of `row`."""
    num_calls: Counter[str] = Counter()
    originals = dict(vars(triton_mlp))

    def recorder(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def record_and_launch(*args: Any, **kwargs: Any) -> Any:
            default = f"{name} {num_calls[name]}"
            known = name != "outer" or outer_is_known
            label = LABELS.get((name, num_calls[name]), default) if known else default
            num_calls[name] += 1

            def repeat(blocks: Blocks | None) -> Any:
                def replaced(value: Any) -> Any:
                    return blocks if blocks and isinstance(value, Blocks) else value

                new_kwargs = {key: replaced(value) for key, value in kwargs.items()}
                return launch(*map(replaced, args), **new_kwargs)

            bound = inspect.signature(launch).bind(*args, **kwargs).arguments
            fills = next((x for key, x in bound.items() if key.startswith("out_")), None)
            calls.append(Call(label, False, repeat, fills))
            return launch(*args, **kwargs)

        return record_and_launch

    try:
        for name, value in originals.items():
            module = getattr(value, "__module__", "")
            if not isinstance(value, FunctionType) or not module.startswith(KERNEL_FOLDER):
                continue
            if module != table.__name__ and name != "max_tiles":
                setattr(triton_mlp, name, recorder(name, value))
        triton_mlp.choose_blocks = lambda *_: row
        yield
    finally:
        vars(triton_mlp).update(originals)


def list_candidates(row: Blocks) -> list[tuple[str, Blocks]]:
    """List (field, row with another block in this field) for all blocks that a sweep times.

    A sweep times the blocks of `block_candidates.py`, the blocks of TABLE's other row for this GPU
    and dtype, and the blocks of `row` with one more stage. A candidate for one row of TABLE is also
    used for other rows of the same GPU and dtype that have the same block in the candidate's field:
    the row for "some" has all blocks except `outer` from the row for "many".
    """
    kinds_of_row = {key[:2] for key, blocks in table.TABLE.items() if blocks is row}
    changed_rows = [
        (candidate.field, replace(row, **{candidate.field: candidate.block}))
        for candidate in CANDIDATES
        if candidate.row[:2] in kinds_of_row
        and getattr(table.TABLE[candidate.row], candidate.field) == getattr(row, candidate.field)
        and candidate.block != getattr(row, candidate.field)
    ]
    names = list(dict.fromkeys(FIELDS.values()))
    for key, other in table.TABLE.items():
        if key[:2] in kinds_of_row and other.m != row.m:
            # `outer`, the gradients of the weights, has no tiles of `m` rows.
            changed_rows += [(name, other) for name in names if name != "outer"]
    for name in names:
        block = getattr(row, name)
        more_stages = replace(block, stages=block.stages + 1)
        changed_rows.append((name, replace(row, **{name: more_stages})))
    return list(dict.fromkeys(changed_rows))


def note(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def measure(call: Call, blocks: Blocks | None, repeats: int) -> list[float]:
    """Measure a call `repeats` times. Returns milliseconds, each the mean of three calls."""
    cuda = torch.cuda.is_available()
    call.run(blocks)
    # ncu profiles only the kernels in this range.
    with torch.cuda.nvtx.range("one_call") if cuda else nullcontext():
        call.run(blocks)
    return [milliseconds(lambda: call.run(blocks), cuda, times=3) for _ in range(repeats)]


def figures(sizes: Sizes, label: str, times: list[float], width: int) -> dict[str, Any]:
    ms = statistics.median(times)
    flops, size = sizes.work(label, width)
    line = {"ms": round(ms, 5), "spread_ms": [round(min(times), 5), round(max(times), 5)]}
    if flops:
        line["tflops"] = round_figure(flops / ms / 1e9)
    if size:
        line["gb_per_s"] = round_figure(size / ms / 1e6)
    return line


def round_figure(value: float) -> float:
    """Round to five significant digits."""
    return float(f"{value:.5g}")


def why_not(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def format_block(row: Blocks, field: str) -> str:
    """Format one block of a row of TABLE."""
    if not field:
        return ""
    block = getattr(row, field)
    values = {name: value for name, value in asdict(block).items() if value is not None}
    sizes = " ".join(f"{name}={value}" for name, value in values.items())
    return sizes if field == "outer" else f"rows={row.m} {sizes}"


def compare_values(layer: Layer) -> int:
    """Compare the results of quantised and dequantised experts, and print a line for each tensor.

    Returns the number of errors.
    """
    results = []
    for experts in (layer.experts, layer.with_values()):
        out = layer.forward(experts)
        results.append([out.detach(), *torch.autograd.grad(out, layer.leaves, layer.grad)])
    num_errors = 0
    for name, tensor, expected in zip(("out", *layer.names), *results, strict=True):
        off = ((tensor - expected).abs().max() / expected.abs().max()).item()
        bad = not off <= ALLOWED[layer.dtype]
        error = {"error": f"off by {off:.1e} > {ALLOWED[layer.dtype]:.0e}"} if bad else {}
        equal = bool(torch.equal(tensor, expected))
        note(same=name, equal=equal, off=off, **identify_layer(layer), **error)
        num_errors += bad
    return num_errors


def identify_layer(layer: Layer) -> dict[str, Any]:
    """Return the entries of a line that identify the layer."""
    sizes = layer.sizes
    return {
        "tokens": sizes.tokens,
        "adapter_rank": sizes.adapter_rank,
        "quantised": sizes.quantised,
    }


def time_table(layer: Layer, row: Blocks, repeats: int) -> int:
    """Time every kernel with the blocks of `row`, then the layer. Returns the number of errors."""
    layer_entries = identify_layer(layer)
    total = {False: 0.0, True: 0.0}
    num_errors = 0
    for call in layer.calls(row):
        line = {"kernel": call.label, "backward": call.backward}
        line["block"] = format_block(row, FIELDS.get(call.label, ""))
        try:
            times = measure(call, None, repeats)
            line |= figures(layer.sizes, call.label, times, layer.rows.element_size())
            total[call.backward] += statistics.median(times)
        except Exception as error:  # noqa: BLE001  the next kernel is timed
            line["error"] = why_not(error)
            total[call.backward] = float("nan")
            num_errors += 1
        note(**line, **layer_entries)
    try:
        cuda = torch.cuda.is_available()
        runs = {"forward": layer.forward, "both": layer.both}
        whole = {
            kind: statistics.median(milliseconds(run, cuda) for _ in range(repeats))
            for kind, run in runs.items()
        }
    except Exception as error:  # noqa: BLE001  the sums are printed nevertheless
        note(kernel="whole", error=why_not(error), **layer_entries)
        num_errors, whole = num_errors + 1, {}
    sums = {"forward": total[False], "both": total[False] + total[True]}
    # A pair needs three products of hidden x ffn forward, and six backward (three if frozen).
    products = {"forward": 3, "both": 6 if layer.sizes.frozen else 9}
    for name, times in (("sum", sums), ("whole", whole)):
        line = {}
        for kind, ms in times.items():
            if ms == ms:  # NaN if one of the kernels failed
                tflops = products[kind] * layer.sizes.flops() / ms / 1e9
                line |= {f"{kind}_ms": round(ms, 5), f"{kind}_tflops": round_figure(tflops)}
        note(kernel=name, **line, **layer_entries)
    return num_errors


_in_worker: dict[str, Any] = {}


def _open_worker(sizes: Sizes, row: Blocks) -> None:
    _in_worker["layer"] = Layer(sizes)
    _in_worker["calls"] = {row.m: _in_worker["layer"].calls(row)}


def _compile(candidate: tuple[str, Blocks]) -> None:
    """Run a candidate once with few tokens, which compiles it into Triton's cache."""
    field, blocks = candidate
    calls_by_m = _in_worker["calls"]
    # An error is reported when the candidate is timed.
    with suppress(Exception):
        if blocks.m not in calls_by_m:
            calls_by_m[blocks.m] = _in_worker["layer"].calls(blocks)
        for call in calls_by_m[blocks.m]:
            if FIELDS.get(call.label, "") == field:
                call.run(blocks)


def compile_all(layer: Layer, row: Blocks, changed_rows: list, workers: int, until: float) -> None:
    """Compile candidates into Triton's cache in worker processes, until the time `until`.

    The remaining candidates are compiled when they are timed.
    """
    small = replace(layer.sizes, tokens=256, experts=min(16, layer.sizes.experts))
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _open_worker, (small, row)) as pool:
        pool.map_async(_compile, changed_rows, chunksize=1).wait(max(until - time.monotonic(), 0))
        pool.terminate()


def sweep(layer: Layer, row: Blocks, args: argparse.Namespace, until: float) -> None:
    """Time all candidates. Print a line for each of them, and for the best block of each kernel."""
    changed_rows = list_candidates(row)[: args.most]
    if args.workers:
        compile_all(layer, row, changed_rows, args.workers, until - 0.4 * args.seconds)
    sweep_entries = {"tokens": layer.sizes.tokens, "sweep": True}
    best: dict[str, tuple[float, str]] = {}
    calls, calls_m = layer.calls(row), row.m
    expected = {}
    table_ms: dict[str, list[float]] = {}
    for call in calls:
        if FIELDS.get(call.label, ""):
            expected[call.label] = call.result().clone()
            table_ms[call.label] = [statistics.median(measure(call, None, args.repeats))]
            best[call.label] = (table_ms[call.label][0], "")
    for field, blocks in changed_rows:
        block = format_block(blocks, field)
        if time.monotonic() > until:
            note(field=field, block=block, skipped="no time left", **sweep_entries)
            continue
        try:
            if blocks.m != calls_m:
                calls, calls_m = [], blocks.m  # this frees the tensors of the old calls first
                calls = layer.calls(replace(row, m=blocks.m))
        except Exception as error:  # noqa: BLE001  the next candidate may run
            note(field=field, block=block, error=why_not(error), **sweep_entries)
            continue
        for call in calls:
            if FIELDS.get(call.label, "") == field:
                line = try_block(layer, call, blocks, expected[call.label], args.repeats)
                note(block=block, **line, **sweep_entries)
                if line.get("ms", float("inf")) < best[call.label][0]:
                    best[call.label] = (line["ms"], block)
    if calls_m != row.m:
        calls = []
        calls = layer.calls(row)
    for call in calls:
        if call.label in best:
            last_ms = statistics.median(measure(call, None, args.repeats))
            table_ms[call.label].append(last_ms)
            best[call.label] = min(best[call.label], (last_ms, ""))
    for label, (ms, block) in best.items():
        first_ms, last_ms = table_ms[label]
        faster = ms < TIE * min(first_ms, last_ms)
        keep = {} if faster else {"keep": "the table's"}
        note(
            best=label,
            block=block,
            ms=round(ms, 5),
            table_ms=round(min(first_ms, last_ms), 5),
            table_first_ms=round(first_ms, 5),
            table_last_ms=round(last_ms, 5),
            **keep,
            **sweep_entries,
        )


def try_block(
    layer: Layer, call: Call, blocks: Blocks, expected: Tensor, repeats: int
) -> dict[str, Any]:
    """Time one candidate if its result is right."""
    line: dict[str, Any] = {"kernel": call.label}
    try:
        result = call.result(blocks)
        off = ((result - expected).abs().max() / expected.abs().max()).item()
        line["off"] = off
        if not off <= ALLOWED[layer.dtype]:
            return {**line, "error": f"off by {off:.1e} > {ALLOWED[layer.dtype]:.0e}"}
        times = measure(call, blocks, repeats)
    except Exception as error:  # noqa: BLE001  the next block is tried
        return {**line, "error": why_not(error)}
    return line | figures(layer.sizes, call.label, times, layer.rows.element_size())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for size in (size for size in fields(Sizes) if size.name != "quantised"):
        name = f"--{size.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=size.default)
    parser.add_argument(
        "--quantised", choices=EXPERTS_DTYPES, default="", help="quantise frozen experts"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sweep", action="store_true", help="time other blocks as well")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a sweep")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile candidates")
    parser.add_argument("--most", type=int, help="maximum number of candidates")
    parser.add_argument(
        "--compile-only", action="store_true", help="only compile the kernels of a sweep"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmark. Returns 1 if a kernel failed or a result was wrong."""
    args = parse()
    if not torch.cuda.is_available() and not triton_mlp.interpreted():
        print("there is no CUDA GPU; set TRITON_INTERPRET=1 and small sizes to test this script")
        return 1
    until = time.monotonic() + args.seconds
    layer = Layer(Sizes(**{f.name: getattr(args, f.name) for f in fields(Sizes)}))
    layer.both()  # compiles the kernels and runs their self-check
    with requiring_tma():
        return run(layer, args, until)


def run(layer: Layer, args: argparse.Namespace, until: float) -> int:
    """Time the layer or the candidates, until the time `until`. Returns 1 if a kernel failed."""
    row = layer.table_row()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    note(layer=str(layer.sizes), device=name, triton=triton.__version__, row=str(row))
    if args.compile_only:
        compile_all(layer, row, list_candidates(row), args.workers, until)
        return 0
    if args.sweep:
        sweep(layer, row, args, until)
        return 0
    num_errors = compare_values(layer) if args.quantised else 0
    return int(num_errors + time_table(layer, row, args.repeats) > 0)


if __name__ == "__main__":
    sys.exit(main())
