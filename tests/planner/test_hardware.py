"""`apply_measured_rates` replaces rates of a record by measured rates; wrong entries raise."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_seconds import HARDWARE

from hf_moe_ep.planner.hardware import apply_measured_rates, find_hardware


def test_measured_rates_replace_the_rates_of_the_record(tmp_path: Path) -> None:
    """Entries that the file does not contain keep their values."""
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"matmul_flops": {"float32": 7}, "overlap": 0.25}))
    measured = apply_measured_rates(HARDWARE, file)
    sources = {"matmul_flops": "measured: rates.json", "overlap": "measured: rates.json"}
    flops = {"bfloat16": 100.0, "float32": 7}
    assert measured == replace(HARDWARE, matmul_flops=flops, overlap=0.25, sources=sources)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"memory_bandwith": 1}', "'memory_bandwith' in .*rates.json.*memory_bandwidth"),
        ('{"fractions": {"matmul": 1.5}}', r"fractions\['matmul'\] \(1.5\).*at most 1"),
        ('{"fractions": {"gemm": 1}}', "'gemm' in fractions of hardware 'made up'.*matmul"),
        ('{"in_node_latency": -1}', r"in_node_latency \(-1\).*0 or more"),
        ('{"node_size": 2.5}', r"node_size \(2.5\).*whole number"),
        ('{"memory_bandwidth": true}', r"memory_bandwidth \(True\)"),
        ('{"matmul_flops": 3}', "matmul_flops in .*rates.json must be an object, got 3"),
        ('{"host_ahead": 1}', r"host_ahead \(1\) must be true or false"),
        ('{"name": "mine"}', "'name' in .*rates.json is not known"),
        ("[1]", "must contain a JSON object, not a list"),
        ("{", "is not valid JSON"),
    ],
)
def test_wrong_entries_of_a_file_are_refused(text: str, match: str, tmp_path: Path) -> None:
    """The error names the unknown or wrong entry and the allowed values."""
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        apply_measured_rates(HARDWARE, file)


def test_memory_is_what_torch_reports_and_measured_fractions_are_named() -> None:
    for name, gib in (("a100", 79.25), ("h100", 79.11), ("h200", 139.8)):
        assert find_hardware(name).memory_bytes / 2**30 == pytest.approx(gib, abs=0.01)
    h100 = find_hardware("h100")
    assert h100.fractions["grouped"] > find_hardware("a100").fractions["grouped"]
    assert h100.fractions["matmul"] == find_hardware("a100").fractions["matmul"]
    assert "benchmarks/results/h100" in h100.sources["fractions"]
