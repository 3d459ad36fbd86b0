"""`PositionCollator`: compute the position ids of vision-language batches in the data loader.

Tokens of a picture have a time, a row and a column. Stock code computes these three numbers in
forward, on the training device. It reads the frames, height and width of each picture on the host,
which takes at least three host syncs per picture. A worker of the data loader has the sizes of the
pictures on the CPU, so `PositionCollator` computes the numbers in the worker:

    DataLoader(dataset, collate_fn=PositionCollator(model, collate), num_workers=4)
    Trainer(model, args, data_collator=PositionCollator(model, collate), ...)

For example, two tokens of text, a picture of 2 x 2 tokens, and one token of text have these
positions:

    time     0 1 2 2 2 2 4
    row      0 1 2 2 3 3 4
    column   0 1 2 3 2 3 4

The numbers come from the model's own `get_rope_index` (transformers, models/qwen3_vl_moe). Stock
code does not call this function for a batch without pictures, so the collator returns such a batch
unchanged. The model's outputs are therefore bit-equal with and without the collator.

Do not use the collator with a loader that slices whole batches along their first dimension
(`dispatch_batches` of Accelerate): the first dimension of `position_ids` holds the three numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn

from hf_moe_ep.upstream.sharded_models import get_stock_class

_GRIDS = ("image_grid_thw", "video_grid_thw")


class PositionCollator:
    """A collate function that adds `position_ids` (3, B, S) to batches with pictures.

    Args:
        model: a vision-language model, with any wrappers around it. The collator keeps only the
            config, so no weights are sent to the workers.
        collate: a function that turns a list of samples into a batch. The batch holds `input_ids`
            (B, S), `mm_token_type_ids` (B, S), the grids of the pictures and, with padding,
            `attention_mask`, as the model's processor returns them. Spawned workers need a
            function that can be pickled.

    Raises:
        ValueError: the model has no `get_rope_index`, or numbers pictures together with sound. A
            call of the collator raises it for a batch with pictures but no `mm_token_type_ids`.
    """

    def __init__(self, model: nn.Module, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        inner = _find_inner(model)
        self._bare = _make_without_weights(inner)
        self._wanted = [*inspect.signature(self._bare.get_rope_index).parameters]
        if "audio_seqlens" in self._wanted:
            raise ValueError(
                f"{type(inner).__name__} numbers the tokens of pictures together with those of "
                f"sound, whose lengths are known only in its forward; use the collate function "
                f"itself"
            )

    def __call__(self, samples: list[Any]) -> MutableMapping[str, Any]:
        """Collate `samples`; add `position_ids` if the batch has pictures and no positions yet."""
        batch: MutableMapping[str, Any] = self.collate(samples)
        has_pictures = any(batch.get(name) is not None for name in _GRIDS)
        if not has_pictures or batch.get("position_ids") is not None:
            return batch
        if batch.get("mm_token_type_ids") is None:
            raise ValueError(
                f"the batch has pictures but no mm_token_type_ids, only {', '.join(batch)}; the "
                "processor returns them with input_ids, and collate has to pass them on"
            )
        given = {name: batch[name] for name in self._wanted if name in batch}
        batch["position_ids"], _ = self._bare.get_rope_index(**given)
        return batch


def _find_inner(model: nn.Module) -> nn.Module:
    """Return the module whose class has `get_rope_index`.

    Only classes are searched, because a PEFT wrapper has the attributes of the module inside it.
    """
    for module in model.modules():
        if hasattr(type(module), "get_rope_index"):
            return module
    raise ValueError(
        f"{type(model).__name__} is not a vision-language model: none of its modules has "
        "get_rope_index; text needs no PositionCollator, use the collate function itself"
    )


def _make_without_weights(inner: nn.Module) -> Any:
    """Make an instance of the same class that has only the config."""
    # FSDP2 replaces the class of a module by a subclass that no worker can import.
    stock: Any = get_stock_class(type(inner))
    bare: Any = stock.__new__(stock)
    nn.Module.__init__(bare)
    bare.config = inner.config
    return bare
