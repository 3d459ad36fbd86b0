"""Measure the rates of `hardware.py` on this machine, from steps of a real model.

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rates = measure_rates(model, step, node_size=8)     # on every rank, after apply_ep_fsdp2
    if torch.distributed.get_rank() == 0:
        Path("rates.json").write_text(json.dumps(rates, indent=2))

Some steps are timed as they are. Then STEPS steps run with every operator and collective timed
alone: the device is synchronised before and after each, and ranks meet in a barrier before each
collective, so that no rank is timed while it waits for another. A rate is work over time:

    matmul_flops        per dtype; experts and attention are fractions of it
    memory_bandwidth    from operators that move LARGE bytes or more
    links               a straight line through (bytes, seconds) of the collectives
    host_seconds        on a GPU the median launch; on a CPU, where launches cannot run ahead, the
                        seconds of a whole step that the other rates do not explain
    overlap             the part of the overlappable communication that a whole step hides

A step has few dtypes. So the first of these steps runs each product, and each operator that moves
LARGE bytes or more, again in each of DTYPES. The ratio of their total seconds gives the rates of
dtypes that the step itself does not use. With one node nothing is measured between nodes, and the
numbers of the record are kept.
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
from hf_moe_ep.planner.seconds import time_of_work
from hf_moe_ep.planner.work import Collective, Operator, StepWork, WorkCounter
from hf_moe_ep.ranks.together import everyone
from hf_moe_ep.upstream.dispatch_modes import tensors_in
from hf_moe_ep.upstream.operators import group_of, operator_name, work_of

LARGE = 2**16
DTYPES = ("float32", "bfloat16")
STEPS = 3
_WARM_UP = 2


@dataclass(frozen=True)
class Sample:
    """An operator or collective, and its seconds."""

    of: Operator | Collective
    seconds: float


class OperatorTimer(WorkCounter):
    """Count the work of a step, and time every operator and collective alone.

    Attributes:
        samples: in the order of the step.
        again: by kind and dtype, the FLOPs or bytes of operators that ran again, and their seconds.
    """

    def __init__(self, like: WorkCounter, device: torch.device, *, runs_again: bool) -> None:
        super().__init__(chunks=like.chunks, experts_train=like.experts_train)
        self.samples: list[Sample] = []
        self._runs_again = runs_again
        self._kwargs: dict[str, Any] = {}
        self.again: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._seconds = 0.0
        self._device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, self._seconds = self._timed(func, args, kwargs)
        self._kwargs = kwargs
        return out

    def run_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _wait_for(self._device)
        group_of(func, args).barrier().wait()
        start = time.perf_counter()
        out = func(*args, **kwargs)
        work_of(out).wait()
        _wait_for(self._device)
        self._seconds = time.perf_counter() - start
        return out

    def note(self, one: Operator | Collective, func: Any, args: tuple[Any, ...]) -> None:
        super().note(one, func, args)
        self.samples.append(Sample(one, self._seconds))
        if isinstance(one, Collective) or not self._runs_again:
            return
        if not _can_run_again(one, func, args, self._kwargs):
            return
        kwargs = {name: value for name, value in self._kwargs.items() if name != "out"}
        for dtype in DTYPES:
            copies = [_copy_in(x, dtype) for x in args]
            # The first run in a dtype is a warm-up.
            for _ in range(2):
                # The packet chooses the overload without an `out` argument.
                seconds = self._timed(func.overloadpacket, copies, kwargs)[1]
            done = self.again[one.kind, dtype]
            done[0] += one.flops or one.nbytes * _itemsize(dtype) / _itemsize(one.dtype)
            done[1] += seconds

    def _timed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, float]:
        _wait_for(self._device)
        start = time.perf_counter()
        out = func(*args, **kwargs)
        _wait_for(self._device)
        return out, time.perf_counter() - start


def _can_run_again(one: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator can run again with its inputs in another dtype.

    Left out: the backward of attention, which reads fp32 sums beside its factors; operators with a
    dtype argument; lists of tensors; FSDP2's own operators.
    """
    floats = {x.dtype for x in tensors_in(args) if x.is_floating_point()}
    return (
        func.namespace == "aten"
        and len(floats) == 1
        and one.dtype in DTYPES
        and not any(isinstance(x, list | tuple) and tensors_in(x) for x in args)
        and "dtype" not in kwargs
        and not ("attention" in operator_name(func) and "backward" in operator_name(func))
        and (one.kind in PRODUCTS or (one.nbytes >= LARGE and "out" not in kwargs))
    )


