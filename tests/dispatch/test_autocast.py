"""Under autocast rows are sent in the experts' dtype: half of the bytes, and the same results.

The reference sends rows in the dtype of the model's hidden states (fp32). It rounds rows after they
are received, and widens results and gradients before they are sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import parity
from support.checks import Check, Found, on_ranks
from support.messages import message_columns
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, dispatcher
from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll

HIDDEN, TOP_K, LAYERS = 32, 2, 2
FP32, BF16 = 4, 2


@contextmanager
def _send_rows_in_fp32() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dispatcher, "choose_compute_dtype", lambda x: x.dtype)
        yield


@contextmanager
def _count_sent_rows() -> Iterator[list[tuple[int, int]]]:
    """Yield a list of (rows, bytes of one row), one entry for each all-to-all of rows."""
    sent: list[tuple[int, int]] = []
    stock = dist.all_to_all_single

    def counted(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.is_floating_point():
            sent.append((len(rows), rows.shape[1] * rows.element_size()))
        return stock(out, rows, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "all_to_all_single", counted)
        yield sent


def _run_step(model: nn.Module, rank: int) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Return the loss and all gradients, and the rows that were sent."""
    model.zero_grad()
    with _count_sent_rows() as sent:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch(model, 2, 9 + rank, seed=rank)).loss
        loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}, sent


def half_of_the_bytes_give_the_same_bits(rank: int, world: int) -> None:
    for use_reentrant in (None, False):
        model = tiny(num_hidden_layers=LAYERS).float()
        if use_reentrant is not None:
            parity.checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=2, dispatch_chunks=2)
        got, sent = _run_step(model, rank)
        with _send_rows_in_fp32():
            want, sent_in_fp32 = _run_step(model, rank)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), f"{name}, reentrant {use_reentrant}"
        # Results and their gradients are rows without routing. Routing is in fp32 behind a row.
        sizes = {HIDDEN}
        sizes |= {message_columns(HIDDEN + routing * TOP_K * 2) for routing in (1, 2)}
        assert {size for _, size in sent} == {BF16 * columns for columns in sizes}
        assert [rows for rows, _ in sent] == [rows for rows, _ in sent_in_fp32]
        results = [size for _, size in sent if size == BF16 * HIDDEN]
        results_in_fp32 = [size for _, size in sent_in_fp32 if size == FP32 * HIDDEN]
        assert len(results) == len(results_in_fp32) > 0


def sums_are_rounded_once(rank: int, world: int) -> None:
    """Sums of bf16 rows are rounded to the dtype of the layer's inputs, here fp32."""
    assert dist.group.WORLD is not None
    header = Header(1, 0, True, True, False, False, 2, BF16)
    # One token with an expert on each rank.
    ids_TK = torch.tensor([[0, 1]])
    x_TH = torch.full((1, 3), 1 + 2.0**-12).requires_grad_()
    w_TK = torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = Tokens(x_TH, w_TK, ids_TK)
        (exchange,) = AllToAll(dist.group.WORLD, 2).start_plan(ids_TK, header).finish()
        arriving = exchange.start(tokens)
        rows_RH, _, _ = arriving.finish()
    assert rows_RH.dtype == torch.bfloat16 and torch.equal(rows_RH, torch.ones_like(rows_RH))
    factor = 1.0 if rank == 0 else 2.0**-8
    out_TH = arriving.start_combine(rows_RH * factor).finish()
    # bf16 has 8 bits, so 1 + 2**-8 would be rounded to 1.
    assert out_TH.dtype == torch.float32 and out_TH.tolist() == [[1 + 2.0**-8] * 3]
    out_TH.sum().backward()
    assert x_TH.grad is not None and x_TH.grad.dtype == torch.float32
    assert x_TH.grad.tolist() == [[1 + 2.0**-8] * 3]


CHECKS = on_ranks(2, half_of_the_bytes_give_the_same_bits, sums_are_rounded_once)


@pytest.mark.parametrize("claim", CHECKS)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
