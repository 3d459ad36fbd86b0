"""benchmarks/lora.py: stock PEFT saves merged weights for backward, and hf_moe_ep does not."""

from dataclasses import replace

import lora as bench
import pytest
from support.ranks import run_ranks

SIZES = bench.Sizes(
    tokens=8, hidden=32, layers=2, experts=64, top_k=2, intermediate=32, vocab=64, rank=2, steps=2
)
STACKED = SIZES.layers * SIZES.experts * 3 * SIZES.hidden * SIZES.intermediate * 4


def _measure(rank: int, world: int) -> dict[str, bench.Measured]:
    return bench.measure_rank(rank, SIZES)


def test_only_stock_peft_saves_merged_weights() -> None:
    (measured,) = run_ranks(_measure, 1)
    stock, ours = (measured[kind].saved for kind in bench.KINDS)
    assert STACKED <= stock < 1.3 * STACKED
    assert ours < 0.1 * STACKED
    assert {len(side.seconds) for side in measured.values()} == {SIZES.steps}


def _measure_held(rank: int, world: int) -> dict[str, bench.Held]:
    sizes = replace(SIZES, hidden=128, intermediate=128, experts=4, layers=1)
    return bench.measure_held_on_rank(rank, sizes, ["bf16", "nf4"])


@pytest.mark.slow
def test_quantised_experts_are_held_and_gathered_as_codes() -> None:
    """Two ranks hold and gather 2 and 0.5625 bytes per parameter, plus adapters."""
    ranks = run_ranks(_measure_held, 2)
    parameters = 4 * 3 * 128 * 128
    adapters = 2 * 4 * (128 + 256 + 128 + 128)
    for kind, per_parameter, per_factor in (("bf16", 2, 2), ("nf4", 0.5625, 4)):
        assert {rank[kind].parameters for rank in ranks} == {parameters}
        assert sum(rank[kind].experts for rank in ranks) == per_parameter * parameters
        # FSDP2 does not reshard the last layer after forward. This model has only one layer.
        whole = per_parameter * parameters + per_factor * adapters
        assert {rank[kind].gathered for rank in ranks} == {whole}, kind
    table = bench.report_held(SIZES, ranks, ["- about"])
    assert "| bf16 | 2.0000 |" in table and "| nf4 | 0.5625 |" in table
