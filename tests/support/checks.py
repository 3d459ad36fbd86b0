"""Start ranks once for several checks, and report each check as a test of its own.

    def norms(rank: int, world: int) -> None: ...                   # asserts, or returns a value
    def files(rank: int, world: int, folder: str) -> None: ...      # an empty folder of its own

    @pytest.mark.parametrize("claim", on_ranks(2, norms, files))
    def test_on_two_ranks(found: Found, claim: Check) -> None:
        found.raise_if_failed(claim)                                # or: found.values(claim)[rank]

The fixture `found` (conftest.py) runs a check when its test asks for it. The checks of a module
with the same number of ranks share one spawn, and each check starts with seed 0. A check that fails
or hangs is reported with the tracebacks of the ranks concerned, and ends the spawn. The checks
after it run in a fresh spawn, so its failure does not affect them. A check that passes, but leaves
a process group unusable or functions replaced, must be marked `alone=True`.
`parity.on_ranks(CASES)` makes checks of the cases of `support.parity`.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from support.ranks import RankError, raise_if_failed, started_ranks
from support.reused_groups import ReusedGroups

# For checks that compile: a rank waits while another one compiles, on a busy machine for more than
# a minute.
PATIENT: dict[str, float] = {"timeout": 400.0, "group_timeout": 240.0}


@dataclass(frozen=True)
class Check:
    """A function `run(rank, world)` or `run(rank, world, folder)` that every rank calls.

    `timeout` limits the wall-clock time of the check, and `group_timeout` is the timeout of the
    process group, both in seconds. Checks share a spawn only if both are equal.
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
    """Make parameters for `parametrize` from functions, and from dicts of names and functions."""
    named: list[tuple[str, Callable[..., Any]]] = []
    for run in runs:
        named += run.items() if isinstance(run, dict) else [(run.__name__.strip("_"), run)]
    return [Check(name, world, run, **options).as_parameter() for name, run in named]


class Found:
    """The results or errors of a module's checks. Reading a result runs the check.

    Only one spawn exists at a time. Its ranks end after the last selected check that can share it.
    """

    def __init__(self, selected: Iterable[Check]) -> None:
        self._selected = [check for check in selected if not check.skip]
        self._outcomes: dict[Check, list[Any] | Exception] = {}
        self._spawn: _Spawn | None = None

    def values(self, check: Check) -> list[Any]:
        """Return the value of every rank, or raise the error of the check."""
        if check not in self._outcomes:
            self._outcomes[check] = self._run(check)
        outcome = self._outcomes[check]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def raise_if_failed(self, check: Check) -> None:
        self.values(check)

    def close(self) -> None:
        if self._spawn is not None:
            self._spawn.close()
            self._spawn = None

    def _run(self, check: Check) -> list[Any] | Exception:
        if self._spawn is None or check not in self._spawn.checks:
            self.close()
            self._spawn = _Spawn(self._checks_of_spawn(check))
        last = all(other in self._outcomes for other in self._spawn.checks if other is not check)
        outcome = self._spawn.run(check, last)
        if last or isinstance(outcome, Exception):
            self.close()
        return outcome

    def _checks_of_spawn(self, check: Check) -> list[Check]:
        """List the selected checks that share a spawn with this check, and the check itself."""
        checks = self._selected if check in self._selected else [*self._selected, check]
        return [other for other in checks if _spawn_of(other) == _spawn_of(check)]


def selected_checks(request: pytest.FixtureRequest) -> list[Check]:
    """List the checks among the parameters of this module's selected tests."""
    checks: dict[Check, None] = {}  # a check that two tests use runs once
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
            checks |= dict.fromkeys(value for value in parameters if isinstance(value, Check))
    return list(checks)


def _spawn_of(check: Check) -> tuple[Any, ...]:
    return (check.world, check.timeout, check.group_timeout, check if check.alone else None)


class _Spawn:
    """Ranks that run some checks, one at a time, as `run` asks for them."""

    def __init__(self, checks: list[Check]) -> None:
        self.checks = checks
        self._world, self._timeout, group_timeout, _ = _spawn_of(checks[0])
        self._time_to_start = 120.0
        self._turn = 0
        self._open = ExitStack()
        self._folder = Path(self._open.enter_context(TemporaryDirectory(prefix="checks_")))
        self._ranks = self._open.enter_context(
            started_ranks(
                _serve, self._world, checks, str(self._folder), group_timeout=group_timeout
            )
        )

    def run(self, check: Check, last: bool) -> list[Any] | Exception:
        """Run a check; return the value of each rank, or the error that has ended the ranks.

        If a rank fails while the ranks end after the last check, the last check has failed.
        """
        turn = self._begin(self.checks.index(check))
        files = [_value_file(self._folder, turn, rank) for rank in range(self._world)]
        try:
            self._wait(lambda: all(file.exists() for file in files))
            if last and all(file.exists() for file in files):
                self._begin(None)
                self._wait(lambda: False)
            raise_if_failed(self._ranks.outcomes(), self._world)
        except (RankError, TimeoutError) as error:
            return error
        return [torch.load(file, weights_only=False) for file in files]

    def close(self) -> None:
        self._open.close()

    def _begin(self, index: int | None) -> int:
        """Tell the ranks the index of the next check, or None to end."""
        turn, self._turn = self._turn, self._turn + 1
        partial_file = self._folder / "turn.partial"
        torch.save(index, partial_file)
        partial_file.rename(_turn_file(self._folder, turn))
        return turn

    def _wait(self, until: Callable[[], bool]) -> None:
        time_to_start, self._time_to_start = self._time_to_start, 0.0
        self._ranks.wait(self._timeout + time_to_start, until)


def _serve(rank: int, world: int, checks: list[Check], folder: str) -> None:
    """Run on one rank the checks that `_Spawn` asks for."""
    groups = ReusedGroups()
    for turn in count():
        while not _turn_file(folder, turn).exists():
            time.sleep(0.005)
        groups.end_check()  # all ranks have returned from the check before
        index = torch.load(_turn_file(folder, turn), weights_only=True)
        if index is None:
            return
        check = checks[index]
        torch.manual_seed(0)
        arguments = []
        if "folder" in signature(check.run).parameters:
            check_folder = Path(folder, f"folder{turn}")
            check_folder.mkdir(exist_ok=True)
            arguments.append(str(check_folder))
        with groups.reusing():
            value = check.run(rank, world, *arguments)
        partial_file = Path(folder, f"value{turn}_{rank}.partial")
        torch.save(value, partial_file)
        partial_file.rename(_value_file(folder, turn, rank))


def _turn_file(folder: str | Path, turn: int) -> Path:
    return Path(folder, f"turn{turn}.pt")


def _value_file(folder: str | Path, turn: int, rank: int) -> Path:
    return Path(folder, f"value{turn}_{rank}.pt")
