"""Count the bytes that this rank receives in collectives inside a block (`Received`)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_WITHOUT_DATA = ("wait", "wrap", "barrier")
_OF_OBJECTS = (torch.int64, torch.uint8)
_SMALL = {"c10d.allreduce_.default", "c10d.allgather_.default"}


class Received(TorchDispatchMode):
    """Context manager that counts broadcasts and all-gathers. Other collectives are an error.

    Attributes:
        bytes: the bytes that other ranks sent to this rank.
        largest: the bytes of the largest result of a collective.
        rounds: the number of small all-reduces, and of gathers and broadcasts of objects, whose
            bytes do not count. An object is sent as a size (int64) and a pickle (uint8).
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = self.rounds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls operators on plain tensors, which come here
        name = str(func)
        if name == "c10d.broadcast_.default" and args[0][0].dtype in _OF_OBJECTS:
            self.rounds += 1
        elif name == "c10d.broadcast_.default":
            (tensor,), group, root = args[:3]
            self.largest = max(self.largest, tensor.nbytes)
            if dist.ProcessGroup.unbox(group).rank() != root:
                self.bytes += tensor.nbytes
        elif name == "_c10d_functional.all_gather_into_tensor.default":
            part, world = args[:2]
            self.largest = max(self.largest, world * part.nbytes)
            self.bytes += (world - 1) * part.nbytes
        elif name in _SMALL:
            self.rounds += 1
        elif name.startswith(("c10d.", "_c10d_functional.")):
            assert any(word in name for word in _WITHOUT_DATA), name
        return func(*args, **(kwargs or {}))


def not_here(tensors: Iterable[Any], dtype: torch.dtype | None = None) -> int:
    """Sum the bytes of sharded tensors that are on other ranks, in `dtype` or their own dtype."""
    missing = 0
    for tensor in tensors:
        itemsize = tensor.itemsize if dtype is None else dtype.itemsize
        missing += (tensor.numel() - tensor.to_local().numel()) * itemsize
    return missing
