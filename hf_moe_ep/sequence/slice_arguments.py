"""Slice the arguments of a decoder layer that have one entry per token.

    argument                      what the hooks of the layers do
    hidden_states                 the first layer slices it; it is the first argument of a layer
    position_embeddings (rope)    every layer slices it along the dimension in `BY_TOKEN`
    attention_mask                it stays whole, because attention sees the whole sequence
    block_states                  every layer slices it; it has the inputs of earlier layers
    prev_topk_indices             it is already a slice, because the previous layer computed it

An argument is found by its name in the signature of the layer, which `patch` reads. Its shape would
not be enough, because a tensor may be as long as the sequence by chance. `patch` therefore refuses
a layer with a tensor argument that is in none of the tables below. Arguments whose annotation names
no tensor, such as flags and caches, are passed on unchanged.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.sequence.slices import Slice

# The arguments with one entry per token, and the dimension of their tensors that counts tokens.
BY_TOKEN = {
    "block_states": 1,
    "input_ids": 1,
    "messages": 1,
    "moe_mm_token_type_ids": 1,
    "per_layer_input": 1,
    "ple_input_ids": 1,
    "position_embeddings": 1,
    "position_ids": -1,
    "attention_scaling": 2,  # (B or 1, 1, S, 1): one scale per query, for all heads
}
# Arguments that are passed on unchanged, as are all arguments whose names end in "mask". Arguments
# that begin with "prev_" come from the previous layer, which has computed them from a slice.
_WHOLE = {
    "cache_position",
    "output_attentions",
    "output_router_logits",
    "past_key_value",
    "past_key_values",
    "prev_router_hidden_states",
    "prev_topk_indices",
    "relative_distance",
    "shared_kv_states",
    "use_cache",
}
# If the layers of a model take one of these arguments, the model itself keeps the inputs of layers.
_KEPT_INPUTS = {"block_states"}


@dataclass(frozen=True)
class LayerArguments:
    """The signature of a decoder layer.

    Attributes:
        class_name: the class of the layer, for errors.
        positional: the names of the positional arguments, in order.
        model_keeps_inputs: True if the model joins inputs of several layers. Between the layers,
            the hidden states then have all tokens of the sequences.
    """

    class_name: str
    positional: tuple[str, ...]
    model_keeps_inputs: bool

    def slice_positional(self, args: tuple[Any, ...], part: Slice) -> tuple[Any, ...]:
        """Slice all positional arguments except the first one.

        Raises:
            ValueError: the layer was called with more arguments than its signature names.
        """
        if len(args) > len(self.positional):
            raise ValueError(
                f"{self.class_name} names {len(self.positional)} positional arguments and was "
                f"called with {len(args)}, so {part.size} ranks cannot know which have one entry "
                f"per token; call the layer with keywords after hidden_states"
            )
        names = zip(self.positional[1:], args[1:], strict=False)
        return (args[0], *(self._slice_argument(name, value, part) for name, value in names))

    def slice_named(self, kwargs: dict[str, Any], part: Slice) -> dict[str, Any]:
        """Slice the keyword arguments that are in `BY_TOKEN`; leave all others unchanged."""
        return {name: self._slice_argument(name, value, part) for name, value in kwargs.items()}

    def _slice_argument(self, name: str, value: Any, part: Slice) -> Any:
        if name not in BY_TOKEN:
            return value
        if type(value) in (tuple, list):
            return type(value)(self._slice_argument(name, element, part) for element in value)
        if type(value) is dict:  # position embeddings of several kinds, by kind
            return {key: self._slice_argument(name, x, part) for key, x in value.items()}
        if not isinstance(value, Tensor):
            return value
        dim = BY_TOKEN[name]
        size = value.shape[dim] if value.ndim > dim else 1
        if size == 1 and part.length > 1:
            return value  # the same for every token
        if size != part.length:
            raise ValueError(
                f"{name} of {self.class_name} has {size} entries in a sequence of {part.length} "
                f"tokens, so {part.size} ranks cannot slice it; give one entry per token"
            )
        return part.take_shared(value, dim)


def read_layer_arguments(layer: nn.Module, sizes: str) -> LayerArguments:
    """Read the signature of a decoder layer.

    Args:
        sizes: the setting that splits sequences, for errors: "sp_size (2)".

    Raises:
        ValueError: a tensor argument is in no table, so it is unknown if it must be sliced.
    """
    by_name = list_named_parameters_of_forward(layer)
    class_name = type(layer).__name__
    unknown = [
        parameter.name
        for parameter in by_name[1:]
        if parameter.name not in BY_TOKEN | dict.fromkeys(_WHOLE)
        and not parameter.name.endswith("mask")
        and _may_be_tensor(parameter)
    ]
    if unknown:
        raise ValueError(
            f"{sizes} > 1 slices the arguments with one entry per token, and it is not known if "
            f"{', '.join(unknown)} of {class_name} is one of them; leave it at 1, or add the "
            f"argument to hf_moe_ep/sequence/slice_arguments.py"
        )
    positional = (p.name for p in by_name if p.kind != p.KEYWORD_ONLY)
    keeps_inputs = any(parameter.name in _KEPT_INPUTS for parameter in by_name)
    return LayerArguments(class_name, tuple(positional), keeps_inputs)


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    """Return True if the annotation of a parameter names a tensor, or is missing."""
    missing = parameter.annotation is parameter.empty
    return missing or "Tensor" in str(parameter.annotation)


def list_named_parameters_of_forward(layer: nn.Module) -> list[inspect.Parameter]:
    """Return the named parameters of the forward of a decoder layer, or of a module in a layer.

    If the module is a wrapper without named parameters, return the parameters of the module inside.
    The forward of the class is used, because transformers or Accelerate may set a forward on the
    instance, which takes any arguments.
    """
    _, *parameters = inspect.signature(type(layer).forward).parameters.values()
    by_name = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    children = list(layer.children())
    if not by_name and len(children) == 1:
        return list_named_parameters_of_forward(children[0])
    return by_name
