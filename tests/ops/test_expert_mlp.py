"""Both backends compute the output and all gradients of the expert MLP, also in edge cases.

On a CPU the Triton kernels run in Triton's interpreter, in fp32 and fp16 (its bf16 products are
wrong). For the interpreter `ops/kernels/blocks.py` has a row of small blocks, so the sizes of
FORMULAS span several blocks, of which the last one is incomplete.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from expert_cases import (
    ADAPTERS,
    BOTH,
    CASES,
    FORMULAS,
    GPT_OSS,
    NAMES,
    ONLY_TORCH,
    TORCH,
    TRITON,
    Case,
    draw_ids,
    draw_with_adapters,
    restride,
)
from support.close import assert_close, max_error
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep.ops import reference
from hf_moe_ep.ops.expert_mlp import expert_mlp, postpone_grads
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import WEIGHT_NAMES, ExpertWeights
from hf_moe_ep.ops.operators import INPUT_NAMES, Settings


def _run(fn, case: Case, inputs, grad_RH: Tensor, wanted=(1,) * 6, **kw):
    """Run `fn` forward and backward, and return its output and the gradient of each input.

    `wanted` has a flag for each input. If the flag is 0, the input is frozen and its gradient None.
    """
    leaves = [
        None if x is None else x.detach().clone().requires_grad_(bool(want))
        for x, want in zip(inputs, wanted)
    ]
    rows_RH, weights_RK, *experts = leaves
    ids_RK = case.ids_RK(rows_RH.device)
    out_RH = fn(rows_RH, ids_RK, weights_RK, ExpertWeights(*experts), case.formula, **kw)
    if out_RH.requires_grad:
        out_RH.backward(grad_RH.to(out_RH.dtype))
    return out_RH.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


def _run_ours(case: Case, inputs, grad_RH: Tensor, backend: str, wanted=(1,) * 6, scale=1.0, **kw):
    kw = {"counts_L": case.counts_L(), "grad_scale": scale, "backend": backend, **kw}
    return _run(expert_mlp, case, inputs, grad_RH, wanted, **kw)


def _compute_truth(case: Case, inputs, grad_RH: Tensor):
    """Run the reference in fp64. An input that it never reads gets a gradient of zeros."""
    wide = [None if x is None else x.double() for x in inputs]
    out_RH, grads = _run(reference.expert_mlp, case, wide, grad_RH.double())
    pairs = zip(grads, wide)
    return out_RH, [
        torch.zeros_like(x) if grad is None and x is not None else grad for grad, x in pairs
    ]


def _assert_same(got, want, budget: float) -> None:
    assert_close("out", got[0], want[0], budget)
    for name, got_grad, want_grad in zip(NAMES, got[1], want[1]):
        assert (got_grad is None) == (want_grad is None), name
        if got_grad is not None:
            assert_close(f"grad of {name}", got_grad, want_grad, budget)


def _assert_equal(got, want) -> None:
    assert torch.equal(got[0], want[0])
    for name, got_grad, want_grad in zip(NAMES, got[1], want[1]):
        assert (got_grad is None) == (want_grad is None), name
        assert got_grad is None or torch.equal(got_grad, want_grad), name


def test_the_example_of_the_module_docstring_equals_a_result_by_hand() -> None:
    """With H = F = 1 the formula silu(g x) * (u x) * d can be written out."""
    case = CASES["docstring"]
    rows_RH, weights_RK = torch.tensor([[2.0], [-1.0]]), torch.tensor([[0.5, 0.25], [4.0, 99.0]])
    up_LGH = torch.tensor([[[1.0], [3.0]], [[-2.0], [5.0]]])
    down_LHF = torch.tensor([[[7.0]], [[11.0]]])
    silu = torch.nn.functional.silu
    row_0 = 0.5 * 11 * silu(torch.tensor(-4.0)) * 10 + 0.25 * 7 * silu(torch.tensor(2.0)) * 6
    row_1 = 4.0 * 7 * silu(torch.tensor(-1.0)) * -3
    want_RH = torch.stack([row_0, row_1]).unsqueeze(1)
    experts = ExpertWeights(up_LGH, None, down_LHF, None)
    got_RH = expert_mlp(rows_RH, case.ids_RK(), weights_RK, experts, case.formula, counts_L=[2, 1])
    assert_close("out", got_RH, want_RH, 1e-6)  # fp32: a few units in the last place


@pytest.mark.parametrize(("backend", "device"), TORCH)
@pytest.mark.parametrize("name", [*CASES, *FORMULAS, *ONLY_TORCH])
def test_fp64_equals_the_reference(name: str, backend: str, device: str) -> None:
    assert hasattr(torch.empty, "poisoned")  # uninitialised memory is NaN here
    case = (CASES | FORMULAS | ONLY_TORCH)[name]
    inputs = case.draw_inputs(torch.float64, device)
    grad_RH = torch.randn_like(inputs[0])
    got = _run_ours(case, inputs, grad_RH, backend)
    _assert_same(got, _compute_truth(case, inputs, grad_RH), 1e-12)


@pytest.mark.parametrize(
    "name",
    ["silu, bias", "gpt-oss", "gelu", "gelu_tanh", "no gate, relu2", "soft caps, interleaved"],
)
def test_gradients_pass_gradcheck(name: str) -> None:
    case = (FORMULAS | ONLY_TORCH)[name]
    inputs = case.draw_inputs(torch.float64)
    # Finite differences must not step over a kink of relu or clamp. Rounded rows prevent this.
    inputs[0] = inputs[0].round(decimals=1)
    leaves = [x.requires_grad_() for x in inputs if x is not None]

    def fn(rows_RH: Tensor, weights_RK: Tensor, *experts: Tensor) -> Tensor:
        up, up_bias, down, down_bias = (
            experts if case.bias else (experts[0], None, experts[1], None)
        )
        weights = ExpertWeights(up, up_bias, down, down_bias)
        counts_L = case.counts_L()
        return expert_mlp(
            rows_RH, case.ids_RK(), weights_RK, weights, case.formula, counts_L=counts_L
        )

    assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)


# The interpreter needs seconds per case. It runs all formulas in fp32 and one formula in fp16. The
# cases with other formulas than these two are marked slow.
FAST_INTERPRETED = {"silu", "gpt-oss"}
LOW_PRECISION = [
    *((name, backend, device, dtype) for name in FORMULAS for backend, device, dtype in [
        ("torch", "cpu", torch.float32),
        ("torch", "cpu", torch.bfloat16),
        ("torch", "cpu", torch.float16),
        ("triton", "cpu", torch.float32),
        ("triton", "cuda", torch.float32),
        ("triton", "cuda", torch.bfloat16),
        ("triton", "cuda", torch.float16),
    ]),
    ("gpt-oss", "triton", "cpu", torch.float16),
]  # fmt: skip


def _make_low_precision_case(name: str, backend: str, device: str, dtype: torch.dtype):
    marks = [pytest.mark.gpu] if device == "cuda" else []
    more = device == "cpu" and (backend, dtype) != ("torch", torch.bfloat16)
    if more and name not in FAST_INTERPRETED:
        marks.append(pytest.mark.slow)
    label = f"{name}-{backend}-{device}-{str(dtype).removeprefix('torch.')}"
    return pytest.param(name, backend, device, dtype, marks=marks, id=label)


@pytest.mark.parametrize(
    ("name", "backend", "device", "dtype"),
    [_make_low_precision_case(*case) for case in LOW_PRECISION],
)
def test_low_precision_is_no_worse_than_plain_torch(
    name: str, backend: str, device: str, dtype: torch.dtype
) -> None:
    """The error against fp64 is at most twice the error of the reference in the same dtype."""
    if backend == "triton" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("the real kernels run instead of the interpreter")
    case = FORMULAS[name]
    # The budget comes from the largest error of several draws, because the error of one draw varies
    # too much. A clamp needs more draws: rounding can move a value over the limit, where the
    # gradient jumps to zero.
    draws = [_draw(case, dtype, device) for _ in range(30 if case.formula.clamped else 6)]
    errors = [
        _measure_errors(_run(reference.expert_mlp, case, *draw), truth) for *draw, truth in draws
    ]
    budget = {tensor: 2 * max(error[tensor] for error in errors) for tensor in errors[0]}
    if name == "gpt-oss in halves":
        # The gradient of a routing weight is a sum over F in expert_mlp, and over H in the
        # reference. Because of up_offset the terms over F are larger and cancel. In 30 draws the
        # error of expert_mlp was at most 2.9 times as large as the error of the reference.
        budget["weights"] *= 2
    inputs, grad_RH, truth = draws[0]
    for weights_dtype in {dtype, torch.float32} if backend == "torch" else {torch.float32}:
        inputs[1] = inputs[1].to(weights_dtype)
        got = _run_ours(case, inputs, grad_RH, backend)
        assert got[0].dtype == dtype
        assert all(grad is None or grad.dtype == x.dtype for grad, x in zip(got[1], inputs))
        for tensor, error in _measure_errors(got, truth).items():
            assert error <= budget[tensor], f"{tensor}: {error:.2e} > {budget[tensor]:.2e}"


def _draw(case: Case, dtype: torch.dtype, device: str):
    inputs = case.draw_inputs(dtype, device)
    grad_RH = torch.randn_like(inputs[0])
    return inputs, grad_RH, _compute_truth(case, inputs, grad_RH)


def _measure_errors(got, truth) -> dict[str, float]:
    pairs = zip(("out", *NAMES), (got[0], *got[1]), (truth[0], *truth[1]))
    return {name: max_error(mine, true) for name, mine, true in pairs if true is not None}


@pytest.mark.parametrize(("backend", "device"), TRITON)
@pytest.mark.parametrize("name", CASES)
def test_triton_equals_the_reference_on_edge_cases(name: str, backend: str, device: str) -> None:
    case = CASES[name]
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    got = _run_ours(case, inputs, grad_RH, backend)
    _assert_same(got, _compute_truth(case, inputs, grad_RH), 2e-6)  # fp32 sums of up to 23 products


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_counts_may_be_left_out_if_every_pair_has_an_expert(backend: str, device: str) -> None:
    case = Case([[1, 0], [2, 1], [0, 2], [1, 2]], 3)
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    want = _run_ours(case, inputs, grad_RH, backend)
    _assert_equal(_run_ours(case, inputs, grad_RH, backend, counts_L=None), want)


# Flags of the inputs that need a gradient, in the order of NAMES. A matrix and its bias have the
# same flag.
WANTED = [
    (rows, weights, up, up, down, down)
    for rows, weights, up, down in itertools.product([0, 1], repeat=4)
]
FEW_WANTED = [(1, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0), (0, 0, 1, 0, 0, 1), (0, 0, 0, 1, 1, 0)]


@pytest.mark.parametrize(
    ("backend", "device", "wanted"),
    [
        *[("torch", "cpu", wanted) for wanted in WANTED],
        *[pytest.param(*p.values, wanted, marks=p.marks) for p in TRITON for wanted in FEW_WANTED],
    ],
)
def test_frozen_inputs_get_no_gradient_and_change_no_other_gradient(
    backend: str, device: str, wanted: tuple[int, ...]
) -> None:
    case = Case(draw_ids(9, 2, 3, seed=3), 3, 11, 7, GPT_OSS, bias=True)
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    want, want_grads = _run_ours(case, inputs, grad_RH, backend)
    got, got_grads = _run_ours(case, inputs, grad_RH, backend, wanted)
    # NumPy computes interpreted products, and its rounding depends on a tile's place in memory.
    is_interpreted = (backend, device) == ("triton", "cpu")
    tolerance = {} if is_interpreted else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(got, want, **tolerance)
    for name, flag, got_grad, want_grad in zip(NAMES, wanted, got_grads, want_grads):
        if flag:
            torch.testing.assert_close(got_grad, want_grad, **tolerance)
        else:
            assert got_grad is None, name


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_recomputed_pre_activations_change_no_bit(backend: str, device: str) -> None:
    case = Case(draw_ids(9, 2, 3, seed=3), 3, 11, 7, GPT_OSS, bias=True)
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    want = _run_ours(case, inputs, grad_RH, backend)
    _assert_equal(_run_ours(case, inputs, grad_RH, backend, recompute=True), want)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_a_call_without_output_has_the_same_gradients(
    backend: str, device: str, recompute: bool
) -> None:
    """The output is not computed, so it keeps the values of its memory."""
    for ids_RK in (draw_ids(9, 2, 3, seed=3), [[3, 3]] * 4):  # the second has no pairs
        case = Case(ids_RK, 3, 11, 7, GPT_OSS, bias=True)
        inputs = case.draw_inputs(torch.float32, device)
        grad_RH = torch.randn_like(inputs[0])
        kw = {"recompute": recompute, "counts_L": case.counts_L()}
        want, want_grads = _run_ours(case, inputs, grad_RH, backend, **kw)
        _, got_grads = _run_ours(case, inputs, grad_RH, backend, skip_output=True, **kw)
        _assert_equal((want, got_grads), (want, want_grads))


@pytest.mark.parametrize("wanted", [(1, 1, 1, 1, 1, 1), (1, 1, 1, 0, 0, 0), (0, 1, 0, 0, 1, 1)])
@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_postponed_gradients_of_the_experts_have_the_same_bits(
    backend: str, device: str, wanted: tuple[int, ...]
) -> None:
    for ids_RK in (draw_ids(9, 2, 3, seed=3), [[3, 3]] * 4):  # the second has no pairs
        case = Case(ids_RK, 3, 11, 7, GPT_OSS, bias=True)
        inputs = case.draw_inputs(torch.float32, device)
        grad_RH = torch.randn_like(inputs[0])
        kw = {"counts_L": case.counts_L(), "backend": backend}

        def run_postponed(
            rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, experts, formula, **kw
        ):
            return expert_mlp(rows_RH, ids_RK, weights_RK, postpone_grads(experts), formula, **kw)

        got = _run(run_postponed, case, inputs, grad_RH, wanted, **kw)
        _assert_equal(got, _run(expert_mlp, case, inputs, grad_RH, wanted, **kw))


class _SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _SeenCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seen", [_SeenOperators(), _SeenCalls()], ids=["operators", "calls"])
def test_modes_see_one_operator_or_nothing_of_a_call_that_postpones_gradients(seen: Any) -> None:
    """Without a mode, the implementation is called without the operator.

    Selective checkpointing needs the operator. A function mode must not see what computes it, such
    as the sort of the pairs.
    """
    case = Case(draw_ids(9, 2, 3, seed=3), 3, 11, 7, GPT_OSS, bias=True)
    inputs = case.draw_inputs(torch.float32)
    grad_RH = torch.randn_like(inputs[0])
    kw = {"counts_L": case.counts_L(), "backend": "torch"}

    def run_in_mode(rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, experts, formula, **kw):
        experts = postpone_grads(experts)
        with seen:
            return expert_mlp(rows_RH, ids_RK, weights_RK, experts, formula, **kw)

    got = _run(run_in_mode, case, inputs, grad_RH, (1,) * 6, **kw)
    _assert_equal(got, _run(expert_mlp, case, inputs, grad_RH, (1,) * 6, **kw))
    assert "argsort" not in " ".join(seen.names)
    if isinstance(seen, _SeenOperators):
        assert seen.names.count("hf_moe_ep.expert_mlp.default") == 1


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_grad_scale_multiplies_the_gradients_of_experts_alone(backend: str, device: str) -> None:
    case = Case(draw_ids(9, 2, 3, seed=3), 3, 11, 7, bias=True)
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    plain = _run_ours(case, inputs, grad_RH, backend)
    scaled = _run_ours(case, inputs, grad_RH, backend, scale=0.125)  # a power of two: exact
    factors = (1, 1, *[0.125] * 4)
    want = [factor * grad for factor, grad in zip(factors, plain[1])]
    _assert_equal(scaled, (plain[0], want))


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_strided_inputs_give_the_same_results(backend: str, device: str) -> None:
    case = Case(draw_ids(9, 2, 3, seed=3), 3, 11, 7, bias=True)
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    want = _run_ours(case, inputs, grad_RH, backend)

    def check(inputs: list[Tensor], grad_RH: Tensor = grad_RH) -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]  # a clone would lose the strides
        experts = ExpertWeights(*leaves[2:])
        kw = {"counts_L": case.counts_L(), "backend": backend}
        ids_RK = case.ids_RK(device)
        out_RH = expert_mlp(leaves[0], ids_RK, leaves[1], experts, case.formula, **kw)
        out_RH.backward(grad_RH)
        _assert_same((out_RH.detach(), [leaf.grad for leaf in leaves]), want, 2e-6)  # fp32

    transposed, with_gaps = zip(*map(restride, inputs))
    assert not any(x.is_contiguous() for x in (*transposed, *with_gaps))
    check(transposed)
    check(with_gaps)
    check(inputs, grad_RH.t().contiguous().t())
    want = _run_ours(case, inputs, torch.ones_like(grad_RH), backend)
    check(inputs, grad_RH.new_ones(1, 1).expand_as(grad_RH))  # strides of 0


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_rows_without_experts_change_no_result(backend: str, device: str) -> None:
    """A row or routing weight may be NaN if it belongs to no expert of this rank."""
    case = Case([[0, 1], [2, 2], [1, 2]], 2)
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    want = _run_ours(case, inputs, grad_RH, backend)
    poisoned = [None if x is None else x.clone() for x in inputs]
    poisoned[0][1] = poisoned[1][1] = poisoned[1][2, 1] = float("nan")
    grad_RH[1] = float("nan")
    got = _run_ours(case, poisoned, grad_RH, backend)
    _assert_equal(got, want)
    assert torch.equal(got[0][1], torch.zeros_like(got[0][1]))


@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_a_call_repeats_bit_for_bit(backend: str, device: str) -> None:
    case = FORMULAS["silu, bias"] if backend == "torch" else CASES["random"]
    case = FORMULAS["gpt-oss"] if device == "cuda" else case
    inputs = case.draw_inputs(torch.float32, device)
    grad_RH = torch.randn_like(inputs[0])
    first = _run_ours(case, inputs, grad_RH, backend)
    for _ in range(9 if backend == "torch" or device == "cuda" else 1):
        _assert_equal(_run_ours(case, inputs, grad_RH, backend), first)


def _count_saved_bytes(fn, parameters: list[Tensor]) -> int:
    """Count the bytes that `fn` saves for backward.

    Tensors that share a storage are counted once. Parameters are not counted.
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[id(storage) if storage.device.type == "meta" else storage.data_ptr()] = (
            storage.nbytes()
        )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fn()
    out.sum().backward()
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    assert own <= saved.keys()  # parameters are saved without a copy
    return sum(size for address, size in saved.items() if address not in own)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("backend", "device"), BOTH)
