"""benchmarks/dispatch.py: bytes equal a count by hand, and the formula equals an enumeration."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

# The benchmark needs this module, which the oldest supported transformers lacks.
pytest.importorskip("transformers.distributed.expert_parallel")
import dispatch as bench

FP32, INT64 = 4, 8
HEADER = 9  # the fields of hf_moe_ep.dispatcher.Header
HIDDEN, TOP_K = 5, 3

# The expert ids of each token of each rank. Experts 2r and 2r + 1 are on rank r. The comments show
# the ranks of the experts.
BY_HAND = [
    [[0, 1, 2], [2, 3, 7]],  # 0 0 1 and 1 1 3
    [[4, 5, 6]],  # 2 2 3
    [[4, 5, 0]],  # 2 2 0
    [[6, 7, 1]],  # 3 3 0
]
# The numbers of rows to other ranks and from other ranks, by rank.
ONCE_PER_RANK = ([3, 2, 1, 1], [2, 2, 1, 2])
ONCE_PER_EXPERT = ([4, 3, 1, 1], [2, 3, 2, 2])
EVERY_TOKEN = list(combinations(range(8), TOP_K))
WIDE = bench.Case(top_k=8, experts=64, ep=4, routing="uniform")
# The routing of a row has 96 bytes, which must be few compared with its 4 * 256 bytes of values.
WIDE_SIZES = bench.Sizes(tokens=128, hidden=256)


def _measure(rank: int, world: int) -> list[bench.Measured]:
    mesh = bench.build_mesh(world)
    by_hand, every = (torch.tensor(ids) for ids in (BY_HAND[rank], EVERY_TOKEN))
    ids_TK = bench.draw(WIDE, WIDE_SIZES, rank)
    return [
        bench.measure_case(by_hand, 8, HIDDEN, mesh, repeats=2),
        bench.measure_case(every, 8, HIDDEN, mesh, repeats=0),
        bench.measure_case(ids_TK, WIDE.experts, WIDE_SIZES.hidden, mesh, repeats=2),
    ]


@pytest.fixture(scope="module")
def measured() -> list[list[bench.Measured]]:
    """Return the measurements as [case][rank]."""
    return list(zip(*run_ranks(_measure, 4, timeout=120), strict=True))


def test_bytes_equal_the_count_by_hand(measured: list[list[bench.Measured]]) -> None:
    for rank, of_rank in enumerate(measured[0]):
        rows_out, rows_in = (rows[rank] for rows in ONCE_PER_RANK)
        copies_out, copies_in = (rows[rank] for rows in ONCE_PER_EXPERT)
        assert of_rank.sent == {
            "ours": {
                "rows": 2 * (rows_out + rows_in) * HIDDEN * FP32,
                # Weights and ids are sent behind the rows, and gradients of the weights behind the
                # gradients of the rows. A message of 5 + 6 or 5 + 3 columns is padded to 16.
                "routing": (rows_out + rows_in) * (16 - HIDDEN) * FP32,
                "counts": 3 * (HEADER + 1 + 2) * INT64,
            },
            "theirs": {
                "rows": 2 * (copies_out + copies_in) * HIDDEN * FP32,
                "routing": 0,
                "counts": 6 * INT64,
            },
        }
        assert of_rank.bound == 2 * (rows_out + rows_in) * HIDDEN * FP32
        assert of_rank.error <= bench.TOLERANCE
        assert [len(of_rank.seconds[side]) for side in bench.SIDES] == [2, 2]


@pytest.mark.parametrize(
    "ep, experts, top_k", [(2, 4, 2), (4, 8, 3), (2, 8, 8), (3, 9, 1), (6, 6, 4)]
)
def test_the_formula_equals_the_mean_over_all_tokens(ep: int, experts: int, top_k: int) -> None:
    tokens = list(combinations(range(experts), top_k))
    ranks_of_tokens = [{expert // (experts // ep) for expert in token} for token in tokens]
    mean = sum(map(len, ranks_of_tokens)) / len(ranks_of_tokens)
    assert bench.expect_num_ranks(ep, experts, top_k) == pytest.approx(mean, rel=1e-12)
    others = sum(len(ranks - {0}) for ranks in ranks_of_tokens) / len(ranks_of_tokens)
    assert mean * (ep - 1) / ep == pytest.approx(others, rel=1e-12)


def test_the_formula_equals_the_measured_bytes_of_uniform_routing(
    measured: list[list[bench.Measured]],
) -> None:
    """Each rank has every combination of 3 of 8 experts once, so routing is exactly uniform."""
    expect_bytes = bench.expect_bytes(
        4, 8, TOP_K, hidden=HIDDEN, itemsize=FP32, tokens=len(EVERY_TOKEN)
    )
    actual = bench.compute_bytes_per_token(measured[1])
    assert actual.keys() == expect_bytes.keys()
    for side, kinds in expect_bytes.items():
        assert actual[side] == pytest.approx(kinds, rel=1e-12), side


def test_at_most_half_the_bytes_at_top_8_of_64_on_4_ranks(
    measured: list[list[bench.Measured]],
) -> None:
    sent = bench.compute_bytes_per_token(measured[2])
    ours, native = (sum(sent[side].values()) for side in bench.SIDES)
    print(f"top-8 of 64, ep 4, hidden 256: ours sends {ours / native:.3f} of theirs")
    assert ours <= 0.5 * native


def test_the_slower_link_determines_the_time() -> None:
    """With 16 GPUs, 7 other ranks are in a token's node, and 8 ranks are in the other node."""
    in_node, between_nodes = 153e9 * 7 / 8, 50e9 * 7 / 8
    assert bench.compute_milliseconds(1000.0, 8, 4096) == pytest.approx(4096e6 / in_node)
    assert bench.compute_milliseconds(1000.0, 16, 4096) == pytest.approx(
        4096e6 * 8 / 15 / between_nodes
    )


def test_the_benchmark_prints_and_draws(
    measured: list[list[bench.Measured]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    text = bench.report({WIDE: measured[2]}, WIDE_SIZES, ["- nothing"])
    assert "| 8 | 64 | 4 | uniform |" in text
    bench.plot({WIDE: measured[2]}, WIDE_SIZES, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
