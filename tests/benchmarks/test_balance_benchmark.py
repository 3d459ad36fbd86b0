"""benchmarks/balance.py: what the table says, and with one seed that each method balances."""

import balance as bench
import pytest
import torch

PLAIN, TOGETHER, PER_LAYER, GLM, BIAS = bench.METHODS


def _outcome(row: list[int], loss: float) -> bench.Outcome:
    steps = [[[2, 2, 2, 2], [2, 2, 2, 2]], [[2, 2, 2, 2], [3, 2, 2, 1]]]
    return bench.Outcome([[5, 5, 5, 5], row], steps, loss, 1.0)


def test_the_table_by_hand() -> None:
    found = {
        (PLAIN, 0): _outcome([12, 4, 2, 2], 2.0),
        (PLAIN, 1): _outcome([10, 5, 3, 2], 3.0),
        (PER_LAYER, 0): _outcome([6, 5, 5, 4], 1.9),
        (PER_LAYER, 1): _outcome([7, 5, 4, 4], 3.05),
    }
    text = bench.report(found, (PLAIN, PER_LAYER), [0, 1])
    of_steps = "1.25 | 1.50 | 1.12"
    row = f"| Qwen3-MoE | none | 2.20 (2.00 .. 2.40) | {of_steps} | 2.5000 (2.0000 .. 3.0000) |"
    assert row in text
    row = f"| 1.30 (1.20 .. 1.40) | {of_steps} | 2.4750 (1.9000 .. 3.0500) | -0.1000, +0.0500 |"
    assert row in text
    assert "is below 1.5 with every seed; the held-out loss is -0.0250 beside none" in text
    assert "of 2 seeds, which by themselves make 1.0000 of difference." in text
    found[PER_LAYER, 1] = _outcome([8, 4, 4, 4], 3.05)
    assert "is NOT below 1.5" in bench.report(found, (PLAIN, PER_LAYER), [0, 1])


def test_both_models_are_the_demos_but_for_their_routers() -> None:
    """Same sizes; a shared expert more in one of them; the method reaches each of them."""
    qwen, glm = (bench.build(method, 97, seed=0) for method in (PER_LAYER, BIAS))
    shared = sum(p.numel() for name, p in glm.named_parameters() if "shared_experts" in name)
    assert glm.num_parameters() - shared == qwen.num_parameters()
    assert qwen.router_aux_loss_coef == PER_LAYER.aux and qwen.config.output_router_logits
    layers = [bench.layer_state(experts) for experts in bench.find_parts(glm).experts.values()]
    assert len(layers) == 4 and all(layer.correction is not None for layer in layers)
    (first, *_) = bench.find_parts(qwen).experts.values()
    assert bench.layer_state(first).model.config.aux_loss_per_layer


@pytest.mark.slow
def test_each_method_balances_every_layer() -> None:
    """One seed, 160 steps, on text that was not trained on; at no price in its loss."""
    torch.set_num_threads(2)
    methods = (PLAIN, PER_LAYER, GLM, BIAS)
    found = bench.run_all(methods, [0], 160, None)
    for method in methods:
        outcome, plain = found[method, 0], bench.Method(method.model)
        if method == plain:
            assert bench.worst(outcome.held_out) > bench.TARGET
            continue
        assert bench.worst(outcome.held_out) < bench.TARGET
        assert bench.worst(outcome.of_last_steps) < bench.TARGET
        assert outcome.loss <= found[plain, 0].loss + bench.NOISE
