"""The experts' SwiGLU over (row, expert) pairs: output and all four gradients, every edge."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from close import assert_close, max_error
from torch import Tensor

from hf_moe_ep.ops import reference
from hf_moe_ep.ops.expert_mlp import expert_mlp

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("rows", "weights", "gate_up", "down")


@dataclass
class Case:
    """ids_RK as a list; L experts; the rest is random. L is the id of "no expert here"."""

    ids: list[list[int]]
    num_experts: int
    hidden: int = 5
    ffn: int = 3

    def ids_RK(self, device: str = "cpu") -> Tensor:
        shape = (len(self.ids), len(self.ids[0]) if self.ids else 2)
        return torch.tensor(self.ids, dtype=torch.int64, device=device).reshape(shape)

    def counts_L(self) -> list[int]:
        flat = list(itertools.chain.from_iterable(self.ids))
        return [flat.count(expert) for expert in range(self.num_experts)]

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        rows, top_k = self.ids_RK().shape
        shapes = [
            (rows, self.hidden),
            (rows, top_k),
            (self.num_experts, 2 * self.ffn, self.hidden),
            (self.num_experts, self.hidden, self.ffn),
        ]
        values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        values[1] = values[1].abs() + 0.1
        return [value.to(device, dtype) for value in values]


def _random_ids(rows: int, top_k: int, num_experts: int, seed: int) -> list[list[int]]:
    """Distinct ids per row, a good part of them "not here"."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, 2 * num_experts, generator=generator).argsort(1)[:, :top_k]
    return order.clamp(max=num_experts).tolist()


CASES = {
    "docstring": Case([[1, 0], [0, 2]], 2),
    "random": Case(_random_ids(23, 3, 5, seed=1), 5, hidden=11, ffn=7),
    "empty experts": Case([[3, 1], [1, 3], [3, 5]], 5),
    "all rows on one expert": Case([[2, 4], [2, 4], [4, 2], [2, 4]], 4),
    "nothing here": Case([[3, 3], [3, 3]], 3),
    "one pair": Case([[1]], 2, hidden=1, ffn=1),
    "one expert": Case([[0, 1], [1, 0], [1, 1]], 1),
    "top-1": Case([[1], [0], [1], [2]], 2),
    "every expert, every row": Case([[2, 0, 1], [0, 1, 2]], 3),
}


def _run(fn, case: Case, inputs: list[Tensor], grad_RH: Tensor, wanted=(1, 1, 1, 1), **kw):
    """Output and gradients (None where not wanted) of `fn` for the upstream gradient grad_RH."""
    leaves = [x.detach().requires_grad_(bool(want)) for x, want in zip(inputs, wanted)]
    rows_RH, weights_RK, gate_up_LGH, down_LHF = leaves
    out_RH = fn(rows_RH, case.ids_RK(rows_RH.device), weights_RK, gate_up_LGH, down_LHF, **kw)
    if out_RH.requires_grad:
        out_RH.backward(grad_RH.to(out_RH.dtype))
    return out_RH.detach(), [leaf.grad for leaf in leaves]


def _ours(case: Case, inputs: list[Tensor], grad_RH: Tensor, wanted=(1, 1, 1, 1), scale=1.0):
    kw = {"counts_L": case.counts_L(), "grad_scale": scale}
    return _run(expert_mlp, case, inputs, grad_RH, wanted, **kw)


def test_the_example_of_the_docstring_by_hand() -> None:
    """H = F = 1, so silu(g x) * (u x) * d can be written out."""
    case = CASES["docstring"]
    rows_RH, weights_RK = torch.tensor([[2.0], [-1.0]]), torch.tensor([[0.5, 0.25], [4.0, 99.0]])
    gate_up_LGH = torch.tensor([[[1.0], [3.0]], [[-2.0], [5.0]]])
    down_LHF = torch.tensor([[[7.0]], [[11.0]]])
    silu = torch.nn.functional.silu
    row_0 = 0.5 * 11 * silu(torch.tensor(-4.0)) * 10 + 0.25 * 7 * silu(torch.tensor(2.0)) * 6
    row_1 = 4.0 * 7 * silu(torch.tensor(-1.0)) * -3
    got_RH = expert_mlp(
        rows_RH,
        case.ids_RK(),
        weights_RK,
        gate_up_LGH,
        down_LHF,
        counts_L=[2, 1],
        grad_scale=1.0,
    )
    want_RH = torch.stack([row_0, row_1]).unsqueeze(1)
    assert_close("out", got_RH, want_RH, 1e-6)  # fp32: a few units in the last place


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_fp64_equals_the_reference(name: str, device: str) -> None:
    assert hasattr(torch.empty, "poisoned")  # what is left unwritten is NaN here
    case = CASES[name]
    inputs = case.inputs(torch.float64, device)
    grad_RH = torch.randn_like(inputs[0])
    got, got_grads = _ours(case, inputs, grad_RH)
    want, want_grads = _run(reference.expert_mlp, case, inputs, grad_RH)
    assert_close("out", got, want, 1e-12)
    for tensor, got_grad, want_grad in zip(NAMES, got_grads, want_grads):
        want_grad = torch.zeros_like(got_grad) if want_grad is None else want_grad
        assert_close(f"grad of {tensor}", got_grad, want_grad, 1e-12)


