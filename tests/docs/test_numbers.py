"""Numbers that stand on several pages agree, such as the medians of a benchmark's results."""

import re

import pytest
from support import pages

RESULTS = "benchmarks/results/cpu-4096-tokens.md"
# Row of the table -> row of the results.
FIGURES = {
    "bytes sent by the MoE layers": "sent per rank: all, MiB",
    "kept for backward by the MoE layers": "saved for backward, MiB",
    "seconds per step, on two cores": "step, s",
    "peak memory in training": "peak memory per rank, training, MiB",
}


def _split_cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
def test_the_table_has_the_medians_of_the_results(page: str) -> None:
    rows = [_split_cells(row) for row in pages.read(RESULTS).splitlines() if row.startswith("| ")]
    medians = {(row[0], row[1]): tuple(cell.partition(" ")[0] for cell in row[2:4]) for row in rows}
    table = {
        row[0]: row[1:] for row in map(_split_cells, pages.read(page).splitlines()) if len(row) == 3
    }
    for label, figure in FIGURES.items():
        for ep, cell in zip(("2", "4"), table[label], strict=True):
            assert tuple(re.findall(r"[\d.]+", cell)) == medians[ep, figure], (label, ep)


def test_the_planned_gain_of_compiled_layers_is_that_of_the_plan() -> None:
    rows = re.findall(r"^\| (un)?compiled \| ([\d,]+) ", pages.read("docs/will-it-fit.md"), re.M)
    uncompiled, compiled = (int(tokens.replace(",", "")) for _, tokens in rows)
    (ratio,) = re.findall(
        r"planned ratio to ours uncompiled: ([\d.]+)", pages.read("benchmarks/GPU.md")
    )
    assert ratio == f"{compiled / uncompiled:.2f}"
