"""Give each gloo process group one worker thread, and all groups of a process one network thread.

ProcessGroupGloo starts two worker threads per network device, and they have a data race. After each
collective a worker assigns the collective's name to a string that all workers of the group share,
without a lock (ProcessGroupGloo::runLoop in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). Two
workers that do this at the same time free the string's buffer twice. The process then aborts, or
crashes later in other code. Only names of more than 15 characters have a buffer that can be freed.
Such a name is ALLGATHER_COALESCED, the all-gather of `DTensor.full_tensor()` and `redistribute()`.

With one worker thread, the collectives of a group run one after another, in the order in which
every rank starts them. Collectives of different groups still overlap.

Each network device has a thread that wakes up every 10 ms. torch creates a device for each group,
and a process of this package has dozens of groups, so they share one device per interface.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_moe_ep.config import list_gloo_interfaces
from hf_moe_ep.upstream.replaced import replaced

# torch has no public way to set the number of workers: new_group() and init_process_group() ignore
# `pg_options` for gloo (torch/distributed/distributed_c10d.py).
_c10d: Any = dist.distributed_c10d


@contextmanager
def one_worker_thread() -> Iterator[None]:
    """Give every gloo group that is created inside the block one worker thread.

    Groups of other backends are not affected.
    """
    if not dist.is_gloo_available():
        yield
        return
    ours = _make_one_worker_class(_c10d.ProcessGroupGloo)
    with replaced(_c10d, "ProcessGroupGloo", ours):
        yield


def _make_one_worker_class(stock: Any) -> Any:
    """Make a subclass of `stock`, because torch calls isinstance(group, ProcessGroupGloo)."""

    class OneWorkerGloo(stock):
        def __init__(
            self,
            store: Any,
            rank: int,
            size: int,
            timeout: timedelta | None = None,
            **more_options: Any,
        ) -> None:
            options = stock._Options()
            options._devices = _list_devices(os.getpid(), tuple(list_gloo_interfaces()))
            options._threads = 1
            if timeout is not None:
                options._timeout = timeout
            # torch 2.15 passes `enable_reconfigure`, which is also the name of an option.
            for name, value in more_options.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    return OneWorkerGloo


@functools.cache
def _list_devices(process_id: int, interfaces: tuple[str, ...]) -> list[Any]:
    """List a device for each interface or, if there is none, torch's default device.

    The interfaces are those in GLOO_SOCKET_IFNAME. `process_id` is a part of the cache's key,
    because a forked process has no copy of its parent's threads.
    """
    if not interfaces:
        return [_c10d.ProcessGroupGloo.create_default_device()]
    return [_c10d.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
