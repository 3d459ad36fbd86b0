"""How much memory tensors of this process take."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.storage.boxes import Box
from hf_moe_ep.checkpoints.storage.safetensors_file import Writer


def bytes_alive() -> int:
    """Bytes of all tensors of this process."""
    # By their very type: fake tensors of torch.compile have no memory, lazy modules no attributes.
    tensors = [
        x
        for x in gc.get_objects()
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta and x.layout == torch.strided
    ]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


@contextmanager
def alive_at_writes() -> Iterator[list[int]]:
    """At each write of a checkpoint, note the bytes of other new tensors that are alive."""
    alive: list[int] = []
    stock = Writer.write

    def watched(file: Writer, key: str, view: tuple[int, ...], box: Box, tensor: Tensor) -> None:
        alive.append(bytes_alive() - tensor.untyped_storage().nbytes())
        stock(file, key, view, box, tensor)

    gc.collect()
    gc.freeze()  # the collector lists only what is made from here on, which is much less
    try:
        with mock.patch.object(Writer, "write", watched):
            yield alive
    finally:
        gc.unfreeze()
    assert alive, "something is written"
