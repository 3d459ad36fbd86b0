"""Plan the seconds of a training step from its work and the rates of hardware.

    plan = plan_step("Qwen/Qwen3-30B-A3B", ParallelConfig(ep_size=8), world_size=8,
                     batch=Batch(4096))
    time = plan_step_time(plan, find_hardware("h100"), micro_batches=4, tokens=4 * 4096)
    time.seconds, time.tokens_per_second_per_gpu, time.parts

An operator takes the longer of two times: its FLOPs at the rate of its kind and dtype, or its bytes
at the memory bandwidth. A collective takes the latency of a link plus its bytes divided by the
bandwidth. If the collective crosses nodes, the slower link counts. A phase is a part of the step,
such as the forward of one layer. In each phase, the fraction `Hardware.overlap` of the
communication that can overlap computation is hidden. All other communication is exposed and makes
the step longer:

    FSDP2's collectives   can overlap all computation of the phase
    rows (all-to-all)     can overlap only the experts, and only the fraction that `work.py` gives
    gradients of rows     can overlap only the postponed gradients of the experts' weights
    keys and values       can overlap only attention, and only those that `work.py` lists
    a phase               takes computation + exposed communication, or the time in which the host
                          launches its kernels if this time is longer
    offload               runs the optimizer at the rate of the host's memory; nothing overlaps it

Example: a product of 500 FLOPs at 50 FLOPs/s takes 10 s; an all-gather of 40 bytes at 4 bytes/s
takes 10 s. With overlap 0.8, 8 s of the all-gather are hidden, and the phase takes 12 s.

Every micro-batch runs forward, backward and FSDP2's reductions; the optimizer runs once per step.

This estimate ignores how the efficiency of a kernel depends on shapes (each kind has one fraction
of the peak), other traffic on the network, ranks that arrive late, and operators that slow each
other down. Trust the order of layouts more than their seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hf_moe_ep.planner.counted import OPTIMIZER
from hf_moe_ep.planner.hardware import Hardware
from hf_moe_ep.planner.step import StepPlan
from hf_moe_ep.planner.work import (
    HOST_COPY,
    ON_HOST,
    Collective,
    Operator,
    Phase,
    StepWork,
)

_WIDER = {
    "float8_e4m3fn": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float32",
    "float32": "float64",
}
_BY_FSDP = ("parameters", "gradients", "offload")


@dataclass(frozen=True)
class StepTime:
    """The planned time of an optimizer step.

    Attributes:
        seconds: the duration of the whole step.
        tokens_per_second_per_gpu: the tokens per GPU divided by `seconds`.
        parts: the seconds of each cause; their sum is `seconds`. The causes are the kinds of
            operators ("matmul", "grouped" for the experts, "attention", "memory" for operators that
            only move bytes, "on_host" for the optimizer on the host), the purposes of collectives
            (only their exposed seconds), and "host" (the exposed seconds of kernel launches).
    """

    seconds: float
    tokens_per_second_per_gpu: float
    parts: dict[str, float]


def plan_step_time(
    plan: StepPlan, hardware: Hardware, *, micro_batches: int, tokens: int
) -> StepTime:
    """Plan the seconds of an optimizer step.

    Args:
        plan: the result of `plan_step`: the work of one micro-batch and of the optimizer.
        micro_batches: the number of forward and backward passes per optimizer step.
        tokens: the tokens of all data ranks per optimizer step, divided by the number of GPUs.

    Raises:
        ValueError: a number is not positive, or the plan has no work.
    """
    for name, value in (("micro_batches", micro_batches), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be 1 or more; try 1")
    return plan_work_time(plan.work, hardware, micro_batches=micro_batches, tokens=tokens)


def plan_work_time(
    work: StepWork, hardware: Hardware, *, micro_batches: int = 1, tokens: int = 1
) -> StepTime:
    """Plan the seconds of a step from its work; see `plan_step_time`."""
    if not work.phases:
        raise ValueError("the plan has no work, 0 phases; make it with plan_step")
    parts: dict[str, float] = defaultdict(float)
    for name, phase in work.phases.items():
        times = phase.times * (1 if name == OPTIMIZER else micro_batches)
        for cause, seconds in plan_phase_parts(phase, hardware).items():
            parts[cause] += times * seconds
    total = sum(parts.values())
    return StepTime(total, tokens / total, dict(parts))


def plan_phase_parts(phase: Phase, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of each cause in one run of a phase."""
    parts: dict[str, float] = defaultdict(float)
    launches, postponed = 0, 0.0
    for operator, number in phase.operators:
        seconds = number * plan_operator_seconds(operator, hardware)
        parts[operator.kind] += seconds
        postponed += seconds if operator.postponed else 0.0
        launches += number * operator.launches
    computed = sum(parts.values()) - parts.get(ON_HOST, 0.0)
    sent: dict[str, float] = defaultdict(float)
    hideable: dict[str, float] = defaultdict(float)
    row_grads = 0.0
    for collective, number in phase.collectives:
        seconds = number * plan_collective_seconds(collective, hardware)
        sent[collective.purpose] += seconds
        if collective.of_row_grads:
            row_grads += seconds
        else:
            hideable[collective.purpose] += collective.hideable * seconds
        launches += number
    under_experts = min(hideable["rows"], parts["grouped"])
    hidden_rows = hardware.overlap * (under_experts + min(row_grads, postponed))
    hidden_sequence = hardware.overlap * min(hideable["sequence"], parts.get("attention", 0.0))
    hideable_fsdp = sum(hideable[purpose] for purpose in _BY_FSDP)
    free = max(computed - hidden_rows - hidden_sequence, 0.0)
    hidden_fsdp = hardware.overlap * min(hideable_fsdp, free)
    hidden = {"rows": hidden_rows, "sequence": hidden_sequence}
    if hideable_fsdp:
        hidden |= {name: hidden_fsdp * hideable[name] / hideable_fsdp for name in _BY_FSDP}
    for purpose, seconds in sent.items():
        parts[purpose] += seconds - hidden.get(purpose, 0.0)
    host = launches * hardware.host_seconds
    parts["host"] = max(host - sum(parts.values()), 0.0) if hardware.host_ahead else host
    return dict(parts)


