"""Count the work of a training step on one rank: operators and collectives.

    with WorkCounter(chunks=1, experts_train=True) as work:
        work.begin("forward")
        loss = model(**batch).loss
    work.counted().flops()

`WorkCounter` sees every operator, on real and on fake tensors. It counts the FLOPs of an operator
with torch's own formulas (torch.utils.flop_counter), and the bytes that the operator reads and
writes. It records each collective with the ranks of its group. Views are not counted. The steps
inside the operators of the experts run and are counted one by one.

Each phase of a step (`counted.py`) is counted separately, because communication can overlap only
computation of the same phase.

The functions on the call stack show the purpose of a collective, and the purpose determines how
much of the collective can overlap computation. In this table, rows are hidden states of tokens, and
`dispatch_chunks` sends them in `chunks` parts:

    purpose                     the share that can overlap computation
    parameters, gradients       all; FSDP2 gathers and reduces them during any computation
    rows (to experts and back)  all but one of `chunks` parts, during the experts' computation
    gradients of rows           all, while the gradients of the experts' weights are computed
    offload                     all; FSDP2 prefetches its copies between host and device
    counts of rows              nothing; the next operator needs the result
    sequence                    nothing, for the same reason; these collectives exchange slices of a
                                sequence, or keys and values of context parallelism. The exception
                                are shares of heads that are gathered while attention computes an
                                earlier share (`sequence/context.py`): all
    numbers (small all-reduces) nothing, for the same reason
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.ops.operators import STEPS_INSIDE
from hf_moe_ep.planner.fused import Fusion
from hf_moe_ep.ranks import collectives
from hf_moe_ep.sequence import context
from hf_moe_ep.upstream.dispatch_modes import OperatorMode
from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.operators import (
    count_flops,
    count_moved_bytes,
    count_payload_bytes,
    find_collective,
    get_group_of_collective,
    get_operator_name,
    is_made_of_others,
    is_of_fsdp,
)

_FSDP = "torch.distributed.fsdp"
# The purpose of a collective, by the function of `ranks/collectives.py` that starts it.
_PURPOSES = {
    collectives.start_all_to_all.__name__: "rows",
    collectives.start_counts.__name__: "counts",
    collectives.swap_slices.__name__: "sequence",
    collectives.all_gather.__name__: "sequence",
    collectives.start_all_gather.__name__: "sequence",
    collectives.start_swap.__name__: "sequence",
}
# The functions for keys and values of one share of heads, which run during attention to another.
_DURING_ATTENTION = {collectives.start_all_gather.__name__, collectives.start_swap.__name__}
PURPOSES = ("parameters", "gradients", "rows", "counts", "sequence", "numbers", "offload")
# The kind of an operator that runs on the host, and of a copy between host and device.
ON_HOST, HOST_COPY = "on_host", "host_copy"


@dataclass(frozen=True)
class Operator:
    """An operator that ran.

    Attributes:
        kind: "matmul", "grouped" (a product of the experts), "attention", "memory" (the operator
            only moves bytes) or ON_HOST (its tensors are on the host).
        dtype: the dtype of a product's factors or of another operator's inputs, such as "bfloat16";
            empty if the inputs have several dtypes or are integers.
        flops: the FLOPs of one run.
        nbytes: the bytes that one run reads and writes.
        launches: the kernel launches of one run.
        postponed: True if the operator computes gradients of weights while gradients of rows are
            sent.
    """

    kind: str
    dtype: str
    flops: int
    nbytes: int
    launches: int = 1
    postponed: bool = False


@dataclass(frozen=True)
class Collective:
    """A collective that ran.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "all_to_all"; or
            HOST_COPY for a copy between this rank and its host.
        purpose: one of PURPOSES.
        ranks, rank: the global ranks of the group, and this rank.
        nbytes: the bytes of the whole tensor that is gathered, scattered or reduced.
        by_rank: for an all-to-all, the larger number of the bytes sent to each rank and the bytes
            received from it.
        hideable: the fraction of the collective that can overlap computation.
        of_row_grads: True if only postponed operators can overlap it.
    """

    kind: str
    purpose: str
    ranks: tuple[int, ...]
    rank: int
    nbytes: int
    by_rank: tuple[int, ...] = ()
    hideable: float = 0.0
    of_row_grads: bool = False

    def links(self, node_size: int) -> tuple[float, float]:
        """Return the bytes that this rank sends inside its node, and to other nodes.

        A rank receives as many bytes as it sends, so this method counts received bytes. In an
        all-gather over several nodes, the data of other nodes enters a node once, and the node's
        ranks share this traffic equally. Inside its node, a rank receives all parts except its own.
        An all-reduce counts as a reduce-scatter and an all-gather.

        Example: an all-gather of 800 bytes over 8 ranks on two nodes of 4 ranks. A rank receives
        700 bytes inside its node. 400 bytes come from the other node over 4 links, 100 bytes for
        each rank. The result is (700, 100).
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
class Phase:
    """The operators and collectives of one phase, each with the number of times that it ran.

    Attributes:
        times: the number of equal phases for which this phase stands.
    """

    operators: tuple[tuple[Operator, int], ...]
    collectives: tuple[tuple[Collective, int], ...]
    times: int = 1


