"""benchmarks/balance.py trains each of its methods and prints its table."""

import balance as bench
import pytest


def test_the_load_of_the_worst_layer_equals_a_count_by_hand() -> None:
    assert bench.find_worst_load([[5, 5, 5, 5], [10, 5, 3, 2]]) == 2.0
    steps = [[[2, 2, 2, 2], [2, 2, 2, 2]], [[2, 2, 2, 2], [3, 2, 2, 1]]]
    outcome = bench.Outcome([[5, 5, 5, 5]], steps, 2.0, 1.0)
    assert bench.find_worst_load(outcome.sum_of_last_steps) == 1.25 and outcome.worst_step == 1.5
    assert bench.find_worst_load([bench.sum_over_layers(outcome.sum_of_last_steps)]) == 1.125


@pytest.mark.slow
def test_the_table_has_a_row_for_each_method() -> None:
    outcomes = bench.run_all(bench.METHODS, [0], 2, None)
    text = bench.format_report(outcomes, bench.METHODS, [0])
    assert all(f"| {method.model} | {method.name} |" in text for method in bench.METHODS)
