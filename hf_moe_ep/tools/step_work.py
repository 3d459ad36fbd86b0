"""The work of a training step on one rank: what its operators compute and move, and what is sent.

    with WorkCounter(chunks=1, experts_train=True) as work:
        work.begin("forward")
        loss = model(**batch).loss
    work.counted().flops()

Every operator that runs is seen, on real tensors as on fake ones: its multiplications and
additions by torch's own formulas, the bytes of the tensors that it reads and writes, and every
collective with the ranks of its group. What only looks at memory is no operator here. The experts'
operators are opened, as `tensor_memory.py` does.

A step is cut into the stretches of `step_plan.py`. What runs in one stretch can overlap there: a
layer's gathers behind its computation. So a stretch is kept apart from others, and one of the
layers in the middle stands for all of them by `times`.

What a collective is for is told from who calls it:

    parameters, gradients   FSDP2, which fetches ahead and reduces behind: behind any computation
    rows                    tokens to their experts and home. Of `chunks` parts all but one travel
                            behind experts; the gradients of rows behind those of experts' weights
    offload                 copies between host and device, of parameters that lie on the host:
                            FSDP2 fetches those ahead, too
    counts, sequence, numbers   before whatever needs them: behind nothing
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.ops.operators import STEPS_INSIDE
from hf_moe_ep.ranks import collectives
from hf_moe_ep.upstream.dispatch_modes import OperatorMode, tensors_in
from hf_moe_ep.upstream.operators import (
    collective_of,
    count_flops,
    group_of,
    is_made_of_others,
    moved_bytes,
    operator_name,
    payload_of,
)

_FSDP = "torch.distributed.fsdp"
_PURPOSES = {
    "start_all_to_all": "rows",
    "start_gathering": "counts",
    "swap_slices": "sequence",
    "all_gather": "sequence",
}
PURPOSES = ("parameters", "gradients", "rows", "counts", "sequence", "numbers", "offload")
# Kinds of an operator that the host computes, and of a copy between it and the device.
ON_HOST, HOST_COPY = "on_host", "host_copy"


@dataclass(frozen=True)
class Operator:
    """One that ran.

    Attributes:
        kind: "matmul"; "grouped": of the experts; "attention"; "memory": it only moves bytes;
            ON_HOST: on tensors that lie there.
        dtype: of what it reads, as "bfloat16"; empty where that is of several, or whole numbers.
        flops, nbytes: of one run; bytes are read and written.
        launches: of the host for one run.
    """

    kind: str
    dtype: str
    flops: int
    nbytes: int
    launches: int = 1


@dataclass(frozen=True)
class Collective:
    """One that ran.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "all_to_all"; HOST_COPY:
            this rank's alone.
        purpose: of PURPOSES.
        ranks: of its group, by their number in the world; `rank`: this one, likewise.
        nbytes: of the whole tensor: what is gathered, scattered or reduced.
        by_rank: of an all-to-all what this rank sends to each or gets from it, whichever is more.
        hideable: the part of it that can travel behind computation.
    """

    kind: str
    purpose: str
    ranks: tuple[int, ...]
    rank: int
    nbytes: int
    by_rank: tuple[int, ...] = ()
    hideable: float = 0.0

    def links(self, node_size: int) -> tuple[float, float]:
        """Count the bytes that this rank sends inside its node, and to other nodes.

        A gather over several nodes crosses each link between them once, and the ranks of a node
        share that; inside it all that is not a rank's own arrives. A reduction is a scatter and a
        gather.
        """
        node = self.rank // node_size
        if self.kind == "all_to_all":
            peers = list(zip(self.ranks, self.by_rank, strict=True))
            near = sum(n for r, n in peers if r != self.rank and r // node_size == node)
            far = sum(n for r, n in peers if r // node_size != node)
            return float(near), float(far)
        twice = 2 if self.kind == "all_reduce" else 1
        size, nodes = len(self.ranks), len({rank // node_size for rank in self.ranks})
        here = sum(rank // node_size == node for rank in self.ranks)
        inside = twice * self.nbytes * (size - 1) / size if here > 1 else 0.0
        return inside, twice * self.nbytes * (nodes - 1) / nodes / here

    def crosses(self, node_size: int) -> bool:
        """Tell whether ranks of several nodes take part."""
        return len({rank // node_size for rank in self.ranks}) > 1


@dataclass(frozen=True)
class Stretch:
    """What ran between two marks, each kind with how often it ran.

    Numbers of a plan of many layers go on in a straight line from those of a few. An operator over
    all parameters, as an optimizer's, is then there a negative number of times as it is for few
    layers, and as often more as it is for one layer more: sums are right.

    Attributes:
        times: stretches like this one.
    """

    operators: tuple[tuple[Operator, int], ...]
    collectives: tuple[tuple[Collective, int], ...]
    times: int = 1


@dataclass(frozen=True)
class StepWork:
    """The work of a step on one rank, by stretch, in their order."""

    stretches: Mapping[str, Stretch] = field(default_factory=dict)

    def flops(self, kind: str | None = None) -> int:
        """Sum the operations of a kind of operators; None: of all."""
        return self._sum(lambda one: one.flops if kind in (None, one.kind) else 0)

    def nbytes(self) -> int:
        """Sum what operators read and write."""
        return self._sum(lambda one: one.nbytes)

    def launches(self) -> int:
        """Count what the host launches, collectives without."""
        return self._sum(lambda one: one.launches)

    def messages(self) -> int:
        """Count collectives."""
        return sum(
            number * stretch.times
            for stretch in self.stretches.values()
            for _, number in stretch.collectives
        )

    def sent(self, purpose: str, node_size: int) -> tuple[float, float]:
        """Sum the bytes that this rank sends for a purpose: inside its node, to others."""
        inside = outside = 0.0
        for stretch in self.stretches.values():
            for one, number in stretch.collectives:
                if one.purpose == purpose:
                    links = one.links(node_size)
                    inside += number * stretch.times * links[0]
                    outside += number * stretch.times * links[1]
        return inside, outside

    def _sum(self, of: Callable[[Operator], int]) -> int:
        return sum(
            number * stretch.times * of(one)
            for stretch in self.stretches.values()
            for one, number in stretch.operators
        )


class WorkCounter(OperatorMode):
    """A mode that counts the work of what runs; see the module.

    Args:
        chunks: `dispatch_chunks` of the model.
        experts_train: their weights or their adapters do.
        grouped: products of all experts are one launch, as kernels of a GPU compute them.
    """

    def __init__(
        self, *, chunks: int = 1, experts_train: bool = True, grouped: bool = False
    ) -> None:
        super().__init__()
        self.chunks, self.experts_train, self._grouped = chunks, experts_train, grouped
        self._is_on_host: Callable[[Any], bool] = lambda _: False
        self._operators: dict[str, list[Operator]] = {}
        self._collectives: dict[str, list[Collective]] = {}
        self.begin("before")

    def tell_host_apart(self, is_on_host: Callable[[Any], bool]) -> None:
        """Ask whether the host has what an operator is given; it computes that one then."""
        self._is_on_host = is_on_host

    def begin(self, stretch: str) -> None:
        """Begin a stretch of what runs; the name of an earlier one goes on with it."""
        self._now = self._operators.setdefault(stretch, [])
        self._sent = self._collectives.setdefault(stretch, [])

    def counted(self) -> StepWork:
        """Return what ran since the first `begin`."""
        return StepWork(
            {
                name: Stretch(
                    tuple(Counter(operators).items()),
                    tuple(Counter(self._collectives[name]).items()),
                )
                for name, operators in self._operators.items()
                if name != "before"
            }
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # It comes again with the parts of this rank.
            return NotImplemented
        kwargs = kwargs or {}
        inside = STEPS_INSIDE.get(func)
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        kind = collective_of(func)
        if kind is not None:
            one = self._collective(kind, func, args)
            out = self.run_collective(func, args, kwargs)
            self.note(one, func, args)
            return out
        if is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = self.run(func, args, kwargs)
        flops = count_flops(func, args, kwargs, out)
        nbytes = moved_bytes(func, args, kwargs, out)
        if flops or nbytes:
            ran = _operator(func, args, flops, nbytes)
            self.note(replace(ran, kind=ON_HOST) if self._is_on_host(args) else ran, func, args)
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; whoever times them does so here."""
        return func(*args, **kwargs)

    def run_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective, likewise."""
        return func(*args, **kwargs)

    def note(self, one: Operator | Collective, func: Any, args: tuple[Any, ...]) -> None:
        """Count what has run, on what it was given."""
        if isinstance(one, Operator):
            self._now.append(one)
        else:
            self._sent.append(one)

    def note_copy(self, nbytes: int) -> None:
        """Count a copy between host and device."""
        me = dist.get_rank()
        self._sent.append(Collective(HOST_COPY, "offload", (me,), me, nbytes, hideable=1.0))

    def take(self, since: int) -> list[Operator]:
        """Take back the operators of this stretch from the `since`-th on."""
        taken = self._now[since:]
        del self._now[since:]
        return taken

    @property
    def number(self) -> int:
        """Operators of this stretch so far."""
        return len(self._now)

    def stand_for(self, ran: Mapping[int, list[Operator]], sizes: Iterable[int]) -> None:
        """Add the operators of experts of `sizes` pairs each, by those of the sizes that `ran`.

        What an operator computes and moves goes on in a straight line over the pairs: an expert's
        matrices, and so much for each pair.
        """
        least, most = min(ran), max(ran)
        times = Counter(sizes)
        for place, (low, high) in enumerate(zip(ran[least], ran[most], strict=True)):
            assert (low.kind, low.dtype) == (high.kind, high.dtype), (place, low, high)
            span = max(most - least, 1)
            of_size = {
                size: replace(
                    low,
                    flops=low.flops + (high.flops - low.flops) * (size - least) // span,
                    nbytes=low.nbytes + (high.nbytes - low.nbytes) * (size - least) // span,
                )
                for size in times
            }
            if self._grouped:
                flops = sum(number * of_size[size].flops for size, number in times.items())
                nbytes = sum(number * of_size[size].nbytes for size, number in times.items())
                self._now.append(replace(low, flops=flops, nbytes=nbytes))
            else:
                for size, number in times.items():
                    self._now += [of_size[size]] * number

    def _collective(self, kind: str, func: Any, args: tuple[Any, ...]) -> Collective:
        group = group_of(func, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        purpose, hideable = self._purpose(kind)
        nbytes = payload_of(func, args)
        by_rank: tuple[int, ...] = ()
        if kind == "all_to_all":
            out, rows, _, receives, sends, *_ = args
            by_rank = tuple(
                max(pair)
                for pair in zip(
                    _by_rank(rows, sends, len(ranks)),
                    _by_rank(out, receives, len(ranks)),
                    strict=True,
                )
            )
        return Collective(kind, purpose, ranks, dist.get_rank(), nbytes, by_rank, hideable)

    def _purpose(self, kind: str) -> tuple[str, float]:
        """Tell what a collective is for, and what part of it can travel behind computation."""
        names = []
        purpose = "numbers"
        for module, name in _callers():
            names.append(name)
            if module.startswith(_FSDP):
                return ("parameters" if kind == "all_gather" else "gradients"), 1.0
            if module == collectives.__name__ and purpose == "numbers":
                purpose = _PURPOSES.get(name, purpose)
        if purpose != "rows":
            return purpose, 0.0
        if "send_row_grads" in names and self.experts_train:
            return purpose, 1.0
        return purpose, (self.chunks - 1) / self.chunks


def of_more_layers(few: list[StepWork], numbers: tuple[int, int], layers: int) -> StepWork:
    """Go on in a straight line from what models of `numbers` of layers do.

    Stretches of layers are those of the ends of the larger model, and one in its middle as often
    as there are layers in between; others grow with each layer as they do between both.
    """
    first, second = few
    ends = dict(second.stretches)
    found: dict[str, Stretch] = {}
    for name, stretch in ends.items():
        before, layer, number = name.rpartition("layer ")
        if not layer:
            other, steps = first.stretches[name], layers - numbers[0]
            found[name] = Stretch(
                _on_a_line(other.operators, stretch.operators, steps),
                _on_a_line(other.collectives, stretch.collectives, steps),
            )
        elif 2 <= int(number) < numbers[1] - 2:
            found[name] = replace(stretch, times=layers - numbers[0])
        elif int(number) >= numbers[1] - 2:
            found[f"{before}layer {int(number) + layers - numbers[1]}"] = stretch
        else:
            found[name] = stretch
    return StepWork(found)


def _on_a_line(first: Any, second: Any, steps: int) -> Any:
    """Return `first + steps * (second - first)` of numbers of things."""
    at_first, at_second = dict(first), dict(second)
    found = {
        one: at_first.get(one, 0) + steps * (at_second.get(one, 0) - at_first.get(one, 0))
        for one in {**at_first, **at_second}
    }
    return tuple((one, number) for one, number in found.items() if number)


def _operator(func: Any, args: tuple[Any, ...], flops: int, nbytes: int) -> Operator:
    given = tensors_in(args)
    if not flops:
        kinds = {x.dtype for x in given if x.is_floating_point()}
        name = str(kinds.pop()).removeprefix("torch.") if len(kinds) == 1 else ""
        return Operator("memory", name, 0, nbytes)
    # The last one: the first may be what is added, in a wider dtype.
    dtype = str(given[-1].dtype).removeprefix("torch.")
    if "attention" in operator_name(func):
        return Operator("attention", dtype, flops, nbytes)
    return Operator("grouped" if _is_of_experts() else "matmul", dtype, flops, nbytes)


def _is_of_experts() -> bool:
    """Tell whether the experts' path called the operator that is dispatched now."""
    return any(module == torch_mlp.__name__ for module, _ in _callers())


def _callers() -> Iterator[tuple[str, str]]:
    """Yield module and name of every function that runs, the innermost one first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back


def _by_rank(rows: Any, counts: list[int], ranks: int) -> list[int]:
    """Count the bytes of each rank's part of an all-to-all."""
    nbytes = rows.numel() * rows.element_size()
    if not counts:
        return [nbytes // ranks] * ranks
    of_row = nbytes // max(sum(counts), 1)
    return [count * of_row for count in counts]
