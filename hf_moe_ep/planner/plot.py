"""Draw the memory of a rank over a planned step, by kind.

    draw_memory(plan_step("Qwen/Qwen3-30B-A3B", world_size=8, batch=Batch(4096)), "step.png")

A phase is a part of the step, such as the forward of one layer. All phases have the same width,
although they take different times. The height of a phase is its peak. `list_phase_bytes` returns
the numbers. This module needs matplotlib.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from hf_moe_ep.planner.counted import OPTIMIZER
from hf_moe_ep.planner.options import GIB
from hf_moe_ep.planner.step import StepPlan

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        "the memory of a step is drawn by matplotlib, which is not installed: "
        "pip install matplotlib (it is part of hf_moe_ep[demo])"
    ) from error

# Kinds of memory from bottom to top: first memory that is held for the whole step, then temporary
# memory. The colours are Okabe and Ito's, which colour-blind people can tell apart.
_COLOURS = {
    "parameters": "#0072B2",
    "buffers": "#999999",
    "optimizer state": "#56B4E9",
    "gradients": "#009E73",
    "gathered units, FSDP2's copies": "#F0E442",
    "activations, logits, transients": "#E69F00",
    "activations of other micro-batches": "#D55E00",
}
# About this many layers have a label on the axis.
_NUM_LABELS = 6


def list_phase_bytes(plan: StepPlan) -> list[tuple[str, dict[str, float]]]:
    """Return the phases of a step in their order, with the bytes of each kind at their peaks.

    A layer in the middle did not run. Its bytes are interpolated linearly between the layers at
    both ends (`extrapolate.py`).
    """
    return [(name, _interpolate_bytes(name, plan)) for name in _list_phases(plan.layers)]


def draw_memory(
    plan: StepPlan, path: str | os.PathLike[str], *, title: str = "", limit: int | None = None
) -> None:
    """Draw a plan into a PNG file, with a line at `limit` bytes."""
    phases = list_phase_bytes(plan)
    used = {kind for _, parts in phases for kind, size in parts.items() if size}
    edges = range(len(phases) + 1)
    # pyplot would choose a backend for the whole process and keep the figure alive.
    figure = Figure(figsize=(10, 5), layout="constrained")
    axis = figure.subplots()
    below = [0.0] * len(edges)
    for kind, colour in _COLOURS.items():
        if kind not in used:
            continue
        sizes = [parts.get(kind, 0) / GIB for _, parts in phases]
        # fill_between draws from edge to edge, so the last value is repeated.
        top = [low + size for low, size in zip(below, [*sizes, sizes[-1]], strict=True)]
        axis.fill_between(edges, below, top, step="post", color=colour, label=kind, linewidth=0)
        below = top
    if limit is not None:
        axis.axhline(limit / GIB, color="black", linestyle="--", linewidth=1)
        axis.text(0, limit / GIB, f" {limit / GIB:.4g} GiB", va="bottom", fontsize=9)
    _mark_peak(axis, plan, [name for name, _ in phases])
    _mark_phases(axis, plan.layers)
    axis.set_xlim(0, len(phases))
    axis.set_ylim(0, 1.12 * max(max(below), plan.peak / GIB, (limit or 0) / GIB))
    axis.set_ylabel("GiB of one rank, planned")
    axis.set_title(title, fontsize=10)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    figure.savefig(os.fspath(path), dpi=120, format="png")


def _list_phases(layers: int) -> Iterator[str]:
    yield "forward, before layers"
    yield from (f"forward, layer {number}" for number in range(layers))
    yield "forward, head"
    yield "backward, head"
    yield from (f"backward, layer {number}" for number in reversed(range(layers)))
    yield OPTIMIZER


def _interpolate_bytes(name: str, plan: StepPlan) -> dict[str, float]:
    planned = plan.made_of
    before, layer, number = name.rpartition("layer ")
    name_from_end = f"{before}layer {int(number) - plan.layers}" if layer else ""
    for key in (name, name_from_end):
        if key in planned:
            return dict(planned[key])
    first, last = planned[f"{before}layer 1"], planned[f"{before}layer -2"]
    fraction = (int(number) - 1) / (plan.layers - 3)
    return {
        kind: (1 - fraction) * first.get(kind, 0) + fraction * last.get(kind, 0)
        for kind in {**first, **last}
    }


def _mark_peak(axis: Axes, plan: StepPlan, names: list[str]) -> None:
    where = plan.where
    before, layer, number = where.rpartition("layer ")
    if layer and int(number) < 0:
        where = f"{before}layer {int(number) + plan.layers}"
    x, peak = names.index(where) + 0.5, plan.peak / GIB
    axis.plot([x], [peak], "kv", markersize=4)
    side = "left" if x < len(names) / 3 else "right" if x > len(names) * 2 / 3 else "center"
    axis.annotate(
        f"{peak:.4g} GiB in {where}",
        (x, peak),
        xytext=(0, 6),
        textcoords="offset points",
        ha=side,
        fontsize=9,
    )


def _mark_phases(axis: Axes, layers: int) -> None:
    """Label the layers below the picture, and forward, backward and optimizer below the layers."""
    step = max(layers // _NUM_LABELS, 1)
    backward, optimizer = layers + 2, 2 * layers + 3
    ticks: list[tuple[float, str]] = [(backward, "head")]
    for number in range(0, layers, step):
        ticks += [(1.5 + number, str(number)), (optimizer - number - 0.5, str(number))]
    axis.set_xticks([x for x, _ in ticks], [label for _, label in ticks], fontsize=8)
    axis.set_xlabel("layer", fontsize=8)
    for edge in (backward, optimizer):
        axis.axvline(edge, color="0.3", linestyle=":", linewidth=0.8)
    lower_axis = axis.secondary_xaxis(-0.11)
    lower_axis.set_xticks(
        [backward / 2, (backward + optimizer) / 2, optimizer + 0.5],
        ["forward", "backward", "optimizer"],
    )
    lower_axis.tick_params(length=0)
    lower_axis.spines["bottom"].set_visible(False)
