"""Record which values an engine has received, so that the next sync sends only changed tensors.

    token = SyncToken()                                     one per engine
    for step in range(steps):
        train()
        engine.load_weights(hub_tensors(model, since=token))

The first sync sends everything. A later sync leaves out a checkpoint tensor if its parameters have
not changed since the sync before: frozen parameters, and with LoRA all weights without an adapter.
To find them, two 64-bit sums over the bits and positions of a parameter's elements are compared
(`storage/checksums.py`). The sums are computed from the values themselves, because autograd does
not see writes through `.data`, and a missed change would leave an engine with old weights.

A sum over the shards of all ranks is the same in each layout, so runs with ep 8 and with ep 1 have
equal tokens. Experts that `balance_experts` has moved count at their positions in hub order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.checkpoints.storage.checksums import SEEDS, mix_bits, sum_over_shards
from hf_moe_ep.ranks.boxes import Box, get_local_box, get_local_tensor, number_elements

# The bits of this number of elements are mixed at a time, in about 60 bytes of memory for each.
_ELEMENTS_PER_STEP = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = tuple[int, int]


@dataclass
class SyncToken:
    """Checksums of the tensors that one engine has received from `hub_tensors(since=token)`.

    A token has the same contents on every rank. It is empty at first, and becomes empty again if a
    sync fails, so that the next sync sends everything. Call `clear` if the engine has lost its
    weights (vLLM's sleep level 2).
    """

    _received: dict[str, str] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Return the number of groups of checkpoint tensors that the engine has received."""
        return len(self._received)

    def clear(self) -> None:
        """Forget what the engine has received."""
        self._received.clear()

    def holds(self, key: str, fingerprint: str) -> bool:
        """Return True if the engine has received the group `key` with this fingerprint."""
        return self._received.get(key) == fingerprint

    def set(self, fingerprints: dict[str, str]) -> None:
        """Store the fingerprints of all tensors that the engine has now, instead of older ones."""
        self._received = dict(fingerprints)


@torch.no_grad()
def compute_checksums(tensors: Sequence[tuple[Tensor, Tensor | None]]) -> list[Sums]:
    """Compute the sums of tensors over all ranks; every rank calls this.

    Args:
        tensors: pairs (tensor, slots). Expert e is stored in the row slots[e]; if slots is None, it
            is stored in the row e.
    """
    results: list[Sums | None] = [None] * len(tensors)
    numbers_by_layout: dict[tuple[object, ...], list[int]] = {}
    for number, (tensor, _) in enumerate(tensors):
        layout = (tensor.device_mesh, *tensor.placements) if isinstance(tensor, DTensor) else ()
        numbers_by_layout.setdefault(layout, []).append(number)
    for numbers in numbers_by_layout.values():
        sums = torch.stack([_sum_shard(*tensors[number]) for number in numbers])
        total = sum_over_shards(sums, tensors[numbers[0]][0])
        for number, (first, second) in zip(numbers, total.tolist(), strict=True):
            results[number] = first, second
    return [result for result in results if result is not None]


def _sum_shard(tensor: Tensor, slots: Tensor | None) -> Tensor:
    """Compute the two sums of this rank's shard, a few rows at a time."""
    local, box = get_local_tensor(tensor).detach(), get_local_box(tensor)
    total = torch.zeros(len(SEEDS), dtype=torch.int64, device=local.device)
    if local.numel() == 0:
        return total
    words = local.contiguous().view(_WORDS[local.element_size()])
    if local.ndim == 0:
        words, box = words.view(1), ((0, 1),)
    shape = tensor.shape or (1,)
    row_of_expert = None if slots is None else slots.argsort().tolist()
    step = max(1, _ELEMENTS_PER_STEP // max(1, words[0].numel()))
    for start in range(0, len(words), step):
        rows_of_part = words[start : start + step]
        first = box[0][0] + start
        rows: Sequence[int] = range(first, first + len(rows_of_part))
        if row_of_expert is not None:
            rows = [row_of_expert[row] for row in rows]
        outer = torch.tensor(list(rows), dtype=torch.int64, device=local.device)
        for part, inner in _cut_long_rows(rows_of_part, box[1:]):
            positions = number_elements(outer, inner, shape[1:])
            for index, seed in enumerate(SEEDS):
                bits = part.to(torch.int64) + mix_bits(positions + seed)
                total[index] += mix_bits(bits).sum()
    return total


def _cut_long_rows(rows: Tensor, inner: Box) -> Iterator[tuple[Tensor, Box]]:
    """Cut rows of more than _ELEMENTS_PER_STEP elements along dim 1; yield the parts with boxes.

    A row of stacked experts is the matrix of an expert. A box has all dims but dim 0, like `inner`.
    """
    if rows.ndim == 1 or rows[0].numel() <= _ELEMENTS_PER_STEP:
        yield rows, inner
        return
    step = max(1, _ELEMENTS_PER_STEP // max(1, rows[0, 0].numel()))
    first = inner[0][0]
    for start in range(0, rows.shape[1], step):
        part = rows[:, start : start + step]
        yield part, ((first + start, first + start + part.shape[1]), *inner[1:])
