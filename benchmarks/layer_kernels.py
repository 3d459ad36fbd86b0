"""Each Triton kernel of one MoE layer alone, as the layer calls it; and other blocks for them.

    python benchmarks/layer_kernels.py --tokens 32768             every kernel as the table stands
    python benchmarks/layer_kernels.py --tokens 32768 --sweep --seconds 120      and the candidates
    python benchmarks/layer_kernels.py --adapter-rank 16          base frozen, adapters on both
    python benchmarks/layer_kernels.py --adapter-rank 16 --quantised nf4    and the base as bytes

The layer runs forward and backward once and its calls are noted; each is then made again, alone, a
few times. What is timed is therefore what runs, whatever arguments a kernel takes.

A sweep times the blocks of `block_candidates.py` and a few others. Workers
compile them first, into Triton's cache on disk. A candidate counts if its result is the table's to
two roundings; one that does not start is a line that says why. One JSON line per measurement,
printed at once:

    ms           the device's time, median of some measurements of three calls
    tflops       operations of the product over it; gb_per_s: the least bytes it has to move
    off          largest difference to the table's result, relative to its largest element
    sum          all kernels of a direction, with the operations of the whole layer
    whole        the layer itself: beside the sum it shows what is between the kernels
    same         of bytes: each tensor against the same kernels over the values of the bytes

Without a GPU it needs TRITON_INTERPRET=1 and shows that it runs, no more.
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
from block_candidates import CANDIDATES
from timing import milliseconds
from torch import Tensor

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.kernels import blocks as table
from hf_moe_ep.ops.kernels.blocks import Blocks
from hf_moe_ep.ops.quantised import KINDS
from hf_moe_ep.ops.reference import matrices
from hf_moe_ep.ops.self_check import some_bytes

KERNELS = "hf_moe_ep.ops.kernels."
# Two roundings of bf16, of the largest element.
ALLOWED = {torch.bfloat16: 2 * 2.0**-8, torch.float32: 1e-5}
# Faster by less than this is a tie, and the table stays.
TIE = 0.985
# What the n-th call of a launching function is; with adapters the products of `outer` are others.
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
# The field of a row of the table that each of them reads.
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
    """One layer: those of Qwen3-30B-A3B."""

    tokens: int = 32768
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    ffn: int = 768
    adapter_rank: int = 0
    quantised: str = ""

    @property
    def frozen(self) -> bool:
        """Whether the matrices get no gradient."""
        return bool(self.adapter_rank or self.quantised)

    def flops(self) -> float:
        """Of one product of all pairs with one matrix of hidden x ffn."""
        return 2.0 * self.tokens * self.top_k * self.hidden * self.ffn

    def work(self, label: str, width: int) -> tuple[float, float]:
        """Operations of a kernel, and the least bytes it moves; zeros where it is not known."""
        # Bytes of a value, scales included.
        of_value = {"": float(width), "nf4": 0.5625, "fp8": 1 + 4 / 128**2}[self.quantised]
        pairs, weights = self.tokens * self.top_k, self.experts * self.hidden * self.ffn * of_value
        x, y = self.tokens * self.hidden * width, pairs * self.hidden * width
        act, one = pairs * self.ffn * width, self.flops()
        known = {
            "sort": (0.0, 16.0 * pairs),
            "up": (2 * one, x + 2 * weights + 3 * act),
            "down": (one, act + weights + y),
            "combine": (0.0, y + x),
            "dgated": (one, x + weights + 5 * act),
            "dx": (2 * one, 2 * act + 2 * weights + y),
            "combine dx": (0.0, y + x),
            "dW down": (one, x + act + weights),
            "dW up": (2 * one, 2 * act + x + 2 * weights),
        }
        return known.get(label, (0.0, 0.0))


@dataclass
class Call:
    """One call of a function that launches kernels, to be made again under any row."""

    label: str
    backward: bool
    run: Callable[[Blocks | None], Any]
    fills: Tensor | None = None

    def result(self, blocks: Blocks | None = None) -> Tensor:
        """What it fills, or the first tensor that it returns; under another row if one is given."""
        if self.fills is not None:
            self.fills.fill_(float("nan"))  # or what an earlier call left would pass for right
            self.run(blocks)
            return self.fills
        found = self.run(blocks)
        while not isinstance(found, Tensor):
            found = vars(found) if hasattr(found, "__dataclass_fields__") else found
            found = next(iter(found.values() if isinstance(found, dict) else found))
        return found


class Layer:
    """Experts, rows and routing; draws the same numbers every time."""

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
        held = {"up": up, "down": down}
        if sizes.quantised:
            generator = torch.Generator(device).manual_seed(0)
            for name, matrix in (("up", up), ("down", down)):
                stack = some_bytes(matrix, sizes.quantised, generator)
                held |= stack.by_name(name)
        self.rows, self.grad = draw(tokens, hidden), draw(tokens, hidden)
        self.weights = torch.rand(tokens, sizes.top_k, device=device)
        scores = torch.rand(tokens, experts, device=device)
        self.ids = scores.topk(sizes.top_k, dim=1).indices
        self.leaves = [x.requires_grad_() for x in (self.rows, self.weights, *trained)]
        self.experts = ExpertWeights(
            **held, up_bias=None, down_bias=None, **factors, quantised=sizes.quantised
        )

    def forward(self, experts: ExpertWeights | None = None) -> Tensor:
        formula = ExpertFormula()
        return expert_mlp(
            self.rows, self.ids, self.weights, experts or self.experts, formula, backend="triton"
        )

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.grad)

    def with_values(self) -> ExpertWeights:
        """The experts with the values that their bytes stand for."""
        kind, nothing = self.experts.quantised, {"up_block_scale": None, "down_block_scale": None}
        up, down = (matrices(self.experts.stack(name), kind, self.dtype) for name in ("up", "down"))
        return replace(self.experts, up=up, down=down, quantised="", **nothing)

    def table_row(self) -> Blocks:
        sizes = self.sizes
        num_pairs = sizes.tokens * sizes.top_k
        return table.choose_blocks(self.rows, sizes.experts, num_pairs, sizes.quantised)

    def calls(self, row: Blocks) -> list[Call]:
        """What one forward and backward calls under a row of the table, in order."""
        noted: list[Call] = []
        with _noting(noted, row, outer_is_known=not self.sizes.frozen):
            out = self.forward()
            num_forward = len(noted)
            torch.autograd.grad(out, self.leaves, self.grad)
        for call in noted[num_forward:]:
            call.backward = True
        return noted


@contextmanager
def _noting(calls: list[Call], row: Blocks, *, outer_is_known: bool) -> Iterator[None]:
    """Every launching function that `triton_mlp` calls is noted, and asks this row for blocks."""
    times: Counter[str] = Counter()
    plain = dict(vars(triton_mlp))

    def noted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launching(*args: Any, **kwargs: Any) -> Any:
            plain_call = f"{name} {times[name]}"
            known = name != "outer" or outer_is_known
            labelled = LABELS.get((name, times[name]), plain_call) if known else plain_call
            times[name] += 1

            def again(blocks: Blocks | None) -> Any:
                def mine(value: Any) -> Any:
                    return blocks if blocks and isinstance(value, Blocks) else value

                return launch(*map(mine, args), **{key: mine(x) for key, x in kwargs.items()})

            bound = inspect.signature(launch).bind(*args, **kwargs).arguments
            fills = next((x for key, x in bound.items() if key.startswith("out_")), None)
            calls.append(Call(labelled, False, again, fills))
            return launch(*args, **kwargs)

        return launching

    try:
        for name, value in plain.items():
            module = getattr(value, "__module__", "")
            if not isinstance(value, FunctionType) or not module.startswith(
                "hf_moe_ep.ops.kernels"
            ):
                continue
            if module != table.__name__ and name != "max_tiles":
                setattr(triton_mlp, name, noted(name, value))
        triton_mlp.choose_blocks = lambda *_: row
        yield
    finally:
        vars(triton_mlp).update(plain)


def candidates(row: Blocks) -> list[tuple[str, Blocks]]:
    """(field, row with another block there): the table's own, the other row's, one more stage."""
    found = [
        (candidate.field, candidate.blocks())
        for candidate in CANDIDATES
        if table.TABLE[candidate.row] == row
    ]
    names = list(dict.fromkeys(FIELDS.values()))
    for (kind, itemsize, _), other in table.TABLE.items():
        beside = (kind, itemsize) in {key[:2] for key, mine in table.TABLE.items() if mine is row}
        if beside and other.m != row.m:
            # The gradients of the weights know no tiles of rows.
            found += [(name, other) for name in names if name != "outer"]
    for name in names:
        block = getattr(row, name)
        found.append((name, replace(row, **{name: replace(block, stages=block.stages + 1)})))
    return list(dict.fromkeys(found))


def note(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def measure(call: Call, blocks: Blocks | None, repeats: int) -> list[float]:
    """Milliseconds, each the mean of three calls."""
    cuda = torch.cuda.is_available()
    call.run(blocks)
    # By this name a profiler of single kernels finds them.
    with torch.cuda.nvtx.range("one_call") if cuda else nullcontext():
        call.run(blocks)
    return [milliseconds(lambda: call.run(blocks), cuda, times=3) for _ in range(repeats)]


def figures(sizes: Sizes, label: str, times: list[float], width: int) -> dict[str, Any]:
    ms = statistics.median(times)
    flops, size = sizes.work(label, width)
    line = {"ms": round(ms, 5), "spread_ms": [round(min(times), 5), round(max(times), 5)]}
    if flops:
        line["tflops"] = short(flops / ms / 1e9)
    if size:
        line["gb_per_s"] = short(size / ms / 1e6)
    return line


def short(value: float) -> float:
    """To five digits."""
    return float(f"{value:.5g}")


def why_not(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def as_text(row: Blocks, field: str) -> str:
    """A block of a row of the table."""
    if not field:
        return ""
    block = getattr(row, field)
    values = {name: value for name, value in asdict(block).items() if value is not None}
    sizes = " ".join(f"{name}={value}" for name, value in values.items())
    return sizes if field == "outer" else f"rows={row.m} {sizes}"


def compare_values(layer: Layer) -> int:
    """Lines of what bytes and their values make of the same rows; how many differ too much."""
    values = layer.with_values()
    found = []
    for experts in (layer.experts, values):
        out = layer.forward(experts)
        found.append([out.detach(), *torch.autograd.grad(out, layer.leaves, layer.grad)])
    num_errors = 0
    for name, got, want in zip(("out", *layer.names), *found, strict=True):
        off = ((got - want).abs().max() / want.abs().max()).item()
        bad = not off <= ALLOWED[layer.dtype]
        error = {"error": f"off by {off:.1e} > {ALLOWED[layer.dtype]:.0e}"} if bad else {}
        note(same=name, equal=bool(torch.equal(got, want)), off=off, **about(layer), **error)
        num_errors += bad
    return num_errors


def about(layer: Layer) -> dict[str, Any]:
    """What tells a line of one layer from that of another."""
    sizes = layer.sizes
    return {
        "tokens": sizes.tokens,
        "adapter_rank": sizes.adapter_rank,
        "quantised": sizes.quantised,
    }


def time_table(layer: Layer, row: Blocks, repeats: int) -> int:
    """Every kernel under the table's row, their sums, and the whole; how many lines are errors."""
    of_layer = about(layer)
    total = {False: 0.0, True: 0.0}
    num_errors = 0
    for call in layer.calls(row):
        line = {"kernel": call.label, "backward": call.backward}
        line["block"] = as_text(row, FIELDS.get(call.label, ""))
        try:
            times = measure(call, None, repeats)
            line |= figures(layer.sizes, call.label, times, layer.rows.element_size())
            total[call.backward] += statistics.median(times)
        except Exception as error:  # noqa: BLE001  the next kernel is timed
            line["error"] = why_not(error)
            total[call.backward] = float("nan")
            num_errors += 1
        note(**line, **of_layer)
    try:
        cuda = torch.cuda.is_available()
        runs = {"forward": layer.forward, "both": layer.both}
        whole = {
            kind: statistics.median(milliseconds(run, cuda) for _ in range(repeats))
            for kind, run in runs.items()
        }
    except Exception as error:  # noqa: BLE001  the sums are still worth a line
        note(kernel="whole", error=why_not(error), **of_layer)
        num_errors, whole = num_errors + 1, {}
    sums = {"forward": total[False], "both": total[False] + total[True]}
    # Forward three products of hidden x ffn a pair, backward six; with the base frozen three.
    products = {"forward": 3, "both": 6 if layer.sizes.frozen else 9}
    for name, of in (("sum", sums), ("whole", whole)):
        line = {}
        for kind, ms in of.items():
            if ms == ms:  # not of kernels one of which did not run
                tflops = products[kind] * layer.sizes.flops() / ms / 1e9
                line |= {f"{kind}_ms": round(ms, 5), f"{kind}_tflops": short(tflops)}
        note(kernel=name, **line, **of_layer)
    return num_errors


