"""Call our wrapper instead of a function of another project.

The target of a `Wrap` is a function of another project. A string names the target:
`module:Class.function` or `module:function`. The string may contain private names, which otherwise
occur only in `upstream/`. `wrapper(original, *args, **kwargs)` is called instead of the target.
These calls apply wraps (`rows` are `Wrap` objects):

    call                               who then calls the wrapper
    wrap_process(rows)                 every caller in this process: the function itself is replaced
    specialise(trainer, rows)          one object: a subclass is inserted in front of stock's class

        class MyTrainer(Trainer)       specialise(MyTrainer()) changes the object's classes to
                                       MyTrainer -> (ours) -> Trainer. `super().save_model` in
                                       MyTrainer then calls our method, which calls stock's

    bind_wrapper(trainer, row)         one object: a bound method, which the caller sets on the
                                       object
    BoundWrapper(model, row)           the same, for objects that users pickle

The installed version of a package may lack a target. The feature that needs the target is then
switched off: one warning names the target and the feature, all other rows work, and each call that
would use the feature raises an ImportError with the text of the warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

from hf_moe_ep.upstream.requirements import get_installed_version


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature that users lose if the target of a wrap is missing.

    Attributes:
        name: the name of the feature in warnings and errors.
        used_by: a function for each target that can use the feature. The function takes the
            arguments of a call and returns True if this call uses the feature.
    """

    name: str
    used_by: Mapping[str, Callable[..., bool]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Wrap:
    """One function of another project, and our function that is called instead.

    Attributes:
        target: the function, as described in the docstring of this module.
        wrapper: our function. Its first argument is the stock function. The first line of its
            docstring is "Wrap `target`: reason."
        feature: the feature that needs the wrapper.
    """

    target: str
    wrapper: Callable[..., Any]
    feature: Feature

    @property
    def why(self) -> str:
        """The reason of the wrapper: the first line of its docstring, after the colon."""
        function = getattr(self.wrapper, "func", self.wrapper)  # of a functools.partial
        first_line = (function.__doc__ or "").partition("\n")[0]
        return first_line.partition(": ")[2].removesuffix(".")

    @property
    def package(self) -> str:
        """The package that holds the target."""
        return self.target.partition(":")[0].partition(".")[0]

    @property
    def module(self) -> str:
        """The module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """The last part of the target: the name of the function."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    @property
    def is_installed(self) -> bool:
        """Return True if the package that holds the target is installed."""
        return importlib.util.find_spec(self.package) is not None


# The features that installed versions cannot provide, each with the text of its warning.
_missing: list[tuple[Feature, str]] = []
# The targets that were looked up before. A missing target is warned of only once.
_checked: set[str] = set()
# The subclasses that `specialise` has created, by the object's class, stock's class and the rows.
_specialised: dict[tuple[type, type, tuple[Wrap, ...]], type] = {}
# The targets that are replaced for the whole process.
_in_force: set[str] = set()


def find_owner(wrap: Wrap) -> tuple[Any, str]:
    """Return the module or class that holds the target of `wrap`, and the name of the target in it.

    Raises:
        ImportError: the installed version has no such function.
    """
    _, _, path = wrap.target.partition(":")
    *classes, name = path.split(".")
    try:
        owner = functools.reduce(getattr, classes, importlib.import_module(wrap.module))
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        version = get_installed_version(wrap.package) or "(not installed)"
        raise ImportError(
            f"{wrap.target} is not in {wrap.package} {version}, so this does not work: "
            f"{wrap.feature.name} (why it is wrapped: {wrap.why}); install a version that has it "
            f"({error})"
        ) from error
    return owner, name


def check_targets(rows: Iterable[Wrap]) -> None:
    """Warn of each target that the installed version lacks, and switch off its feature."""
    for row in rows:
        if row.target in _checked:
            continue
        _checked.add(row.target)
        try:
            find_owner(row)
        except ImportError as error:
            warnings.warn(str(error), stacklevel=3)
            _missing.append((row.feature, str(error)))


def wrap_process(rows: Sequence[Wrap]) -> None:
    """Replace the target of each row for the whole process; a second call has no effect.

    The wrapper of a class method gets the class as its second argument, after the stock function. A
    function of a module is also replaced in the modules that have imported it by its name.
    """
    check_targets(rows)
    for row in rows:
        try:
            owner, name = find_owner(row)
        except ImportError:
            continue  # `check_targets` has warned.
        defined = inspect.getattr_static(owner, name)
        kind = type(defined) if isinstance(defined, (staticmethod, classmethod)) else None
        original = getattr(owner, name) if kind is None else defined.__func__
        if hasattr(original, "_hf_moe_ep_wrapper"):
            continue
        wrapped = _wrap_function(row, original)
        setattr(owner, name, wrapped if kind is None else kind(wrapped))
        _in_force.add(row.target)
        if isinstance(owner, ModuleType):
            _replace_copies(original, name, wrapped)


def in_force() -> frozenset[str]:
    """Return the targets that `wrap_process` has replaced."""
    return frozenset(_in_force)


def specialise(instance: Any, stock: type, rows: Sequence[Wrap]) -> None:
    """Insert a subclass with the wrappers of `rows` into the classes of one object.

    Args:
        instance: an object of `stock` or of a subclass.
        stock: the class that holds the targets of all rows.
        rows: the methods to override, for this object alone.
    """
    kind = type(instance)
    if not hasattr(kind, "_hf_moe_ep_rows"):
        check_targets(rows)
        key = (kind, stock, tuple(rows))
        if key not in _specialised:
            _specialised[key] = _create_subclass(*key)
        instance.__class__ = _specialised[key]


def is_specialised(instance: Any) -> bool:
    """Return True if `specialise` was called for this object."""
    return hasattr(type(instance), "_hf_moe_ep_rows")


def runs_wrapper_first(instance: Any, name: str) -> bool:
    """Return True if a call of the method `name` of a specialised object runs our wrapper first.

    The result is False if the object or a subclass of the stock class has a method of its own.
    """
    owner = next(kind for kind in type(instance).__mro__ if name in vars(kind))
    return name not in vars(instance) and "_hf_moe_ep_rows" in vars(owner)


def _create_subclass(kind: type, stock: type, rows: tuple[Wrap, ...]) -> type:
    """Create the subclass for `specialise`, with the name of `kind`, which logs and files show."""
    attributes: dict[str, Any] = {"_hf_moe_ep_rows": rows}
    ours = type(f"Patched{stock.__name__}", (stock,), attributes)
    for row in rows:
        if hasattr(stock, row.name):
            setattr(ours, row.name, _create_method(row, ours))
    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (ours,) if kind is stock else (kind, ours)
    return type(kind.__name__, bases, copied)


def _create_method(row: Wrap, ours: type) -> Callable[..., Any]:
    """Create a method of `ours` that calls the wrapper around the method of the next class."""

    @functools.wraps(getattr(ours, row.name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_missing(row.target, self, *args, **kwargs)
        return row.wrapper(getattr(super(ours, type(self)), row.name), self, *args, **kwargs)

    return method


def bind_wrapper(instance: Any, row: Wrap) -> MethodType:
    """Return a bound method of `instance` that calls the wrapper of `row` around stock's method."""
    check_targets([row])
    return MethodType(_wrap_function(row, getattr(type(instance), row.name)), instance)


class BoundWrapper:
    """A bound method that calls a wrapper around the stock method, and that can be pickled.

    Python pickles an ordinary bound method as an object and the name of its attribute. This is also
    the name of the stock method, so the stock method would be unpickled.
    """

    def __init__(self, instance: Any, row: Wrap) -> None:
        check_targets([row])
        self.__self__, self.__name__ = instance, row.name
        self._target, self._hf_moe_ep_wrapper = row.target, row.wrapper

    @property
    def __wrapped__(self) -> MethodType:
        """The stock method, whose signature `inspect` shows."""
        return MethodType(getattr(type(self.__self__), self.__name__), self.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock = self.__wrapped__.__func__
        _refuse_missing(self._target, self.__self__, *args, **kwargs)
        return self._hf_moe_ep_wrapper(stock, self.__self__, *args, **kwargs)


def _wrap_function(row: Wrap, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _refuse_missing(row.target, *args, **kwargs)
        return row.wrapper(original, *args, **kwargs)

    wrapped._hf_moe_ep_wrapper = row.wrapper  # type: ignore[attr-defined]
    return wrapped


def _refuse_missing(target: str, *args: Any, **kwargs: Any) -> None:
    """Raise ImportError if this call uses a feature that the installed versions lack."""
    for feature, message in _missing:
        is_used = feature.used_by.get(target)
        if is_used is not None and is_used(*args, **kwargs):
            raise ImportError(message)


def _replace_copies(original: Any, name: str, wrapped: Any) -> None:
    """Replace a function in the modules that imported it by its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)


def call_when_imported(module: str, call: Callable[[], None]) -> None:
    """Call `call` now if `module` is imported, otherwise right after its first import."""
    if module in sys.modules:
        call()
        return
    if _import_hook not in sys.meta_path:
        sys.meta_path.insert(0, _import_hook)
    _import_hook.waiting.setdefault(module, call)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Call a function after the import of a module. Python's own finders import the module."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], None]] = {}
        self._searched: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.waiting or name in self._searched:
            return None
        self._searched.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searched.remove(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            call = self.waiting.pop(name, None)
            if call is not None:
                call()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


_import_hook = _ImportHook()
