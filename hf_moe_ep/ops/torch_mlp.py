"""Compute the expert MLP in plain torch, with one matrix product per expert over consecutive pairs.

This path serves CPUs, fp64 and everything else that the Triton kernels do not cover. The routing
weights multiply the input of the down projection (F columns instead of H), and the product is
rounded once. The host has to know the number of pairs of each expert. If the dispatch does not pass
these numbers, the host reads them from the device, which is the only host sync of this path.

On a CPU the experts are processed in blocks of about `_BLOCK` pairs, so that the tensors between
the matrix products stay in the cache and their memory is reused. In forward and in backward, a
quantised matrix is dequantised for one product and then freed. In the names of dimensions, M are
the pairs of a block, and A are all pairs.

On a GPU this path does not call `F.grouped_mm`, which multiplies the rows of all experts in one
kernel. That function refuses fp64, a bias, and rows whose bytes are no multiple of 16; in fp32 and
fp16 it makes one product per expert itself; it needs the matrices of all experts at once, so
quantised matrices could not be freed one by one; and it cannot add to a gradient. The bf16 experts
that it could compute are those whose gate or norm the Triton kernels lack, and those of a GPU
without Triton. Its kernel exists on GPUs only, and was not compared with this loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_moe_ep.ops.autograd import make_tensor_without_values
from hf_moe_ep.ops.formula import ExpertFormula, activate, activate_backward
from hf_moe_ep.ops.interface import ExpertGrads, ExpertWeights, GradBuffer, Routing
from hf_moe_ep.ops.permute import count_pairs, invert_index

# The smallest number of pairs in a block on a CPU, except for the last block.
# Measured on one core: a single block of all pairs takes 1.2 to 1.3 times as long (4096 tokens),
# and one block per expert takes 1.2 to 1.5 times as long (64 or 512 tokens, 128 experts).
_BLOCK = 2048


def route(
    expert_ids_RK: Tensor, counts_L: list[int] | None, experts: ExpertWeights, rows_RH: Tensor
) -> Routing:
    """Sort the pairs that have an expert here by expert. This path does not use `rows_RH`."""
    if counts_L is None:
        counts_L = count_pairs(expert_ids_RK, experts.up.shape[0]).tolist()
    num_rows, top_k = expert_ids_RK.shape
    order = expert_ids_RK.flatten().argsort(stable=True)[: sum(counts_L)]
    pair_A = order.to(torch.int32)
    position_RK = invert_index(order // top_k, order % top_k, (num_rows, top_k)).to(torch.int32)
    offsets = torch.tensor([0, *counts_L], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    unused = offsets.new_empty(0), offsets.new_empty(0)
    return Routing(pair_A, position_RK, offsets, *unused)


def compute_routing_shapes(
    num_pairs: int, num_experts: int, rows_RH: Tensor
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of pair_A, offsets, tiles and row_A, for torch.compile."""
    return (num_pairs,), (num_experts + 1,), (0,), (0,)


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
    """Return out_RH and the pre-activations pre_AG (with 0 rows unless `keep_pre`).

    With `skip_output` out_RH has no values (`make_tensor_without_values`).
    """
    pre_AG = rows_RH.new_empty(len(routing.pair_A) if keep_pre else 0, experts.up.shape[1])
    out_RH = make_tensor_without_values(rows_RH) if skip_output else _allocate_sums(rows_RH)
    if skip_output and not keep_pre:
        return out_RH, pre_AG
    for block in _split_into_blocks(routing, weights_RK):
        pre_MG = _compute_pre_activations(
            rows_RH, experts, block, pre_AG[block.pairs] if keep_pre else None
        )
        if skip_output:
            continue
        act_MF = _apply_weights(activate(pre_MG, formula), block.weight_M)
        y_MH = _multiply(act_MF, experts, "down", block)
        if experts.down_bias is not None:
            for expert, (y, weight) in block.split(y_MH, block.weight_M.to(y_MH)):
                y.addcmul_(weight.unsqueeze(1), experts.down_bias[expert])
        _add_to_rows(y_MH, out_RH, block)
    return out_RH.to(rows_RH.dtype), pre_AG


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
    function computes the experts' gradients. Until that function is called, it keeps three vectors
    of each pair alive: the gradients of the output and of the pre-activations, and the activation.
    """
    # Rows in fp64 have fp32 weights if the router computes in fp32.
    wide_dtype = torch.promote_types(weights_RK.dtype, rows_RH.dtype)
    grad_weights = weights_RK.new_zeros(weights_RK.numel()) if "weights" in need else None
    grad_rows_RH = _allocate_sums(rows_RH) if "rows" in need else None
    expert_grads = ExpertGrads()
    buffers = {} if postpone else _prepare_buffers(expert_grads, experts, routing, need)
    add = partial(_add_expert_grads, rows_RH=rows_RH, experts=experts, scale=grad_scale)
    postponed: list[_BlockGrads] = []
    for block in _split_into_blocks(routing, weights_RK):
        if pre_AG is None:
            pre_MG = _compute_pre_activations(rows_RH, experts, block)
        else:
            pre_MG = pre_AG[block.pairs]
        grad_MH = grad_RH.index_select(0, block.row_M)
        grad_act_MF = _multiply(grad_MH, experts, "down", block, back=True)
        scaled_MF = _apply_weights(grad_act_MF, block.weight_M)
        act_MF, grad_pre_MG = activate_backward(pre_MG, scaled_MF, formula)
        if grad_weights is not None:
            # vecdot would round to autocast's dtype if backward runs under autocast.
            grad_M = (grad_act_MF.to(wide_dtype) * act_MF.to(wide_dtype)).sum(1)
            if experts.down_bias is not None:
                for expert, (grad, upstream) in block.split(grad_M, grad_MH):
                    grad += upstream.to(wide_dtype) @ experts.down_bias[expert].to(wide_dtype)
            grad_weights.index_copy_(0, block.pair_M, grad_M.to(grad_weights.dtype))
        if grad_rows_RH is not None:
            grad_x_MH = _multiply(grad_pre_MG, experts, "up", block, back=True)
            _add_to_rows(grad_x_MH, grad_rows_RH, block)
        block_grads = _BlockGrads(block, grad_MH, act_MF, grad_pre_MG)
        if postpone:
            postponed.append(block_grads)
        else:
            add(block_grads, buffers)
    grads = expert_grads.take()
    if grad_rows_RH is not None:
        grads["rows"] = grad_rows_RH.to(rows_RH.dtype)
    if grad_weights is not None:
        grads["weights"] = grad_weights.view(weights_RK.shape)

    def finish(sums: ExpertGrads) -> None:
        buffers = _prepare_buffers(sums, experts, routing, need)
        for block_grads in postponed:
            add(block_grads, buffers)

    return grads, finish if postpone else None


def _prepare_buffers(
    grads: ExpertGrads, experts: ExpertWeights, routing: Routing, need: set[str]
) -> dict[str, GradBuffer]:
    """Return the buffers of the needed gradients, filled with zeros for experts without pairs."""
    needed = {name: x for name, x in experts.named_tensors().items() if name in need}
    buffers = {name: grads.buffer(name, tensor) for name, tensor in needed.items()}
    for expert, (start, end) in enumerate(itertools.pairwise(routing.offsets.tolist())):
        for buffer in buffers.values():
            if start == end and not buffer.add:
                buffer.grad[expert].zero_()
    return buffers


def _add_expert_grads(
    grads: _BlockGrads,
    buffers: dict[str, GradBuffer],
    *,
    rows_RH: Tensor,
    experts: ExpertWeights,
    scale: float,
) -> None:
    """Add `scale` times the experts' gradients of one block to the buffers, or store them there."""
    block = grads.block
    grad_MH = grads.grad_MH
    if "down_bias" in buffers:
        _sum_pairs(_apply_weights(grad_MH, block.weight_M), buffers["down_bias"], block, scale)
    if "up_bias" in buffers:
        _sum_pairs(grads.grad_pre_MG, buffers["up_bias"], block, scale)
    if buffers.keys() & {"down", "down_a", "down_b"}:
        act_MF = _apply_weights(grads.act_MF, block.weight_M)
        _add_matrix_grads(act_MF, grad_MH, experts, "down", buffers, block, scale)
    if buffers.keys() & {"up", "up_a", "up_b"}:
        x_MH = rows_RH.index_select(0, block.row_M)
        _add_matrix_grads(x_MH, grads.grad_pre_MG, experts, "up", buffers, block, scale)


