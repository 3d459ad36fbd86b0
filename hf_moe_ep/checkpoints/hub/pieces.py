"""Where each part of a parameter lies in a checkpoint of the hub, and which part a rank holds.

A parameter is made of pieces, each one tensor of the checkpoint. Of 2 experts with F = 3, H = 5,
gate_up_proj [2, 6, 5] is

    one key per expert (Qwen3-MoE)             one tensor [E, in, out] (Qwen3-VL-MoE)
    0.gate_proj [3, 5]  at (0, 0, 0)           gate_up_proj [2, 5, 6]  at (0, 0, 0), transposed
    0.up_proj   [3, 5]  at (0, 3, 0)
    1.gate_proj [3, 5]  at (1, 0, 0)
    1.up_proj   [3, 5]  at (1, 3, 0)

Reading also takes stacked weights as they are in memory, which is how transformers 5 saves
Qwen3-VL-MoE, and Qwen3-MoE with save_original_format=False. A weight with in = out fits both ways;
an experts module has another that does not, and all of them are read the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_moe_ep.checkpoints.storage.boxes import Box
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry
from hf_moe_ep.plan import ModelPlan, Stored, matches
from hf_moe_ep.upstream.module_names import canonical_name

_SHOWN = 5


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint, and where its first element is in a parameter."""

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    transposed: bool = False

    @property
    def box(self) -> Box:
        """The part of the parameter that it holds."""
        sizes = list(self.shape)
        if self.transposed:
            sizes[-2:] = sizes[:-3:-1]
        sizes = [1] * (len(self.start) - len(sizes)) + sizes
        return tuple((at, at + size) for at, size in zip(self.start, sizes, strict=True))

    def in_file(self, part: Box) -> Box:
        """Turn a part of the parameter, within this piece, into one of the tensor in the file."""
        moved = [(a - at, b - at) for (a, b), at in zip(part, self.start, strict=True)]
        moved = moved[len(self.start) - len(self.shape) :]
        if self.transposed:
            moved[-2:] = moved[:-3:-1]
        return tuple(moved)

    def turned(self, tensor: Tensor) -> Tensor:
        """Turn the order of the file to that of the parameter, or back; the same memory."""
        return tensor.transpose(-1, -2) if self.transposed else tensor


def hub_pieces(name: str, shape: tuple[int, ...], plan: ModelPlan) -> list[Piece]:
    """List the tensors that a checkpoint of the hub has for a parameter, as they are saved."""
    stored = plan.stored.get(name.rpartition(".")[2]) if _is_stacked(name, plan) else None
    return _pieces(name, shape, stored or Stored())


def distinct_tensors(model: Any, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Name all that a checkpoint holds, but for the names `without`; tied weights once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if canonical_name(name) not in without:
            found.setdefault(id(tensor), (canonical_name(name), tensor))
    return dict(found.values())


def find_pieces(
    entries: Mapping[str, Entry], parameters: Mapping[str, tuple[int, ...]], plan: ModelPlan
) -> dict[str, list[Piece]]:
    """Find what of a checkpoint makes up each parameter, {name: shape}, in whatever layout.

    Raises:
        ValueError: names what is missing and what has another shape than the parameter.
    """
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in parameters.items():
        owner = name.rpartition(".")[0] if _is_stacked(name, plan) else name
        groups.setdefault(owner, {})[name] = shape
    found: dict[str, list[Piece]] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    for group in groups.values():
        layouts = [
            {name: layout(name, shape) for name, shape in group.items()}
            for layout in _layouts(plan)
        ]
        fitting = next((layout for layout in layouts if _fits(layout, entries)), None)
        if fitting is None:
            # Of the layout that has the keys, else of the hub's.
            known = [layout for layout in layouts if all(p.key in entries for p in _all(layout))]
            for piece in _all((known or layouts)[0]):
                if piece.key not in entries:
                    missing.append(piece.key)
                elif entries[piece.key].shape != piece.shape:
                    shapes = f"{entries[piece.key].shape} instead of {piece.shape}"
                    misshapen.append(f"{piece.key} {shapes}")
        found |= fitting or {}
    problems = [
        list_names(kind, names) for kind, names in (("missing", missing), ("misshapen", misshapen))
    ]
    if any(problems):
        raise ValueError("; ".join(filter(None, problems)))
    return found


def list_names(kind: str, names: Iterable[str]) -> str:
    """Say "missing 7 tensors: a, b, ..", or nothing without any."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{kind} {len(names)} tensors: {', '.join(names[:_SHOWN])}{more}" if names else ""


def _is_stacked(name: str, plan: ModelPlan) -> bool:
    module, _, weight = name.rpartition(".")
    return weight in plan.expert_weights and matches(plan.experts, module)


def _layouts(plan: ModelPlan) -> list[Callable[[str, tuple[int, ...]], list[Piece]]]:
    """List the layouts to try: the hub's, as in memory, and the other way round."""
    return [
        lambda name, shape: hub_pieces(name, shape, plan),
        lambda name, shape: _pieces(name, shape, Stored()),
        lambda name, shape: _pieces(name, shape, Stored(transposed=_is_stacked(name, plan))),
    ]


def _pieces(name: str, shape: tuple[int, ...], stored: Stored) -> list[Piece]:
    if stored.parts:
        module, (experts, out, inner) = name.rpartition(".")[0], shape
        rows = out // len(stored.parts)
        return [
            Piece(f"{module}.{part.format(expert)}", (rows, inner), (expert, i * rows, 0))
            for expert in range(experts)
            for i, part in enumerate(stored.parts)
        ]
    in_file = (*shape[:-2], *shape[:-3:-1]) if stored.transposed else shape
    return [Piece(name, in_file, (0,) * len(shape), stored.transposed)]


def _all(layout: dict[str, list[Piece]]) -> Iterable[Piece]:
    return (piece for pieces in layout.values() for piece in pieces)


def _fits(layout: dict[str, list[Piece]], entries: Mapping[str, Entry]) -> bool:
    return all(
        piece.key in entries and entries[piece.key].shape == piece.shape for piece in _all(layout)
    )
