"""The vision tower under FSDP2 and sequence parallelism, where some ranks have images, others none.

The tower is sharded over all ranks, so all of them have to run it or none: a rank that skips it
leaves the others waiting in its all-gather. Before the language model begins, ranks tell each other
whether they have pixels:

    nobody has        the tower rests; its parameters get no gradient, as in stock code
    somebody has      every rank runs it once: on its images and videos together, or else on one
                      patch of zeros, whose outputs are tied to the text embeddings by a function
                      that adds nothing forward and sends exact zeros backward

Which ranks hold which modality, and how many tiles, changes nothing else: in a sharded model the
inner forward takes the tower's outputs as `mm_encoder_outputs` and places them itself. In front of
`generate`, which encodes pictures before its first forward, it is the same, once for images and
once for videos.

Within an sp group each rank takes a slice of the patches: `patches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, ShardedOnly
from hf_moe_ep.upstream.models import bind_forward, given_cache, input_embedding
from hf_moe_ep.upstream.sharded_models import begin_with_root
from hf_moe_ep.upstream.towers import (
    TOWER_OUTPUTS,
    run_tower,
    split_tower_outputs,
    tower_sizes,
)
from hf_moe_ep.vision.patches import PatchSlice
from hf_moe_ep.vision.tie import Tie

# What the inner model's forward calls pixels and their grids; what its config calls their token.
_MODALITIES = {
    "image": ("pixel_values", "image_grid_thw", "image_token_id"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_token_id"),
}


class TowerOnce(ShardedOnly):
    """Runs the vision tower, on every rank or on none.

    A pre-forward hook of the model that holds the tower.
    """

    def __init__(self, state: ModelState, tower: nn.Module, num_layers: int) -> None:
        self.state, self.tower, self.num_layers = state, tower, num_layers
        # The hook that ties the outputs of a run without pixels to the embeddings, once.
        self.tie: RemovableHandle | None = None

    def run(
        self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.tie is not None:  # left by a forward that ended before its embedding ran
            self.tie.remove()
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return None
        given = bind_forward(inner, args, kwargs)
        if not any(self._who_sees(inner, given, meshes.device)):
            return None
        here = {
            name: (given[pixels], given[grid])
            for name, (pixels, grid, _) in _MODALITIES.items()
            if given.get(pixels) is not None
        }
        if not here:  # others have pixels: this rank runs along on zeros
            outputs = run_tower(inner, *self._nothing_to_see(meshes.device))
            unseen = _features(outputs, self.num_layers)
            if any(feature.requires_grad for feature in unseen):
                self._tie_once(inner, given, unseen)
            return (), given
        pixels, grids = (torch.cat(parts) for parts in zip(*here.values(), strict=True))
        counts = [len(grid) for _, grid in here.values()]
        split = self._split(given.get(SLICE), grids)
        outputs = split_tower_outputs(run_tower(inner, pixels, grids, **split), counts)
        given[TOWER_OUTPUTS] = dict(zip(here, outputs, strict=True))
        for name in here:
            given[_MODALITIES[name][0]] = None  # its tower has run
        return (), given

    def encode_ahead(
        self,
        root: nn.Module,
        inner: nn.Module,
        stock: Callable[[dict[str, Any]], Any],
        model_kwargs: dict[str, Any],
    ) -> Any:
        """Run the tower in front of `generate`, as often on every rank as on any.

        It takes the place of the model's own function, `stock`.
        """
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return stock(model_kwargs)
        if isinstance(root, FSDPModule):
            begin_with_root(root)
        anywhere = self._who_sees(inner, model_kwargs, meshes.device)
        for (pixels, _, _), seen in zip(_MODALITIES.values(), anywhere, strict=True):
            if seen and model_kwargs.get(pixels) is None:
                run_tower(inner, *self._nothing_to_see(meshes.device))
        return stock(model_kwargs)

    def _tie_once(self, inner: nn.Module, given: dict[str, Any], unseen: list[Tensor]) -> None:
        """Make the embeddings of this forward depend on `unseen`, by a gradient of exact zeros.

        Without it backward would pass the tower by on this rank, while others wait for it there.
        """
        if given.get("inputs_embeds") is not None:
            given["inputs_embeds"] = Tie.apply(given["inputs_embeds"], *unseen)
            return

        def tie(module: nn.Module, args: tuple[Any, ...], embeds_BSH: Tensor) -> Tensor:
            handle.remove()
            return Tie.apply(embeds_BSH, *unseen)

        # Found now: PEFT and resize_token_embeddings put others in its place.
        embedding = input_embedding(inner)
        assert embedding is not None
        self.tie = handle = embedding.register_forward_hook(torch.compiler.disable(tie))

    def _who_sees(
        self, inner: nn.Module, given: dict[str, Any], device: torch.device
    ) -> list[bool]:
        """Return for each modality whether any rank has pixels of it.

        Raises:
            ValueError: a rank has pixels that do not fit their grids or its text; on every rank.
        """
        claims = list(self._claims(inner, given, device))
        none = torch.zeros((), dtype=torch.int64, device=device)
        wrong = sum((left != right for _, left, right in claims), none)
        has = [given.get(pixels) is not None for pixels, _, _ in _MODALITIES.values()]
        # The host waits here, once per forward: no rank knows alone.
        mine = torch.cat([wrong[None], torch.tensor(has, device=device).to(wrong.dtype)])
        num_wrong, *anywhere = sum_over_ranks(mine).tolist()
        if num_wrong:
            wrong_here = [
                text.format(int(left), int(right))
                for text, left, right in claims
                if int(left) != int(right)
            ]
            raise ValueError(
                "; ".join(wrong_here)
                or "another rank's images do not fit its text; its error says more"
            )
        return [count > 0 for count in anywhere]

    def _claims(
        self, inner: nn.Module, given: dict[str, Any], device: torch.device
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (text, left, right): two numbers that must be equal, and the error otherwise.

        Both are scalars on `device`; `text` has a `{}` for each. A tower that has run, in front of
        `generate` or by the caller, has left no pixels to compare.
        """
        if given.get(TOWER_OUTPUTS):
            return
        merge, _ = tower_sizes(self.tower)
        ids = None if given_cache(given) is not None else given.get("input_ids")
        for pixels, grid, token in _MODALITIES.values():
            sizes, rows = given.get(grid), given.get(pixels)
            zero = torch.zeros((), dtype=torch.int64, device=device)
            patches = zero if sizes is None else sizes.prod(1).sum()
            has = zero if rows is None else zero + rows.shape[0]
            yield f"{grid} has {{}} patches, {pixels} has {{}} rows", patches, has
            if ids is not None:
                text = f"input_ids has {{}} tokens of {token}, {grid} makes {{}}"
                yield text, (ids == getattr(inner.config, token)).sum(), patches // merge**2

    def _split(self, sequence: Slice | None, grids: Tensor) -> dict[str, PatchSlice]:
        """Return the keyword that gives the tower its slice of the patches; {} where none is split.

        `sequence` is this rank's slice of the text, `grids` (pictures, 3) the sizes in patches.
        """
        if sequence is None:
            return {}
        frames = [height * width for count, height, width in grids.tolist() for _ in range(count)]
        merge, _ = tower_sizes(self.tower)
        return {SLICE: PatchSlice(sequence, frames, merge**2)}

    def _nothing_to_see(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return pixels and grid of one picture of zeros: m x m patches that become one token.

        It is the smallest that goes through every part of the tower.
        """
        merge, values = tower_sizes(self.tower)
        pixels = torch.zeros(merge * merge, values, device=device)
        return pixels, torch.tensor([[1, merge, merge]], device=device)


def _features(outputs: Any, num_layers: int) -> list[Tensor]:
    """Return all tensors in the tower's outputs that a decoder of so many layers uses.

    It adds one of the deepstack features behind each of its layers, until there are no more.
    """
    return [
        feature
        for features in (outputs.pooler_output, *outputs.deepstack_features[:num_layers])
        for feature in features
    ]
