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
_SHARED = ("num_items_in_batch", "logits_to_keep", "cache_position")


class MicroBatch(NamedTuple):
    """One micro-batch: its arguments, and its rows as a share and as a slice of the batch."""

    arguments: dict[str, Any]
    share: float
    rows: slice


def cut_batch(given: dict[str, Any], num_rows: int, count: int) -> list[MicroBatch]:
    """Cut the arguments of a forward into `count` micro-batches of nearly equal size.

    `check_can_be_cut` has accepted the arguments.
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
    dim = _find_row_dim(name, value)
    return list(value.split(sizes, dim)) if value.shape[dim] == num_rows else [value] * len(sizes)


def _find_row_dim(name: str, value: Tensor) -> int:
    return 1 if name == _POSITIONS and value.ndim == 3 else 0


def check_can_be_cut(given: dict[str, Any], num_rows: int) -> None:
    """Raise ValueError if an argument of a forward cannot be cut into micro-batches.

    An argument that is the same for all rows is a number, a text or None, or a tensor with one row.
    """
    for name, value in given.items():
        if name in _SHARED:
            continue
        if isinstance(value, dict):
            check_can_be_cut({f"{name}[{key!r}]": x for key, x in value.items()}, num_rows)
        elif isinstance(value, Tensor):
            dim = _find_row_dim(name, value)
            if value.ndim and value.shape[dim] not in (1, num_rows):
                raise ValueError(
                    f"pp_size > 1 cuts a batch of {num_rows} rows into micro-batches, but {name} "
                    f"has the shape {tuple(value.shape)}, without {num_rows} rows in dim {dim}; "
                    f"pass one entry per row, or set pp_microbatches=1"
                )
        elif value is not None and not isinstance(value, int | float | str):
            raise ValueError(
                f"pp_size > 1 cuts a batch of {num_rows} rows into micro-batches, but {name} is a "
                f"{type(value).__name__}, whose rows are not known; pass a tensor with one entry "
                f"per row, or set pp_microbatches=1"
            )


def count_targets(given: dict[str, Any], ignored: int) -> Tensor:
    """Return the number of tokens with a causal loss in a batch, as a scalar tensor."""
    shifted = given.get("shift_labels")
    targets = given["labels"][..., 1:] if shifted is None else shifted
    ignored = given.get("ignore_index", ignored)
    return torch.as_tensor(targets).ne(ignored).sum()


def needs_grad(value: Any) -> bool:
    """Return True for a tensor that requires a gradient, or a dict that contains such a tensor."""
    if isinstance(value, dict):
        return any(map(needs_grad, value.values()))
    return isinstance(value, Tensor) and value.requires_grad
