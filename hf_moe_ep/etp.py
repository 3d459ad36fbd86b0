"""Expert tensor parallelism (etp_size): how the tensors of an expert are cut over several ranks.

The ranks of an etp group share the same experts. Each rank has a part of the hidden units of every
expert (F, see `moe/layer.py`): the same rows of gate and of up, and the columns of down that belong
to them. A row of hidden states is sent to all ranks of its expert. Each rank computes its part of
the result, rounds it to the dtype of the rows, and combine adds up the parts. For rank 1 of 2:

    tensor                            this rank has              placement on the axis etp
    gate_up_proj [E, 2F, H]           rows F/2 .. F-1 of gate    split to [E, 2, F, H], Shard(2)
                                      and of up
    the same, interleaved             rows F .. 2F-1             Shard(1)
    down_proj    [E, H, F]            columns F/2 .. F-1         Shard(2)
    bias of gate_up_proj [E, 2F]      as the rows of the weight  as the rows of the weight
    bias of down_proj [E, H]          columns H/2 .. H-1         Shard(1)
    lora_A of gate_up_proj            everything                 Replicate()
    lora_B of gate_up_proj [E, 2F, r] as the rows of the weight  as the rows of the weight
    lora_A of down_proj [E, r, F]     columns F/2 .. F-1         Shard(2)
    lora_B of down_proj               everything                 Replicate()

The bias of down_proj must be added once, so each rank adds the part that it has. The gradient of a
replicated factor is a sum over the etp group (`sum_factor_gradients`). Shared experts are not cut.
Each rank computes them for its own tokens, like attention, and they belong to the FSDP2 unit of
their decoder layer. FSDP2 averages their gradients over all ranks, so etp has nothing to sum.

In gate_up_proj [E, 2F, H] a rank has two ranges of rows, and no public placement of DTensor
describes two ranges. A sharded model therefore *splits* the dim 2F into the two dims (2, F). This
is a view of the same values, in which Shard describes exactly what a rank has. DTensor, FSDP2,
gradient norms and optimizers therefore need no special case, and code that expects the stock shape
fails instead of reading wrong rows. `list_stock_parts` and `view_in_stock_shape` convert a shard or
a whole tensor back. All files have stock shapes, so they can be loaded with any etp_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from hf_moe_ep.lora.computed import iterate_stacked_factors
from hf_moe_ep.ops.quantised import BLOCK_SCALE, NESTED_SCALE, get_block_shape
from hf_moe_ep.ranks.boxes import Box, get_local_box, get_local_tensor
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.state import STATE, Compute, find_state, iterate_experts_modules
from hf_moe_ep.upstream.adapters import has_adapters, learns_prompts, map_keys_by_adapter
from hf_moe_ep.upstream.experts_interface import post_expert_norm
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap

_BIAS = "_bias"

T = TypeVar("T", Tensor, Tensor | None)


@dataclass(frozen=True)
class Cut:
    """The cut of one tensor of experts over an etp group.

    Attributes:
        dim: the dim of the stock tensor that is cut; None if every rank has the whole tensor.
        is_split: True if this dim has the rows of gate and then the rows of up. The model then
            splits the dim into two: (2, F) instead of 2F.
    """

    dim: int | None
    is_split: bool = False

    @property
    def split_dim(self) -> int | None:
        """The stock dim that the model splits into two dims, (2, F); None if there is none."""
        return self.dim if self.is_split else None

    @property
    def held_dim(self) -> int | None:
        """The dim of the held tensor that is cut."""
        return None if self.dim is None else self.dim + self.is_split

    def take(self, value: Tensor, rank: int, size: int) -> Tensor:
        """Copy the part of a rank from a tensor of stock shape. The part has stock dims, too."""
        if self.dim is None:
            return value
        if not self.is_split:
            return value.chunk(size, self.dim)[rank].clone()
        halves = value.unflatten(self.dim, (2, -1)).chunk(size, self.dim + 1)
        return halves[rank].flatten(self.dim, self.dim + 1)

    def hold(self, part: Tensor) -> Tensor:
        """View a part as the model holds it."""
        return part if self.split_dim is None else part.unflatten(self.split_dim, (2, -1))

    def placements(self, meshes: Meshes) -> list[Any]:
        """Return the placements on `meshes.expert_axes` of a tensor whose dim 0 counts experts.

        `expert_axes` has several ranks.
        """
        on_ep = [] if meshes.ep_size == 1 else [Shard(0)]
        if meshes.etp is None:
            return on_ep
        return [*on_ep, Replicate() if self.held_dim is None else Shard(self.held_dim)]


def find_cut_of_tensor(compute: Compute, name: str, *, quantised: bool = False) -> Cut | None:
    """Return the cut of a parameter of an experts module by its name; None if it is unknown.

    A quantised matrix is stored as [E, out, in], whether or not the module stores transposes.
    """
    up, down = compute.parameters
    out_dim, in_dim = (2, 1) if compute.transposed and not quantised else (1, 2)
    is_split = compute.formula.gated and not compute.formula.interleaved
    cuts = {
        up: Cut(out_dim, is_split),
        up + _BIAS: Cut(1, is_split),
        down: Cut(in_dim),
        down + _BIAS: Cut(1),
    }
    return cuts.get(name)


def find_cut_of_factor(compute: Compute, parameter: str, *, is_b: bool) -> Cut:
    """Return the cut of a stacked LoRA factor, [E, r, in] or [E, out, r], of a parameter."""
    up, _ = compute.parameters
    # If PEFT takes a transposed matrix for [out, in], its factors have exchanged their roles.
    holds_out = is_b != compute.turns_factors
    if (parameter == up) != holds_out:
        return Cut(None)
    is_split = parameter == up and compute.formula.gated and not compute.formula.interleaved
    return Cut(1 if is_b else 2, is_split)


def find_cuts(model: nn.Module) -> dict[nn.Parameter, Cut]:
    """Return the cuts of all parameters of experts that have one, before or after sharding.

    Quantised matrices are included after sharding, with their scales.
    """
    cuts: dict[nn.Parameter, Cut] = {}
    for _, module, layer in iterate_experts_modules(model):
        if layer.compute is None:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            stem = name.removesuffix(BLOCK_SCALE).removesuffix(NESTED_SCALE)
            quantised = hasattr(module, stem + BLOCK_SCALE)
            cut = find_cut_of_tensor(layer.compute, stem, quantised=quantised)
            if cut is not None:
                cuts[parameter] = cut
    for factor in iterate_stacked_factors(model):
        layer = vars(factor.module)[STATE]
        cuts[factor.parameter] = find_cut_of_factor(layer.compute, factor.adapted, is_b=factor.is_b)
    return cuts


def map_ids_to_split_dims(model: nn.Module) -> dict[int, int]:
    """Map id(parameter) to the stock dim that the model splits into two dims, (2, F).

    The result is empty unless the model is sharded with etp_size > 1.
    """
    state = find_state(model)
    if state is None or state.meshes is None or state.meshes.etp is None:
        return {}
    dims = {id(parameter): cut.split_dim for parameter, cut in find_cuts(model).items()}
    return {key: dim for key, dim in dims.items() if dim is not None}


def map_names_to_split_dims(model: nn.Module) -> dict[str, int]:
    """Map the names of parameters, and PEFT's keys of adapters, to the dims that the model splits.

    The Trainer saves the active adapter under PEFT's keys, which lack the adapter's name.
    """
    split_dims = map_ids_to_split_dims(model)
    if not split_dims:
        return {}
    inner = unwrap(model)
    parameters = {get_canonical_name(name): p.detach() for name, p in inner.named_parameters()}
    ids = {get_canonical_name(name): id(p) for name, p in inner.named_parameters()}
    names = {name: split_dims[ids[name]] for name in parameters if ids[name] in split_dims}
    if has_adapters(inner) and not learns_prompts(inner):
        adapters = map_keys_by_adapter(inner, parameters, save_embedding_layers=False)
        for keys in adapters.values():
            names |= {key: names[name] for key, name in keys.items() if name in names}
    return names


def get_stock_shape(shape: torch.Size | tuple[int, ...], split_dim: int | None) -> tuple[int, ...]:
    """Return the stock shape of a held tensor, in which `split_dim` is split into two dims."""
    if split_dim is None:
        return tuple(shape)
    return (*shape[:split_dim], shape[split_dim] * shape[split_dim + 1], *shape[split_dim + 2 :])


def view_in_stock_shape(value: Tensor, split_dim: int | None) -> Tensor:
    """View a held tensor, or some of its rows along dim 0, with stock dims."""
    return value if split_dim is None else value.flatten(split_dim, split_dim + 1)


def restore_stock_shapes(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give whole tensors that are named like the parameters of a model their stock shapes."""
    split_dims = map_ids_to_split_dims(model)
    result = dict(tensors)
    for name, parameter in model.named_parameters() if split_dims else ():
        for key in {name, get_canonical_name(name)} & result.keys():
            if id(parameter) in split_dims and result[key] is not None:
                result[key] = view_in_stock_shape(result[key], split_dims[id(parameter)])
    return result


