"""Compare training with and without fixed buffers (`fsdp_double_buffer`), to the bit."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep import (
    apply_ep_fsdp2,
    clip_grad_norm_,
    data_parallel_rank,
    data_parallel_size,
    global_token_count,
)
from hf_moe_ep.state import patched_state
from support.parity import STEPS, Case, plain_backward, uneven_batches
from support.tiny_models import tiny

# With four layers of one size a third unit would overwrite a buffer that is still in use.
LAYERS = {"num_hidden_layers": 4}


def compare_fixed_buffers(case: Case, rank: int, _: int) -> None:
    """Compare gradients, norms and parameters of some steps of a parity case."""
    _, want = _train(case, rank, double=False)
    model, got = _train(case, rank, double=True)
    buffers = patched_state(model).buffers
    assert buffers is not None
    assert {len(same_size) for same_size in buffers._buffers.values()} <= {1, 2}
    assert buffers.num_buffers > 2
    assert len(got) == len(want) > STEPS
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _train(case: Case, rank: int, *, double: bool) -> tuple[nn.Module, list[Tensor]]:
    model: Any = tiny(seed=rank, **LAYERS | case.model)
    if case.prepare:
        case.prepare(model)
    sizes = {"ep_size": case.ep, "dp_replicate_size": case.replicate}
    apply_ep_fsdp2(model, **sizes, **case.config, fsdp_double_buffer=double)
    own, ranks = data_parallel_rank(model), data_parallel_size(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    make, backward = case.micro_batches or uneven_batches, case.backward or plain_backward
    numbers: list[Tensor] = []
    for step in range(STEPS):
        micro_batches = make(model, own, ranks, step)
        tokens = global_token_count(model, [micro["labels"] for micro in micro_batches])
        backward(model, micro_batches, tokens, ranks)
        numbers += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        numbers.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return model, numbers + [p.detach().to_local() for p in model.parameters()]
