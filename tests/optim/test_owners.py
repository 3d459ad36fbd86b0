"""Test the owners of sharded matrices, the sizes of buckets, and the formulas of Newton-Schulz."""

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from support.close import FP64_LAYER, max_error
from support.muon_by_matrix import newton_schulz_in_fp64
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from hf_moe_ep.optim.matrices import MatrixLayout
from hf_moe_ep.optim.orthogonal import adjust_lr, count_flops, orthogonalise
from hf_moe_ep.optim.owners import (
    BUCKET_BYTES,
    Matrices,
    MatrixRange,
    MatrixSharding,
    assign_owners,
    divide_whole_matrices,
)

# (rows, columns) of the dense matrices in a layer of Qwen3-30B-A3B: q, k, v and output projection.
QWEN3_30B = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096)]


def _make_sharded_matrices(
    shape: tuple[int, int], ranks: int, experts: int = 1, parts: int = 1
) -> Matrices:
    rows = shape[0] * parts
    size = -(-rows // ranks)
    bounds = tuple((min(r * size, rows), min((r + 1) * size, rows)) for r in range(ranks))
    layout = MatrixLayout(stacked=experts > 1, parts=parts)
    group: Any = "a process group"
    return Matrices("w", layout, shape, MatrixSharding(group, 1, bounds, experts), 5, 2)


@pytest.mark.parametrize("ranks", [2, 8, 16, 32])
@pytest.mark.parametrize("layers", [48])
def test_dense_matrices_of_a_30b_model_are_balanced(ranks: int, layers: int) -> None:
    matrices = [_make_sharded_matrices(shape, ranks) for shape in QWEN3_30B * layers]
    buckets = assign_owners(matrices)
    flops = [0] * ranks
    assigned: Counter[tuple[int, int, int]] = Counter()
    for bucket in buckets:
        assert len(bucket.ranges) == ranks
        for rank, ranges in enumerate(bucket.ranges):
            sizes = [
                matrices[matrix_range.index].shape[0] * matrices[matrix_range.index].shape[1]
                for matrix_range in ranges
            ]
            assert 2 * sum(sizes) <= BUCKET_BYTES or len(ranges) == 1
            for matrix_range in ranges:
                flops[rank] += matrices[matrix_range.index].flops
                assigned[matrix_range.index, matrix_range.part, matrix_range.start] += 1
    assert assigned == Counter({(index, 0, 0): 1 for index in range(len(matrices))})
    print(f"{ranks} ranks: largest over mean {max(flops) * ranks / sum(flops):.3f}")
    assert max(flops) * ranks / sum(flops) <= 1.05


def test_ranks_own_equal_numbers_of_experts() -> None:
    """7 experts with 2 parts each on 3 ranks: each rank owns 2 experts of each part.

    The two matrices of the last expert are assigned to single ranks.
    """
    matrices = [_make_sharded_matrices((24, 32), 3, experts=7, parts=2)]
    (bucket,) = assign_owners(matrices)
    owned = [
        [
            (matrix_range.part, expert)
            for matrix_range in ranges
            for expert in range(matrix_range.start, matrix_range.stop)
        ]
        for ranges in bucket.ranges
    ]
    assert sorted(itertools.chain(*owned)) == list(itertools.product(range(2), range(7)))
    assert sorted(map(len, owned)) == [4, 5, 5]


def test_each_rank_sends_as_much_in_every_bucket() -> None:
    """Rank 0 has the gates of 4 experts [3, 5], and rank 1 has the other part, up."""
    entry = _make_sharded_matrices((3, 5), 2, experts=4, parts=2)
    assert [entry.block_lengths(part) for part in range(2)] == [[3, 0], [0, 3]]
    buckets = assign_owners([entry], bucket_bytes=2 * entry.matrix_bytes)
    assert [bucket.ranges for bucket in buckets] == [
        ((MatrixRange(0, 0, 0, 2),), (MatrixRange(0, 1, 2, 4),)),
        ((MatrixRange(0, 1, 0, 2),), (MatrixRange(0, 0, 2, 4),)),
    ]


def test_whole_experts_are_divided_into_ranges_that_fit_in_a_bucket() -> None:
    entry = Matrices("w", MatrixLayout(True, parts=2), (4, 6), MatrixSharding(None, 1, (), 7), 5, 2)
    ranges = divide_whole_matrices([entry], bucket_bytes=3 * 4 * 6 * 2)
    assert [
        (matrix_range.part, matrix_range.start, matrix_range.stop) for matrix_range in ranges
    ] == [(part, start, min(start + 3, 7)) for part in range(2) for start in (0, 3, 6)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_all_ranks_make_up_each_part(interleaved: bool, transposed: bool) -> None:
    rng = random.Random(0)
    for _ in range(40):
        parts, rows, columns, experts = (rng.randint(1, n) for n in (4, 7, 5, 3))
        layout = MatrixLayout(True, transposed, parts, interleaved)
        whole = torch.randn(experts, rows * parts, columns)
        stored = whole.mT.contiguous() if transposed else whole
        ends = sorted(rng.choices(range(rows * parts + 1), k=3))
        cuts = list(itertools.pairwise([0, *ends, rows * parts]))
        for part in range(parts):
            want = whole[:, part::parts] if interleaved else whole.chunk(parts, 1)[part]
            blocks = []
            for start, stop in cuts:
                shard = stored.narrow(layout.out_dim, start, stop - start)
                blocks.append(layout.view_block(shard, start, stop, part, rows))
                low, high = layout.find_part_bounds(start, stop, part, rows)
                assert blocks[-1].shape[1] == high - low
            assert torch.equal(torch.cat(blocks, 1), want)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (8, 8), (1, 5)])
