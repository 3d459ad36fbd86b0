"""Batches of parity cases whose sequences are split over ranks (sp_size, cp_size)."""

from itertools import accumulate

import torch
from torch import nn

from support.parity import Batch
from support.tiny_models import batch


def padded(
    side: str, length: int, pad: int, model: nn.Module, rank: int, world: int, step: int
) -> list[Batch]:
    """Return three rows of `length` tokens, with padding at one side."""
    micro = batch(model, 3, length, seed=10 * step + rank, pad=pad)
    if side == "left":
        micro = {name: value.flip(1) for name, value in micro.items()}
        micro["labels"][:, -1] = micro["input_ids"][:, -1]
    return [micro]


def three_tokens(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Return rows of 3 tokens: if 4 ranks share them, some ranks have only padding."""
    return [batch(model, 2, 3, seed=10 * step + rank)]


def packed(
    lengths: tuple[int, ...], model: nn.Module, rank: int, world: int, step: int
) -> list[Batch]:
    """Pack documents of these lengths in one row; position_ids restart at 0 in each.

    With a cache, which is the default, stock treats the row as one document.
    """
    starts = [0, *accumulate(lengths)][:-1]
    micro = batch(model, 1, sum(lengths), seed=10 * step + rank)
    del micro["attention_mask"]
    position_ids = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    micro["labels"][:, starts] = -100
    return [{**micro, "position_ids": position_ids, "use_cache": False}]


def packed_by_lengths(
    lengths: tuple[int, ...], model: nn.Module, rank: int, world: int, step: int
) -> list[Batch]:
    """Return the same row, with the lengths of its documents for flash attention."""
    (micro,) = packed(lengths, model, rank, world, step)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    longest = max(lengths)
    return [
        {**micro, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        | {"max_length_q": longest, "max_length_k": longest}
    ]
