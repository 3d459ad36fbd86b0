"""Sequence parallelism of every model type for which it is enabled (SEQUENCE_PARALLEL).

Each type splits its sequences over two ranks and is compared with stock on the whole batch: logits,
loss, every gradient and one step of AdamW, at 1e-10. test_refused.py tests all other types.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, batch, recording, tiny
from support.architectures.mixers import MIXERS, gathered_names
from support.architectures.steps import build, whole
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.fp64 import FP64
from support.generation import assert_same, continuations
from support.parity import checkpointing
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, data_parallel_rank, data_parallel_size
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL

Batch = dict[str, Tensor]
GRANTED = sorted(SEQUENCE_PARALLEL & set(MODEL_TYPES))
# The fast tests: attention sinks with eager attention, MLA with a correction bias, a delta net, and
# an indexer in attention with shared keys.
FAST = ("gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "glm_moe_dsa")
# Types with sliding windows, attention sinks, MLA, or other numbers of heads in full layers.
WINDOWS_SINKS_OR_LATENT = ("gpt_oss", "deepseek_v3", "gemma4_text", "mimo_v2_flash")
# The gradient of a bias of attention's keys is 0 in exact arithmetic, and rounding errors here.
NOTHING = 1e-15
# Its layers share keys, and stock itself cannot train it with reentrant checkpointing.
NOT_REENTRANT = ("mistral_large4",)
# Stock has no gradient checkpointing for this type.
NOT_CHECKPOINTED = ("jetmoe",)
# Stock scales the queries of a packed document by the numbers of their tokens in the row.
NUMBERS_TOKENS_OF_ROWS = ("llama4", "llama4_text")
# Layers have 4 or 6 heads, or 4 or 2, so 2 is the only sp_size > 1 that divides both.
SP_2_ALONE = ("dots3_note", "dots3_note_text", "laguna", "step3p7")


def padded(model: nn.Module, seed: int) -> Batch:
    """Return two rows of 11 tokens, which 2 does not divide. One row ends in 3 padding tokens."""
    return batch(model, 2, 11, seed=seed, pad=3)


def padded_left(model: nn.Module, seed: int) -> Batch:
    """Return three rows; the first two begin with padding."""
    micro = batch(model, 3, 11, seed=seed)
    micro["attention_mask"][0, :4] = 0
    micro["attention_mask"][1, :1] = 0
    micro["labels"].masked_fill_(micro["attention_mask"] == 0, -100)
    return micro


def packed(model: nn.Module, seed: int) -> Batch:
    """Pack documents of 9, 3 and 7 tokens in one row; position_ids restart at 0 in each. Two
    documents are longer than a window of 5, and one continues on the next rank.
    """
    micro = batch(model, 1, 19, seed=seed)
    del micro["attention_mask"]
    micro["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 7)]).unsqueeze(0)
    micro["labels"][:, [0, 9, 12]] = -100
    return micro


def shorter_than_sp(model: nn.Module, seed: int) -> Batch:
    """Return fewer tokens than ranks. The slices of the last ranks are padding."""
    return batch(model, 2, 3, seed=seed)


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
    """Compare a step with stock's. Each rank has another seed, and rank 0's values must replace the
    others. Reentrant checkpointing drops the gradients of the load-balancing loss, so with it stock
    is checkpointed as well.
    """
    with recording(model_type, "sp", gathered_names(tiny(model_type))) as errors, FP64():
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
        own_batch = everyone[data_parallel_rank(model)]
        whole_batch = {name: torch.cat([x[name] for x in everyone]) for name in own_batch}
        num_tokens = whole_batch["labels"][:, 1:].ne(-100).sum()
        errors.append(_compare_logits(model, stock, own_batch))
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (model, stock)
        ]
        loss = model(**own_batch, num_items_in_batch=num_tokens).loss
        if _is_mean(stock):  # the mean of this group's tokens; stock's is that of all tokens
            own, total = (x["labels"].ne(-100).sum() for x in (own_batch, whole_batch))
            loss = loss * own / total
        (loss * groups).backward()
        want = stock(**whole_batch, num_items_in_batch=num_tokens, use_cache=False).loss
        want.backward()
        if groups == 1:
            errors.append(assert_close("loss", loss, want, FP64_MODEL))
        errors += _compare("gradient", model, stock, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
        errors += _compare("value after a step", model, stock, lambda p: p.detach())


def _is_mean(stock: nn.Module) -> bool:
    """Return True if a model's loss is always the mean of its tokens: that of a classifier."""
    return type(stock).__name__.endswith("ForTokenClassification")


