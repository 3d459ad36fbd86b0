"""Rates of hardware: measured ones take the place of a record's, and nonsense is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_seconds import HARDWARE

from hf_moe_ep.planner.hardware import calibrated


def test_measured_rates_take_their_places(tmp_path: Path) -> None:
    """A file replaces single entries, and all others stay."""
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"matmul_flops": {"float32": 7}, "overlap": 0.25}))
    found = calibrated(HARDWARE, file)
    sources = {"matmul_flops": "measured: rates.json", "overlap": "measured: rates.json"}
    flops = {"bfloat16": 100.0, "float32": 7}
    assert found == replace(HARDWARE, matmul_flops=flops, overlap=0.25, sources=sources)


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
def test_nonsense_is_refused(text: str, match: str, tmp_path: Path) -> None:
    """The error names an unknown or wrong entry of a file and what would be right."""
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        calibrated(HARDWARE, file)
