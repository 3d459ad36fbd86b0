"""The vision tower under FSDP2, where some ranks have images and others have none.

The tower is sharded over all ranks, so all of them have to run it or none: a rank that skips it
leaves the others waiting in its all-gather. Before the language model begins, ranks tell each other
whether they have pixels:

    nobody has        the tower rests; its parameters get no gradient, as in stock code
    somebody has      every rank runs it once: on its images and videos together, or else on one
                      patch of zeros, whose outputs are tied to the text embeddings by a function
                      that adds nothing forward and sends exact zeros backward

Which ranks hold which modality, and how many tiles, changes nothing else: in a sharded model the
inner forward takes the tower's outputs as `mm_encoder_outputs` and places them itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_moe_ep import hf
from hf_moe_ep.comm import sum_over_ranks
from hf_moe_ep.ops.autograd import nothing
from hf_moe_ep.state import ModelState

# What the inner model's forward calls pixels and their grids.
_MODALITIES = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


class TowerOnce:
    """Pre-forward hook of the model that holds the tower: runs it, on every rank or on none."""

    def __init__(self, state: ModelState, tower: nn.Module) -> None:
        self.state, self.tower = state, tower
        # Outputs that no token stands for; `KeepUnseen` ties them to the embeddings.
        self.unseen: list[Tensor] = []

    @torch.compiler.disable
    def __call__(
        self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.unseen = []
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return None
        given = hf.bind_forward(inner, args, kwargs)
        here = {
            name: (given[pixels], given[grid])
            for name, (pixels, grid) in _MODALITIES.items()
            if given.get(pixels) is not None
        }
        # The host waits here, once per forward: no rank knows alone.
        if not sum_over_ranks(torch.tensor(len(here), device=meshes.device)).item():
            return None
        if not here:
            self.unseen = _features(hf.run_tower(inner, *self._nothing_to_see(meshes.device)))
            if given.get("inputs_embeds") is not None:
                given["inputs_embeds"] = self.tie(given["inputs_embeds"])
            return (), given
        pixels, grids = (torch.cat(parts) for parts in zip(*here.values(), strict=True))
        counts = [len(grid) for _, grid in here.values()]
        outputs = hf.split_tower_outputs(hf.run_tower(inner, pixels, grids), counts)
        given[hf.TOWER_OUTPUTS] = dict(zip(here, outputs, strict=True))
        for name in here:
            given[_MODALITIES[name][0]] = None
        return (), given

    def tie(self, embeds_BSH: Tensor) -> Tensor:
        """The same embeddings, through which the unseen outputs get a gradient: zero."""
        unseen, self.unseen = self.unseen, []
        if not any(feature.requires_grad for feature in unseen):
            return embeds_BSH
        return _Tie.apply(embeds_BSH, *unseen)

    def _nothing_to_see(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Pixels and grid of the smallest picture that goes through every part of the tower."""
        merge, values = hf.tower_sizes(self.tower)
        pixels = torch.zeros(merge * merge, values, device=device)
        return pixels, torch.tensor([[1, merge, merge]], device=device)


class KeepUnseen:
    """Forward hook of the text embedding: keeps what a run without pixels gave in the graph."""

    def __init__(self, tower: TowerOnce) -> None:
        self.tower = tower

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], embeds_BSH: Tensor) -> Tensor:
        return self.tower.tie(embeds_BSH) if self.tower.unseen else embeds_BSH


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeds_BSH: Tensor, *unseen: Tensor) -> Tensor:
        ctx.like = [(feature.new_empty(0), feature.shape) for feature in unseen]
        return embeds_BSH.view_as(embeds_BSH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        return grad_BSH, *(nothing(*like) if needed else None for like, needed in pairs)


def _features(outputs: Any) -> list[Tensor]:
    return [
        feature
        for features in (outputs.pooler_output, *outputs.deepstack_features)
        for feature in features
    ]
