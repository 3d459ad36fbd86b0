"""Stand-ins for packages that an engine imports and that are not installed here.

`stand_in_for_absent(engine)` lets the modules of an engine be imported for their loaders, without
the kernels, servers and parsers that they import along. Each absent package is an object whose
attributes are classes that accept everything and do nothing; so code that really needs one of them
fails in its first use of a result.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Nothing(type):
    """The metaclass of stand-ins: every attribute of one is another stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> Any:
    members = {
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, *args, **kwargs: args[0] if args and callable(args[0]) else self,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
    }
    return _Nothing(name, (object,), members)


class _Absent(types.ModuleType):
    """A module that is not installed."""

    __path__: list[str] = []  # noqa: RUF012  it has submodules
    __version__ = "999.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
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
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no code."""


def stand_in_for_absent(packages: Sequence[str], modules: Sequence[str] = ()) -> None:
    """Replace the packages that are not installed, and modules of installed packages, from now on.

    Args:
        packages: names of packages.
        modules: the beginnings of the names of modules.
    """
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder(absent, modules))
