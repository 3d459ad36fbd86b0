"""Count the work of a training step on one rank: operators and collectives.

    with WorkCounter(chunks=1, experts_train=True) as work:
        work.begin("forward")
        loss = model(**batch).loss
    work.counted().flops()

The counter sees every operator, on real and on fake tensors: its FLOPs by torch's own formulas
(torch.utils.flop_counter), the bytes that it reads and writes, and every collective with the ranks
of its group. Views are not counted. The operators of the experts are opened, so that the operators
inside are counted.

A step is cut into the stretches of `counted.py`. Only what runs in one stretch can overlap, as a
layer's gathers overlap its computation, so each stretch is kept by itself.

The caller of a collective tells its purpose, and how much of it can overlap computation:

    parameters, gradients       FSDP2 prefetches and reduces: all of it, with any computation
    rows                        tokens sent to experts and back: all but one of `chunks` parts
                                overlap experts; gradients of rows overlap those of the weights
    offload                     copies between host and device, which FSDP2 prefetches: all of it
    counts, sequence, numbers   needed at once: none of it
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
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
# The kind of an operator that runs on the host, and of a copy between host and device.
ON_HOST, HOST_COPY = "on_host", "host_copy"


@dataclass(frozen=True)
class Operator:
    """An operator that ran.

    Attributes:
        kind: "matmul"; "grouped", a product of the experts; "attention"; "memory", which only
            moves bytes; or ON_HOST, on tensors of the host.
        dtype: as "bfloat16": of a product the dtype of its factors, else the dtype of the inputs;
            empty for several dtypes or integers.
        flops, nbytes: of one run; bytes are those read and written.
        launches: kernel launches of one run.
    """

    kind: str
    dtype: str
    flops: int
    nbytes: int
    launches: int = 1


@dataclass(frozen=True)
class Collective:
    """A collective that ran.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "all_to_all"; HOST_COPY
            is a copy of this rank alone.
        purpose: one of PURPOSES.
        ranks: the global ranks of its group; `rank` is this one.
        nbytes: of the whole tensor that is gathered, scattered or reduced.
        by_rank: for an all-to-all, the bytes sent to or received from each rank, the larger of
            both.
        hideable: the fraction that can overlap computation.
    """

    kind: str
    purpose: str
    ranks: tuple[int, ...]
    rank: int
    nbytes: int
    by_rank: tuple[int, ...] = ()
    hideable: float = 0.0

    def links(self, node_size: int) -> tuple[float, float]:
        """Return the bytes that this rank sends inside its node, and to other nodes.

        A gather over several nodes crosses each link between nodes once, shared by the ranks of a
        node. Inside the node a rank receives everything but its own part. An all-reduce is a
        reduce-scatter and an all-gather.

        Example: an all-gather of 800 bytes over 8 ranks on two nodes of 4: 700 bytes arrive inside
        the node, and the other node's half crosses by four links: (700, 100).
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
        """Return True if the group has ranks on several nodes."""
        return len({rank // node_size for rank in self.ranks}) > 1


@dataclass(frozen=True)
class Stretch:
    """The operators and collectives of one stretch, each with the number of times that it ran.

    Attributes:
        times: the number of stretches like this one, which it stands for.
    """

    operators: tuple[tuple[Operator, int], ...]
    collectives: tuple[tuple[Collective, int], ...]
    times: int = 1


@dataclass(frozen=True)
class StepWork:
    """The work of a step on one rank, by stretch, in the order of the step."""

    stretches: Mapping[str, Stretch] = field(default_factory=dict)

    def flops(self, kind: str | None = None) -> int:
        """Sum the FLOPs of all operators, or of those of one kind."""
        return self._sum(lambda one: one.flops if kind in (None, one.kind) else 0)

    def nbytes(self) -> int:
        """Sum the bytes that operators read and write."""
        return self._sum(lambda one: one.nbytes)

    def launches(self) -> int:
        """Count the kernel launches, without collectives."""
        return self._sum(lambda one: one.launches)

    def messages(self) -> int:
        """Count the collectives."""
        return sum(
            number * stretch.times
            for stretch in self.stretches.values()
            for _, number in stretch.collectives
        )

    def sent(self, purpose: str, node_size: int) -> tuple[float, float]:
        """Sum the bytes that this rank sends for a purpose: inside its node, and to others."""
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
    """A mode that counts the work of the operators that run; see the module docstring.

    Args:
        chunks: `dispatch_chunks` of the model.
        experts_train: True if the experts' weights or adapters are trained.
    """

    def __init__(self, *, chunks: int = 1, experts_train: bool = True) -> None:
        super().__init__()
        self.chunks, self.experts_train = chunks, experts_train
        self._is_on_host: Callable[[Any], bool] = lambda _: False
        self._operators: dict[str, list[Operator]] = {}
        self._collectives: dict[str, list[Collective]] = {}
        self.begin("before")

    def set_host_test(self, is_on_host: Callable[[Any], bool]) -> None:
        """Set the function that tells whether the host runs an operator with such arguments."""
        self._is_on_host = is_on_host

    def begin(self, stretch: str) -> None:
        """Begin a stretch. A stretch that was begun before is continued."""
        self._now = self._operators.setdefault(stretch, [])
        self._sent = self._collectives.setdefault(stretch, [])

    def counted(self) -> StepWork:
        """Return the work since the first `begin`."""
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
            # The operator is dispatched again with this rank's shards.
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
        """Run an operator. Subclasses time it here."""
        return func(*args, **kwargs)

    def run_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective. Subclasses time it here."""
        return func(*args, **kwargs)

    def note(self, one: Operator | Collective, func: Any, args: tuple[Any, ...]) -> None:
        """Count an operator or collective that has run with `args`."""
        if isinstance(one, Operator):
            self._now.append(one)
        else:
            self._sent.append(one)

    def note_copy(self, nbytes: int) -> None:
        """Count a copy between host and device."""
        me = dist.get_rank()
        self._sent.append(Collective(HOST_COPY, "offload", (me,), me, nbytes, hideable=1.0))

    def add(self, operators: Iterable[Operator]) -> None:
        """Count operators that did not run."""
        self._now += operators

    def run_uncounted(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function without counting its operators."""
        since = self.number
        out = function(*args, **kwargs)
        self.take(since)
        return out

    def take(self, since: int) -> list[Operator]:
        """Remove and return the operators of this stretch from number `since` on."""
        taken = self._now[since:]
        del self._now[since:]
        return taken

    @property
    def number(self) -> int:
        """The number of operators of this stretch so far."""
        return len(self._now)

    def add_for_sizes(self, ran: Mapping[int, list[Operator]], sizes: Iterable[int]) -> None:
        """Count the operators of experts with `sizes` pairs each, from those that `ran`.

        FLOPs and bytes of an operator are linear in the pairs: an expert's matrices, and so much
        per pair. With 100 bytes for 2 pairs and 160 for 8 pairs, 5 pairs take 130 bytes.
        """
        least, most = min(ran), max(ran)
        times = Counter(sizes)
        for index, (low, high) in enumerate(zip(ran[least], ran[most], strict=True)):
            assert (low.kind, low.dtype) == (high.kind, high.dtype), (index, low, high)
            span = max(most - least, 1)
            for size, number in times.items():
                flops = low.flops + (high.flops - low.flops) * (size - least) // span
                nbytes = low.nbytes + (high.nbytes - low.nbytes) * (size - least) // span
                self._now += [replace(low, flops=flops, nbytes=nbytes)] * number

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
        """Return the purpose of a collective, and the fraction that can overlap computation."""
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


def _operator(func: Any, args: tuple[Any, ...], flops: int, nbytes: int) -> Operator:
    given = [x for x in tensors_in(args) if x.is_floating_point()]
    if not flops:
        dtypes = {x.dtype for x in given}
        return Operator("memory", _name(dtypes.pop()) if len(dtypes) == 1 else "", 0, nbytes)
    # The factors of a product are its narrowest inputs. Others may be wider: the addend of addmm,
    # and the log-sum-exp in fp32 that the backward of attention reads beside bf16 factors.
    dtype = _name(min((x.dtype for x in given), key=lambda dtype: dtype.itemsize))
    if "attention" in operator_name(func):
        return Operator("attention", dtype, flops, nbytes)
    return Operator("grouped" if _is_of_experts() else "matmul", dtype, flops, nbytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_of_experts() -> bool:
    """Return True if the torch path of the experts called the current operator."""
    return any(module == torch_mlp.__name__ for module, _ in _callers())


def _callers() -> Iterator[tuple[str, str]]:
    """Yield module and name of every function on the stack, the innermost one first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back


def _by_rank(rows: Any, counts: list[int], ranks: int) -> list[int]:
    """Return the bytes of each rank's part of an all-to-all."""
    nbytes = rows.numel() * rows.element_size()
    if not counts:
        return [nbytes // ranks] * ranks
    of_row = nbytes // max(sum(counts), 1)
    return [count * of_row for count in counts]