def plan_operator_seconds(operator: Operator, hardware: Hardware) -> float:
    """Return the time of an operator's FLOPs or of its bytes, whichever is longer."""
    if operator.kind == ON_HOST:
        return operator.nbytes / (hardware.host_memory_bandwidth * hardware.fractions[ON_HOST])
    reached = hardware.find_reached_fraction("memory", operator.dtype)
    seconds_of_bytes = operator.nbytes / (hardware.memory_bandwidth * reached)
    if not operator.flops:
        return seconds_of_bytes
    rate = find_matmul_rate(operator.dtype, hardware.matmul_flops)
    rate *= hardware.find_reached_fraction(operator.kind, operator.dtype)
    return max(operator.flops / rate, seconds_of_bytes)


def find_matmul_rate(dtype: str, rates: Mapping[str, float]) -> float:
    """Return the rate of products in a dtype, or in the next wider dtype that has a rate."""
    wider: str | None = dtype
    while wider is not None:
        if wider in rates:
            return rates[wider]
        wider = _WIDER.get(wider)
    # No dtype of this width or wider has a rate, so the slowest rate is used.
    return min(rates.values())


def plan_collective_seconds(collective: Collective, hardware: Hardware) -> float:
    """Return the seconds of a collective whose ranks all arrive at the same time."""
    fractions = hardware.fractions
    if collective.kind == HOST_COPY:
        return collective.nbytes / (hardware.host_link_bandwidth * fractions[HOST_COPY])
    if len(collective.ranks) == 1:
        return 0.0
    inside, outside = collective.links(hardware.node_size)
    crosses = collective.crosses(hardware.node_size)
    latency = hardware.between_nodes_latency if crosses else hardware.in_node_latency
    return latency + max(
        inside / (hardware.in_node_bandwidth * fractions["in_node"]),
        outside / (hardware.between_nodes_bandwidth * fractions["between_nodes"]),
    )
