"""`PositionCollator`: position ids of vision-language batches, made where the data is.

Tokens of a picture have a time, a row and a column. Stock code derives the three numbers in
forward, on the training device, and reads each picture's frames, height and width back from it: at
least three host syncs a picture. A data loader's worker has the same data on the CPU and nothing to
wait for:

    DataLoader(dataset, collate_fn=PositionCollator(model, collate), num_workers=4)
    Trainer(model, args, data_collator=PositionCollator(model, collate), ...)

One row: two tokens of text, a picture of 2 x 2 tokens, text again.

    time     0 1 2 2 2 2 4
    row      0 1 2 2 3 3 4
    column   0 1 2 3 2 3 4

The numbers come from the model's own `get_rope_index` (transformers, models/qwen3_vl_moe). Where
stock code would not call it, in a batch without pictures, nothing is added: outputs stay stock's to
the last bit.

Not for loaders that slice ready batches along their first dimension (`dispatch_batches` of
Accelerate): here it counts the three numbers, not the samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_GRIDS = ("image_grid_thw", "video_grid_thw")


class PositionCollator:
    """Adds `position_ids` (3, B, S) to every batch of `collate` that has pictures.

    Args:
        model: a vision-language model, in whatever it is wrapped; only its config is kept, so that
            workers of any start method are sent no weights.
        collate: makes a batch of a list of samples; its batches hold `input_ids` (B, S),
            `mm_token_type_ids` (B, S), the grids of the pictures and, if padded, `attention_mask`,
            as the model's processor returns them. Picklable, for workers that are spawned.

    Raises:
        ValueError: a model without such positions; when called, pictures without
            `mm_token_type_ids`.
    """

    def __init__(self, model: nn.Module, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self._bare = _without_weights(_find_inner(model))
        self._wanted = [*inspect.signature(self._bare.get_rope_index).parameters]

    def __call__(self, samples: list[Any]) -> MutableMapping[str, Any]:
        """Return the batch of `samples`, with `position_ids` where it has pictures and none yet."""
        batch: MutableMapping[str, Any] = self.collate(samples)
        has_pictures = any(batch.get(name) is not None for name in _GRIDS)
        if not has_pictures or batch.get("position_ids") is not None:
            return batch
        if batch.get("mm_token_type_ids") is None:
            raise ValueError(
                f"the batch has pictures but no mm_token_type_ids, only {', '.join(batch)}; the "
                "processor returns them beside input_ids, collate has to pass them on"
            )
        given = {name: batch[name] for name in self._wanted if name in batch}
        batch["position_ids"], _ = self._bare.get_rope_index(**given)
        return batch


def _find_inner(model: nn.Module) -> nn.Module:
    """Return the module whose own class has `get_rope_index`.

    Wrappers of PEFT answer for attributes of what they wrap, so the instance tells nothing.
    """
    for module in model.modules():
        if hasattr(type(module), "get_rope_index"):
            return module
    raise ValueError(
        f"{type(model).__name__} is not a vision-language model: none of its modules has "
        "get_rope_index; text needs no PositionCollator, use the collate function itself"
    )


def _without_weights(inner: nn.Module) -> Any:
    """Return an instance of the same class that holds the config and nothing else."""
    # FSDP2 swaps a module's class for one of its own, which no worker could import.
    stock = next(kind for kind in type(inner).__mro__ if not issubclass(kind, FSDPModule))
    bare: Any = stock.__new__(stock)
    nn.Module.__init__(bare)
    bare.config = inner.config
    return bare
