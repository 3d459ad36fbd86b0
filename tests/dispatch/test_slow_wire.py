"""Dispatch never reads a received tensor, or changes a sent tensor, before the transfer has ended.

In these tests a transfer starts only when a rank waits for it, and until then the receiving memory
is NaN. A read or write that is too early therefore gives wrong numbers in every run, not only on a
busy machine.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.checks import Check, Found, on_ranks
from support.parity import Case
from support.tiny_models import batch, tiny
from torch import Tensor

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.moe import layer
from hf_moe_ep.moe.dispatch import all_to_all
from hf_moe_ep.ranks.collectives import start_all_to_all


@dataclass
class _LateTransfer:
    """Replaces the handle of `start_all_to_all`; its `wait` starts the transfer."""

    received_RX: Tensor
    rows_NX: Tensor
    options: dict[str, Any]
    waited: bool = False

    def wait(self) -> None:
        assert not self.waited
        self.waited = True
        with torch.no_grad():
            start_all_to_all(self.received_RX, self.rows_NX, **self.options).wait()


def _run_with_late_rows(case: Case, rank: int, world: int) -> None:
    transfers: list[_LateTransfer] = []

    def start_late(received_RX: Tensor, rows_NX: Tensor, **options: Any) -> _LateTransfer:
        received_RX.fill_(float("nan"))
        transfers.append(_LateTransfer(received_RX, rows_NX, options))
        return transfers[-1]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(all_to_all, "start_all_to_all", start_late)
        parity.run_case(case, rank, world)
    assert transfers and all(transfer.waited for transfer in transfers)


def _make_failing(error: type[BaseException]) -> Any:
    def failing(*_: Any, **__: Any) -> Any:
        raise error("in the middle of a layer")

    return failing


def _make_failing_at_call(number: int, function: Any) -> Any:
    calls = iter(range(1, 1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("in the middle of a layer")
        return function(*args, **kwargs)

    return failing


def _fail_on_all_ranks(name: str, rank: int, world: int) -> None:
    """Check that after an error the layer has waited for its transfers, and the model is usable."""
    model = apply_ep_fsdp2(tiny(), ep_size=2, dispatch_chunks=3)
    inputs = batch(model, 2, 9, seed=rank)
    want = model(**inputs).loss
    transfers: list[_LateTransfer] = []

    def start_late(received_RX: Tensor, rows_NX: Tensor, **options: Any) -> _LateTransfer:
        transfers.append(_LateTransfer(received_RX, rows_NX, options))
        return transfers[-1]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(all_to_all, "start_all_to_all", start_late)
        module, replaced, error, num_started = FAILURES[name](start_late)
        patches.setattr(module, *replaced)
        with pytest.raises(error):
            model(**inputs)
    assert [transfer.waited for transfer in transfers] == [True] * num_started
    assert torch.equal(model(**inputs).loss, want)


# {name: a function that returns (module, (name of the function that fails, replacement), error,
# number of transfers that were started before the error)}. Each chunk is one transfer, and the next
# chunk is started before the experts compute the current chunk.
FAILURES: dict[str, Any] = {
    "in the gather of weights": lambda _: (
        layer,
        ("collect_weights", _make_failing(torch.OutOfMemoryError)),
        torch.OutOfMemoryError,
        2,
    ),
    "in the experts": lambda _: (
        layer,
        ("run_experts", _make_failing(KeyboardInterrupt)),
        KeyboardInterrupt,
        2,
    ),
    "in the experts of the second chunk": lambda _: (
        layer,
        ("run_experts", _make_failing_at_call(2, layer.run_experts)),
        torch.OutOfMemoryError,
        4,
    ),
    "between two chunks": lambda start_late: (
        all_to_all,
        ("start_all_to_all", _make_failing_at_call(2, start_late)),
        torch.OutOfMemoryError,
        1,
    ),
    "in the sum of a chunk": lambda _: (
        all_to_all,
        ("add_rows", _make_failing_at_call(1, all_to_all.add_rows)),
        torch.OutOfMemoryError,
        6,
    ),
}


@pytest.mark.parametrize(
    "claim", on_ranks(2, {name: partial(_fail_on_all_ranks, name) for name in FAILURES})
)
def test_after_an_error_no_transfer_is_running(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _make_checkpointing(use_reentrant: bool) -> Any:
    return partial(parity.checkpointing, use_reentrant=use_reentrant)


THREE_CHUNKS = {"dispatch_chunks": 3}
CASES = [
    Case("3 chunks, checkpoint", 2, 2, config=THREE_CHUNKS, prepare=_make_checkpointing(False)),
]
MORE_CASES = [
    Case("1 chunk", 2, 2),
    Case("3 chunks", 2, 2, config=THREE_CHUNKS),
    Case("1 chunk, checkpoint", 2, 2, prepare=_make_checkpointing(False)),
    Case(
        "3 chunks, reentrant checkpoint",
        2,
        2,
        config=THREE_CHUNKS,
        prepare=_make_checkpointing(True),
    ),
    Case("3 chunks, two forwards, checkpoint", 2, 2, config=THREE_CHUNKS).with_(
        prepare=_make_checkpointing(False),
        micro_batches=parity.three_micro_batches,
        backward=parity.two_forwards_backward,
    ),
]
NODES = {"dispatcher": "hierarchical", "node_size": 2}
CASES_ON_NODES = [
    Case("2 nodes", 4, 4, config=NODES),
    Case(
        "2 nodes, 3 chunks, checkpoint",
        4,
        4,
        config=NODES | THREE_CHUNKS,
        prepare=_make_checkpointing(False),
    ),
]


def _make_checks(cases: list[Case], world: int = 2, **options: Any) -> list[Any]:
    named = {case.name: partial(_run_with_late_rows, case) for case in cases}
    return on_ranks(world, named, **options)


SLOW = _make_checks(MORE_CASES, slow=True) + _make_checks(CASES_ON_NODES, 4, slow=True)


@pytest.mark.parametrize("claim", _make_checks(CASES) + SLOW)
def test_late_rows_do_not_change_the_results(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
