"""A save that runs in a thread of every rank: its handle, its error, the group its ranks meet over.

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

from hf_moe_ep.ranks.missing import name_missing_ranks
from hf_moe_ep.ranks.together import one_line, this_rank, world_size
from hf_moe_ep.upstream.gloo import one_worker_thread
from hf_moe_ep.upstream.process_groups import default_timeout

_logger = logging.getLogger("hf_moe_ep")


class _SaveThread(threading.Thread):
    """A thread that writes to `directory`; `failure` is what stopped it."""

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
                torch.cuda.set_device(self._device)  # a thread begins on the first one
            self._write(self._group)
        except BaseException as error:  # noqa: BLE001  wait() raises it
            self.failure = error
            text = one_line(error)
            _logger.error("%s was not saved: %s (rank %d)", self.directory, text, self._rank)
        finally:
            self._write = None  # with it goes the copy that it wrote


def is_written(directory: Path) -> bool:
    """Whether a save of this process, of whatever model, writes there in the background."""
    running = (t for t in threading.enumerate() if isinstance(t, _SaveThread))
    return any(thread.directory == directory.absolute() for thread in running)


@dataclass
class SaveHandle:
    """A save that may still run; `wait()` returns once the checkpoint is complete."""

    directory: Path
    _thread: _SaveThread | None = None

    def wait(self) -> None:
        """Raise the error of the save, once; the same on every rank."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        if thread.failure is not None:
            raise thread.failure


def _own_group(directory: Path, device: torch.device) -> dist.ProcessGroup:
    """Make the group of all ranks; waits for a rank no longer than the default group does.

    Not when the model is sharded: each rank connects to each, which most runs would never use.
    """
    try:
        with one_worker_thread():
            group: dist.ProcessGroup = dist.new_group(
                backend="gloo", timeout=default_timeout(device), group_desc="hf_moe_ep_saves"
            )
    except RuntimeError as error:
        missing = name_missing_ranks("the group of saves", None)
        raise RuntimeError(
            f"saving {directory} in the background: the group in which ranks meet for that could "
            f"not be made; {missing} stopped, or did not come within the process group's timeout "
            f"({error})"
        ) from error
    return group


@dataclass
class Saver:
    """The background saves of one model, one at a time."""

    handle: SaveHandle | None = None
    group: dist.ProcessGroup | None = None

    def __reduce__(self) -> tuple[type[Saver], tuple[()]]:
        return Saver, ()  # a copy of the model saves on its own

    def wait(self) -> None:
        """Wait for the save that runs; raises its error."""
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
            self.group = _own_group(directory, device)
        thread = _SaveThread(directory, write, self.group, device)
        thread.start()
        self.handle = SaveHandle(directory, thread)
        return self.handle
