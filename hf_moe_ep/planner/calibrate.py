"""Measure the rates of `hardware.py` on this machine, from steps of a real model.

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rates = measure_rates(model, step, node_size=8)     # on every rank, after apply_ep_fsdp2
    if torch.distributed.get_rank() == 0:
        Path("rates.json").write_text(json.dumps(rates, indent=2))

`measure_rates` first times whole steps. It then runs TIMED_STEPS more steps, in which
`OperatorTimer` times every operator and collective separately. The device is synchronised before
and after each operator. All ranks enter a barrier before each collective, so the time of a
collective does not include waiting for other ranks. `fit_rates` divides work by time:

    rate                how it is computed
    matmul_flops        one rate per dtype; experts and attention reach a fraction of this rate
    memory_bandwidth    computed from operators that read and write LARGE_BYTES or more
    links               a straight line through (bytes, seconds) gives latency and bandwidth
    host_seconds        GPU: the median time of a launch. CPU: the seconds of a step that the other
                        rates do not explain, because a CPU cannot launch operators ahead
    overlap             the share of the overlappable communication that a whole step hides

A step uses few dtypes. The first of the TIMED_STEPS therefore repeats products, and operators that
move LARGE_BYTES or more, in each of DTYPES (`_can_repeat` lists the exceptions). The ratios of the
repeated rates give the rates of dtypes that the step does not use. On a single node, the links
between nodes are not measured; `hardware.apply_measured_rates` then keeps their published numbers.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.planner.counted import make_counter
from hf_moe_ep.planner.hardware import KINDS, PRODUCTS, Hardware
from hf_moe_ep.planner.seconds import plan_work_time
from hf_moe_ep.planner.work import Collective, Operator, StepWork, WorkCounter
from hf_moe_ep.ranks.all_ranks import gather_from_all
from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.operators import get_group_of_collective, get_operator_name, get_work

LARGE_BYTES = 2**16
DTYPES = ("float32", "bfloat16")
TIMED_STEPS = 3
_WARM_UP = 2


@dataclass(frozen=True)
class Sample:
    """A timed operator or collective, and the seconds that it took."""

    item: Operator | Collective
    seconds: float


class OperatorTimer(WorkCounter):
    """A `WorkCounter` that also times every operator and collective separately.

    With `repeats`, operators also run again in each of DTYPES.

    Attributes:
        samples: the operators and collectives, in the order in which they ran.
        repeated: for each kind and dtype of repeated operators, the list [FLOPs or bytes, seconds].
    """

    def __init__(self, settings: WorkCounter, device: torch.device, *, repeats: bool) -> None:
        super().__init__(chunks=settings.chunks, experts_train=settings.experts_train)
        self.samples: list[Sample] = []
        self._repeats = repeats
        self._kwargs: dict[str, Any] = {}
        self.repeated: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._seconds = 0.0
        self._device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, self._seconds = _run_timed(self._device, func, *args, **kwargs)
        self._kwargs = kwargs
        return out

    def run_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _wait_for(self._device)
        get_group_of_collective(func, args).barrier().wait()
        start = time.perf_counter()
        out = func(*args, **kwargs)
        get_work(out).wait()
        _wait_for(self._device)
        self._seconds = time.perf_counter() - start
        return out

    def note(self, item: Operator | Collective, func: Any, args: tuple[Any, ...]) -> None:
        super().note(item, func, args)
        self.samples.append(Sample(item, self._seconds))
        if isinstance(item, Collective) or not self._repeats:
            return
        if not _can_repeat(item, func, args, self._kwargs):
            return
        kwargs = {name: value for name, value in self._kwargs.items() if name != "out"}
        for dtype in DTYPES:
            copies = [_copy_in_dtype(x, dtype) for x in args]
            # The first run in a dtype is a warm-up.
            for _ in range(2):
                # overloadpacket chooses the overload without an `out` argument.
                seconds = _run_timed(self._device, func.overloadpacket, *copies, **kwargs)[1]
            total = self.repeated[item.kind, dtype]
            total[0] += item.flops or item.nbytes * _itemsize(dtype) / _itemsize(item.dtype)
            total[1] += seconds


def _run_timed(device: torch.device, func: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, float]:
    _wait_for(device)
    start = time.perf_counter()
    out = func(*args, **kwargs)
    _wait_for(device)
    return out, time.perf_counter() - start


def _can_repeat(
    operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return True if an operator can be repeated with its inputs in another dtype.

    Three kinds of operators cannot be repeated: the backward of attention, which also reads fp32
    sums; operators with a dtype argument or a list of tensors; FSDP2's own operators.
    """
    floats = {x.dtype for x in list_tensors_in(args) if x.is_floating_point()}
    return (
        func.namespace == "aten"
        and len(floats) == 1
        and operator.dtype in DTYPES
        and not any(isinstance(x, list | tuple) and list_tensors_in(x) for x in args)
        and "dtype" not in kwargs
        and not ("attention" in get_operator_name(func) and "backward" in get_operator_name(func))
        and (operator.kind in PRODUCTS or (operator.nbytes >= LARGE_BYTES and "out" not in kwargs))
    )


