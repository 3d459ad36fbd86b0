"""Run a vision tower whose blocks are sharded, if ranks have different pictures and videos.

The blocks of the tower are FSDP2 units over all ranks, so either all ranks or no rank must run the
tower. If one rank skipped the tower, the other ranks would wait for this rank in an all-gather.
Before the language model runs, the ranks count how many of them have pixels:

    no rank              No rank runs the tower. The tower's parameters get no gradient, as in stock
                         code.
    at least one rank    Every rank runs the tower once, either on its images and videos together or
                         on one picture of zeros. `ZeroGradients` then connects the outputs for the
                         picture of zeros to the text embeddings. These outputs change no value, and
                         receive exact zeros in backward.

The outputs of the tower are passed to the model's own forward as `mm_encoder_outputs`, so images
and videos may be distributed over ranks in any way. `generate` encodes pictures before its first
forward, with one call of the tower for images and one for videos. For each of the two calls, either
all ranks run the tower or no rank does.

Within an sp group each rank takes a slice of the patches (`patches.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, ShardedOnly
from hf_moe_ep.upstream.models import bind_forward, find_cache, get_input_embedding
from hf_moe_ep.upstream.towers import (
    TOWER_OUTPUTS,
    get_tower_sizes,
    run_tower,
    split_tower_outputs,
)
from hf_moe_ep.vision.patches import PatchSlice
from hf_moe_ep.vision.zero_gradients import ZeroGradients

# For each modality: two arguments of the inner model's forward, the pixels and the sizes, and the
# name of the modality's token in the model's config.
_MODALITIES = {
    "image": ("pixel_values", "image_grid_thw", "image_token_id"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_token_id"),
}


class TowerOnce(ShardedOnly):
    """Pre-forward hook of the tower's owner that runs the tower on all ranks or on no rank."""

    def __init__(self, state: ModelState, tower: nn.Module, num_layers: int) -> None:
        super().__init__(state)
        self.tower, self.num_layers = tower, num_layers
        # The handle of a hook on the text embedding, which is registered for a single forward on a
        # rank without pixels.
        self.embedding_hook: RemovableHandle | None = None

    def run(
        self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.embedding_hook is not None:  # an earlier forward raised before its embedding ran
            self.embedding_hook.remove()
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return None
        given = bind_forward(inner, args, kwargs)
        if not any(self._seen_anywhere(inner, given, meshes.device)):
            return None
        own_inputs = {
            name: (given[pixels], given[grid])
            for name, (pixels, grid, _) in _MODALITIES.items()
            if given.get(pixels) is not None
        }
        if not own_inputs:  # only other ranks have pixels
            outputs = run_tower(inner, *self._make_picture_of_zeros(meshes.device))
            features = _list_used_features(outputs, self.num_layers)
            if any(feature.requires_grad for feature in features):
                self._connect(inner, given, features)
            return (), given
        pixels, grids = (torch.cat(parts) for parts in zip(*own_inputs.values(), strict=True))
        counts = [len(grid) for _, grid in own_inputs.values()]
        slice_argument = self._slice_patches(given.get(SLICE), grids)
        tower_output = run_tower(inner, pixels, grids, **slice_argument)
        outputs = split_tower_outputs(tower_output, counts)
        given[TOWER_OUTPUTS] = dict(zip(own_inputs, outputs, strict=True))
        for name in own_inputs:
            given[_MODALITIES[name][0]] = None  # otherwise `inner` would run the tower again
        return (), given

    def encode_before_generate(
        self,
        inner: nn.Module,
        stock: Callable[[dict[str, Any]], Any],
        model_kwargs: dict[str, Any],
    ) -> Any:
        """Call `stock`, by which `generate` runs the tower, so that every rank runs it as often."""
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return stock(model_kwargs)
        on_any_rank = self._seen_anywhere(inner, model_kwargs, meshes.device)
        for (pixels, _, _), must_run in zip(_MODALITIES.values(), on_any_rank, strict=True):
            if must_run and model_kwargs.get(pixels) is None:
                run_tower(inner, *self._make_picture_of_zeros(meshes.device))
        return stock(model_kwargs)

    def _connect(self, inner: nn.Module, given: dict[str, Any], features: list[Tensor]) -> None:
        """Make the backward of the text embeddings run through `features`, with gradients of zero.

        Otherwise this rank would skip the backward of the tower, in which other ranks wait for this
        rank.
        """

        def connect(embeds_BSH: Tensor) -> Tensor:
            (connected,) = ZeroGradients.apply(1, False, None, embeds_BSH, *features)
            return connected

        if given.get("inputs_embeds") is not None:
            given["inputs_embeds"] = connect(given["inputs_embeds"])
            return

        def connect_once(module: nn.Module, args: tuple[Any, ...], embeds_BSH: Tensor) -> Tensor:
            handle.remove()
            return connect(embeds_BSH)

        # PEFT and resize_token_embeddings replace the embedding, so it is looked up each time.
        embedding = get_input_embedding(inner)
        assert embedding is not None
        handle = embedding.register_forward_hook(torch.compiler.disable(connect_once))
        self.embedding_hook = handle

    def _seen_anywhere(
        self, inner: nn.Module, given: dict[str, Any], device: torch.device
    ) -> list[bool]:
        """Return, for each modality, True if at least one rank has pixels.

        Raises:
            ValueError: the pixels of a rank do not fit their grids or its text. Every rank raises
                the error.
        """
        pairs = list(self._list_size_pairs(inner, given, device))
        zero = torch.zeros((), dtype=torch.int64, device=device)
        num_own_errors = sum((left != right for _, left, right in pairs), zero)
        has = torch.tensor(
            [given.get(pixels) is not None for pixels, _, _ in _MODALITIES.values()], device=device
        )
        own_counts = torch.cat([num_own_errors[None], has.to(num_own_errors.dtype)])
        # This is the only host sync.
        num_errors, *rank_counts = sum_over_ranks(own_counts).tolist()
        if num_errors:
            own_errors = [
                text.format(int(left), int(right))
                for text, left, right in pairs
                if int(left) != int(right)
            ]
            raise ValueError(
                "; ".join(own_errors)
                or "another rank's images do not fit its text; the error of that rank has the sizes"
            )
        return [count > 0 for count in rank_counts]

    def _list_size_pairs(
        self, inner: nn.Module, given: dict[str, Any], device: torch.device
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (text, left, right): an error text, and two scalars on `device` that must be equal.

        The text has a `{}` for each number. If the tower has already run, nothing is yielded,
        because the arguments have no pixels.
        """
        if given.get(TOWER_OUTPUTS):
            return
        merge, _ = get_tower_sizes(self.tower)
        ids = None if find_cache(given) is not None else given.get("input_ids")
        for pixels, grid, token in _MODALITIES.values():
            sizes, rows = given.get(grid), given.get(pixels)
            zero = torch.zeros((), dtype=torch.int64, device=device)
            patches = zero if sizes is None else sizes.prod(1).sum()
            num_rows = zero if rows is None else zero + rows.shape[0]
            yield f"{grid} has {{}} patches, {pixels} has {{}} rows", patches, num_rows
            if ids is not None:
                text = f"input_ids has {{}} tokens of {token}, {grid} makes {{}}"
                yield text, (ids == getattr(inner.config, token)).sum(), patches // merge**2

    def _slice_patches(self, sequence: Slice | None, grids: Tensor) -> dict[str, PatchSlice]:
        """Return the keyword argument with this rank's slice of the patches, or {} without sp.

        `sequence` is this rank's slice of the text; `grids` (pictures, 3) has the frames, height
        and width of each picture in patches.
        """
        if sequence is None or sequence.sp_slice.size == 1:
            return {}
        frames = [height * width for count, height, width in grids.tolist() for _ in range(count)]
        merge, _ = get_tower_sizes(self.tower)
        return {SLICE: PatchSlice(sequence, frames, merge**2)}

    def _make_picture_of_zeros(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Make pixels and grid of the smallest picture, whose patches are merged into one token."""
        merge, values = get_tower_sizes(self.tower)
        pixels = torch.zeros(merge * merge, values, device=device)
        return pixels, torch.tensor([[1, merge, merge]], device=device)


def _list_used_features(outputs: Any, num_layers: int) -> list[Tensor]:
    """List the outputs of the tower that a decoder of `num_layers` layers uses.

    The decoder adds one of the deepstack features after each of its first layers.
    """
    return [
        feature
        for features in (outputs.pooler_output, *outputs.deepstack_features[:num_layers])
        for feature in features
    ]
