"""`fit_rates` finds the rates behind invented samples. Rates of a real rank predict its step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan as bench
import pytest
from support.needs import needs_bf16_attention
from test_step import SIZES_OF_BENCH, group_of_one

from hf_moe_ep.planner import calibrate
from hf_moe_ep.planner.calibrate import LARGE_BYTES, Sample, fit_rates, make_hardware, measure_rates
from hf_moe_ep.planner.hardware import apply_measured_rates
from hf_moe_ep.planner.seconds import plan_collective_seconds, plan_operator_seconds, plan_work_time
from hf_moe_ep.planner.work import Collective, Operator, Phase, StepWork

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
    Operator("memory", "", 0, 2 * LARGE_BYTES),
    Operator("memory", "", 0, 7 * LARGE_BYTES),
)
COLLECTIVES = tuple(
    Collective("all_gather", "parameters", ranks, 0, nbytes, hideable=1.0)
    for ranks in ((0, 1), (0, 2))
    for nbytes in (1000, 50_000)
)


def test_fit_computes_the_rates_that_made_the_samples() -> None:
    """The samples have the seconds that a machine with RATES needs.

    On a CPU, a step that takes longer than the sum of its parts spends the difference in the host.
    With a GPU, the host runs ahead, so a step that is shorter than the sum of its parts has
    collectives that overlap computation.
    """
    machine = make_hardware(RATES)
    samples = [Sample(operator, plan_operator_seconds(operator, machine)) for operator in OPERATORS]
    samples += [Sample(each, plan_collective_seconds(each, machine)) for each in COLLECTIVES]
    # `fit_rates` ignores operators below LARGE_BYTES, because they take the time of a launch.
    samples.append(Sample(Operator("memory", "", 0, LARGE_BYTES // 2), 5.0))
    work = StepWork(
        {"all": Phase(tuple((x, 1) for x in OPERATORS), tuple((x, 1) for x in COLLECTIVES))}
    )
    seconds = plan_work_time(work, machine).seconds
    fitted = fit_rates(samples, work, seconds=seconds, node_size=2)
    fractions = {name: fitted["fractions"][name] for name in RATES["fractions"]}
    for name, rate in RATES.items():
        assert (fitted | {"fractions": fractions})[name] == pytest.approx(rate, rel=1e-6), name
    # No sample has grouped products in bfloat16. `repeated` says that they are 3 times as fast.
    rates_by_dtype = {"grouped": {"float32": 7.0, "bfloat16": 21.0}}
    with_bf16 = fit_rates(samples, work, seconds=seconds, node_size=2, repeated=rates_by_dtype)
    thrice = make_hardware(with_bf16)
    assert thrice.find_reached_fraction("grouped", "bfloat16") * 8e9 == pytest.approx(3 * 0.5 * 2e9)
    product = Operator("grouped", "bfloat16", 3 * 10**9, 1)
    assert plan_operator_seconds(product, thrice) == pytest.approx(1.0)
    # `repeated` says that bytes in bfloat16 move at half the rate of float32. Operators without
    # dtype get the rate of all samples.
    known = [replace(op, dtype="float32") if op.kind == "memory" else op for op in OPERATORS]
    samples += [Sample(op, plan_operator_seconds(op, machine)) for op in known]
    half = make_hardware(
        fit_rates(
            samples,
            work,
            seconds=seconds,
            node_size=2,
            repeated=rates_by_dtype | {"memory": {"float32": 6.0, "bfloat16": 3.0}},
        )
    )
    for dtype, expected in (("float32", 1.0), ("bfloat16", 2.0), ("", 1.0)):
        predicted = plan_operator_seconds(Operator("memory", dtype, 0, 10**9), half)
        assert predicted == pytest.approx(expected), dtype
    ahead = replace(machine, host_ahead=True, overlap=0.5, host_seconds=0.0)
    seconds = plan_work_time(work, ahead).seconds
    fitted = fit_rates(samples, work, seconds=seconds, node_size=2, host_ahead=True)
    assert fitted["overlap"] == pytest.approx(0.5, rel=1e-6)
    with pytest.raises(
        ValueError,
        match="0 kinds of products were timed, and operators of 65536 bytes or more moved 0",
    ):
        fit_rates([], work, seconds=1.0, node_size=2)


@needs_bf16_attention
def test_measured_rates_predict_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are read from a file. The plan is compared with the seconds of the timed step."""
    measured_seconds: list[float] = []

    def record_seconds(*args: Any, seconds: float, **options: Any) -> dict[str, Any]:
        measured_seconds.append(seconds)
        return fit_rates(*args, seconds=seconds, **options)

    monkeypatch.setattr(calibrate, "fit_rates", record_seconds)
    configuration = bench.Configuration("", optimizer="sgd")
    with group_of_one():
        training = bench.prepare(configuration, SIZES_OF_BENCH)
        work = bench.count(training).work
        rates = measure_rates(training.model, training.step, node_size=1, repeat=3)
    assert set(rates["matmul_flops"]) == {"float32", "bfloat16"}
    assert rates["host_ahead"] is False and rates["memory_bandwidth"] > 0
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(rates))
    made_up = make_hardware(RATES)
    measured = apply_measured_rates(made_up, file)
    assert measured.memory_bandwidth == rates["memory_bandwidth"]
    # One rank measures no link between ranks.
    assert measured.in_node_bandwidth == made_up.in_node_bandwidth
    seconds = plan_work_time(work, measured).seconds
    if rates["host_seconds"] > 0:
        assert seconds == pytest.approx(measured_seconds[0], rel=0.02)
    else:
        # The timed parts took longer than the whole step, so the host gets 0 seconds.
        assert seconds >= measured_seconds[0]
