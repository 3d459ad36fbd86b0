"""Count the bytes that collectives send to this rank while something runs."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NOTHING_MOVES = ("wait", "wrap", "barrier")
_TALK = {"c10d.allreduce_.default", "c10d.allgather_.default"}


class Received(TorchDispatchMode):
    """Bytes from other ranks by broadcast and all-gather; another collective is an error.

    Attributes:
        bytes: that arrived, each as often as it did.
        largest: the result of one collective.
        rounds: small all-reduces, and objects that are gathered, which count in neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = self.rounds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does on plain tensors comes here again
        name = str(func)
        if name == "c10d.broadcast_.default":
            (tensor,), group, root = args[:3]
            self.largest = max(self.largest, tensor.nbytes)
            if dist.ProcessGroup.unbox(group).rank() != root:
                self.bytes += tensor.nbytes
        elif name == "_c10d_functional.all_gather_into_tensor.default":
            part, world = args[:2]
            self.largest = max(self.largest, world * part.nbytes)
            self.bytes += (world - 1) * part.nbytes
        elif name in _TALK:
            self.rounds += 1
        elif name.startswith(("c10d.", "_c10d_functional.")):
            assert any(harmless in name for harmless in _NOTHING_MOVES), name
        return func(*args, **(kwargs or {}))


def not_here(tensors: Iterable[Any], dtype: torch.dtype | None = None) -> int:
    """Bytes of sharded `tensors` that this rank does not hold, in `dtype` or their own."""
    missing = 0
    for tensor in tensors:
        itemsize = tensor.itemsize if dtype is None else dtype.itemsize
        missing += (tensor.numel() - tensor.to_local().numel()) * itemsize
    return missing