def train_evaluate_generate(model_type: str, rank: int, world: int) -> None:
    """Train one step, evaluate, and generate from another prompt on each rank.

    Ranks with batches of different lengths are refused. The models have no load-balancing loss,
    with which stock cannot generate.
    """
    with FP64():
        model, stock = build(model_type, seed=rank), build(model_type)
        apply_ep_fsdp2(model, ep_size=2, sp_size=2)
        with pytest.raises(ValueError, match=r"batches \(rank 0: 2 x 9, rank 1: 2 x 10; "):
            model(**batch(stock, 2, 9 + rank))
        micro = padded(stock, 1)
        for trained in (model, stock):
            trained(**micro, use_cache=False).loss.backward()
            torch.optim.AdamW(trained.parameters(), lr=1e-3, foreach=False).step()
            trained.eval()
        _compare_logits(model, stock, micro)
        with torch.no_grad():
            got, want = (m(**micro) for m in (model, stock))
        assert_close("loss of evaluation", got.loss, want.loss, FP64_MODEL)
        assert got.logits is None, "nobody can use a slice of the logits"
        assert_same(model_type, continuations(model, rank), continuations(stock, rank))


def _compare_logits(model: nn.Module, stock: nn.Module, micro: Batch) -> float:
    unlabelled = {name: x for name, x in micro.items() if name != "labels"}
    with torch.no_grad():
        got, want = (m(**unlabelled, use_cache=False).logits for m in (model, stock))
    return assert_close("logits", got, want, FP64_MODEL)


def _compare(kind: str, model: nn.Module, stock: nn.Module, pick: Any) -> list[float]:
    errors = []
    picked = {name: pick(parameter) for name, parameter in model.named_parameters()}
    gathered = whole(model, {name: x for name, x in picked.items() if x is not None})
    for name, parameter in stock.named_parameters():
        got, want = gathered.get(name), pick(parameter)
        if got is None or want is None:  # an expert without tokens has no gradient, or zeros
            other = want if got is None else got
            assert other is None or not other.any(), f"only one model has a {kind} of {name}"
        elif max(got.abs().max(), want.abs().max()) > NOTHING:
            errors.append(assert_close(f"{kind} of {name}", got, want, FP64_MODEL))
    return errors


TWO_RANKS = [
    Check(name, 2, partial(equals_stock, name), slow=name not in FAST).as_parameter()
    for name in GRANTED
]
PACKED = [
    Check(f"{name}, packed", 2, partial(equals_stock, name, make=packed), slow=True).as_parameter()
    for name in GRANTED
    # Stock mixes packed documents there; see test_mixers.py.
    if name not in MIXERS and name not in NUMBERS_TOKENS_OF_ROWS
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
    if not (use_reentrant and name in NOT_REENTRANT) and name not in NOT_CHECKPOINTED
]
FLASH = [
    Check(f"{name}, flash", 2, partial(equals_stock, name, flash=True), slow=True).as_parameter()
    for name in ("gpt_oss", "qwen3_moe")
]
TRAINED = [
    Check(name, 2, partial(train_evaluate_generate, name), slow=True).as_parameter()
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
        "sp 4, three tokens": {"sp": 4, "make": shorter_than_sp},
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
    """Layers are recomputed in backward with the same slices as in forward."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", PADDED_LEFT)
def test_padded_left(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", PACKED + FLASH)
def test_packed_rows_and_flash_attention_equal_stock(found: Found, claim: Check) -> None:
    """Flash attention (support/fakes/flash.py) receives attention sinks as an argument."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", TRAINED)
def test_evaluates_and_generates_after_a_step(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", FOUR_RANKS)
def test_on_four_ranks(found: Found, claim: Check) -> None:
    """sp 2 has two sp groups; sp 4 has one, with more ranks than key-value heads."""
    found.raise_if_failed(claim)
