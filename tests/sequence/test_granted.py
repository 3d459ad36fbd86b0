"""Every model type with sequence parallelism (SEQUENCE_PARALLEL) computes the same as stock.

Each type splits its sequences over two ranks and is compared with stock on the whole batch: logits,
loss, every gradient, their norm and one step of AdamW, at 1e-10. test_refused.py tests all other
types.
"""

from functools import partial

import pytest
import torch
from support.architectures import MODEL_TYPES, batch
from support.architectures.mixers import MIXERS
from support.architectures.split_steps import (
    compare_logits,
    equals_stock,
    packed,
    padded,
    padded_left,
    shorter_than_sp,
    unpadded,
)
from support.architectures.steps import build
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.generation import assert_same, continuations
from support.needs import SINCE_5_23

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.model_patches.standard import MASKS_WITHOUT_POSITIONS, SEQUENCE_PARALLEL

GRANTED = sorted(SEQUENCE_PARALLEL & set(MODEL_TYPES))
# The type of the fast tests, which has delta nets. test_context_of_types.py has a fast test of
# attention sinks and windows.
FAST = ("qwen3_5_moe_text",)
# Types with sliding windows, attention sinks, latent attention, or layers with more heads.
WINDOWS_SINKS_OR_LATENT = ("gpt_oss", "deepseek_v3", "gemma4_text", "mimo_v2_flash")
# The layers of this type share keys, and stock cannot train it with reentrant checkpointing.
NOT_REENTRANT = ("mistral_large4",)
# Stock has no gradient checkpointing for this type.
NOT_CHECKPOINTED = ("jetmoe",)
# Stock scales a query by its token number in the row, not in the packed document.
NUMBERS_TOKENS_OF_ROWS = ("llama4", "llama4_text")
# The layers of a type have 4 and 6 heads, or 4 and 2, so 2 is the only sp_size > 1 that divides
# both. All layers of JetMoE have 6.
SP_2_ALONE = ("dots3_note", "dots3_note_text", "jetmoe", "laguna", "step3p7")


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
        compare_logits(model, stock, micro)
        with torch.no_grad():
            got, want = (m(**micro) for m in (model, stock))
        assert_close("loss of evaluation", got.loss, want.loss, FP64_MODEL)
        assert got.logits is None, "nobody can use a slice of the logits"
        assert_same(model_type, continuations(model, rank), continuations(stock, rank))


# Stock attends to padding there, and the experts of a patched model do not compute padding.
STOCK_IS_WRONG = {} if SINCE_5_23 else {"glm_moe_dsa": "this stock code adds boolean masks"}
TWO_RANKS = [
    Check(
        name,
        2,
        partial(equals_stock, name),
        slow=name not in FAST,
        skip=STOCK_IS_WRONG.get(name, ""),
    ).as_parameter()
    for name in GRANTED
]
PACKED = [
    Check(f"{name}, packed", 2, partial(equals_stock, name, make=packed), slow=True).as_parameter()
    for name in GRANTED
    # Stock mixes packed documents in these types (test_mixers.py tests them).
    if name not in {*MIXERS, *MASKS_WITHOUT_POSITIONS, *NUMBERS_TOKENS_OF_ROWS}
]
UNPADDED = [
    Check(f"{name}, unpadded", 2, partial(equals_stock, name, make=unpadded), slow=True)
    for name in GRANTED
    if name in MIXERS
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
    if "packed" not in kind or name not in MASKS_WITHOUT_POSITIONS
]
# One type for each division of mixers: by heads (two types), a halo, only keys, not divided.
FOUR_RANKS += [
    Check(f"{name}, {kind}", 4, partial(equals_stock, name, **options), slow=True).as_parameter()
    for name in ("qwen3_5_moe_text", "nemotron_h", "lfm2_moe", "glm_moe_dsa", "minimax")
    for kind, options in {
        "sp 4, padded left": {"sp": 4, "make": padded_left},
        "sp 4, padded left, reentrant": {"sp": 4, "make": padded_left, "use_reentrant": True},
        "sp 2, padded left, not reentrant": {"make": padded_left, "use_reentrant": False},
    }.items()
    if name in GRANTED
]
# Each kind of mixer, with a last rank that has only padding.
FOUR_RANKS += [
    Check(
        f"{name}, sp 4, three tokens",
        4,
        partial(equals_stock, name, sp=4, make=shorter_than_sp),
        slow=True,
    ).as_parameter()
    for name in (
        *("qwen3_5_moe_text", "kimi_linear", "nemotron_h", "jamba", "lfm2_moe"),
        *("glm_moe_dsa", "deepseek_v4", "minimax"),
    )
    if name in GRANTED and name not in SP_2_ALONE
]


@pytest.mark.parametrize("claim", TWO_RANKS)
def test_every_granted_type_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", CHECKPOINTED)
def test_checkpointed_types_equal_stock(found: Found, claim: Check) -> None:
    """Layers are recomputed in backward with the same slices as in forward."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", [check.as_parameter() for check in UNPADDED])
def test_batches_without_a_mask_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", PADDED_LEFT)
def test_batches_padded_left_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", PACKED + FLASH)
def test_packed_rows_and_flash_attention_equal_stock(found: Found, claim: Check) -> None:
    """Flash attention (support/fakes/flash.py) receives attention sinks as an argument."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", TRAINED)
def test_evaluation_and_generation_after_a_step_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", FOUR_RANKS)
def test_types_on_four_ranks_equal_stock(found: Found, claim: Check) -> None:
    """With sp 2 there are two sp groups; with sp 4 there are more ranks than key-value heads."""
    found.raise_if_failed(claim)