def _copy_in_dtype(x: Any, dtype: str) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(getattr(torch, dtype) if x.is_floating_point() else x.dtype, copy=True)


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def measure_rates(
    model: nn.Module, step: Callable[[], Any], *, node_size: int, repeat: int = 5
) -> dict[str, Any]:
    """Measure rates and return them as fields of `Hardware`. Every rank must call this function.

    Args:
        model: the sharded model that `step` trains.
        step: runs forward, backward and the optimizer for one micro-batch.
        node_size: ranks per node.
        repeat: the number of whole steps to time.
    """
    device = next(model.parameters()).device
    for _ in range(_WARM_UP):
        step()
    seconds = [time_step(step, device) for _ in range(repeat)]
    timers = []
    for number in range(TIMED_STEPS):
        timers.append(OperatorTimer(make_counter(model), device, repeats=number == 0))
        timers[-1].begin("all")
        with timers[-1]:
            step()
    samples = [sample for timer in timers for sample in timer.samples]
    launch_seconds = _time_launches(step) if device.type == "cuda" else 0.0
    result = samples, dict(timers[0].repeated), statistics.median(seconds), launch_seconds
    results = gather_from_all("measuring rates", lambda: result)
    return fit_rates(
        [sample for samples_of_rank, *_ in results for sample in samples_of_rank],
        timers[0].counted(),
        seconds=max(result[2] for result in results),
        node_size=node_size,
        repeated=_compute_repeated_rates([result[1] for result in results]),
        launch_seconds=statistics.mean(result[3] for result in results),
        host_ahead=device.type == "cuda",
    )


def fit_rates(
    samples: Iterable[Sample],
    work: StepWork,
    *,
    seconds: float,
    node_size: int,
    repeated: dict[str, dict[str, float]] | None = None,
    launch_seconds: float = 0.0,
    host_ahead: bool = False,
) -> dict[str, Any]:
    """Compute rates from samples.

    Args:
        samples: the timed operators and collectives of all ranks.
        work: the work of one rank's step, counted as a single phase.
        seconds: the seconds that this step takes when its operators are not timed.
        repeated: for each kind and dtype, the rate of the operators that were repeated in all
            dtypes.
        launch_seconds: seconds that the host takes per launch; 0 on a CPU.
        host_ahead: True if the host launches operators while the device computes.

    Raises:
        ValueError: the samples have no products, or no operators that move LARGE_BYTES or more.
    """
    # Totals of [FLOPs, seconds] by kind and dtype, and of [bytes, seconds] by dtype.
    flops: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    links: dict[str, list[tuple[float, float]]] = {"in_node": [], "between_nodes": []}
    for sample in samples:
        item = sample.item
        if isinstance(item, Collective):
            if len(item.ranks) > 1:
                inside, outside = item.links(node_size)
                crosses = item.crosses(node_size)
                link = "between_nodes" if crosses else "in_node"
                links[link].append((outside if crosses else inside, sample.seconds))
        elif item.kind in PRODUCTS:
            total = flops[item.kind, item.dtype]
            total[0] += item.flops
            total[1] += sample.seconds
        elif item.nbytes >= LARGE_BYTES:
            total = moved[item.dtype]
            total[0] += item.nbytes
            total[1] += sample.seconds
    nbytes = sum(moved_bytes for moved_bytes, _ in moved.values())
    if not flops or not nbytes:
        raise ValueError(
            f"{len(flops)} kinds of products were timed, and operators of {LARGE_BYTES} bytes or "
            f"more moved {nbytes:.0f} bytes; both numbers must be above 0: measure a larger batch"
        )
    rates, fractions = _compute_product_rates(flops, repeated or {})
    bandwidth, memory_fractions = _compute_memory_rates(moved, (repeated or {}).get("memory", {}))
    result: dict[str, Any] = {
        "matmul_flops": rates,
        "memory_bandwidth": bandwidth,
        "node_size": node_size,
        "host_ahead": host_ahead,
        "host_seconds": launch_seconds,
        "overlap": 0.0,
        "fractions": {**fractions, **memory_fractions},
    }
    for link, points in links.items():
        if points:
            latency, bandwidth = _fit_line(points)
            result[f"{link}_latency"], result[f"{link}_bandwidth"] = latency, bandwidth
            result["fractions"][link] = 1.0
    return result | _solve_host_or_overlap(result, work, seconds)


def time_step(step: Callable[[], Any], device: torch.device) -> float:
    """Run one step that all ranks start at the same time, and return its seconds."""
    if dist.is_initialized():
        dist.barrier()
    return _run_timed(device, step)[1]


