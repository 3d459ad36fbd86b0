"""Find the hub layout of a model: the checkpoint tensors that make up each parameter.

A layout lists the pieces of each parameter. A piece is a box (index ranges) of a checkpoint tensor
and the elements of the parameter that the box contains. `find_hub_layout` derives the layout from
transformers' own conversion, in four steps:

    Tracer (traced.py)                   makes a tensor per parameter that records where its
                                         elements come from
    make_stock_tensors (moe/stacked.py)  turns our stacked weights into the stock parameters
    convert_to_hub                       lets transformers convert all tensors as for a save
    PieceFinder (derived.py)             computes the pieces from the results

A plan can override the layout of stacked expert weights (`ModelPlan.stored`).

`find_pieces` accepts a checkpoint in the layout that `save_pretrained` writes. It also accepts
stacked weights in their shape in memory (transformers writes this shape with
save_original_format=False, and always for Qwen3-VL-MoE), and in this shape with the last two dims
exchanged. Both shapes fit a square weight (in = out). Then the other weight of the same experts
module decides, because all weights of a module are read in the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.derived import PieceFinder
from hf_moe_ep.checkpoints.hub.pieces import (
    Piece,
    make_per_expert_pieces,
    make_transposed_piece,
    make_whole_piece,
)
from hf_moe_ep.checkpoints.hub.traced import ZEROS, Tracer, Untraceable
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor
from hf_moe_ep.moe.stacked import make_stock_tensors
from hf_moe_ep.mtp_head import find_head
from hf_moe_ep.plan import ModelPlan, matches
from hf_moe_ep.upstream.conversion import convert_to_hub
from hf_moe_ep.upstream.hub import get_checkpoint_name, list_names_of_copies
from hf_moe_ep.upstream.models import iterate_persistent_buffers
from hf_moe_ep.upstream.module_names import get_canonical_name

_MAX_LISTED_NAMES = 5  # in an error
_ADVICE = "if it is a stack of expert weights, pass a ModelPlan whose `stored` gives their layout"

# The pieces that make up each parameter, by the name of the parameter. The key PADDING has pieces
# of zeros that do not belong to a parameter.
Layout = Mapping[str, list[Piece]]
PADDING = ""
Shape = tuple[int, ...]


def list_distinct_tensors(model: Any, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, without tied copies.

    A tied parameter is listed under the name with which transformers saves it. The names in
    `without` are left out.
    """
    by_id: dict[int, tuple[str, Tensor]] = {}
    copies = list_names_of_copies(model)
    for key, tensor in model.state_dict(keep_vars=True).items():
        name, earlier = get_canonical_name(key), by_id.get(id(tensor))
        if name not in without and (earlier is None or get_checkpoint_name(earlier[0]) in copies):
            by_id[id(tensor)] = name, tensor
    return dict(by_id.values())


def list_shapes(model: nn.Module) -> dict[str, Shape]:
    """Return the shapes of parameters and persistent buffers, by their names in checkpoints."""
    named = (*model.named_parameters(remove_duplicate=False), *iterate_persistent_buffers(model))
    return {get_checkpoint_name(name): tuple(tensor.shape) for name, tensor in named}


def list_possible_keys(layout: Layout, prefix: str) -> set[str]:
    """Return all keys that a checkpoint of the model can have.

    Keys begin with `prefix`, such as "model.", in a checkpoint of a model with a head. In a
    checkpoint of its base model they do not.
    """
    keys = {piece.key for pieces in layout.values() for piece in pieces} | layout.keys()
    return keys | {f"{prefix}{key}" for key in keys} | {key.removeprefix(prefix) for key in keys}


