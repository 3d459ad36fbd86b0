"""SFT and DPO train as stock with the versions of TRL that axolotl (1.9) and ms-swift (0.29) pin.

`make test-oldest` and `make test-swift` run these cases. Newer versions run the cases of
`test_trl.py` and `test_preferences.py`, which need TRL 1.15 or 1.16.
"""

from functools import partial

import pytest
from support.checks import Check, Found, on_ranks
from support.trl_cases import Case
from support.trl_runs import StockLogs, assert_same_log, run_on_ranks

from hf_moe_ep.upstream.models import has_fused_head

pytest.importorskip("trl")

# TRL 1.0 to 1.14 computes SFT's loss in chunks by default.
NLL = {"loss_type": "nll"}
# TRL 0.29 logs the mean over ranks of each rank's mean over its tokens, not the mean of all tokens.
OF_RANKS = ("entropy", "mean_token_accuracy")
CASES = {
    case.name: case
    for case in (
        Case("SFT", "SFT", arguments=NLL),
        Case("SFT, LoRA", "SFT", lora="TRL's", arguments=NLL),
        Case("DPO", "DPO", "patched"),
    )
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> StockLogs:
    return StockLogs(lambda: tmp_path_factory.mktemp("stock"))


@pytest.mark.skipif(has_fused_head(), reason="other tests run this version of TRL")
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize(
    "claim", on_ranks(2, {name: partial(run_on_ranks, case) for name, case in CASES.items()})
)
def test_logs_equal_stock(found: Found, stock: StockLogs, claim: Check) -> None:
    case = CASES[claim.name]
    logs = [
        [{key: entry[key] for key in entry if key not in OF_RANKS} for entry in log]
        for log in (found.values(claim)[0][0], stock.find_or_run(case))
    ]
    assert_same_log(case, *logs)
