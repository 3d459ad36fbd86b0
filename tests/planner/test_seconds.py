"""The planned seconds of a step with invented rates equal a computation by hand."""

from dataclasses import replace

import pytest

from hf_moe_ep.planner.counted import OPTIMIZER
from hf_moe_ep.planner.hardware import KINDS, Hardware
from hf_moe_ep.planner.seconds import plan_phase_parts, plan_step_time
from hf_moe_ep.planner.step import StepPlan
from hf_moe_ep.planner.work import (
    HOST_COPY,
    ON_HOST,
    Collective,
    Operator,
    Phase,
    StepWork,
)

# Half of each peak is reached: 50 FLOPs per second (bf16), 4 bytes of memory, 2 bytes inside a node
# and 0.5 bytes between nodes.
HARDWARE = Hardware(
    name="made up",
    matmul_flops={"bfloat16": 100.0, "float32": 50.0},
    memory_bandwidth=8.0,
    memory_bytes=1e3,
    node_size=2,
    in_node_bandwidth=4.0,
    in_node_latency=0.25,
    between_nodes_bandwidth=1.0,
    between_nodes_latency=2.0,
    host_seconds=0.0,
    host_link_bandwidth=2.0,
    host_memory_bandwidth=4.0,
    fractions=dict.fromkeys(KINDS, 0.5),
)
PRODUCT = Operator("matmul", "bfloat16", 500, 8)
THIN = Operator("grouped", "float32", 25, 16)
COPY = Operator("memory", "", 0, 12)


def _make_phase(*operators: Operator, sent: tuple[Collective, ...] = ()) -> Phase:
    return Phase(tuple((op, 1) for op in operators), tuple((op, 1) for op in sent))


def test_an_operator_takes_the_longer_of_computation_and_memory() -> None:
    """PRODUCT computes 10 s and moves bytes for 2 s; THIN computes 1 s and moves bytes for 4 s."""
    parts = plan_phase_parts(_make_phase(PRODUCT, THIN, COPY), HARDWARE)
    assert parts == {"matmul": 10.0, "grouped": 4.0, "memory": 3.0, "host": 0.0}
    # HARDWARE has no rates for fp16 and fp64, so the rates of bf16 and fp32 are used.
    for dtype, seconds in (("float16", 10.0), ("float64", 20.0)):
        assert (
            plan_phase_parts(_make_phase(replace(PRODUCT, dtype=dtype)), HARDWARE)["matmul"]
            == seconds
        )


def test_collectives_overlap_with_computation() -> None:
    """FSDP2's collectives overlap all computation, rows overlap experts, counts overlap nothing."""
    gather = Collective("all_gather", "parameters", (0, 1), 0, 40, hideable=1.0)  # 0.25 + 20 / 2
    rows = Collective("all_to_all", "rows", (0, 1), 0, 0, (0, 15), hideable=0.5)  # 0.25 + 15 / 2
    counts = Collective("all_gather", "counts", (0, 2), 0, 2)  # 2 + 1 / 0.5
    phase = _make_phase(PRODUCT, THIN, sent=(gather, rows, counts))
    parts = plan_phase_parts(phase, HARDWARE)
    assert parts["rows"] == 7.75 - 3.875 and parts["parameters"] == 10.25 - 10.125
    assert parts["counts"] == 4.0
    half = plan_phase_parts(phase, replace(HARDWARE, overlap=0.5))
    assert half["rows"] == 7.75 - 3.875 / 2 and half["parameters"] == 10.25 - 10.25 / 2
    without = plan_phase_parts(phase, replace(HARDWARE, overlap=0.0))
    assert (without["rows"], without["parameters"]) == (7.75, 10.25)
    # Keys of other ranks, 10.25 s, overlap only the attention, which takes 10 s.
    keys = Collective("all_gather", "sequence", (0, 1), 0, 40, hideable=1.0)
    attention = replace(PRODUCT, kind="attention")
    parts = plan_phase_parts(_make_phase(PRODUCT, attention, sent=(keys,)), HARDWARE)
    assert parts["sequence"] == 0.25
    assert plan_phase_parts(_make_phase(PRODUCT, sent=(keys,)), HARDWARE)["sequence"] == 10.25
    # The copy takes 12 s, of which 10 s overlap PRODUCT. It does not overlap the 3 s on the host.
    copy = Collective(HOST_COPY, "offload", (0,), 0, 12, hideable=1.0)
    parts = plan_phase_parts(
        _make_phase(PRODUCT, Operator(ON_HOST, "", 9, 6), sent=(copy,)), HARDWARE
    )
    assert (parts["offload"], parts["on_host"]) == (2.0, 3.0)
    # A group of one rank sends nothing.
    alone = _make_phase(sent=(replace(gather, ranks=(0,)),))
    assert plan_phase_parts(alone, HARDWARE)["parameters"] == 0.0


def test_the_host_runs_ahead_of_the_device_or_does_not() -> None:
    """Three launches of 4 s run during 10 s of computation (2 s more) or after it (12 s more)."""
    gather = Collective("all_gather", "parameters", (0,), 0, 40)
    phase = _make_phase(PRODUCT, replace(PRODUCT, flops=0, nbytes=0), sent=(gather,))
    slow = replace(HARDWARE, host_seconds=4.0)
    assert plan_phase_parts(phase, slow)["host"] == 2.0
    assert plan_phase_parts(phase, replace(slow, host_ahead=False))["host"] == 12.0


def test_micro_batches_share_one_optimizer_step() -> None:
    """Three micro-batches run 2 layers of 10 s each, and the optimizer step takes 3 s once."""
    work = StepWork(
        {"forward, layer 1": replace(_make_phase(PRODUCT), times=2), OPTIMIZER: _make_phase(COPY)}
    )
    plan = StepPlan({}, {}, 2, (2,), work)
    time = plan_step_time(plan, HARDWARE, micro_batches=3, tokens=126)
    assert time.seconds == 3 * 2 * 10.0 + 3.0 == sum(time.parts.values())
    assert time.tokens_per_second_per_gpu == 2.0
    for wrong in ({"micro_batches": 0, "tokens": 1}, {"micro_batches": 1, "tokens": 0}):
        with pytest.raises(ValueError, match=r"\(0\) must be 1 or more"):
            plan_step_time(plan, HARDWARE, **wrong)
    with pytest.raises(ValueError, match="no work, 0 phases"):
        plan_step_time(StepPlan({}, {}, 2, (2,)), HARDWARE, micro_batches=1, tokens=1)


def test_gradients_of_rows_overlap_only_with_postponed_gradients() -> None:
    """The transfer takes 4 s and the experts take 4 s, of which only the postponed 1 s overlaps."""
    first = Operator("grouped", "float32", 75, 0)  # 3 s
    postponed = Operator("grouped", "float32", 25, 0, postponed=True)  # 1 s
    row_grads = Collective("all_to_all", "rows", (0, 1), 0, 0, (0, 7.5), 1.0, of_row_grads=True)
    parts = plan_phase_parts(_make_phase(first, postponed, sent=(row_grads,)), HARDWARE)
    assert (parts["grouped"], parts["rows"]) == (4.0, 4.0 - 1.0)
