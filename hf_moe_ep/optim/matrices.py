"""Find the parameters of a patched model that contain matrices for Muon, and each matrix in them.

    parameter                               matrices [out, in]
    gate_up_proj of experts [E, 2F, H]      2E: gate (rows 0 .. F-1) and up of each expert
    the same, interleaved                   2E: gate (rows 0, 2, ..) and up (rows 1, 3, ..)
    the same, transposed [E, H, 2F]         2E: columns instead of rows
    the same with two dims [E, 2, F, H]     2E: with etp_size > 1 (`etp.py`)
    down_proj of experts [E, H, F]          E
    weight of an nn.Linear in a decoder     1, or with split_heads one per head of queries, keys
    layer, or in an encoder of pictures     and values

AdamW trains all other parameters of at most two dims:

    - embeddings, the head and all parameters outside of layers and encoders
    - routers and convolutions
    - norms, biases, and all parameters that have only one dimension larger than 1
    - parameters that are not the weight of an nn.Linear, such as tables of positions
    - adapters, unless the user asks for Muon

No rule covers other parameters of three or more dims.

With 2 experts of F = 3, gate_up_proj has 6 rows per expert. A rank that holds the rows 2 .. 5 of
each expert has row 2 of the gate and rows 0 .. 2 of up. `MatrixLayout.view_block` returns views of
these parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_moe_ep.lora.computed import iterate_stacked_factors, stack_conversion
from hf_moe_ep.lora.factors import is_stacked
from hf_moe_ep.plan import ModelPlan, make_name_in_layer, matches
from hf_moe_ep.state import patched_state
from hf_moe_ep.upstream.adapters import list_adapter_parameter_ids
from hf_moe_ep.upstream.experts_interface import get_experts_flags, is_experts_module
from hf_moe_ep.upstream.module_names import get_stock_name, unwrap

# The rows of these projections of attention are divided into heads of consecutive rows.
_QUERY_HEAD_PROJECTIONS = ("q_proj", "q_b_proj", "kv_b_proj")
_KEY_HEAD_PROJECTIONS = ("k_proj", "v_proj")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class MatrixLayout:
    """How a parameter stores matrices [out, in] of one shape.

    Attributes:
        stacked: True if dim 0 counts experts, False if the parameter has two dims.
        transposed: True if the last two dims are (in, out).
        parts: the number of matrices that share the dim `out` of the parameter.
        interleaved: True if row r of `out` belongs to part r % parts, False if the parts follow
            each other.
        stack: converts a packed LoRA factor of experts to a stacked view, or None.
        has_part_dim: True if the parts have a dim of their own before `out` (`etp.py`).
    """

    stacked: bool = False
    transposed: bool = False
    parts: int = 1
    interleaved: bool = False
    stack: Callable[[Tensor], Tensor] | None = None
    has_part_dim: bool = False

    def stacked_view(self, values: Tensor) -> Tensor:
        """View a tensor of the parameter's layout as [E, rows, columns]; E is 1 without experts.

        If the parts have a dim of their own, the view has this dim, too.
        """
        if self.stack is not None:
            return self.stack(values)
        return values if self.stacked else values.unsqueeze(0)

    @property
    def out_dim(self) -> int:
        """The dim `out` of [E, rows, columns]."""
        return 2 if self.transposed else 1

    def matrix_dim(self, dim: int) -> int:
        """Convert a dim of `stacked_view` to a dim of [E, rows, columns]."""
        return dim - 1 if self.has_part_dim and dim > self.out_dim else dim

    def matrix_shape(self, shape: torch.Size) -> tuple[int, int]:
        """Return (out, in) of one matrix. `shape` is the shape of the unsharded `stacked_view`."""
        if self.has_part_dim:
            sizes = [size for dim, size in enumerate(shape) if dim != self.out_dim]
            return sizes[self.out_dim], sizes[3 - self.out_dim]
        return shape[self.out_dim] // self.parts, shape[3 - self.out_dim]

    def find_part_bounds(self, start: int, stop: int, part: int, rows: int) -> tuple[int, int]:
        """Return the [start, stop) of a part's rows among the rows start .. stop - 1 of `out`.

        `rows` is the number of rows of the part. If the parts have a dim of their own, a rank has
        the same rows of each part, and `start` and `stop` already count the rows of a part.
        """
        if self.has_part_dim:
            return start, stop
        if self.interleaved:
            return tuple(-(-(row - part) // self.parts) for row in (start, stop))  # type: ignore[return-value]
        first = part * rows
        low, high = (min(max(row - first, 0), rows) for row in (start, stop))
        return low, high

    def view_block(self, values: Tensor, start: int, stop: int, part: int, rows: int) -> Tensor:
        """View a rank's rows of one part as [E, out, in].

        Args:
            values: the rank's `stacked_view`, with the rows start .. stop - 1 of dim `out`.
            start, stop, part, rows: as in `find_part_bounds`.
        """
        if self.has_part_dim:
            block = values.select(self.out_dim, part)
            return block.mT if self.transposed else block
        low, high = self.find_part_bounds(start, stop, part, rows)
        if self.interleaved:
            index = slice(low * self.parts + part - start, None, self.parts)
        else:
            index = slice(part * rows + low - start, part * rows + high - start)
        block = values[:, index] if self.out_dim == 1 else values[:, :, index]
        return block.mT if self.transposed else block


@dataclass(frozen=True)
class Layouts:
    """The rules of the module docstring, applied to a model.

    Frozen parameters are included, because training may unfreeze them later.

    Attributes:
        matrix_layouts: the layouts of the parameters that Muon trains.
        unknown: the names of the parameters that no rule covers.
    """

    matrix_layouts: dict[nn.Parameter, MatrixLayout]
    unknown: dict[nn.Parameter, str]


def find_matrix_layouts(model: nn.Module, *, split_heads: bool = False) -> Layouts:
    """Apply the rules to all parameters of a patched model.

    Args:
        model: patched. If the model is sharded, no unit may be gathered.
        split_heads: treat each head of queries, keys and values as a matrix.

    Raises:
        ValueError: `model` is not patched, or heads cannot be found.
    """
    inner = unwrap(model)
    plan = patched_state(model).plan
    adapter_ids = list_adapter_parameter_ids(inner)
    heads = dict(_find_heads(inner, plan)) if split_heads else {}
    layouts = Layouts({}, {})
    for path, module in inner.named_modules():
        name = make_name_in_layer(get_stock_name(path), plan)
        if not _is_in_layer_or_encoder(name, plan) or _is_router(name, plan):
            continue
        if isinstance(module, (nn.Embedding, *_CONVOLUTIONS)):
            continue
        for own_name, parameter in module.named_parameters(recurse=False):
            is_matrix = sum(size > 1 for size in parameter.shape) >= 2
            if not is_matrix or id(parameter) in adapter_ids:
                continue
            if own_name.endswith("_bias") and is_experts_module(module):
                continue
            if parameter.ndim in (3, 4) and is_experts_module(module):
                layout = _find_expert_layout(module, own_name, has_part_dim=parameter.ndim == 4)
                layouts.matrix_layouts[parameter] = layout
            elif parameter.ndim > 2:
                layouts.unknown[parameter] = f"{path}.{own_name} {tuple(parameter.shape)}"
            elif isinstance(module, nn.Linear) and own_name == "weight":
                layouts.matrix_layouts[parameter] = MatrixLayout(parts=heads.get(name, 1))
    return layouts


def find_requested_layout(model: nn.Module, parameter: nn.Parameter) -> MatrixLayout | None:
    """Return the layout of a parameter for which a user asks for Muon, or None if it has none.

    A factor [E, 2, F, r] (`etp.py`) has none: one of its matrices [2F, r] has rows of gate and up,
    and a rank has two ranges of these rows.
    """
    if parameter.ndim == 4:
        return None
    for factor in iterate_stacked_factors(unwrap(model)):
        if factor.parameter is parameter:
            stack = None if is_stacked(parameter) else stack_conversion(factor)
            return MatrixLayout(stacked=True, stack=stack)
    return MatrixLayout() if parameter.ndim == 2 else None


def _find_expert_layout(module: nn.Module, name: str, *, has_part_dim: bool) -> MatrixLayout:
    flags = get_experts_flags(module)
    parts = 2 if flags.has_gate and name != "down_proj" else 1
    return MatrixLayout(
        stacked=True,
        transposed=flags.is_transposed,
        parts=parts,
        interleaved=parts == 2 and not flags.is_concatenated,
        has_part_dim=has_part_dim,
    )


def _is_in_layer_or_encoder(name: str, plan: ModelPlan) -> bool:
    """Return True if a module is in a decoder layer, or in an encoder of pictures or sound."""
    towers = [] if plan.vision is None else [plan.vision.tower]
    return any(
        matches(pattern, module)
        for module in _iterate_containers(name)
        for pattern in (plan.layers, *plan.encoders, *towers)
    )


def _is_router(name: str, plan: ModelPlan) -> bool:
    return bool(plan.router) and any(
        matches(plan.router, module) for module in _iterate_containers(name)
    )


def _iterate_containers(name: str) -> Iterator[str]:
    """Yield the name of a module, and the names of the modules that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _find_heads(model: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of heads of each projection of attention that has heads."""
    for path, module in model.named_modules():
        name = make_name_in_layer(get_stock_name(path), plan)
        if not plan.attention or not matches(plan.attention, name):
            continue
        config = getattr(module, "config", None)
        query_heads = getattr(config, "num_attention_heads", None)
        groups = getattr(module, "num_key_value_groups", 1)
        for child, projection in module.named_children():
            child = get_stock_name(child)
            if child not in (*_QUERY_HEAD_PROJECTIONS, *_KEY_HEAD_PROJECTIONS):
                continue
            rows = getattr(projection, "out_features", 0)
            count = query_heads
            if child in _KEY_HEAD_PROJECTIONS:
                count = (query_heads or 0) // groups
            if not count or rows % count:
                raise ValueError(
                    f"split_heads=True: the heads of {name}.{child} are unknown ({rows} rows, "
                    f"{count} heads); leave out split_heads"
                )
            yield f"{name}.{child}", count
