"""The compiled kernels against the torch path, once per process, GPU and kind of kernel.

A compiler that miscompiles one kernel on one GPU has happened (Triton 3.7.1 on B300: a wrong
gradient and no error; Liger-Kernel pull request 1294), and nothing but numbers shows it. So the
first call of a kind runs a small problem of the same dtype, formula, block sizes, alignment and
ranks of adapters forward and backward on both paths, and raises if they differ. Most of its time
is compilation that the call needs anyway.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
from torch import Tensor

from hf_moe_ep.ops import torch_mlp, triton_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import WEIGHT_NAMES, ExpertWeights
from hf_moe_ep.ops.kernels.blocks import FEW_ROWS

_GRADS = ("rows", "weights", *WEIGHT_NAMES)
_NUM_EXPERTS = 3
# Largest error, relative to the largest element, in roundings of the dtype.
_ROUNDINGS = 8


def self_check(top_k: int, num_pairs: int, experts: ExpertWeights, formula: ExpertFormula) -> None:
    """Raise RuntimeError where the kernels for such a call compute something else than torch."""
    if triton_mlp.interpreted():
        return
    num_experts, pre_size, hidden = experts.up.shape
    check_once(
        experts.up.device,
        experts.up.dtype,
        formula,
        experts.up_bias is not None,
        experts.up.stride(2) != 1,
        min(top_k, _NUM_EXPERTS),
        # Divisible by the same powers of two as the real sizes.
        256 + hidden % 256,
        256 + formula.ffn_size(pre_size) % 256,
        FEW_ROWS // 2 if num_pairs < FEW_ROWS * num_experts else FEW_ROWS * 2,
        tuple(0 if a is None else a.shape[1] for a in (experts.up_a, experts.down_a)),
    )


@functools.cache
def check_once(
    device: torch.device,
    dtype: torch.dtype,
    formula: ExpertFormula,
    bias: bool,
    transposed: bool,
    top_k: int,
    hidden: int,
    ffn: int,
    rows_per_expert: int,
    ranks: tuple[int, ...] = (0, 0),
) -> None:
    """Compare forward and backward on a small problem of these properties.

    `ranks` are those of the adapters of up and down, 0 where there is none.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64)

    def matrix(out_size: int, in_size: int) -> Tensor:
        values = draw(_NUM_EXPERTS, out_size, in_size) / in_size**0.5
        return values.mT.contiguous().mT if transposed else values

    def adapter(weight_LOI: Tensor, rank: int) -> list[Tensor | None]:
        if not rank:
            return [None, None]
        out_size, in_size = weight_LOI.shape[1:]
        a_LPI = draw(_NUM_EXPERTS, rank, in_size) / in_size**0.5
        return [a_LPI, draw(_NUM_EXPERTS, out_size, rank) / rank**0.5]

    pre_size = 2 * ffn if formula.gated else ffn
    rows = rows_per_expert * _NUM_EXPERTS // top_k + 1
    up, down = matrix(pre_size, hidden), matrix(hidden, ffn)
    biases = (draw(_NUM_EXPERTS, pre_size), draw(_NUM_EXPERTS, hidden)) if bias else (None, None)
    tensors = [draw(rows, hidden), draw(rows, top_k).abs(), up, biases[0], down, biases[1]]
    tensors += [*adapter(up, ranks[0]), *adapter(down, ranks[1])]
    tensors = [x if x is None else x.to(dtype) for x in tensors]
    ids_RK = draw(rows, _NUM_EXPERTS).argsort(1)[:, :top_k]
    grad_RH = draw(rows, hidden).to(dtype)
    got = _run(triton_mlp, tensors, ids_RK, grad_RH, formula)
    wide = [x if x is None else x.double() for x in tensors]
    want = _run(torch_mlp, wide, ids_RK, grad_RH.double(), formula)
    limit = _ROUNDINGS * torch.finfo(_product_dtype(dtype)).eps
    for name, mine, true in zip(("out", *_GRADS), got, want, strict=True):
        if mine is None or true is None:
            continue
        error = ((mine.double() - true).abs().max() / true.abs().max()).item()
        if not error <= limit:
            raise RuntimeError(
                f"the Triton kernels of hf_moe_ep compute wrong numbers on "
                f"{_name(device)} with Triton {triton.__version__}: error "
                f"{error:.1e} in {name} ({formula}, {dtype}), at most {limit:.1e} is rounding. "
                f"Train with experts_backend='torch', and report this line"
            )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose rounding rules: fp32 products may be TF32, which rounds like fp16."""
    return torch.float16 if dtype == torch.float32 else dtype


def _run(
    implementation: object,
    tensors: list[Tensor | None],
    ids_RK: Tensor,
    grad_RH: Tensor,
    formula: ExpertFormula,
) -> list[Tensor | None]:
    rows_RH, weights_RK, *rest = tensors
    assert rows_RH is not None and weights_RK is not None
    experts = ExpertWeights(*rest)  # type: ignore[arg-type]
    experts = replace(experts, up_scale=0.5, down_scale=2.0)
    routing = implementation.route(ids_RK, None, experts)  # type: ignore[attr-defined]
    out_RH, pre_AG = implementation.forward(  # type: ignore[attr-defined]
        rows_RH, weights_RK, experts, routing, formula, True
    )
    grads, _ = implementation.backward(  # type: ignore[attr-defined]
        grad_RH,
        rows_RH,
        weights_RK,
        experts,
        routing,
        pre_AG,
        formula,
        grad_scale=1.0,
        need={"rows", "weights", *experts.named_tensors()},
    )
    return [out_RH, *(getattr(grads, name) for name in _GRADS)]
