"""Where ranks meet outside of forward and backward: all of them go on, or none does.

A rank that fails alone (a full disk, a file that only it cannot see) would leave the others waiting
in their next collective until the process group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# How far ranks may be apart when they begin to save.
_PATIENCE = timedelta(minutes=5)


def is_distributed() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process among all, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


@contextmanager
def together(what: str) -> Iterator[None]:
    """Make a ValueError or OSError of one rank one of every rank; every rank enters and leaves."""
    failed: BaseException | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        failed = error
    if not is_distributed():
        if failed is not None:
            raise failed
        return
    mine = None if failed is None else (type(failed) is ValueError, str(failed))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if failed is not None:
        raise failed
    for other, found in enumerate(everyone):
        if found is not None:
            is_value_error, message = found
            raise (ValueError if is_value_error else OSError)(
                f"{what} failed on rank {other}: {message}"
            )


def check_everyone_calls(what: str) -> None:
    """Ranks meet at the store: inside `if is_main_process:` the first collective would hang."""
    if not is_distributed():
        return
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    called = f"hf_moe_ep/{what}"
    number = store.add(called, 1)
    met = f"{called}/{(number - 1) // world}"
    if number % world == 0:
        store.set(met, "")
    try:
        store.wait([met], _PATIENCE)
    except RuntimeError as error:  # DistStoreError
        present = store.add(called, 0) % world
        store.add(called, -1)
        raise RuntimeError(
            f"{what} was called on {present} of {world} ranks only, {_PATIENCE} ago; call it on "
            f"every rank (rank 0 alone writes), not inside `if is_main_process:`"
        ) from error
