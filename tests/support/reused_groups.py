"""Let the checks of one spawn share the process groups of their meshes.

A new group takes milliseconds. DTensor's cache of sharding decisions, which takes a third of a
small check to fill, is only valid while the groups of its meshes exist. So a mesh of a later check
gets the groups that an equal mesh of an earlier check had. Within a check, every call of
`new_group` returns another group.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import debug

# The most groups that are reused, because each has a thread and connections to other ranks.
_MOST = 24
_Key = tuple[Any, ...]


class ReusedGroups:
    """The groups of meshes, which `end_check` keeps for the next check."""

    def __init__(self) -> None:
        self._free: dict[_Key, list[Any]] = defaultdict(list)
        self._taken: list[tuple[_Key, Any]] = []

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Let `new_group` return a kept group if there is one with the same arguments."""
        new_group = self._with_reuse(distributed_c10d.new_group)
        with (
            mock.patch.object(dist, "new_group", new_group),
            mock.patch.object(device_mesh, "new_group", new_group),
        ):
            yield

    def _with_reuse(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: list[int] | None = None, *args: Any, **options: Any) -> Any:
            of_mesh = str(options.get("group_desc")).startswith("mesh_")
            if args or options.get("pg_options") is not None or not of_mesh:
                return stock(ranks, *args, **options)
            key = (None if ranks is None else tuple(ranks), *sorted(options.items(), key=str))
            free = self._free[key]
            group = free.pop(0) if free else stock(ranks, **options)
            self._taken.append((key, group))
            return group

        return new_group

    def end_check(self) -> None:
        """Let the next check reuse the groups of meshes, and destroy all others.

        The default group exists until the ranks end. If more than _MOST groups are free, all of
        them are destroyed. If a group is destroyed, DTensor's cache is cleared, because it keeps
        meshes. The names of destroyed groups stay in torch's table: torch numbers new groups by the
        size of this table, and the store still has the keys of the old names.
        """
        gc.collect()
        names = distributed_c10d._world.pg_names
        for key, group in reversed(self._taken):
            self._free[key].insert(0, group)
        self._taken.clear()
        if sum(map(len, self._free.values())) > _MOST:  # on all ranks, because all call new_group
            self._free.clear()
        kept = {id(group) for free in self._free.values() for group in free}
        ended = [
            group
            for group in names
            if isinstance(group, dist.ProcessGroup)
            and group is not dist.group.WORLD
            and id(group) not in kept
        ]
        if ended:
            debug._clear_sharding_prop_cache()
        for group in ended:
            name = names[group]
            dist.destroy_process_group(group)
            names[f"destroyed {name}"] = name
