"""Plan the seconds of a training step from its work and the rates of hardware.

    plan = plan_step("Qwen/Qwen3-30B-A3B", ParallelConfig(ep_size=8), world_size=8,
                     batch=Batch(4096))
    time = step_time(plan, find_hardware("h100"), micro_batches=4, tokens=4 * 4096)
    time.seconds, time.tokens_per_second_per_gpu, time.parts

An operator takes the longer of two times: its FLOPs at the rate of its kind and dtype, and its
bytes at the memory bandwidth. A collective takes the latency of a link and its bytes over the
bandwidth; over several nodes, the slower of both links counts. In each stretch of the step,
communication that can overlap computation does so for the fraction `Hardware.overlap`; the rest is
exposed and is added to the step:

    FSDP2's collectives   overlap all computation of the stretch
    rows (all-to-all)     overlap only the experts, as far as `work.py` says
    a stretch             computation + exposed communication, or the time in which the host
                          launches its kernels, if that is longer
    offload               the optimizer runs at the rate of the host's memory; nothing overlaps it

Example: a product of 500 FLOPs at 50 FLOPs/s takes 10 s; a gather of 40 bytes at 4 bytes/s takes
10 s. With overlap 0.8, 8 s of the gather are hidden, and the stretch takes 12 s.

All micro-batches run forward and backward, with FSDP2's reductions; the optimizer steps once.

Not modelled: the efficiency of a kernel at one shape (each kind has one fraction of the peak),
other traffic on the network, ranks that arrive late, and operators that slow each other down. Trust
the order of layouts more than their seconds.
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
    StepWork,
    Stretch,
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
        seconds: of the whole step.
        tokens_per_second_per_gpu: `tokens` over `seconds`.
        parts: seconds by cause; they add up to `seconds`. "matmul", "grouped" (experts),
            "attention", "memory" (operators that only move bytes), "on_host" (the optimizer on the
            host); exposed seconds of collectives by their purpose; "host" (launches that take
            longer than all that).
    """

    seconds: float
    tokens_per_second_per_gpu: float
    parts: dict[str, float]


def step_time(plan: StepPlan, hardware: Hardware, *, micro_batches: int, tokens: int) -> StepTime:
    """Plan the seconds of an optimizer step.

    Args:
        plan: of one micro-batch and an optimizer step, from `plan_step`.
        micro_batches: forward and backward passes per optimizer step.
        tokens: tokens of the optimizer step, summed over data ranks, divided by the GPUs.

    Raises:
        ValueError: a number is not positive, or the plan has no work.
    """
    for name, value in (("micro_batches", micro_batches), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be 1 or more; try 1")
    return time_of_work(plan.work, hardware, micro_batches=micro_batches, tokens=tokens)


def time_of_work(
    work: StepWork, hardware: Hardware, *, micro_batches: int = 1, tokens: int = 1
) -> StepTime:
    """Plan the seconds of a step from its work; see `step_time`."""
    if not work.stretches:
        raise ValueError("the plan has no work, 0 stretches; make it with plan_step")
    parts: dict[str, float] = defaultdict(float)
    for name, stretch in work.stretches.items():
        times = stretch.times * (1 if name == OPTIMIZER else micro_batches)
        for part, seconds in stretch_parts(stretch, hardware).items():
            parts[part] += times * seconds
    total = sum(parts.values())
    return StepTime(total, tokens / total, dict(parts))


def stretch_parts(stretch: Stretch, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of one run of a stretch, by cause."""
    parts: dict[str, float] = defaultdict(float)
    launches = 0
    for operator, number in stretch.operators:
        parts[operator.kind] += number * operator_seconds(operator, hardware)
        launches += number * operator.launches
    computed = sum(parts.values()) - parts.get(ON_HOST, 0.0)
    sent: dict[str, float] = defaultdict(float)
    hideable: dict[str, float] = defaultdict(float)
    for one, number in stretch.collectives:
        seconds = number * collective_seconds(one, hardware)
        sent[one.purpose] += seconds
        hideable[one.purpose] += one.hideable * seconds
        launches += number
    behind_experts = hardware.overlap * min(hideable["rows"], parts["grouped"])
    by_fsdp = sum(hideable[purpose] for purpose in _BY_FSDP)
    behind_all = hardware.overlap * min(by_fsdp, max(computed - behind_experts, 0.0))
    hidden = {"rows": behind_experts}
    hidden |= {name: behind_all * hideable[name] / by_fsdp for name in _BY_FSDP if by_fsdp}
    for purpose, seconds in sent.items():
        parts[purpose] += seconds - hidden.get(purpose, 0.0)
    host = launches * hardware.host_seconds
    parts["host"] = max(host - sum(parts.values()), 0.0) if hardware.host_ahead else host
    return dict(parts)


def operator_seconds(operator: Operator, hardware: Hardware) -> float:
    """Return the seconds of an operator: of its FLOPs or of its bytes, whichever is longer."""
    if operator.kind == ON_HOST:
        return operator.nbytes / (hardware.host_memory_bandwidth * hardware.fractions[ON_HOST])
    reached = hardware.reached("memory", operator.dtype)
    moving = operator.nbytes / (hardware.memory_bandwidth * reached)
    if not operator.flops:
        return moving
    rate = matmul_rate(operator.dtype, hardware.matmul_flops)
    rate *= hardware.reached(operator.kind, operator.dtype)
    return max(operator.flops / rate, moving)


def matmul_rate(dtype: str, rates: Mapping[str, float]) -> float:
    """Return the rate of products in a dtype, or in the next wider dtype that has one."""
    wider: str | None = dtype
    while wider is not None:
        if wider in rates:
            return rates[wider]
        wider = _WIDER.get(wider)
    # A dtype wider than all of them runs no faster than the slowest.
    return min(rates.values())


def collective_seconds(one: Collective, hardware: Hardware) -> float:
    """Return the seconds of a collective whose ranks all arrive at the same time."""
    if one.kind == HOST_COPY:
        return one.nbytes / (hardware.host_link_bandwidth * hardware.fractions[HOST_COPY])
    if len(one.ranks) == 1:
        return 0.0
    inside, outside = one.links(hardware.node_size)
    crosses = one.crosses(hardware.node_size)
    latency = hardware.between_nodes_latency if crosses else hardware.in_node_latency
    rates = hardware.fractions
    return latency + max(
        inside / (hardware.in_node_bandwidth * rates["in_node"]),
        outside / (hardware.between_nodes_bandwidth * rates["between_nodes"]),
    )
