"""Start ranks once for several checks, and report each check as a test of its own.

    def norms(rank: int, world: int) -> None: ...                   # asserts, or returns a value
    def files(rank: int, world: int, folder: str) -> None: ...      # an empty folder of its own

    @pytest.mark.parametrize("claim", on_ranks(2, norms, files))
    def test_on_two_ranks(found: Found, claim: Check) -> None:
        found.raise_if_failed(claim)                                # or: found.values(claim)[rank]

The fixture `found` (conftest.py) runs the selected checks of a module. Checks with the same number
of ranks share one spawn, and each check starts with seed 0. A check that fails or hangs is reported
with every rank's traceback and ends the spawn. The checks after it run in a fresh spawn, so its
failure does not affect them. A check that passes but leaves its process group unusable must be
marked `alone=True`. `parity.on_ranks(CASES)` makes checks of the cases of `support.parity`.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import debug

from support.ranks import RankError, begin_time_anew, run_ranks


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
    """The results or errors of a module's checks. Reading the first result runs the checks."""

    def __init__(self, selected: Iterable[Check]) -> None:
        self._selected = [check for check in selected if not check.skip]
        self._outcomes: dict[Check, list[Any] | Exception] = {}

    def values(self, check: Check) -> list[Any]:
        """Return the value of every rank, or raise the error of the check."""
        if check not in self._outcomes:
            self._outcomes |= run_checks(self._checks_of_spawn(check))
        outcome = self._outcomes[check]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def raise_if_failed(self, check: Check) -> None:
        self.values(check)

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


def run_checks(checks: list[Check]) -> dict[Check, list[Any] | Exception]:
    """Run checks that can share a spawn. Return each check's values of all ranks, or its error."""
    assert len({_spawn_of(check) for check in checks}) == 1, "these checks cannot share a spawn"
    outcomes: dict[Check, list[Any] | Exception] = {}
    while waiting := [check for check in checks if check not in outcomes]:
        outcomes |= _run_until_one_fails(waiting)
    return outcomes


def _spawn_of(check: Check) -> tuple[Any, ...]:
    return (check.world, check.timeout, check.group_timeout, check if check.alone else None)


def _run_until_one_fails(checks: list[Check]) -> dict[Check, list[Any] | Exception]:
    """Return the outcomes of all checks up to the first one that fails, and of this one."""
    world, timeout, group_timeout, _ = _spawn_of(checks[0])
    failure: Exception | None = None
    outcomes: dict[Check, list[Any] | Exception] = {}
    with tempfile.TemporaryDirectory(prefix="checks_") as folder:
        try:
            times = {"timeout": timeout, "group_timeout": group_timeout, "time_to_start": 120.0}
            run_ranks(_run_in_turn, world, checks, folder, **times)
        except (RankError, TimeoutError) as error:
            failure = error
        for index, check in enumerate(checks):
            files = [_value_file(folder, index, rank) for rank in range(world)]
            if not all(file.exists() for file in files):
                assert failure is not None
                return outcomes | {check: failure}
            outcomes[check] = [torch.load(file, weights_only=False) for file in files]
    if failure is not None:  # all checks returned, and then a rank died
        outcomes[checks[-1]] = failure
    return outcomes


def _run_in_turn(rank: int, world: int, checks: list[Check], folder: str) -> None:
    """Run the checks on one rank. A check begins when all ranks have passed the previous one."""
    for index, check in enumerate(checks):
        begin_time_anew()
        torch.manual_seed(0)
        arguments = []
        if "folder" in signature(check.run).parameters:
            check_folder = Path(folder, f"folder{index}")
            check_folder.mkdir(exist_ok=True)
            arguments.append(str(check_folder))
        value = check.run(rank, world, *arguments)
        partial_file = Path(folder, f"value{index}_{rank}.partial")
        torch.save(value, partial_file)
        partial_file.rename(_value_file(folder, index, rank))
        # A barrier of the process group would raise a timeout here if another rank hangs.
        while not all(_value_file(folder, index, other).exists() for other in range(world)):
            time.sleep(0.005)
        _destroy_groups()


def _destroy_groups() -> None:
    """Destroy all process groups but the first. Each has a thread that wakes up every 10 ms.

    DTensor keeps meshes, and the names of their groups, in caches. The names stay in torch's table,
    because torch makes a name from their number, and the store still has the keys of each name.
    """
    gc.collect()
    debug._clear_sharding_prop_cache()
    names = distributed_c10d._world.pg_names
    for group, name in list(names.items()):
        if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
            names[f"destroyed {name}"] = name


def _value_file(folder: str, index: int, rank: int) -> Path:
    return Path(folder, f"value{index}_{rank}.pt")
