"""Call private functions of torch's process groups and meshes.

The functions come from torch/distributed/distributed_c10d.py and torch/distributed/device_mesh.py.
The planner runs in one process, with fake groups of
torch/testing/_internal/distributed/fake_pg.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed both functions; the old names, which torch 2.11 has, warn at every call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def get_default_store() -> Any:
    """Return the store of the default process group (distributed_c10d.py)."""
    return dist.distributed_c10d._get_default_store()


def choose_device_of_objects(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for small tensors that `group` exchanges, such as sizes and flags.

    torch chooses the CPU if the group has a backend for CPU tensors (distributed_c10d.py).
    """
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh | None:
    """Return a mesh with one axis that joins `axes` of `mesh`, or None if torch cannot create it.

    After this call DTensor uses the new mesh to reduce over these axes (device_mesh.py). torch up
    to 2.11 can join axes only if their strides decrease. For example, it cannot join an axis with
    the ranks 0, 1, 2, 3 (stride 1) and a later axis with the ranks 0, 4 (stride 4).
    """
    try:
        return mesh[axes]._flatten("_".join(axes))
    except KeyError:
        return None


def get_default_timeout(device: torch.device) -> timedelta | None:
    """Return the timeout of the default group, or None if its backend has no timeout.

    torch ignores this timeout when it creates other groups. Such groups get torch's own default: 30
    minutes with gloo and 10 minutes with NCCL (distributed_c10d.py).
    """
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
    # Fake groups and lazy NCCL groups have no options.
    return getattr(getattr(backend, "options", None), "_timeout", None)


def take_default_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of `mesh` the timeout of the default group (distributed_c10d.py)."""
    timeout = get_default_timeout(torch.device(mesh.device_type))
    if timeout is None:
        return
    # torch 2.15 makes this function public and deprecates the private name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timeout, group)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Inside the block, make this process rank `rank` of a default group of `world_size` ranks.

    The other ranks do not exist. Collectives return immediately and transfer nothing.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # The import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor's cache would return a mesh of this group for an equal mesh of a later group.
        _clear_sharding_prop_cache()