@pytest.mark.parametrize("name", ["random", "empty experts"])
def test_only_rows_pre_activations_and_routing_are_saved_for_backward(
    name: str, backend: str, device: str, recompute: bool
) -> None:
    case = CASES[name]
    inputs = [
        x if x is None else x.requires_grad_() for x in case.draw_inputs(torch.float16, device)
    ]
    rows_RH, weights_RK, *experts = inputs
    weights_RK = weights_RK.detach().float().requires_grad_()
    kw = {"counts_L": case.counts_L(), "backend": backend, "recompute": recompute}
    ids_RK = case.ids_RK(device)
    got = _count_saved_bytes(
        lambda: expert_mlp(
            rows_RH, ids_RK, weights_RK, ExpertWeights(*experts), case.formula, **kw
        ),
        [experts[0], experts[2]],
    )
    (num_rows, top_k), pairs = weights_RK.shape, sum(case.counts_L())
    half, word = 2, 4  # bytes of fp16, and of fp32 or int32
    # The largest number of tiles (expert, start). A tile has 16 rows on a CPU and 64 on a GPU.
    tiles = pairs // (16 if device == "cpu" else 64) + min(case.num_experts, pairs)
    want = {
        "rows": num_rows * case.hidden * half,
        "pre-activations": 0 if recompute else pairs * 2 * case.ffn * half,
        "routing weights": num_rows * top_k * word,
        "sorted pairs": pairs * word,
        "rows of the sorted pairs": pairs * word if backend == "triton" else 0,
        "positions": num_rows * top_k * word,
        "offsets": (case.num_experts + 1) * word,
        "tiles": tiles * 2 * word if backend == "triton" else 0,
    }
    assert got == sum(want.values()), (got, want)