@dataclass(frozen=True)
class StepWork:
    """The work of a step on one rank; `phases` are in the order of the step."""

    phases: Mapping[str, Phase] = field(default_factory=dict)

    def flops(self, kind: str | None = None) -> int:
        """Sum the FLOPs of all operators, or of the operators of one kind."""
        return self._sum(lambda operator: operator.flops if kind in (None, operator.kind) else 0)

    def nbytes(self) -> int:
        """Sum the bytes that operators read and write."""
        return self._sum(lambda operator: operator.nbytes)

    def launches(self) -> int:
        """Count the kernel launches, without collectives."""
        return self._sum(lambda operator: operator.launches)

    def messages(self) -> int:
        """Count the collectives."""
        return sum(
            number * phase.times
            for phase in self.phases.values()
            for _, number in phase.collectives
        )

    def sent(self, purpose: str, node_size: int) -> tuple[float, float]:
        """Sum the bytes that this rank sends for a purpose inside its node, and to other nodes."""
        inside = outside = 0.0
        for phase in self.phases.values():
            for collective, number in phase.collectives:
                if collective.purpose == purpose:
                    links = collective.links(node_size)
                    inside += number * phase.times * links[0]
                    outside += number * phase.times * links[1]
        return inside, outside

    def _sum(self, amount_of: Callable[[Operator], int]) -> int:
        return sum(
            number * phase.times * amount_of(operator)
            for phase in self.phases.values()
            for operator, number in phase.operators
        )


