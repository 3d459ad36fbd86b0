"""Process groups of gloo with one worker thread each.

ProcessGroupGloo starts two worker threads per network device. After each collective a worker
assigns the collective's name to a string that all workers of the group share, without a lock
(ProcessGroupGloo::runLoop in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). Two workers that
do so at the same time free the string's buffer twice, and the process aborts or crashes later,
somewhere else. Only names of more than 15 characters live on the heap. The one that matters is
ALLGATHER_COALESCED, the all-gather behind `DTensor.full_tensor()` and `redistribute()`.

With one worker thread nothing is shared. Collectives of one group then run one after another, in
the order in which every rank starts them; collectives of different groups still overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_moe_ep.config import gloo_interfaces

# torch has no public way to set the number of workers: its gloo branch of new_group() and
# init_process_group() ignores `pg_options` (torch/distributed/distributed_c10d.py).
_c10d: Any = dist.distributed_c10d


@contextmanager
def one_worker_thread() -> Iterator[None]:
    """Give every gloo group that is created inside the block one worker thread.

    Groups of other backends are created as ever, and so is everything on a torch without gloo.
    """
    if not dist.is_gloo_available():
        yield
        return
    stock = _c10d.ProcessGroupGloo
    _c10d.ProcessGroupGloo = _with_one_worker(stock)
    try:
        yield
    finally:
        _c10d.ProcessGroupGloo = stock


def _with_one_worker(stock: Any) -> Any:
    """Return a subclass of `stock`, because torch asks isinstance() of the groups it made."""

    class OneWorkerGloo(stock):
        def __init__(
            self,
            store: Any,
            rank: int,
            size: int,
            timeout: timedelta | None = None,
            **of_options: Any,
        ) -> None:
            options = stock._Options()
            options._devices = _devices(stock)
            options._threads = 1
            if timeout is not None:
                options._timeout = timeout
            # torch 2.15 hands over `enable_reconfigure`, an option of the same name.
            for name, value in of_options.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    return OneWorkerGloo


def _devices(stock: Any) -> list[Any]:
    """Return the network devices that torch would use, as GLOO_SOCKET_IFNAME names them."""
    interfaces = gloo_interfaces()
    if not interfaces:
        return [stock.create_default_device()]
    return [stock.create_device(interface=name) for name in interfaces]
