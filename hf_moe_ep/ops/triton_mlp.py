"""The expert MLP as Triton kernels: two of matrix products forward, four backward, no host sync.

    forward    sort_pairs -> up (gather, two products, gate) -> grouped_mm (down) -> combine
    backward   dgated (back through down and gate) -> grouped_mm, combine (rows) -> outer x 2

An adapter, `scale * b @ a` beside a matrix, makes neither that product nor a tensor of the output's
size: with P its rank, `low_AP = scale * rows @ a^T` comes from one thin product, and the kernel of
the matrix goes on summing, over `low_AP` and b. Backward likewise, with a and b exchanged; the
gradients of a and b are thin `outer` products with one low_AP each:

    forward    thin_mm -> up + low b        thin_mm -> grouped_mm + low b
    backward   thin_mm -> dgated + low a    thin_mm -> grouped_mm + low a     thin_mm, outer x 4

Matrices that are held as bytes are dequantised by the kernels that multiply with them, tile by
tile, forward and backward (`kernels/dequantise.py`); only nested scales, one for 64 values, are
dequantised before.

The rows' gradient is computed before the weights': behind a dispatch, others wait for it. Parts
that nobody needs are not launched. Everything is summed in fp32 in a fixed order, so equal inputs
give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from hf_moe_ep.ops.devices import on_its_device
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import (
    NO_ADAPTER,
    ExpertGrads,
    ExpertWeights,
    LowRank,
    LowRows,
    Routing,
    WeightGrads,
    empty_grad,
)
from hf_moe_ep.ops.kernels.blocks import Blocks, choose_blocks
from hf_moe_ep.ops.kernels.dequantise import ByteMatrices, Matrices
from hf_moe_ep.ops.kernels.dgated import dgated
from hf_moe_ep.ops.kernels.grouped_mm import grouped_mm, thin_mm
from hf_moe_ep.ops.kernels.outer import outer
from hf_moe_ep.ops.kernels.reduce import combine, segment_sum, weight_grads
from hf_moe_ep.ops.kernels.sort_pairs import max_tiles, sort_pairs
from hf_moe_ep.ops.kernels.up import up
from hf_moe_ep.ops.quantised import BLOCK_SCALE, NESTED_SCALE, plain_scales

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1), as the tests do."""
    return bool(triton.knobs.runtime.interpret)


def covers(rows_RH: Tensor) -> bool:
    """Whether the kernels can take rows of this dtype on this device."""
    return rows_RH.dtype in DTYPES and (rows_RH.is_cuda or interpreted())


@on_its_device
def route(
    expert_ids_RK: Tensor, counts_L: list[int] | None, experts: ExpertWeights, rows_RH: Tensor
) -> Routing:
    """Pairs sorted by expert, in tiles for rows of the dtype of `rows_RH`; see `sort_pairs`."""
    num_pairs = expert_ids_RK.numel() if counts_L is None else sum(counts_L)
    num_experts = experts.up.shape[0]
    if num_pairs == 0:
        slots_RK = expert_ids_RK.new_zeros(expert_ids_RK.shape, dtype=torch.int32)
        offsets = slots_RK.new_zeros(num_experts + 1)
        nothing = slots_RK.new_empty(0)
        return Routing(nothing, slots_RK, offsets, slots_RK.new_empty(0, 2), nothing.clone())
    blocks = choose_blocks(rows_RH, num_experts, num_pairs)
    return sort_pairs(expert_ids_RK, num_experts, num_pairs, blocks.m)


def routing_shapes(
    num_pairs: int, num_experts: int, rows_RH: Tensor
) -> tuple[tuple[int, ...], ...]:
    """Shapes of pair_A, offsets, tiles and row_A, for torch.compile."""
    block_m = choose_blocks(rows_RH, num_experts, num_pairs).m
    num_tiles = max_tiles(num_pairs, num_experts, block_m)
    return (num_pairs,), (num_experts + 1,), (num_tiles, 2), (num_pairs,)