class WorkCounter(OperatorMode):
    """A dispatch mode that counts the work of operators as the module docstring explains.

    Args:
        chunks: `dispatch_chunks` of the model.
        experts_train: True if the experts' weights or adapters are trained.
        fusion: counts the kernels of compiled layers; None if layers are not compiled.
    """

    def __init__(
        self, *, chunks: int = 1, experts_train: bool = True, fusion: Fusion | None = None
    ) -> None:
        super().__init__()
        self.chunks, self.experts_train, self.fusion = chunks, experts_train, fusion
        self._is_on_host: Callable[[Any], bool] = lambda _: False
        self._operators: dict[str, list[Operator]] = {}
        self._collectives: dict[str, list[Collective]] = {}
        self.begin("before")

    def set_host_test(self, is_on_host: Callable[[Any], bool]) -> None:
        """Set the function that returns True if the host runs an operator with these arguments."""
        self._is_on_host = is_on_host

    def begin(self, phase: str) -> None:
        """Begin a phase, or continue it if it began before."""
        self._phase = phase
        self._operators_now = self._operators.setdefault(phase, [])
        self._collectives_now = self._collectives.setdefault(phase, [])

    def counted(self) -> StepWork:
        """Return the work since the first `begin`."""
        self._add_kernels()
        return StepWork(
            {
                name: Phase(
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
            # DTensor then calls the operator on this rank's shards, and this mode sees that call.
            return NotImplemented
        kwargs = kwargs or {}
        run_steps = STEPS_INSIDE.get(func)
        if run_steps is not None:
            with self, self._pause_fusion():
                return run_steps(*args, **kwargs)
        kind = find_collective(func)
        if kind is not None:
            collective = self._describe_collective(kind, func, args)
            out = self.run_collective(func, args, kwargs)
            self.note(collective, func, args)
            return out
        if is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = self.run(func, args, kwargs)
        flops = count_flops(func, args, kwargs, out)
        nbytes = count_moved_bytes(func, args, kwargs, out)
        if flops or nbytes:
            operator = _describe_operator(func, args, flops, nbytes)
            if self._is_on_host(args):
                operator = replace(operator, kind=ON_HOST)
            if not self._is_fused(
                func, operator, list_tensors_in((args, kwargs)), list_tensors_in(out)
            ):
                self.note(operator, func, args)
        return out

    def _is_fused(
        self, func: Any, operator: Operator, reads: list[Tensor], writes: list[Tensor]
    ) -> bool:
        """Return True if a kernel of a compiled layer contains the operator.

        A kernel never contains operators of FSDP2, even if they run while backward runs a node of a
        layer, because FSDP2 prefetches parameters.
        """
        if self.fusion is None or is_of_fsdp(func):
            return False
        return self.fusion.add(self._phase, operator, reads, writes)

    def _pause_fusion(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.fusion is None else self.fusion.paused()

    def _add_kernels(self) -> None:
        """Count the kernels of compiled layers."""
        for kernel in [] if self.fusion is None else self.fusion.kernels():
            operator = Operator("memory", kernel.dtype, 0, kernel.nbytes, kernel.launches)
            self._operators[kernel.phase].append(operator)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator. Subclasses time it here."""
        return func(*args, **kwargs)

    def run_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective. Subclasses time it here."""
        return func(*args, **kwargs)

    def note(self, item: Operator | Collective, func: Any, args: tuple[Any, ...]) -> None:
        """Count an operator or collective after `func(*args)` has run."""
        if isinstance(item, Operator):
            self._operators_now.append(item)
        else:
            self._collectives_now.append(item)

    def note_copy(self, nbytes: int) -> None:
        """Count a copy between host and device."""
        rank = dist.get_rank()
        copy = Collective(HOST_COPY, "offload", (rank,), rank, nbytes, hideable=1.0)
        self._collectives_now.append(copy)

    def add(self, operators: Iterable[Operator]) -> None:
        """Count operators that the counter did not see."""
        self._operators_now += operators

    def run_uncounted(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function without counting its operators."""
        with self._pause_fusion(), self.take_operators():
            return function(*args, **kwargs)

    @contextmanager
    def take_operators(self) -> Iterator[list[Operator]]:
        """Move the operators that run in the block from this phase into the yielded list."""
        operators: list[Operator] = []
        num_before = len(self._operators_now)
        yield operators
        operators += self._operators_now[num_before:]
        del self._operators_now[num_before:]

    def add_for_sizes(self, ran: Mapping[int, list[Operator]], sizes: Iterable[int]) -> None:
        """Count the operators of experts whose numbers of pairs are `sizes`.

        `ran` maps the number of pairs of each expert that ran to its operators. The FLOPs and bytes
        of other experts are interpolated, because they grow linearly with the number of pairs. If 2
        pairs take 100 bytes and 8 pairs take 160 bytes, 5 pairs take 130 bytes.
        """
        least, most = min(ran), max(ran)
        experts_of_size = Counter(sizes)
        for index, (low, high) in enumerate(zip(ran[least], ran[most], strict=True)):
            assert (low.kind, low.dtype) == (high.kind, high.dtype), (index, low, high)
            span = max(most - least, 1)
            for size, number in experts_of_size.items():
                flops = low.flops + (high.flops - low.flops) * (size - least) // span
                nbytes = low.nbytes + (high.nbytes - low.nbytes) * (size - least) // span
                self._operators_now += [replace(low, flops=flops, nbytes=nbytes)] * number

    def _describe_collective(self, kind: str, func: Any, args: tuple[Any, ...]) -> Collective:
        group = get_group_of_collective(func, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        purpose, hideable = self._find_purpose(kind)
        nbytes = count_payload_bytes(func, args)
        by_rank: tuple[int, ...] = ()
        if kind == "all_to_all":
            out, rows, _, receives, sends, *_ = args
            by_rank = tuple(
                max(pair)
                for pair in zip(
                    _split_bytes_by_rank(rows, sends, len(ranks)),
                    _split_bytes_by_rank(out, receives, len(ranks)),
                    strict=True,
                )
            )
        of_row_grads = purpose == "rows" and hideable == 1.0
        return Collective(
            kind, purpose, ranks, dist.get_rank(), nbytes, by_rank, hideable, of_row_grads
        )

    def _find_purpose(self, kind: str) -> tuple[str, float]:
        """Return the purpose of a collective, and the fraction that can overlap computation."""
        callers = []
        purpose = "numbers"
        for module, name in _iterate_callers():
            callers.append(name)
            if module.startswith(_FSDP):
                return ("parameters" if kind == "all_gather" else "gradients"), 1.0
            if module == collectives.__name__ and purpose == "numbers":
                purpose = _PURPOSES.get(name, purpose)
            if module == context.__name__ and purpose == "rows":  # these rows are keys and values
                purpose = "sequence"
        if purpose != "rows":
            return purpose, 0.0 if _DURING_ATTENTION.isdisjoint(callers) else 1.0
        if "send_row_grads" in callers and self.experts_train:
            return purpose, 1.0
        return purpose, (self.chunks - 1) / self.chunks


def _describe_operator(func: Any, args: tuple[Any, ...], flops: int, nbytes: int) -> Operator:
    inputs = [x for x in list_tensors_in(args) if x.is_floating_point()]
    if not flops:
        dtypes = {x.dtype for x in inputs}
        return Operator(
            "memory", get_dtype_name(dtypes.pop()) if len(dtypes) == 1 else "", 0, nbytes
        )
    # The factors of a product are its narrowest inputs. Other inputs may be wider: the addend of
    # addmm, and the fp32 log-sum-exp that the backward of attention reads with its bf16 factors.
    dtype = get_dtype_name(min((x.dtype for x in inputs), key=lambda dtype: dtype.itemsize))
    if "attention" in get_operator_name(func):
        return Operator("attention", dtype, flops, nbytes)
    return Operator("grouped" if _is_called_by_experts() else "matmul", dtype, flops, nbytes)


def get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_called_by_experts() -> bool:
    """Return True if the torch path of the experts called the current operator."""
    return any(module == torch_mlp.__name__ for module, _ in _iterate_callers())


def _iterate_callers() -> Iterator[tuple[str, str]]:
    """Yield the module and name of every function on the call stack, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back


def _split_bytes_by_rank(rows: Any, counts: list[int], ranks: int) -> list[int]:
    """Return the bytes of each rank's part of an all-to-all. Without counts, parts are equal."""
    nbytes = rows.numel() * rows.element_size()
    if not counts:
        return [nbytes // ranks] * ranks
    row_bytes = nbytes // max(sum(counts), 1)
    return [count * row_bytes for count in counts]
