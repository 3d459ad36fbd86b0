"""Find the convolutions and recurrences that mixers of transformers call, and replace them.

A mixer calls these functions as globals of its file. The names come from transformers'
models/qwen3_next/modeling_qwen3_next.py (delta nets), models/kimi_linear/modeling_kimi_linear.py
(KDA), models/nemotron_h/modeling_nemotron_h.py (Mamba-2) and models/jamba/modeling_jamba.py
(Mamba-1). A decorator in these files replaces a function by a kernel if the package of the kernel
is installed (integrations/hub_kernels.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

# convolution(x (B, C, S), weight (C, K), ...)
CONVOLUTION = "causal_conv1d_fn"
# The function of a kernel that computes the convolution, the recurrence, the norm and the output
# projection. Without the kernel it returns None, and the forward calls the other functions.
FUSED = "mamba2_split_conv1d_scan_combined"
# Globals of a forward that mix no tokens in training, besides the convolution. The update is the
# convolution of a single token in generation.
_WITHOUT_STATE = {CONVOLUTION, "apply_mask_to_padding_states", "causal_conv1d_update", "math"}


class Layout(Enum):
    """The dimensions of a recurrence's argument.

    HEADS: (B, S, heads) or (B, S, heads, W). A group of heads may share one entry.
    CHANNELS: (B, heads, S). Each head is one channel.
    STATES: (B, N, S). All heads share these values.
    PER_HEAD: (heads, ...). The argument is a parameter.
    """

    HEADS = "heads"
    CHANNELS = "channels"
    STATES = "states"
    PER_HEAD = "per head"


@dataclass(frozen=True)
class StateArguments:
    """The arguments with which a recurrence takes an initial state and returns the final state.

    Attributes:
        initial: the name of the argument with the initial state.
        final: the name of a flag. If it is True, the function returns (output, final state).
        keys: the position of an argument whose last dimension is the size N of the state.
        values_first: True if a state is (B, heads, V, N), False if it is (B, heads, N, V).
        returns_pair: True if the function returns a pair even without the flag `final`.
        without: the names of tensors. The output is linear in the state only without them.
    """

    initial: str
    final: str
    keys: int
    values_first: bool = False
    returns_pair: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recurrence:
    """The arguments of a recurrence that depend on tokens or heads.

    Attributes:
        positional: the layouts of the first arguments.
        named: the layouts of other arguments, by their names.
        like_output: the position of an argument with the layout and the number of heads of the
            output. (The output may be the first element of a tuple.)
        state: None if the function takes no state.
    """

    positional: tuple[Layout, ...]
    named: Mapping[str, Layout] = field(default_factory=dict)
    like_output: int = 0
    state: StateArguments | None = None

    def layouts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Layout]:
        """Return the layout of each tensor of a call, by its position or name."""
        by_key: dict[int | str, Layout] = {
            index: layout
            for index, (layout, x) in enumerate(zip(self.positional, args, strict=False))
            if isinstance(x, Tensor)
        }
        named = (name for name in self.named if isinstance(kwargs.get(name), Tensor))
        return by_key | {name: self.named[name] for name in named}


_HEADS, _CHANNELS, _PER_HEAD = Layout.HEADS, Layout.CHANNELS, Layout.PER_HEAD
# recurrence(query, key, value, g=..., beta=...)
_DELTA_RULE = Recurrence(
    (_HEADS,) * 3,
    {"g": _HEADS, "beta": _HEADS},
    like_output=2,
    state=StateArguments("initial_state", "output_final_state", keys=1, returns_pair=True),
)
# scan(x, dt, A, B, C, ...), where groups of heads share B and C
_MAMBA_2 = Recurrence(
    (_HEADS, _HEADS, _PER_HEAD, _HEADS, _HEADS),
    {"D": _PER_HEAD, "z": _HEADS, "dt_bias": _PER_HEAD},
    state=StateArguments(
        "initial_states", "return_final_states", keys=3, values_first=True, without=("z",)
    ),
)
# scan(u, delta, A, B, C, ...), where all channels share B and C
_MAMBA_1 = Recurrence(
    (_CHANNELS, _CHANNELS, _PER_HEAD, Layout.STATES, Layout.STATES),
    {"D": _PER_HEAD, "z": _CHANNELS, "delta_bias": _PER_HEAD},
)
RECURRENCES = {
    "chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "mamba2_chunk_scan": _MAMBA_2,
    "mamba_selective_scan": _MAMBA_1,
}


def has_recurrence(module: nn.Module) -> bool:
    """Return True if the forward of a module calls the convolution and one of the recurrences."""
    return _has_convolution(module) and not RECURRENCES.keys().isdisjoint(_find_globals(module))


def _has_convolution(module: nn.Module) -> bool:
    """Return True if a forward calls the convolution, and `copy_forward_with` can copy the forward.

    A forward cannot be copied if keyword-only arguments have defaults, or if the instance has a
    forward of its own, such as a kernel for the whole module. The weights of the convolution must
    be in a child, a Conv1d, which also says how wide the kernel is.
    """
    is_stock = "forward" not in vars(module) and not _get_stock_forward(module).__kwdefaults__
    has_weights = any(isinstance(child, nn.Conv1d) for child in module.children())
    return is_stock and has_weights and CONVOLUTION in _find_globals(module)


def mixes_by_convolution_alone(module: nn.Module) -> bool:
    """Return True if a forward calls the convolution, and nothing else that can mix tokens.

    A newer version of transformers may rename a recurrence. The result is therefore False if the
    forward uses a global that `_WITHOUT_STATE` does not list, a function that belongs to the
    module, or a child that takes more than one tensor.
    """
    if not _has_convolution(module) or not _find_globals(module) <= _WITHOUT_STATE:
        return False
    names = _get_stock_forward(module).__code__.co_names
    own = (getattr(module, name, None) for name in names if not hasattr(nn.Module, name))
    if any(callable(value) and not isinstance(value, nn.Module) for value in own):
        return False
    return all(_takes_one_tensor(child) for child in module.children())


def _takes_one_tensor(module: nn.Module) -> bool:
    """Return True if a forward has one argument besides *args and **kwargs."""
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters) == 1


def get_convolution_width(module: nn.Module) -> int:
    """Return how many tokens the kernel of a module's convolution covers."""
    widths = (int(m.kernel_size[0]) for m in module.children() if isinstance(m, nn.Conv1d))
    return max(widths)


def copy_forward_with(
    module: nn.Module, replacements: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a copy of a module's stock forward that calls other functions.

    `replacements` maps the name of a stock function to the function that is called instead. This
    function gets the stock function as its first argument.
    """
    stock = _get_stock_forward(module)
    functions = {
        name: partial(replacement, stock.__globals__[name])
        for name, replacement in replacements.items()
        if name in stock.__globals__
    }
    return FunctionType(
        stock.__code__,
        {**stock.__globals__, **functions},
        stock.__name__,
        stock.__defaults__,
        stock.__closure__,
    )


def _find_globals(module: nn.Module) -> set[str]:
    """Return the names of the globals of its file that the forward of a module uses."""
    function = _get_stock_forward(module)
    return set(function.__code__.co_names) & function.__globals__.keys()


def _get_stock_forward(module: nn.Module) -> Any:
    """Return the forward of the module's class without decorators."""
    return inspect.unwrap(type(module).forward)