@on_its_device
def forward(
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    formula: ExpertFormula,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """out_RH, and pre_AG, empty unless kept."""
    num_pairs = routing.pair_A.numel()
    if num_pairs == 0:
        pre_shape = (0, experts.up.shape[1])
        return rows_RH.new_zeros(rows_RH.shape), rows_RH.new_empty(pre_shape)
    experts = _as_kernels_read_them(experts)
    blocks = choose_blocks(rows_RH, experts.up.shape[0], num_pairs, experts.quantised)
    rows_RH = _with_contiguous_rows(rows_RH)
    act_AF, pre_AG = _activations(rows_RH, experts, routing, formula, blocks, keep_pre)
    low = _low_rows(act_AF, experts.down_adapter, routing, blocks)
    down_LFH = _down_matrices(experts).transpose(1, 2)
    y_AH = grouped_mm(act_AF, down_LFH, experts.down_bias, routing, blocks, low)
    return combine(y_AH, routing.slots_RK, weights_RK.contiguous()), pre_AG


@on_its_device
def backward(
    grad_RH: Tensor,
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    pre_AG: Tensor | None,
    formula: ExpertFormula,
    *,
    grad_scale: float,
    need: set[str],
    later: bool = False,
) -> tuple[WeightGrads, Callable[[ExpertGrads], None] | None]:
    """Gradients of rows, weights and the experts' tensors; None where not in `need`.

    `pre_AG` None computes the pre-activations again. With `later` the gradients of the experts are
    left to the function that is returned.
    """
    num_pairs = routing.pair_A.numel()
    if num_pairs == 0:
        return _grads_of_no_pairs(rows_RH, weights_RK, experts, need, later=later)
    experts = _as_kernels_read_them(experts)
    blocks = choose_blocks(rows_RH, experts.up.shape[0], num_pairs, experts.quantised)
    rows_RH = _with_contiguous_rows(rows_RH)
    grad_RH = _with_contiguous_rows(grad_RH)
    weights_RK = weights_RK.contiguous()
    # Each step leaves behind what the next ones read, and nothing else.
    args = (rows_RH, weights_RK, experts, routing, formula, blocks, need)
    step, grad_weights_RK = _back_through_down(grad_RH, pre_AG, *args)
    grad_rows_RH, up_low = _back_to_rows(step.grad_pre_AG, experts, routing, blocks, need)
    finish = partial(
        _add_expert_grads, grad_RH, replace(step, up_low=up_low), experts, routing, blocks,
        grad_scale, need,
    )  # fmt: skip
    grads = WeightGrads(grad_rows_RH, grad_weights_RK)
    if later:
        return grads, finish
    found = ExpertGrads()
    finish(found)
    return replace(grads, **found.take()), None


def _grads_of_no_pairs(
    rows_RH: Tensor, weights_RK: Tensor, experts: ExpertWeights, need: set[str], *, later: bool
) -> tuple[WeightGrads, Callable[[ExpertGrads], None] | None]:
    """What `backward` returns where no row has an expert here: zeros."""
    inputs = {"rows": rows_RH, "weights": weights_RK}
    zeros = {name: empty_grad(x).zero_() for name, x in inputs.items() if name in need}

    def finish(grads: ExpertGrads) -> None:
        for name, tensor in experts.named_tensors().items():
            if name in need:
                grad, add = grads.place(name, tensor)
                if not add:
                    grad.zero_()

    if later:
        return WeightGrads(**zeros), finish
    found = ExpertGrads()
    finish(found)
    return WeightGrads(**zeros, **found.take()), None


@dataclass(frozen=True)
class _Step:
    """What the gradients of the experts are made of, besides the gradient of the output.

    `act_AF` carries the routing weights.
    """

    rows_RH: Tensor
    weights_RK: Tensor
    act_AF: Tensor
    grad_pre_AG: Tensor
    down_low: LowRows
    up_low: LowRows = NO_ADAPTER


def _back_through_down(
    grad_RH: Tensor,
    pre_AG: Tensor | None,
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    formula: ExpertFormula,
    blocks: Blocks,
    need: set[str],
) -> tuple[_Step, Tensor | None]:
    """The step back through down and gate, and the gradient of the routing weights."""
    if pre_AG is None:
        _, pre_AG = _activations(rows_RH, experts, routing, formula, blocks, keep_pre=True)
    adapter = experts.down_adapter and experts.down_adapter.transposed()
    low = _low_rows(grad_RH, adapter, routing, blocks, gather=True)
    grad_pre_AG, act_AF, partial_CA = dgated(
        grad_RH,
        weights_RK,
        _down_matrices(experts),
        experts.down_bias,
        pre_AG,
        routing,
        formula,
        blocks,
        low,
        need_act=bool(need & {"down", "down_a", "down_b"}),
        need_weights="weights" in need,
    )
    step = _Step(rows_RH, weights_RK, act_AF, grad_pre_AG, low)
    if "weights" not in need:
        return step, None
    return step, weight_grads(partial_CA, routing, weights_RK)


def _back_to_rows(
    grad_pre_AG: Tensor, experts: ExpertWeights, routing: Routing, blocks: Blocks, need: set[str]
) -> tuple[Tensor | None, LowRows]:
    """The gradient of the rows, and the first product of up's adapter on the way back."""
    low = NO_ADAPTER
    if need & {"rows", "up_a"}:
        adapter = experts.up_adapter and experts.up_adapter.transposed()
        low = _low_rows(grad_pre_AG, adapter, routing, blocks)
    if "rows" not in need:
        return None, low
    grad_x_AH = grouped_mm(
        grad_pre_AG, _up_matrices(experts), None, routing, blocks, low, back=True
    )
    return combine(grad_x_AH, routing.slots_RK, None), low


def _activations(
    rows_RH: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    formula: ExpertFormula,
    blocks: Blocks,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """act_AF and pre_AG; the latter is empty unless kept."""
    low = _low_rows(rows_RH, experts.up_adapter, routing, blocks, gather=True)
    return up(
        rows_RH,
        _up_matrices(experts),
        experts.up_bias,
        routing,
        formula,
        blocks,
        low,
        keep_pre=keep_pre,
    )


def _low_rows(
    rows: Tensor,
    adapter: LowRank | None,
    routing: Routing,
    blocks: Blocks,
    *,
    gather: bool = False,
) -> LowRows:
    """The first product of an adapter, with the factor of the second."""
    if adapter is None:
        return NO_ADAPTER
    a_LIP = adapter.a_LPI.transpose(1, 2)
    b_LPO = adapter.b_LOP.transpose(1, 2)
    low_AP = thin_mm(rows, a_LIP, routing, blocks, scale=adapter.scale, gather=gather)
    return LowRows(low_AP, b_LPO)


@on_its_device
def _add_expert_grads(
    grad_RH: Tensor,
    step: _Step,
    experts: ExpertWeights,
    routing: Routing,
    blocks: Blocks,
    scale: float,
    need: set[str],
    grads: ExpertGrads,
) -> None:
    """Put the gradients of the experts' tensors into `grads`, last: nothing waits for them."""
    if need & {"down", "up", "down_a", "down_b", "up_a", "up_b"}:
        order_L = routing.offsets.diff().argsort(descending=True)
        product = partial(outer, routing=routing, order_L=order_L, blocks=blocks, scale=scale)
        _add_matrix_grads(grad_RH, step, experts, product, need, grads)
        low_rows = partial(_low_rows, routing=routing, blocks=blocks)
        _add_adapter_grads(grad_RH, step, experts, product, low_rows, need, grads)
    if "down_bias" in need:
        assert experts.down_bias is not None
        fill = partial(segment_sum, grad_RH, step.weights_RK, gather=True)
        fill = partial(fill, routing=routing, scale=scale)
        _add_bias_grad("down_bias", experts.down_bias, fill, grads)
    if "up_bias" in need:
        assert experts.up_bias is not None
        fill = partial(segment_sum, step.grad_pre_AG, None, gather=False)
        fill = partial(fill, routing=routing, scale=scale)
        _add_bias_grad("up_bias", experts.up_bias, fill, grads)


def _add_matrix_grads(
    grad_RH: Tensor,
    step: _Step,
    experts: ExpertWeights,
    product: Callable[..., None],
    need: set[str],
    grads: ExpertGrads,
) -> None:
    """Add the gradients of both matrices."""
    if "down" in need:
        out, add = grads.place("down", experts.down)
        product(grad_RH, step.act_AF, out, gather_left=True, add=add)
    if "up" in need:
        out, add = grads.place("up", experts.up)
        product(step.grad_pre_AG, step.rows_RH, out, gather_right=True, add=add)


def _add_adapter_grads(
    grad_RH: Tensor,
    step: _Step,
    experts: ExpertWeights,
    product: Callable[..., None],
    low_rows: Callable[..., LowRows],
    need: set[str],
    grads: ExpertGrads,
) -> None:
    """Add the gradients of both adapters: `low^T x`, transposed, of a; `grad^T low` of b."""
    down = experts.down_adapter
    up = experts.up_adapter
    if down is not None and "down_a" in need:
        out, add = grads.place("down_a", down.a_LPI)
        into_LFP = out.transpose(1, 2)
        product(step.act_AF, step.down_low.low_AP, into_LFP, thin=True, add=add)
    if down is not None and "down_b" in need:
        low_AP = low_rows(step.act_AF, down).low_AP
        out, add = grads.place("down_b", down.b_LOP)
        product(grad_RH, low_AP, out, gather_left=True, thin=True, add=add)
    if up is not None and "up_a" in need:
        out, add = grads.place("up_a", up.a_LPI)
        into_LHP = out.transpose(1, 2)
        product(step.rows_RH, step.up_low.low_AP, into_LHP, gather_left=True, thin=True, add=add)
    if up is not None and "up_b" in need:
        low_AP = low_rows(step.rows_RH, up, gather=True).low_AP
        out, add = grads.place("up_b", up.b_LOP)
        product(step.grad_pre_AG, low_AP, out, thin=True, add=add)


def _add_bias_grad(
    name: str, bias_LO: Tensor, fill: Callable[..., None], grads: ExpertGrads
) -> None:
    """Fill the gradient of a bias, or add to it what `fill` computes."""
    out_LO, add = grads.place(name, bias_LO)
    share_LO = torch.empty_like(out_LO) if add else out_LO
    fill(out_LO=share_LO)
    if add:
        out_LO += share_LO


def _with_contiguous_rows(x_RH: Tensor) -> Tensor:
    return x_RH if x_RH.stride(1) == 1 else x_RH.contiguous()


def _as_kernels_read_them(experts: ExpertWeights) -> ExpertWeights:
    """The same with contiguous rows of biases; bytes contiguous, their scales in fp32."""
    made: dict[str, Any] = {}
    for name in ("up_bias", "down_bias"):
        bias_LO = getattr(experts, name)
        made[name] = None if bias_LO is None else _with_contiguous_rows(bias_LO)
    if experts.quantised:
        for name in ("up", "down"):
            stack = experts.stack(name)
            made |= {name: stack.values.contiguous(), name + BLOCK_SCALE: plain_scales(stack)}
            made[name + NESTED_SCALE] = None
    return replace(experts, **made)


def _up_matrices(experts: ExpertWeights) -> Matrices:
    return _matrices(experts.up, experts.up_block_scale, experts.quantised)


def _down_matrices(experts: ExpertWeights) -> Matrices:
    return _matrices(experts.down, experts.down_block_scale, experts.quantised)


def _matrices(values: Tensor, scale: Tensor | None, kind: str) -> Matrices:
    return values if scale is None else ByteMatrices(values, scale, kind)
