"""`RefuseUnlike`: an error on every rank where ranks would wait for each other in vain.

For models whose towers nobody has found a way to run on some ranks alone: what is sharded is
gathered, and gives its gradients away, on all ranks or on none. They are a part of the root's unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState, ShardedOnly
from hf_moe_ep.upstream.graph import tensors_in
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.vision.encoders import encode_ahead


class RefuseUnlike(ShardedOnly):
    """Compares over ranks which of `names` a forward was given: a pre-forward hook of the root.

    Raises:
        ValueError: ranks were given different ones; on every rank.
    """

    def __init__(self, state: ModelState, names: list[str]) -> None:
        self.state, self.names = state, names

    def run(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._compare(bind_forward(root, args, kwargs))

    def encode_ahead(
        self, root: nn.Module, stock: Callable[[dict[str, Any]], Any], model_kwargs: dict[str, Any]
    ) -> Any:
        """Compare what `generate` was given, and run the towers of the gathered root."""
        self._compare(model_kwargs)
        return encode_ahead(self.state, root, stock, model_kwargs)

    def _compare(self, given: dict[str, Any]) -> None:
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return
        mine = [next(tensors_in(given.get(name)), None) is not None for name in self.names]
        told = sum_over_ranks(torch.tensor(mine, dtype=torch.int64, device=meshes.device))
        pairs = zip(self.names, told.tolist(), strict=True)
        unlike = [name for name, count in pairs if 0 < count < meshes.world_size]
        if unlike:
            raise ValueError(
                f"some ranks were given {', '.join(unlike)} and others were not, and the towers of "
                f"{self.state.plan.model_type} can be run by all ranks or by none; give every rank "
                "pictures and sound of the same kinds, or none"
            )
