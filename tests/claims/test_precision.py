"""Gradients of bf16 compute with fp32 masters have at most twice the error of stock's bf16."""

import torch
from support.parity import Batch, full_tensor, uneven_batches
from support.ranks import run_ranks
from support.tiny_models import tiny
from torch import Tensor

from hf_moe_ep import apply_ep_fsdp2, describe, global_token_count

WORLD = 4


def test_bf16_error_is_at_most_twice_that_of_stock_bf16() -> None:
    results = run_ranks(_errors_of_rank, WORLD, timeout=120)
    for ours, stock in results:
        assert ours.keys() == stock.keys()
        for name, error in ours.items():
            assert error <= 2 * stock[name], f"{name}: {error:.2e}, stock {stock[name]:.2e}"


def _errors_of_rank(rank: int, world: int) -> tuple[dict[str, float], dict[str, float]]:
    batches = [micro for r in range(world) for micro in uneven_batches(_build_model(), r, world, 0)]
    num_tokens = sum(micro["labels"][:, 1:].ne(-100).sum() for micro in batches)
    truth = _compute_stock_grads(torch.float64, batches, num_tokens)
    stock = _compute_stock_grads(torch.bfloat16, batches, num_tokens)
    model = _build_model()
    apply_ep_fsdp2(model, ep_size=2)
    assert "stored float32; compute bfloat16; gradients reduced float32" in describe(model)
    own_batch = batches[rank]
    assert global_token_count(model, own_batch["labels"]) == num_tokens
    loss = model(**own_batch, num_items_in_batch=num_tokens).loss
    assert loss.dtype == torch.float32
    (loss * world).backward()
    ours = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
    assert all(grad.dtype == torch.float32 for grad in ours.values())
    return _compute_relative_errors(ours, truth), _compute_relative_errors(stock, truth)


def _build_model() -> torch.nn.Module:
    return tiny(dtype=torch.bfloat16)


def _compute_stock_grads(
    dtype: torch.dtype, batches: list[Batch], num_tokens: Tensor
) -> dict[str, Tensor]:
    model = _build_model().to(dtype)
    for micro in batches:
        model(**micro, num_items_in_batch=num_tokens).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _compute_relative_errors(got: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Compute relative errors in the 2-norm, to which a single rounded element adds little."""
    return {
        name: (torch.dist(got[name].double(), want) / want.norm()).item()
        for name, want in truth.items()
    }
