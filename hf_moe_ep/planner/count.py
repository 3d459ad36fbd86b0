"""Count the bytes of all tensors that are alive while code runs; tensors may be real or fake.

    with count_tensors(model.parameters()) as memory:
        memory.begin("forward")
        loss = model(**batch).loss
        memory.begin("backward")
        loss.backward()
    memory.peak, memory.peaks["backward"], memory.sum_at_peaks(lambda record: record.made_by)

Bytes are counted per storage. A storage counts once, even if several tensors share it. It counts
from the operator that creates it until its last tensor is freed. The sum is the memory that a
program requests from a GPU's allocator, without rounding and caching. Temporary memory inside an
operator is not counted, except in the operators of the experts, whose steps run one by one. FSDP2
allocates and frees gathered units with `UntypedStorage.resize_`, which is not an operator, so
`count_tensors` replaces this method.

Host memory is counted separately. A tensor is on the host if it was passed to
`watch(..., on_host=True)` or was computed from a host tensor. Only `copy` makes a device tensor
from a host tensor, or a host tensor from a device tensor.

Torch's own `MemTracker` (torch/distributed/_tools/mem_tracker.py) is similar, but it needs hooks on
every module and does not see inside the operator of the experts.
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
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.upstream.dispatch_modes import OperatorMode, get_storage_id
from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.replaced import replaced

# Values of `made_by` for storages that no operator made. BEFORE is also the name of the first phase
# (a named part of the run), which lasts until the first `begin`.
BEFORE, RESIZED = "before", "resize_"


@dataclass(frozen=True, eq=False)
class StorageRecord:
    """The size and origin of a storage, and the shape of its first tensor.

    A storage gets a new record when it is resized.
    """

    nbytes: int
    made_by: str
    shape: tuple[int, ...]
    on_host: bool = False


class TensorMemory(OperatorMode):
    """A dispatch mode that counts the bytes of storages as the module docstring explains.

    Attributes:
        now: bytes alive on the device.
        peaks: the largest value of `now` in each phase, in the order in which phases began.
        on_host, host_peak: bytes alive on the host, and the largest value of `on_host`.
    """

    def __init__(self, alive: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.on_host = self.host_peak = 0
        self.peaks: dict[str, int] = {}
        # New tensors are on the host (True), on the device (False), or like their inputs (None).
        self._made_on_host: bool | None = None
        # All allocations (True) and frees (False), and the length of the list at each phase's peak.
        self._changes: list[tuple[StorageRecord, bool]] = []
        self._peak_at: dict[str, int] = {}
        self._phase = BEFORE
        self._alive: dict[int, tuple[StorageRecord, weakref.ref[torch.UntypedStorage]]] = {}
        self.watch(alive)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def begin(self, phase: str) -> None:
        """Begin a phase, or continue it if it began before."""
        self._phase = phase
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
        records = map(self.find_record, list_tensors_in(values))
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

    def find_record(self, tensor: Tensor) -> StorageRecord | None:
        """Return the record of a tensor's storage; None if the storage is not counted."""
        entry = self._alive.get(get_storage_id(get_local_tensor(tensor).untyped_storage()))
        return None if entry is None else entry[0]

    def sum_at_peaks(self, kind_of: Callable[[StorageRecord], str]) -> dict[str, dict[str, int]]:
        """Return the bytes of each kind that were alive at the peak of each phase."""
        sums: dict[str, int] = {}
        sums_after: dict[int, dict[str, int]] = {0: {}}
        numbers_of_peaks = set(self._peak_at.values())
        for number, (record, allocated) in enumerate(self._changes, start=1):
            kind = kind_of(record)
            sums[kind] = sums.get(kind, 0) + (record.nbytes if allocated else -record.nbytes)
            if number in numbers_of_peaks:
                sums_after[number] = {kind: size for kind, size in sums.items() if size}
        return {phase: sums_after[self._peak_at[phase]] for phase in self.peaks}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then calls the operator on this rank's shards, and this mode sees that call.
            return NotImplemented
        run_steps = STEPS_INSIDE.get(func)
        if run_steps is not None:
            with self:
                return run_steps(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        on_host = self._made_on_host
        if on_host is None:
            on_host = self.is_on_host((args, kwargs))
        for tensor in list_tensors_in(out):
            self._record_tensor(tensor, str(func), on_host=on_host)
        return out

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Replace the record of a storage whose size has changed."""
        key = get_storage_id(storage)
        if key in self._alive:
            self._free(key)
        self._allocate(storage, StorageRecord(storage.nbytes(), RESIZED, ()))

    def _record_tensor(self, tensor: Tensor, made_by: str, *, on_host: bool) -> None:
        local = get_local_tensor(tensor)
        storage = local.untyped_storage()
        if get_storage_id(storage) not in self._alive:
            self._allocate(
                storage, StorageRecord(storage.nbytes(), made_by, tuple(local.shape), on_host)
            )

    def _allocate(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        key = get_storage_id(storage)
        self._alive[key] = record, weakref.ref(storage, partial(self._on_freed, key))
        self._count_change(record, allocated=True)
        self._update_peak()

    def _on_freed(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        if key in self._alive and self._alive[key][1] is reference:
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
        if self.now > self.peaks.get(self._phase, -1):
            self.peaks[self._phase] = self.now
            self._peak_at[self._phase] = len(self._changes)


@contextmanager
def count_tensors(alive: Iterable[Tensor] = ()) -> Iterator[TensorMemory]:
    """Count the tensors that the block makes, and the tensors in `alive`, which exist before."""
    memory = TensorMemory(alive)
    stock = torch.UntypedStorage.resize_

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
        stock(storage, size)
        memory.note_resize(storage)

    with replaced(torch.UntypedStorage, "resize_", resize_and_count), memory:
        yield memory
