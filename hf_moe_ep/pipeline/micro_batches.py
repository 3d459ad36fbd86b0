"""Cut the arguments of a forward into micro-batches, by the rows of the batch.

A batch of 7 rows makes 4 micro-batches of 2, 2, 2 and 1 rows. A row is never cut, so packed rows
stay whole. All ranks of a stage run the same number of micro-batches, because they gather the
parameters together. Ranks may have different numbers of rows; no rank gets more micro-batches than
the smallest batch has rows.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

# This argument may be (3, B, S): a position in time, a row and a column of each token in a picture.
_POSITIONS = "position_ids"
# Arguments that are the same for all rows.
_SHARED = ("num_items_in_batch", "logits_to_keep")


class MicroBatch(NamedTuple):
    """The arguments of one micro-batch, its share of the rows of the batch, and these rows."""

    arguments: dict[str, Any]
    share: float
    rows: slice


def cut_batch(given: dict[str, Any], num_rows: int, count: int) -> list[MicroBatch]:
    """Cut the arguments of a forward into `count` micro-batches of nearly equal size.

    Raises:
        ValueError: a tensor has no dimension that counts rows.
    """
    if count == 1:
        return [MicroBatch(given, 1.0, slice(0, num_rows))]
    sizes = [num_rows // count + (index < num_rows % count) for index in range(count)]
    parts = {name: _cut(name, value, num_rows, sizes) for name, value in given.items()}
    ends = list(accumulate(sizes))
    return [
        MicroBatch(
            {name: values[index] for name, values in parts.items()},
            size / num_rows,
            slice(end - size, end),
        )
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def _cut(name: str, value: Any, num_rows: int, sizes: list[int]) -> list[Any]:
    """Return the value of an argument for each micro-batch."""
    if isinstance(value, dict):
        by_key = {key: _cut(f"{name}[{key!r}]", x, num_rows, sizes) for key, x in value.items()}
        return [{key: parts[i] for key, parts in by_key.items()} for i in range(len(sizes))]
    if not isinstance(value, Tensor) or value.ndim == 0 or name in _SHARED:
        return [value] * len(sizes)
    dim = 1 if name == _POSITIONS and value.ndim == 3 else 0
    if value.shape[dim] == num_rows:
        return list(value.split(sizes, dim))
    if value.shape[dim] == 1:
        return [value] * len(sizes)
    raise ValueError(
        f"pp_size > 1 cuts a batch of {num_rows} rows into micro-batches, but {name} has the shape "
        f"{tuple(value.shape)}, without {num_rows} rows in dim {dim}; pass one entry per row, or "
        f"set pp_microbatches=1"
    )


def count_targets(given: dict[str, Any], ignored: int) -> Tensor:
    """Return the number of tokens with a causal loss in a batch, as a scalar tensor."""
    shifted = given.get("shift_labels")
    targets = given["labels"][..., 1:] if shifted is None else shifted
    ignored = given.get("ignore_index", ignored)
    return torch.as_tensor(targets).ne(ignored).sum()