def test_newton_schulz_equals_torchs(shape: tuple[int, int]) -> None:
    """In fp64 both are equal. In bf16 our error against fp64 is at most 1.2 times torch's."""
    torch.manual_seed(0)
    x = torch.randn(6, *shape, dtype=torch.float64)
    coefficients = (3.4445, -4.7750, 2.0315)
    truth = orthogonalise(x, 5)
    for matrix, got in zip(x, truth, strict=True):
        with newton_schulz_in_fp64():
            want = _zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7)
        assert max_error(got, want) <= FP64_LAYER
    rounded = orthogonalise(x.bfloat16(), 5)
    stock = [_zeropower_via_newtonschulz(matrix.float(), coefficients, 5, 1e-7) for matrix in x]
    errors = [(torch.stack(stock) - truth).norm(), (rounded - truth).norm()]
    print("bf16, error of torch and of ours", *(f"{error / truth.norm():.2e}" for error in errors))
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize("name", [None, "original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (8, 8)])
def test_learning_rates_equal_torchs(name: str | None, shape: tuple[int, int]) -> None:
    try:
        torch.optim.Muon([torch.nn.Parameter(torch.ones(shape))], adjust_lr_fn=name)
    except ValueError:
        pytest.skip(f"torch {torch.__version__} has no {name!r}")
    want = _adjust_lr(1e-3, name, torch.Size(shape))
    assert adjust_lr(1e-3, name, *shape) == pytest.approx(want, rel=1e-12)


def test_learning_rates_and_flops_by_hand() -> None:
    assert adjust_lr(1e-3, None, 64, 16) == adjust_lr(1e-3, "original", 64, 16) == 2e-3
    assert adjust_lr(1e-3, None, 16, 64) == 1e-3
    assert adjust_lr(1e-3, "match_rms_adamw", 16, 64) == pytest.approx(1.6e-3)
    assert adjust_lr(1e-3, "spectral_unclamped", 16, 64) == 0.5e-3
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        orthogonalise(torch.randn(3, 10, 6), 5)
    assert counter.get_total_flops() == 3 * count_flops(10, 6, 5)
