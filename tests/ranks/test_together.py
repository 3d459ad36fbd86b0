"""Each rank does its part: whose value comes back where, and how one rank's error reaches all."""

from collections.abc import Callable
from typing import Any

import pytest
from support.ranks import run_ranks

from hf_moe_ep.ranks.together import everyone, on_first, together

VERBS: dict[str, Callable[..., Any]] = {
    "together": together,
    "everyone": everyone,
    "on_first": on_first,
}


class NotForOthers:
    """A value that cannot travel, as a model cannot."""

    def __reduce__(self) -> Any:
        raise TypeError("this was sent to other ranks")


def _values(rank: int, world: int) -> dict[str, Any]:
    own = NotForOthers()
    assert together("keeping", lambda: own) is own
    called = []
    first = on_first("choosing", lambda: called.append(rank) or f"of rank {rank}")
    return {
        "together": together("counting", lambda: 10 + rank),
        "everyone": everyone("counting", lambda: 10 + rank),
        "on_first": first,
        "called": called,
    }


def test_whose_value_comes_back() -> None:
    assert run_ranks(_values, 3) == [
        {
            "together": 10 + rank,
            "everyone": [10, 11, 12],
            "on_first": "of rank 0",
            "called": [0] if rank == 0 else [],
        }
        for rank in range(3)
    ]


def _errors(rank: int, world: int) -> dict[str, tuple[str, str]]:
    def fail(failing: dict[int, Exception]) -> None:
        if rank in failing:
            raise failing[rank]

    cases = {
        "one user's": {1: ValueError("sizes 3 and 4")},
        "two users'": {1: ValueError("of 1"), 2: ValueError("of 2")},
        "mixed": {0: OSError(28, "full"), 2: ValueError("of 2")},
    }
    said = {}
    for name, failing in cases.items():
        for verb in ("together", "everyone"):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                VERBS[verb]("saving", lambda failing=failing: fail(failing))
            said[f"{verb}: {name}"] = (type(caught.value).__name__, str(caught.value))
    for name, error in {"user's": ValueError("no folder"), "disk": OSError(28, "full")}.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            on_first("saving", lambda error=error: fail({0: error, 1: error}))
        said[f"on_first: {name}"] = (type(caught.value).__name__, str(caught.value))
    return said


def test_an_error_of_one_rank_is_an_error_of_all() -> None:
    wanted = {
        "one user's": ("ValueError", "sizes 3 and 4"),
        "two users'": ("ValueError", "of 1"),
        "mixed": (
            "RuntimeError",
            "saving failed on rank 0: OSError: [Errno 28] full; rank 2: of 2",
        ),
    }
    want = {f"{verb}: {name}": text for name, text in wanted.items() for verb in list(VERBS)[:2]}
    want["on_first: user's"] = ("ValueError", "no folder")
    want["on_first: disk"] = ("RuntimeError", "saving failed on rank 0: OSError: [Errno 28] full")
    assert run_ranks(_errors, 3) == [want] * 3


def test_alone_without_a_process_group() -> None:
    assert together("counting", lambda: 3) == 3
    assert everyone("counting", lambda: 3) == [3]
    assert on_first("counting", lambda: 3) == 3
    with pytest.raises(RuntimeError, match=r"saving failed on rank 0: OSError: \[Errno 28\] full"):
        together("saving", lambda: (_ for _ in ()).throw(OSError(28, "full")))
