"""Rows that arrive as late as they may: whatever reads them early gets NaN, not luck.

A transfer here is a promise. Nothing travels until somebody waits for it, and until then the
memory that it will fill is NaN: so a read before the wait, or a tensor that is changed while it is
being sent, is a wrong number every time and not only on a busy machine.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.checks import Check, Found, on_ranks
from support.parity import Case
from torch import Tensor

from hf_moe_ep.moe.dispatch import all_to_all
from hf_moe_ep.ranks.collectives import start_all_to_all


@dataclass
class _Late:
    """What `start_all_to_all` returns, before it was called."""

    received_RX: Tensor
    rows_NX: Tensor
    options: dict[str, Any]
    waited: bool = False

    def wait(self) -> None:
        assert not self.waited
        self.waited = True
        with torch.no_grad():
            start_all_to_all(self.received_RX, self.rows_NX, **self.options).wait()


def _with_late_rows(case: Case, rank: int, world: int) -> None:
    transfers: list[_Late] = []

    def promise(received_RX: Tensor, rows_NX: Tensor, **options: Any) -> _Late:
        received_RX.fill_(float("nan"))
        transfers.append(_Late(received_RX, rows_NX, options))
        return transfers[-1]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(all_to_all, "start_all_to_all", promise)
        parity.run_case(case, rank, world)
    assert transfers and all(transfer.waited for transfer in transfers)


def _checkpoint(use_reentrant: bool) -> Any:
    return partial(parity.checkpointing, use_reentrant=use_reentrant)


THREE = {"dispatch_chunks": 3}
CASES = [
    Case("1 chunk", 2, 2),
    Case("3 chunks, checkpoint", 2, 2, config=THREE, prepare=_checkpoint(False)),
]
MORE_CASES = [
    Case("3 chunks", 2, 2, config=THREE),
    Case("1 chunk, checkpoint", 2, 2, prepare=_checkpoint(False)),
    Case("3 chunks, reentrant checkpoint", 2, 2, config=THREE, prepare=_checkpoint(True)),
    Case("3 chunks, two forwards, checkpoint", 2, 2, config=THREE).with_(
        prepare=_checkpoint(False),
        micro_batches=parity.three_micro_batches,
        backward=parity.two_forwards_backward,
    ),
]
NODES = {"dispatcher": "hierarchical", "node_size": 2}
CASES_ON_NODES = [
    Case("2 nodes", 4, 4, config=NODES),
    Case("2 nodes, 3 chunks, checkpoint", 4, 4, config=NODES | THREE, prepare=_checkpoint(False)),
]


def _checks(cases: list[Case], world: int = 2, **options: Any) -> list[Any]:
    named = {case.name: partial(_with_late_rows, case) for case in cases}
    return on_ranks(world, named, **options)


SLOW = _checks(MORE_CASES, slow=True) + _checks(CASES_ON_NODES, 4, slow=True)


@pytest.mark.parametrize("claim", _checks(CASES) + SLOW)
def test_late_rows_change_nothing(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
