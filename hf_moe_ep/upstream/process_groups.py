"""Process groups and meshes of torch, where their public interface ends.

torch/distributed/distributed_c10d.py, torch/distributed/device_mesh.py and, for a plan of a world
that is not there, torch/testing/_internal/distributed/fake_pg.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def default_store() -> Any:
    """The store over which the default group was made (distributed_c10d.py)."""
    return dist.distributed_c10d._get_default_store()


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh | None:
    """One axis over some axes of `mesh`, which torch's DTensor then finds too (device_mesh.py).

    None where torch cannot make it: up to 2.11 it slices no mesh in which ranks step by less along
    its first axis.
    """
    try:
        return mesh[axes]._flatten("_".join(axes))
    except KeyError:
        return None


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """A default group of which only this one rank is there; collectives return at once."""
    # Registers the backend; nothing else of torch offers one rank of a group that is not there.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
