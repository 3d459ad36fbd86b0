"""Compute the expert MLP with Triton kernels, without a host sync.

There are two matrix products in forward and four in backward. Each pass launches these kernels of
`kernels/`, in this order (dgated is the backward through down and the gate):

    forward    sort_pairs -> up (gather, gate and up, formula) -> grouped_mm (down) -> combine
    backward   dgated, weight_grads (gradients of the routing weights) -> grouped_mm, combine (of
               the rows) -> outer x 2 (of the matrices), segment_sum x 2 (of the biases)

An adapter of rank P adds `scale * b @ a` to a matrix. The kernels allocate neither a tensor of the
size of b @ a nor a second tensor of the size of the output: `thin_mm` computes
`low_AP = scale * rows @ a^T`, and the kernel that multiplies by the matrix adds `low_AP @ b^T` to
its sums ("+ low b"). Backward does the same with a and b exchanged. Four `outer` products compute
the gradients of a and b. One factor of each of these products is a low_AP, so the products are
thin: one of their sizes is the rank.

    forward    thin_mm -> up + low b        thin_mm -> grouped_mm + low b
    backward   thin_mm -> dgated + low a    thin_mm -> grouped_mm + low a     thin_mm, outer x 4

Quantised matrices are dequantised tile by tile inside the kernels that multiply by them, in forward
and backward (`kernels/dequantise.py`). Nested scales, which are quantised themselves, are
dequantised before the launches. This is cheap, because there is only one scale per 64 values.

The gradient of the rows is computed before the gradients of the weights, because other ranks wait
for the gradient of the rows. A kernel is launched only if its result is needed. All sums are
computed in fp32 in a fixed order, so equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from hf_moe_ep.ops.autograd import make_tensor_without_values
from hf_moe_ep.ops.devices import make_device_current
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import (
    NO_ADAPTER,
    ExpertGrads,
    ExpertWeights,
    LowRank,
    LowRows,
    Routing,
    allocate_grad,
)
from hf_moe_ep.ops.kernels.blocks import Blocks, choose_blocks
from hf_moe_ep.ops.kernels.dequantise import ByteMatrices, Matrices
from hf_moe_ep.ops.kernels.dgated import dgated
from hf_moe_ep.ops.kernels.gate_up import up
from hf_moe_ep.ops.kernels.grouped_mm import grouped_mm, thin_mm
from hf_moe_ep.ops.kernels.outer import outer
from hf_moe_ep.ops.kernels.reduce import combine, segment_sum, weight_grads
from hf_moe_ep.ops.kernels.sort_pairs import max_tiles, sort_pairs
from hf_moe_ep.ops.quantised import BLOCK_SCALE, NESTED_SCALE, dequantise_scales

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreted() -> bool:
    """Return True if Triton interprets its kernels on the CPU (TRITON_INTERPRET=1, the tests)."""
    return bool(triton.knobs.runtime.interpret)


def covers(rows_RH: Tensor) -> bool:
    """Return True if the kernels support the dtype and the device of these rows."""
    return rows_RH.dtype in DTYPES and (rows_RH.is_cuda or interpreted())


@make_device_current
def route(
    expert_ids_RK: Tensor, counts_L: list[int] | None, experts: ExpertWeights, rows_RH: Tensor
) -> Routing:
    """Sort the pairs by expert, in tiles whose size depends on the dtype of `rows_RH`."""
    num_pairs = expert_ids_RK.numel() if counts_L is None else sum(counts_L)
    num_experts = experts.up.shape[0]
    if num_pairs == 0:
        position_RK = expert_ids_RK.new_zeros(expert_ids_RK.shape, dtype=torch.int32)
        offsets = position_RK.new_zeros(num_experts + 1)
        empty = position_RK.new_empty(0)
        # The outputs of an operator must not share memory, so `empty` is cloned.
        return Routing(empty, position_RK, offsets, position_RK.new_empty(0, 2), empty.clone())
    blocks = choose_blocks(rows_RH, num_experts, num_pairs)
    return sort_pairs(expert_ids_RK, num_experts, num_pairs, blocks.m)


def compute_routing_shapes(
    num_pairs: int, num_experts: int, rows_RH: Tensor
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of pair_A, offsets, tiles and row_A, for torch.compile."""
    block_m = choose_blocks(rows_RH, num_experts, num_pairs).m
    num_tiles = max_tiles(num_pairs, num_experts, block_m)
    return (num_pairs,), (num_experts + 1,), (num_tiles, 2), (num_pairs,)


