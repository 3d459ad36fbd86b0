"""All that a call of the expert MLP is besides its tensors, as one line of text.

An operator of torch.library takes tensors, lists of them, numbers and strings. What is a setting
travels through it as a string, so a new one is a field here and no operator changes:

    ExpertSpec(ExpertFormula(), ("up", "down"), grad_scale=0.5)   <->
    "gated=True interleaved=False activation=swish alpha=0x1.0000000000000p+0 limit=inf
     up_offset=0x0.0p+0 tensors=up,down up_scale=0x1.0000000000000p+0 ... backend=torch
     quantised="

Numbers are written in hexadecimal, which reads back to the same bits; and it is the one way to
write a number that torch.compile follows when it has made the number an input of its graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import WEIGHT_NAMES, ExpertWeights


@dataclass(frozen=True)
class ExpertSpec:
    """Settings of one call, and names of the tensors that it is handed.

    Attributes:
        tensors: names (of WEIGHT_NAMES) of the experts' tensors that there are, in order.
        up_scale, down_scale: of the adapters.
        grad_scale: multiplies the gradients of the experts' own tensors.
        keep_pre: whether the pre-activations are kept for backward.
        trained: names (of `names`) of what will want a gradient, as far as forward can tell.
        backend: "torch", "triton", or "auto": triton, or torch where the kernels cannot be built.
        quantised: format of the matrices (`quantised.py`), empty where they are as they are.
    """

    formula: ExpertFormula
    tensors: tuple[str, ...]
    up_scale: float = 1.0
    down_scale: float = 1.0
    grad_scale: float = 1.0
    keep_pre: bool = True
    trained: tuple[str, ...] = ()
    backend: str = "torch"
    quantised: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that may want a gradient, in order."""
        return ("rows", "weights", *self.tensors)

    def experts(self, tensors: Sequence[Tensor]) -> ExpertWeights:
        """The experts' tensors under their names, with the scales."""
        named: dict[str, Any] = dict.fromkeys(WEIGHT_NAMES)
        named.update(zip(self.tensors, tensors, strict=True))
        return ExpertWeights(
            **named,
            up_scale=self.up_scale,
            down_scale=self.down_scale,
            quantised=self.quantised,
        )

    def to_text(self) -> str:
        """The line of the module's docstring."""
        # torch.compile looks through a cache, and says so in a warning.
        return _text(self) if torch.compiler.is_compiling() else _cached_text(self)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str) -> ExpertSpec:
        """The spec that `to_text` wrote."""
        written = dict(word.split("=") for word in text.split(" "))
        formula = {name: _read(written[name], kind) for name, kind in _OF_FORMULA}
        settings = {name: _read(written[name], kind) for name, kind in _OF_SPEC}
        return ExpertSpec(formula=ExpertFormula(**formula), **settings)


# (name, declared type) of everything that is written.
_OF_FORMULA = tuple(ExpertFormula.__annotations__.items())
_OF_SPEC = tuple(item for item in ExpertSpec.__annotations__.items() if item[0] != "formula")


def _text(spec: ExpertSpec) -> str:
    # One by one: the torch.compile of torch 2.11 cannot take vars() of a frozen dataclass.
    words = [f"{name}={_write(getattr(spec.formula, name), kind)}" for name, kind in _OF_FORMULA]
    words += [f"{name}={_write(getattr(spec, name), kind)}" for name, kind in _OF_SPEC]
    return " ".join(words)


_cached_text = lru_cache(maxsize=1024)(_text)


def _write(value: Any, kind: str) -> str:
    if kind == "float":
        return float(value).hex()
    if kind == "tuple[str, ...]":
        return ",".join(value)
    assert kind in ("bool", "str"), kind
    return str(value)


def _read(text: str, kind: str) -> Any:
    if kind == "float":
        return float.fromhex(text)
    if kind == "tuple[str, ...]":
        return tuple(text.split(",")) if text else ()
    return text == "True" if kind == "bool" else text
