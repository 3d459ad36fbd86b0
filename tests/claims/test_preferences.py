"""DPO, KTO, GRPO and GKD of TRL log the same on 4 ranks as stock, with each kind of reference.

Stock is one process with the batch of all ranks and the same reference weights. Where TRL averages
results of each rank's own batch, stock runs as many processes. Each case is a TRL user's script
plus `patch`. KTO is compared without its KL term: TRL computes this term from a rank's batch, so
stock on 4 ranks differs from stock in one process, too.
"""

import pytest
from support.checks import Check, Found
from support.trl_cases import PREFERENCES

pytest.importorskip("trl", minversion="1.16")

from support.trl_runs import StockLogs, assert_equals_stock, make_checks

CASES = {case.name: case for case in PREFERENCES}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> StockLogs:
    return StockLogs(lambda: tmp_path_factory.mktemp("stock"))


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("claim", make_checks(PREFERENCES))
def test_losses_with_a_reference_equal_stock(found: Found, stock: StockLogs, claim: Check) -> None:
    assert_equals_stock(CASES[claim.name], found.values(claim)[0], stock)