@make_device_current
def forward(
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    formula: ExpertFormula,
    keep_pre: bool,
    *,
    skip_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out_RH and the pre-activations pre_AG (empty unless `keep_pre`).

    With `skip_output` out_RH has no values (`make_tensor_without_values`).
    """
    num_pairs = routing.pair_A.numel()
    without_pre_AG = rows_RH.new_empty(0, experts.up.shape[1])
    if skip_output and (num_pairs == 0 or not keep_pre):
        return make_tensor_without_values(rows_RH), without_pre_AG
    if num_pairs == 0:
        return rows_RH.new_zeros(rows_RH.shape), without_pre_AG
    experts = _prepare_experts(experts)
    blocks = choose_blocks(rows_RH, experts.up.shape[0], num_pairs, experts.quantised)
    rows_RH = _make_rows_contiguous(rows_RH)
    act_AF, pre_AG = _compute_activations(rows_RH, experts, routing, formula, blocks, keep_pre)
    if skip_output:
        return make_tensor_without_values(rows_RH), pre_AG
    low = _compute_low_rows(act_AF, experts.adapter("down"), routing, blocks)
    down_LFH = _select_matrices(experts, "down").transpose(1, 2)
    y_AH = grouped_mm(act_AF, down_LFH, experts.down_bias, routing, blocks, low)
    return combine(y_AH, routing.position_RK, weights_RK.contiguous()), pre_AG


@make_device_current
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
    postpone: bool = False,
) -> tuple[dict[str, Tensor], Callable[[ExpertGrads], None] | None]:
    """Return the gradients named in `need`: "rows", "weights" and names of the experts' tensors.

    If `pre_AG` is None, the pre-activations are computed again. With `postpone` the returned
    function computes the experts' gradients.
    """
    num_pairs = routing.pair_A.numel()
    if num_pairs == 0:
        inputs = {"rows": rows_RH, "weights": weights_RK}
        grads = {name: allocate_grad(x).zero_() for name, x in inputs.items() if name in need}
        finish = partial(_fill_with_zeros, experts, need)
    else:
        experts = _prepare_experts(experts)
        blocks = choose_blocks(rows_RH, experts.up.shape[0], num_pairs, experts.quantised)
        rows_RH = _make_rows_contiguous(rows_RH)
        grad_RH = _make_rows_contiguous(grad_RH)
        weights_RK = weights_RK.contiguous()
        # Each function returns only tensors that later functions read, so all others are freed.
        args = (rows_RH, weights_RK, experts, routing, formula, blocks, need)
        grad_inputs, grads = _back_through_down(grad_RH, pre_AG, *args)
        grad_rows, up_low = _back_to_rows(grad_inputs.grad_pre_AG, experts, routing, blocks, need)
        grads |= grad_rows
        grad_inputs = replace(grad_inputs, up_low=up_low)
        finish = partial(
            _add_expert_grads, grad_RH, grad_inputs, experts, routing, blocks, grad_scale, need
        )
    if postpone:
        return grads, finish
    expert_grads = ExpertGrads()
    finish(expert_grads)
    return grads | expert_grads.take(), None


def _fill_with_zeros(experts: ExpertWeights, need: set[str], grads: ExpertGrads) -> None:
    """Fill new gradients of the experts with zeros, because no row has an expert here."""
    for name, tensor in experts.named_tensors().items():
        if name in need:
            grad, add = grads.buffer(name, tensor)
            if not add:
                grad.zero_()


@dataclass
class _GradInputs:
    """The tensors that `_add_expert_grads` reads, besides the output's gradient."""

    rows_RH: Tensor
    weights_RK: Tensor
    weighted_act_AF: Tensor
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
) -> tuple[_GradInputs, dict[str, Tensor]]:
    """Backpropagate through down and gate, and compute the gradient of the routing weights."""
    if pre_AG is None:
        _, pre_AG = _compute_activations(rows_RH, experts, routing, formula, blocks, keep_pre=True)
    adapter = experts.adapter("down")
    low = _compute_low_rows(grad_RH, adapter and adapter.transposed(), routing, blocks, gather=True)
    grad_pre_AG, weighted_act_AF, partial_CA = dgated(
        grad_RH,
        weights_RK,
        _select_matrices(experts, "down"),
        experts.down_bias,
        pre_AG,
        routing,
        formula,
        blocks,
        low,
        need_act=bool(need & {"down", "down_a", "down_b"}),
        need_weights="weights" in need,
    )
    grad_inputs = _GradInputs(rows_RH, weights_RK, weighted_act_AF, grad_pre_AG, low)
    if "weights" not in need:
        return grad_inputs, {}
    return grad_inputs, {"weights": weight_grads(partial_CA, routing, weights_RK)}


def _back_to_rows(
    grad_pre_AG: Tensor, experts: ExpertWeights, routing: Routing, blocks: Blocks, need: set[str]
) -> tuple[dict[str, Tensor], LowRows]:
    """Return the gradient of the rows, and the first product of up's transposed adapter."""
    low = NO_ADAPTER
    if need & {"rows", "up_a"}:
        adapter = experts.adapter("up")
        low = _compute_low_rows(grad_pre_AG, adapter and adapter.transposed(), routing, blocks)
    if "rows" not in need:
        return {}, low
    matrices = _select_matrices(experts, "up")
    grad_x_AH = grouped_mm(grad_pre_AG, matrices, None, routing, blocks, low, back=True)
    return {"rows": combine(grad_x_AH, routing.position_RK, None)}, low


