"""Send lists of tensors from one pipeline stage to the next, or back.

A `Channel` is one direction between two neighbouring stages. It has a process group of its own.
Sends do not block, and receives are started early, so a transfer overlaps the computation.

The receiver needs the shapes and dtypes before it can allocate the tensors. `send` and `receive`
get a key that both sides know, such as the shape of the micro-batch. In front of the first list of
tensors with a key, `send` sends a message with their shapes and dtypes. Later lists with this key
need no message.

A transfer fails if the other rank died, or did not start it within the timeout of the group. The
error names the stage, the operation and the rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks.timeouts import explain_timeout

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
# The length of the message with shapes and dtypes: the number of tensors, and for each tensor the
# number of its dims, the index of its dtype in _DTYPES, and its sizes.
_HEADER_SIZE = 24


class ShapeAndDtype(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Channel:
    """One direction between this rank and a rank of a neighbouring stage.

    Attributes:
        group: the process group of this direction.
        peer: the other rank.
        where: names both stages in errors.
        num_bytes: the bytes of all tensors that were sent, without the messages of shapes.
    """

    group: dist.ProcessGroup
    peer: int
    device: torch.device
    where: str
    num_bytes: int = 0
    _forms: dict[Hashable, list[ShapeAndDtype]] = field(default_factory=dict)
    _sends: list[tuple[dist.Work, Tensor, str]] = field(default_factory=list)

    def knows(self, key: Hashable) -> bool:
        """Return True if a list of tensors with this key has been sent or received before."""
        return key in self._forms

    def send(self, tensors: Sequence[Tensor], key: Hashable, what: str) -> None:
        """Start to send tensors. `what` names them in errors."""
        forms = [ShapeAndDtype(tuple(x.shape), x.dtype) for x in tensors]
        if key not in self._forms:
            self._forms[key] = forms
            self._start_send(_encode_forms(forms).to(self.device), what)
        assert forms == self._forms[key], f"{self.where}: {what} are {forms} for the key {key}"
        self.send_known(tensors, what)

    def send_known(self, tensors: Sequence[Tensor], what: str) -> None:
        """Start to send tensors whose shapes and dtypes the receiver knows."""
        for tensor in tensors:
            self._start_send(tensor.detach().contiguous(), what)
            self.num_bytes += tensor.nbytes

    def _start_send(self, tensor: Tensor, what: str) -> None:
        with self.describe_errors(what):
            work = dist.isend(tensor, self.peer, group=self.group)
        assert work is not None
        self._sends = [item for item in self._sends if not item[0].is_completed()]
        self._sends.append((work, tensor, what))

    def receive(self, key: Hashable, what: str) -> Arrival:
        """Start to receive the list of tensors that the other rank sends with this key."""
        if key not in self._forms:
            header = torch.zeros(_HEADER_SIZE, dtype=torch.int64, device=self.device)
            with self.describe_errors(what):
                dist.recv(header, self.peer, group=self.group)
                self._forms[key] = _decode_forms(header.tolist())
        return self.receive_known(self._forms[key], what)

    def receive_known(self, forms: Sequence[ShapeAndDtype], what: str) -> Arrival:
        """Start to receive tensors of these shapes and dtypes."""
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in forms]
        with self.describe_errors(what):
            works = [dist.irecv(tensor, self.peer, group=self.group) for tensor in tensors]
        return Arrival(self, [work for work in works if work is not None], tensors, what)

    def finish(self) -> None:
        """Wait until all tensors are sent."""
        while self._sends:
            work, _, what = self._sends.pop()
            with self.describe_errors(what):
                work.wait()

    def forget(self) -> None:
        """Forget all sends after an error, without waiting for them."""
        self._sends.clear()

    def describe_errors(self, what: str) -> AbstractContextManager[None]:
        """Replace an error inside the block by one that names the stages and the operation."""
        return explain_timeout(f"{self.where}: {what}", self.group, " could not be transferred")


@dataclass
class Arrival:
    """Tensors that are being received."""

    channel: Channel
    works: list[dist.Work]
    tensors: list[Tensor]
    what: str

    def wait(self) -> list[Tensor]:
        """Return the received tensors, which later operators on this device may read.

        With NCCL, these operators wait for the transfer, and the host does not.
        """
        with self.channel.describe_errors(self.what):
            for work in self.works:
                work.wait()
        return self.tensors


def _encode_forms(forms: Sequence[ShapeAndDtype]) -> Tensor:
    numbers = [len(forms)]
    for shape, dtype in forms:
        numbers += [len(shape), _DTYPES.index(dtype), *shape]
    return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)))


def _decode_forms(numbers: Sequence[int]) -> list[ShapeAndDtype]:
    count, *rest = numbers
    forms = []
    for _ in range(count):
        num_dims, dtype = rest[:2]
        forms.append(ShapeAndDtype(tuple(rest[2 : 2 + num_dims]), _DTYPES[dtype]))
        rest = rest[2 + num_dims :]
    return forms


def broadcast_tensor(
    tensor: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Return the tensor of the rank `source` on every rank of `group`."""
    forms = [] if tensor is None else [ShapeAndDtype(tuple(tensor.shape), tensor.dtype)]
    header = _encode_forms(forms).to(device)
    dist.broadcast(header, source, group=group)
    if tensor is None:
        (form,) = _decode_forms(header.tolist())
        tensor = torch.empty(form.shape, dtype=form.dtype, device=device)
    tensor = tensor.contiguous()
    if tensor.numel():
        dist.broadcast(tensor, source, group=group)
    return tensor
