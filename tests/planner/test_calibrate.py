"""Calibration finds the rates of invented samples again, and those of a real rank
predict its step.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan as bench
import pytest
from support.needs import needs_bf16_attention
from test_step import SIZES_OF_BENCH, alone

from hf_moe_ep.planner import calibrate
from hf_moe_ep.planner.calibrate import LARGE, Sample, fit, measure_rates, record_of
from hf_moe_ep.planner.hardware import calibrated
from hf_moe_ep.planner.seconds import collective_seconds, operator_seconds, time_of_work
from hf_moe_ep.planner.work import Collective, Operator, StepWork, Stretch

RATES: dict[str, Any] = {
    "matmul_flops": {"bfloat16": 8e9, "float32": 2e9},
    "memory_bandwidth": 1e9,
    "node_size": 2,
    "host_ahead": False,
    "host_seconds": 0.003,
    "overlap": 0.0,
    "in_node_latency": 0.01,
    "in_node_bandwidth": 1e6,
    "between_nodes_latency": 0.5,
    "between_nodes_bandwidth": 1e5,
    "fractions": {
        "matmul": 1.0,
        "grouped": 0.5,
        "attention": 0.25,
        "memory": 1.0,
        "in_node": 1.0,
        "between_nodes": 1.0,
    },
}
OPERATORS = (
    Operator("matmul", "float32", 10**9, 1),
    Operator("matmul", "bfloat16", 10**9, 1),
    Operator("grouped", "float32", 10**8, 1),
    Operator("attention", "float32", 10**7, 1),
    Operator("memory", "", 0, 2 * LARGE),
    Operator("memory", "", 0, 7 * LARGE),
)
COLLECTIVES = tuple(
    Collective("all_gather", "parameters", ranks, 0, nbytes, hideable=1.0)
    for ranks in ((0, 1), (0, 2))
    for nbytes in (1000, 50_000)
)


def test_rates_come_out_again() -> None:
    """Samples of a machine with RATES, up to rounding. The host's share explains a whole step. A
    GPU's host goes ahead, so a step that takes less than the sum of its parts overlaps.
    """
    machine = record_of(RATES)
    samples = [Sample(one, operator_seconds(one, machine)) for one in OPERATORS]
    samples += [Sample(one, collective_seconds(one, machine)) for one in COLLECTIVES]
    # A launch takes what no rate explains.
    samples.append(Sample(Operator("memory", "", 0, LARGE // 2), 5.0))
    work = StepWork(
        {"all": Stretch(tuple((x, 1) for x in OPERATORS), tuple((x, 1) for x in COLLECTIVES))}
    )
    seconds = time_of_work(work, machine).seconds
    found = fit(samples, work, seconds=seconds, node_size=2)
    fractions = {name: found["fractions"][name] for name in RATES["fractions"]}
    for name, rate in RATES.items():
        assert (found | {"fractions": fractions})[name] == pytest.approx(rate, rel=1e-6), name
    # No expert was seen in bfloat16: those of float32 ran again 3 times as fast.
    again = {"grouped": {"float32": 7.0, "bfloat16": 21.0}}
    more = fit(samples, work, seconds=seconds, node_size=2, again=again)
    thrice = record_of(more)
    assert thrice.reached("grouped", "bfloat16") * 8e9 == pytest.approx(3 * 0.5 * 2e9)
    product = Operator("grouped", "bfloat16", 3 * 10**9, 1)
    assert operator_seconds(product, thrice) == pytest.approx(1.0)
    # What moved float32 moved bfloat16 at half the rate; what has no dtype at that of all.
    known = [replace(one, dtype="float32") if one.kind == "memory" else one for one in OPERATORS]
    samples += [Sample(one, operator_seconds(one, machine)) for one in known]
    half = record_of(
        fit(
            samples,
            work,
            seconds=seconds,
            node_size=2,
            again=again | {"memory": {"float32": 6.0, "bfloat16": 3.0}},
        )
    )
    for dtype, wanted in (("float32", 1.0), ("bfloat16", 2.0), ("", 1.0)):
        took = operator_seconds(Operator("memory", dtype, 0, 10**9), half)
        assert took == pytest.approx(wanted), dtype
    ahead = replace(machine, host_ahead=True, overlap=0.5, host_seconds=0.0)
    seconds = time_of_work(work, ahead).seconds
    found = fit(samples, work, seconds=seconds, node_size=2, host_ahead=True)
    assert found["overlap"] == pytest.approx(0.5, rel=1e-6)
    with pytest.raises(
        ValueError,
        match="0 kinds of products were timed, and operators of 65536 bytes or more moved 0",
    ):
        fit([], work, seconds=1.0, node_size=2)


@needs_bf16_attention
def test_a_steps_own_seconds_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of one real rank, read from a file, predict the seconds of the step that was timed."""
    told: list[float] = []

    def listen(*args: Any, seconds: float, **given: Any) -> dict[str, Any]:
        told.append(seconds)
        return fit(*args, seconds=seconds, **given)

    monkeypatch.setattr(calibrate, "fit", listen)
    one = bench.Configuration("", optimizer="sgd")
    with alone():
        training = bench.prepare(one, SIZES_OF_BENCH)
        work = bench.count(training).work
        rates = measure_rates(training.model, training.step, node_size=1, repeat=3)
    assert set(rates["matmul_flops"]) == {"float32", "bfloat16"}
    assert rates["host_ahead"] is False and rates["memory_bandwidth"] > 0
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(rates))
    made_up = record_of(RATES)
    measured = calibrated(made_up, file)
    assert measured.memory_bandwidth == rates["memory_bandwidth"]
    # No link was there to be measured.
    assert measured.in_node_bandwidth == made_up.in_node_bandwidth
    seconds = time_of_work(work, measured).seconds
    if rates["host_seconds"] > 0:
        assert seconds == pytest.approx(told[0], rel=0.02)
    else:
        # Alone, each piece took longer than the step: there is nothing to give the host.
        assert seconds >= told[0]
