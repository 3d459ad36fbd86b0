"""Count the bytes of all tensors that are alive while code runs, real tensors and fake ones.

    with count_tensors(model.parameters()) as memory:
        memory.begin("forward")
        loss = model(**batch).loss
        memory.begin("backward")
        loss.backward()
    memory.peak, memory.peaks["backward"], memory.alive_at_peak("backward")

The unit is the storage: it is counted once, however many tensors share it, from the operator that
makes it until its last tensor is freed. This is what a program asks a GPU's allocator for, without
rounding and caching. Workspace inside an operator is not seen; the operators of the experts are
opened, so that their steps are. FSDP2 allocates and frees gathered units by
`UntypedStorage.resize_`, which is no operator, so `resize_` is wrapped while tensors are counted.

Tensors that are watched as the host's have an account of their own. A tensor that is made from
them is on the host too; only `copy` makes a tensor on the other side.

Torch's own `MemTracker` (torch/distributed/_tools/mem_tracker.py) is similar. It needs hooks on
every module, and sees the operator of the experts from outside only.
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

# Values of `made_by` for a storage that no operator made.
BEFORE, RESIZED = "before", "resize_"


@dataclass(frozen=True, eq=False)
class StorageRecord:
    """A storage of one size; `shape` is that of the first tensor in it."""

    nbytes: int
    made_by: str
    shape: tuple[int, ...]
    on_host: bool = False


class TensorMemory(OperatorMode):
    """A mode that counts storages; see the module docstring.

    Attributes:
        now: bytes alive on the device.
        peaks: the most bytes alive in each stretch, in the order in which stretches began.
        on_host, host_peak: bytes alive on the host, and the most at a time.
    """

    def __init__(self, alive: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.on_host = self.host_peak = 0
        self.peaks: dict[str, int] = {}
        # The side on which new tensors are made; None: the side of their inputs.
        self._made_on_host: bool | None = None
        # Each allocation (True) and free (False), and how many there were at each peak.
        self._changes: list[tuple[StorageRecord, bool]] = []
        self._peak_at: dict[str, int] = {}
        self._stretch = BEFORE
        self._alive: dict[int, tuple[StorageRecord, weakref.ref[torch.UntypedStorage]]] = {}
        self.watch(alive)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def begin(self, stretch: str) -> None:
        """Begin a stretch. A stretch that was begun before is continued."""
        self._stretch = stretch
        self._update_peak()

    def watch(self, tensors: Iterable[Tensor], *, on_host: bool = False) -> None:
        """Count tensors that exist already."""
        with self._new_tensors(on_host=on_host):
            for tensor in tensors:
                self._record_tensor(tensor, BEFORE, on_host=on_host)

    def is_on_host(self, values: Any) -> bool:
        """Return True if a tensor in nested lists, tuples and dicts is on the host."""
        if not self.host_peak:
            return False
        records = map(self.record_of, tensors_in(values))
        return any(record is not None and record.on_host for record in records)

    def copy(self, x: Tensor, *, to_host: bool) -> Tensor:
        """Copy a tensor to the host or to the device."""
        with self._new_tensors(on_host=to_host):
            return x.clone()

    @contextmanager
    def _new_tensors(self, *, on_host: bool) -> Iterator[None]:
        self._made_on_host = on_host
        try:
            yield
        finally:
            self._made_on_host = None

    def record_of(self, tensor: Tensor) -> StorageRecord | None:
        """Return the record of the storage of a tensor; None if it is not counted."""
        known = self._alive.get(storage_id(_local(tensor).untyped_storage()))
        return None if known is None else known[0]

    def alive_at_peak(self, stretch: str) -> list[StorageRecord]:
        """Return the storages that were alive at the peak of a stretch, the largest first."""
        alive: dict[StorageRecord, None] = {}
        for record, allocated in self._changes[: self._peak_at[stretch]]:
            if allocated:
                alive[record] = None
            else:
                del alive[record]
        return sorted(alive, key=lambda record: -record.nbytes)

    def sums_at_peaks(self, kind_of: Callable[[StorageRecord], str]) -> dict[str, dict[str, int]]:
        """Sum by kind what was alive at the peak of each stretch, in the order they began."""
        sums: dict[str, int] = {}
        at: dict[int, dict[str, int]] = {0: {}}
        wanted = set(self._peak_at.values())
        for number, (record, allocated) in enumerate(self._changes, start=1):
            kind = kind_of(record)
            sums[kind] = sums.get(kind, 0) + (record.nbytes if allocated else -record.nbytes)
            if number in wanted:
                at[number] = {kind: size for kind, size in sums.items() if size}
        return {stretch: at[self._peak_at[stretch]] for stretch in self.peaks}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # The operator is dispatched again with this rank's shards.
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
            self._record_tensor(tensor, str(func), on_host=on_host)
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage whose size has changed."""
        key = storage_id(storage)
        if key in self._alive:
            self._free(key)
        self._allocate(storage, StorageRecord(storage.nbytes(), RESIZED, ()))

    def _record_tensor(self, tensor: Tensor, made_by: str, *, on_host: bool) -> None:
        local = _local(tensor)
        storage = local.untyped_storage()
        if storage_id(storage) not in self._alive:
            self._allocate(
                storage, StorageRecord(storage.nbytes(), made_by, tuple(local.shape), on_host)
            )

    def _allocate(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        key = storage_id(storage)
        self._alive[key] = record, weakref.ref(storage, partial(self._on_freed, key))
        self._count_change(record, allocated=True)
        self._update_peak()

    def _on_freed(self, key: int, of: weakref.ref[torch.UntypedStorage]) -> None:
        if key in self._alive and self._alive[key][1] is of:
            self._free(key)

    def _free(self, key: int) -> None:
        record, _ = self._alive.pop(key)
        self._count_change(record, allocated=False)

    def _count_change(self, record: StorageRecord, *, allocated: bool) -> None:
        if record.on_host:
            self.on_host += record.nbytes if allocated else -record.nbytes
            self.host_peak = max(self.host_peak, self.on_host)
            return
        self.now += record.nbytes if allocated else -record.nbytes
        self._changes.append((record, allocated))

    def _update_peak(self) -> None:
        if self.now > self.peaks.get(self._stretch, -1):
            self.peaks[self._stretch] = self.now
            self._peak_at[self._stretch] = len(self._changes)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def count_tensors(alive: Iterable[Tensor] = ()) -> Iterator[TensorMemory]:
    """Count the tensors of the block, and those that are `alive` before it."""
    memory = TensorMemory(alive)
    resize = torch.UntypedStorage.resize_
    _replace_resize(_counting(memory, resize))
    try:
        with memory:
            yield memory
    finally:
        _replace_resize(resize)


def _counting(memory: TensorMemory, resize: Callable[..., None]) -> Callable[..., None]:
    def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        memory.resized(storage)

    return resize_and_count


def _replace_resize(function: Callable[..., None]) -> None:
    setattr(torch.UntypedStorage, "resize_", function)  # noqa: B010  mypy: no such assignment
