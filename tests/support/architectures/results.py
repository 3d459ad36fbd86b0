"""Record the results of tests for ARCHITECTURES.md, as lines of JSON with one result each.

    with recording("mixtral", "ep") as errors:         records "failed" if the block raises,
        errors.append(max_error(loss, want))           and else the largest of these errors
    record("mixtral", "hub", 0.0)                      passed; 0.0 means equal bits
    record_refusal("jamba", "sp", str(raised.value))   refused, with the error that a test expects

These functions write only if RECORD_ARCHITECTURES names a file. Several ranks and tests may write
results of one column. It has passed if all of them passed, with the largest of their errors. These
commands record results and add them to tests/architectures.json and ARCHITECTURES.md:

    rm -f found.jsonl
    RECORD_ARCHITECTURES=found.jsonl python -m pytest -m "" tests/architectures ...
    PYTHONPATH=tests python -m support.architectures.table found.jsonl

Results that are not in the file stay as they were (`table.py`). `make architectures` runs all tests
that record.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "RECORD_ARCHITECTURES"
# Column -> its title on the page.
COLUMNS = {
    "ep": "EP + FSDP2",
    "lora": "LoRA on experts",
    "sp": "sequence parallelism",
    "cp": "context parallelism",
    "etp": "expert tensor parallelism",
    "vision": "vision tower",
    "hub": "hub files",
    "resume": "resume at another layout",
}


def record(model_type: str, column: str, error: float, gathered: Sequence[str] = ()) -> None:
    """Record that a comparison with stock passed, and its largest error.

    `gathered` names the modules for which sequences were gathered, in the columns "sp" and "cp".
    """
    assert math.isfinite(error), f"{model_type}, {column}: the error is {error}"
    names = {"gathered": [*gathered]} if gathered else {}
    _write(model_type, column, {"max_error": float(f"{error:.1e}"), **names})


def record_refusal(model_type: str, column: str, reason: str) -> None:
    """Record that a type is refused, with the words of the error."""
    _write(model_type, column, {"refused": " ".join(reason.split())})


@contextmanager
def recording(model_type: str, column: str, gathered: Sequence[str] = ()) -> Iterator[list[float]]:
    """Record the largest error that a test appends, or the exception that it raises."""
    errors: list[float] = []
    try:
        yield errors
        assert errors, f"{model_type}, {column}: nothing was compared"
    except BaseException as error:
        line = str(error).strip().partition("\n")[0]
        _write(model_type, column, {"failed": f"{type(error).__name__}: {line}"})
        raise
    record(model_type, column, max(errors), gathered)


def _write(model_type: str, column: str, result: dict[str, Any]) -> None:
    assert column in COLUMNS, f"unknown column {column!r}; ARCHITECTURES.md has {[*COLUMNS]}"
    if FILE not in os.environ:
        return
    line = json.dumps({"model_type": model_type, "column": column, **result}) + "\n"
    with Path(os.environ[FILE]).resolve().open("a") as file:
        file.write(line)  # one append per line, so that lines of several ranks do not mix


def read_results(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return model type -> column -> result.

    If a column has several results, a failure is returned first, then a refusal, then the largest
    error.
    """
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        new = json.loads(line)
        columns = results.setdefault(new.pop("model_type"), {})
        column = new.pop("column")
        columns[column] = _worse(columns.get(column, new), new)
    return results


def _worse(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    for kind in ("failed", "refused"):
        if kind in first or kind in second:
            return first if kind in first else second
    return max(first, second, key=lambda result: result["max_error"])
