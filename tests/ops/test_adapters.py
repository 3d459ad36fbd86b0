"""Experts with low-rank adapters, on both backends, equal experts with merged weights.

On a CPU the Triton kernels run in Triton's interpreter, whose blocks are small: a rank of 40 is
two blocks of the thin products and three steps inside the other kernels.
"""

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from expert_cases import (
    ADAPTERS,
    BOTH,
    CASES,
    FORMULAS,
    GPT_OSS,
    TRITON,
    Case,
    draw_ids,
    draw_with_adapters,
    restride,
)
from support.close import assert_close, max_error
from support.hub_files import assert_equal
from support.largest_tensor import LargestTensor
from torch import Tensor

from hf_moe_ep.ops import reference, torch_mlp, triton_mlp
from hf_moe_ep.ops.expert_mlp import expert_mlp, postpone_grads
from hf_moe_ep.ops.interface import ExpertWeights

Named = dict[str, Tensor | None]
FROZEN_BASE = ("rows", "weights", *ADAPTERS)
SMALL = Case(draw_ids(9, 2, 3, seed=3), 3, 11, 7, GPT_OSS, bias=True)
RANKS = (1, 8, 16, 40, 64, 200)
# The formulas for which a kernel reads an adapter in another way (concatenated, transposed,
# interleaved with a bias, and without a gate), and the rank that fast tests use for each of them.
# All other formulas differ only in the steps after the sum.
FAST_RANKS = {"silu": 8, "transposed": 16, "gpt-oss": 40, "no gate, bias": 1}


def _run(
    fn: Callable[..., Tensor],
    case: Case,
    named: Named,
    grad_RH: Tensor,
    wanted: tuple[str, ...],
    *,
    postpone: bool = False,
    **kw: Any,
) -> dict[str, Tensor]:
    """Return the output and the wanted gradients; check that no other input gets a gradient."""
    leaves = {
        name: None if x is None else x.detach().requires_grad_(name in wanted)
        for name, x in named.items()
    }
    experts = {name: x for name, x in leaves.items() if name not in ("rows", "weights")}
    weights = ExpertWeights(**experts, up_scale=0.5, down_scale=2.0)
    weights = postpone_grads(weights) if postpone else weights
    rows_RH = leaves["rows"]
    out_RH = fn(
        rows_RH, case.ids_RK(rows_RH.device), leaves["weights"], weights, case.formula, **kw
    )
    out_RH.backward(grad_RH.to(out_RH.dtype))
    grads = {name: x.grad for name, x in leaves.items() if x is not None}
    assert {name for name, grad in grads.items() if grad is not None} == set(wanted)
    return {"out": out_RH.detach()} | {name: grads[name] for name in wanted}


def _run_ours(
    case: Case, named: Named, grad_RH: Tensor, wanted: tuple[str, ...], backend: str, **kw: Any
) -> dict[str, Tensor]:
    kw = {"counts_L": case.counts_L(), "backend": backend, **kw}
    return _run(expert_mlp, case, named, grad_RH, wanted, **kw)


