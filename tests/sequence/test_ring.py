"""Ring attention and its gradients equal attention to the whole sequence, in fp64.

On a CPU the ring computes in plain PyTorch, because FlexAttention has no backward there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import parity
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.parity import CHECKPOINT, REENTRANT, Batch, Case
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from transformers import masking_utils

from hf_moe_ep import apply_ep_fsdp2, describe, patch
from hf_moe_ep.ranks import collectives
from hf_moe_ep.sequence import ring
from hf_moe_ep.sequence.context import attend
from hf_moe_ep.sequence.partial_attention import (
    QueryKeyRange,
    ScoreOptions,
    attend_to_part,
    merge_parts,
    slice_block_mask,
)
from hf_moe_ep.sequence.ring import attend_by_ring
from hf_moe_ep.sequence.slices import Slice, make_zigzag_order

ROWS, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 2, 4, 2, 6, 5
# The first tokens of the documents of a packed row.
STARTS = (0, 5, 6, 17)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 4)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    same = torch.ones((), dtype=torch.bool)
    for start in STARTS:
        same = same & ((q >= start) == (k >= start))
    return (q >= k) & same


def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Row 1 begins with 3 tokens of padding, which see no token."""
    return (q >= k) & (k >= 3 * b)


def everything(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0


@dataclass(frozen=True)
class Kind:
    mask: Callable[..., Tensor]
    length: int = 24
    softcap: float | None = None
    sinks: bool = False
    zigzag: bool = True


KINDS = {
    "causal": Kind(causal, length=32),
    "odd length": Kind(causal, length=21),
    "three tokens": Kind(causal, length=3),
    "window": Kind(window),
    "documents": Kind(documents),
    "padded": Kind(padded, length=19),
    "not causal, in order": Kind(everything, zigzag=False),
    "soft cap": Kind(causal, softcap=0.7),
    "sinks": Kind(causal, sinks=True),
}


def test_dropout_is_refused_as_in_stock() -> None:
    """Stock's function of FlexAttention also raises a ValueError, but the ring does not call it."""
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flex_attention"))
    mask = create_block_mask(causal, 1, 1, 8, 8, device="cpu")
    whole = Slice(cast(Any, None), 0, 2, 8, order=make_zigzag_order(2))
    query, key, value, _, _ = _make_inputs(4)
    with pytest.raises(ValueError, match=r"no dropout, and attention_dropout is 0.1; set config"):
        attend(flex_attention, module, query, key, value, mask, whole, dropout=0.1)


def _make_inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE_WIDTH), (HEADS, VALUE_WIDTH))
    query, key, value, grad = (
        torch.randn(ROWS, n, length, width, dtype=torch.float64, generator=generator)
        for n, width in sizes
    )
    sinks = torch.randn(HEADS, dtype=torch.float64, generator=generator)
    return query, key, value, grad, sinks


