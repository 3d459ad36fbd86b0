"""Which arguments of a decoder layer have one entry per token, read off its signature by `patch`.

    hidden_states          the first argument; the hook of the first layer slices it
    position_embeddings    sliced along the dimension that `_BY_TOKEN` names
    attention_mask         stays whole: attention sees the whole sequence

A size says nothing: a tensor of another kind may be as long as the sequence by accident. A layer
with a tensor argument that is in none of the tables below is therefore refused before anything is
split. Flags and caches, which their annotations tell from tensors, stay as they are.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.sequence.slices import Slice
from hf_moe_ep.upstream.replaced_forwards import forward_of_class

# The dimension of the sequence in what a layer is given for each token.
_BY_TOKEN = {
    "input_ids": 1,
    "per_layer_input": 1,
    "position_embeddings": 1,
    "position_ids": -1,
    "attention_scaling": 2,  # (B or 1, 1, S, 1): a scale of every query, for all heads
}
# Arguments that stay as they are, besides every mask.
_WHOLE = {
    "cache_position",
    "output_attentions",
    "output_router_logits",
    "past_key_value",
    "past_key_values",
    "shared_kv_states",
    "use_cache",
}


@dataclass(frozen=True)
class LayerArguments:
    """How a decoder layer is called.

    Attributes:
        kind: the name of the layer's class, for errors.
        names: of the positional arguments, in their order.
    """

    kind: str
    names: tuple[str, ...]

    def slice_positional(self, args: tuple[Any, ...], part: Slice) -> tuple[Any, ...]:
        """Slice all positional arguments but the first one.

        Raises:
            ValueError: the layer names fewer arguments than it was given.
        """
        if len(args) > len(self.names):
            raise ValueError(
                f"{self.kind} names {len(self.names)} positional arguments and was called with "
                f"{len(args)}, so sp_size={part.size} cannot tell which have one entry per token; "
                f"call it with keywords behind hidden_states"
            )
        names = zip(self.names[1:], args[1:], strict=False)
        return (args[0], *(self._own_part(name, value, part) for name, value in names))

    def slice_named(self, kwargs: dict[str, Any], part: Slice) -> dict[str, Any]:
        """Slice keyword arguments; those that no table names belong to whoever passed them."""
        return {name: self._own_part(name, value, part) for name, value in kwargs.items()}

    def _own_part(self, name: str, value: Any, part: Slice) -> Any:
        if name not in _BY_TOKEN:
            return value
        if type(value) in (tuple, list):
            return type(value)(self._own_part(name, one, part) for one in value)
        if not isinstance(value, Tensor):
            return value
        dim = _BY_TOKEN[name]
        size = value.shape[dim] if value.ndim > dim else 1
        if size == 1 and part.length > 1:
            return value  # the same for every token
        if size != part.length:
            raise ValueError(
                f"{name} of {self.kind} has {size} entries in a sequence of {part.length} tokens, "
                f"so sp_size={part.size} cannot slice it; give one for each token"
            )
        return part.take_shared(value, dim)


def arguments_of(layer: nn.Module, sp_size: int) -> LayerArguments:
    """Read the arguments of a decoder layer off its signature.

    Raises:
        ValueError: an argument of which nobody knows whether it has one entry per token.
    """
    by_name = _named_parameters(layer)
    kind = type(layer).__name__
    unknown = [
        parameter.name
        for parameter in by_name[1:]
        if parameter.name not in _BY_TOKEN | dict.fromkeys(_WHOLE)
        and not parameter.name.endswith("mask")
        and _may_be_tensor(parameter)
    ]
    if unknown:
        raise ValueError(
            f"sp_size ({sp_size}) > 1 slices what has one entry per token, and of "
            f"{', '.join(unknown)}, which {kind} takes, it is not known whether it has; leave "
            f"sp_size at 1, or add the argument to hf_moe_ep/sequence/layer_arguments.py"
        )
    positional = (p.name for p in by_name if p.kind != p.KEYWORD_ONLY)
    return LayerArguments(kind, tuple(positional))


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    """Return whether the annotation of a parameter names tensors, or is missing."""
    missing = parameter.annotation is parameter.empty
    return missing or "Tensor" in str(parameter.annotation)


def _named_parameters(layer: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters that the class of a layer names, or that of the layer in a wrapper.

    What transformers or Accelerate hang on an instance passes on whatever it is given.
    """
    _, *parameters = inspect.signature(forward_of_class(layer)).parameters.values()
    by_name = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    children = list(layer.children())
    if not by_name and len(children) == 1:
        return _named_parameters(children[0])
    return by_name