def test_gradcheck() -> None:
    case = CASES["random"]
    inputs = [x.requires_grad_() for x in case.inputs(torch.float64)]

    def fn(rows_RH: Tensor, weights_RK: Tensor, gate_up_LGH: Tensor, down_LHF: Tensor) -> Tensor:
        ids_RK, counts_L = case.ids_RK(), case.counts_L()
        kw = {"counts_L": counts_L, "grad_scale": 1.0}
        return expert_mlp(rows_RH, ids_RK, weights_RK, gate_up_LGH, down_LHF, **kw)

    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_plain_torch(
    dtype: torch.dtype, weights_dtype: torch.dtype | None, device: str
) -> None:
    """Routing weights in fp32 (behind a dispatch) and in the rows' dtype (ep_size 1)."""
    case = Case(_random_ids(67, 3, 5, seed=2), 5, hidden=48, ffn=20)
    inputs = case.inputs(dtype, device)
    inputs[2], inputs[3] = inputs[2] / 48**0.5, inputs[3] / 20**0.5
    grad_RH = torch.randn_like(inputs[0])
    truth, true_grads = _run(
        reference.expert_mlp, case, [x.double() for x in inputs], grad_RH.double()
    )
    plain, plain_grads = _run(reference.expert_mlp, case, inputs, grad_RH)
    inputs[1] = inputs[1].to(weights_dtype or dtype)
    got, got_grads = _ours(case, inputs, grad_RH)
    assert got.dtype == dtype
    assert max_error(got, truth) <= 2 * max_error(plain, truth)
    for name, x, mine, theirs, true in zip(NAMES, inputs, got_grads, plain_grads, true_grads):
        assert mine.dtype == x.dtype, name
        error, budget = max_error(mine, true), 2 * max_error(theirs, true)
        assert error <= budget, f"grad of {name}: {error:.2e} > {budget:.2e}"


def test_no_rows() -> None:
    case = Case([], 3)
    inputs = case.inputs(torch.float64)
    out_RH, (rows, weights, gate_up, down) = _ours(case, inputs, torch.zeros(0, 5))
    assert out_RH.shape == (0, 5) and rows.shape == (0, 5) and weights.shape == (0, 2)
    assert torch.equal(gate_up, torch.zeros(3, 6, 5, dtype=torch.float64))
    assert torch.equal(down, torch.zeros(3, 5, 3, dtype=torch.float64))


@pytest.mark.parametrize("wanted", list(itertools.product([0, 1], repeat=4)))
def test_frozen_inputs_get_no_gradient_and_change_no_other(wanted: tuple[int, ...]) -> None:
    case = CASES["random"]
    inputs = case.inputs(torch.float64)
    grad_RH = torch.randn_like(inputs[0])
    want, want_grads = _ours(case, inputs, grad_RH)
    got, got_grads = _ours(case, inputs, grad_RH, wanted)
    assert torch.equal(got, want)
    for name, flag, got_grad, want_grad in zip(NAMES, wanted, got_grads, want_grads):
        if flag:
            assert torch.equal(got_grad, want_grad), name
        else:
            assert got_grad is None, name


def test_grad_scale_reaches_the_weights_alone() -> None:
    case = CASES["random"]
    inputs = case.inputs(torch.float64)
    grad_RH = torch.randn_like(inputs[0])
    plain, plain_grads = _ours(case, inputs, grad_RH)
    scaled, scaled_grads = _ours(case, inputs, grad_RH, scale=0.125)  # a power of two: exact
    assert torch.equal(scaled, plain)
    for name, factor, got, want in zip(NAMES, (1, 1, 0.125, 0.125), scaled_grads, plain_grads):
        assert torch.equal(got, factor * want), name