@pytest.mark.parametrize("adapted_by", [0, 16])
@pytest.mark.parametrize(("recompute", "limit"), [(False, 28_800), (True, 4_300)])
def test_saved_bytes_stay_below_a_limit_at_the_shape_of_qwen3_30b(
    recompute: bool, limit: int, adapted_by: int
) -> None:
    """At this shape transformers' grouped_mm saves 114,688 bytes per token.

    grouped_mm saves five tensors for each of the token's 8 pairs: the gathered row, the
    pre-activations, the silu, the activation and the output. With adapters on frozen weights the
    limits are the same, because backward recomputes the first product of each adapter (rows times
    a).
    """
    tokens, top_k, hidden, ffn, num_experts = 128, 8, 2048, 768, 128

    # All experts share the memory of one expert: 9 MiB instead of 1.2 GB.
    def stack_one(*shape: int, trained: bool) -> Tensor:
        one = torch.zeros(1, *shape, dtype=torch.bfloat16).requires_grad_(trained)
        own.add(one.data_ptr())
        return one.expand(num_experts, -1, -1)

    own: set[int] = set()
    shapes = {"up": (2 * ffn, hidden), "down": (hidden, ffn)}
    tensors = {name: stack_one(*shapes[name], trained=not adapted_by) for name in shapes}
    for name, (out_size, in_size) in shapes.items() if adapted_by else ():
        tensors[f"{name}_a"] = stack_one(adapted_by, in_size, trained=True)
        tensors[f"{name}_b"] = stack_one(out_size, adapted_by, trained=True)
    experts = ExpertWeights(**tensors, up_bias=None, down_bias=None)
    rows_RH = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    weights_RK = torch.rand(tokens, top_k).requires_grad_()
    ids_RK = torch.rand(tokens, num_experts).argsort(1)[:, :top_k]
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expert_mlp(rows_RH, ids_RK, weights_RK, experts, ExpertFormula(), recompute=recompute)
    per_token = sum(size for address, size in saved.items() if address not in own) / tokens
    assert 4096 < per_token <= limit


