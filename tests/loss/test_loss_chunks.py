"""A loss in chunks has gradients as exact as stock's, and no tensor with all logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.close import FP32_INSIDE, FP64_LAYER, assert_close
from support.largest_tensor import LargestTensor
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_moe_ep.loss.chunks import HeadLoss
from hf_moe_ep.planner.count import count_tensors

TOKENS, HIDDEN, VOCAB = 45, 12, 67
IGNORED = -100


def _make_labels(tokens: int = TOKENS, vocab: int = VOCAB) -> Tensor:
    labels = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[::5] = IGNORED
    return labels


def _make_head_loss(
    head: nn.Module, labels_T: Tensor, chunk: int, count: Tensor | int | None = None, **kw: Any
) -> HeadLoss:
    count = (labels_T != IGNORED).sum() if count is None else torch.as_tensor(count)
    parameters = tuple(p for p in head.parameters() if p.requires_grad)
    vocab = head.out_features
    return HeadLoss(head, kw.get("gather", int), parameters, labels_T, vocab, -100, count, chunk)


def _run_stock(
    head: nn.Module, hidden_TH: Tensor, labels_T: Tensor, count: Tensor | int | None = None
) -> Tensor:
    logits = head(hidden_TH)
    return ForCausalLMLoss(
        logits, None, head.out_features, shift_labels=labels_T, num_items_in_batch=count
    )


def _differentiate(
    loss: Callable[[Tensor], Tensor], head: nn.Module, hidden_TH: Tensor, scale: float = 1.0
) -> dict[str, Tensor]:
    """Return the loss, and the gradients of the hidden states and of the head."""
    head.zero_grad()
    hidden_TH = hidden_TH.detach().clone().requires_grad_()
    value = loss(hidden_TH)
    (value * scale).backward()
    grads = {name: p.grad for name, p in head.named_parameters() if p.requires_grad}
    return {"loss": value.detach(), "hidden": hidden_TH.grad, **grads}


@pytest.mark.parametrize("count", [None, 31, torch.tensor(31)])
@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
def test_gradients_equal_stock_in_fp64(chunk: int, count: Any) -> None:
    """Stock computes the loss of an fp64 model in fp32, where the order of a sum matters.

    The factor of 4 is exact in fp32.
    """
    torch.manual_seed(0)
    head, hidden_TH = nn.Linear(HIDDEN, VOCAB).double(), torch.randn(TOKENS, HIDDEN).double()
    labels_T = _make_labels()
    want = _differentiate(lambda x: _run_stock(head, x, labels_T, count), head, hidden_TH, 4.0)
    got = _differentiate(
        _make_head_loss(head, labels_T, chunk, count).compute, head, hidden_TH, 4.0
    )
    assert got.keys() == want.keys() == {"loss", "hidden", "weight", "bias"}
    for name, value in want.items():
        budget = FP32_INSIDE if name == "loss" else FP64_LAYER
        assert_close(name, got[name], value, budget)


def test_without_any_label_the_loss_is_stocks_nan_and_gradients_are_zero() -> None:
    head, hidden_TH = nn.Linear(HIDDEN, VOCAB).double(), torch.randn(TOKENS, HIDDEN).double()
    labels_T = torch.full((TOKENS,), IGNORED)
    want = _differentiate(lambda x: _run_stock(head, x, labels_T), head, hidden_TH)
    got = _differentiate(_make_head_loss(head, labels_T, 7).compute, head, hidden_TH)
    assert want["loss"].isnan() and got["loss"].isnan()
    assert all(not x.any() for r in (got, want) for name, x in r.items() if name != "loss")


def test_frozen_parameters_and_no_grad_get_no_gradients() -> None:
    torch.manual_seed(0)
    head, hidden_TH = nn.Linear(HIDDEN, VOCAB), torch.randn(TOKENS, HIDDEN)
    head.weight.requires_grad_(False)
    head_loss = _make_head_loss(head, _make_labels(), 7)
    got = _differentiate(head_loss.compute, head, hidden_TH)
    want = _differentiate(lambda x: _run_stock(head, x, _make_labels()), head, hidden_TH)
    assert head.weight.grad is None
    for name in ("hidden", "bias"):
        assert_close(name, got[name], want[name], FP32_INSIDE)
    with torch.no_grad():
        loss = head_loss.compute(hidden_TH.requires_grad_())
    assert not loss.requires_grad
    assert_close("loss", loss, want["loss"], FP32_INSIDE)


def test_forward_mode_differentiation_is_refused() -> None:
    """Chunks are computed from detached hidden states, so the tangent would be lost."""
    head = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    hidden_TH = torch.randn(TOKENS, HIDDEN)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward_ad"):
        dual_TH = forward_ad.make_dual(hidden_TH, torch.ones_like(hidden_TH))
        _make_head_loss(head, _make_labels(), 7).compute(dual_TH)


def test_backward_can_run_twice() -> None:
    head, hidden_TH = nn.Linear(HIDDEN, VOCAB), torch.randn(TOKENS, HIDDEN)
    loss = _make_head_loss(head, _make_labels(), 7).compute(hidden_TH)
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone()
    loss.backward()
    assert torch.equal(head.weight.grad, 2 * once)


def _compare_with_truth(got: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each result relative to the norm of the truth."""
    return {
        name: ((got[name].double() - want).norm() / want.norm()).item()
        for name, want in truth.items()
    }


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_bf16_is_as_exact_as_stock(chunk: int, autocast: bool) -> None:
    """Compare with the truth in fp64, with a budget of sqrt(2) for the gradient of the weight.

    The sum of chunks is rounded once more than stock's gradient, and two roundings of equal size
    make an error of sqrt(2).
    """
    torch.manual_seed(0)
    tokens, hidden, vocab = 512, 64, 2400
    exact = nn.Linear(hidden, vocab, bias=False).bfloat16().double()
    hidden_TH, labels_T = torch.randn(tokens, hidden).bfloat16(), _make_labels(tokens, vocab)

    def compute_truth(x: Tensor) -> Tensor:
        return functional.cross_entropy(exact(x), labels_T)

    want = _differentiate(compute_truth, exact, hidden_TH.double())
    dtype = torch.float32 if autocast else torch.bfloat16
    head = nn.Linear(hidden, vocab, bias=False, dtype=dtype)
    head.load_state_dict(exact.state_dict())
    rows = hidden_TH.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stock = _compare_with_truth(
            _differentiate(lambda x: _run_stock(head, x, labels_T), head, rows), want
        )
        ours = _compare_with_truth(
            _differentiate(_make_head_loss(head, labels_T, chunk).compute, head, rows), want
        )
    for name, error in stock.items():
        budget = 2**0.5 * error if name == "weight" else 1.01 * error + 1e-7
        assert ours[name] <= budget, f"{name}: {ours[name]:.2e}, stock {error:.2e}"


