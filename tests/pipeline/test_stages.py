"""Training with pipeline stages equals stock in one process: losses, gradients, norms, steps."""

import pytest
from support.checks import Check, Found
from support.stages import StagesCase, on_ranks, rows_of

TWO_RANKS = [
    StagesCase("pp 2", 2),
    StagesCase("pp 2, 7 rows in 4", 2, config={"pp_microbatches": 4}, batches=rows_of(7)),
]


@pytest.mark.parametrize("claim", on_ranks(TWO_RANKS))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