LAYOUTS = {"contiguous": lambda x: x, "transposed": lambda x: restride(x)[0]}
LAYOUTS["with gaps"] = lambda x: restride(x)[1]


@pytest.mark.parametrize(
    "layout",
    [
        "with gaps",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("contiguous", "transposed")),
    ],
)
@pytest.mark.parametrize(("backend", "device"), BOTH)
def test_the_operators_pass_opcheck_of_torch_library(
    backend: str, device: str, layout: str
) -> None:
    """The fake outputs have the shapes and strides of the real outputs, for all strides of inputs.

    No output shares memory with an input, and autograd is registered.
    """
    case = Case(draw_ids(9, 2, 3, seed=3), 3, 11, 7, GPT_OSS, bias=True, transposed=True)
    in_layout = LAYOUTS[layout]

    def make_leaf(x: Tensor) -> Tensor:
        return in_layout(x).detach().requires_grad_()

    rows, weights, *experts = [make_leaf(x) for x in case.draw_inputs(torch.float32, device)]
    assert rows.is_contiguous() == weights.is_contiguous() == (layout == "contiguous")
    named = draw_with_adapters(case, 2, torch.float32, device)
    tensors = [*experts, *(make_leaf(named[name]) for name in ADAPTERS)]
    inputs = [rows, weights, *tensors, *[None] * (len(WEIGHT_NAMES) - len(tensors))]
    inf = math.inf
    numbers = (1.702, 1.5, 1.0, inf, inf, 0.5, 2.0, 0.5)  # GPT_OSS
    flags = (True, True, True, False)
    settings = Settings(*flags, *numbers, "swish", "", backend, ()).arguments()
    args = (*inputs, in_layout(case.ids_RK(device)), case.counts_L(), *settings)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.hf_moe_ep.expert_mlp.default, args, test_utils=tests)
    out, *saved = torch.ops.hf_moe_ep.expert_mlp(*args)
    saved = [None if x is None else x.detach() for x in (*inputs, *saved)]
    pairs = zip(INPUT_NAMES, inputs, strict=True)
    needs = [x is not None and name != "up_bias" for name, x in pairs]
    backward_args = (in_layout(torch.randn_like(out)), saved, needs, *settings)
    tests = ("test_schema", "test_faketensor")
    backward = torch.ops.hf_moe_ep.expert_mlp_backward.default
    torch.library.opcheck(backward, backward_args, test_utils=tests)


