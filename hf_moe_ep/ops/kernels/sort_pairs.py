"""Sort (row, expert) pairs by expert on the device: a stable counting sort without a host sync.

There are four launches. The only atomic operations add integers, so neither the order of the pairs
nor a number depends on the GPU's schedule:

    count    counts the pairs of each (block, expert), [blocks, L], and of each expert, [L]
    scan     computes where the pairs of each expert, and of each (block, expert), start
    place    computes each pair's position: the start of its (block, expert) plus the number of
             earlier pairs with the same block and expert. Also stores the inverse: the pair and the
             row of each position
    tiles    writes the work list of the matrix kernels

A tile is up to BLOCK_M consecutive positions of one expert, stored as `(expert, first position)`.
The number of tiles depends on the routing, which the host does not know. The list therefore has
the largest possible length (`max_tiles`), and its unused entries have the expert -1. `open_tile`
reads an entry.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.interface import Routing
from hf_moe_ep.ops.kernels.launch import Constants, cdiv, launch, next_power_of_2

# A program counts or places _BLOCK pairs, and compares _CHUNK of them at a time.
_BLOCK = 256
_CHUNK = 16
# A program of `scan` reads the counts of _EXPERTS experts, of _BLOCKS blocks at a time.
_EXPERTS = 8
_BLOCKS = 256
# A program of `tiles` compares its tiles with all experts, in at most this many comparisons.
_COMPARISONS = 8192


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids, counts, totals, num_pairs, num_experts,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    # The loop does not sum along the pairs, because such a sum exchanges numbers between threads.
    chosen = tl.zeros([CHUNK, EXPERTS], tl.int32)
    for first in range(0, BLOCK, CHUNK):
        pair = block * BLOCK + first + tl.arange(0, CHUNK)
        expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)  # [CHUNK]
        chosen += (expert[:, None] == experts[None, :]).to(tl.int32)
    count = tl.sum(chosen, axis=0)
    tl.store(counts + block * num_experts + experts, count, mask=experts < num_experts)
    tl.atomic_add(totals + experts, count, mask=experts < num_experts, sem="relaxed")


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(
    counts, totals, offsets, num_blocks, num_experts,
    BLOCKS: tl.constexpr, SPAN: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Replace the counts of SPAN experts by starts, and store the offsets of these experts."""
    all_experts = tl.arange(0, EXPERTS)
    total = tl.load(totals + all_experts, mask=all_experts < num_experts, other=0)  # [EXPERTS]
    expert = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    valid = expert < num_experts
    before = tl.where(all_experts[None, :] < expert[:, None], total[None, :], 0)  # [SPAN, EXPERTS]
    start = tl.sum(before, axis=1)  # [SPAN]
    tl.store(offsets + expert, start, mask=valid)
    if tl.program_id(0) == 0:
        tl.store(offsets + num_experts, tl.sum(total, axis=0))
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        cell = block[:, None] * num_experts + expert[None, :]
        inside = (block < num_blocks)[:, None] & valid[None, :]
        count = tl.load(counts + cell, mask=inside, other=0)  # [BLOCKS, SPAN]
        tl.store(counts + cell, start[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        start += tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["num_pairs", "num_sorted"])
def _place_kernel(
    ids, starts, pair_of_position, row_of_position, positions,
    num_pairs, num_sorted, num_experts, top_k, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)  # [BLOCK]
    has_expert = (expert >= 0) & (expert < num_experts)
    # Summed over the columns: the number of earlier pairs of the block with the same expert.
    earlier = tl.zeros([BLOCK, CHUNK], tl.int32)
    for first in range(0, BLOCK, CHUNK):
        other = block * BLOCK + first + tl.arange(0, CHUNK)
        other_expert = tl.load(ids + other, mask=other < num_pairs, other=-1).to(tl.int32)
        same = expert[:, None] == other_expert[None, :]
        earlier += (same & (other[None, :] < pair[:, None])).to(tl.int32)
    start = tl.load(starts + block * num_experts + expert, mask=has_expert, other=0)  # [BLOCK]
    position = start + tl.sum(earlier, axis=1)
    tl.store(pair_of_position + position, pair, mask=has_expert)
    # The row is stored as well, so that the loops that read it need no division.
    tl.store(row_of_position + position, pair // top_k, mask=has_expert)
    tl.store(positions + pair, tl.where(has_expert, position, num_sorted), mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_tiles"])
def _tiles_kernel(
    offsets, tiles, num_experts, num_tiles,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    valid = experts < num_experts
    start = tl.load(offsets + experts, mask=valid, other=0)  # [EXPERTS]
    end = tl.load(offsets + experts + 1, mask=valid, other=0)  # [EXPERTS]
    expert_tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    tiles_so_far = tl.cumsum(expert_tiles, 0)
    tile = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    # The expert of a tile is the number of experts whose tiles all precede it.
    before = (tiles_so_far[None, :] <= tile[:, None]) & valid[None, :]
    expert = tl.sum(before.to(tl.int32), axis=1)
    is_expert = experts[None, :] == expert[:, None]
    first_tile = tl.sum(tl.where(is_expert, (tiles_so_far - expert_tiles)[None, :], 0), axis=1)
    first_position = tl.sum(tl.where(is_expert, start[None, :], 0), axis=1)
    position = first_position + (tile - first_tile) * BLOCK_M
    used = expert < num_experts
    tl.store(tiles + 2 * tile, tl.where(used, expert, -1), mask=tile < num_tiles)
    tl.store(tiles + 2 * tile + 1, tl.where(used, position, 0), mask=tile < num_tiles)


@triton.jit
def open_tile(tiles, offsets, width, BLOCK_N: tl.constexpr):
    """Return a program's (expert, first position, positions left in the expert, block of columns).

    Consecutive programs compute one tile of an output with `width` columns, in blocks of BLOCK_N
    columns. The expert is -1 for an unused entry of the list. The number of positions left may
    exceed the size of a tile.
    """
    num_n = tl.cdiv(width, BLOCK_N)
    tile = tl.program_id(0) // num_n
    column = tl.program_id(0) % num_n
    expert = tl.load(tiles + 2 * tile)
    start = tl.load(tiles + 2 * tile + 1)
    num_left = tl.load(offsets + expert + 1) - start
    return expert, start, num_left, column


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the largest possible number of tiles. One tile per expert may be partly full."""
    return num_pairs // block_m + min(num_experts, num_pairs)


def sort_pairs(ids_RK: Tensor, num_experts: int, num_sorted: int, block_m: int) -> Routing:
    """Sort the pairs of `ids_RK` by expert.

    `num_sorted` pairs, at least one, have an expert here. All other pairs get the position
    `num_sorted`, which means "no position".
    """
    num_pairs = ids_RK.numel()
    device = ids_RK.device
    num_blocks = cdiv(num_pairs, _BLOCK)
    counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=device)
    totals = torch.zeros(num_experts, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    num_tiles = max_tiles(num_sorted, num_experts, block_m)
    tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=device)
    pair_A = torch.empty(num_sorted, dtype=torch.int32, device=device)
    row_A = torch.empty_like(pair_A)
    position_RK = torch.empty(ids_RK.shape, dtype=torch.int32, device=device)
    ids_RK = ids_RK.contiguous()
    constants = _list_constants(num_experts, block_m)
    per_block = (num_blocks,)
    launch(
        _count_kernel, per_block, constants.count, ids_RK, counts, totals, num_pairs, num_experts
    )
    launch(
        _scan_kernel, (cdiv(num_experts, _EXPERTS),), constants.scan,
        counts, totals, offsets, num_blocks, num_experts,
    )  # fmt: skip
    launch(
        _place_kernel, per_block, constants.place,
        ids_RK, counts, pair_A, row_A, position_RK, num_pairs, num_sorted, num_experts,
        ids_RK.shape[1],
    )  # fmt: skip
    chunk = constants.tiles.values["CHUNK"]
    launch(
        _tiles_kernel, (cdiv(num_tiles, chunk),), constants.tiles,
        offsets, tiles, num_experts, num_tiles,
    )  # fmt: skip
    return Routing(pair_A, position_RK, offsets, tiles, row_A)


@dataclass(frozen=True)
class _SortConstants:
    count: Constants
    scan: Constants
    place: Constants
    tiles: Constants


@functools.cache
def _list_constants(num_experts: int, block_m: int) -> _SortConstants:
    """Return the constants of the four kernels."""
    experts = next_power_of_2(max(num_experts, 2))
    return _SortConstants(
        Constants(BLOCK=_BLOCK, CHUNK=_CHUNK, EXPERTS=experts),
        Constants(BLOCKS=_BLOCKS, SPAN=_EXPERTS, EXPERTS=experts),
        Constants(BLOCK=_BLOCK, CHUNK=_CHUNK, num_warps=8),
        Constants(BLOCK_M=block_m, CHUNK=max(1, _COMPARISONS // experts), EXPERTS=experts),
    )
