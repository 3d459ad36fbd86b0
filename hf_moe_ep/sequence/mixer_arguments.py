"""Find the arguments of a mixer that have one entry per token, to gather them or to cut documents.

    argument                          slices are gathered         a document is cut from
    hidden_states (B, S, ...)         yes                         dimensions 0 and 1
    position_embeddings, ...          as `slice_arguments.py`     the dimensions given there
    masks (B, S) or (B, 1, S, S)      no, they are whole          dimension 1, or 2 and 3
    relative_distance (S, S)          no, it is whole             dimensions 0 and 1
    all others                        no                          no dimension

An argument counts as hidden states if the signature of the module names it and it has three or more
dimensions; its name does not matter. Tensors in the module's `**kwargs` are passed on unchanged.
Only the arguments that describe a packed row are dropped, because a single document needs none.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.sequence.slice_arguments import BY_TOKEN, list_named_parameters_of_forward

# Arguments (S, S) with one entry per query and key, which all rows of the batch share.
_BY_PAIR = {"relative_distance"}
# A call of a module: its positional and its keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]
_DESCRIBE_PACKING = {
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "max_length_k",
    "max_length_q",
    "seq_idx",
}


@dataclass(frozen=True)
class Document:
    """The tokens `start` to `stop` - 1 of the row `row`, in a batch of `rows` rows."""

    row: int
    rows: int
    start: int
    stop: int

    def take(self, x: Tensor, *dims: int, batch_dim: int = 0) -> Tensor:
        """Select the tokens in `dims`, and the row. All rows share a batch dimension of size 1."""
        if x.shape[batch_dim] == self.rows:
            x = x.narrow(batch_dim, self.row, 1)
        for dim in dims:
            x = x.narrow(dim, self.start, self.stop - self.start)
        return x


@dataclass(frozen=True)
class MixerArguments:
    """The signature of a mixer.

    Attributes:
        name: the name of the module, for errors.
        names: the names in the signature.
        positional: the names of the positional arguments, in order.
    """

    name: str
    names: frozenset[str]
    positional: tuple[str, ...]

    def change(self, call: Call, change: Callable[[str, Any], Any]) -> Call:
        """Replace each value `x` by `change(name, x)`, also in tuples, lists and dicts."""
        args, kwargs = call
        named = zip(self.positional, args, strict=False)
        return (
            tuple(_change_nested(name, value, change) for name, value in named),
            {name: _change_nested(name, value, change) for name, value in kwargs.items()},
        )

    def has_tokens(self, name: str, value: Any) -> bool:
        """Return True if an argument is not a mask and its dimension 1 counts tokens."""
        if not isinstance(value, Tensor) or name.endswith("mask"):
            return False
        return BY_TOKEN.get(name) == 1 or (name in self.names and value.ndim >= 3)

    def cut_document(self, call: Call, document: Document) -> Call:
        """Cut one document of packed rows out of the arguments of a call."""
        args, kwargs = call
        kwargs = {name: value for name, value in kwargs.items() if name not in _DESCRIBE_PACKING}
        return self.change((args, kwargs), lambda name, x: self._cut(name, x, document))

    def _cut(self, name: str, value: Any, document: Document) -> Any:
        if isinstance(value, MutableMapping):
            # Layers share keys and values in this mapping. Each document gets its own mapping.
            key = (document.row, document.start)
            return value.setdefault(key, type(value)())
        if name.endswith("mask") and value is not None:
            return self._cut_mask(name, value, document)
        if not isinstance(value, Tensor):
            return value
        if name in _BY_PAIR:
            own = slice(document.start, document.stop)
            return value[own, own]
        if name in BY_TOKEN:
            dim = BY_TOKEN[name] % value.ndim
            is_shared = value.shape[dim] == 1
            # Positions with three axes are (3, B, S).
            batch_dim = 1 if name == "position_ids" and value.ndim == 3 else 0
            return value if is_shared else document.take(value, dim, batch_dim=batch_dim)
        return document.take(value, 1) if self.has_tokens(name, value) else value

    def _cut_mask(self, name: str, mask: Any, document: Document) -> Tensor:
        if isinstance(mask, Tensor) and mask.ndim in (2, 4):
            return document.take(mask, *((1,) if mask.ndim == 2 else (2, 3)))
        shape = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"position_ids restart within a row, which means packed documents, but {name} of "
            f"{self.name} ({shape}) cannot be cut into documents; use attn_implementation='sdpa', "
            f"or pad each document to a row of its own"
        )


def read_mixer_arguments(name: str, module: nn.Module) -> MixerArguments:
    """Read the signature of a mixer; `name` is the module's name, for errors."""
    parameters = list_named_parameters_of_forward(module)
    positional = (p.name for p in parameters if p.kind != p.KEYWORD_ONLY)
    return MixerArguments(name, frozenset(p.name for p in parameters), tuple(positional))


def describes_packing(kwargs: dict[str, Any]) -> bool:
    """Return True if keyword arguments of a mixer describe packed rows for its kernels."""
    return any(kwargs.get(name) is not None for name in _DESCRIBE_PACKING)


def _change_nested(name: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Apply `change` to a value, or to each element of a tuple, list or dict of this name."""
    if type(value) in (tuple, list):
        return type(value)(_change_nested(name, element, change) for element in value)
    if type(value) is dict:
        return {key: _change_nested(name, x, change) for key, x in value.items()}
    return change(name, value)
