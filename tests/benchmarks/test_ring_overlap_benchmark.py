"""benchmarks/ring_overlap.py: on slow links, attention hides most of the transfers of its keys."""

import pytest
import ring_overlap as bench
from support.close import FP32_INSIDE

# The hidden share that is promised. One of four heads of an all-gather is not hidden.
PROMISED = {bench.RING: 0.7, bench.GATHER: 0.4}


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "rate"), bench.WAYS, ids=[sizes.way for sizes, _ in bench.WAYS])
def test_attention_hides_transfers(sizes: bench.Sizes, rate: str) -> None:
    """The share is part of the time that transfers take beside the computation."""
    bench.namespaces.skip_without_namespaces()
    figures = bench.run(sizes, rate)
    share = bench.compute_hidden_share(figures)
    print(f"hidden: {share:.2f}", {method: x["seconds"] for method, x in figures.items()})
    for got, want in zip(
        figures[bench.OVERLAPPED]["sum"], figures[bench.AFTERWARDS]["sum"], strict=True
    ):
        assert abs(got - want) <= FP32_INSIDE * want
    # The keys and values of this rank, once in forward and once for backward, and their gradients.
    message = 2 * sizes.seq // bench.RANKS * sizes.kv_heads * sizes.head_dim * 4
    expected = 3 * (bench.RANKS - 1) * message / 2**20
    for method in (bench.OVERLAPPED, bench.AFTERWARDS):
        for sent in figures[method]["sent"]:
            assert expected <= sent <= 1.1 * expected
    assert share >= PROMISED[sizes.way]


def test_the_table_has_a_row_for_each_way() -> None:
    seconds = {bench.OVERLAPPED: 3.0, bench.AFTERWARDS: 6.0, bench.NO_TRANSFER: 2.0}
    figures = {
        method: {"seconds": [x], "sent": [9.0], "sum": [1.0]} for method, x in seconds.items()
    }
    rows = [(sizes, rate, figures) for sizes, rate in bench.WAYS]
    table = bench.report(rows, ["- about"])
    assert table.count("| 0.75 | 9.00 |") == 2 and "| 8 x 64, 2 | 80mbit | 3.00" in table
    assert "| all-gather | 8,192 | 8 x 64, 4 | 200mbit |" in table
