"""Read and write the recorded numbers ("figures") of the compiled kernels.

`results/ahead_of_time.json` has one line per version of Triton, architecture and launch.
`ahead_of_time.md` shows the launches of two models as tables. `compile_kernels.py --write` writes
both files: it replaces the figures of the installed version of Triton, and keeps `before`, the
figures of the kernels before a change. `compile_kernels.py --check` compares newly compiled kernels
with the recorded figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton

RESULTS = Path(__file__).parent / "results"
FIGURES = ("block", "registers", "spilled", "shared", "programs", "steps_ahead", "instructions")
_COLUMNS = (
    "launch",
    "block",
    "registers",
    "spilled",
    "shared",
    "programs",
    "ahead",
    "instructions",
)
IN_TABLE = (
    "qwen3-30b",
    "gpt-oss-20b",
    "qwen3-30b r=16",
    "qwen3-30b nf4 r=16",
    "qwen3-30b fp8 r=16",
)

_HEAD = """\
# What the compiler makes of the kernels

The kernels were compiled ahead of time, without a GPU, so there are no times. `x > y` means that
the figure was x before the loops of the products were rewritten (rows are stored once, the last
step of `outer` is separate, and `up` has one wide product), and is y now. A single figure did not
change. `python benchmarks/compile_kernels.py --write` makes this page. Every launch is in
[ahead_of_time.json](ahead_of_time.json), with which `--check` compares.

| column | meaning |
|---|---|
| block | rows x columns x step in the sum, warps, stages |
| registers | registers per thread |
| spilled | bytes per thread |
| shared | KiB per program |
| programs | programs that fit on a multiprocessor |
| ahead | steps of the main loop whose loads run while one step computes, "-" if TMA loads all |
| instructions | instructions of one step of the main loop |
"""


def version() -> str:
    """Return the major and minor version of the installed Triton."""
    return ".".join(triton.__version__.split(".")[:2])


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """Select the figures of a report to record. Without a loop, the figures of a loop are None."""
    loops = report["loops"]
    longest = max(loops, key=lambda loop: loop["loads"] * loop["products"]) if loops else {}
    return {name: report.get(name, longest.get(name)) for name in FIGURES}


def recorded() -> dict[tuple[str, int, str], dict[str, Any]]:
    """Read the recorded lines, by (version of Triton, architecture, name)."""
    path = RESULTS / "ahead_of_time.json"
    texts = path.read_text().splitlines() if path.exists() else []
    lines = [json.loads(text) for text in texts]
    return {(line["triton"], line["arch"], line["name"]): line for line in lines}


def recorded_figures(names: list[str], arch: int) -> dict[str, Any] | None:
    """Find the recorded figures of launches that compile to the same code.

    Returns the figures of the first of `names` that has figures; None if no name has figures.
    """
    lines = recorded()
    figures_now = (lines.get((version(), arch, name), {}).get("now") for name in names)
    return next((figures for figures in figures_now if figures is not None), None)


def record(reports: list[dict[str, Any]], when: str = "now") -> None:
    """Write both files. `when` is "before" for figures of kernels that are about to change.

    If a report has only names and an architecture, its recorded figures do not change.
    """
    lines = recorded()
    kept_figures = [
        recorded_figures(x["names"], x["arch"]) if "loops" not in x else None for x in reports
    ]
    old = {key: lines.pop(key) for key in list(lines) if key[0] == version()}
    for report, old_figures in zip(reports, kept_figures, strict=True):
        for name in report["names"]:
            key = (version(), report["arch"], name)
            old_line = old.get(key, {})
            old_pair = {label: x for label, x in old_line.items() if label in ("before", "now")}
            line = {"triton": key[0], "arch": key[1], "name": name} | old_pair
            if when == "now" or name.split(" | ")[0] in IN_TABLE:
                line[when] = old_figures or figures(report)
            lines[key] = line
    text = "".join(json.dumps(lines[key]) + "\n" for key in sorted(lines))
    (RESULTS / "ahead_of_time.json").write_text(text)
    (RESULTS / "ahead_of_time.md").write_text(table([lines[key] for key in sorted(lines)]))


def table(lines: list[dict[str, Any]]) -> str:
    """Format the launches of IN_TABLE as Markdown, one table per architecture and version."""
    text = _HEAD
    for arch, triton_version in sorted({(x["arch"], x["triton"]) for x in lines}):
        rows = [
            _row(x)
            for x in lines
            if (x["arch"], x["triton"]) == (arch, triton_version)
            and x["name"].split(" | ")[0] in IN_TABLE
        ]
        text += f"\n## sm_{arch}, Triton {triton_version}\n\n"
        text += "".join(
            "| " + " | ".join(row) + " |\n" for row in (_COLUMNS, ["---"] * len(_COLUMNS), *rows)
        )
    return text


def _row(line: dict[str, Any]) -> list[str]:
    before = line.get("before", {})
    now = line.get("now", {})
    pairs = [(_format_figure(name, before), _format_figure(name, now)) for name in FIGURES]
    cells = [now if now == before else f"{before} > {now}" for before, now in pairs]
    return [line["name"].replace(" | ", ", "), *cells]


def _format_figure(name: str, values: dict[str, Any]) -> str:
    value = values.get(name)
    if value in (None, ""):
        return "-"
    return f"{value / 1024:.0f}" if name == "shared" else str(value)
