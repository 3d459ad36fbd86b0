"""One save at a time, in a thread: its handle, its error, and the group that its ranks meet over.

Collectives of two threads on one process group would mix, so the thread's ranks meet over a group
of their own, on the host. What the thread writes is a copy that training does not touch. Its error
is logged when it happens, because of the last save of a run nobody may ask.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.ranks.together import describe, this_rank, world_size
from hf_moe_ep.upstream.sharded_models import with_local

_logger = logging.getLogger("hf_moe_ep")


def is_written(directory: Path) -> bool:
    """Whether a save of this process, of whatever model, writes there in the background."""
    return any(thread.name == _name(directory) for thread in threading.enumerate())


def _name(directory: Path) -> str:
    return f"hf_moe_ep saves {directory.absolute()}"


@dataclass
class SaveHandle:
    """A save that may still run; `wait()` returns once the checkpoint is complete."""

    directory: Path
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def wait(self) -> None:
        """Raise the error of the save, once; the same on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


@dataclass
class Saver:
    """The background save of one model."""

    handle: SaveHandle | None = None
    group: dist.ProcessGroup | None = None

    def __reduce__(self) -> tuple[type[Saver], tuple[()]]:
        return Saver, ()  # a copy of the model saves on its own

    def wait(self) -> None:
        """For the save that runs; raises its error."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.wait()

    def start(
        self,
        directory: Path,
        write: Callable[[dist.ProcessGroup | None], None],
        device: torch.device,
    ) -> SaveHandle:
        """Run `write(group)` in a thread; every rank calls this."""
        if self.group is None and world_size() > 1:
            self.group = dist.new_group(backend="gloo")
        handle, rank = SaveHandle(directory), this_rank()
        self.handle = handle

        def work() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # a thread begins on the first one
                write(self.group)
            except BaseException as error:  # noqa: BLE001  wait() raises it
                handle._error = error
                _logger.error("%s was not saved: %s (rank %d)", directory, describe(error), rank)

        handle._thread = threading.Thread(target=work, name=_name(directory))
        handle._thread.start()
        return handle


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return with_local(tensor, local)
