"""Measure the rates of `hardware.py` on the machine that is there, by steps of a real model.

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rates = measure_rates(model, step, node_size=8)     # on every rank, behind apply_ep_fsdp2
    if torch.distributed.get_rank() == 0:
        Path("rates.json").write_text(json.dumps(rates, indent=2))

Some steps are timed as they are. Then one runs with every operator and collective timed by itself:
the device is waited for before and behind it, and ranks meet in front of each collective, so that
none is timed while it waits for a late one. Rates are what was done over the time that it took:

    matmul_flops        by dtype; products of experts and attention are fractions of it
    memory_bandwidth    of operators that move LARGE bytes or more
    links               a straight line through times of collectives over their bytes
    host_seconds        on a GPU half of all launches take longer; on a CPU, which nobody is ahead
                        of, what a whole step takes beyond all of the above
    overlap             what a whole step takes less than the sum of the above, of what could hide

Of each kind of product the largest is timed in other dtypes too, for those that the step does not
have: how much slower it is there, all of its kind are taken to be. On one node there is nothing to
say of links between nodes; a record's own numbers stay.
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

from hf_moe_ep.ranks.together import everyone
from hf_moe_ep.tools.hardware import KINDS, PRODUCTS, Hardware
from hf_moe_ep.tools.step_plan import make_counter
from hf_moe_ep.tools.step_time import time_of_work
from hf_moe_ep.tools.step_work import Collective, Operator, StepWork, WorkCounter
from hf_moe_ep.upstream.dispatch_modes import tensors_in
from hf_moe_ep.upstream.operators import group_of, operator_name, work_of

LARGE = 2**16
_DTYPES = (torch.float32, torch.bfloat16)
_WARM_UP = 2


@dataclass(frozen=True)
class Sample:
    """One operator or collective, and the seconds it took."""

    of: Operator | Collective
    seconds: float


class OperatorTimer(WorkCounter):
    """Counts work and times each piece of it alone.

    Attributes:
        samples: in the order in which they ran.
        largest: by kind the product of most operations, with copies of what it was given.
    """

    def __init__(self, like: WorkCounter, device: torch.device) -> None:
        super().__init__(chunks=like.chunks, experts_train=like.experts_train)
        self.samples: list[Sample] = []
        self.largest: dict[str, _Call] = {}
        self._seconds = 0.0
        self._device = device

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _wait_for(self._device)
        start = time.perf_counter()
        out = func(*args, **kwargs)
        _wait_for(self._device)
        self._seconds = time.perf_counter() - start
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
        if isinstance(one, Collective) or one.kind not in PRODUCTS:
            return
        before = self.largest.get(one.kind)
        # What a backward of attention is given is not all of one dtype.
        alike = len({x.dtype for x in tensors_in(args)}) == 1
        backward = "backward" in operator_name(func)
        if alike and not backward and (before is None or one.flops > before.flops):
            copies = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
            self.largest[one.kind] = _Call(func, copies, one.flops)


@dataclass(frozen=True)
class _Call:
    """An operator with what it was given, results not among it."""

    func: Any
    args: tuple[Any, ...]
    flops: int

    def rate(self, dtype: torch.dtype, device: torch.device) -> float:
        """Return operations per second, in another dtype."""
        # Of several overloads the one without a place for the result.
        func = self.func.overloadpacket
        args = [x.to(dtype) if isinstance(x, Tensor) else x for x in self.args]
        seconds = []
        for _ in range(15):
            _wait_for(device)
            start = time.perf_counter()
            func(*args)
            _wait_for(device)
            seconds.append(time.perf_counter() - start)
        return self.flops / statistics.median(seconds)


def measure_rates(
    model: nn.Module, step: Callable[[], Any], *, node_size: int, repeat: int = 5
) -> dict[str, Any]:
    """Return fields of `Hardware` as they were measured here; every rank calls it, all get it.

    Args:
        model: sharded; `step` trains it.
        step: forward, backward and optimizer of one micro-batch.
        node_size: ranks of a node.
        repeat: steps that are timed as they are.
    """
    device = next(model.parameters()).device
    for _ in range(_WARM_UP):
        step()
    seconds = [timed(step, device) for _ in range(repeat)]
    timer = OperatorTimer(make_counter(model), device)
    timer.begin("all")
    with timer:
        step()
    other = {
        kind: {str(dtype).removeprefix("torch."): call.rate(dtype, device) for dtype in _DTYPES}
        for kind, call in timer.largest.items()
    }
    launched = _launched(make_counter(model), step) if device.type == "cuda" else 0.0
    mine = timer.samples, other, statistics.median(seconds), launched
    told = everyone("measuring rates", lambda: mine)
    return fit(
        [sample for samples, *_ in told for sample in samples],
        timer.counted(),
        seconds=max(one[2] for one in told),
        node_size=node_size,
        alone=_mean_rates([one[1] for one in told]),
        launched=statistics.mean(one[3] for one in told),
        host_ahead=device.type == "cuda",
    )


def fit(
    samples: Iterable[Sample],
    work: StepWork,
    *,
    seconds: float,
    node_size: int,
    alone: dict[str, dict[str, float]] | None = None,
    launched: float = 0.0,
    host_ahead: bool = False,
) -> dict[str, Any]:
    """Make rates of samples.

    Args:
        samples: of all ranks.
        work: of one rank's step, all of it in one stretch; `seconds`: of that step as it runs.
        alone: by kind of product and dtype the rate of one of them.
        launched: seconds of the host for an operator, where it goes ahead of a device.

    Raises:
        ValueError: no products, or no large operators among the samples.
    """
    found = list(samples)
    flops: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    moved = [0.0, 0.0]
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
            moved[0] += of.nbytes
            moved[1] += one.seconds
    if not flops or not moved[1]:
        raise ValueError(
            f"{len(flops)} kinds of products were timed, and {moved[0]:.0f} bytes moved by "
            f"operators of {LARGE} or more; rates need some of both: measure a larger batch"
        )
    rates, fractions = _products(flops, alone or {})
    result: dict[str, Any] = {
        "matmul_flops": rates,
        "memory_bandwidth": moved[0] / moved[1],
        "node_size": node_size,
        "host_ahead": host_ahead,
        "host_seconds": launched,
        "overlap": 0.0,
        "fractions": {**fractions, "memory": 1.0},
    }
    for link, points in links.items():
        if points:
            latency, bandwidth = _line(points)
            result[f"{link}_latency"], result[f"{link}_bandwidth"] = latency, bandwidth
            result["fractions"][link] = 1.0
    return result | _rest(result, work, seconds)


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Time one step that all ranks begin together."""
    if dist.is_initialized():
        dist.barrier()
    _wait_for(device)
    start = time.perf_counter()
    step()
    _wait_for(device)
    return time.perf_counter() - start


