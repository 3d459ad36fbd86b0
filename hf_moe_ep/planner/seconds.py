"""Seconds of a training step, from its work and the rates of hardware; a model, not a measurement.

    config = ParallelConfig(ep_size=8)
    plan = plan_step("Qwen/Qwen3-30B-A3B", config, world_size=8, batch=Batch(4096))
    time = step_time(plan, find_hardware("h100"), micro_batches=4, tokens=4 * 4096)
    time.seconds, time.tokens_per_second_per_gpu, time.parts

Of each operator the larger of two times counts: its operations at the rate of its kind and dtype,
and its bytes at that of memory. A collective takes a link's latency and then its bytes, at the
slower of both links where its group is on several nodes. Within a stretch of the step, what can
travel behind computation does so for `Hardware.overlap` of it, and what remains is exposed:

    a stretch    computation, then what is exposed of its collectives, and where the host takes
                 longer than both, the rest of its time
    FSDP2's      hide behind all that the stretch computes
    rows         hide, as far as `step_work.py` says, behind the experts alone
    the host     computes where parameters lie there, at the rate of its memory; nothing hides that

Micro-batches but the last are forward and backward; FSDP2 reduces gradients in each of them. The
optimizer steps once.

What it does not know: how efficient a kernel is at one shape, beyond the fraction of its kind;
other traffic on the network, and a switch that has less than its ports; ranks that come late, be it
for their host or for their share of the tokens, unless the plan was made of a measured load; what
runs at the same time on one GPU and slows each other. The order of layouts is worth more than their
seconds.
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
_OF_FSDP = ("parameters", "gradients", "offload")


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step.

    Attributes:
        seconds: of the whole step.
        tokens_per_second_per_gpu: of the tokens that were given.
        parts: seconds by what takes them; they add up to `seconds`. "matmul", "grouped" (experts),
            "attention", "memory" (operators that only move bytes); "on_host": an optimizer that
            steps there; what is exposed of collectives, by their purpose; "host": what it takes to
            launch beyond all that.
    """

    seconds: float
    tokens_per_second_per_gpu: float
    parts: dict[str, float]


def step_time(plan: StepPlan, hardware: Hardware, *, micro_batches: int, tokens: int) -> StepTime:
    """Say how long an optimizer step takes.

    Args:
        plan: of one micro-batch with an optimizer step behind it, as `plan_step` plans.
        micro_batches: forwards and backwards of a step.
        tokens: of a whole step, of all data ranks together divided by the number of GPUs.

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
    """Say how long a step of such work takes; as `step_time`."""
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
    """Say what one run of a stretch spends its seconds on."""
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
    of_fsdp = sum(hideable[purpose] for purpose in _OF_FSDP)
    behind_all = hardware.overlap * min(of_fsdp, max(computed - behind_experts, 0.0))
    hidden = {"rows": behind_experts}
    hidden |= {name: behind_all * hideable[name] / of_fsdp for name in _OF_FSDP if of_fsdp}
    for purpose, seconds in sent.items():
        parts[purpose] += seconds - hidden.get(purpose, 0.0)
    host = launches * hardware.host_seconds
    parts["host"] = max(host - sum(parts.values()), 0.0) if hardware.host_ahead else host
    return dict(parts)


def operator_seconds(operator: Operator, hardware: Hardware) -> float:
    """Say how long one operator takes: to compute or to move bytes, whichever is longer."""
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
    """Find the rate of products of a dtype, or that of the next wider one there is."""
    wider: str | None = dtype
    while wider is not None:
        if wider in rates:
            return rates[wider]
        wider = _WIDER.get(wider)
    # What is wider than all of them runs no faster than the slowest.
    return min(rates.values())


def collective_seconds(one: Collective, hardware: Hardware) -> float:
    """Say how long a collective takes that waits for nobody."""
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
