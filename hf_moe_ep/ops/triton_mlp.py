"""The expert MLP as Triton kernels: three of matrix products forward, four backward, no host sync.

    forward    sort_pairs -> up (gather, two products, gate) -> grouped_mm (down) -> combine
    backward   dgated (back through down and gate) -> grouped_mm, combine (rows) -> outer x 2

The rows' gradient is computed before the weights': behind a dispatch, others wait for it. Parts
that nobody needs are not launched. Everything is summed in fp32 in a fixed order, so equal inputs
give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from hf_moe_ep.ops.blocks import Blocks, choose_blocks
from hf_moe_ep.ops.dgated import dgated
from hf_moe_ep.ops.grouped_mm import grouped_mm
from hf_moe_ep.ops.layout import ExpertsLayout
from hf_moe_ep.ops.outer import outer
from hf_moe_ep.ops.reduce import combine, segment_sum, weight_grads
from hf_moe_ep.ops.sort_pairs import max_tiles, sort_pairs
from hf_moe_ep.ops.up import up
from hf_moe_ep.ops.weights import ExpertWeights, Routing, WeightGrads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1), as the tests do."""
    return bool(triton.knobs.runtime.interpret)


def covers(rows_RH: Tensor) -> bool:
    """Whether the kernels can take rows of this dtype on this device."""
    return rows_RH.dtype in DTYPES and (rows_RH.is_cuda or interpreted())


def route(expert_ids_RK: Tensor, counts_L: list[int] | None, experts: ExpertWeights) -> Routing:
    """Pairs sorted by expert; see `sort_pairs`."""
    num_pairs = expert_ids_RK.numel() if counts_L is None else sum(counts_L)
    num_experts = experts.up.shape[0]
    if num_pairs == 0:
        slots_RK = torch.zeros_like(expert_ids_RK, dtype=torch.int32)
        offsets = slots_RK.new_zeros(num_experts + 1)
        return Routing(slots_RK.new_empty(0), slots_RK, offsets, slots_RK.new_empty(0, 2))
    blocks = choose_blocks(experts.up, num_pairs)
    return sort_pairs(expert_ids_RK, num_experts, num_pairs, blocks.m)


