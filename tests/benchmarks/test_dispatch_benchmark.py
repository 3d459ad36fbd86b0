"""The dispatch benchmark: its bytes against a count by hand, its formula against enumeration."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

# The other side of the benchmark, which the oldest transformers that we allow has not yet.
pytest.importorskip("transformers.distributed.expert_parallel")
import dispatch as bench

FP32, INT64 = 4, 8
HEADER = 9  # the fields of hf_moe_ep.dispatcher.Header
HIDDEN, TOP_K = 5, 3

# Two experts per rank on 4 ranks, top-3. Behind each token the ranks of its experts.
BY_HAND = [
    [[0, 1, 2], [2, 3, 7]],  # 0 0 1 and 1 1 3
    [[4, 5, 6]],  # 2 2 3
    [[4, 5, 0]],  # 2 2 0
    [[6, 7, 1]],  # 3 3 0
]
# Rows to other ranks, and rows from them, by rank.
ONCE_PER_RANK = ([3, 2, 1, 1], [2, 2, 1, 2])
ONCE_PER_EXPERT = ([4, 3, 1, 1], [2, 3, 2, 2])
EVERY_TOKEN = list(combinations(range(8), TOP_K))
WIDE = bench.Case(top_k=8, experts=64, ep=4, routing="uniform")
# A row's routing is 96 bytes: little beside hidden sizes of real models, 9 % of a row of 64.
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
    """By case, then rank."""
    return list(zip(*run_ranks(_measure, 4, timeout=120), strict=True))


def test_bytes_equal_the_count_by_hand(measured: list[list[bench.Measured]]) -> None:
    for rank, got in enumerate(measured[0]):
        out, back = (rows[rank] for rows in ONCE_PER_RANK)
        copies_out, copies_back = (rows[rank] for rows in ONCE_PER_EXPERT)
        assert got.sent == {
            "ours": {
                "rows": 2 * (out + back) * HIDDEN * FP32,
                # Weights and ids go out, the weights' gradient returns.
                "routing": (2 * out + back) * TOP_K * FP32,
                "counts": 3 * (HEADER + 4 + 8) * INT64,
            },
            "theirs": {
                "rows": 2 * (copies_out + copies_back) * HIDDEN * FP32,
                "routing": 0,
                "counts": 6 * INT64,
            },
        }
        assert got.bound == 2 * (out + back) * HIDDEN * FP32
        assert got.error <= bench.TOLERANCE
        assert [len(got.seconds[side]) for side in bench.SIDES] == [2, 2]


@pytest.mark.parametrize(
    "ep, experts, top_k", [(2, 4, 2), (4, 8, 3), (2, 8, 8), (3, 9, 1), (6, 6, 4)]
)
def test_the_formula_equals_the_mean_over_all_tokens(ep: int, experts: int, top_k: int) -> None:
    tokens = list(combinations(range(experts), top_k))
    met = [{expert // (experts // ep) for expert in token} for token in tokens]
    mean = sum(map(len, met)) / len(met)
    assert bench.ranks_met(ep, experts, top_k) == pytest.approx(mean, rel=1e-12)
    others = sum(len(ranks - {0}) for ranks in met) / len(met)
    assert mean * (ep - 1) / ep == pytest.approx(others, rel=1e-12)


def test_every_token_once_sends_what_the_formula_says(
    measured: list[list[bench.Measured]],
) -> None:
    """All combinations of 3 of 8 experts on each rank are uniform routing without chance."""
    want = bench.expected(4, 8, TOP_K, hidden=HIDDEN, itemsize=FP32, tokens=len(EVERY_TOKEN))
    got = bench.per_token(measured[1])
    assert got.keys() == want.keys()
    for side, kinds in want.items():
        assert got[side] == pytest.approx(kinds, rel=1e-12), side


def test_at_most_half_the_bytes_at_top_8_of_64_on_4_ranks(
    measured: list[list[bench.Measured]],
) -> None:
    sent = bench.per_token(measured[2])
    ours, theirs = (sum(sent[side].values()) for side in bench.SIDES)
    print(f"top-8 of 64, ep 4, hidden 256: ours sends {ours / theirs:.3f} of theirs")
    assert ours <= 0.5 * theirs


def test_slower_link_decides() -> None:
    """With 16 GPUs a token has 7 other ranks in its node of 8, and 8 in the other node."""
    near, far = 153e9 * 7 / 8, 50e9 * 7 / 8
    assert bench.milliseconds(1000.0, 8, 4096) == pytest.approx(4096e6 / near)
    assert bench.milliseconds(1000.0, 16, 4096) == pytest.approx(4096e6 * 8 / 15 / far)


def test_it_prints_and_draws(measured: list[list[bench.Measured]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    text = bench.report({WIDE: measured[2]}, WIDE_SIZES, ["- nothing"])
    assert "| 8 | 64 | 4 | uniform |" in text
    bench.plot({WIDE: measured[2]}, WIDE_SIZES, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
