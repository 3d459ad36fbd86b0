"""benchmarks/nodes.py: the hierarchical dispatcher sends fewer bytes between two nodes."""

import nodes as bench
import pytest
from support.close import FP32_INSIDE

# With top-8 of 64, nearly every token has experts on both ranks of the other node.
SIZES = bench.Sizes(tokens=64, seq=16, hidden=64, layers=1, steps=2)


@pytest.mark.slow
def test_both_sides_have_equal_losses_and_one_sends_less() -> None:
    bench.namespaces.skip_without_namespaces()
    results = bench.run(SIZES, 2, "1gbit")
    ours, theirs = (results[kind] for kind in bench.KINDS)
    for kind in bench.KINDS:
        assert len(results[kind]["seconds"]) == SIZES.steps
    for loss, other_loss in zip(ours["loss"], theirs["loss"], strict=True):
        assert abs(loss - other_loss) <= FP32_INSIDE * abs(other_loss)
    # Two ranks send each of 64 tokens to one rank of the other node, instead of nearly two ranks.
    saved = 4 * 2 * SIZES.tokens * 0.5 * SIZES.hidden * 4 / 2**20
    for sent, other_sent in zip(ours["sent"], theirs["sent"], strict=True):
        assert other_sent - sent > saved, (sent, other_sent)
    text = bench.report(SIZES, "1gbit", {"two nodes": results}, ["- machine"])
    assert text.count("| two nodes: ") == 2
