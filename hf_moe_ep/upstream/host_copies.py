"""The copies that FSDP2 makes between a device and the host, where parameters lie on the host.

torch/distributed/fsdp/_fully_shard/_fsdp_param.py and _fsdp_collectives.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

_FSDP2 = "torch.distributed.fsdp._fully_shard"
# Functions of FSDP2 that copy: the one before it gathers, the one behind what it has reduced.
_TO_HOST = {"all_gather_inputs": False, "foreach_reduce": True}


class Copy(Protocol):
    """What makes one of these copies."""

    def __call__(self, x: Tensor, *, to_host: bool) -> Tensor: ...


@contextmanager
def host_copies(copy: Copy) -> Iterator[None]:
    """Let `copy` make those copies, which are none where a rank's device is the host.

    Another function stands for `Tensor.to` inside the block: a `TorchFunctionMode` would not see
    what a backward runs.
    """
    stock = Tensor.to

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        caller = sys._getframe(1)
        to_host = _TO_HOST.get(caller.f_code.co_name)
        if to_host is not None and caller.f_globals["__name__"].startswith(_FSDP2):
            return copy(x, to_host=to_host)
        return stock(x, *args, **kwargs)

    setattr(Tensor, "to", to)  # noqa: B010  mypy: no such assignment
    try:
        yield
    finally:
        # It is of the class behind this one.
        del Tensor.to
