"""`close_group`: close the connections of a process group, so that no rank waits in it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

# No other transfer has this tag, so a receive with this tag times out.
_TAG = 2**31 - 1


def close_group(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a gloo group; do nothing for other backends.

    Every operation of the group that waits for this rank raises RuntimeError immediately, on every
    rank, and so does every later operation. Gloo closes all connections of a group when a receive
    times out (gloo/transport/tcp/unbound_buffer.cc), so this function starts a receive that does.
    """
    if "cpu:gloo" not in dist.get_backend_config(group):
        return
    ranks = dist.get_process_group_ranks(group)
    other = next((rank for rank in ranks if rank != dist.get_rank()), None)
    if other is None:
        return
    with suppress(RuntimeError):
        work = dist.irecv(torch.empty(1), other, group=group, tag=_TAG)
        assert work is not None
        work.wait(timedelta(milliseconds=1))
