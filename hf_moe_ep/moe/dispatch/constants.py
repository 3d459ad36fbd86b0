"""Cache the small constant tensors that a dispatcher reads in every layer and step."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class Constants:
    """The constant tensors of one dispatcher, by device and sizes."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}
        self._key_of_cells: Hashable = None

    def take_numbers(self, count: int, device: torch.device) -> Tensor:
        """Return the int32 numbers from 0 to `count` - 1.

        The result is a view of the longest vector so far, so batches of all lengths share a vector.
        """
        numbers = self._tensors.get(device)
        if numbers is None or len(numbers) < count:
            numbers = self._tensors[device] = torch.arange(count, dtype=torch.int32, device=device)
        return numbers[:count]

    def list_cell_tokens(self, num_ranks: int, num_tokens: int, device: torch.device) -> Tensor:
        """Return the token of each cell of a [D, T] table, flattened, as int32.

        Only the last result is kept, because all layers of a step have the same sizes.
        """
        key, name = (num_ranks, num_tokens, device), "cells"
        if self._key_of_cells != key:
            numbers = self.take_numbers(num_tokens, device)
            self._tensors[name] = numbers.expand(num_ranks, -1).flatten()
            self._key_of_cells = key
        return self._tensors[name]

    def number_experts(
        self, num_experts: int, num_local: int, rank: int, device: torch.device
    ) -> Tensor:
        """Number the experts of `rank` from 0 to L - 1, and give all other experts the number L.

        The last element of the result is the number of the id `num_experts`, which means "no
        expert" (`moe/stacked.py`, `moe/padding.py`).
        """
        key = (num_experts, num_local, rank, device)
        if key not in self._tensors:
            local_id_E = torch.full((num_experts + 1,), num_local, device=device)
            first = rank * num_local
            local_id_E[first : first + num_local] = torch.arange(num_local, device=device)
            self._tensors[key] = local_id_E
        return self._tensors[key]
