"""A fake of vLLM's models that has `load_weights` and cannot generate.

vLLM's Qwen3-MoE and Qwen3-VL-MoE take a checkpoint's (key, tensor) pairs, in any order and in any
number of calls, and copy them into their own parameters. Matrices that vLLM multiplies at once are
parts of one parameter:

    self_attn.{q,k,v}_proj                  self_attn.qkv_proj       [q; k; v]
    mlp.{gate,up}_proj                      mlp.gate_up_proj         [gate; up]
    mlp.experts.3.{gate,up}_proj.weight     mlp.experts.w13_weight   [3] = [gate; up]
    mlp.experts.3.down_proj.weight          mlp.experts.w2_weight    [3]
    mlp.experts.gate_up_proj, [E, in, out]  mlp.experts.w13_weight   transposed   (Qwen3-VL-MoE)

Qwen3-VL-MoE also renames prefixes: model.visual. to visual., model.language_model. to
language_model.model., lm_head. to language_model.lm_head.

vLLM silently skips some names that it does not know. The fake raises an error for them.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

_STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
_PREFIXES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)


@dataclass
class _Target:
    """The part of a parameter to which a tensor of a checkpoint is copied."""

    parameter: str
    part: tuple[slice | int, ...]
    shape: tuple[int, ...]
    transposed: bool = False


@dataclass
class Engine:
    """The parameters of an engine.

    Attributes:
        parameters: name -> tensor, full of NaN until it is loaded.
        calls: the number of calls of load_weights.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0
    _places: dict[str, _Target] = field(default_factory=dict)
    _loaded: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, stock: PreTrainedModel) -> "Engine":
        """Make an engine with the sizes of a stock model, whose parameters are not loaded yet."""
        engine = cls()
        pictures = stock.config.model_type == "qwen3_vl_moe"
        rows: dict[str, list[tuple[str, int, Tensor]]] = {}
        for name, tensor in stock.named_parameters():
            head, _, last = name.rpartition(".")
            if head.endswith("mlp.experts"):
                engine._add_experts(head, last, tensor, pictures)
                continue
            module, _, kind = head.rpartition(".")
            fused, index = _STACKED.get(kind, (kind, 0))
            rows.setdefault(f"{module}.{fused}.{last}".lstrip("."), []).append(
                (name, index, tensor)
            )
        for parameter, parts in rows.items():
            start = 0
            for name, _, tensor in sorted(parts, key=lambda part: part[1]):
                part = (slice(start, start + len(tensor)),)
                engine._places[name] = _Target(parameter, part, tuple(tensor.shape))
                start += len(tensor)
            shape = (start, *parts[0][2].shape[1:])
            engine.parameters[parameter] = torch.full(shape, math.nan, dtype=tensor.dtype)
        if pictures:
            engine._rename_prefixes()
        return engine

    def _add_experts(self, head: str, last: str, tensor: Tensor, pictures: bool) -> None:
        parameter = f"{head}.{_EXPERTS[last]}"
        self.parameters[parameter] = torch.full(tensor.shape, math.nan, dtype=tensor.dtype)
        experts, out, inner = tensor.shape
        if pictures:
            target = _Target(parameter, (slice(None),), (experts, inner, out), transposed=True)
            self._places[f"{head}.{last}"] = target
            return
        kinds = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        share = out // len(kinds)
        for expert in range(experts):
            for number, kind in enumerate(kinds):
                part = (expert, slice(number * share, (number + 1) * share))
                key = f"{head}.{expert}.{kind}.weight"
                self._places[key] = _Target(parameter, part, (share, inner))

    def _rename_prefixes(self) -> None:
        def renamed(name: str) -> str:
            for old, new in _PREFIXES:
                name = re.sub(f"^{re.escape(old)}", new, name)
            return name

        self.parameters = {renamed(name): tensor for name, tensor in self.parameters.items()}
        for target in self._places.values():
            target.parameter = renamed(target.parameter)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy tensors of a checkpoint into parameters, and return the names of these parameters.

        Raises:
            ValueError: no parameter takes a key, or a tensor has the wrong shape.
        """
        self.calls += 1
        loaded = set()
        for key, tensor in weights:
            target = self._places.get(key)
            if target is None:
                raise ValueError(
                    f"no parameter takes {key}; keys that are not loaded yet: {self.missing()}; "
                    f"loaded: {sorted(self._loaded)}"
                )
            if tuple(tensor.shape) != target.shape:
                raise ValueError(f"{key} is {tuple(tensor.shape)}, expected {target.shape}")
            values = tensor.transpose(-1, -2) if target.transposed else tensor
            self.parameters[target.parameter][target.part] = values
            self._loaded.add(key)
            loaded.add(target.parameter)
        return loaded

    @property
    def keys(self) -> list[str]:
        """The checkpoint keys that the engine takes."""
        return sorted(self._places)

    def missing(self) -> list[str]:
        """List the keys that have not been loaded since `begin`."""
        return sorted(self._places.keys() - self._loaded)

    def begin(self) -> None:
        """Start the next sync of weights: no key counts as loaded, and all parameters are NaN."""
        self._loaded.clear()
        for parameter in self.parameters.values():
            parameter.fill_(math.nan)