def test_fp16_keeps_small_gradients_that_a_scaler_multiplies() -> None:
    """With 1e5 tokens in the global batch most gradients that are not scaled are below 6e-8."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB).half()
    hidden_TH, labels_T = torch.randn(TOKENS, HIDDEN).half(), _make_labels()
    want = _differentiate(
        lambda x: _run_stock(head, x, labels_T, 100_000), head, hidden_TH, 2.0**16
    )
    gathered: list[int] = []
    head_loss = _make_head_loss(head, labels_T, 7, 100_000, gather=lambda: gathered.append(1))
    got = _differentiate(head_loss.compute, head, hidden_TH, 2.0**16)
    assert gathered == [1], "backward computes with the head again, which must be gathered"
    assert want["weight"].count_nonzero() == want["weight"].numel()
    for name in ("hidden", "weight", "bias"):
        assert_close(name, got[name], want[name], 2e-3)  # fp16 rounds by 5e-4


class _HeadWithDropout(nn.Linear):
    """A head with dropout, as an adapter may have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_backward_drops_the_same_values_as_forward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head, labels_T = _HeadWithDropout(HIDDEN, VOCAB, bias=False, dtype=dtype), _make_labels()
    hidden_TH = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    torch.manual_seed(5)
    got = _differentiate(_make_head_loss(head, labels_T, 7).compute, head, hidden_TH)
    drawn_after = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        chunks = [functional.dropout(x, 0.5) for x in hidden_TH.split(7)]
    assert torch.equal(torch.rand(3), drawn_after), "backward changed the random state"
    plain = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)
    plain.load_state_dict(head.state_dict())
    want = _differentiate(lambda x: _run_stock(plain, x, labels_T), plain, torch.cat(chunks))
    assert_close("weight", got["weight"], want["weight"], 2e-3)


def test_no_tensor_has_the_logits_of_all_tokens() -> None:
    """The largest tensor is the weight, not the logits of 512 tokens."""
    head = nn.Linear(8, 300, bias=False)
    hidden_TH, labels_T = torch.randn(512, 8), _make_labels(512, 300)
    measured = {}
    for name, loss in {
        "stock": lambda x: _run_stock(head, x, labels_T),
        "chunks": _make_head_loss(head, labels_T, 16).compute,
    }.items():
        with LargestTensor(head.parameters()) as measured[name]:
            _differentiate(loss, head, hidden_TH)
    assert measured["stock"].elements == 512 * 300
    assert measured["chunks"].elements == 16 * 300


def test_a_chunk_needs_the_memory_of_three_fp32_tensors() -> None:
    """Backward has three fp32 tensors of the size of the logits; the bf16 logits are freed.

    The tolerance is half of these logits.
    """
    tokens, hidden, vocab = 64, 16, 4096
    head = nn.Linear(hidden, vocab, bias=False).to(torch.bfloat16)
    hidden_TH = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    labels_T = _make_labels(tokens, vocab)
    with count_tensors() as memory:
        _make_head_loss(head, labels_T, tokens).compute(hidden_TH)
    assert 3 * 4 <= memory.peak / (tokens * vocab) < 3 * 4 + 1