def find_hub_layout(
    model: Any,
    plan: ModelPlan,
    shapes: Mapping[str, Shape],
    *,
    copies: bool = True,
    as_loaded: bool = True,
) -> Layout:
    """Find the pieces of every parameter in a checkpoint that is saved in the hub's layout.

    Args:
        model: the model; transformers chooses the conversion by its class and config.
        plan: `plan.stored` overrides the conversion for stacked weights.
        shapes: the shapes of the parameters and buffers, by their names in a stock model.
        copies: include the second copies of the embedding and the output head that checkpoints with
            a head for multi-token prediction have (`MtpHead.copies`).
        as_loaded: as in `convert_to_hub`.

    Raises:
        ValueError: the conversion uses an operation that cannot be traced, or does not write all
            elements of a parameter. The error names the tensor, if the conversion came so far.
    """
    from_plan = {n for n in shapes if _is_stacked(n, plan) and _make_weight_name(n) in plan.stored}
    derived = {name: shape for name, shape in shapes.items() if name not in from_plan}
    layout = _derive_layout(model, derived, as_loaded)
    pieces_of = {
        name: _make_layout_of_plan(name, shape, plan) if name in from_plan else layout[name]
        for name, shape in shapes.items()
    }
    for key, name in find_copies(model).items() if copies else ():
        if name in pieces_of:
            pieces_of[name] = [*pieces_of[name], make_whole_piece(key, shapes[name])]
    return pieces_of | {PADDING: layout[PADDING]}


def find_copies(model: Any) -> Mapping[str, str]:
    """Return the keys of second copies of parameters, each with the name of the parameter."""
    head = find_head(model) if isinstance(model, nn.Module) else None
    return {} if head is None else head.copies


def _make_layout_of_plan(name: str, shape: Shape, plan: ModelPlan) -> list[Piece]:
    stored = plan.stored[_make_weight_name(name)]
    if stored.parts:
        experts, out, inner = shape
        return make_per_expert_pieces(name.rpartition(".")[0], (experts, out, inner), stored.parts)
    return [
        make_transposed_piece(name, shape) if stored.transposed else make_whole_piece(name, shape)
    ]


def _derive_layout(model: Any, shapes: Mapping[str, Shape], as_loaded: bool) -> Layout:
    names, tracer = list(shapes), Tracer()
    tensors = {name: tracer.tensor(number, shapes[name]) for number, name in enumerate(names)}
    originals = {id(tensor): name for name, tensor in tensors.items()}
    layout: dict[str, list[Piece]] = {name: [] for name in names}
    finder, num_dims = PieceFinder(), [len(shapes[name]) for name in names]
    padding: list[Piece] = []
    key = "its conversion"
    try:
        stock_tensors = make_stock_tensors(model, tensors)
        for key, tensor in convert_to_hub(model, stock_tensors, as_loaded=as_loaded).items():
            name = originals.get(id(tensor))
            if name is not None:
                layout[name].append(make_whole_piece(key, shapes[name]))
                continue
            for number, piece in finder.find(key, tensor, num_dims):
                (padding if number == ZEROS else layout[names[number]]).append(piece)
    except Untraceable as error:
        raise ValueError(
            f"cannot derive how the hub stores this {type(model).__name__}: {key}: {error}; "
            f"{_ADVICE}"
        ) from error
    for name, pieces in layout.items():
        written, size = sum(piece.numel for piece in pieces), math.prod(shapes[name])
        if written != size:
            raise ValueError(
                f"cannot derive how the hub stores this {type(model).__name__}: transformers "
                f"writes {written} of the {size} elements of {name}; {_ADVICE}"
            )
        pieces.sort(key=lambda piece: piece.start)
    return layout | {PADDING: padding}


