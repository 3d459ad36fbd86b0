"""Modules that mix tokens outside of the attention interface: packed rows, and what is refused.

`test_granted.py` compares the types with such modules with stock on padded rows. Stock mixes packed
documents in these modules, so here each document is compared with stock's run of it alone.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import batch
from support.architectures.mixers import MIXERS
from support.architectures.steps import assert_same_grads, build
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.parity import checkpointing
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL

Batch = dict[str, Tensor]
GRANTED = sorted(MIXERS.keys() & SEQUENCE_PARALLEL)
# Fast tests: a delta net, and an indexer inside of an attention.
FAST = ("qwen3_next", "deepseek_v32")
# Lengths of the documents in two rows. At sp_size 2 a document of each row continues on rank 1.
DOCUMENTS = ((9, 3, 7), (2, 11, 6))


def documents(model: nn.Module) -> list[Batch]:
    """Make the documents of all rows as batches of their own. First tokens have no label."""
    lengths = [length for row in DOCUMENTS for length in row]
    return [_document(model, length, seed) for seed, length in enumerate(lengths)]


def _document(model: nn.Module, length: int, seed: int) -> Batch:
    made = batch(model, 1, length, seed=seed)
    made["labels"][:, 0] = -100
    return made


def packed(alone: list[Batch]) -> Batch:
    """Pack the documents into rows, whose position_ids restart at 0 in each document."""
    rows: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    remaining = iter(alone)
    for row in DOCUMENTS:
        taken = [next(remaining) for _ in row]
        for name in ("input_ids", "labels"):
            rows[name].append(torch.cat([document[name] for document in taken], dim=1))
        rows["position_ids"].append(torch.cat([torch.arange(n) for n in row]).unsqueeze(0))
    return {name: torch.cat(values) for name, values in rows.items()}


def assert_documents_are_alone(
    where: str, model: nn.Module, stock: nn.Module, *, masked: bool = False
) -> None:
    """Compare loss, logits and gradients of packed rows with stock's run of each document."""
    alone = documents(stock)
    rows = packed(alone)
    if masked:
        rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    num_tokens = sum(document["labels"][:, 1:].ne(-100).sum() for document in alone)
    unlabelled = {name: x for name, x in rows.items() if name != "labels"}
    with torch.no_grad():
        got = model(**unlabelled, use_cache=False).logits.flatten(0, 1)
        logits = [stock(input_ids=x["input_ids"], use_cache=False).logits for x in alone]
    assert_close(f"{where}: logits", got, torch.cat(logits, dim=1).flatten(0, 1), FP64_MODEL)
    loss = model(**rows, num_items_in_batch=num_tokens, use_cache=False).loss
    loss.backward()
    total = torch.zeros_like(loss)
    for document in alone:
        want = stock(**document, num_items_in_batch=num_tokens, use_cache=False).loss
        want.backward()
        total += want.detach()
    assert_close(f"{where}: loss", loss, total, FP64_MODEL)
    assert_same_grads(where, model, stock, FP64_MODEL)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in GRANTED],
)
def test_packed_documents_are_alone_without_sequence_parallelism(model_type: str) -> None:
    """A mask of ones does not hide the packing."""
    with FP64():
        for masked in (False, True):
            model, stock = patch(build(model_type)), build(model_type)
            assert_documents_are_alone(model_type, model, stock, masked=masked)


def _packed_on_two_ranks(
    model_type: str, rank: int, world: int, *, use_reentrant: bool | None = None
) -> None:
    with FP64():
        model, stock = build(model_type, seed=rank), build(model_type)
        if use_reentrant is not None:
            checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=2, sp_size=world)
        assert_documents_are_alone(model_type, model, stock, masked=True)


PACKED = [
    Check(name, 2, partial(_packed_on_two_ranks, name), slow=name not in FAST).as_parameter()
    for name in GRANTED
]
CHECKPOINTED: list[Any] = [
    Check(
        f"{name}, {'reentrant' if use_reentrant else 'not reentrant'}",
        2,
        partial(_packed_on_two_ranks, name, use_reentrant=use_reentrant),
        slow=True,
    ).as_parameter()
    for name in GRANTED
    for use_reentrant in (False, True)
]


@pytest.mark.parametrize("claim", PACKED)
def test_packed_documents_are_alone(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", CHECKPOINTED)
def test_checkpointed_packed_documents_are_alone(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
