"""Process groups and meshes of torch, where their public interface ends.

torch/distributed/distributed_c10d.py, torch/distributed/device_mesh.py and, for a plan of a world
that is not there, torch/testing/_internal/distributed/fake_pg.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def default_store() -> Any:
    """Return the store over which the default process group was made (distributed_c10d.py)."""
    return dist.distributed_c10d._get_default_store()


def device_of_objects(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors of `group` that are about nothing on a device may lie.

    The host where one of its backends is the host's (distributed_c10d.py).
    """
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh | None:
    """Return a mesh of one axis over `axes` of `mesh`, or None where torch cannot make it.

    DTensor finds and uses it from then on (device_mesh.py). Torch up to 2.11 cannot slice a
    mesh whose neighbours along the first axis are closer in rank than those along a later one.
    """
    try:
        return mesh[axes]._flatten("_".join(axes))
    except KeyError:
        return None


def default_timeout(device: torch.device) -> timedelta | None:
    """Return the timeout of the default group; None of a backend that has none.

    torch gives other groups its own, 30 minutes under gloo and 10 under NCCL, whatever the user
    said (distributed_c10d.py).
    """
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
    # Fake groups have no options, and lazy ones of NCCL none either.
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def take_default_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of `mesh` the timeout of the default group (distributed_c10d.py)."""
    timeout = default_timeout(torch.device(mesh.device_type))
    if timeout is None:
        return
    # Public since torch 2.15, which deprecates the private name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timeout, group)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Make a default group of `world_size` ranks of which only `rank` exists, inside the block.

    Its collectives return at once and move nothing.
    """
    # The import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
