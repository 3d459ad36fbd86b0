"""Start ranks once for several checks, and report each check as a test of its own.

    def norms(rank: int, world: int) -> None: ...                   # asserts, or returns a value
    def files(rank: int, world: int, folder: str) -> None: ...      # an empty folder of its own

    @pytest.mark.parametrize("claim", on_ranks(2, norms, files))
    def test_on_two_ranks(found: Found, claim: Check) -> None:
        found.raise_if_failed(claim)                                # or: found.values(claim)[rank]

`found` (conftest.py) runs what is selected of a module, each number of ranks in one spawn and each
check from seed 0. A check that fails or hangs is reported with every rank's traceback and ends the
spawn; the checks after it run in a fresh one, so it hides and harms none of them. A check that
passes and yet leaves its group unusable is `alone`. Cases of `support.parity` are such checks too:
`parity.on_ranks(CASES)`. What is slow or lacks something is marked so where the table is made.
"""

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import RankError, begin_time_anew, run_ranks


@dataclass(frozen=True)
class Check:
    """`run(rank, world)` or `run(rank, world, folder)` on every rank; none of them may hang.

    `timeout` is its wall clock, `group_timeout` the process group's own; checks that differ in one
    of them are spawned apart.
    """

    name: str
    world: int
    run: Callable[..., Any]
    slow: bool = False
    skip: str = ""
    alone: bool = False
    timeout: float = 240.0
    group_timeout: float = 60.0

    def as_parameter(self) -> Any:
        marks = [pytest.mark.slow] if self.slow else []
        if self.skip:
            marks.append(pytest.mark.skip(reason=self.skip))
        return pytest.param(self, id=self.name, marks=marks)


def on_ranks(world: int, *runs: Callable[..., Any] | dict[str, Any], **options: Any) -> list[Any]:
    """Parameters for `parametrize`: functions, named as they are called, and dicts by name."""
    named: list[tuple[str, Callable[..., Any]]] = []
    for run in runs:
        named += run.items() if isinstance(run, dict) else [(run.__name__.strip("_"), run)]
    return [Check(name, world, run, **options).as_parameter() for name, run in named]


class Found:
    """The result or error of each check of a module, run when the first one is asked for."""

    def __init__(self, selected: Iterable[Check]) -> None:
        self._selected = [check for check in selected if not check.skip]
        self._outcomes: dict[Check, list[Any] | Exception] = {}

    def values(self, check: Check) -> list[Any]:
        """The value of every rank, or what went wrong."""
        if check not in self._outcomes:
            self._outcomes |= run_checks(self._beside(check))
        outcome = self._outcomes[check]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def raise_if_failed(self, check: Check) -> None:
        self.values(check)

    def _beside(self, check: Check) -> list[Check]:
        """The checks that share a spawn with this one, in the order of their table."""
        others = self._selected if check in self._selected else [*self._selected, check]
        return [other for other in others if _spawn_of(other) == _spawn_of(check)]


def selected_checks(request: pytest.FixtureRequest) -> list[Check]:
    """The checks among the parameters of those tests of this module that are to run."""
    found: dict[Check, None] = {}  # a check of two tests runs once
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
            found |= dict.fromkeys(value for value in parameters if isinstance(value, Check))
    return list(found)


def run_checks(checks: list[Check]) -> dict[Check, list[Any] | Exception]:
    """Run checks of one spawn: its value per rank, or the error, for each of them."""
    assert len({_spawn_of(check) for check in checks}) == 1, "these cannot share a spawn"
    outcomes: dict[Check, list[Any] | Exception] = {}
    while waiting := [check for check in checks if check not in outcomes]:
        outcomes |= _run_until_one_fails(waiting)
    return outcomes


def _spawn_of(check: Check) -> tuple[Any, ...]:
    return (check.world, check.timeout, check.group_timeout, check if check.alone else None)


def _run_until_one_fails(checks: list[Check]) -> dict[Check, list[Any] | Exception]:
    """Outcomes of at least one check: those that passed, and the first that did not."""
    world, timeout, group_timeout, _ = _spawn_of(checks[0])
    failure: Exception | None = None
    outcomes: dict[Check, list[Any] | Exception] = {}
    with tempfile.TemporaryDirectory(prefix="checks_") as folder:
        try:
            times = {"timeout": timeout, "group_timeout": group_timeout, "time_to_start": 120.0}
            run_ranks(_in_turn, world, checks, folder, **times)
        except (RankError, TimeoutError) as error:
            failure = error
        for index, check in enumerate(checks):
            files = [_value_file(folder, index, rank) for rank in range(world)]
            if not all(file.exists() for file in files):
                assert failure is not None
                return outcomes | {check: failure}
            outcomes[check] = [torch.load(file, weights_only=False) for file in files]
    if failure is not None:  # all returned, and a rank died on its way out
        outcomes[checks[-1]] = failure
    return outcomes


def _in_turn(rank: int, world: int, checks: list[Check], folder: str) -> None:
    """One rank: a check begins when all ranks have passed the one before."""
    for index, check in enumerate(checks):
        begin_time_anew()
        torch.manual_seed(0)
        arguments = []
        if "folder" in signature(check.run).parameters:
            own = Path(folder, f"folder{index}")
            own.mkdir(exist_ok=True)
            arguments.append(str(own))
        value = check.run(rank, world, *arguments)
        whole_or_not_at_all = Path(folder, f"value{index}_{rank}.partial")
        torch.save(value, whole_or_not_at_all)
        whole_or_not_at_all.rename(_value_file(folder, index, rank))
        # Through files, not the group: it would time out with an error where a rank hangs.
        while not all(_value_file(folder, index, other).exists() for other in range(world)):
            time.sleep(0.005)


def _value_file(folder: str, index: int, rank: int) -> Path:
    return Path(folder, f"value{index}_{rank}.pt")