def routing_shapes(num_pairs: int, up_LGH: Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes of pair_A, offsets and tiles, for torch.compile."""
    num_experts = up_LGH.shape[0]
    num_tiles = max_tiles(num_pairs, num_experts, choose_blocks(up_LGH, num_pairs).m)
    return (num_pairs,), (num_experts + 1,), (num_tiles, 2)


def forward(
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    layout: ExpertsLayout,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """out_RH, and pre_AG, empty unless kept."""
    num_pairs, experts = routing.pair_A.numel(), _with_contiguous_biases(experts)
    if num_pairs == 0:
        pre_shape = (0, experts.up.shape[1])
        return torch.zeros_like(rows_RH), rows_RH.new_empty(pre_shape)
    blocks = choose_blocks(experts.up, num_pairs)
    act_AF, pre_AG = up(
        _with_contiguous_rows(rows_RH),
        weights_RK.shape[1],
        experts.up,
        experts.up_bias,
        routing,
        layout,
        blocks,
        keep_pre=keep_pre,
    )
    y_AH = grouped_mm(act_AF, experts.down.transpose(1, 2), experts.down_bias, routing, blocks)
    return combine(y_AH, routing.slots_RK, weights_RK.contiguous()), pre_AG


def backward(
    grad_RH: Tensor,
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    pre_AG: Tensor | None,
    layout: ExpertsLayout,
    *,
    grad_scale: float,
    needs: list[bool],
    later: bool = False,
) -> tuple[WeightGrads, Callable[[], WeightGrads] | None]:
    """Gradients of rows, weights, up, up_bias, down, down_bias; None where not in `needs`.

    `pre_AG` None computes the pre-activations again. With `later` the gradients of the experts are
    left to the function that is returned.
    """
    assert experts.up_a is None and experts.down_a is None, "adapters are the torch path's"
    experts = _with_contiguous_biases(experts)
    inputs = (rows_RH, weights_RK, experts.up, experts.up_bias, experts.down, experts.down_bias)
    needs = needs[: len(inputs)]
    num_pairs, top_k = routing.pair_A.numel(), weights_RK.shape[1]
    if num_pairs == 0:
        zeros = [None if x is None else torch.zeros_like(x) for x in inputs]
        grads = WeightGrads(*(x if need else None for x, need in zip(zeros, needs, strict=True)))
        return grads, (lambda: grads) if later else None
    need_rows, need_weights, *_, need_down, _ = needs
    blocks = choose_blocks(experts.up, num_pairs)
    rows_RH, grad_RH = _with_contiguous_rows(rows_RH), _with_contiguous_rows(grad_RH)
    weights_RK = weights_RK.contiguous()
    if pre_AG is None:
        w, b = experts.up, experts.up_bias
        _, pre_AG = up(rows_RH, top_k, w, b, routing, layout, blocks, keep_pre=True)
    grad_pre_AG, act_AF, partial_CA = dgated(
        grad_RH,
        weights_RK,
        experts.down,
        experts.down_bias,
        pre_AG,
        routing,
        layout,
        blocks,
        need_act=need_down,
        need_weights=need_weights,
    )
    grads = WeightGrads()
    if need_weights:
        grads.weights = weight_grads(partial_CA, routing, weights_RK)
    if need_rows:
        grad_x_AH = grouped_mm(grad_pre_AG, experts.up, None, routing, blocks)
        grads.rows = combine(grad_x_AH, routing.slots_RK, None)
    sources = (rows_RH, weights_RK, grad_RH, act_AF, grad_pre_AG)
    finish = partial(_expert_grads, sources, experts, routing, blocks, grad_scale, needs)
    return (grads, finish) if later else (finish(grads), None)


def _expert_grads(
    sources: tuple[Tensor, ...],
    experts: ExpertWeights,
    routing: Routing,
    blocks: Blocks,
    scale: float,
    needs: list[bool],
    grads: WeightGrads | None = None,
) -> WeightGrads:
    """The weights' and biases' gradients, added to `grads`: nothing waits for them, so they come
    last.
    """
    grads = grads or WeightGrads()
    rows_RH, weights_RK, grad_RH, act_AF, grad_pre_AG = sources
    _, _, need_up, need_up_bias, need_down, need_down_bias = needs
    top_k = weights_RK.shape[1]
    if need_down or need_up:
        order_L = routing.offsets.diff().argsort(descending=True)
    if need_down:
        out = torch.empty_like(experts.down)
        args = (grad_RH, act_AF, out, routing, order_L, top_k, blocks)
        grads.down = outer(*args, scale=scale, gather_left=True)
    if need_up:
        out = torch.empty_like(experts.up)
        args = (grad_pre_AG, rows_RH, out, routing, order_L, top_k, blocks)
        grads.up = outer(*args, scale=scale, gather_right=True)
    if need_down_bias:
        assert experts.down_bias is not None
        grads.down_bias = segment_sum(
            grad_RH, experts.down_bias, routing, top_k, weights_RK, scale=scale, gather=True
        )
    if need_up_bias:
        assert experts.up_bias is not None
        grads.up_bias = segment_sum(
            grad_pre_AG, experts.up_bias, routing, top_k, None, scale=scale, gather=False
        )
    return grads


def _with_contiguous_rows(x_RH: Tensor) -> Tensor:
    return x_RH if x_RH.stride(1) == 1 else x_RH.contiguous()


def _with_contiguous_biases(experts: ExpertWeights) -> ExpertWeights:
    up_bias, down_bias = (
        None if bias is None else _with_contiguous_rows(bias)
        for bias in (experts.up_bias, experts.down_bias)
    )
    return replace(experts, up_bias=up_bias, down_bias=down_bias)