def find_pieces(
    tensors: Mapping[str, FileTensor],
    parameters: Mapping[str, Shape],
    layout: Layout,
    plan: ModelPlan,
) -> dict[str, list[Piece]]:
    """Find the pieces of each parameter in a checkpoint, by trying several layouts.

    Args:
        tensors: the tensors of the checkpoint, by key.
        parameters: the shapes of the parameters to find, by name.
        layout: the hub's layout, which is tried first.
        plan: names the stacked weights, for which the transposed shape is tried, too.

    Raises:
        ValueError: no layout fits. The error names missing tensors and tensors of another shape.
    """
    pieces: dict[str, list[Piece]] = {}
    missing: dict[str, None] = {}
    misshapen: dict[str, None] = {}
    for group in _group_by_layout(parameters, layout, plan):
        layouts = _list_candidate_layouts({name: parameters[name] for name in group}, layout, plan)
        fitting = next((candidate for candidate in layouts if _fits(candidate, tensors)), None)
        if fitting is None:
            # The error compares the checkpoint with the first layout whose keys are all in the
            # checkpoint, or, if there is no such layout, with the hub's layout.
            with_all_keys = [
                candidate
                for candidate in layouts
                if all(piece.key in tensors for piece in _iterate_pieces(candidate))
            ]
            for piece in _iterate_pieces((with_all_keys or layouts)[0]):
                if piece.key not in tensors:
                    missing[piece.key] = None
                elif tensors[piece.key].shape != piece.shape:
                    shapes = f"{tensors[piece.key].shape} instead of {piece.shape}"
                    misshapen[f"{piece.key} {shapes}"] = None
        pieces |= fitting or {}
    problems = [
        list_names(kind, names) for kind, names in (("missing", missing), ("misshapen", misshapen))
    ]
    if any(problems):
        raise ValueError("; ".join(filter(None, problems)))
    return pieces


def list_names(kind: str, names: Iterable[str]) -> str:
    """Return "missing 7 tensors: a, b, ..", or "" for no names."""
    names = list(names)
    shown, hidden = names[:_MAX_LISTED_NAMES], names[_MAX_LISTED_NAMES:]
    more = f" and {len(hidden)} more" if hidden else ""
    return f"{kind} {len(names)} tensors: {', '.join(shown)}{more}" if names else ""


def group_by_shared_tensors(layout: Layout, names: Iterable[str]) -> list[list[str]]:
    """Group parameters that share checkpoint tensors, and order groups by their first members.

    A parameter that shares tensors with two groups joins them: the members of the later group are
    put behind this parameter.
    """
    group_of: dict[str, list[str]] = {}  # by the key of a checkpoint tensor
    groups: list[list[str]] = []
    for name in names:
        overlapping = {id(g): g for p in layout[name] if (g := group_of.get(p.key)) is not None}
        group, *to_merge = sorted(overlapping.values(), key=groups.index) or [[]]
        if not group:
            groups.append(group)
        group.append(name)
        for other in to_merge:
            group += other
            groups.remove(other)
        for member in group if to_merge else [name]:
            group_of.update((piece.key, group) for piece in layout[member])
    return groups


def _group_by_layout(
    parameters: Mapping[str, Shape], layout: Layout, plan: ModelPlan
) -> list[list[str]]:
    """Group the parameters that must be read in the same layout.

    All weights of an experts module form a group, and so do parameters that share checkpoint
    tensors.
    """
    groups: dict[str, list[str]] = {}
    for names in group_by_shared_tensors(layout, parameters):
        stacked = next((name for name in names if _is_stacked(name, plan)), None)
        owner = names[0] if stacked is None else stacked.rpartition(".")[0]
        groups.setdefault(owner, []).extend(names)
    return list(groups.values())


def _is_stacked(name: str, plan: ModelPlan) -> bool:
    module, _, weight = name.rpartition(".")
    return weight in plan.expert_weights and matches(plan.experts, module)


def _make_weight_name(name: str) -> str:
    return name.rpartition(".")[2]


def _list_candidate_layouts(
    shapes: Mapping[str, Shape], layout: Layout, plan: ModelPlan
) -> list[dict[str, list[Piece]]]:
    """List the layouts to try: the hub's, the model's, and the model's with transposed stacks."""
    hub_pieces = {name: layout[name] for name in shapes}
    same_shapes = {name: [make_whole_piece(name, shape)] for name, shape in shapes.items()}
    stacked = {name: shape for name, shape in shapes.items() if _is_stacked(name, plan)}
    transposed = {name: [make_transposed_piece(name, shape)] for name, shape in stacked.items()}
    return [hub_pieces, same_shapes, same_shapes | transposed]


def _iterate_pieces(layout: Layout) -> Iterable[Piece]:
    return (piece for pieces in layout.values() for piece in pieces)


def _fits(layout: Layout, tensors: Mapping[str, FileTensor]) -> bool:
    return all(
        piece.key in tensors and tensors[piece.key].shape == piece.shape
        for piece in _iterate_pieces(layout)
    )