def convert_box_to_stock(box: Box, split_dim: int, size: int) -> Box:
    """Convert a box with one index of the dim `split_dim` (gate or up) to the stock tensor.

    `size` is the length of the dim after `split_dim`, F.
    """
    half = box[split_dim][0]
    assert box[split_dim] == (half, half + 1)
    start, stop = box[split_dim + 1]
    return (*box[:split_dim], (half * size + start, half * size + stop), *box[split_dim + 2 :])


def iterate_box_halves(box: Box, split_dim: int | None, size: int) -> Iterator[tuple[int, Box]]:
    """Yield (position of the half in the box, box in the stock tensor) of a box of a held tensor.

    If `split_dim` is None, the box itself is yielded once.
    """
    if split_dim is None:
        yield 0, box
        return
    first, stop = box[split_dim]
    for half in range(first, stop):
        yield (
            half - first,
            convert_box_to_stock(
                (*box[:split_dim], (half, half + 1), *box[split_dim + 1 :]), split_dim, size
            ),
        )


def list_stock_parts(tensor: Tensor, split_dim: int | None) -> list[tuple[Box, Tensor]]:
    """List (box in the stock tensor, view of this rank's values) of a parameter's shard.

    A shard is one part, or two if the model splits a dim of the tensor.
    """
    box, local = get_local_box(tensor), get_local_tensor(tensor)
    if split_dim is None:
        return [(box, local)]
    size = tensor.shape[split_dim + 1]
    halves = iterate_box_halves(box, split_dim, size)
    return [(part, local.select(split_dim, index)) for index, part in halves]


