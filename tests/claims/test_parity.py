"""Gradients, gradient norms and parameters of N ranks equal stock in one process, in fp64.

If the number of ranks is a power of two, the budget is derived from fp64. Otherwise the division of
the loss by that number rounds in fp32, because transformers computes the loss of fp32 logits.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.checks import PATIENT, Check, Found
from support.close import FP32_INSIDE
from support.needs import GATHERS_THREE_UNITS
from support.parity import CHECKPOINT, REENTRANT, TWO_FORWARDS, Case, on_ranks, run_case
from support.same_bits import compare_fixed_buffers
from torch import nn
from torch._dynamo.utils import counters

TWO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}

ONE_RANK = [Case("1 rank", 1)]
TWO_RANKS = [
    Case("2 ranks, ep 1", 2),
    Case("2 ranks, ep 2", 2, 2),
    Case("two forwards, reentrant checkpoint, stock experts", 2, 1)
    .with_config(experts_backend="eager")
    .with_(prepare=REENTRANT, **TWO_FORWARDS),
    Case("accumulation", 2, 2, micro_batches=parity.three_micro_batches),
    Case("a rank without labels", 2, 2, micro_batches=parity.one_rank_without_labels),
    Case("one expert a rank", 2, 2, model=TWO_EXPERTS),
]
TWO_RANKS_MORE = [
    Case("one token repeated", 2, 2, micro_batches=parity.one_token_everywhere),
    Case("tied embeddings", 2, 2, model={"tie_word_embeddings": True}),
]
THREE_RANKS = [
    Case("3 ranks, ep 1", 3, budget=FP32_INSIDE),
    Case("3 ranks, ep 3", 3, 3, model={"num_experts": 6}, budget=FP32_INSIDE),
]
FOUR_RANKS = [Case("ep 2, HSDP", 4, 2, 2)]
FOUR_RANKS_MORE = [
    Case("3 chunks, two forwards, checkpoint", 4, 2, prepare=CHECKPOINT)
    .with_config(dispatch_chunks=3)
    .with_(**TWO_FORWARDS),
    Case("ep 2", 4, 2),
    Case("ep 4", 4, 4),
    Case("two forwards, reentrant checkpoint", 4, 2).with_(prepare=REENTRANT, **TWO_FORWARDS),
    Case("accumulation, 4 ranks", 4, 2, micro_batches=parity.three_micro_batches),
    Case("one token repeated, 4 ranks", 4, 2, micro_batches=parity.one_token_everywhere),
    Case("a rank without labels, ep 4", 4, 4, micro_batches=parity.one_rank_without_labels),
    Case("2 experts, ep 2", 4, 2, model=TWO_EXPERTS),
    Case("tied embeddings, 4 ranks", 4, 2, model={"tie_word_embeddings": True}),
    Case("ep 1", 4),
    Case("shard dim 0", 4, 2).with_config(expert_shard_dim=0),
    Case("shard dim 1", 4, 2).with_config(expert_shard_dim=1),
    Case("ep_outside", 4, 2).with_config(ep_outside=True),
    Case("stock experts", 4, 1).with_config(experts_backend="eager"),
    Case("no resharding", 4, 2).with_config(reshard_after_forward=False),
    Case("checkpoint", 4, 2, prepare=CHECKPOINT),
    Case("reentrant checkpoint", 4, 2, prepare=REENTRANT),
    Case("two forwards", 4, 2).with_(**TWO_FORWARDS),
    Case("two forwards, checkpoint", 4, 2, prepare=CHECKPOINT).with_(**TWO_FORWARDS),
    Case("2 chunks", 4, 2).with_config(dispatch_chunks=2),
    Case("3 chunks", 4, 4).with_config(dispatch_chunks=3),
    Case("2 chunks, HSDP, reentrant", 4, 2, 2, prepare=REENTRANT).with_config(dispatch_chunks=2),
    Case("9 chunks, checkpoint", 4, 4, prepare=CHECKPOINT).with_config(dispatch_chunks=9),
    Case("accumulation, HSDP", 4, 2, 2, micro_batches=parity.three_micro_batches),
    Case("a dense layer", 4, 2, model={"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    Case("every 2nd layer", 4, 4, model={"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    Case("weights not normalised", 4, 4, model={"norm_topk_prob": False}),
    Case("2 experts, ep 1", 4, 1, model=TWO_EXPERTS),
    Case("6 experts, ep 2", 4, 2, model={"num_experts": 6}),
]
EIGHT_RANKS = [Case("8 ranks, ep 2, HSDP", 8, 2, 2), Case("8 ranks, ep 8", 8, 8)]
MORE = TWO_RANKS_MORE + THREE_RANKS + FOUR_RANKS_MORE + EIGHT_RANKS


@pytest.mark.parametrize("claim", on_ranks(ONE_RANK + FOUR_RANKS))
def test_ranks_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(TWO_RANKS + MORE, slow=True))
def test_more_layouts_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _cut_to_odd_lengths(make: Any, *args: Any) -> list[parity.Batch]:
    """Cut the last token of rows of an even length.

    All sizes of the model are even. If a length equals one of these sizes, torch.compile treats the
    length as this size. It traces the layers again when the next length differs, which is slow.
    """
    return [
        _cut(micro, slice(None), (micro["labels"].shape[1] - 1) // 2 * 2 + 1)
        for micro in make(*args)
    ]


def _cut_to_few_sizes(
    make: Any, model: nn.Module, rank: int, world: int, step: int
) -> list[parity.Batch]:
    """Repeat and cut rows, so that a rank has 2 rows of 5 or of 7 tokens in each batch."""
    return [
        _cut({name: x.repeat(2, 4) for name, x in micro.items()}, slice(2), 5 + 2 * (rank % 2))
        if micro["labels"].shape[1] > 2
        else micro
        for micro in make(model, rank, world, step)
    ]


def _cut(micro: parity.Batch, rows: slice, length: int) -> parity.Batch:
    return {name: x[rows, :length] for name, x in micro.items()}


def _run_compiled(case: Case, rank: int, world: int) -> None:
    """Run a case with compiled layers.

    In the cases of OF_ANY_LENGTH sizes are variables of the graphs. In the other cases sizes are
    constants, which are traced much faster; the layouts do not influence the tracing.
    """
    torch.compiler.reset()
    counters.clear()
    any_length = case in OF_ANY_LENGTH
    make: Any = case.micro_batches or parity.uneven_batches
    if world != 3:  # the budget of 3 ranks holds for the batches of the uncompiled case
        make = partial(_cut_to_odd_lengths if any_length else _cut_to_few_sizes, make)
    compiled = "aot_eager" if any_length else parity.OF_ONE_SIZE
    options = {**case.config, "compile_layers": compiled}
    run_case(case.with_(micro_batches=make, config=options), rank, world)
    assert counters["stats"]["unique_graphs"], "no layer was compiled"


OF_ANY_LENGTH = [*ONE_RANK, *TWO_RANKS[:2], TWO_RANKS[3]]
COMPILED = [
    Check(
        f"{case.name}, compiled",
        case.world,
        partial(_run_compiled, case),
        slow=True,
        **PATIENT,
    ).as_parameter()
    for case in ONE_RANK + TWO_RANKS + FOUR_RANKS + MORE
]


FIXED_BUFFERS = [
    Check(
        f"{case.name}, fixed buffers",
        case.world,
        partial(compare_fixed_buffers, case),
        skip=GATHERS_THREE_UNITS if case.prepare is REENTRANT else "",
        slow=True,
    ).as_parameter()
    for case in ONE_RANK + TWO_RANKS + FOUR_RANKS + MORE
]


@pytest.mark.parametrize("claim", FIXED_BUFFERS)
def test_fixed_buffers_have_the_same_bits(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", COMPILED)
def test_compiled_layers_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
