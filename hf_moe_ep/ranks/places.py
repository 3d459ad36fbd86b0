"""Where this rank is in its exchanges, told by the line that an abort leaves on stderr.

Under gloo a peer that died or never comes is an error, raised where this rank waits for it, with
the place (`collectives.py`). Under NCCL the host goes on while rows travel. There the watchdog
aborts the process once an exchange has taken longer than the group's timeout: no Python runs after
that, and the watchdog knows the group and the collective, no layer.

What still runs is faulthandler, which writes the stack of every thread. So one thread does nothing
but sleep, in a function that bears the name of the oldest exchange that has not ended:

    Thread 0x00007f0f16ffd640 (most recent call first):
      File "hf_moe_ep: oldest exchange of this rank that has not ended", line 78 in MoE layer 3 of
      forward 12 (training; top-8, 2 bytes per element): rows, group mesh_ep of ranks 0, 1

It looks every second what that is, which no step waits for. That thread asks the GPU nothing:
while another thread captures a CUDA graph such a call is refused, and ends the capture. Whether an
exchange has ended on the device is asked by the thread that computes, whenever its next exchange
begins or ends. A layer waits on the host for its counts, so the answer is at most a layer old.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from types import FunctionType

import torch
import torch.distributed as dist

# Exchanges of this process in their order, those that have ended taken off when the next begins.
# Many times what a host can be ahead of its GPU.
_UNDER_WAY: deque[Place] = deque(maxlen=4096)
# Seconds between two looks.
_SECONDS = 1.0


class Place:
    """An exchange of `what` over `group`, somewhere in the model."""

    def __init__(self, where: str, what: str, group: dist.ProcessGroup) -> None:
        self._where, self._what, self.group = where, what, group
        self._end: torch.cuda.Event | None = None
        # Whether the host has seen its end; read by another thread.
        self.ended = False

    def leave(self, on_gpu: bool = False) -> None:
        """The host goes on; on a GPU the exchange ends once the device has come this far."""
        if on_gpu:
            self._end = torch.cuda.Event()
            self._end.record()
        else:
            self.ended = True
        _forget_ended()

    def look(self) -> bool:
        """Ask the device whether the exchange has ended; only the thread that computes may."""
        if self._end is not None and not self.ended:
            # A GPU that stopped answers with an error; whoever waits for it hears why.
            with suppress(torch.AcceleratorError):
                self.ended = self._end.query()
        return self.ended

    def __str__(self) -> str:
        return f"{self._where}: {self._what}, {describe_group(self.group)}"


def enter(where: str, what: str, group: dist.ProcessGroup) -> Place:
    """Note that an exchange begins here."""
    _forget_ended()
    place = Place(where, what, group)
    _UNDER_WAY.append(place)
    return place


def _forget_ended() -> None:
    while _UNDER_WAY and _UNDER_WAY[0].look():
        _UNDER_WAY.popleft()


def describe_group(group: dist.ProcessGroup) -> str:
    """Name a group as NCCL's lines do; `default_pg` is the group of all ranks."""
    ranks = ", ".join(str(rank) for rank in dist.get_process_group_ranks(group))
    return f"group {group.group_desc} of ranks {ranks}"


def tell_on_abort() -> None:
    """Have an abort of this process tell the place, from now on."""
    if any(isinstance(thread, _Teller) for thread in threading.enumerate()):
        return
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    _Teller().start()


class _Teller(threading.Thread):
    """Sleeps in a function that is named after the oldest exchange under way."""

    def __init__(self) -> None:
        super().__init__(name="hf_moe_ep tells the place on abort", daemon=True)

    def run(self) -> None:
        while True:
            place = next((str(place) for place in tuple(_UNDER_WAY) if not place.ended), "none")
            code = _sleep.__code__.replace(
                co_name=place,
                co_filename="hf_moe_ep: oldest exchange of this rank that has not ended",
            )
            FunctionType(code, globals())()


def _sleep() -> None:
    time.sleep(_SECONDS)