def _products(
    flops: dict[tuple[str, str], list[float]], alone: dict[str, dict[str, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the rate of each dtype's fastest kind, and the fractions of it that kinds reach."""
    reached: dict[tuple[str, str], float] = {
        of: done / seconds for of, (done, seconds) in flops.items() if seconds
    }
    mains = {}
    for kind in {kind for kind, _ in reached}:
        of_kind = {dtype: flops[kind, dtype][0] for k, dtype in reached if k == kind}
        main = mains[kind] = max(of_kind, key=of_kind.__getitem__)
        for dtype, rate in alone.get(kind, {}).items():
            if (kind, dtype) not in reached:
                reached[kind, dtype] = reached[kind, main] * rate / alone[kind][main]
    rates: dict[str, float] = {}
    for (_, dtype), rate in reached.items():
        rates[dtype] = max(rates.get(dtype, 0.0), rate)
    fractions = {f"{kind} {dtype}": rate / rates[dtype] for (kind, dtype), rate in reached.items()}
    return rates, fractions | {kind: fractions[f"{kind} {main}"] for kind, main in mains.items()}


def _mean_rates(told: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Average rates over the ranks that had such a product."""
    kinds = {kind for one in told for kind in one}
    return {
        kind: {
            str(dtype).removeprefix("torch."): statistics.mean(
                one[kind][str(dtype).removeprefix("torch.")] for one in told if kind in one
            )
            for dtype in _DTYPES
        }
        for kind in kinds
    }


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / bandwidth by least squares, neither of them negative."""
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
    """Make a record of measured rates alone; a link that was not measured is like the other."""
    known = dict(rates)
    for link, other in (("in_node", "between_nodes"), ("between_nodes", "in_node")):
        for of, alone in (("latency", 0.0), ("bandwidth", float(2**30))):
            known.setdefault(f"{link}_{of}", rates.get(f"{other}_{of}", alone))
    known["fractions"] = dict.fromkeys(KINDS, 1.0) | rates["fractions"]
    sources = dict.fromkeys(rates, "measured")
    return Hardware(name=name, memory_bytes=float(2**30), sources=sources, **known)


def _rest(rates: dict[str, Any], work: StepWork, seconds: float) -> dict[str, float]:
    """Find what explains the seconds of a whole step: the host's time, or what overlaps."""
    record = record_of(rates)
    alone = time_of_work(work, record).seconds
    if seconds >= alone and not record.host_ahead:
        return {"host_seconds": (seconds - alone) / (work.launches() + work.messages())}
    hideable = alone - time_of_work(work, replace(record, overlap=1.0)).seconds
    return {"overlap": min(max((alone - seconds) / hideable, 0.0), 1.0) if hideable > 0 else 0.0}


def _launched(counter: WorkCounter, step: Callable[[], Any]) -> float:
    """Time what the host takes for half of all operators of a step, at most, waiting for none."""
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