def _strided(x: Tensor) -> list[Tensor]:
    """The same values in layouts a caller may hand over: transposed storage, and every other."""
    other = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    gaps = torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]
    return [other, gaps]


@pytest.mark.parametrize("which", range(4))
def test_strided_inputs(which: int) -> None:
    case = CASES["random"]
    inputs = case.inputs(torch.float64)
    grad_RH = torch.randn_like(inputs[0])
    want, want_grads = _ours(case, inputs, grad_RH)
    for layout in _strided(inputs[which]):
        assert not layout.is_contiguous()
        changed = [*inputs[:which], layout, *inputs[which + 1 :]]
        got, got_grads = _ours(case, changed, grad_RH)
        assert_close("out", got, want, 1e-12)
        for name, got_grad, want_grad in zip(NAMES, got_grads, want_grads):
            assert_close(f"grad of {name}", got_grad, want_grad, 1e-12)


def test_strided_and_expanded_upstream_gradients() -> None:
    case = CASES["random"]
    inputs = case.inputs(torch.float64)
    ones_RH = torch.ones_like(inputs[0])
    _, want_grads = _ours(case, inputs, ones_RH)
    for grad_RH in (ones_RH[:1, :1].expand_as(ones_RH), ones_RH.t().contiguous().t()):
        _, got_grads = _ours(case, inputs, grad_RH)
        for name, got_grad, want_grad in zip(NAMES, got_grads, want_grads):
            assert_close(f"grad of {name}", got_grad, want_grad, 1e-12)


def test_rows_without_experts_touch_nothing() -> None:
    """NaN in a row or weight that no expert here reads stays out of everything."""
    case = Case([[0, 1], [2, 2], [1, 2]], 2)
    inputs = case.inputs(torch.float64)
    grad_RH = torch.randn_like(inputs[0])
    want, want_grads = _ours(case, inputs, grad_RH)
    poisoned = [x.clone() for x in inputs]
    poisoned[0][1] = poisoned[1][1] = poisoned[1][2, 1] = float("nan")
    grad_RH[1] = float("nan")
    got, got_grads = _ours(case, poisoned, grad_RH)
    assert torch.equal(got, want) and torch.equal(got[1], torch.zeros(5, dtype=torch.float64))
    for name, got_grad, want_grad in zip(NAMES, got_grads, want_grads):
        assert torch.equal(got_grad, want_grad), name


@pytest.mark.parametrize("name", ["random", "empty experts", "nothing here"])
def test_saved_for_backward_rows_pre_activations_and_routing(name: str) -> None:
    case = CASES[name]
    inputs = [x.requires_grad_() for x in case.inputs(torch.bfloat16)]
    inputs[1] = inputs[1].detach().float().requires_grad_()
    rows_RH, weights_RK, gate_up_LGH, down_LHF = inputs
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_RH = expert_mlp(
            rows_RH,
            case.ids_RK(),
            weights_RK,
            gate_up_LGH,
            down_LHF,
            counts_L=case.counts_L(),
            grad_scale=1.0,
        )
    parameters = {gate_up_LGH.data_ptr(), down_LHF.data_ptr()}
    assert parameters <= saved.keys()  # themselves, no copy
    num_rows, top_k = weights_RK.shape
    pairs, bf16, fp32, int64 = sum(case.counts_L()), 2, 4, 8
    want = {
        "rows": num_rows * case.hidden * bf16,
        "gate and up": pairs * 2 * case.ffn * bf16,
        "routing weights": num_rows * top_k * fp32,
        "sorted pairs": num_rows * top_k * int64,  # a slice of the argsort keeps all of it
        "slots": num_rows * top_k * int64,
    }
    got = sum(size for address, size in saved.items() if address not in parameters)
    assert got == sum(want.values()), (got, want)
    out_RH.sum().backward()


def test_repeats_bit_for_bit() -> None:
    case = Case(_random_ids(67, 3, 5, seed=3), 5, hidden=48, ffn=20)
    inputs = case.inputs(torch.float32)
    grad_RH = torch.randn_like(inputs[0])
    first, first_grads = _ours(case, inputs, grad_RH)
    again, again_grads = _ours(case, inputs, grad_RH)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(first_grads, again_grads))
