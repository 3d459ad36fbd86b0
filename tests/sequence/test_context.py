"""Context parallelism (cp_size), compared with stock in one process in fp64.

Gradients, their norm, parameters after three steps, the loss and logits are compared. All types of
models are compared in test_context_of_types.py.
"""

from functools import partial

import pytest
import torch
from support import parity
from support.adapters import with_lora
from support.checks import Check, Found
from support.fakes.flash import use_fake_flash
from support.parity import Batch, Case, on_ranks
from support.quantised import SIZES, dequantise_experts
from support.tiny_models import batch
from torch import nn

CHECKPOINT = partial(parity.checkpointing, use_reentrant=False)
REENTRANT = partial(parity.checkpointing, use_reentrant=True)
TWO_FORWARDS = {
    "micro_batches": parity.three_micro_batches,
    "backward": parity.two_forwards_backward,
}


def padded(side: str, model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Return padded rows of 13 tokens, a length that no cp_size > 1 divides."""
    micro = batch(model, 3, 13, seed=10 * step + rank, pad=7)
    if side == "left":
        micro = {name: value.flip(1) for name, value in micro.items()}
        micro["labels"][:, -1] = micro["input_ids"][:, -1]
    return [micro]


def three_tokens(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Return rows of 3 tokens. With cp 4, all tokens of a rank are padding."""
    return [batch(model, 2, 3, seed=10 * step + rank)]


def packed(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Pack documents of 5, 3, 9 and 2 tokens in one row; position_ids restart at 0 in each."""
    micro = batch(model, 1, 19, seed=10 * step + rank)
    del micro["attention_mask"]
    position_ids = torch.cat([torch.arange(length) for length in (5, 3, 9, 2)]).unsqueeze(0)
    micro["labels"][:, [0, 5, 8, 17]] = -100
    return [{**micro, "position_ids": position_ids, "use_cache": False}]


def packed_by_lengths(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Return the same row, with the lengths of its documents for flash attention."""
    (micro,) = packed(model, rank, world, step)
    lengths = torch.tensor([0, 5, 8, 17, 19], dtype=torch.int32)
    return [
        {**micro, "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
        | {"max_length_q": 9, "max_length_k": 9}
    ]


FLASH = {"prepare": use_fake_flash}
PADDED = {"micro_batches": partial(padded, "right")}
LEFT = {"micro_batches": partial(padded, "left")}
TWO_RANKS = [
    Case("cp 2", 2, 1, cp=2),
    Case("cp 2, ep 2, checkpoint", 2, 2, cp=2, prepare=CHECKPOINT),
    Case("cp 2, padded right", 2, 2, cp=2).with_(**PADDED),
    Case("cp 2, packed", 2, 2, cp=2, micro_batches=packed),
    Case("cp 2, packed, flash", 2, 2, cp=2, micro_batches=packed).with_(**FLASH),
]
TWO_RANKS_MORE = [
    Case("padded left", 2, 2, cp=2).with_(**LEFT),
    Case("reentrant", 2, 2, cp=2, prepare=REENTRANT),
    Case("two forwards", 2, 2, cp=2, prepare=CHECKPOINT).with_(**TWO_FORWARDS),
    Case("even, flash", 2, 1, cp=2, micro_batches=parity.even_batches).with_(**FLASH),
    Case("padded, flash", 2, 1, cp=2).with_(**PADDED, **FLASH),
    Case("padded left, flash", 2, 1, cp=2).with_(**LEFT, **FLASH),
    Case("lengths, flash", 2, 1, cp=2, micro_batches=packed_by_lengths).with_(**FLASH),
    Case("gather_logits", 2, 2, cp=2).with_config(gather_logits=True),
    Case("compiled", 2, 2, cp=2).with_config(compile_layers="aot_eager"),
    Case("compiled, checkpoint", 2, 1, cp=2, prepare=CHECKPOINT).with_config(
        compile_layers="aot_eager"
    ),
    Case("LoRA", 2, 2, cp=2, wrap=with_lora),
    Case("LoRA, experts in nf4", 2, 2, cp=2, wrap=with_lora, model=SIZES["nf4"]).with_(
        config={"experts_dtype": "nf4"}, change_reference=partial(dequantise_experts, kind="nf4")
    ),
]
FOUR_RANKS = [
    Case("cp 2 x sp 2, ep 4, padded", 4, 4, cp=2, sp=2).with_(**PADDED),
    Case("cp 4, ep 4, packed", 4, 4, cp=4, micro_batches=packed),
]
FOUR_RANKS_MORE = [
    Case("cp 2, ep 2", 4, 2, cp=2),
    Case("cp 4, three tokens", 4, 2, cp=4, micro_batches=three_tokens),
    Case("cp 2 x sp 2, packed", 4, 2, cp=2, sp=2, micro_batches=packed),
    Case("cp 2 x sp 2, flash", 4, 2, cp=2, sp=2, micro_batches=packed).with_(**FLASH),
    Case("cp 2, HSDP, padded left", 4, 2, 2, cp=2).with_(**LEFT),
    Case("cp 2, ep outside", 4, 2, cp=2).with_config(ep_outside=True),
    Case("cp 4, reentrant, two forwards", 4, 4, cp=4, prepare=REENTRANT).with_(**TWO_FORWARDS),
    Case("cp 4, hierarchical", 4, 4, cp=4).with_config(dispatcher="hierarchical", node_size=2),
]


@pytest.mark.parametrize("claim", on_ranks(TWO_RANKS + FOUR_RANKS))
def test_context_parallel_equals_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(TWO_RANKS_MORE + FOUR_RANKS_MORE, slow=True))
def test_more_layouts_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
