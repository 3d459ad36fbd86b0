"""The kernels that sort (row, expert) pairs by expert give the order of a stable sort."""

import pytest
import torch
from expert_cases import TRITON

from hf_moe_ep.ops.kernels.sort_pairs import sort_pairs


# There are several blocks of pairs. The last block is not full, and one case has more experts than
# one program scans.
@pytest.mark.parametrize(("backend", "device"), TRITON)
@pytest.mark.parametrize(
    ("rows", "top_k", "num_experts"),
    [(1, 1, 1), (300, 3, 5), (700, 4, 9), (90, 8, 384), (300, 2, 1), (150, 4, 2)],
)
def test_sort_pairs_equals_a_stable_sort(
    rows: int, top_k: int, num_experts: int, backend: str, device: str
) -> None:
    """Ids from `num_experts` on, and negative ids, are pairs without an expert here."""
    generator = torch.Generator().manual_seed(0)
    ids_RK = torch.randint(-1, num_experts + 2, (rows, top_k), generator=generator)
    ids_RK[0, 0] = num_experts - 1
    flat = ids_RK.flatten()
    here = ((flat >= 0) & (flat < num_experts)).nonzero().flatten()
    want_A = here[flat[here].argsort(stable=True)]
    block_m = 16
    routing = sort_pairs(ids_RK.to(device), num_experts, len(here), block_m)
    assert torch.equal(routing.pair_A.cpu().long(), want_A)
    assert torch.equal(routing.row_A.cpu().long(), want_A // top_k)
    slots = torch.full((rows * top_k,), len(here), dtype=torch.int64)
    slots[want_A] = torch.arange(len(here))
    assert torch.equal(routing.position_RK.cpu().flatten().long(), slots)
    counts = torch.bincount(flat[here], minlength=num_experts)
    ends = counts.cumsum(0)
    assert routing.offsets.tolist() == [0, *ends.tolist()]
    tiles = [
        [expert, start]
        for expert, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
        for start in range(end - count, end, block_m)
    ]
    tiles += [[-1, 0]] * (len(routing.tiles) - len(tiles))
    assert routing.tiles.tolist() == tiles
