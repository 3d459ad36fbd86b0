"""Results of tests for each architecture, for ARCHITECTURES.md: lines of JSON, one per result.

    with recording("mixtral", "ep") as errors:         what fails in here is recorded as failed,
        errors.append(max_error(loss, want))           else the largest of these errors
    record("mixtral", "hub", 0.0)                      passed; 0.0 is bit for bit
    record_refusal("jamba", "sp", str(raised.value))   refused, for the reason that a test saw

All of it does nothing unless HF_MOE_EP_RECORD names a file. Ranks may write beside each other: a
column is passed where something passed and nothing failed, with the largest error of all. So

    rm -f found.jsonl
    HF_MOE_EP_RECORD=found.jsonl python -m pytest -m "" tests/architectures ...
    PYTHONPATH=tests python -m support.architectures.table found.jsonl

puts what was found into tests/architectures.json and ARCHITECTURES.md, and leaves the rest as it
was (`table.py`). `make architectures` does so with all tests that record.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "HF_MOE_EP_RECORD"
# Column -> what is claimed of it.
COLUMNS = {
    "ep": "EP + FSDP2",
    "lora": "LoRA on experts",
    "sp": "sequence parallelism",
    "vision": "vision tower",
    "hub": "hub files",
    "resume": "resume at another layout",
}


def record(model_type: str, column: str, error: float) -> None:
    """Record that a comparison with stock passed, and its largest error."""
    assert math.isfinite(error), f"{model_type}, {column}: an error of {error} is no result"
    _write(model_type, column, {"max_error": float(f"{error:.1e}")})


def record_refusal(model_type: str, column: str, reason: str) -> None:
    """Record that it is refused, as a test expects, in the words of the error."""
    _write(model_type, column, {"refused": " ".join(reason.split())})


@contextmanager
def recording(model_type: str, column: str) -> Iterator[list[float]]:
    """Record the errors that a test appends, or that it failed; what it raised is raised."""
    errors: list[float] = []
    try:
        yield errors
        assert errors, f"{model_type}, {column}: nothing was compared"
    except BaseException as error:
        line = str(error).strip().partition("\n")[0]
        _write(model_type, column, {"failed": f"{type(error).__name__}: {line}"})
        raise
    record(model_type, column, max(errors))


def _write(model_type: str, column: str, found: dict[str, Any]) -> None:
    assert column in COLUMNS, f"no column {column!r} in ARCHITECTURES.md; there are {[*COLUMNS]}"
    if FILE not in os.environ:
        return
    line = json.dumps({"model_type": model_type, "column": column, **found}) + "\n"
    with Path(os.environ[FILE]).resolve().open("a") as file:
        file.write(line)  # one write, at the end of the file: ranks do not mix


def read_results(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Model type -> column -> what was found: a failure over a refusal over a pass."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        new = json.loads(line)
        columns = found.setdefault(new.pop("model_type"), {})
        column = new.pop("column")
        columns[column] = _worse(columns.get(column, new), new)
    return found


def _worse(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for kind in ("failed", "refused"):
        if kind in one or kind in other:
            return one if kind in one else other
    return max(one, other, key=lambda found: found["max_error"])
