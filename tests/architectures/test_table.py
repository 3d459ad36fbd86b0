"""ARCHITECTURES.md shows recorded test results of every model type and agrees with the code."""

import json
from pathlib import Path

import pytest
from support.architectures import (
    MODEL_TYPES,
    record,
    record_refusal,
    recording,
    results,
    table,
)

from hf_moe_ep.architectures import read_differences
from hf_moe_ep.model_patches.standard import CONTEXT_PARALLEL, SEQUENCE_PARALLEL

DATA = table.read_data()
TYPES = DATA["types"]


def test_the_page_is_up_to_date() -> None:
    assert table.PAGE.read_text() == table.page(DATA), f"out of date: {table.COMMAND}"


def test_the_data_file_is_in_the_format_that_table_writes() -> None:
    assert table.DATA.read_text() == table.format_report(DATA)


def test_every_model_type_has_a_row() -> None:
    """Types of a newer Transformers may have rows, too."""
    assert not set(MODEL_TYPES) - TYPES.keys(), table.COMMAND


def test_every_column_of_every_type_is_recorded() -> None:
    """A record is a result or a refusal."""
    for column in results.COLUMNS:
        missing = {name for name in MODEL_TYPES if column not in TYPES[name]}
        assert not missing, f"{column}: {table.COMMAND}"


def test_nothing_failed() -> None:
    failed = {
        f"{model_type}, {column}": result["failed"]
        for model_type, columns in TYPES.items()
        for column, result in columns.items()
        if "failed" in result
    }
    assert not failed, failed


def test_sequence_parallelism_is_granted_where_it_passed() -> None:
    passed = {name for name, columns in TYPES.items() if "max_error" in columns.get("sp", {})}
    assert passed == SEQUENCE_PARALLEL
    passed = {name for name, columns in TYPES.items() if "max_error" in columns.get("cp", {})}
    assert passed == CONTEXT_PARALLEL


def test_refused_types_are_shown_with_the_reason() -> None:
    for model_type, columns in TYPES.items():
        reason = read_differences(model_type).refused
        assert not reason or columns["ep"] == {"refused": reason}, table.COMMAND


def test_results_and_failures_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.jsonl"
    monkeypatch.setenv(results.FILE, str(file))
    with recording("mixtral", "ep") as errors:
        errors += [1e-15, 3e-12]
    record("mixtral", "ep", 2e-11)
    record_refusal("jamba", "sp", "mixes in\n  mamba")
    with pytest.raises(KeyError), recording("olmoe", "hub"):
        raise KeyError("a key\nand more")
    record("olmoe", "hub", 0.0)
    assert results.read_results(file) == {
        "mixtral": {"ep": {"max_error": 2e-11}},
        "jamba": {"sp": {"refused": "mixes in mamba"}},
        "olmoe": {"hub": {"failed": "KeyError: 'a key\\nand more'"}},
    }


def test_nothing_is_recorded_without_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(results.FILE, raising=False)
    record("mixtral", "ep", 0.0)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(results.FILE, "found.jsonl")
    record("mixtral", "ep", 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["found.jsonl"]


def test_new_results_are_merged_into_the_data() -> None:
    old = {"types": {"mixtral": {"ep": {"max_error": 1.0}, "lora": {"max_error": 2.0}}}}
    data = table.merged(
        old, {"mixtral": {"ep": {"max_error": 3.0}}, "jamba": {"sp": {"refused": "a | b"}}}
    )
    assert data["types"]["mixtral"] == {
        "ep": {"max_error": 3.0},
        "lora": {"max_error": 2.0},
        "vision": {"none": "text alone"},
    }
    assert json.loads(table.format_report(data)) == data
    page = table.page(data)
    lines = [line.replace("not tested", "?") for line in page.splitlines()]
    assert "| `jamba` | ? | ? | no (2) | ? | ? | - | ? | ? |" in lines
    assert "| `mixtral` | yes | yes | ? | ? | ? | - | ? | ? |" in lines
    rule = next(line for line in lines if line.startswith("|---"))
    assert all(line.count("|") == rule.count("|") for line in lines if line.startswith("| `"))
    assert "\n2. a \\| b\n" in page
    lines = page.splitlines()
    rule = next(line for line in lines if line.startswith("|---"))
    assert all(line.count("|") == rule.count("|") for line in lines if line.startswith("| `m"))


def test_a_type_that_cannot_be_patched_is_refused_in_all_columns() -> None:
    """A column that has its own result keeps it."""
    columns = {"ep": {"refused": "no gate"}, "sp": {"refused": "mixes"}, "hub": {"max_error": 0.0}}
    data = table.merged({}, {"mixtral": columns})
    refused = {column: {"refused": "no gate"} for column in ("lora", "cp", "etp", "resume")}
    text_only = {"vision": {"none": "text alone"}}
    assert data["types"]["mixtral"] == columns | refused | text_only
    columns["ep"] = {"max_error": 1.0}
    data = table.merged(data, {"mixtral": {"ep": columns["ep"]}})
    assert data["types"]["mixtral"] == columns | text_only
