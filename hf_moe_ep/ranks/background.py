"""`Saver` and `SaveHandle`: save a checkpoint in the background, in one thread on every rank.

If two threads ran collectives on one process group, a collective of one thread could match a
collective of the other thread. The save threads therefore have a gloo group of their own. They
write a copy of the model, which training does not change. `wait()` raises the error of a save. The
error is also logged when it happens, because a script may not call `wait()` for its last save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hf_moe_ep.ranks.all_ranks import format_in_one_line, this_rank, world_size
from hf_moe_ep.ranks.timeouts import explain_timeout
from hf_moe_ep.upstream.gloo import one_worker_thread
from hf_moe_ep.upstream.process_groups import get_default_timeout

_logger = logging.getLogger("hf_moe_ep")


class _SaveThread(threading.Thread):
    """A thread that runs `write(group)`; `failure` is the error that `write` raised, or None."""

    def __init__(
        self,
        directory: Path,
        write: Callable[[dist.ProcessGroup | None], None],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(name=f"hf_moe_ep saves {directory}")
        self.directory = directory.absolute()
        self.failure: BaseException | None = None
        self._write: Callable[[dist.ProcessGroup | None], None] | None = write
        self._group, self._device, self._rank = group, device, this_rank()

    def run(self) -> None:
        assert self._write is not None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread starts on device 0
            self._write(self._group)
        except BaseException as error:  # noqa: BLE001  SaveHandle.wait raises the error
            self.failure = error
            text = format_in_one_line(error)
            _logger.error("%s was not saved: %s (rank %d)", self.directory, text, self._rank)
        finally:
            self._write = None  # frees the copy of the model, to which `write` refers


def is_written(directory: Path) -> bool:
    """Return True if a background save of this process, of any model, writes to `directory`."""
    save_threads = (t for t in threading.enumerate() if isinstance(t, _SaveThread))
    return any(thread.directory == directory.absolute() for thread in save_threads)


@dataclass
class SaveHandle:
    """Waits for a save, which may still run in `_thread`."""

    directory: Path
    _thread: _SaveThread | None = None

    def wait(self) -> None:
        """Wait until the checkpoint is complete, or raise the error of the save.

        Every rank raises the same error. A second call returns immediately, and raises nothing.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        if thread.failure is not None:
            raise thread.failure


def _create_group_of_saves(directory: Path, device: torch.device) -> dist.ProcessGroup:
    """Create a gloo group of all ranks, with the timeout of the default group.

    The group connects each rank with every other rank, and most runs save nothing in the
    background. The first such save therefore creates the group, not the sharding of the model.
    """
    place = f"saving {directory} in the background"
    failure = ": its process group could not be created"
    with explain_timeout(place, None, failure, goal="this save"), one_worker_thread():
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=get_default_timeout(device), group_desc="hf_moe_ep_saves"
        )
    return group


@dataclass
class Saver:
    """Runs the background saves of one model, one at a time."""

    handle: SaveHandle | None = None
    group: dist.ProcessGroup | None = None

    def __reduce__(self) -> tuple[type[Saver], tuple[()]]:
        return Saver, ()  # a copy of the model gets a new Saver

    def wait(self) -> None:
        """Wait for the running save, if there is one, and raise its error."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.wait()

    def start(
        self,
        directory: Path,
        write: Callable[[dist.ProcessGroup | None], None],
        device: torch.device,
    ) -> SaveHandle:
        """Run `write(group)` in a thread of this rank; every rank calls this method."""
        if self.group is None and world_size() > 1:
            self.group = _create_group_of_saves(directory, device)
        thread = _SaveThread(directory, write, self.group, device)
        thread.start()
        self.handle = SaveHandle(directory, thread)
        return self.handle