def convert_slabs_to_stock(
    slabs: Iterable[tuple[Box, T]], split_dim: int | None
) -> Iterator[tuple[Box, T]]:
    """Convert slabs of a held tensor, (box, values or None), to slabs of the stock tensor.

    A slab has all elements of some rows of dim 0.
    """
    for box, slab in slabs:
        if split_dim is None:
            yield box, slab
            continue
        sizes: tuple[int, ...] = get_stock_shape(tuple(stop for _, stop in box), split_dim)
        values: Any = slab if slab is None else view_in_stock_shape(slab, split_dim)
        yield (box[0], *((0, size) for size in sizes[1:])), values
        del values
        del slab


def for_each_half(
    change: Callable[[Box, Tensor], Tensor], split_dim: int | None, size: int
) -> Callable[[Box, Tensor], Tensor]:
    """Return `change` as a function of boxes and values of the split tensor.

    `change(box, values)` takes a box and values of the stock tensor, so it is called once per half.
    `size` is the length of the dim after `split_dim`.
    """
    if split_dim is None:
        return change

    def change_halves(box: Box, values: Tensor) -> Tensor:
        halves = [
            change(part, values.select(split_dim, index))
            for index, part in iterate_box_halves(box, split_dim, size)
        ]
        return torch.stack(halves, split_dim)

    return change_halves


def replace_by_part_ids(
    slots_TK: Tensor, num_local: int, num_experts: int, etp_size: int
) -> Tensor:
    """Replace each expert by its parts on the ranks of its etp group: (T, K) becomes (T, K * etp).

    The ranks of a dispatch group are numbered ep_rank * etp_size + etp_rank, and rank d owns the
    parts d * L .. (d + 1) * L - 1. With 4 experts, ep_size 2 and etp_size 2, L is 2:

        ranks    0            1            2            3
        parts    0 1          2 3          4 5          6 7
        experts  0 1          0 1          2 3          2 3          experts 1 and 2: parts 1 3 4 6

    The number of experts, which means "no expert", becomes the number of parts.
    """
    group_start_TK = slots_TK.div(num_local, rounding_mode="floor") * (etp_size * num_local)
    first_TK = group_start_TK + slots_TK % num_local
    steps_D = torch.arange(
        0, etp_size * num_local, num_local, device=slots_TK.device, dtype=slots_TK.dtype
    )
    parts_TKD = first_TK.unsqueeze(2) + steps_D
    return parts_TKD.clamp_(max=num_experts * etp_size).flatten(1)


