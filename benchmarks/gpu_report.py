"""Make tables and a plot from the lines that `gpu.py` writes (benchmarks/results/GPU/raw/*.jsonl).

    python benchmarks/gpu.py report benchmarks/results/GPU        writes figures.md and figures.png

This module measures nothing. For each set of sizes, a table shows only the last line, even if this
line has an error or a failed job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
# (key in a line, heading of the column)
Column = tuple[str, str]

KERNEL_COLUMNS: list[Column] = [
    ("part", "part"),
    ("tokens", "tokens"),
    ("adapter_rank", "adapters"),
    ("quantised", "base"),
    ("kernel", "kernel"),
    ("block", "block"),
    ("ms", "ms"),
    ("spread_ms", "least .. most"),
    ("tflops", "TFLOP/s"),
    ("gb_per_s", "GB/s at least"),
    ("error", "error"),
]
WHOLE_COLUMNS: list[Column] = [
    ("part", "part"),
    ("tokens", "tokens"),
    ("adapter_rank", "adapters"),
    ("quantised", "base"),
    ("kernel", ""),
    ("forward_ms", "forward, ms"),
    ("forward_tflops", "TFLOP/s"),
    ("both_ms", "forward + backward, ms"),
    ("both_tflops", "TFLOP/s"),
]
SAME_COLUMNS: list[Column] = [
    ("part", "part"),
    ("tokens", "tokens"),
    ("quantised", "base"),
    ("same", "tensor"),
    ("equal", "same bits"),
    ("off", "largest difference, of the largest element"),
    ("error", "error"),
]
LAYER_COLUMNS: list[Column] = [
    ("part", "part"),
    ("shape", "shape"),
    ("tokens", "tokens"),
    ("implementation", "implementation"),
    ("forward_ms", "forward, ms"),
    ("forward_tflops", "TFLOP/s"),
    ("both_ms", "forward + backward, ms"),
    ("both_tflops", "TFLOP/s"),
    ("both_spread_ms", "least .. most"),
    ("saved_bytes_per_token", "saved, bytes per token"),
    ("peak_mib", "peak, MiB"),
    ("error", "error"),
]
BEST_COLUMNS: list[Column] = [
    ("part", "part"),
    ("tokens", "tokens"),
    ("best", "kernel"),
    ("table_ms", "table, ms"),
    ("table_first_ms", "first"),
    ("table_last_ms", "last"),
    ("ms", "best, ms"),
    ("block", "its block"),
    ("keep", "keep"),
]
TRAIN_COLUMNS: list[Column] = [
    ("part", "part"),
    ("mode", "mode"),
    ("layers", "layers"),
    ("tokens", "tokens"),
    ("end_to_end", "side"),
    ("tok_per_s", "tokens/s"),
    ("step_s", "step, s"),
    ("step_spread_s", "least .. most"),
    ("mfu", "MFU"),
    ("peak_gib", "peak, GiB"),
    ("kept_bytes_per_token", "kept, bytes per token"),
    ("error", "error"),
]
EQUAL_COLUMNS: list[Column] = [
    ("part", "part"),
    ("job", "job"),
    ("losses_of", "side"),
    ("against", "against"),
    ("differences", "first losses differ by"),
    ("allowed", "allowed"),
    ("equal", "equal"),
]
JOB_COLUMNS: list[Column] = [
    ("part", "part"),
    ("job", "job"),
    ("ended", "ended"),
    ("seconds", "s"),
    ("sm", "SM clock, MHz"),
    ("watt", "power, W"),
]


def read(folder: Path) -> list[Line]:
    """Read all lines, part by part. The unfinished last line of a killed run is skipped."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


def last(lines: Iterable[Line], *keys: str) -> list[Line]:
    """Return the last line of each combination of values of `keys`, ordered by the first lines."""
    last_lines: dict[tuple[str, ...], Line] = {}
    for line in lines:
        last_lines[tuple(str(line.get(key)) for key in keys)] = line
    return list(last_lines.values())


def cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, list):
        return " .. ".join(cell(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value).replace("|", "/")
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(title: str, lines: list[Line], columns: list[Column]) -> list[str]:
    """Format lines as a Markdown table without empty columns. Without lines, return no table."""
    if not lines:
        return []
    shown = [(key, head) for key, head in columns if any(cell(x.get(key)) != "-" for x in lines)]
    rows = ["| " + " | ".join(cell(line.get(key)) for key, _ in shown) + " |" for line in lines]
    heads = "| " + " | ".join(head for _, head in shown) + " |"
    return [f"## {title}", "", heads, "|" + "---|" * len(shown), *rows, ""]


def flat(line: Line) -> Line:
    """Move the sizes of the model and the clocks of the job to the top level of a line."""
    gpu = line.get("gpu") or {}
    clocks = {"sm": gpu.get("clocks.sm"), "watt": gpu.get("power.draw")}
    sizes = line.get("sizes") if "end_to_end" in line else {}
    return {**(sizes or {}), **line, **clocks}


def text(lines: list[Line]) -> str:
    """Format the whole page as Markdown."""

    def select(key: str, where: Callable[[Line], bool] = lambda line: True) -> list[Line]:
        return [flat(line) for line in lines if key in line and where(line)]

    kernels = select("kernel", lambda line: not line.get("sweep"))
    sums = [line for line in kernels if line["kernel"] in ("sum", "whole")]
    single = [line for line in kernels if line["kernel"] not in ("sum", "whole")]
    # "part" is among the keys, so each part has its own rows.
    sizes = ("part", "tokens", "adapter_rank", "quantised", "kernel")
    same = ("part", "tokens", "quantised", "same")
    cells = ("part", "end_to_end", "mode", "layers", "tokens", "rows", "length", "checkpointing")
    best = ("part", "best", "tokens")
    page = ["# What one GPU showed", ""]
    if any(line.get("rehearsal") for line in lines):
        page += ["**A rehearsal on a CPU with tiny sizes: no figure here says anything.**", ""]
    page += [*_settings(lines), ""]
    page += _ceilings(select("ceilings"))
    page += table(
        "One layer, against others", last(select("implementation"), *_LAYER_KEYS), LAYER_COLUMNS
    )
    page += table("Its kernels, alone", last(single, *sizes), KERNEL_COLUMNS)
    page += table("Kernels together, and the layer itself", last(sums, *sizes), WHOLE_COLUMNS)
    page += table("Bytes, against their values", last(select("same"), *same), SAME_COLUMNS)
    page += table("Other blocks for them", last(select("best"), *best), BEST_COLUMNS)
    page += table("Training, whole steps", last(select("end_to_end"), *cells), TRAIN_COLUMNS)
    page += table(
        "First losses", last(select("losses_of"), "part", "job", "losses_of"), EQUAL_COLUMNS
    )
    page += _profiles(last(select("profile"), *cells))
    page += table("Jobs", last(select("ended"), "part", "job"), JOB_COLUMNS)
    return "\n".join(page)


# The entries of a line that identify a measurement of one layer.
_LAYER_KEYS = ("shape", "tokens", "implementation")


def _settings(lines: list[Line]) -> list[str]:
    items = []
    for line in last((line for line in lines if "rehearsal" in line), "commit", "part"):
        gpu = line.get("gpu") or {}
        versions = ", ".join(f"{name} {value}" for name, value in line["versions"].items())
        card = f"{gpu.get('name', 'no GPU')}, driver {gpu.get('driver_version', '-')}"
        items.append(
            f"- part {line['part']}: `{line['command']}`, {line['date']} UTC; {card}, at most "
            f"{cell(gpu.get('clocks.max.sm'))} MHz, {cell(gpu.get('power.limit'))} W; commit "
            f"{line['commit']}, sources {line['sources']}; {versions}"
        )
    return items


def _ceilings(lines: list[Line]) -> list[str]:
    merged: Line = {}
    for line in lines:
        merged |= line
    names = {
        "product_tflops": "one large product, TFLOP/s",
        "copy_tb_per_s": "copy in device memory, TB/s",
        "l2_read_tb_per_s": "reads from L2, TB/s",
    }
    items = [f"- {head}: {cell(merged[key])}" for key, head in names.items() if key in merged]
    return ["## Ceilings", "", *items, ""] if items else []


def _profiles(lines: list[Line]) -> list[str]:
    tables = []
    for line in lines:
        profile = line["profile"]
        if not profile:
            continue
        heads = [("name", "kernel"), ("ms", "ms"), ("calls", "calls")]
        rows = [dict(zip(("name", "ms", "calls"), row, strict=True)) for row in profile["top"]]
        title = f"Where a step goes: {line['job']}, {line['end_to_end']}"
        busy = f"{cell(profile['busy_ms'])} of {cell(profile['wall_ms'])} ms busy"
        tables += table(f"{title} ({busy})", rows[:12], heads)
    return tables


def plot(lines: list[Line], path: Path) -> bool:
    """Plot the TFLOP/s of a layer and the tokens/s of training. Without lines, return False."""
    layer = last((x for x in lines if "both_tflops" in x and "implementation" in x), *_LAYER_KEYS)
    cells = ("end_to_end", "mode", "tokens", "checkpointing", "job")
    train = last((x for x in lines if "tok_per_s" in x), *cells)
    if not layer and not train:
        return False
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    names = [f"{x['implementation']}\n{x['shape']}\n{x['tokens']}" for x in layer]
    for kind, shift in (("forward", -0.2), ("both", 0.2)):
        heights = [line.get(f"{kind}_tflops", 0.0) for line in layer]
        x = [index + shift for index in range(len(layer))]
        left.bar(x, heights, 0.4, label={"both": "forward + backward"}.get(kind, kind))
    left.set_xticks(range(len(layer)), names, fontsize=7)
    product = next((x["product_tflops"] for x in lines if "product_tflops" in x), None)
    if product:
        left.axhline(product, color="grey", linestyle="--", label="one large product")
    left.set(title="one layer's experts", ylabel="TFLOP/s")
    left.legend()
    names = [f"{x['end_to_end']}\n{x['mode']}, {x['sizes']['layers']} layers" for x in train]
    right.bar(range(len(train)), [line["tok_per_s"] for line in train])
    right.set_xticks(range(len(train)), names, fontsize=7)
    right.set(title="training on one GPU", ylabel="tokens/s")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def write(folder: Path) -> int:
    """Write figures.md and figures.png to the folder of `raw`. Returns 1 if there are no lines."""
    lines = read(folder / "raw" if (folder / "raw").is_dir() else folder)
    if not lines:
        print(f"{folder} has no lines: run `make gpu PART=1` first, or unpack its results there")
        return 1
    page = text(lines)
    if plot(lines, folder / "figures.png"):
        page += "\n![One layer, and training](figures.png)\n"
    (folder / "figures.md").write_text(page)
    print(folder / "figures.md")
    return 0
