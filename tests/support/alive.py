"""Measure the memory of this process's tensors, at any time or at the writes of a checkpoint."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.storage.safetensors_file import Writer
from hf_moe_ep.ranks.boxes import Box


def bytes_alive() -> int:
    """Sum the bytes of all tensors of this process; each storage counts once."""
    # `isinstance` would also find fake tensors, which have no memory, and import lazy modules.
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
    """At each write of a checkpoint, record the bytes of all new tensors except the written one."""
    alive: list[int] = []
    stock = Writer.write

    def write(file: Writer, key: str, view: tuple[int, ...], box: Box, tensor: Tensor) -> None:
        alive.append(bytes_alive() - tensor.untyped_storage().nbytes())
        stock(file, key, view, box, tensor)

    gc.collect()
    gc.freeze()  # from here on gc.get_objects() lists only new objects, which are far fewer
    try:
        with mock.patch.object(Writer, "write", write):
            yield alive
    finally:
        gc.unfreeze()
    assert alive, "nothing was written"
