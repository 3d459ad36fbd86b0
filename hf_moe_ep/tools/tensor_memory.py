"""Count the bytes of all tensors that are alive while something runs, real ones and fake ones.

    with count_tensors(model.parameters()) as memory:
        memory.begin("forward")
        loss = model(**batch).loss
        memory.begin("backward")
        loss.backward()
    memory.peak, memory.peaks["backward"], memory.alive_at_peak("backward")

Counted are storages, each once however many tensors look at it, from the operator that makes it
until nobody has it: what a GPU's allocator is asked for, without what it rounds up or keeps. What
an operator needs inside itself is not seen; that of the experts is opened, so its steps are.
FSDP2 gives the memory of gathered units, and takes it, by `UntypedStorage.resize_`, which is no
operator: while this counts, a function that tells stands there.

Tensors that are watched as the host's have an account of their own, as have those that operators
make of them; only `copy` makes one on the other side. Host and device may both be this CPU.

Torch's own `MemTracker` (torch/distributed/_tools/mem_tracker.py) does the like by hooks on every
module, and sees the experts' operator from outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.ops.operators import STEPS_INSIDE
from hf_moe_ep.upstream.dispatch_modes import OperatorMode, storage_id, tensors_in

# What made a storage, where it was no operator.
BEFORE, RESIZED = "before", "resize_"


@dataclass(frozen=True, eq=False)
class Lived:
    """A storage, at one size: its bytes, which operator made it, the shape of its first tensor."""

    nbytes: int
    made_by: str
    shape: tuple[int, ...]
    on_host: bool = False


class TensorMemory(OperatorMode):
    """A mode that keeps account of the storages of tensors; see the module.

    Attributes:
        now: bytes that are alive, those of the host left out.
        peaks: the most bytes at a time in each stretch, in the order in which they began.
        on_host, host_peak: bytes of the host that are alive, and the most at a time.
    """

    def __init__(self, alive: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.on_host = self.host_peak = 0
        self.peaks: dict[str, int] = {}
        # Where tensors lie that are made now; None: where those lie that they are made of.
        self._made_on_host: bool | None = None
        # What began (or, False, ended) at each change, and how many there were at each peak.
        self._changes: list[tuple[Lived, bool]] = []
        self._peak_at: dict[str, int] = {}
        self._stretch = BEFORE
        self._alive: dict[int, tuple[Lived, weakref.ref[torch.UntypedStorage]]] = {}
        self.watch(alive)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def begin(self, stretch: str) -> None:
        """Begin a stretch of what runs; the name of an earlier one goes on with it."""
        self._stretch = stretch
        self._note()

    def watch(self, tensors: Iterable[Tensor], *, on_host: bool = False) -> None:
        """Count tensors that were there before."""
        with self._made(on_host=on_host):
            for tensor in tensors:
                self._see(tensor, BEFORE, on_host=on_host)

    def is_on_host(self, values: Any) -> bool:
        """Tell whether the host has a tensor of nested lists, tuples and dicts."""
        if not self.host_peak:
            return False
        known = map(self.storage, tensors_in(values))
        return any(life is not None and life.on_host for life in known)

    def copy(self, x: Tensor, *, to_host: bool) -> Tensor:
        """Copy a tensor to the host or to the device."""
        with self._made(on_host=to_host):
            return x.clone()

    @contextmanager
    def _made(self, *, on_host: bool) -> Iterator[None]:
        self._made_on_host = on_host
        try:
            yield
        finally:
            self._made_on_host = None

    def storage(self, tensor: Tensor) -> Lived | None:
        """Return what is known of the storage of a tensor that is alive."""
        known = self._alive.get(storage_id(_local(tensor).untyped_storage()))
        return None if known is None else known[0]

    def alive_at_peak(self, stretch: str) -> list[Lived]:
        """Return the storages that were alive at the peak of a stretch, the largest first."""
        alive: dict[Lived, None] = {}
        for life, began in self._changes[: self._peak_at[stretch]]:
            if began:
                alive[life] = None
            else:
                del alive[life]
        return sorted(alive, key=lambda life: -life.nbytes)

    def sums_at_peaks(self, kind_of: Callable[[Lived], str]) -> dict[str, dict[str, int]]:
        """Sum by kind what was alive at the peak of each stretch, in the order they began."""
        sums: dict[str, int] = {}
        at: dict[int, dict[str, int]] = {0: {}}
        wanted = set(self._peak_at.values())
        for number, (life, began) in enumerate(self._changes, start=1):
            kind = kind_of(life)
            sums[kind] = sums.get(kind, 0) + (life.nbytes if began else -life.nbytes)
            if number in wanted:
                at[number] = {kind: size for kind, size in sums.items() if size}
        return {stretch: at[self._peak_at[stretch]] for stretch in self.peaks}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # It comes again with the parts of this rank.
            return NotImplemented
        inside = STEPS_INSIDE.get(func)
        if inside is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        on_host = self._made_on_host
        if on_host is None:
            on_host = self.is_on_host((args, kwargs))
        for tensor in tensors_in(out):
            self._see(tensor, str(func), on_host=on_host)
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew, which has another size now."""
        key = storage_id(storage)
        if key in self._alive:
            self._end(key)
        self._begin(storage, Lived(storage.nbytes(), RESIZED, ()))

    def _see(self, tensor: Tensor, made_by: str, *, on_host: bool) -> None:
        local = _local(tensor)
        storage = local.untyped_storage()
        if storage_id(storage) not in self._alive:
            self._begin(storage, Lived(storage.nbytes(), made_by, tuple(local.shape), on_host))

    def _begin(self, storage: torch.UntypedStorage, life: Lived) -> None:
        key = storage_id(storage)
        self._alive[key] = life, weakref.ref(storage, partial(self._gone, key))
        self._change(life, began=True)
        self._note()

    def _gone(self, key: int, of: weakref.ref[torch.UntypedStorage]) -> None:
        if key in self._alive and self._alive[key][1] is of:
            self._end(key)

    def _end(self, key: int) -> None:
        life, _ = self._alive.pop(key)
        self._change(life, began=False)

    def _change(self, life: Lived, *, began: bool) -> None:
        if life.on_host:
            self.on_host += life.nbytes if began else -life.nbytes
            self.host_peak = max(self.host_peak, self.on_host)
            return
        self.now += life.nbytes if began else -life.nbytes
        self._changes.append((life, began))

    def _note(self) -> None:
        if self.now > self.peaks.get(self._stretch, -1):
            self.peaks[self._stretch] = self.now
            self._peak_at[self._stretch] = len(self._changes)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def count_tensors(alive: Iterable[Tensor] = ()) -> Iterator[TensorMemory]:
    """Count what runs inside the block, beside tensors that are `alive` before it."""
    memory = TensorMemory(alive)
    resize = torch.UntypedStorage.resize_
    _replace_resize(_told(memory, resize))
    try:
        with memory:
            yield memory
    finally:
        _replace_resize(resize)


def _told(memory: TensorMemory, resize: Callable[..., None]) -> Callable[..., None]:
    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        memory.resized(storage)

    return resize_and_tell


def _replace_resize(function: Callable[..., None]) -> None:
    setattr(torch.UntypedStorage, "resize_", function)  # noqa: B010  mypy: no such assignment
