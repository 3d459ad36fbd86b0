"""How a function of another project gets one of ours in front of it, named by a string.

    Wrap("transformers.trainer:Trainer.save_model", ours, "writes hub layout")

`module:Class.function`, or `module:function` for one that a module holds; functions that stand in
classes are found in the class that is named, also where it inherits them. Any name may be a private
one: this string is where it stands. `ours(original, *args, **kwargs)` is called in place of it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Wrap:
    """One function of another project, and ours that is called in its place.

    Attributes:
        target: where it is, as in the module's docstring.
        wrapper: ours; its first argument is the function that was there before.
        why: what would be wrong without it.
        optional: its package may be missing, and then nothing is wrapped.
    """

    target: str
    wrapper: Callable[..., Any]
    why: str
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
            f"{wrap.target} is not in {wrap.package} {_version(wrap.package)}, where it is wrapped "
            f"because: {wrap.why}; install a version that has it ({error})"
        ) from error
    return owner, name


def wrap_all(wraps: Iterable[Wrap]) -> None:
    """Put every wrapper in front of its target, once per process; all of them or none.

    Raises:
        ImportError: an installed version lacks one of the targets.
    """
    found = [(*find_owner(wrap), wrap.wrapper) for wrap in wraps if wrap.is_needed]
    for owner, name, wrapper in found:
        _wrap_once(owner, name, wrapper)


def wrap_imported(wraps: Iterable[Wrap]) -> None:
    """Put wrappers in front of those targets whose module somebody has imported, once each.

    Targets that the installed version has not are left out.
    """
    for wrap in wraps:
        if wrap.target.partition(":")[0] not in sys.modules:
            continue
        try:
            owner, name = find_owner(wrap)
        except ImportError:
            continue
        original = getattr(owner, name)
        _wrap_once(owner, name, wrap.wrapper)
        if isinstance(owner, ModuleType) and getattr(owner, name) is not original:
            _replace_copies(original, name, getattr(owner, name))


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
