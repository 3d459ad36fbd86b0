"""Plan the kernels of compiled layers from the operators of uncompiled ones.

A plan runs uncompiled layers, in which each operator reads its inputs from memory and writes its
result to memory. A compiler fuses the operators between two matrix products, which only move bytes,
into one kernel. The kernel reads each input once, and writes only results that another kernel
needs. Backward recomputes results that forward has not written. `Fusion` counts these kernels:

    x -> to fp32 -> square -> mean -> rsqrt -> times x -> to bf16 -> times weight -> product

Uncompiled, this norm of a bf16 tensor of N bytes moves about 20 N bytes in 7 launches. Compiled, it
is one kernel that reads x and writes the input of the product: 2 N bytes. Its backward reads x
again, instead of the results that autograd has saved.

A tensor is written to memory if

- a product, attention, or an operator outside the compiled code makes or reads the tensor;
- one graph makes it and another reads it (a graph ends where the MoE block or a layer begins or
  ends);
- it has at most 1/16 of the size of its operator's largest input, like the sums of rows, because a
  separate kernel may need it.

Each kernel that needs any other tensor recomputes this tensor, and reads the tensors in memory from
which it is computed. A kernel is a series of operators without a product or attention between them.
A sum over all rows, such as the gradient of a norm's weight, is a separate kernel, because other
kernels compute one row at a time.

The training code itself decides which regions are compiled: inside `mark_compiled_regions`,
torch.compile marks a region instead of compiling it. Autograd numbers its nodes. An operator of
backward belongs to the region whose forward made the node that runs the operator.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.compiled import function as compiled_function
from hf_moe_ep.compiled import layers as compiled_layers
from hf_moe_ep.upstream.autograd_modes import get_next_sequence_number, get_running_sequence_number
from hf_moe_ep.upstream.dispatch_modes import get_storage_id
from hf_moe_ep.upstream.replaced import replaced

# A tensor of at most this fraction of the largest input of its operator is written to memory.
_SMALL = 1 / 16


@dataclass(frozen=True)
class _Use:
    """A tensor that an operator reads or writes: the number of its storage and its bytes."""

    storage: int
    nbytes: int


@dataclass(frozen=True)
class _Node:
    """An operator that ran.

    Attributes:
        graph: the number of the graph that contains the operator; None outside compiled code.
        in_backward: True for the backward of the graph, False for its forward. A forward that
            backward recomputes is a forward.
        fuses: True if the operator only moves bytes.
        sums_rows: True if the operator adds up all rows of its input.
    """

    phase: str
    graph: int | None
    in_backward: bool
    fuses: bool
    sums_rows: bool
    dtype: str
    reads: tuple[_Use, ...]
    writes: tuple[_Use, ...]


@dataclass(frozen=True)
class Kernel:
    """A series of fused operators: the bytes that it reads and writes, and its launches."""

    phase: str
    dtype: str
    nbytes: int
    launches: int


@dataclass
class Fusion:
    """Records the operators of a step, and counts the kernels of its compiled regions."""

    _nodes: list[_Node] = field(default_factory=list)
    # Storages that are alive, each with its number.
    _numbers: dict[int, tuple[weakref.ref[Any], int]] = field(default_factory=dict)
    _next_number: int = 0
    # The graph of each open `region`, or None if the region is not compiled; innermost last.
    _running: list[int | None] = field(default_factory=list)
    _num_graphs: int = 0
    # The first sequence number of each series of autograd nodes, and the graph of the series.
    _starts: list[int] = field(default_factory=list)
    _graphs: list[int | None] = field(default_factory=list)
    _paused: int = 0

    @contextmanager
    def region(self, *, compiled: bool) -> Iterator[None]:
        """Count the code of the block as one graph, or as uncompiled code."""
        self._num_graphs += 1
        self._running.append(self._num_graphs if compiled else None)
        self._begin_series()
        try:
            yield
        finally:
            self._running.pop()
            if self._running and self._running[-1] is not None:
                self._num_graphs += 1  # the rest of the outer region is another graph
                self._running[-1] = self._num_graphs
            self._begin_series()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block, because its operators are counted elsewhere."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def add(self, phase: str, operator: Any, reads: list[Tensor], writes: list[Tensor]) -> bool:
        """Add an operator (`work.Operator`). Return True if it becomes part of a fused kernel."""
        if self._paused:
            return False
        graph = self._find_graph()
        fuses = graph is not None and operator.kind == "memory"
        node = _Node(
            phase,
            graph,
            not self._running,
            fuses,
            fuses and _sums_rows(reads, writes),
            operator.dtype,
            tuple(map(self._use, reads)),
            tuple(map(self._use, writes)),
        )
        self._nodes.append(node)
        return fuses

    def kernels(self) -> list[Kernel]:
        """Return the kernels of all operators for which `add` has returned True."""
        written = self._find_written()
        # The tensors in memory from which each unwritten tensor is computed, by its storage.
        sources: dict[int, tuple[_Use, ...]] = {}
        kernels: list[Kernel] = []
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        last: _Node | None = None

        def end() -> None:
            if last is not None and writes:
                outside = {
                    storage: size for storage, size in reads.items() if storage not in writes
                }
                nbytes = sum(outside.values()) + sum(writes.values())
                large = max(writes.values()) * _SMALL
                launches = sum(size > large for size in writes.values())
                kernels.append(Kernel(last.phase, last.dtype, nbytes, launches))
            reads.clear()
            writes.clear()

        for node in self._nodes:
            if node.graph is None:
                continue
            if not node.fuses or (last is not None and _need_two_kernels(node, last)):
                end()
                last = None
            if not node.fuses:
                continue
            needed = [source for use in node.reads for source in sources.get(use.storage, (use,))]
            if node.sums_rows:
                nbytes = sum(use.nbytes for use in dict.fromkeys((*needed, *node.writes)))
                kernels.append(Kernel(node.phase, node.dtype, nbytes, 1))
                continue
            last = node
            for use in node.writes:
                if use.storage in written:
                    writes[use.storage] = max(use.nbytes, writes.get(use.storage, 0))
                else:
                    sources[use.storage] = tuple(dict.fromkeys(needed))
            if any(use.storage in written for use in node.writes):
                for use in needed:
                    reads[use.storage] = max(use.nbytes, reads.get(use.storage, 0))
        end()
        return kernels

    def _find_written(self) -> set[int]:
        """Return the storages that are written to memory."""
        made_in: dict[int, int | None] = {}
        written: set[int] = set()
        for node in self._nodes:
            for use in node.reads:
                if not node.fuses or made_in.get(use.storage) != node.graph:
                    written.add(use.storage)
            largest = max((use.nbytes for use in node.reads), default=0)
            for use in node.writes:
                if not node.fuses or use.nbytes <= _SMALL * largest:
                    written.add(use.storage)
                made_in[use.storage] = node.graph
        return written

    def _begin_series(self) -> None:
        self._starts.append(get_next_sequence_number())
        self._graphs.append(self._running[-1] if self._running else None)

    def _find_graph(self) -> int | None:
        """Return the graph of the operator that runs now, in forward or in backward."""
        if self._running:
            return self._running[-1]
        number = get_running_sequence_number()
        if number is None or not self._starts:
            return None
        index = bisect_right(self._starts, number) - 1
        return self._graphs[index] if index >= 0 else None

    def _use(self, tensor: Tensor) -> _Use:
        storage = tensor.untyped_storage()
        key = get_storage_id(storage)
        known = self._numbers.get(key)
        if known is None or known[0]() is not storage:
            known = weakref.ref(storage), self._next_number
            self._numbers[key] = known
            self._next_number += 1
        return _Use(known[1], tensor.numel() * tensor.element_size())


def _sums_rows(reads: list[Tensor], writes: list[Tensor]) -> bool:
    """Return True if the operator's result has the width of its input, but far fewer rows."""
    if not reads or not writes:
        return False
    rows, result = reads[0], writes[0]
    is_small = result.numel() <= _SMALL * rows.numel()
    return is_small and result.ndim > 0 and result.shape[-1] == rows.shape[-1] > 1


def _need_two_kernels(node: _Node, last: _Node) -> bool:
    """Return True if no kernel can contain both operators."""
    return any(
        getattr(node, name) != getattr(last, name) for name in ("graph", "in_backward", "phase")
    )


@contextmanager
def mark_compiled_regions(fusion: Fusion) -> Iterator[None]:
    """Inside the block, torch.compile marks the code of a function as a region of `fusion`."""

    # As decorators, contextlib's context managers are entered anew at each call.
    def mark(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return fusion.region(compiled=True)(function)

    def mark_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return fusion.region(compiled=False)(function)

    replacements: list[tuple[Any, str, Any]] = [
        (torch, "compile", mark),
        (torch.compiler, "disable", mark_uncompiled),
        (compiled_function, "has_given_up", lambda *_: False),
    ]
    for name in ("_call_block_untraced", "_call_untraced"):
        replacements.append((compiled_layers, name, mark_uncompiled(vars(compiled_layers)[name])))
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(replaced(owner, name, value))
        yield