@dataclass(frozen=True)
class Block:
    """A block of consecutive pairs: all pairs of one or more neighbouring experts.

    `experts` lists the experts of the block that have pairs, and `sizes` has the number of pairs of
    each listed expert. `pairs` is the slice of the block in the sorted pairs.
    """

    pairs: slice
    experts: list[int]
    sizes: list[int]
    pair_M: Tensor
    row_M: Tensor
    weight_M: Tensor

    def split(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield each expert with the part of every tensor that belongs to its pairs."""
        parts = zip(*(tensor.split(self.sizes) for tensor in tensors), strict=True)
        return zip(self.experts, parts, strict=True)


@dataclass(frozen=True)
class _BlockGrads:
    """The tensors from which the gradients of a block's experts are computed."""

    block: Block
    grad_MH: Tensor
    act_MF: Tensor
    grad_pre_MG: Tensor


def _split_into_blocks(routing: Routing, weights_RK: Tensor) -> Iterator[Block]:
    # On a GPU smaller blocks would not save time, so all pairs are one block.
    on_cpu = routing.pair_A.device.type == "cpu"
    min_pairs = _BLOCK if on_cpu else len(routing.pair_A)
    pair_A = routing.pair_A.long()
    weights = weights_RK.flatten()
    ends = routing.offsets.tolist()
    experts: list[int] = []
    first = 0
    for expert, end in enumerate(ends[1:]):
        if end > ends[expert]:
            experts.append(expert)
        if experts and (end - first >= min_pairs or end == ends[-1]):
            pair_M = pair_A[first:end]
            row_M = pair_M // weights_RK.shape[1]
            weight_M = weights.index_select(0, pair_M)
            sizes = [ends[i + 1] - ends[i] for i in experts]
            yield Block(slice(first, end), experts, sizes, pair_M, row_M, weight_M)
            experts = []
            first = end


def _compute_pre_activations(
    rows_RH: Tensor, experts: ExpertWeights, block: Block, out_MG: Tensor | None = None
) -> Tensor:
    x_MH = rows_RH.index_select(0, block.row_M)
    return _multiply(x_MH, experts, "up", block, bias_LO=experts.up_bias, out_MO=out_MG)


def _multiply(
    rows_MI: Tensor,
    experts: ExpertWeights,
    name: str,
    block: Block,
    *,
    back: bool = False,
    bias_LO: Tensor | None = None,
    out_MO: Tensor | None = None,
) -> Tensor:
    """Multiply each pair's row by the matrix `name` of the pair's expert, with the adapter.

    With `back` the rows are gradients and the matrix is transposed.
    """
    adapter = experts.adapter(name)
    if adapter is not None and back:
        adapter = adapter.transposed()
    if out_MO is None:
        size_out, size_in = experts.matrix_shape(name)
        out_MO = rows_MI.new_empty(len(rows_MI), size_in if back else size_out)
    for expert, (rows, out) in block.split(rows_MI, out_MO):
        matrix = experts.matrix(name, expert, rows_MI.dtype)
        right = matrix if back else matrix.t()
        if bias_LO is None:
            torch.mm(rows, right, out=out)
        else:
            torch.addmm(bias_LO[expert], rows, right, out=out)
        del matrix, right  # A dequantised matrix is large, so only one exists at a time.
        if adapter is not None:
            low_MP = rows @ adapter.a_LPI[expert].t()
            out.addmm_(low_MP, adapter.b_LOP[expert].t(), alpha=adapter.scale)
    return out_MO


def _allocate_sums(rows_RH: Tensor) -> Tensor:
    wide_dtype = torch.promote_types(rows_RH.dtype, torch.float32)
    return rows_RH.new_zeros(rows_RH.shape, dtype=wide_dtype)


def _add_to_rows(y_MH: Tensor, sum_RH: Tensor, block: Block) -> None:
    """Add the vector of each pair to the row of the pair, in the order of the pairs."""
    if not y_MH.is_cuda:
        sum_RH.index_add_(0, block.row_M, y_MH.to(sum_RH.dtype))
        return
    # On a GPU index_add_ adds atomically and in any order. A row occurs at most once among the
    # pairs of one expert, so with one call per expert the order of each sum is fixed.
    for _, (y, row) in block.split(y_MH, block.row_M):
        sum_RH.index_add_(0, row, y.to(sum_RH.dtype))


def _add_matrix_grads(
    x_MI: Tensor,
    grad_MO: Tensor,
    experts: ExpertWeights,
    name: str,
    buffers: dict[str, GradBuffer],
    block: Block,
    scale: float,
) -> None:
    """Compute the needed gradients of the matrices `name` and of the two factors of their adapter.

    `x_MI` is the input of the matrix product, and `grad_MO` the gradient of its output.
    """
    adapter = experts.adapter(name)
    matrix, a, b = (buffers.get(name + suffix) for suffix in ("", "_a", "_b"))
    for expert, (x, grad) in block.split(x_MI, grad_MO):
        if matrix is not None:
            _add_product(grad, x, matrix, expert, scale)
        if adapter is not None and a is not None:
            low = grad @ adapter.b_LOP[expert]
            _add_product(low, x, a, expert, scale * adapter.scale)
        if adapter is not None and b is not None:
            low = x @ adapter.a_LPI[expert].t()
            _add_product(grad, low, b, expert, scale * adapter.scale)


def _add_product(
    left: Tensor, right: Tensor, buffer: GradBuffer, expert: int, scale: float
) -> None:
    """Store `scale * left^T right` in one expert's part of a buffer, or add it to that part.

    The product is computed in the dtype of the buffer.
    """
    out = buffer.grad[expert]
    left, right = left.to(out.dtype), right.to(out.dtype)
    torch.addmm(out, left.t(), right, beta=int(buffer.add), alpha=scale, out=out)


def _sum_pairs(rows_MO: Tensor, buffer: GradBuffer, block: Block, scale: float) -> None:
    """Compute the gradient of a bias: sum the rows of each expert's pairs, in fp32 or wider."""
    wide_dtype = torch.promote_types(rows_MO.dtype, torch.float32)
    for expert, (rows,) in block.split(rows_MO):
        sum_O = rows.sum(0, dtype=wide_dtype) * scale
        buffer.grad[expert] = buffer.grad[expert] + sum_O if buffer.add else sum_O


def _apply_weights(act_MF: Tensor, weight_M: Tensor) -> Tensor:
    # With fp32 weights the product is computed in fp32 and rounded once.
    return (act_MF * weight_M.unsqueeze(1)).to(act_MF.dtype)