def _compute_truth(
    case: Case, named: Named, grad_RH: Tensor, wanted: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the results of merged weights in fp64, differentiated by autograd."""
    wide = {name: None if x is None else x.double() for name, x in named.items()}
    if case.ids_RK().numel() and sum(case.counts_L()):
        return _run(reference.expert_mlp, case, wide, grad_RH.double(), wanted)
    zeros = {name: torch.zeros_like(wide[name]) for name in wanted}
    return {"out": torch.zeros_like(wide["rows"])} | zeros


def _list_names(named: Named) -> tuple[str, ...]:
    return tuple(name for name, x in named.items() if x is not None)


def _remove_adapter(named: Named, matrix: str) -> Named:
    """Return the inputs without the adapter of `matrix`."""
    return named | {f"{matrix}_a": None, f"{matrix}_b": None}


def _assert_close(got: dict[str, Tensor], want: dict[str, Tensor], budget: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_close(name, got[name], value, budget)


@pytest.mark.parametrize("postpone", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("name", ["random", "empty experts", "gpt-oss", "no gate, relu2"])
def test_fp64_equals_merged_weights(name: str, rank: int, recompute: bool, postpone: bool) -> None:
    case = (CASES | FORMULAS)[name]
    named = draw_with_adapters(case, rank)
    grad_RH = torch.randn_like(named["rows"])
    kw = {"postpone": postpone, "recompute": recompute}
    got = _run_ours(case, named, grad_RH, FROZEN_BASE, "torch", **kw)
    _assert_close(got, _compute_truth(case, named, grad_RH, FROZEN_BASE), 1e-12)


def _list_triton_cases() -> Iterator[Any]:
    """Yield the cases, most of which are marked as slow.

    On the CPU the interpreter needs seconds per case, so only "gpt-oss" with its rank in FAST_RANKS
    is not slow. On a GPU each case compiles its kernels for half a minute, so only "silu" with each
    rank and the other formulas with one rank are not slow.
    """
    on_cpu = TRITON[0].marks

    def make_case(name: str, rank: int, device: str, dtype: torch.dtype, marks: Any) -> Any:
        label = f"{name}-{rank}-{device}-{str(dtype).removeprefix('torch.')}"
        return pytest.param(name, rank, device, dtype, marks=marks, id=label)

    for name, rank in itertools.product(FORMULAS, RANKS):
        marks = (
            on_cpu
            if (name, rank) == ("gpt-oss", FAST_RANKS["gpt-oss"])
            else [*on_cpu, pytest.mark.slow]
        )
        yield make_case(name, rank, "cpu", torch.float32, marks)
        on_gpu = [pytest.mark.gpu]
        if name != "silu" and rank != FAST_RANKS.get(name, 16):
            on_gpu.append(pytest.mark.slow)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield make_case(name, rank, "cuda", dtype, on_gpu)
    yield make_case("gpt-oss", 40, "cpu", torch.float16, [*on_cpu, pytest.mark.slow])


@pytest.mark.parametrize(("name", "rank", "device", "dtype"), list(_list_triton_cases()))
def test_triton_is_no_worse_than_the_torch_path(
    name: str, rank: int, device: str, dtype: torch.dtype
) -> None:
    """The base is trained too. Each gradient has at most twice the error of torch against fp64.

    The kernels compute tanh(y) as 2 sigmoid(2 y) - 1. This rounds values of size 1, whereas torch
    rounds tanh(y) itself. So gelu_tanh in fp32 may have four times the error of torch.
    """
    case = FORMULAS[name]
    draws = []
    # Rounding can move a value over a clamp's limit, where the gradient jumps to zero. A clamped
    # formula therefore needs more draws.
    for _ in range(30 if case.formula.clamped and device == "cuda" else 6):
        named = draw_with_adapters(case, rank, dtype, device)
        grad_RH = torch.randn_like(named["rows"])
        draws.append((named, grad_RH, _compute_truth(case, named, grad_RH, _list_names(named))))
    errors = [
        _measure_errors(_run_ours(case, named, grad_RH, _list_names(named), "torch"), truth)
        for named, grad_RH, truth in draws
    ]
    # The budget is the largest error of all draws, because the error of one draw varies too much.
    factor = 4 if (name, dtype) == ("gelu_tanh", torch.float32) else 2
    budget = {tensor: factor * max(error[tensor] for error in errors) for tensor in errors[0]}
    named, grad_RH, truth = draws[0]
    got = _run_ours(case, named, grad_RH, _list_names(named), "triton")
    assert all(x.dtype == dtype for x in got.values())
    for tensor, error in _measure_errors(got, truth).items():
        assert error <= budget[tensor], f"{tensor}: {error:.2e} > {budget[tensor]:.2e}"


def _measure_errors(got: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {name: max_error(got[name], true) for name, true in truth.items()}


@pytest.mark.parametrize(("backend", "device"), TRITON)
@pytest.mark.parametrize("name", CASES)
def test_triton_equals_merged_weights_on_edge_cases(name: str, backend: str, device: str) -> None:
    case = CASES[name]
    named = draw_with_adapters(case, 3, torch.float32, device)
    grad_RH = torch.randn_like(named["rows"])
    got = _run_ours(case, named, grad_RH, _list_names(named), backend)
    want = _compute_truth(case, named, grad_RH, _list_names(named))
    _assert_close(got, want, 2e-6)  # short fp32 sums


@pytest.mark.parametrize("left_out", [pytest.param("up", marks=pytest.mark.slow), "down"])
@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_one_of_the_matrices_may_lack_an_adapter(backend: str, device: str, left_out: str) -> None:
    for trains_base in (False, True):
        named = _remove_adapter(draw_with_adapters(SMALL, 3, torch.float32, device), left_out)
        grad_RH = torch.randn_like(named["rows"])
        wanted = tuple(name for name in _list_names(named) if trains_base or name in FROZEN_BASE)
        got = _run_ours(SMALL, named, grad_RH, wanted, backend)
        _assert_close(got, _compute_truth(SMALL, named, grad_RH, wanted), 2e-6)  # short fp32 sums


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_frozen_tensors_get_no_gradient_and_change_no_other_gradient(
    backend: str, device: str
) -> None:
    named = draw_with_adapters(SMALL, 3, torch.float32, device)
    grad_RH = torch.randn_like(named["rows"])
    want = _run_ours(SMALL, named, grad_RH, _list_names(named), backend)
    subsets = [FROZEN_BASE, ADAPTERS, ("rows",), ("weights", "up_b", "down_a"), ("up_a", "down_b")]
    for wanted in subsets:
        got = _run_ours(SMALL, named, grad_RH, wanted, backend)
        assert_equal(got, {name: want[name] for name in ("out", *wanted)})


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(FROZEN_BASE, id="frozen", marks=pytest.mark.slow),
        pytest.param(ADAPTERS, id="no rows", marks=pytest.mark.slow),
        pytest.param(None, id="all"),
    ],
)
@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_postponed_and_recomputed_calls_have_the_same_bits(
    backend: str, device: str, wanted: tuple[str, ...] | None
) -> None:
    no_local_experts = Case([[3, 3]] * 4, 3, 11, 7, GPT_OSS, bias=True)
    for case in (SMALL, no_local_experts):
        named = draw_with_adapters(case, 5, torch.float32, device)
        grad_RH = torch.randn_like(named["rows"])
        names = wanted or _list_names(named)
        want = _run_ours(case, named, grad_RH, names, backend)
        for kw in ({"postpone": True}, {"recompute": True}, {}):
            assert_equal(_run_ours(case, named, grad_RH, names, backend, **kw), want)


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_grad_scale_reaches_adapters_and_base_alike(backend: str, device: str) -> None:
    named = draw_with_adapters(SMALL, 3, torch.float32, device)
    grad_RH = torch.randn_like(named["rows"])
    plain = _run_ours(SMALL, named, grad_RH, _list_names(named), backend)
    scaled = _run_ours(SMALL, named, grad_RH, _list_names(named), backend, grad_scale=0.25)
    untouched = ("out", "rows", "weights")
    want = {name: x if name in untouched else x * 0.25 for name, x in plain.items()}
    assert_equal(scaled, want)  # a power of two: exact


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_strided_factors_give_the_same_results(backend: str, device: str) -> None:
    named = draw_with_adapters(SMALL, 3, torch.float32, device)
    grad_RH = torch.randn_like(named["rows"])
    want = _run_ours(SMALL, named, grad_RH, FROZEN_BASE, backend)
    for kind in range(2):
        other = named | {name: restride(named[name])[kind] for name in ADAPTERS}
        assert not any(other[name].is_contiguous() for name in ADAPTERS)
        got = _run_ours(SMALL, other, grad_RH, FROZEN_BASE, backend)
        _assert_close(got, want, 2e-6)  # short fp32 sums


# name: (matrices with adapters, wanted gradients, number of thin products, launches of `outer`)
LAUNCHES = {
    "no adapters": ((), ("rows", "weights", "up", "down"), 0, 2),
    "rows": (("up", "down"), ("rows",), 4, 0),
    "routing weights": (("up", "down"), ("weights",), 3, 0),
    "up alone": (("up",), ("rows", "up_a", "up_b"), 3, 2),
    "down alone": (("down",), ("rows", "down_a", "down_b"), 3, 2),
    "frozen base": (("up", "down"), FROZEN_BASE, 6, 4),
    "everything": (("up", "down"), (*FROZEN_BASE, "up", "down"), 6, 6),
}


@pytest.mark.parametrize(("backend", "device"), TRITON)
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_of_unneeded_gradients_are_not_launched(
    name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices, wanted, num_thin, num_outer = LAUNCHES[name]
    case = CASES["docstring"]
    named = draw_with_adapters(case, 2, torch.float32, device)
    for matrix in {"up", "down"}.difference(matrices):
        named = _remove_adapter(named, matrix)
    calls: list[str] = []
    for kernel in ("thin_mm", "outer"):
        original = getattr(triton_mlp, kernel)

        def count_and_call(
            *args: Any, original: Any = original, kernel: str = kernel, **kw: Any
        ) -> Any:
            calls.append(kernel)
            return original(*args, **kw)

        monkeypatch.setattr(triton_mlp, kernel, count_and_call)
    _run_ours(case, named, torch.randn_like(named["rows"]), wanted, backend)
    assert (calls.count("thin_mm"), calls.count("outer")) == (num_thin, num_outer)


@pytest.mark.parametrize(
    "implementation",
    [torch_mlp, pytest.param(triton_mlp, marks=pytest.mark.slow)],
    ids=["torch", "triton"],
)
def test_no_tensor_is_as_large_as_the_experts(implementation: ModuleType) -> None:
    """With a frozen base the kernels make neither merged weights nor their gradients."""
    if implementation is triton_mlp and not triton_mlp.interpreted():
        pytest.skip("needs Triton's interpreter, because the tensors are on the CPU")
    case = Case(draw_ids(40, 2, 6, seed=3), 6, hidden=64, ffn=48)
    named = draw_with_adapters(case, 2, torch.float32)
    smallest = min(named["up"].numel(), named["down"].numel())

    largest = LargestTensor(x for x in named.values() if x is not None)
    rows, weights = named.pop("rows"), named.pop("weights")
    experts, grad_RH = ExpertWeights(**named), torch.randn_like(rows)
    need = {"rows", "weights", *ADAPTERS}
    # The test calls the implementation, because LargestTensor cannot see inside the operator.
    with largest:
        routing = implementation.route(case.ids_RK(), case.counts_L(), experts, rows)
        out, pre = implementation.forward(rows, weights, experts, routing, case.formula, True)
        grads, _ = implementation.backward(
            grad_RH, rows, weights, experts, routing, pre, case.formula, grad_scale=1.0, need=need
        )
    assert grads.keys() == need
    assert out.numel() <= largest.elements < smallest