_in_worker: dict[str, Any] = {}


def _open_worker(sizes: Sizes, row: Blocks) -> None:
    _in_worker["layer"] = Layer(sizes)
    _in_worker["calls"] = {row.m: _in_worker["layer"].calls(row)}


def _compile(candidate: tuple[str, Blocks]) -> None:
    """Run it once at a small number of tokens: it lies in Triton's cache then."""
    field, blocks = candidate
    known = _in_worker["calls"]
    # What fails is reported when it is timed.
    with suppress(Exception):
        if blocks.m not in known:
            known[blocks.m] = _in_worker["layer"].calls(blocks)
        for call in known[blocks.m]:
            if FIELDS.get(call.label, "") == field:
                call.run(blocks)


def compile_all(layer: Layer, row: Blocks, found: list, workers: int, until: float) -> None:
    """Fill Triton's cache on disk; what is not there in time is compiled when it is timed."""
    small = replace(layer.sizes, tokens=256, experts=min(16, layer.sizes.experts))
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _open_worker, (small, row)) as pool:
        pool.map_async(_compile, found, chunksize=1).wait(max(until - time.monotonic(), 0))
        pool.terminate()


def sweep(layer: Layer, row: Blocks, args: argparse.Namespace, until: float) -> None:
    """Candidates as lines, and the best of each kernel at the end."""
    found = candidates(row)[: args.most]
    if args.workers:
        compile_all(layer, row, found, args.workers, until - 0.4 * args.seconds)
    of_sweep = {"tokens": layer.sizes.tokens, "sweep": True}
    best: dict[str, tuple[float, str]] = {}
    calls, of_m = layer.calls(row), row.m
    wanted = {}
    for call in calls:
        if FIELDS.get(call.label, ""):
            wanted[call.label] = call.result().clone()
            best[call.label] = (statistics.median(measure(call, None, args.repeats)), "")
    standing = {label: ms for label, (ms, _) in best.items()}
    for field, blocks in found:
        block = as_text(blocks, field)
        if time.monotonic() > until:
            note(field=field, block=block, skipped="no time left", **of_sweep)
            continue
        try:
            if blocks.m != of_m:
                calls, of_m = [], blocks.m  # the other calls' tensors go first
                calls = layer.calls(replace(row, m=blocks.m))
        except Exception as error:  # noqa: BLE001  the next candidate may start
            note(field=field, block=block, error=why_not(error), **of_sweep)
            continue
        for call in calls:
            if FIELDS.get(call.label, "") == field:
                line = try_block(layer, call, blocks, wanted[call.label], args.repeats)
                note(block=block, **line, **of_sweep)
                if line.get("ms", float("inf")) < best[call.label][0]:
                    best[call.label] = (line["ms"], block)
    for label, (ms, block) in best.items():
        faster = ms < TIE * standing[label]
        keep = {} if faster else {"keep": "the table's"}
        note(
            best=label,
            block=block,
            ms=round(ms, 5),
            table_ms=round(standing[label], 5),
            **keep,
            **of_sweep,
        )


