"""Model types that may split their sequences: those that equal stock here, and no others.

Each granted type is split over two ranks and compared with stock on the whole batch: logits, loss,
every gradient, one step of AdamW, at 1e-10. All other types refuse sp_size > 1: test_refused.py.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import batch, mixed_batch, recording, tiny
from support.architectures.steps import build
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.fp64 import FP64
from support.generation import assert_same, continuations
from support.parity import checkpointing, full_tensor
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, data_parallel_rank, data_parallel_size
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL

Batch = dict[str, Tensor]
GRANTED = sorted(SEQUENCE_PARALLEL)
# Sinks under eager attention; MLA with a correction bias.
FAST = ("gpt_oss", "deepseek_v3")
# Windows and sinks, some of each head; latent attention; windows and other heads in full layers.
WINDOWS_SINKS_OR_LATENT = ("gpt_oss", "deepseek_v3", "gemma4_text", "mimo_v2_flash")
# Layers of 4 heads and of 6: no other number divides both.
SP_2_ALONE = ("laguna",)


def padded(model: nn.Module, seed: int) -> Batch:
    """Two rows of 11 tokens, which 2 does not divide, the last three of one padded."""
    return batch(model, 2, 11, seed=seed, pad=3)


def padded_left(model: nn.Module, seed: int) -> Batch:
    """Three rows, the first two beginning with padding."""
    micro = batch(model, 3, 11, seed=seed)
    micro["attention_mask"][0, :4] = 0
    micro["attention_mask"][1, :1] = 0
    micro["labels"].masked_fill_(micro["attention_mask"] == 0, -100)
    return micro


def packed(model: nn.Module, seed: int) -> Batch:
    """Documents of 9, 3 and 7 tokens in one row, separated by position_ids that start again. Two
    are longer than a window of 5, and one crosses the border between two ranks.
    """
    micro = batch(model, 1, 19, seed=seed)
    del micro["attention_mask"]
    micro["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 7)]).unsqueeze(0)
    micro["labels"][:, [0, 9, 12]] = -100
    return micro


def short(model: nn.Module, seed: int) -> Batch:
    """Fewer tokens than ranks: some have padding alone."""
    return batch(model, 2, 3, seed=seed)


def pictured(model: nn.Module, seed: int) -> Batch:
    """Two rows, the first with a picture."""
    return mixed_batch(model, [1, 0], seed=seed)


def equals_stock(
    model_type: str,
    rank: int,
    world: int,
    *,
    make: Any = padded,
    sp: int = 2,
    flash: bool = False,
    use_reentrant: bool | None = None,
) -> None:
    """Split a model with other initial values on every rank, and compare a step with stock's. Where
    `checkpointing` is given, both use that kind; with the reentrant kind stock has no gradients
    of its load-balancing loss.
    """
    with recording(model_type, "sp") as errors, FP64():
        model, stock = tiny(model_type, seed=rank), tiny(model_type)
        if flash:
            use_fake_flash(model)
            use_fake_flash(stock)
        if use_reentrant is not None:
            checkpointing(model, use_reentrant)
        if use_reentrant:
            checkpointing(stock, use_reentrant)
        apply_ep_fsdp2(model, ep_size=2, sp_size=sp)
        groups = data_parallel_size(model)
        assert groups == world // sp
        everyone = [make(stock, seed) for seed in range(groups)]
        mine = everyone[data_parallel_rank(model)]
        whole = {name: torch.cat([one[name] for one in everyone]) for name in mine}
        num_tokens = whole["labels"][:, 1:].ne(-100).sum()
        errors.append(_compare_logits(model, stock, mine))
        steps = [torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (model, stock)]
        loss = model(**mine, num_items_in_batch=num_tokens).loss
        (loss * groups).backward()
        want = stock(**whole, num_items_in_batch=num_tokens, use_cache=False).loss
        want.backward()
        if groups == 1:
            errors.append(assert_close("loss", loss, want, FP64_MODEL))
        errors += _compare("gradient", model, stock, lambda p: p.grad)
        for optimizer in steps:
            optimizer.step()
        errors += _compare("value after a step", model, stock, lambda p: p.detach())


def then_evaluates_and_generates(model_type: str, rank: int, world: int) -> None:
    """Batches of other lengths on the ranks are refused; a step; loss and logits; own prompts.

    Without a load-balancing loss, with which stock generates nothing.
    """
    with FP64():
        model, stock = build(model_type, seed=rank), build(model_type)
        apply_ep_fsdp2(model, ep_size=2, sp_size=2)
        with pytest.raises(ValueError, match=r"batches \(rank 0: 2 x 9, rank 1: 2 x 10; or other"):
            model(**batch(stock, 2, 9 + rank))
        micro = padded(stock, 1)
        for one in (model, stock):
            one(**micro, use_cache=False).loss.backward()
            torch.optim.AdamW(one.parameters(), lr=1e-3, foreach=False).step()
            one.eval()
        _compare_logits(model, stock, micro)
        with torch.no_grad():
            got, want = (one(**micro) for one in (model, stock))
        assert_close("loss of evaluation", got.loss, want.loss, FP64_MODEL)
        assert got.logits is None, "a slice of logits is nobody's"
        assert_same(model_type, continuations(model, rank), continuations(stock, rank))


def _compare_logits(model: nn.Module, stock: nn.Module, micro: Batch) -> float:
    unlabelled = {name: x for name, x in micro.items() if name != "labels"}
    with torch.no_grad():
        got, want = (m(**unlabelled, use_cache=False).logits for m in (model, stock))
    return assert_close("logits", got, want, FP64_MODEL)


def _compare(what: str, model: nn.Module, stock: nn.Module, pick: Any) -> list[float]:
    errors = []
    found = dict(model.named_parameters())
    for name, parameter in stock.named_parameters():
        got, want = full_tensor(pick(found[name])), pick(parameter)
        if got is None or want is None:  # an expert of no token: a gradient of zeros, or none
            other = want if got is None else got
            assert other is None or not other.any(), f"one {what} of {name} alone"
        else:
            errors.append(assert_close(f"{what} of {name}", got, want, FP64_MODEL))
    return errors


TWO_RANKS = [
    Check(name, 2, partial(equals_stock, name), slow=name not in FAST).as_parameter()
    for name in GRANTED
]
PACKED = [
    Check(f"{name}, packed", 2, partial(equals_stock, name, make=packed), slow=True).as_parameter()
    for name in GRANTED
]
PADDED_LEFT = [
    Check(
        f"{name}, padded left", 2, partial(equals_stock, name, make=padded_left), slow=True
    ).as_parameter()
    for name in GRANTED
]
CHECKPOINTED = [
    Check(
        f"{name}, {'reentrant' if use_reentrant else 'not reentrant'}",
        2,
        partial(equals_stock, name, use_reentrant=use_reentrant),
        slow=True,
    ).as_parameter()
    for name in GRANTED
    for use_reentrant in (False, True)
]
FLASH = [
    Check(f"{name}, flash", 2, partial(equals_stock, name, flash=True), slow=True).as_parameter()
    for name in ("gpt_oss", "qwen3_moe")
]
TRAINED = [
    Check(name, 2, partial(then_evaluates_and_generates, name), slow=True).as_parameter()
    for name in WINDOWS_SINKS_OR_LATENT
]
FOUR_RANKS = [
    Check(
        f"{name}, sp {sp}",
        4,
        partial(equals_stock, name, sp=sp),
        slow=True,
    ).as_parameter()
    for name in GRANTED
    for sp in (2, 4)
    if sp == 2 or name not in SP_2_ALONE
]
FOUR_RANKS += [
    Check(f"{name}, {kind}", 4, partial(equals_stock, name, **options), slow=True).as_parameter()
    for name in WINDOWS_SINKS_OR_LATENT
    for kind, options in {
        "sp 4, three tokens": {"sp": 4, "make": short},
        "sp 4, packed": {"sp": 4, "make": packed},
        "sp 4, reentrant": {"sp": 4, "use_reentrant": True},
        "sp 2, not reentrant": {"sp": 2, "use_reentrant": False},
    }.items()
]


@pytest.mark.parametrize("claim", TWO_RANKS)
def test_every_granted_type_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", CHECKPOINTED)
def test_checkpointed_equals_stock(found: Found, claim: Check) -> None:
    """Recomputation in backward gets the slices that the first forward had."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", PADDED_LEFT)
def test_padded_left(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", PACKED + FLASH)
def test_packed_rows_and_flash_attention_equal_stock(found: Found, claim: Check) -> None:
    """Documents share a row. A stand-in for flash attention takes sinks as an argument."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", TRAINED)
def test_evaluates_and_generates_after_a_step(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", FOUR_RANKS)
def test_on_four_ranks(found: Found, claim: Check) -> None:
    """Two sequences at a time, or one sequence over more ranks than key-value heads."""
    found.raise_if_failed(claim)
