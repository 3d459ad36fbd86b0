"""benchmarks/muon.py: bytes and operations equal a count by hand, and the peak is limited."""

from dataclasses import replace

import muon as bench
import pytest
from ranks import spawn
from support.tiny_models import tiny

from hf_moe_ep import ParallelConfig
from hf_moe_ep.optim.orthogonal import count_flops

SIZES = bench.Sizes(hidden=32, intermediate=16, layers=1, experts=8, steps=1, bucket_bytes=4096)


@pytest.mark.slow
def test_sent_bytes_equal_the_formula() -> None:
    lines = bench.report(SIZES, 2, ["- machine"]).splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ep")]
    assert len(rows) == 3
    for _, _, _, sent, by_hand, level, *_ in rows:
        assert float(sent) == float(by_hand) > 0
        assert float(level) < 1.5


@pytest.mark.slow
def test_a_step_holds_a_few_buckets_at_a_time() -> None:
    """The rows of experts are sharded, so most matrices are sent."""
    sizes = replace(SIZES, hidden=256, intermediate=128, bucket_bytes=2**18)
    layout = {"ep_size": 1, "expert_shard_dim": 1}
    for rank in spawn(bench.measure_rank, 2, layout, sizes, timeout=300.0):
        print(f"{rank.peak / rank.largest_bucket:.2f} times the largest of {rank.buckets} buckets")
        assert rank.buckets > 3 and rank.peak <= 9 * rank.largest_bucket


def test_the_work_of_a_rank_equals_a_count_by_hand() -> None:
    """At ep_size 2, two layers with 8 experts [24, 32] and four dense matrices are split evenly."""
    config = tiny().config
    assert (config.hidden_size, config.moe_intermediate_size, config.num_experts) == (32, 24, 8)
    operations, sent = bench.count_work_of_rank(config, ParallelConfig(ep_size=2), 2)
    experts = 2 * 4 * 3 * count_flops(24, 32, 5)
    dense = [(32, 32), (16, 32), (16, 32), (32, 32)]
    assert operations == experts + sum(count_flops(*shape, 5) for shape in dense)
    # Half of each dense matrix is sent to its owner and back in bf16, as a mean of two ranks.
    assert sent == 2 * sum(rows * columns for rows, columns in dense)
