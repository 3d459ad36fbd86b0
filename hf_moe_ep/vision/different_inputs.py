"""`RefuseDifferentInputs`: raise an error on every rank if only some ranks have pictures or sound.

This hook is for models in which no tower was found. If such a model has towers, they belong to the
FSDP2 unit of the root, so either all ranks or no rank must run the towers. Otherwise the ranks
would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_moe_ep.state import ModelState, ShardedOnly
from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.vision.encoders import encode_before_generate, sum_on_host


class RefuseDifferentInputs(ShardedOnly):
    """Pre-forward hook of the root that compares which arguments of `names` the ranks were given.

    Raises:
        ValueError: only some ranks were given an argument. Every rank raises the error.
    """

    def __init__(self, state: ModelState, names: list[str]) -> None:
        self.state, self.names = state, names

    def run(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._compare(bind_forward(root, args, kwargs))

    def encode_before_generate(
        self, root: nn.Module, stock: Callable[[dict[str, Any]], Any], model_kwargs: dict[str, Any]
    ) -> Any:
        """Compare the arguments of `generate`, then run the towers with the root gathered."""
        self._compare(model_kwargs)
        return encode_before_generate(self.state, root, stock, model_kwargs)

    def _compare(self, given: dict[str, Any]) -> None:
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return
        has_input = [bool(list_tensors_in(given.get(name))) for name in self.names]
        counts = zip(self.names, sum_on_host(self.state, has_input), strict=True)
        differing = [name for name, count in counts if 0 < count < meshes.world_size]
        if differing:
            raise ValueError(
                f"some ranks were given {', '.join(differing)} and others were not, and the towers "
                f"of {self.state.plan.model_type} can only run on all ranks or on none; give every "
                f"rank pictures and sound of the same kinds, or none"
            )
