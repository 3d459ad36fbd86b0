"""Every model type with context parallelism (CONTEXT_PARALLEL) computes the same as stock.

Each type splits its sequences over two cp ranks and is compared with stock on the whole batch:
logits, loss, every gradient, their norm and one step of AdamW, at 1e-10. test_context.py tests more
layouts.
"""

from functools import partial
from typing import Any

import pytest
from support.architectures import MODEL_TYPES
from support.architectures.mixers import MIXERS
from support.architectures.split_steps import (
    equals_stock,
    packed,
    padded_left,
    shorter_than_sp,
    unpadded,
)
from support.checks import Check, Found
from support.parity import OF_ONE_SIZE

from hf_moe_ep.model_patches.standard import CONTEXT_PARALLEL, MASKS_WITHOUT_POSITIONS

GRANTED = sorted(CONTEXT_PARALLEL & set(MODEL_TYPES))
# The types of the fast tests: attention sinks and windows, and a delta net.
FAST = ("gpt_oss", "qwen3_5_moe_text")
# These types are compared in more layouts and with more batches.
MORE = (
    *FAST,
    "deepseek_v3",
    "glm_moe_dsa",
    "gemma4_text",
    "mimo_v2_flash",
    "minimax",
    "nemotron_h",
    "openai_privacy_filter",
)
# Stock mixes packed documents in these types (test_mixers.py tests them).
NOT_PACKED = {*MIXERS, *MASKS_WITHOUT_POSITIONS}
compare = partial(equals_stock, sp=1, cp=2)

TWO_RANKS = [
    Check(name, 2, partial(compare, name), slow=name not in FAST).as_parameter() for name in GRANTED
]
BATCHES = [
    Check(f"{name}, {make.__name__}", 2, partial(compare, name, make=make), slow=True)
    for name in MORE
    for make in (padded_left, unpadded, packed)
    if make is not packed or name not in NOT_PACKED
]
CHECKPOINTED = [
    Check(f"{name}, reentrant {mode}", 2, partial(compare, name, use_reentrant=mode), slow=True)
    for name in MORE
    for mode in (False, True)
]
FLASH = [
    Check(f"{name}, flash, {make.__name__}", 2, partial(compare, name, make=make, flash=True))
    for name in ("gpt_oss", "qwen3_moe")
    for make in (padded_left, unpadded, packed)
]
# The layouts of four ranks, with ep_size 2. At cp 2 there are two groups of ranks.
CP_2: dict[str, Any] = {"sp": 1, "cp": 2}
CP_4: dict[str, Any] = {"sp": 1, "cp": 4}
BOTH: dict[str, Any] = {"sp": 2, "cp": 2}
COMPILED: dict[str, Any] = {"compile_layers": OF_ONE_SIZE}
# Attention sinks, latent attention, a delta net and an indexer.
COMPILED_TYPES = ("gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "glm_moe_dsa")
FOUR_RANKS = [
    Check(
        f"{name}, {layout}",
        4,
        partial(equals_stock, name, steps=3 if name in COMPILED_TYPES else 1, **options),
        slow=True,
        timeout=600.0,
        group_timeout=300.0,
    )
    for name in MORE
    for layout, options in {
        "cp 2": CP_2,
        "cp 2, padded left, reentrant": {**CP_2, "make": padded_left, "use_reentrant": True},
        "cp 4": CP_4,
        "cp 4, packed": {**CP_4, "make": packed},
        "cp 4, padded left, checkpoint": {**CP_4, "make": padded_left, "use_reentrant": False},
        "cp 4, three tokens": {**CP_4, "make": shorter_than_sp},
        "cp 2 x sp 2, unpadded, reentrant": {**BOTH, "make": unpadded, "use_reentrant": True},
        "cp 2 x sp 2, padded left": {**BOTH, "make": padded_left},
        "cp 2 x sp 2, packed": {**BOTH, "make": packed},
        "cp 2 x sp 2, compiled, checkpoint": {**BOTH, **COMPILED, "use_reentrant": False},
    }.items()
    if options.get("make") is not packed or name not in NOT_PACKED
    if "compile_layers" not in options or name in COMPILED_TYPES
]
# All ranks share the batch, and the experts are split over all of them.
FOUR_RANKS += [
    Check(
        f"{name}, ep 4 x {layout}, three steps",
        4,
        partial(equals_stock, name, ep=4, steps=3, **options),
        slow=True,
    )
    for name in ("qwen3_moe", *COMPILED_TYPES)
    for layout, options in {
        "cp 4": CP_4,
        "cp 2 x sp 2": BOTH,
        "cp 4, hierarchical": {**CP_4, "dispatcher": "hierarchical", "node_size": 2},
    }.items()
]


@pytest.mark.parametrize("claim", TWO_RANKS)
def test_every_granted_type_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", [check.as_parameter() for check in BATCHES + CHECKPOINTED])
def test_other_batches_and_checkpoints_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("claim", [check.as_parameter() for check in FLASH])
def test_flash_attention_equals_stock(found: Found, claim: Check) -> None:
    """The queries of a call are fewer than its keys (support/fakes/flash.py)."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", [check.as_parameter() for check in FOUR_RANKS])
def test_types_on_four_ranks_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
