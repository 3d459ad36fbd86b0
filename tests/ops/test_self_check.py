"""The self-check accepts right kernels, refuses wrong ones, and names the reason of a failed build.

The kernels run in Triton's interpreter. A test without a GPU compares the kernels that an H100
would launch with the kernels that the self-check runs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from launches import Launches
from support.close import assert_close
from torch import Tensor

from hf_moe_ep.ops import self_check, sum_check, torch_mlp, triton_mlp
from hf_moe_ep.ops.expert_mlp import expert_mlp, postpone_grads
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertGrads, ExpertWeights
from hf_moe_ep.ops.kernels import blocks, dgated, gate_up, grouped_mm, outer
from hf_moe_ep.ops.kernels.reduce import combine
from hf_moe_ep.ops.quantised import Quantisation, allocate_stack
from hf_moe_ep.ops.self_check import Kind, check_once
from hf_moe_ep.ops.sum_check import (
    TokenSumKind,
    check_sums_once,
    compare_token_sums,
    self_check_sums,
)

MATRICES = ("up", "down")
ADAPTERS = ("up_a", "up_b", "down_a", "down_b")
KIND = Kind(
    torch.device("cpu"),
    torch.float32,
    torch.float32,
    "ieee",
    ExpertFormula(),
    tensors=("up", "up_bias", "down", "down_bias"),
    trained=("rows", "weights", "up", "up_bias", "down", "down_bias"),
    keep_pre=True,
    transposed=False,
    top_k=2,
    num_experts=3,
    hidden=32,
    ffn=16,
    few=True,
)
FROZEN = KIND._replace(tensors=MATRICES, trained=("rows", "weights"))
LORA = FROZEN._replace(
    tensors=(*MATRICES, *ADAPTERS), trained=("rows", "weights", *ADAPTERS), ranks=(2, 3)
)
INFERENCE = FROZEN._replace(trained=(), keep_pre=False)
RECOMPUTED = FROZEN._replace(keep_pre=False)
SCALES = ("up_block_scale", "down_block_scale")
BYTES = FROZEN._replace(
    tensors=(*MATRICES, *SCALES), top_k=1, num_experts=2, hidden=64, ffn=64, quantised="nf4"
)
KINDS = {"base": KIND, "chunks": LORA._replace(wide=True), "frozen": FROZEN, "lora": LORA}
KINDS |= {"inference": INFERENCE, "recomputed": RECOMPUTED}


@pytest.fixture(autouse=True)
def _clear_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    check_once.cache_clear()
    self_check.check_both_sizes.cache_clear()
    check_sums_once.cache_clear()
    self_check.warn_once.cache_clear()
    # Three tiles per expert, instead of sixteen, take a tenth of the time.
    monkeypatch.setattr(self_check, "FEW_ROWS", 32)
    monkeypatch.setattr(self_check, "MANY_ROWS", 63)
    monkeypatch.setattr(self_check, "_shorten", lambda size: 16 + size % 16)


@pytest.mark.parametrize(
    "name",
    [name if name == "lora" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS],
)
def test_right_kernels_pass(name: str) -> None:
    assert check_once(KINDS[name]) == ""


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_right_kernels_of_fewer_experts_than_choices_pass(num_experts: int, top_k: int) -> None:
    """A rank of Mixtral at ep 8 has one expert, and routings with two columns."""
    kind = INFERENCE._replace(trained=("weights",), num_experts=num_experts, top_k=top_k)
    assert check_once(kind) == ""


def test_wrong_scales_of_quantised_matrices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right scales pass, although bitsandbytes is missing. Scales in another order are refused."""
    monkeypatch.setattr(self_check, "_shorten", lambda size: size)
    monkeypatch.setattr(self_check, "FEW_ROWS", 8)
    monkeypatch.setattr(self_check, "MANY_ROWS", 15)
    monkeypatch.setattr("hf_moe_ep.ops.quantised._import_bitsandbytes", None)
    assert check_once(BYTES) == ""
    check_once.cache_clear()
    original = triton_mlp._select_matrices

    def compute_wrong(experts: ExpertWeights, name: str) -> Any:
        matrices = original(experts, name)
        return replace(matrices, scale=matrices.scale.flip(1)) if name == "down" else matrices

    monkeypatch.setattr(triton_mlp, "_select_matrices", compute_wrong)
    with pytest.raises(RuntimeError, match="compute wrong numbers"):
        check_once(BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_right_kernels_of_quantised_matrices_pass(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16 the self-check must round dequantised values as the kernels do."""
    monkeypatch.setattr(self_check, "_shorten", lambda size: size)
    size = {"nf4": 64, "fp8": 128}[kind]
    frozen = FROZEN._replace(tensors=(*MATRICES, *SCALES), dtype=torch.float16, quantised=kind)
    assert check_once(frozen._replace(hidden=size, ffn=size)) == ""


def _break_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str, when: Callable[[dict[str, Any]], bool]
) -> None:
    """Make one element of a launcher's output wrong if `when(arguments)` is true."""
    owners = {"combine alone": self_check, "combine of tokens": sum_check}
    owner = owners.get(name, triton_mlp)
    name, *_ = name.split()
    original = getattr(owner, name)

    def compute_wrong(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if when(kwargs | dict(enumerate(args))):
            first = out[0] if isinstance(out, tuple) else out
            first = args[2] if first is None else first
            first.view(-1)[3] += 10
        return out

    monkeypatch.setattr(owner, name, compute_wrong)


@pytest.mark.parametrize(
    "kernel",
    [
        "up",
        "combine alone",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("grouped_mm", "thin_mm", "dgated", "outer", "combine")
        ),
    ],
)
def test_one_wrong_element_of_any_kernel_is_refused(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_kernel(monkeypatch, kernel, lambda arguments: True)
    with pytest.raises(
        RuntimeError, match=r"compute wrong numbers on cpu.*experts_backend='torch'"
    ):
        check_once(LORA if kernel == "thin_mm" else KIND)


# name: (kernel, condition for a launch that is wrong, a kind with such launches, a kind without)
VARIANTS = {
    "a frozen base": ("dgated", lambda x: not x["need_act"], FROZEN, KIND),
    "inference": ("up", lambda x: not x["keep_pre"], INFERENCE, FROZEN),
    "recomputed": ("up", lambda x: not x["keep_pre"], RECOMPUTED, FROZEN),
    "a later chunk": ("outer", lambda x: x["add"], KIND._replace(wide=True), KIND),
    "16-bit routing weights": (
        "combine",
        lambda x: x[2] is not None and x[2].dtype == torch.float16,
        INFERENCE._replace(dtype=torch.float16, weights_dtype=torch.float16),
        INFERENCE._replace(dtype=torch.float16),
    ),
}


@pytest.mark.parametrize(
    "name", ["a frozen base", *(pytest.param(x, marks=pytest.mark.slow) for x in [*VARIANTS][1:])]
)
def test_a_wrong_variant_is_refused_only_for_calls_that_launch_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, when, kind_with, kind_without = VARIANTS[name]
    _break_kernel(monkeypatch, kernel, when)
    assert check_once(kind_without) == ""
    with pytest.raises(RuntimeError, match="compute wrong numbers"):
        check_once(kind_with)


def _round_to_tf32(x: Tensor) -> Tensor:
    """Round x to the 10 mantissa bits of TF32."""
    return ((x.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def test_tf32_products_are_refused_if_exact_products_are_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = triton_mlp.grouped_mm

    def round_and_multiply(
        rows_AI: Tensor, matrix_LIO: Tensor, *args: Any, **options: Any
    ) -> Tensor:
        return original(
            _round_to_tf32(rows_AI), _round_to_tf32(matrix_LIO.contiguous()), *args, **options
        )

    monkeypatch.setattr(triton_mlp, "grouped_mm", round_and_multiply)
    assert check_once(KIND._replace(precision="tf32")) == ""
    with pytest.raises(RuntimeError, match="compute wrong numbers"):
        check_once(KIND)


def test_wrong_sums_of_the_rows_of_a_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows per token is not top_k, so these sums have their own check."""
    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    self_check_sums(torch.empty(9, 48, dtype=torch.bfloat16), 4, torch.bfloat16)
    self_check_sums(torch.empty(9, 64, dtype=torch.bfloat16)[:, :48], 4, torch.float32)
    _break_kernel(monkeypatch, "combine of tokens", lambda x: x[1].shape[1] == 5)
    assert check_once(KIND) == ""
    with pytest.raises(
        RuntimeError, match=r"compute wrong numbers on cpu.*in sums .*rows_per_sum=5"
    ):
        self_check_sums(torch.empty(9, 48, dtype=torch.bfloat16), 5, torch.bfloat16)


def _make_experts(hidden: int, rank: int | None = None) -> ExpertWeights:
    up_LGH, down_LHF = torch.empty(4, 64, hidden), torch.empty(4, hidden, 32)
    experts = ExpertWeights(up_LGH, None, down_LHF, None)
    if rank:
        a_LPF, b_LHP = torch.empty(4, rank, 32), torch.empty(4, hidden, rank)
        experts = replace(experts, down_a=a_LPF, down_b=b_LHP)
    return experts


def test_the_self_check_runs_once_per_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls have different kinds if Triton would build different kernels for them."""
    kinds: list[Kind] = []
    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    monkeypatch.setattr(self_check, "check_once", kinds.append)

    def record_kind(
        hidden: int = 2048,
        pairs: int = 5000,
        rank: int | None = None,
        dtype: torch.dtype = torch.float32,
        trained: tuple[str, ...] = (),
        keep_pre: bool = True,
    ) -> Kind:
        experts = _make_experts(hidden, rank)
        rows_RH, weights_RK = torch.empty(7, hidden), torch.empty(7, 2, dtype=dtype)
        args = (rows_RH, weights_RK, pairs, experts, ExpertFormula())
        self_check.self_check(*args, keep_pre=keep_pre, trained=trained)
        return kinds[-1]

    assert record_kind(pairs=4000) == record_kind()
    others = [
        record_kind(),
        record_kind(hidden=2064),
        record_kind(pairs=20),
        record_kind(rank=8),
        record_kind(rank=16),
        record_kind(dtype=torch.bfloat16),
        record_kind(trained=("rows",)),
        record_kind(keep_pre=False),
    ]
    monkeypatch.setattr(self_check, "get_dot_precision", lambda rows: "tf32")
    others.append(record_kind())
    assert len(set(others)) == len(others)


def test_the_first_call_checks_the_kernels_for_few_and_for_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a rank would build kernels later, when its number of rows per expert changes."""
    kinds: list[Kind] = []
    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    monkeypatch.setattr(self_check, "check_once", lambda kind: kinds.append(kind) or "")
    experts = _make_experts(2048)
    for pairs in (5000, 20):
        rows_RH, weights_RK = torch.empty(7, 2048), torch.empty(7, 2)
        args = (rows_RH, weights_RK, pairs, experts, ExpertFormula())
        assert self_check.self_check(*args, keep_pre=True, trained=()) == ""
        assert {kind.few for kind in kinds} == {False, True}, pairs
    assert len({kind._replace(few=False) for kind in kinds}) == 1


def _run_call(backend: str, grads: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(7, 32), torch.rand(7, 2), torch.randn(4, 64, 32), torch.randn(4, 32, 32)]
    leaves = [x.requires_grad_(grads) for x in leaves]
    rows_RH, weights_RK, up_LGH, down_LHF = leaves
    experts = ExpertWeights(up_LGH, None, down_LHF, None)
    ids_RK = torch.tensor([[0, 1], [2, 3], [1, 4], [3, 1], [2, 0], [4, 4], [0, 3]])
    counts_L = [3, 3, 2, 3]
    args = (rows_RH, ids_RK, weights_RK, experts, ExpertFormula())
    out_RH = expert_mlp(*args, counts_L=counts_L, backend=backend)
    if not grads:
        return [out_RH]
    return [out_RH.detach(), *torch.autograd.grad(out_RH.square().sum(), leaves)]


UNBUILT = {
    "no room": triton.OutOfResources(147_456, 101_376, "shared memory"),
    "does not compile": RuntimeError("PassManager::run failed"),
}


@pytest.mark.parametrize("name", UNBUILT)
@pytest.mark.parametrize("kernel", ["up", "dgated", "sort_pairs"])
def test_torch_computes_the_experts_if_kernels_cannot_be_built(
    kernel: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend "auto" warns once and uses torch, and the backend "triton" raises an error."""
    want = _run_call("torch")

    def fail_to_build(*args: Any, **kwargs: Any) -> Any:
        raise UNBUILT[name]

    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    monkeypatch.setattr(triton_mlp, kernel, fail_to_build)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            got = _run_call("auto")
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
            _run_call("auto", grads=False) if kernel != "dgated" else None
    # The interpreter of Triton 3.6 raises NumPy warnings.
    messages = (str(warning.message) for warning in caught)
    (message,) = (message for message in messages if "hf_moe_ep" in message)
    reason = str(UNBUILT[name])
    assert reason in message and "torch path" in message
    with pytest.raises(RuntimeError, match="experts_backend='triton' cannot run here") as error:
        _run_call("triton")
    assert reason in str(error.value)


def test_the_backward_of_chunks_is_checked_before_its_first_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the kernels cannot add up the gradients of chunks, torch computes the backward."""
    kinds: list[Kind] = []

    def check(kind: Kind) -> str:
        kinds.append(kind)
        return "no sums" if kind.wide else ""

    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    monkeypatch.setattr(self_check, "check_both_sizes", check)
    monkeypatch.setattr(triton_mlp, "outer", None)  # calling it is an error

    def compute_grads(backend: str, num_chunks: int) -> list[Tensor]:
        torch.manual_seed(0)
        rows_RH, weights_RK = torch.randn(6, 32), torch.rand(6, 2)
        leaves = [torch.randn(4, 64, 32), torch.randn(4, 32, 32)]
        up_LGH, down_LHF = leaves = [x.requires_grad_() for x in leaves]
        experts, outs = ExpertWeights(up_LGH, None, down_LHF, None), []
        ids_RK = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 1], [2, 0], [1, 3]])
        for part in torch.arange(6).chunk(num_chunks):
            experts = postpone_grads(experts)
            args = (rows_RH[part], ids_RK[part], weights_RK[part], experts, ExpertFormula())
            outs.append(expert_mlp(*args, backend=backend))
        return list(torch.autograd.grad(torch.cat(outs).square().sum(), leaves))

    with pytest.warns(UserWarning, match=r"on the torch path.*no sums"):
        got = compute_grads("auto", 2)
    for name, grad, want in zip(MATRICES, got, compute_grads("torch", 2), strict=True):
        assert_close(name, grad, want, 1e-5)  # pre-activations differ by roundings of fp32
    assert {kind.wide for kind in kinds} == {False, True}
    kinds.clear()
    with pytest.raises(TypeError):
        compute_grads("auto", 1)
    assert {kind.wide for kind in kinds} == {False}


@pytest.mark.slow
def test_auto_uses_the_kernels_if_they_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    got, want = _run_call("auto"), _run_call("torch")
    assert not torch.equal(got[0], want[0])  # equal bits would mean that torch computed both
    torch.testing.assert_close(got, _run_call("triton"))


def test_out_of_memory_in_the_self_check_is_raised_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton_mlp, "up", raise_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        check_once(KIND)


REAL = KIND._replace(
    dtype=torch.bfloat16, top_k=8, num_experts=128, hidden=2048, ffn=768, few=False
)
# The kinds of calls that training and inference make.
LAUNCHED = {
    "trained": REAL._replace(tensors=MATRICES, trained=("rows", "weights", *MATRICES)),
    "biases": REAL,
    "few rows": REAL._replace(few=True),
    # 260 rows per expert.
    "some rows": REAL._replace(num_experts=1024),
    # A rank of Mixtral at ep 8, and of Qwen3-30B at ep 32.
    "one expert, top-2": REAL._replace(num_experts=1, top_k=2),
    "four experts, top-8": REAL._replace(num_experts=4),
    "padded": REAL._replace(padded=True),
    "chunks": REAL._replace(wide=True),
    "chunks, lora": REAL._replace(
        tensors=(*MATRICES, *ADAPTERS),
        trained=("rows", "weights", *ADAPTERS),
        ranks=(16, 16),
        wide=True,
    ),
    "padded, transposed": REAL._replace(padded=True, transposed=True),
    "frozen": REAL._replace(tensors=MATRICES, trained=("rows", "weights")),
    "first layer, frozen": REAL._replace(tensors=MATRICES, trained=("weights",)),
    "inference": REAL._replace(tensors=MATRICES, trained=(), keep_pre=False),
    "recomputed": REAL._replace(keep_pre=False),
    "16-bit routing weights": REAL._replace(weights_dtype=torch.bfloat16),
    "lora": REAL._replace(
        tensors=(*MATRICES, *ADAPTERS),
        trained=("rows", "weights", *ADAPTERS),
        ranks=(16, 16),
    ),
    "odd sizes": REAL._replace(hidden=2064, ffn=784),
    "gpt-oss": REAL._replace(
        formula=ExpertFormula(interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0),
        transposed=True,
        top_k=4,
        num_experts=32,
        hidden=2880,
        ffn=2880,
    ),
    "fp32": REAL._replace(dtype=torch.float32),
    "nf4, lora": REAL._replace(
        tensors=(*MATRICES, *ADAPTERS, *SCALES),
        trained=("rows", "weights", *ADAPTERS),
        ranks=(16, 16),
        quantised="nf4",
    ),
    "fp8, frozen": REAL._replace(
        tensors=(*MATRICES, *SCALES), trained=("rows", "weights"), quantised="fp8"
    ),
    "nf4, sizes of gpt-oss": REAL._replace(
        tensors=(*MATRICES, *SCALES),
        trained=("rows", "weights"),
        hidden=2880,
        ffn=2880,
        quantised="nf4",
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_self_check_runs_every_kernel_variant_of_a_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches on an H100 are recorded without a GPU."""
    monkeypatch.undo()
    kind = LAUNCHED[name]
    monkeypatch.setattr(blocks, "generation", lambda device: "sm_90")
    for module in (blocks, dgated, gate_up, grouped_mm, outer):
        monkeypatch.setattr(module, "get_dot_precision", lambda rows: kind.precision)
    # Only the launches are compared, so the torch path computes nothing either.
    monkeypatch.setattr(self_check, "torch_mlp", _NoTruth())
    with Launches() as checked:
        for check in (
            self_check._compare_products,
            self_check._compare_routing,
            self_check._compare_sums,
        ):
            for few, wide in itertools.product((True, False), {False, kind.wide}):
                list(check(kind._replace(few=few, wide=wide, ffn=256 + kind.ffn % 256)))
    with Launches() as launched:
        _launch(kind)
    assert {"up_kernel", "combine_kernel"} <= launched.variants.keys()
    for kernel, variants in launched.variants.items():
        assert variants <= checked.variants[kernel], kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_self_check_runs_the_kernel_that_sums_the_rows_of_a_token(dtype: torch.dtype) -> None:
    """Rows are contiguous or have routing behind them, and sums are in their dtype or in fp32."""
    kind = TokenSumKind(torch.device("cpu"), dtype, 4, 2048)
    variants = []
    for columns, out_dtype in ((2048, dtype), (2080, dtype), (2048, torch.float32)):
        with Launches() as checked:
            list(compare_token_sums(replace(kind, row_stride=columns, out_dtype=out_dtype)))
        with Launches() as launched:
            rows_NH = torch.empty(1001, columns, dtype=dtype, device="meta")[:, :2048]
            row_TJ = torch.empty(333, 4, dtype=torch.int32, device="meta")
            combine(rows_NH, row_TJ, None, out_dtype)
        assert launched.variants == checked.variants
        variants.append(launched.variants)
    assert (variants[0] == variants[2]) == (dtype == torch.float32)


class _NoTruth:
    """Replaces the torch path. It computes the routing, but nothing else."""

    route = staticmethod(torch_mlp.route)

    @staticmethod
    def forward(rows_RH: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return rows_RH, rows_RH

    @staticmethod
    def backward(grad_RH: Tensor, *args: Any, need: set[str], **kwargs: Any) -> Any:
        return dict.fromkeys(need, grad_RH), (lambda sums: None) if kwargs["postpone"] else None


def _launch(kind: Kind) -> None:
    """Launch a call of this kind with its real sizes."""

    def allocate(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=kind.dtype, device="meta")

    def make_matrix(out_size: int, in_size: int) -> Tensor:
        shape = (in_size, out_size) if kind.transposed else (out_size, in_size)
        width = shape[1] + (16 if kind.padded else 0)
        values = allocate(kind.num_experts, shape[0], width)[..., : shape[1]]
        return values.mT if kind.transposed else values

    hidden, ffn, (up_rank, down_rank) = kind.hidden, kind.ffn, kind.ranks
    tensors = {
        "up": make_matrix(2 * ffn, hidden),
        "up_bias": allocate(kind.num_experts, 2 * ffn),
        "down": make_matrix(hidden, ffn),
        "down_bias": allocate(kind.num_experts, hidden),
        "up_a": allocate(kind.num_experts, up_rank, hidden),
        "up_b": allocate(kind.num_experts, 2 * ffn, up_rank),
        "down_a": allocate(kind.num_experts, down_rank, ffn),
        "down_b": allocate(kind.num_experts, hidden, down_rank),
    }
    for name in MATRICES if kind.quantised else ():
        stack = allocate_stack(tuple(tensors[name].shape), Quantisation(kind.quantised), "meta")
        tensors |= stack.by_name(name)
    named = dict.fromkeys(tensors) | {name: tensors[name] for name in kind.tensors}
    experts = ExpertWeights(**named, quantised=kind.quantised)
    rows = 333 if kind.few else 33_333
    rows_RH = allocate(rows, hidden)
    weights_RK = allocate(rows, kind.top_k).to(kind.weights_dtype)
    routing = triton_mlp.route(weights_RK.long(), None, experts, rows_RH)
    call = (rows_RH, weights_RK, experts, routing)
    out_RH, pre_AG = triton_mlp.forward(*call, kind.formula, kind.keep_pre)
    if kind.trained:
        pre_AG = pre_AG if kind.keep_pre else None
        options: dict[str, Any] = {"grad_scale": 0.5, "need": set(kind.trained)}
        options["postpone"] = kind.wide
        _, finish = triton_mlp.backward(out_RH, *call, pre_AG, kind.formula, **options)
        sums = ExpertGrads(wide=True)
        for _ in range(2 if finish else 0):
            finish(sums)
