"""benchmarks/replay.py: shares and distances equal a count by hand; replay reduces distances."""

import copy

import pytest
import replay as bench
import torch


def test_shares_equal_a_count_by_hand() -> None:
    """One sequence has two tokens, two layers and top-2. The order of experts does not matter."""
    ids = torch.tensor([[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]])
    ids_of_other = torch.tensor([[[[1, 0], [2, 4]], [[4, 6], [1, 0]]]])
    pairs, tokens = bench.compute_shares(ids, ids_of_other)
    assert pairs == (0.75, 0.25)
    assert tokens == (0.5, 0.0)


def test_distances_equal_a_computation_by_hand() -> None:
    names = ("layers.0.mlp.experts.down_proj", "layers.0.mlp.gate.weight", "lm_head.weight")
    engine = bench.Computed(
        torch.tensor([[-1.0, -2.0]]), 1.5, {n: torch.tensor([3.0, 4.0]) for n in names}
    )
    moved = dict(zip(names, (torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])), strict=False))
    training = bench.Computed(
        torch.tensor([[-1.25, -1.0]]), 1.25, {**moved, names[2]: torch.tensor([4.0, 4.0])}
    )
    distances = bench.compare(training, engine)
    assert (distances.logp, distances.loss) == (0.625, 0.25)
    assert distances.gradient == {
        "experts": 0.1,
        "routers": 0.0,
        "all others": 0.2,
        "all": pytest.approx((1.25 / 75) ** 0.5),
    }


@pytest.mark.slow
def test_replay_reduces_the_distance_between_two_precisions() -> None:
    """Replayed results are closer to the engine's results. With one precision, all are equal."""
    (outcome,) = bench.run(layers=4, steps=12, seeds=1, batches=1)
    live, replayed = (outcome.versions[version] for version in bench.VERSIONS)
    assert min(outcome.same_set) < 1.0
    assert "| gradient of experts, % |" in bench.report([outcome])
    assert replayed.logp < live.logp
    assert replayed.gradient["experts"] < 0.7 * live.gradient["experts"]
    vocab_size, blocks, held_out = bench.load_data()
    _, model = bench.copy_in_two_precisions(bench.train(blocks, vocab_size, 2, 1, 0))
    input_ids = torch.stack([row["input_ids"] for row in held_out[:2]])
    same = bench.compare_precisions(copy.deepcopy(model), model, input_ids)
    assert same.same_set == same.same_expert == same.asked == (1.0, 1.0)
    assert all(w.logp == w.loss == w.gradient["all"] == 0.0 for w in same.versions.values())
