"""Sharded parameters -> Hugging Face checkpoint in hub layout.

Tensors are gathered one after the other, every rank taking part, and kept by rank 0 alone, in
host memory; transformers' own writer then turns the stacked experts back into the layout of the
hub (one key per expert for Qwen3-MoE) and writes shards, index and config.

Rank 0 needs host memory for the whole model.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep import hf
from hf_moe_ep.factors import pack_factors
from hf_moe_ep.meet import check_everyone_calls

# How far ranks may be apart when they begin to save.
_PATIENCE = timedelta(minutes=5)


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """Write `model` so that stock `from_pretrained(directory)` loads it; every rank calls this.

    Args:
        model: patched, sharded or not.
        directory: created if missing; shared by all ranks (only rank 0 writes).
        kwargs: passed to the model's own `save_pretrained`.

    Raises:
        RuntimeError: some rank has not called this within five minutes.
    """
    check_everyone_calls("save_pretrained", _PATIENCE)
    state_dict = gather_state_dict(model, kwargs.get("save_embedding_layers", "auto"))
    distributed = dist.is_available() and dist.is_initialized()
    if not distributed or dist.get_rank() == 0:
        hf.unwrap(model).save_pretrained(os.fspath(directory), state_dict=state_dict, **kwargs)
    if distributed:
        dist.barrier()


@torch.no_grad()
def gather_state_dict(
    model: nn.Module, save_embedding_layers: str | bool = "auto"
) -> dict[str, Tensor]:
    """Full tensors on the host of rank 0, empty elsewhere; every rank calls this.

    Of a model with adapters what PEFT saves, packed as PEFT packs it: the base stays where it is.
    `save_embedding_layers` as in PEFT's save_pretrained.
    """
    keep = not dist.is_initialized() or dist.get_rank() == 0
    full: dict[str, Tensor] = {}
    model = hf.unwrap(model)
    state_dict = model.state_dict()
    names = hf.adapter_names(model, state_dict, save_embedding_layers) if keep else None
    if dist.is_initialized():
        # Rank 0 decides: PEFT looks into files that others may not have.
        decision = [names]
        dist.broadcast_object_list(decision, src=0)
        names = decision[0]
    for name in state_dict if names is None else names:
        tensor = state_dict[name]
        whole = _whole(tensor) if isinstance(tensor, DTensor) else tensor
        if keep:
            full[hf.canonical_name(name)] = whole.detach().cpu()
    return pack_factors(model, full)


def _whole(tensor: DTensor) -> Tensor:
    # One mesh axis at a time: DTensor warns on every rank when it has to order several itself.
    for axis in range(tensor.device_mesh.ndim):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
