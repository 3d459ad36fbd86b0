"""The functions of `all_ranks.py` return values, and raise the error of one rank on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
from support.ranks import run_ranks

from hf_moe_ep.ranks.all_ranks import gather_from_all, run_on_all, run_on_first

VERBS: dict[str, Callable[..., Any]] = {
    "run_on_all": run_on_all,
    "gather_from_all": gather_from_all,
    "run_on_first": run_on_first,
}


class NotPickled:
    """A value that cannot be pickled, such as a model."""

    def __reduce__(self) -> Any:
        raise TypeError("this was sent to other ranks")


def _collect_values(rank: int, world: int) -> dict[str, Any]:
    value = NotPickled()
    assert run_on_all("keeping", lambda: value) is value
    called = []
    first = run_on_first("choosing", lambda: called.append(rank) or f"of rank {rank}")
    return {
        "run_on_all": run_on_all("counting", lambda: 10 + rank),
        "gather_from_all": gather_from_all("counting", lambda: 10 + rank),
        "run_on_first": first,
        "called": called,
    }


def test_each_rank_gets_its_values() -> None:
    assert run_ranks(_collect_values, 3) == [
        {
            "run_on_all": 10 + rank,
            "gather_from_all": [10, 11, 12],
            "run_on_first": "of rank 0",
            "called": [0] if rank == 0 else [],
        }
        for rank in range(3)
    ]


def _collect_errors(rank: int, world: int) -> dict[str, tuple[str, str]]:
    def fail(failing: dict[int, Exception]) -> None:
        if rank in failing:
            raise failing[rank]

    cases = {
        "one user's": {1: ValueError("sizes 3 and 4")},
        "two users'": {1: ValueError("of 1"), 2: ValueError("of 2")},
        "mixed": {0: OSError(28, "full"), 2: ValueError("of 2")},
    }
    errors = {}
    for name, failing in cases.items():
        for verb in ("run_on_all", "gather_from_all"):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                VERBS[verb]("saving", lambda failing=failing: fail(failing))
            errors[f"{verb}: {name}"] = (type(caught.value).__name__, str(caught.value))
    for name, error in {"user's": ValueError("no folder"), "disk": OSError(28, "full")}.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            run_on_first("saving", lambda error=error: fail({0: error, 1: error}))
        errors[f"on_first: {name}"] = (type(caught.value).__name__, str(caught.value))
    return errors


def test_all_ranks_raise_the_error_of_one_rank() -> None:
    errors = {
        "one user's": ("ValueError", "sizes 3 and 4"),
        "two users'": ("ValueError", "of 1"),
        "mixed": (
            "RuntimeError",
            "saving failed on rank 0: OSError: [Errno 28] full; rank 2: of 2",
        ),
    }
    verbs = ("run_on_all", "gather_from_all")
    by_case = {f"{verb}: {name}": text for name, text in errors.items() for verb in verbs}
    by_case["on_first: user's"] = ("ValueError", "no folder")
    disk = "saving failed on rank 0: OSError: [Errno 28] full"
    by_case["on_first: disk"] = ("RuntimeError", disk)
    assert run_ranks(_collect_errors, 3) == [by_case] * 3


def test_one_process_needs_no_process_group() -> None:
    assert run_on_all("counting", lambda: 3) == 3
    assert gather_from_all("counting", lambda: 3) == [3]
    assert run_on_first("counting", lambda: 3) == 3
    with pytest.raises(RuntimeError, match=r"saving failed on rank 0: OSError: \[Errno 28\] full"):
        run_on_all("saving", lambda: (_ for _ in ()).throw(OSError(28, "full")))
