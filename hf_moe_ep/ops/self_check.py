"""Compare the compiled kernels with torch, once per process, GPU and kind of call.

Compilers have miscompiled single kernels for single GPUs: Triton 3.7.1 on a B300 computed a wrong
gradient and raised no error (Liger-Kernel pull request 1294). Only a comparison of numbers finds
such an error. The first call of a kind therefore runs small problems with the kernels and with
torch, and raises if the results differ:

    products    the forward of a few experts and, if an input is trained, the backward, with the
                dtypes, formula, block sizes, alignment and adapter ranks of the call. If the
                matrices are quantised, torch computes with the dequantised matrices. If a step
                adds up the experts' gradients of several chunks of rows, the check adds up two
    routing     the sort of pairs by expert, with the call's number of experts and top-k, which
                may be larger than the number of experts on this rank
    sums        the weighted sum of a row's experts, with rows of the call's width

Two calls are of the same kind if Triton builds the same kernels for both. Every kernel is therefore
checked before it is launched, and a test compares the checked kernels with the launched kernels.
The check also finds kernels that cannot be built or do not fit into the GPU. Most of the check's
time is the compilation of the kernels, which the call needs anyway.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hf_moe_ep.ops import torch_mlp, triton_mlp
from hf_moe_ep.ops.devices import make_device_current
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import WEIGHT_NAMES, ExpertGrads, ExpertWeights
from hf_moe_ep.ops.kernels.blocks import FEW_ROWS, MANY_ROWS, choose_blocks, get_dot_precision
from hf_moe_ep.ops.kernels.product import tma_can_load
from hf_moe_ep.ops.kernels.reduce import combine
from hf_moe_ep.ops.kernels.sort_pairs import sort_pairs
from hf_moe_ep.ops.quantised import NESTED_SCALE, Quantisation, Quantised, quantise_stack
from hf_moe_ep.ops.reference import dequantise_matrices
from hf_moe_ep.ops.sum_check import (
    ROUNDINGS,
    USE_TORCH,
    Comparison,
    TokenSumKind,
    check_close,
    compare_token_sums,
    describe_device,
    draw_rows_and_positions,
    try_to_build,
)

# The largest allowed error of exact fp32 products, in multiples of epsilon. These products round at
# every addition. ROUNDINGS is the limit for all other products. Products in TF32, which has the
# mantissa of fp16, have far larger errors than this limit.
_ROUNDINGS_OF_FP32 = 64
# Nested scales are dequantised before the first kernel runs.
_NAMES = tuple(name for name in WEIGHT_NAMES if not name.endswith(NESTED_SCALE))


class Kind(NamedTuple):
    """The properties of a call that decide which kernels Triton builds.

    Each call makes a Kind and looks its check up, so it is a tuple: the host hashes it quickly.

    Attributes:
        precision: precision of fp32 products.
        tensors: names of the experts' tensors that are not None.
        trained: names of the inputs that need a gradient: rows, weights and the experts' tensors.
        transposed: True if the matrices are transposed views.
        few: True if experts have fewer than FEW_ROWS rows on average.
        padded: True if TMA cannot load the matrices.
        ranks: ranks of the adapters of up and down, 0 without an adapter.
        quantised: format of the matrices, empty if they are not quantised.
        wide: True if the gradients of the experts are summed over chunks of rows, in fp32.
    """

    device: torch.device
    dtype: torch.dtype
    weights_dtype: torch.dtype
    precision: str
    formula: ExpertFormula
    tensors: tuple[str, ...]
    trained: tuple[str, ...]
    keep_pre: bool
    transposed: bool
    top_k: int
    num_experts: int
    hidden: int
    ffn: int
    few: bool
    padded: bool = False
    ranks: tuple[int, int] = (0, 0)
    quantised: str = ""
    wide: bool = False


def self_check(
    rows_RH: Tensor,
    weights_RK: Tensor,
    num_pairs: int,
    experts: ExpertWeights,
    formula: ExpertFormula,
    *,
    keep_pre: bool,
    trained: tuple[str, ...],
    wide: bool = False,
) -> str:
    """Return the reason why the kernels of this call cannot run here, or "" if they can run.

    Raises:
        RuntimeError: the kernels run, but compute wrong numbers.
    """
    if triton_mlp.interpreted():
        return ""
    num_experts, pre_size, _ = experts.up.shape
    up, down = (0 if a is None else a.shape[1] for a in (experts.up_a, experts.down_a))
    kind = Kind(
        device=rows_RH.device,
        dtype=rows_RH.dtype,
        weights_dtype=weights_RK.dtype,
        precision=get_dot_precision(rows_RH),
        formula=formula,
        tensors=tuple(name for name in _NAMES if getattr(experts, name) is not None),
        trained=trained,
        keep_pre=keep_pre,
        transposed=experts.up.stride(2) != 1,
        top_k=weights_RK.shape[1],
        num_experts=num_experts,
        hidden=rows_RH.shape[1],
        ffn=_shorten(formula.ffn_size(pre_size)),
        few=num_pairs < FEW_ROWS * num_experts,
        padded=not (tma_can_load(experts.up) and tma_can_load(experts.down)),
        ranks=(up, down),
        quantised=experts.quantised,
        wide=wide,
    )
    return check_both_sizes(kind)


@functools.cache
def check_both_sizes(kind: Kind) -> str:
    """Check the kernels of a kind with few and with many rows per expert (see `self_check`).

    The number of rows changes during a run, and Triton builds different kernels for few and for
    many rows. If only one set of kernels were checked now, one rank might have to build the second
    set later, while all other ranks wait for this rank in a collective.
    """
    return check_once(kind) or check_once(kind._replace(few=not kind.few))


@functools.cache
def check_once(kind: Kind) -> str:
    """Compare the kernels of a kind with torch (see `self_check`)."""
    checks = (_compare_products, _compare_routing, _compare_sums)
    comparisons, reason = try_to_build(
        lambda: itertools.chain.from_iterable(check(kind) for check in checks)
    )
    exact = kind.dtype == torch.float32 and kind.precision == "ieee"
    # fp32 products may be computed in TF32, which rounds like fp16.
    rounded = torch.float16 if kind.dtype == torch.float32 and not exact else kind.dtype
    limit = (_ROUNDINGS_OF_FP32 if exact else ROUNDINGS) * torch.finfo(rounded).eps
    check_close(comparisons, limit, kind, USE_TORCH)
    return reason


@functools.cache
def warn_once(device: torch.device, reason: str) -> None:
    """Warn that the torch path computes the experts instead of the kernels."""
    warnings.warn(
        f"the Triton kernels of hf_moe_ep cannot run on {describe_device(device)} with Triton "
        f"{triton.__version__}, so experts run on the torch path, which is slower: {reason}",
        stacklevel=2,
    )


def _shorten(size: int) -> int:
    """Return a size from 256 to 511 that is divisible by the same powers of two, up to 256.

    All block sizes are powers of two up to 256, so the new size needs the same masks in kernels.
    """
    return 256 + size % 256


def _compare_products(kind: Kind) -> Iterator[Comparison]:
    """Yield the comparisons of the output and of every needed gradient of a small call."""
    generator = torch.Generator(kind.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kind.device, dtype=torch.float64)

    # A row names an expert at most once, so there are more experts than columns of ids, even if the
    # call has fewer. The number of experts changes no kernel of these products.
    num_experts = max(kind.top_k + 1, min(kind.num_experts, 3))
    hidden, ffn = _shorten(kind.hidden), kind.ffn
    pre_size = 2 * ffn if kind.formula.gated else ffn
    pairs_per_expert = FEW_ROWS // 2 if kind.few else MANY_ROWS + 1
    num_rows = pairs_per_expert * num_experts // kind.top_k + 1

    def matrix(out_size: int, in_size: int) -> Tensor:
        values = (draw(num_experts, out_size, in_size) / in_size**0.5).to(kind.dtype)
        values = values.mT.contiguous() if kind.transposed else values
        if kind.padded and not kind.quantised:
            values = torch.cat([values, values], dim=2)[..., : values.shape[2]]
        return values.mT if kind.transposed else values

    up_rank, down_rank = kind.ranks
    shapes = {
        "up_bias": (pre_size,),
        "down_bias": (hidden,),
        "up_a": (up_rank, hidden),
        "up_b": (pre_size, up_rank),
        "down_a": (down_rank, ffn),
        "down_b": (hidden, down_rank),
    }
    tensors = {"up": matrix(pre_size, hidden), "down": matrix(hidden, ffn)}
    for name in kind.tensors:
        if name in shapes:
            tensors[name] = draw(num_experts, *shapes[name]) / shapes[name][-1] ** 0.5
    tensors = {name: x.to(kind.dtype) for name, x in tensors.items()}
    dequantised = dict(tensors)
    for name in ("up", "down") if kind.quantised else ():
        stack = draw_quantised(tensors[name], kind.quantised, generator)
        tensors |= stack.by_name(name)
        dequantised[name] = dequantise_matrices(stack, kind.quantised, kind.dtype)
    rows_RH = draw(num_rows, hidden).to(kind.dtype)
    weights_RK = draw(num_rows, kind.top_k).abs().to(kind.weights_dtype)
    ids_RK = draw(num_rows, num_experts).argsort(1)[:, : kind.top_k]
    grad_RH = draw(num_rows, hidden).to(kind.dtype)
    inputs = {"rows": rows_RH, "weights": weights_RK, "grad": grad_RH}
    in_fp64 = {name: x.double() for name, x in (inputs | dequantised).items()}
    actual = _run_implementation(triton_mlp, kind, inputs | tensors, ids_RK)
    expected = _run_implementation(
        torch_mlp, kind._replace(quantised=""), in_fp64, ids_RK, actual.get("pre")
    )
    return ((name, actual[name], expected[name]) for name in expected)


def draw_quantised(weight_LOI: Tensor, kind: str, generator: torch.Generator) -> Quantised:
    """Return quantised matrices with values about as large as the values of `weight_LOI`.

    For fp8, `weight_LOI` itself is quantised. For nf4 the codes and scales are random, because
    quantising to nf4 would need bitsandbytes.
    """
    if kind == "fp8":
        return quantise_stack(weight_LOI, Quantisation(kind))
    device, (experts, rows, columns) = weight_LOI.device, weight_LOI.shape
    values = torch.randint(
        0, 256, (experts, rows, columns // 2), generator=generator, device=device, dtype=torch.uint8
    )
    scale = 2 * torch.rand(experts, rows, columns // 64, generator=generator, device=device)
    return Quantised(values, scale / columns**0.5)


def _run_implementation(
    implementation: Any,
    kind: Kind,
    inputs: dict[str, Tensor],
    ids_RK: Tensor,
    pre_AG: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return "out", the output, and if an input is trained, "pre" and the gradients by name.

    "pre" are the pre-activations. If `pre_AG` is given, the gate is differentiated at `pre_AG`. At
    the limit of a clamped gate the slope has a step, and rounding moves some pre-activations across
    this step. The gradients of two paths are therefore comparable only at equal pre-activations.
    """
    named: dict[str, Any] = {name: inputs.get(name) for name in WEIGHT_NAMES}
    experts = ExpertWeights(**named, up_scale=0.5, down_scale=2.0, quantised=kind.quantised)
    routing = implementation.route(ids_RK, None, experts, inputs["rows"])
    call = (inputs["rows"], inputs["weights"], experts, routing)
    out_RH, kept_AG = implementation.forward(*call, kind.formula, kind.keep_pre)
    if not kind.trained:
        return {"out": out_RH}
    options: dict[str, Any] = {"grad_scale": 1.0, "need": set(kind.trained)}
    own_AG = kept_AG if kind.keep_pre else implementation.forward(*call, kind.formula, True)[1]
    at_AG = pre_AG.to(own_AG) if pre_AG is not None else kept_AG if kind.keep_pre else None
    options["postpone"] = kind.wide
    grads, finish = implementation.backward(inputs["grad"], *call, at_AG, kind.formula, **options)
    if finish is not None:
        sums = ExpertGrads(wide=True)
        finish(sums)
        finish(sums)
        grads |= sums.take()
    return {"out": out_RH, "pre": own_AG} | {name: grads[name] for name in kind.trained}


