"""The table of what is wrapped: every row stands in the installed versions, and says why.

`make test-oldest` runs this with the oldest versions that are supported.
"""

import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from hf_moe_ep.integrations.install import WRAPPED, install, wraps
from hf_moe_ep.upstream.wrap import Wrap, find_owner, wrap_all

NEEDED = [wrap for wrap in WRAPPED if wrap.is_needed]
ORIGINAL = object()  # takes the place of the function that a wrapper is given


@pytest.mark.parametrize("wrap", NEEDED, ids=lambda wrap: wrap.target)
def test_a_target_resolves_and_its_wrapper_takes_what_it_takes(wrap: Wrap) -> None:
    owner, name = find_owner(wrap)
    assert callable(getattr(owner, name))
    assert wrap.why
    # Of a function that is wrapped already, the signature that functools.wraps kept.
    stock = inspect.signature(getattr(owner, name))
    ours = inspect.signature(wrap.wrapper)
    for args, kwargs in _calls(stock):
        stock.bind(*args, **kwargs)
        ours.bind(ORIGINAL, *args, **kwargs)


def _calls(signature: inspect.Signature) -> list[tuple[list[str], dict[str, str]]]:
    """The ways to call a function: what it must be given, and all of it by place or by name."""
    needed, by_place, by_name = [], [], {}
    for name, parameter in signature.parameters.items():
        kind = parameter.kind
        if kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if kind is parameter.KEYWORD_ONLY:
            by_name[name] = name
            continue
        by_place.append(name)
        if parameter.default is parameter.empty:
            needed.append(name)
    first, rest = by_place[:1], by_place[1:]  # self goes by place
    return [
        (needed, {}),
        (by_place, by_name),
        (first, by_name | {name: name for name in rest}),
    ]


def test_a_target_stands_in_the_table_once() -> None:
    targets = [wrap.target for wrap in WRAPPED]
    assert len(set(targets)) == len(targets)


def test_peft_alone_may_be_missing() -> None:
    for wrap in WRAPPED:
        assert wrap.optional == (wrap.package == "peft"), wrap.target


def test_the_report_holds_every_row() -> None:
    reports = wraps()
    assert [report.target for report in reports] == [wrap.target for wrap in WRAPPED]
    for report, wrap in zip(reports, WRAPPED, strict=True):
        assert report.resolved == wrap.is_needed and report.error == "", report


def test_wrapping_twice_changes_nothing() -> None:
    install()
    once = [getattr(*find_owner(wrap)) for wrap in NEEDED]
    install()
    assert [getattr(*find_owner(wrap)) for wrap in NEEDED] == once
    assert [wrapped._hf_moe_ep_wrapper for wrapped in once] == [wrap.wrapper for wrap in NEEDED]


def _ours(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


@pytest.mark.parametrize(
    "target",
    ["transformers.trainer:Trainer.no_such", "transformers.no_such:f", "transformers:NoSuch.f"],
)
def test_a_missing_target_is_named_with_the_version(target: str) -> None:
    version = importlib.metadata.version("transformers")
    before = Trainer.get_tp_size
    rows = (
        Wrap("transformers.trainer:Trainer.get_tp_size", _ours, "to see whether it is wrapped"),
        Wrap(target, _ours, "to see that it is missing"),
    )
    with pytest.raises(ImportError, match=f"{target} is not in transformers {version}.*is missing"):
        wrap_all(rows)
    assert Trainer.get_tp_size is before, "half of a table was wrapped"


_WITHOUT_PEFT = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "peft" else found(name, *args)
from hf_moe_ep.integrations.install import install, wraps
install()
assert "peft" not in sys.modules
absent = [row for row in wraps() if not row.resolved]
assert absent and all(row.target.startswith("peft") and not row.error for row in absent)
"""


@pytest.mark.slow
def test_without_peft_the_rest_is_wrapped() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PEFT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