def try_block(
    layer: Layer, call: Call, blocks: Blocks, want: Tensor, repeats: int
) -> dict[str, Any]:
    """Time one candidate, if its result is right."""
    line: dict[str, Any] = {"kernel": call.label}
    try:
        got = call.result(blocks)
        off = ((got - want).abs().max() / want.abs().max()).item()
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
    parser.add_argument("--quantised", choices=KINDS, default="", help="frozen bytes")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0, help="that a sweep may take")
    parser.add_argument("--workers", type=int, default=12, help="that compile candidates")
    parser.add_argument("--most", type=int, help="candidates")
    return parser.parse_args(arguments)


def main() -> int:
    """Returns 1 where a kernel did not run."""
    args = parse()
    if not torch.cuda.is_available() and not triton_mlp.interpreted():
        print("no CUDA GPU: set TRITON_INTERPRET=1 to see that it runs, with small sizes")
        return 1
    until = time.monotonic() + args.seconds
    layer = Layer(Sizes(**{f.name: getattr(args, f.name) for f in fields(Sizes)}))
    layer.both()  # compiles, and checks itself
    row = layer.table_row()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    note(layer=str(layer.sizes), device=name, triton=triton.__version__, row=str(row))
    if args.sweep:
        sweep(layer, row, args, until)
        return 0
    num_errors = compare_values(layer) if args.quantised else 0
    return int(num_errors + time_table(layer, row, args.repeats) > 0)


if __name__ == "__main__":
    sys.exit(main())
