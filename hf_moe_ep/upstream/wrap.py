"""How a function of another project gets one of ours in front of it, named by a string.

    Wrap("transformers.trainer:Trainer.save_model", ours, "writes hub layout")

`module:Class.function`, or `module:function` for one that a module holds; functions that stand in
classes are found in the class that is named, also where it inherits them. Any name may be a private
one: this string is where it stands. `ours(original, *args, **kwargs)` is called in place of it.

An installed version may lack a target. Then the feature that needs it is switched off: a warning
names the target and the feature, all other targets are wrapped, and the calls by which the feature
would be used raise what the warning says.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Feature:
    """What users lose where the target of a wrap is missing.

    Attributes:
        name: as an error names it.
        used_by: targets by whose call the feature is used, each with a function that is given the
            arguments of the call and returns whether this one uses it.
    """

    name: str
    used_by: Mapping[str, Callable[..., bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrap:
    """One function of another project, and ours that is called in its place.

    Attributes:
        target: where it is, as in the module's docstring.
        wrapper: ours; its first argument is the function that was there before.
        why: what would be wrong without it.
        feature: what works through it.
        optional: its package may be missing, and then nothing is wrapped.
    """

    target: str
    wrapper: Callable[..., Any]
    why: str
    feature: Feature
    optional: bool = False

    @property
    def package(self) -> str:
        """The package that holds the target."""
        return self.target.partition(":")[0].partition(".")[0]

    @property
    def is_needed(self) -> bool:
        """Whether to wrap: True but for an optional package that is not installed."""
        return not self.optional or importlib.util.find_spec(self.package) is not None


def find_owner(wrap: Wrap) -> tuple[Any, str]:
    """Return the module or class that holds the target of `wrap`, and the target's name in it.

    Raises:
        ImportError: the installed version has no such function.
    """
    module, _, path = wrap.target.partition(":")
    *classes, name = path.split(".")
    try:
        owner = functools.reduce(getattr, classes, importlib.import_module(module))
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{wrap.target} is not in {wrap.package} {_version(wrap.package)}, so this does not "
            f"work: {wrap.feature.name} (why it is wrapped: {wrap.why}); install a version that "
            f"has it ({error})"
        ) from error
    return owner, name


def wrap_all(wraps: Iterable[Wrap]) -> None:
    """Put every wrapper in front of its target, once per process.

    Warns of each target that an installed version lacks; its feature is switched off.
    """
    needed = [wrap for wrap in wraps if wrap.is_needed]
    missing: list[tuple[Feature, str]] = []
    found = []
    for wrap in needed:
        try:
            found.append((wrap, *find_owner(wrap)))
        except ImportError as error:
            warnings.warn(str(error), stacklevel=3)
            missing.append((wrap.feature, str(error)))
    for wrap, owner, name in found:
        _wrap_once(owner, name, _refusing(wrap, missing))


def wrap_imported(wraps: Iterable[Wrap]) -> None:
    """Put wrappers in front of those targets whose module somebody has imported, once each.

    Warns of targets that the installed version lacks.
    """
    for wrap in wraps:
        if wrap.target.partition(":")[0] not in sys.modules:
            continue
        try:
            owner, name = find_owner(wrap)
        except ImportError as error:
            warnings.warn(str(error), stacklevel=3)
            continue
        original = getattr(owner, name)
        _wrap_once(owner, name, wrap.wrapper)
        if isinstance(owner, ModuleType) and getattr(owner, name) is not original:
            _replace_copies(original, name, getattr(owner, name))


def _refusing(wrap: Wrap, missing: Iterable[tuple[Feature, str]]) -> Callable[..., Any]:
    """Return the wrapper, behind checks that a call uses no feature that is switched off."""
    checks = [
        (feature.used_by[wrap.target], message)
        for feature, message in missing
        if wrap.target in feature.used_by
    ]
    return partial(_refuse, checks, wrap.wrapper) if checks else wrap.wrapper


def _refuse(
    checks: Sequence[tuple[Callable[..., bool], str]],
    wrapper: Callable[..., Any],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    for is_used, message in checks:
        if is_used(*args, **kwargs):
            raise ImportError(message)
    return wrapper(original, *args, **kwargs)


def _wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper` in front of `owner.name`, unless one of ours is there already."""
    original = getattr(owner, name)
    if hasattr(original, "_hf_moe_ep_wrapper"):
        return
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._hf_moe_ep_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def _replace_copies(original: Any, name: str, wrapped: Any) -> None:
    """Replace a function in the files that imported it by its name, and hold it themselves."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)


def _version(package: str) -> str:
    """Return the installed version of a package, for an error."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
