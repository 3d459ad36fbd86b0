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
    """Each of 2 ranks sends half of its elements to their owners in bf16, and gets them back."""
    dense = 2 * (64 * 32 + 16 * 32)  # q, k, v and output projection
    experts = SIZES.experts * 3 * 32 * 16
    measured = bench.measure_layouts(SIZES, 2)
    sent = {name: sum(rank.sent for rank in ranks) for name, ranks in measured.items()}
    assert sent == {
        "ep 2": 2 * dense,
        "ep 1, whole experts": 2 * dense,
        "ep 1, rows of experts": 2 * (dense + experts),
    }
    (stock,) = spawn(bench.measure_stock, 1, SIZES, timeout=300.0)
    rows = bench.report(SIZES, ["- machine"], stock, measured).splitlines()[-3:]
    for row, name in zip(rows, sent, strict=True):
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[0] == name and cells[3] == cells[4] == f"{sent[name] / 1e6:.2f}"
        assert float(cells[5]) < 1.5


@pytest.mark.slow
def test_a_step_holds_a_few_buckets_at_a_time() -> None:
    """A rank has the bucket that it orthogonalises, and two tensors of another bucket's transfer.

    Newton-Schulz runs on a quarter of the bucket, or on one matrix. It needs twice this memory, and
    once more for a gram matrix, which has half the size here. The rows of experts are sharded, so
    most matrices are sent.
    """
    sizes = replace(SIZES, hidden=256, intermediate=128, bucket_bytes=2**18)
    layout = {"ep_size": 1, "expert_shard_dim": 1}
    for rank in spawn(bench.measure_rank, 2, layout, sizes, timeout=300.0):
        print(f"{rank.peak / rank.largest_bucket:.2f} times the largest of {rank.buckets} buckets")
        assert rank.buckets > 3
        assert rank.peak <= (1 + 2 + 2.5 / 4 + 0.1) * rank.largest_bucket


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