def test_compiled_without_a_graph_break_equals_eager() -> None:
    case = Case([[1, 0], [2, 1], [0, 2], [1, 2]], 3, hidden=8, ffn=4)
    inputs = case.draw_inputs(torch.float32)
    grad_RH = torch.randn_like(inputs[0])
    compiled = torch.compile(expert_mlp, fullgraph=True, backend="aot_eager")
    want = _run_ours(case, inputs, grad_RH, "torch", counts_L=None)
    _assert_equal(_run(compiled, case, inputs, grad_RH), want)


def test_one_compiled_function_takes_several_scales() -> None:
    """If a number changes between calls, torch.compile turns it into an input of its graph.

    One compiled function therefore serves layers with different scales.
    """
    case = Case([[1, 0], [2, 1], [0, 2], [1, 2]], 3, hidden=8, ffn=4)
    inputs = case.draw_inputs(torch.float32)
    grad_RH = torch.randn_like(inputs[0])
    compiled = torch.compile(expert_mlp, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 1 / 3):
        want = _run_ours(case, inputs, grad_RH, "torch", counts_L=None, scale=scale)
        _assert_equal(_run(compiled, case, inputs, grad_RH, grad_scale=scale), want)


def test_autocast_does_not_change_backward() -> None:
    """Rows are bf16 and routing weights fp32, as under expert parallelism."""
    torch.manual_seed(0)
    rows = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(5, 2, requires_grad=True)
    ids = torch.tensor([[0, 1]]).expand(5, 2)
    up, down = torch.randn(2, 12, 8).bfloat16(), torch.randn(2, 8, 6).bfloat16()
    grads = []
    for enabled in (False, True):
        out = expert_mlp(rows, ids, weights, ExpertWeights(up, None, down, None), ExpertFormula())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(out.float().square().sum(), (rows, weights)))
    for plain, under_autocast in zip(*grads, strict=True):
        assert torch.equal(plain, under_autocast)
