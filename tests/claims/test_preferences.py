"""DPO, KTO, GRPO and GKD of TRL on 4 ranks log what stock logs, with any kind of reference.

Stock is one process with the batch of all ranks and a reference of the same weights, or as many
processes where TRL averages the results of each rank's own batch. Each case is a script of a TRL
user plus `patch`. KTO is compared with a loss without KL term, because TRL computes that term from
a rank's batch, so stock on 4 ranks differs from stock in one process as well.
"""

import pytest
from support.checks import Check, Found
from support.trl_cases import PREFERENCES

pytest.importorskip("trl", minversion="1.16")

from support.trl_runs import Stock, assert_equals_stock, checks

CASES = {case.name: case for case in PREFERENCES}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return Stock(lambda: tmp_path_factory.mktemp("stock"))


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("claim", checks(PREFERENCES))
def test_a_reference_gives_stocks_losses(found: Found, stock: Stock, claim: Check) -> None:
    assert_equals_stock(CASES[claim.name], found.values(claim)[0], stock)
