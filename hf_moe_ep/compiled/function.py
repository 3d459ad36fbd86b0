"""Call a function that torch.compile has compiled, and name it in errors and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from hf_moe_ep.compiled.options import how_to_raise_recompile_limit
from hf_moe_ep.upstream.compiler import (
    compile_backward_in_forward,
    count_untraced,
    has_given_up,
    has_reached_limit,
    is_compile_error,
    notice_new_hooks,
)


class CompiledFunction:
    """A function that torch.compile traces when it is called.

    A pickle has no graphs, so an unpickled function makes graphs of its own. A copy shares them.

    Attributes:
        options: the arguments of torch.compile.
        is_checked: True once torch.compile is known to have traced the function.
        warned: True once a warning has said that torch.compile makes no further graphs.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.options = options
        self._stock = function
        self._function = _copy_function(function)
        self._compiled = torch.compile(self._function, **options)
        self.is_checked = self.warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._stock, self.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        return self

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function. `name` names it in messages.

        Raises:
            RuntimeError: torch.compile has failed, or has made no graph.
        """
        untraced = count_untraced()
        try:
            with compile_backward_in_forward(), notice_new_hooks():
                output = self._compiled(*args, **kwargs)
        except Exception as error:
            if not is_compile_error(error):
                raise
            raise RuntimeError(
                f"torch.compile failed in {name}: {error}; train without compile_layers (for the "
                f"Trainer: without torch_compile), or choose another backend"
            ) from error
        if not self.is_checked:
            if has_given_up(self._compiled, self._function):
                raise RuntimeError(
                    f"torch.compile has made no graph of {name}, so it runs uncompiled "
                    f"(TORCH_LOGS=graph_breaks says why); train without compile_layers (for the "
                    f"Trainer: without torch_compile)"
                )
            self.is_checked = True
        if count_untraced() > untraced and not self.warned:
            self.warned = has_reached_limit(self._function, self.options.get("recompile_limit"))
            if self.warned:
                warnings.warn(
                    f"torch.compile has made as many graphs of {name} as its recompile_limit "
                    f"allows, so it runs uncompiled where no graph fits (TORCH_LOGS=recompiles "
                    f"says why there are so many); raise the limit: "
                    f"{how_to_raise_recompile_limit()}",
                    stacklevel=3,
                )
        return output


def _copy_function(function: Any) -> Callable[..., Any]:
    """Copy a function with its code object.

    torch.compile counts recompilations per code object, and classes of several kinds of layers may
    share their forward.
    """
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
