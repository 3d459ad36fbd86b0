"""Count the launches and the memory of the package's Triton kernels from the shapes of a call.

The fake tensors of a plan are on the CPU, so a plan would run the torch path of the experts. A GPU
runs the kernels of `ops/triton_mlp.py`. They compute the same products with fewer launches, fewer
bytes and less memory, because they gather rows while they multiply, and fuse the activation with
the product before it. A kernel also sums the rows that dispatch has copied from a token
(`ops/permute.py`). To plan a GPU, `count_kernels` replaces the torch path. It allocates the tensors
that the kernels need, computes nothing, and counts these launches:

    pass         kernel                            counted
    route        sort_pairs                        4 launches, no FLOPs
    forward      up, with activation               1 product
                 grouped_mm (down)                 1 product
                 combine                           1 launch, which sums the rows of each token
    backward     dgated, through down and gate     1 product
                 weight_grads                      1 launch: gradients of the routing weights
                 grouped_mm, combine (rows)        1 product and 1 launch: gradients of the rows
                 outer                             1 product per trained matrix
    dispatch     combine (add_rows)                1 launch, which sums the copies of each token

With an adapter, a thin product comes before each matrix product. It multiplies the rows by the
adapter's first factor. The kernel of the matrix product then also adds the product with the second
factor.

Example: 6 (token, expert) pairs, hidden size 8, 2 gated experts with 4 columns (so 8
pre-activations), bf16, and pre-activations that are kept for backward. The up product takes
2 * 6 * 8 * 8 = 768 FLOPs. It reads 6 rows of 8 numbers and 2 matrices of 8 x 8, and writes 6 x 4
activations and 6 x 8 pre-activations. These are 248 numbers, 496 bytes.

The work leaves out partly filled tiles and biases. The memory also leaves out the first products of
adapters and the dequantisation of nested NF4 scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.moe.dispatch import all_to_all
from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.ops.autograd import make_tensor_without_values
from hf_moe_ep.ops.interface import ExpertGrads, ExpertWeights, Routing
from hf_moe_ep.planner.work import Operator, WorkCounter, get_dtype_name
from hf_moe_ep.upstream.replaced import replaced

# Columns of the down projection that share a partial sum of a routing weight's gradient.
_PARTIAL_COLUMNS = 128
_FP32 = 4


@dataclass(frozen=True)
class ExpertCall:
    """The sizes of one call of the experts.

    Attributes:
        pairs: (token, expert) pairs that are computed.
        rows, top_k: the number of tokens, and the number of experts per token.
        pre: pre-activations per pair (columns of the up product); 2 * `ffn` for gated experts.
        ffn: activations per pair.
        up_bytes, down_bytes: bytes of the matrices of all experts, with scales if quantised.
        up_rank, down_rank: ranks of the adapters; 0 without an adapter.
    """

    dtype: torch.dtype
    pairs: int
    rows: int
    top_k: int
    experts: int
    hidden: int
    pre: int
    ffn: int
    up_bytes: int
    down_bytes: int
    up_rank: int = 0
    down_rank: int = 0

    @classmethod
    def of(
        cls, rows_RH: Tensor, weights_RK: Tensor, experts: ExpertWeights, routing: Routing
    ) -> ExpertCall:
        """Read the sizes from the arguments of a call."""
        named = experts.named_tensors()
        pre, hidden = experts.matrix_shape("up")
        _, ffn = experts.matrix_shape("down")

        def matrix_bytes(name: str) -> int:
            scales = (f"{name}_block_scale", f"{name}_nested_scale")
            return sum(named[part].nbytes for part in (name, *scales) if part in named)

        return cls(
            dtype=rows_RH.dtype,
            pairs=routing.pair_A.numel(),
            rows=weights_RK.shape[0],
            top_k=weights_RK.shape[1],
            experts=experts.up.shape[0],
            hidden=hidden,
            pre=pre,
            ffn=ffn,
            up_bytes=matrix_bytes("up"),
            down_bytes=matrix_bytes("down"),
            up_rank=0 if experts.up_a is None else experts.up_a.shape[1],
            down_rank=0 if experts.down_a is None else experts.down_a.shape[1],
        )

    def list_route_launches(self) -> list[Operator]:
        """List the launches that sort the pairs by expert. They read the ids twice."""
        ids, positions = 8 * self.rows * self.top_k, 4 * (2 * self.pairs + self.rows * self.top_k)
        return [Operator("memory", "", 0, 2 * ids + positions, launches=4)]

    def list_forward_launches(self, *, keep_pre: bool, skip_output: bool = False) -> list[Operator]:
        """List the launches of the forward pass."""
        if skip_output:
            return self._list_up_launches(keep_pre=True) if keep_pre else []
        moved = self.ffn + self.hidden
        down = self._list_product_launches(
            self.ffn, self.hidden, moved, self.down_bytes, self.down_rank
        )
        return [
            *self._list_up_launches(keep_pre=keep_pre),
            *down,
            self._make_combine(weighted=True),
        ]

    def list_row_launches(self, need: set[str], *, recompute: bool) -> list[Operator]:
        """List the backward launches for the gradients of rows and routing weights.

        Args:
            need: names of the tensors that need a gradient, as in `torch_mlp.backward`.
            recompute: True if backward recomputes the pre-activations.
        """
        launches = self._list_up_launches(keep_pre=True) if recompute else []
        has_activations = bool(need & {"down", "down_a", "down_b"})
        moved = self.hidden + 2 * self.pre + self.ffn * has_activations
        launches += self._list_product_launches(
            self.hidden, self.ffn, moved, self.down_bytes, self.down_rank
        )
        if "weights" in need:
            partial = -(-self.ffn // _PARTIAL_COLUMNS) * self.pairs
            nbytes = _FP32 * (partial + 2 * self.rows * self.top_k)
            launches.append(Operator("memory", "float32", 0, nbytes))
        moved = self.pre + self.hidden
        row_grads = self._list_product_launches(
            self.pre, self.hidden, moved, self.up_bytes, self.up_rank
        )
        if "rows" in need:
            launches += [*row_grads, self._make_combine(weighted=False)]
        elif "up_a" in need:
            # Only the thin product with the adapter is needed.
            launches += row_grads[:1]
        return launches

    def list_grad_launches(self, need: set[str]) -> list[Operator]:
        """List the backward launches for the gradients of matrices and adapters."""
        down_rank, up_rank = self.down_rank, self.up_rank
        launches_of = {
            "down": [self._make_outer_product(self.hidden, self.ffn)],
            "up": [self._make_outer_product(self.pre, self.hidden)],
            "down_a": [self._make_outer_product(self.ffn, down_rank)],
            "down_b": [
                self._make_thin_product(self.ffn, down_rank),
                self._make_outer_product(self.hidden, down_rank),
            ],
            "up_a": [self._make_outer_product(self.hidden, up_rank)],
            "up_b": [
                self._make_thin_product(self.hidden, up_rank),
                self._make_outer_product(self.pre, up_rank),
            ],
        }
        return [launch for name in launches_of if name in need for launch in launches_of[name]]

    def _list_up_launches(self, *, keep_pre: bool) -> list[Operator]:
        moved = self.hidden + self.ffn + self.pre * keep_pre
        return self._list_product_launches(
            self.hidden, self.pre, moved, self.up_bytes, self.up_rank
        )

    def _list_product_launches(
        self, inner: int, width: int, moved: int, matrix_bytes: int, rank: int
    ) -> list[Operator]:
        """List the launches that multiply each pair's row by the matrix of its expert.

        Args:
            inner, width: the numbers in a row of the input and in a row of the output.
            moved: the numbers that are read and written per pair.
            rank: the rank of the adapter, whose thin product comes first.
        """
        moved = self.pairs * (moved + rank) + self.experts * rank * width
        flops = 2 * self.pairs * (inner + rank) * width
        product = self._make_grouped(flops, moved, matrix_bytes)
        return [self._make_thin_product(inner, rank), product] if rank else [product]

    def _make_thin_product(self, inner: int, rank: int) -> Operator:
        moved = self.pairs * (inner + rank) + self.experts * inner * rank
        return self._make_grouped(2 * self.pairs * inner * rank, moved)

    def _make_outer_product(self, height: int, width: int) -> Operator:
        moved = self.pairs * (height + width) + self.experts * height * width
        return self._make_grouped(2 * self.pairs * height * width, moved)

    def _make_combine(self, *, weighted: bool) -> Operator:
        positions_and_weights = self.rows * self.top_k * (4 + _FP32 * weighted)
        nbytes = self.dtype.itemsize * (self.pairs + self.rows) * self.hidden
        nbytes += positions_and_weights
        return Operator("memory", get_dtype_name(self.dtype), 0, nbytes)

    def _make_grouped(self, flops: int, moved: int, matrix_bytes: int = 0) -> Operator:
        nbytes = self.dtype.itemsize * moved + matrix_bytes
        return Operator("grouped", get_dtype_name(self.dtype), flops, nbytes)


@contextmanager
def count_kernels(work: WorkCounter) -> Iterator[None]:
    """Inside the block, plan the Triton kernels instead of the torch path."""
    torch_route, torch_forward = torch_mlp.route, torch_mlp.forward
    torch_backward = torch_mlp.backward

    def route(
        expert_ids_RK: Tensor, counts_L: list[int] | None, experts: ExpertWeights, rows_RH: Tensor
    ) -> Routing:
        routing = work.run_uncounted(torch_route, expert_ids_RK, counts_L, experts, rows_RH)
        if routing.pair_A.numel():
            # ExpertCall.of reads only the shape of the routing weights; ids have the same shape.
            work.add(ExpertCall.of(rows_RH, expert_ids_RK, experts, routing).list_route_launches())
        return routing

    def forward(*arguments: Any, skip_output: bool) -> tuple[Tensor, Tensor]:
        rows_RH, weights_RK, experts, routing, _, keep_pre = arguments
        call = ExpertCall.of(rows_RH, weights_RK, experts, routing)
        if not call.pairs:
            out: tuple[Tensor, Tensor] = work.run_uncounted(torch_forward, *arguments)
            return out
        work.add(call.list_forward_launches(keep_pre=keep_pre, skip_output=skip_output))
        return _allocate_forward(call, rows_RH, keep_pre, skip_output)

    def backward(
        *arguments: Any, need: set[str], postpone: bool = False, **options: Any
    ) -> tuple[dict[str, Tensor], Callable[[ExpertGrads], None] | None]:
        grad_RH, rows_RH, weights_RK, experts, routing, pre_AG, _ = arguments
        call = ExpertCall.of(rows_RH, weights_RK, experts, routing)
        if not call.pairs:
            options |= {"need": need, "postpone": postpone}
            return work.run_uncounted(torch_backward, *arguments, **options)
        work.add(call.list_row_launches(need, recompute=pre_AG is None))
        grads, kept = _allocate_backward(call, rows_RH, weights_RK, need, recompute=pre_AG is None)

        def finish(into: ExpertGrads, kept: tuple[Tensor, ...] = (grad_RH, rows_RH, *kept)) -> None:
            """Allocate the gradients of the experts. Until then `kept` keeps its tensors alive."""
            for name, tensor in experts.named_tensors().items():
                if name in need:
                    into.buffer(name, tensor)
            launches = call.list_grad_launches(need)
            work.add(replace(launch, postponed=postpone) for launch in launches)

        if postpone:
            return grads, finish
        expert_grads = ExpertGrads()
        finish(expert_grads)
        return grads | expert_grads.take(), None

    def add_rows(
        rows_NH: Tensor,
        token_of_row_N: Tensor,
        row_TJ: Tensor,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> Tensor:
        out_TH = rows_NH.new_empty(len(row_TJ), rows_NH.shape[1], dtype=dtype)
        nbytes = rows_NH.nbytes + row_TJ.nbytes + out_TH.nbytes
        work.add([Operator("memory", get_dtype_name(rows_NH.dtype), 0, nbytes)])
        return out_TH

    with (
        replaced(all_to_all, "add_rows", add_rows),
        replaced(torch_mlp, "route", route),
        replaced(torch_mlp, "forward", forward),
        replaced(torch_mlp, "backward", backward),
    ):
        yield


def _allocate_forward(
    call: ExpertCall, rows_RH: Tensor, keep_pre: bool, skip_output: bool
) -> tuple[Tensor, Tensor]:
    """Allocate the tensors of `triton_mlp.forward`. Returns the output and the pre-activations."""
    pre_AG = rows_RH.new_empty(call.pairs if keep_pre else 0, call.pre)
    if skip_output and not keep_pre:
        return make_tensor_without_values(rows_RH), pre_AG
    act_AF = rows_RH.new_empty(call.pairs, call.ffn)
    if skip_output:
        return make_tensor_without_values(rows_RH), pre_AG
    y_AH = act_AF.new_empty(call.pairs, call.hidden)
    return y_AH.new_empty(rows_RH.shape), pre_AG


def _allocate_backward(
    call: ExpertCall, rows_RH: Tensor, weights_RK: Tensor, need: set[str], *, recompute: bool
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Allocate the tensors of `triton_mlp.backward`.

    Returns the gradients of the rows and the routing weights, and the tensors from which the
    gradients of the experts are computed.
    """
    num_activations = call.pairs if need & {"down", "down_a", "down_b"} else 0
    recomputed = [rows_RH.new_empty(call.pairs, n) for n in (call.ffn, call.pre) if recompute]
    grad_pre_AG = rows_RH.new_empty(call.pairs, call.pre)
    act_AF = rows_RH.new_empty(num_activations, call.ffn)
    grads = {}
    if "weights" in need:
        grads["weights"] = weights_RK.new_empty(weights_RK.shape)
    recomputed.clear()
    if "rows" in need:
        grad_x_AH = rows_RH.new_empty(call.pairs, call.hidden)
        grads["rows"] = grad_x_AH.new_empty(rows_RH.shape)
    return grads, (grad_pre_AG, act_AF)