def _compare_routing(kind: Kind) -> Iterator[Comparison]:
    """Yield the tensors of one routing on both paths. Some of its pairs have no expert here."""
    generator = torch.Generator(kind.device).manual_seed(0)
    num_rows = 1 + 1024 // kind.top_k
    # If this rank has fewer experts than top-k, at least one id of each row is "no expert here".
    num_ids = max(kind.num_experts, kind.top_k)
    scores = torch.rand(num_rows, num_ids, generator=generator, device=kind.device)
    ids_RK = scores.argsort(1)[:, : kind.top_k].clamp(max=kind.num_experts)
    ids_RK[::3, 0] = kind.num_experts
    has_expert = ids_RK < kind.num_experts
    counts_L = torch.bincount(ids_RK[has_expert], minlength=kind.num_experts).tolist()
    like = scores.new_empty(kind.num_experts, 1, 1, dtype=kind.dtype)
    num_pairs = FEW_ROWS * kind.num_experts - 1 if kind.few else FEW_ROWS * kind.num_experts
    block_m = choose_blocks(like, kind.num_experts, num_pairs).m
    actual = make_device_current(sort_pairs)(ids_RK, kind.num_experts, sum(counts_L), block_m)
    expected = torch_mlp.route(ids_RK, counts_L, ExpertWeights(like, None, like, None), like)
    starts = expected.offsets.tolist()
    tiles = [
        (expert, start)
        for expert, (first, end) in enumerate(itertools.pairwise(starts))
        for start in range(first, end, block_m)
    ]
    tiles += [(-1, 0)] * (len(actual.tiles) - len(tiles))
    yield "pairs by expert", actual.pair_A, expected.pair_A
    yield "positions of pairs", actual.position_RK, expected.position_RK
    yield "pairs of each expert", actual.offsets, expected.offsets.to(kind.device)
    yield "tiles", actual.tiles, torch.tensor(tiles, device=kind.device)


def _compare_sums(kind: Kind) -> Iterator[Comparison]:
    """Yield weighted and unweighted sums of the expert outputs of a few rows, on both paths."""
    sum_kind = TokenSumKind(kind.device, kind.dtype, kind.top_k, kind.hidden)
    rows_AH, position_RK, y_RKH = draw_rows_and_positions(sum_kind)
    generator = torch.Generator(kind.device).manual_seed(1)
    weights_RK = torch.rand(position_RK.shape, generator=generator, device=kind.device)
    weights_RK = weights_RK.to(kind.weights_dtype)
    weighted_RH = (y_RKH * weights_RK.double().unsqueeze(2)).sum(1)
    actual_RH = make_device_current(combine)(rows_AH, position_RK, weights_RK)
    yield "weighted sums", actual_RH, weighted_RH
    yield from compare_token_sums(sum_kind)