def _compute_product_rates(
    flops: dict[tuple[str, str], list[float]], repeated: dict[str, dict[str, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the rate of the fastest kind in each dtype, and the fraction that each kind reaches.

    The key "grouped float32" maps to the fraction of one dtype. The key "grouped" maps to the
    fraction of the dtype in which this kind has most FLOPs.
    """
    measured: dict[tuple[str, str], float] = {
        key: work / seconds for key, (work, seconds) in flops.items() if seconds
    }
    main_dtypes = {}
    for kind in {kind for kind, _ in measured}:
        flops_by_dtype = {dtype: flops[kind, dtype][0] for k, dtype in measured if k == kind}
        main = main_dtypes[kind] = max(flops_by_dtype, key=flops_by_dtype.__getitem__)
        for dtype, rate in repeated.get(kind, {}).items():
            if (kind, dtype) not in measured:
                measured[kind, dtype] = measured[kind, main] * rate / repeated[kind][main]
    rates: dict[str, float] = {}
    for (_, dtype), rate in measured.items():
        rates[dtype] = max(rates.get(dtype, 0.0), rate)
    fractions = {f"{kind} {dtype}": rate / rates[dtype] for (kind, dtype), rate in measured.items()}
    return rates, fractions | {
        kind: fractions[f"{kind} {main}"] for kind, main in main_dtypes.items()
    }


def _compute_memory_rates(
    moved: dict[str, list[float]], repeated: dict[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the bandwidth in the fastest dtype, and the fraction that each dtype reaches.

    Operators on integers or on several dtypes get the entry "memory", the mean of all operators.
    """
    known = {dtype: total for dtype, total in moved.items() if dtype in DTYPES}
    rates = {dtype: nbytes / seconds for dtype, (nbytes, seconds) in known.items()}
    if known:
        main = max(known, key=lambda dtype: known[dtype][0])
        for dtype, rate in repeated.items():
            rates.setdefault(dtype, rates[main] * rate / repeated[main])
    nbytes, seconds = (sum(part) for part in zip(*moved.values(), strict=True))
    fastest = max(*rates.values(), nbytes / seconds, 0.0)
    fractions = {f"memory {dtype}": rate / fastest for dtype, rate in rates.items()}
    return fastest, {**fractions, "memory": nbytes / seconds / fastest}


def _compute_repeated_rates(
    totals_of_ranks: list[dict[tuple[str, str], list[float]]],
) -> dict[str, dict[str, float]]:
    """Sum the repeated operators over all ranks, and return their rates by kind and dtype."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for totals in totals_of_ranks:
        for (kind, dtype), (work, seconds) in totals.items():
            total = sums[kind].setdefault(dtype, [0.0, 0.0])
            total[0] += work
            total[1] += seconds
    return {
        kind: {dtype: work / seconds for dtype, (work, seconds) in by_dtype.items()}
        for kind, by_dtype in sums.items()
    }


def _fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / bandwidth to (bytes, seconds) by least squares.

    If the latency or the slope would be negative, the line goes through the origin.
    """
    sizes, seconds = zip(*points, strict=True)
    if len(set(sizes)) > 1:
        slope, latency = statistics.linear_regression(sizes, seconds)
        if slope > 0 and latency >= 0:
            return latency, 1 / slope
    return 0.0, sum(sizes) / sum(seconds)


def make_hardware(rates: dict[str, Any]) -> Hardware:
    """Make a `Hardware` record from measured rates.

    A link that was not measured gets the rates of the other link, if they were measured.
    """
    values = dict(rates)
    for link, other in (("in_node", "between_nodes"), ("between_nodes", "in_node")):
        for rate, default in (("latency", 0.0), ("bandwidth", float(2**30))):
            values.setdefault(f"{link}_{rate}", rates.get(f"{other}_{rate}", default))
    values["fractions"] = dict.fromkeys(KINDS, 1.0) | rates["fractions"]
    sources = dict.fromkeys(rates, "measured")
    return Hardware(name="measured", memory_bytes=float(2**30), sources=sources, **values)


def _solve_host_or_overlap(
    rates: dict[str, Any], work: StepWork, seconds: float
) -> dict[str, float]:
    """Find the `host_seconds` or the `overlap` with which the planned step takes `seconds`."""
    record = make_hardware(rates)
    planned = plan_work_time(work, record).seconds
    if seconds >= planned and not record.host_ahead:
        return {"host_seconds": (seconds - planned) / (work.launches() + work.messages())}
    hideable = planned - plan_work_time(work, replace(record, overlap=1.0)).seconds
    return {"overlap": min(max((planned - seconds) / hideable, 0.0), 1.0) if hideable > 0 else 0.0}


def _time_launches(step: Callable[[], Any]) -> float:
    """Return the median seconds that the host takes per launch. The device is not synchronised."""
    with _LaunchTimer() as timer:
        step()
    return statistics.median(timer.seconds)


class _LaunchTimer(WorkCounter):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        out = func(*args, **kwargs)
        self.seconds.append(time.perf_counter() - start)
        return out


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