def _copy_in(x: Any, dtype: str) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(getattr(torch, dtype) if x.is_floating_point() else x.dtype, copy=True)


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def measure_rates(
    model: nn.Module, step: Callable[[], Any], *, node_size: int, repeat: int = 5
) -> dict[str, Any]:
    """Measure rates and return them as fields of `Hardware`. Collective: every rank calls it.

    Args:
        model: the sharded model that `step` trains.
        step: runs forward, backward and optimizer of one micro-batch.
        node_size: ranks per node.
        repeat: the number of steps that are timed as they are.
    """
    device = next(model.parameters()).device
    for _ in range(_WARM_UP):
        step()
    seconds = [timed(step, device) for _ in range(repeat)]
    timers = []
    for number in range(STEPS):
        timers.append(OperatorTimer(make_counter(model), device, runs_again=number == 0))
        timers[-1].begin("all")
        with timers[-1]:
            step()
    samples = [sample for timer in timers for sample in timer.samples]
    launched = _launched(make_counter(model), step) if device.type == "cuda" else 0.0
    mine = samples, dict(timers[0].again), statistics.median(seconds), launched
    by_rank = everyone("measuring rates", lambda: mine)
    return fit(
        [sample for found, *_ in by_rank for sample in found],
        timers[0].counted(),
        seconds=max(one[2] for one in by_rank),
        node_size=node_size,
        again=_rates_of([one[1] for one in by_rank]),
        launched=statistics.mean(one[3] for one in by_rank),
        host_ahead=device.type == "cuda",
    )


def fit(
    samples: Iterable[Sample],
    work: StepWork,
    *,
    seconds: float,
    node_size: int,
    again: dict[str, dict[str, float]] | None = None,
    launched: float = 0.0,
    host_ahead: bool = False,
) -> dict[str, Any]:
    """Compute rates from samples.

    Args:
        samples: of all ranks.
        work: the work of one rank's step, in one stretch.
        seconds: of that step when it runs without timers.
        again: by kind and dtype, the rate of operators that ran in every dtype.
        launched: seconds of the host per launch, where the host runs ahead of a device.

    Raises:
        ValueError: no products, or no large operators among the samples.
    """
    found = list(samples)
    flops: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    links: dict[str, list[tuple[float, float]]] = {"in_node": [], "between_nodes": []}
    for one in found:
        of = one.of
        if isinstance(of, Collective):
            if len(of.ranks) > 1:
                inside, outside = of.links(node_size)
                crosses = of.crosses(node_size)
                link = "between_nodes" if crosses else "in_node"
                links[link].append((outside if crosses else inside, one.seconds))
        elif of.kind in PRODUCTS:
            total = flops[of.kind, of.dtype]
            total[0] += of.flops
            total[1] += one.seconds
        elif of.nbytes >= LARGE:
            total = moved[of.dtype]
            total[0] += of.nbytes
            total[1] += one.seconds
    nbytes = sum(done for done, _ in moved.values())
    if not flops or not nbytes:
        raise ValueError(
            f"{len(flops)} kinds of products were timed, and {nbytes:.0f} bytes moved by "
            f"operators of {LARGE} or more; rates need some of both: measure a larger batch"
        )
    rates, fractions = _products(flops, again or {})
    bandwidth, of_memory = _memory(moved, (again or {}).get("memory", {}))
    result: dict[str, Any] = {
        "matmul_flops": rates,
        "memory_bandwidth": bandwidth,
        "node_size": node_size,
        "host_ahead": host_ahead,
        "host_seconds": launched,
        "overlap": 0.0,
        "fractions": {**fractions, **of_memory},
    }
    for link, points in links.items():
        if points:
            latency, bandwidth = _line(points)
            result[f"{link}_latency"], result[f"{link}_bandwidth"] = latency, bandwidth
            result["fractions"][link] = 1.0
    return result | _host_or_overlap(result, work, seconds)


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one step that all ranks begin together."""
    if dist.is_initialized():
        dist.barrier()
    _wait_for(device)
    start = time.perf_counter()
    step()
    _wait_for(device)
    return time.perf_counter() - start


def _products(
    flops: dict[tuple[str, str], list[float]], again: dict[str, dict[str, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the rate of the fastest kind per dtype, and each kind's fraction of it."""
    reached: dict[tuple[str, str], float] = {
        of: done / seconds for of, (done, seconds) in flops.items() if seconds
    }
    mains = {}
    for kind in {kind for kind, _ in reached}:
        of_kind = {dtype: flops[kind, dtype][0] for k, dtype in reached if k == kind}
        main = mains[kind] = max(of_kind, key=of_kind.__getitem__)
        for dtype, rate in again.get(kind, {}).items():
            if (kind, dtype) not in reached:
                reached[kind, dtype] = reached[kind, main] * rate / again[kind][main]
    rates: dict[str, float] = {}
    for (_, dtype), rate in reached.items():
        rates[dtype] = max(rates.get(dtype, 0.0), rate)
    fractions = {f"{kind} {dtype}": rate / rates[dtype] for (kind, dtype), rate in reached.items()}
    return rates, fractions | {kind: fractions[f"{kind} {main}"] for kind, main in mains.items()}