def _compute_activations(
    rows_RH: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    formula: ExpertFormula,
    blocks: Blocks,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """Return act_AF and pre_AG (empty unless `keep_pre`)."""
    low = _compute_low_rows(rows_RH, experts.adapter("up"), routing, blocks, gather=True)
    matrices, bias = _select_matrices(experts, "up"), experts.up_bias
    return up(rows_RH, matrices, bias, routing, formula, blocks, low, keep_pre=keep_pre)


def _compute_low_rows(
    rows: Tensor,
    adapter: LowRank | None,
    routing: Routing,
    blocks: Blocks,
    *,
    gather: bool = False,
) -> LowRows:
    """Compute the first product of an adapter.

    With `gather`, `rows` are not sorted by expert, and the kernel loads the row of each pair.
    """
    if adapter is None:
        return NO_ADAPTER
    a_LIP = adapter.a_LPI.transpose(1, 2)
    b_LPO = adapter.b_LOP.transpose(1, 2)
    low_AP = thin_mm(rows, a_LIP, routing, blocks, scale=adapter.scale, gather=gather)
    return LowRows(low_AP, b_LPO)


@make_device_current
def _add_expert_grads(
    grad_RH: Tensor,
    grad_inputs: _GradInputs,
    experts: ExpertWeights,
    routing: Routing,
    blocks: Blocks,
    scale: float,
    need: set[str],
    grads: ExpertGrads,
) -> None:
    """Add the needed gradients of the experts' tensors to `grads`."""
    if need <= {"rows", "weights"}:
        return
    order_L = routing.offsets.diff().argsort(descending=True)

    def add(name: str, left: Tensor, right: Tensor | None, **options: bool) -> None:
        """Add left^T right to the gradient `name`, or (left^T right)^T if `name` is a factor a."""
        out_LOI, is_sum = grads.buffer(name, getattr(experts, name))
        out_LOI = out_LOI.transpose(1, 2) if name.endswith("_a") else out_LOI
        assert right is not None
        outer(left, right, out_LOI, routing, order_L, blocks, scale=scale, add=is_sum, **options)

    if "down" in need:
        add("down", grad_RH, grad_inputs.weighted_act_AF, gather_left=True)
    if "up" in need:
        add("up", grad_inputs.grad_pre_AG, grad_inputs.rows_RH, gather_right=True)
    if "down_a" in need:
        add("down_a", grad_inputs.weighted_act_AF, grad_inputs.down_low.low_AP, thin=True)
    if "down_b" in need:
        adapter, act_AF = experts.adapter("down"), grad_inputs.weighted_act_AF
        low = _compute_low_rows(act_AF, adapter, routing, blocks)
        add("down_b", grad_RH, low.low_AP, gather_left=True, thin=True)
    if "up_a" in need:
        add("up_a", grad_inputs.rows_RH, grad_inputs.up_low.low_AP, gather_left=True, thin=True)
    if "up_b" in need:
        adapter, rows_RH = experts.adapter("up"), grad_inputs.rows_RH
        low = _compute_low_rows(rows_RH, adapter, routing, blocks, gather=True)
        add("up_b", grad_inputs.grad_pre_AG, low.low_AP, thin=True)
    biases = {
        "down_bias": (grad_RH, grad_inputs.weights_RK, True),
        "up_bias": (grad_inputs.grad_pre_AG, None, False),
    }
    for name, (rows, weights_RK, gather) in biases.items():
        if name in need:
            grad_LO, is_sum = grads.buffer(name, getattr(experts, name))
            out_LO = torch.empty_like(grad_LO) if is_sum else grad_LO
            segment_sum(rows, weights_RK, routing, out_LO, scale=scale, gather=gather)
            if is_sum:
                grad_LO += out_LO


def _make_rows_contiguous(x_RH: Tensor) -> Tensor:
    return x_RH if x_RH.stride(1) == 1 else x_RH.contiguous()


def _prepare_experts(experts: ExpertWeights) -> ExpertWeights:
    """Make bias rows and quantised bytes contiguous, and dequantise nested scales to fp32."""
    prepared: dict[str, Any] = {}
    for name in ("up_bias", "down_bias"):
        bias_LO = getattr(experts, name)
        if bias_LO is not None:
            prepared[name] = _make_rows_contiguous(bias_LO)
    if experts.quantised:
        for name in ("up", "down"):
            stack = experts.stack(name)
            prepared[name] = stack.values.contiguous()
            prepared[name + BLOCK_SCALE] = dequantise_scales(stack)
            prepared[name + NESTED_SCALE] = None
    return replace(experts, **prepared) if prepared else experts


def _select_matrices(experts: ExpertWeights, name: str) -> Matrices:
    """Return the matrices `name`, "up" or "down", as an argument of the kernels' launchers."""
    values: Tensor = getattr(experts, name)
    if not experts.quantised:
        return values
    return ByteMatrices(values, getattr(experts, name + BLOCK_SCALE), experts.quantised)
