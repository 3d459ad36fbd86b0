"""The table of what is wrapped: every row stands in the installed versions, and says why.

`make test-oldest` runs this with the oldest versions that are supported.
"""

import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.accelerator
import pytest
import torch
from accelerate import Accelerator
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched
from support.tiny_models import batch, tiny
from torch import nn
from transformers import Trainer

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.integrations import features
from hf_moe_ep.integrations.install import WRAPPED, WRAPPED_WHEN_IMPORTED, install, wraps
from hf_moe_ep.upstream.wrap import Feature, Wrap, find_owner, wrap_all

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


FEATURE = Feature("something that needs it")


@pytest.mark.parametrize(
    "target",
    ["transformers.trainer:Trainer.no_such", "transformers.no_such:f", "transformers:NoSuch.f"],
)
def test_a_missing_target_is_named_with_its_feature_and_the_rest_is_wrapped(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version("transformers")
    monkeypatch.setattr(Trainer, "num_tokens", lambda self: 3, raising=False)
    rows = (
        Wrap(target, _ours, "to see that it is missing", FEATURE),
        Wrap("transformers.trainer:Trainer.num_tokens", _ours, "to see it wrapped", FEATURE),
    )
    said = f"{target} is not in transformers {version}.*: something that needs it .*is missing"
    with pytest.warns(UserWarning, match=said):
        wrap_all(rows)
    assert Trainer.num_tokens._hf_moe_ep_wrapper is _ours


def test_a_call_that_uses_a_missing_feature_raises_what_the_warning_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that does not use it runs through the wrapper as ever."""
    target = "transformers.trainer:Trainer.num_tokens"
    monkeypatch.setattr(Trainer, "num_tokens", lambda self: 3, raising=False)
    feature = Feature("long runs", {target: lambda trainer: trainer == "long"})
    rows = (
        Wrap(target, lambda original, self: original(self) + 1, "to see the wrapper", FEATURE),
        Wrap("transformers.trainer:Trainer.no_such", _ours, "to see that it is missing", feature),
    )
    with pytest.warns(UserWarning) as warned:
        wrap_all(rows)
    assert Trainer.num_tokens("short") == 4
    with pytest.raises(ImportError, match=r"no_such is not in .* long runs") as raised:
        Trainer.num_tokens("long")
    assert [str(one.message) for one in warned] == [str(raised.value)]


@pytest.mark.parametrize("name", [name for name in dir(features) if name.isupper()])
def test_a_feature_is_used_by_targets_of_the_table(name: str) -> None:
    feature = getattr(features, name)
    if isinstance(feature, Feature):
        rows = (*WRAPPED, *WRAPPED_WHEN_IMPORTED)
        assert any(wrap.feature is feature for wrap in rows), "no row is of this feature"
        assert set(feature.used_by) <= {wrap.target for wrap in WRAPPED}


# What is taken out of an installed version, and what a rank does that uses the feature.
def _prepare(accelerator: Accelerator, model: nn.Module) -> None:
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def _save_state(accelerator: Accelerator, model: nn.Module) -> None:
    _prepare(accelerator, model)
    accelerator.save_state("nowhere")


MISSING: dict[str, tuple[Any, str, str, Callable[[Accelerator, nn.Module], None]]] = {
    "fsdp2_prepare_model": (
        accelerate.accelerator,
        "fsdp2_prepare_model",
        "sharding a patched model in accelerator.prepare",
        _prepare,
    ),
    "load_fsdp_model": (
        accelerate.accelerator,
        "load_fsdp_model",
        "checkpoints of a sharded model by Accelerate",
        _save_state,
    ),
}


def _without_a_target(name: str, rank: int, world: int) -> None:
    """A loop without the feature equals stock; a call that uses it raises what was warned of."""
    module, function, feature, use = MISSING[name]
    delattr(module, function)
    said = f"{function} is not in accelerate .*: {feature} "
    with pytest.warns(UserWarning, match=said):
        ours = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    one = batch(ours, 2, 7, seed=rank)
    want = tiny(dtype=torch.float32)(**one).loss
    assert_close("loss", ours(**one).loss, want, FP32_BUDGET)
    with launched(), pytest.raises(ImportError, match=said):
        use(Accelerator(cpu=True), patch(tiny(dtype=torch.float32), ep_size=2))


@pytest.mark.parametrize(
    "claim",
    [
        parameter
        for name in MISSING
        for parameter in on_ranks(
            2, {f"without {name}": partial(_without_a_target, name)}, alone=True
        )
    ],
)
def test_without_a_target(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


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