def repeat_part_weights(weights_TK: Tensor, etp_size: int, rows_dtype: torch.dtype) -> Tensor:
    """Repeat each routing weight for the parts of its expert, as `replace_by_part_ids` orders them.

    The result is in fp32 or wider, so that the sum of the parts' gradients is rounded once.
    """
    wide_dtype = torch.promote_types(weights_TK.dtype, torch.float32)
    weights_TK = weights_TK.to(torch.promote_types(wide_dtype, rows_dtype))
    return weights_TK.unsqueeze(2).expand(-1, -1, etp_size).flatten(1)


def count_whole(pairs_P: Tensor, num_local: int, etp_size: int) -> Tensor:
    """Return the number of pairs of each expert. All parts of an expert have this number."""
    return pairs_P.view(-1, etp_size, num_local)[:, 0].flatten()


def pad_bias(bias_LX: Tensor, hidden: int, meshes: Meshes) -> Tensor:
    """Pad this rank's part of a bias of down_proj with zeros, to [L, H].

    The results of an etp group are added up, so each element of the bias is added once.
    """
    before = meshes.etp_rank * bias_LX.shape[1]
    return functional.pad(bias_LX, (before, hidden - before - bias_LX.shape[1]))


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return factor.view_as(factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(grad.contiguous(), ctx.group), None


def sum_factor_gradients(factor: Tensor, meshes: Meshes) -> Tensor:
    """Return a factor that every rank of an etp group holds; backward sums the ranks' gradients.

    Each rank computes a gradient from its part of the hidden units. The all-reduce gives every rank
    the same bits, so the copies of the factor stay equal.
    """
    assert meshes.etp is not None
    return _SumGradients.apply(factor, meshes.etp.get_group())


def check_cut(experts: nn.Module, compute: Compute, etp_size: int, *, model_type: str) -> None:
    """Raise ValueError if the tensors of an experts module cannot be cut over an etp group."""
    if etp_size == 1:
        return
    kind = type(experts).__name__
    down = experts.down_proj
    assert isinstance(down, Tensor)
    _, hidden, ffn = down.transpose(1, 2).shape if compute.transposed else down.shape
    if ffn % etp_size:
        sizes = ", ".join(str(size) for size in range(1, min(ffn, 64) + 1) if ffn % size == 0)
        raise ValueError(
            f"etp_size ({etp_size}) must divide the hidden size of an expert ({ffn}) of "
            f"{model_type}; try {sizes}"
        )
    if hasattr(experts, "down_proj_bias") and hidden % etp_size:
        sizes = ", ".join(str(size) for size in range(1, min(hidden, 64) + 1) if hidden % size == 0)
        raise ValueError(
            f"etp_size ({etp_size}) must divide the hidden size ({hidden}) of {model_type}, whose "
            f"experts have a bias after down_proj, of which each rank adds a part; try {sizes}"
        )
    if post_expert_norm(experts) is not None:
        raise ValueError(
            f"{kind} has a norm after each expert, which needs the whole result of the expert, but "
            f"with etp_size ({etp_size}) a rank has a part of it; use etp_size=1"
        )
    for name, parameter in experts.named_parameters(recurse=False):
        if find_cut_of_tensor(compute, name) is None:
            raise ValueError(
                f"{name} {tuple(parameter.shape)} of {kind} is none of the tensors that "
                f"etp_size ({etp_size}) can cut ({', '.join(compute.parameters)} and their "
                f"biases); use etp_size=1"
            )
    if compute.quantisation is not None:
        block_rows, block_columns = get_block_shape(compute.quantisation)
        # F is the number of rows of gate and of up, and the number of columns of down.
        block = max(block_rows, block_columns)
        if ffn % (block * etp_size):
            raise ValueError(
                f"experts_dtype={compute.quantisation.kind!r} has blocks of {block} of the {ffn} "
                f"hidden units of an expert, and etp_size ({etp_size}) would cut a block of "
                f"{ffn} / {etp_size} = {ffn / etp_size:g}; use an etp_size that divides "
                f"{ffn // block} blocks, or experts_dtype=None"
            )