def _memory(
    moved: dict[str, list[float]], again: dict[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the bandwidth in the fastest dtype, and each dtype's fraction of it.

    Operators without one dtype reach the mean of all operators.
    """
    known = {dtype: done for dtype, done in moved.items() if dtype in DTYPES}
    rates = {dtype: done / seconds for dtype, (done, seconds) in known.items()}
    if known:
        main = max(known, key=lambda dtype: known[dtype][0])
        for dtype, rate in again.items():
            rates.setdefault(dtype, rates[main] * rate / again[main])
    nbytes, seconds = (sum(part) for part in zip(*moved.values(), strict=True))
    fastest = max(*rates.values(), nbytes / seconds, 0.0)
    fractions = {f"memory {dtype}": rate / fastest for dtype, rate in rates.items()}
    return fastest, {**fractions, "memory": nbytes / seconds / fastest}


def _rates_of(by_rank: list[dict[tuple[str, str], list[float]]]) -> dict[str, dict[str, float]]:
    """Sum over ranks the operators that ran again, and return rates by kind and dtype."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for one in by_rank:
        for (kind, dtype), (done, seconds) in one.items():
            total = sums[kind].setdefault(dtype, [0.0, 0.0])
            total[0] += done
            total[1] += seconds
    return {
        kind: {dtype: done / seconds for dtype, (done, seconds) in of_kind.items()}
        for kind, of_kind in sums.items()
    }


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / bandwidth by least squares; neither may be negative."""
    mean_x = statistics.mean(x for x, _ in points)
    mean_y = statistics.mean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    latency = mean_y - slope * mean_x
    if slope <= 0 or latency < 0:
        # Through the origin.
        return 0.0, sum(x for x, _ in points) / sum(y for _, y in points)
    return latency, 1 / slope


def record_of(rates: dict[str, Any], name: str = "measured") -> Hardware:
    """Make a record from measured rates; a link that was not measured equals the other one."""
    known = dict(rates)
    for link, other in (("in_node", "between_nodes"), ("between_nodes", "in_node")):
        for of, alone in (("latency", 0.0), ("bandwidth", float(2**30))):
            known.setdefault(f"{link}_{of}", rates.get(f"{other}_{of}", alone))
    known["fractions"] = dict.fromkeys(KINDS, 1.0) | rates["fractions"]
    sources = dict.fromkeys(rates, "measured")
    return Hardware(name=name, memory_bytes=float(2**30), sources=sources, **known)


def _host_or_overlap(rates: dict[str, Any], work: StepWork, seconds: float) -> dict[str, float]:
    """Return the host's seconds per launch, or the overlap, that explain a whole step."""
    record = record_of(rates)
    alone = time_of_work(work, record).seconds
    if seconds >= alone and not record.host_ahead:
        return {"host_seconds": (seconds - alone) / (work.launches() + work.messages())}
    hideable = alone - time_of_work(work, replace(record, overlap=1.0)).seconds
    return {"overlap": min(max((alone - seconds) / hideable, 0.0), 1.0) if hideable > 0 else 0.0}


def _launched(counter: WorkCounter, step: Callable[[], Any]) -> float:
    """Return the median seconds of the host per launch, without synchronising the device."""
    host = _Launches(counter)
    with host:
        step()
    return statistics.median(host.seconds)


class _Launches(WorkCounter):
    def __init__(self, like: WorkCounter) -> None:
        super().__init__(chunks=like.chunks, experts_train=like.experts_train)
        self.seconds: list[float] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        out = func(*args, **kwargs)
        self.seconds.append(time.perf_counter() - start)
        return out


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
