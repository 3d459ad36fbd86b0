"""Replace packages that an engine imports, but that are not installed, by fake packages.

`stand_in_for_absent(packages)` lets us import the modules of an engine for their loaders, without
the kernels, servers and parsers that these modules import as well. All attributes of a fake package
are classes that accept every argument and do nothing. Code that really needs such a class fails
when it uses a result for the first time.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class _FakeClass(type):
    """The metaclass of fake classes. Every attribute of a fake class is another fake class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_fake_class(name)


def _make_fake_class(name: str) -> Any:
    members = {
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, *args, **kwargs: args[0] if args and callable(args[0]) else self,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
    }
    return _FakeClass(name, (object,), members)


class _FakeModule(types.ModuleType):
    """The replacement of a module that is not installed."""

    __path__: list[str] = []  # noqa: RUF012  it has submodules
    __version__ = "999.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _make_fake_class(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str], modules: Sequence[str]) -> None:
        self.packages, self.modules = set(packages), tuple(modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.packages or name.startswith(self.modules):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _FakeModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because a fake module has no code."""


def stand_in_for_absent(packages: Sequence[str], modules: Sequence[str] = ()) -> None:
    """From now on, import fake modules instead of missing packages and of `modules`.

    Args:
        packages: names of packages. Installed packages are not replaced.
        modules: beginnings of the names of modules, which are replaced even if they are installed.
    """
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder(absent, modules))