def _compute_dense(
    kind: Kind, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """Compute attention to the whole sequence by the formula."""
    visible = create_mask(kind.mask, ROWS, 1, kind.length, kind.length, device="cpu")
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = query @ key.mT / WIDTH**0.5
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    hidden = ~visible & visible.any(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    shares = scores.softmax(-1)[..., : kind.length]
    return (shares * visible.any(-1, keepdim=True)) @ value


def ring_equals_dense(name: str, rank: int, world: int) -> None:
    kind = KINDS[name]
    query, key, value, grad, sinks = _make_inputs(kind.length)
    order = make_zigzag_order(world) if kind.zigzag else None
    assert dist.group.WORLD is not None
    context = Slice(dist.group.WORLD, rank, world, kind.length, order=order)
    mask = create_block_mask(
        kind.mask, ROWS, 1, kind.length, kind.length, device="cpu", BLOCK_SIZE=2
    )
    own = [context.take(x, 2).requires_grad_() for x in (query, key, value)]
    own_sinks = sinks.clone().requires_grad_() if kind.sinks else None
    sent: list[int] = []
    events: list[tuple[str, int]] = []
    stock = collectives.send_to_next

    def counted(x: Tensor, group: dist.ProcessGroup, *, tag: int) -> Any:
        number = len(sent)
        sent.append(x.numel())
        events.append(("begin", number))
        transfer = stock(x, group, tag=tag)

        def wait() -> Tensor:
            events.append(("end", number))
            return transfer.wait()

        return SimpleNamespace(wait=wait)

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        events.append(("attend", 0))
        return attend_to_part(*args, **kwargs)

    with (
        mock.patch.object(ring, "send_to_next", counted),
        mock.patch.object(ring, "attend_to_part", side_effect=attend) as calls,
    ):
        out = attend_by_ring(*own, ScoreOptions(mask, softcap=kind.softcap), own_sinks, context)
        forward_sent, forward_calls = sum(sent), calls.call_count
        (out * context.take(grad, 2).transpose(1, 2)).sum().backward()
    whole = [x.requires_grad_() for x in (query, key, value)]
    whole_sinks = sinks.requires_grad_() if kind.sinks else None
    want = _compute_dense(kind, *whole, whole_sinks)
    (want * grad).sum().backward()
    real = sum(stop - start for start, stop in context.spans)
    got = out.detach().transpose(1, 2)
    if real:
        want_own = context.take(want.detach(), 2)
        pieces = zip(
            got.split(context.piece_length, 2), want_own.split(context.piece_length, 2), strict=True
        )
        for (start, stop), (got_piece, want_piece) in zip(context.spans, pieces, strict=True):
            if start < stop:
                real_tokens = (slice(None), slice(None), slice(stop - start))
                assert_close(name, got_piece[real_tokens], want_piece[real_tokens], FP64_MODEL)
    for letter, x, whole_x in zip("qkv", own, whole, strict=True):
        assert x.grad is not None and whole_x.grad is not None
        assert_close(f"{name}: {letter}", x.grad, context.take(whole_x.grad, 2), FP64_MODEL)
    if own_sinks is not None and own_sinks.grad is not None:
        dist.all_reduce(own_sinks.grad)
        assert sinks.grad is not None
        assert_close(f"{name}: sinks", own_sinks.grad, sinks.grad, FP64_MODEL)
    # The docstring of ring.py counts these values and pairs of pieces.
    values = ROWS * KV_HEADS * (WIDTH + VALUE_WIDTH) * context.local_length
    assert forward_sent == (world - 1) * values
    assert sum(sent) - forward_sent == 2 * (world - 1) * values
    if name == "causal":
        assert forward_calls == 3 + 2 * (world - 1)
        # Attention is computed during each transfer, also during the last transfer of backward.
        for number in range(len(sent)):
            during = events[events.index(("begin", number)) : events.index(("end", number))]
            assert ("attend", 0) in during, f"transfer {number} of {len(sent)}"


TWO = {name: partial(ring_equals_dense, name) for name in KINDS}
FOUR = {f"{name}, cp 4": x for name, x in TWO.items()}


@pytest.mark.parametrize("claim", on_ranks(2, TWO))
def test_ring_equals_dense_attention(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _average(out: Tensor, lse: Tensor, part: Tensor, lse_part: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results as if the log-sum-exps were equal, unless a query sees one part only."""
    weight, other = (x.isfinite().to(out.dtype).unsqueeze(-1) for x in (lse, lse_part))
    total = (weight + other).clamp(min=1)
    return (weight * out + other * part) / total, torch.logaddexp(lse, lse_part)


def ring_without_correction_differs(rank: int, world: int) -> None:
    with (
        mock.patch.object(ring, "merge_parts", side_effect=_average) as merged,
        pytest.raises(AssertionError, match="causal: error"),
    ):
        ring_equals_dense("causal", rank, world)
    assert merged.called


@pytest.mark.parametrize("claim", on_ranks(2, ring_without_correction_differs))
def test_the_comparison_notices_a_missing_correction(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(4, FOUR))
def test_ring_of_four_ranks_equals_dense_attention(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_plain_attention_to_a_part_equals_flex_attention() -> None:
    """FlexAttention runs on a CPU, but without gradients. In this test it is not compiled."""
    query, key, value, _, _ = _make_inputs(24)
    for kind in KINDS.values():
        mask = create_block_mask(kind.mask, ROWS, 1, 24, 24, device="cpu", BLOCK_SIZE=2)
        box = QueryKeyRange(7, 15, 2, 11)
        part = query[:, :, 7:15], key[:, :, 2:11], value[:, :, 2:11]
        got = attend_to_part(*part, ScoreOptions(mask), box, {})
        rows = slice_block_mask(mask, box)
        options = {"block_mask": rows, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        out, aux = flex_attention(*part, **options)
        assert_close("out", got[0], out, FP64_MODEL)
        assert_close("log-sum-exp", got[1].exp(), aux.lse.exp(), 1e-6)  # flex returns it in fp32


def test_a_query_that_sees_no_key_in_both_parts_gets_zeros() -> None:
    zeros, nothing = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    out, lse = merge_parts(zeros, nothing, zeros, nothing)
    assert torch.equal(out, zeros) and torch.equal(lse, nothing)


def use_sdpa(reference: nn.Module) -> None:
    reference.set_attn_implementation("sdpa")


def make_padded(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    return [batch(model, 3, 13, seed=10 * step + rank, pad=7)]


def make_packed(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    micro = batch(model, 1, 19, seed=10 * step + rank)
    del micro["attention_mask"]
    positions = torch.cat([torch.arange(n) for n in (5, 3, 9, 2)]).unsqueeze(0)
    micro["labels"][:, [0, 5, 8, 17]] = -100
    return [{**micro, "position_ids": positions, "use_cache": False}]


def make_block_mask(*args: Any, _compile: bool, **kwargs: Any) -> BlockMask:
    return create_block_mask(*args, **kwargs)


# Transformers compiles the functions that build a BlockMask, which takes minutes here.
masks_are_not_compiled = partial(
    mock.patch.object, masking_utils, "create_block_mask", make_block_mask
)


def run_model(case: Case, rank: int, world: int) -> None:
    with masks_are_not_compiled():
        parity.run_case(case, rank, world)


def compare_gpt_oss(use_reentrant: bool | None, rank: int, world: int) -> None:
    """Compare a model with attention sinks. Its window exceeds the rows, so layers use the ring."""
    window = {"sliding_window": 64}
    stock = build("gpt_oss", **window)
    model = build("gpt_oss", seed=rank, attn_implementation="flex_attention", **window)
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    micro = batch(stock, 3, 13, pad=5)
    with FP64(), masks_are_not_compiled():
        apply_ep_fsdp2(model, ep_size=2, cp_size=2)
        assert describe(model).count("sent from rank to rank") == 1
        loss, want = model(**micro, use_cache=False).loss, stock(**micro).loss
        loss.backward()
        want.backward()
    assert_close("loss", loss.detach(), want.detach(), FP64_MODEL)
    parity.assert_same_gradients("gpt_oss", model, stock, lambda name: FP64_MODEL)


FLEX = {"model": {"attn_implementation": "flex_attention"}, "change_reference": use_sdpa}
MODELS = [
    Case("flex, padded", 2, 2, cp=2, micro_batches=make_padded).with_(**FLEX),
    Case("flex, checkpoint", 2, 2, cp=2, prepare=CHECKPOINT).with_(**FLEX),
    Case("flex, reentrant", 2, 2, cp=2, prepare=REENTRANT).with_(**FLEX),
    Case("flex, compiled", 2, 2, cp=2).with_config(compile_layers="aot_eager").with_(**FLEX),
    Case("flex, packed", 4, 2, cp=4, micro_batches=make_packed).with_(**FLEX),
    Case("flex, ep 4 x cp 4", 4, 4, cp=4, micro_batches=make_padded).with_(**FLEX),
    Case("flex, hierarchical", 4, 4, cp=2)
    .with_config(dispatcher="hierarchical", node_size=2)
    .with_(**FLEX),
    Case("flex, cp 2 x sp 2", 4, 4, cp=2, sp=2).with_(**FLEX),
]
SINKS = {
    f"gpt_oss{name}": partial(compare_gpt_oss, mode)
    for name, mode in {"": None, ", checkpoint": False, ", reentrant": True}.items()
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "claim",
    [
        *(Check(c.name, c.world, partial(run_model, c)).as_parameter() for c in MODELS),
        *on_ranks(2, SINKS),
    ],
)
def test_models_with_flex_attention_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_describe_says_what_a_ring_sends() -> None:
    """A rank sends keys and values of two heads of 8 values in forward and again in backward.

    In backward it also sends gradients in fp32 or fp64. In bf16 an all-gather would send 384 bytes
    in backward, and the ring sends 576.
    """
    for dtype, sent in ((torch.float64, (768, 1_536, 2_304)), (torch.bfloat16, (192, 576, 768))):
        model = tiny(attn_implementation="flex_attention", dtype=dtype)
        report = describe(patch(model, cp_size=4))
        want = (
            "of all tokens sent from rank to rank; sends {:,} bytes per token of its part, {:,} in "
            "backward ({:,} with activation checkpointing)"
        )
        assert want.format(*sent) in report
