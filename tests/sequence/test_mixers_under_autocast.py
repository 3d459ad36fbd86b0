"""Under autocast, mixers whose sequences are split differ from stock by less than bf16 itself.

The weights are fp32 and the operators compute in bf16. A stock model in fp64 shows how far rounding
to bf16 moves the gradients of one stock process.
"""

from functools import partial

import pytest
import torch
from support.architectures import MODEL_TYPES, batch
from support.architectures.steps import build, count_tokens, loss_of_sum, whole
from support.checks import Check, Found
from support.fp64 import FP64
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2

# Delta nets, KDA, Mamba-1 and -2, short convolutions, an indexer, compressors, and a mixer that
# gets whole sequences.
TYPES = (
    "qwen3_next",
    "qwen3_5_moe_text",
    "kimi_linear",
    "jamba",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2_moe",
    "glm_moe_dsa",
    "deepseek_v4",
    "minimax",
)
FAST = ("qwen3_next",)
# Of the gradients' norm. Rounding once to bf16 moves a value by at most 2^-9 of it, and the hidden
# states are rounded a few dozen times.
LARGEST = 0.1

Grads = dict[str, Tensor]


def _train(model: nn.Module, model_type: str) -> Grads:
    inputs = batch(build(model_type), 2, 11, pad=3)
    loss_of_sum(model, inputs, count_tokens([inputs])).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.double() for name, grad in whole(model, grads).items()}


def _compute_distance(some: Grads, others: Grads, exact: Grads) -> float:
    """Return the norm of all differences, as a share of the norm of the exact gradients."""
    assert some.keys() == others.keys() == exact.keys()
    differences = [torch.linalg.vector_norm(some[name] - others[name]) for name in exact]
    norms = [torch.linalg.vector_norm(grad) for grad in exact.values()]
    return float(torch.stack(differences).norm() / torch.stack(norms).norm())


def _compare_with_stock(model_type: str, rank: int, world: int) -> None:
    with FP64():
        exact = _train(build(model_type), model_type)
    stock, model = build(model_type).float(), build(model_type, seed=rank).float()
    apply_ep_fsdp2(model, ep_size=2, sp_size=world)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = _train(stock, model_type), _train(model, model_type)
    error_of_bf16 = _compute_distance(want, exact, exact)
    difference = _compute_distance(got, want, exact)
    assert 0 < difference < min(error_of_bf16 / 2, LARGEST), (difference, error_of_bf16)


CLAIMS = [
    Check(name, 2, partial(_compare_with_stock, name), slow=name not in FAST).as_parameter()
    for name in TYPES
    if name in MODEL_TYPES
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_mixers_equal_stock_under_autocast(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
