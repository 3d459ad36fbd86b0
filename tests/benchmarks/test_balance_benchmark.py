"""benchmarks/balance.py: what the table says, and with one seed that each method balances."""

import balance as bench
import pytest
import torch

PLAIN, AUX = bench.METHODS[:2]


def _outcome(row: list[int], loss: float) -> bench.Outcome:
    return bench.Outcome([[5, 5, 5, 5], row], [[4, 4, 4, 4], [5, 4, 4, 3]], loss, 1.0)


def test_the_table_by_hand() -> None:
    found = {
        (PLAIN, 0): _outcome([12, 4, 2, 2], 2.0),
        (PLAIN, 1): _outcome([10, 5, 3, 2], 3.0),
        (AUX, 0): _outcome([6, 5, 5, 4], 1.9),
        (AUX, 1): _outcome([7, 5, 4, 4], 3.05),
    }
    text = bench.report(found, (PLAIN, AUX), [0, 1])
    row = "| Qwen3-MoE | none | 2.20 (2.00 .. 2.40) | 1.25 | 1.12 | 2.5000 (2.0000 .. 3.0000) |"
    assert row in text
    row = "| 1.30 (1.20 .. 1.40) | 1.25 | 1.12 | 2.4750 (1.9000 .. 3.0500) | -0.1000, +0.0500 |"
    assert row in text
    assert "is below 1.5 with every seed; the held-out loss is -0.0250 beside none" in text
    found[AUX, 1] = _outcome([8, 4, 4, 4], 3.05)
    assert "is NOT below 1.5" in bench.report(found, (PLAIN, AUX), [0, 1])


def test_both_models_are_the_demos_but_for_their_routers() -> None:
    """Same sizes; a shared expert more in one of them; the method reaches each of them."""
    qwen, glm = (bench.build(method, 97, seed=0) for method in (bench.METHODS[1], bench.METHODS[3]))
    shared = sum(p.numel() for name, p in glm.named_parameters() if "shared_experts" in name)
    assert glm.num_parameters() - shared == qwen.num_parameters()
    assert qwen.router_aux_loss_coef == bench.METHODS[1].aux and qwen.config.output_router_logits
    layers = [bench.layer_state(experts) for experts in bench.find_parts(glm).experts.values()]
    assert len(layers) == 4 and all(layer.correction is not None for layer in layers)


@pytest.mark.slow
def test_each_method_balances_what_it_knows_of() -> None:
    """One seed, 160 steps: the bias each layer, the loss all layers together; at no price."""
    torch.set_num_threads(2)
    found = bench.run_all(bench.METHODS, [0], 160, None)
    together = {m: bench.worst([bench.summed(found[m, 0].last_steps)]) for m in bench.METHODS}
    for method in bench.METHODS:
        outcome = found[method, 0]
        if method.rate:
            assert bench.worst(outcome.held_out) < bench.TARGET
            assert bench.worst(outcome.last_steps) < bench.TARGET
        elif method.aux:
            assert together[method] < 1.2
        else:
            assert bench.worst(outcome.held_out) > bench.TARGET
        assert outcome.loss <= found[bench.Method(method.model), 0].loss + bench.NOISE
