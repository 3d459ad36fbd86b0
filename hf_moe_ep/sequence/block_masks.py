"""Build masks of FlexAttention without a tensor of all queries x all keys.

A `BlockMask` lists which blocks of 128 queries x 128 keys contain visible keys. torch's
`create_block_mask` first computes the mask of every query and key, and needs several bytes for each
of them unless it is compiled: 8 GiB for 65,536 queries x 65,536 keys. `build_block_mask` computes
the mask of some query blocks at a time and keeps two flags per block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# The number of pairs of a query and a key whose mask is computed at a time, if one block of queries
# does not have more.
_PAIRS = 2**25


def build_block_mask(
    mask_mod: MaskMod,
    shape: Sequence[int],
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
) -> BlockMask:
    """Build the mask that torch's `create_block_mask` builds.

    Args:
        mask_mod: returns True if a query sees a key; called as (row, head, query, key).
        shape: the numbers of rows, heads, queries and keys.
        block_size: the numbers of queries and keys in a block.
    """
    rows, heads, num_queries, num_keys = shape
    queries_per_block, keys_per_block = block_size
    pairs_per_block = rows * heads * queries_per_block * num_keys
    step = max(1, _PAIRS // max(1, pairs_per_block)) * queries_per_block
    partial, full = [], []
    for start in range(0, num_queries, step):
        count = min(step, num_queries - start)
        visible = create_mask(
            shift_mask(mask_mod, start, 0, device), rows, heads, count, num_keys, device=device
        )
        missing = -num_keys % keys_per_block, -count % queries_per_block
        padded = functional.pad(visible, (0, missing[0], 0, missing[1]))
        blocks = padded.unflatten(3, (-1, keys_per_block)).unflatten(2, (-1, queries_per_block))
        sees_all = blocks.all(5).all(3)
        partial.append(blocks.any(5).any(3) & ~sees_all)
        full.append(sees_all)
    return BlockMask.from_kv_blocks(
        *_list_blocks(torch.cat(partial, 2)),
        *_list_blocks(torch.cat(full, 2)),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
    )


def _list_blocks(has_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and all key blocks, with these first."""
    indices = has_keys.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return has_keys.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def shift_mask(
    mask_mod: MaskMod, first_query: int, first_key: int, device: torch.device
) -> MaskMod:
    """Return the function of a mask for query and key indices that count from these."""
    # With Python numbers, torch.compile would compile anew for every shift.
    query_shift = torch.tensor(first_query, device=device)
    key_shift = torch.tensor(first_key, device=device)

    def shifted(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask_mod(row, head, query + query_shift, key + key_shift)

    return shifted
