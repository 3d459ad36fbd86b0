"""Models with sp_size > 1 compute the same as stock in one process, in fp64.

The tests compare the loss, logits, gradients, and parameters after three steps.
"""

import gc
import weakref
from functools import partial
from typing import Any, cast

import pytest
import torch
from support import checks, parity, split_rows
from support.architectures import tiny_config
from support.checks import Check, Found
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.needs import SINCE_5_23
from support.parity import CHECKPOINT, REENTRANT, TWO_FORWARDS, Case, on_ranks
from support.split_rows import padded, three_tokens
from support.tiny_models import batch, tiny
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from hf_moe_ep import apply_ep_fsdp2, data_parallel_size, global_token_count, patch, unpatch
from hf_moe_ep.sequence.slices import Slice
from hf_moe_ep.sequence.ulysses import _slice_mask, check_heads
from hf_moe_ep.upstream.attention_interface import copy_with_stock_config
from hf_moe_ep.upstream.models import list_attention_heads

# No sp_size > 1 divides this length. The documents fill a row of 12 tokens.
LENGTH, DOCUMENTS = 11, (5, 3, 4)
packed = partial(split_rows.packed, DOCUMENTS)
packed_by_lengths = partial(split_rows.packed_by_lengths, DOCUMENTS)
FLASH = {"prepare": use_fake_flash}
PADDED = {"micro_batches": partial(padded, "right", LENGTH, 6)}
LEFT = {"micro_batches": partial(padded, "left", LENGTH, 6)}
TWO_RANKS = [
    Case("sp 2, ep 2, checkpoint", 2, 2, sp=2, prepare=CHECKPOINT),
    Case("sp 2, packed", 2, 2, sp=2, micro_batches=packed),
    Case("sp 2, packed, flash", 2, 2, sp=2, micro_batches=packed).with_(**FLASH),
]
TWO_RANKS_MORE = [
    Case("sp 2, padded right", 2, 2, sp=2).with_(**PADDED),
    Case("sp 2", 2, 1, sp=2),
    Case("flash", 2, 1, sp=2, micro_batches=parity.even_batches).with_(**FLASH),
    Case("flash, padded", 2, 1, sp=2).with_(**PADDED).with_(**FLASH),
    Case("flash, lengths", 2, 1, sp=2, micro_batches=packed_by_lengths).with_(**FLASH),
]
FOUR_RANKS = [
    Case(
        "sp 2, HSDP, padded left", 4, 2, 2, sp=2, micro_batches=partial(padded, "left", LENGTH, 6)
    ),
    Case("sp 2, two forwards, checkpoint", 4, 2, sp=2, prepare=CHECKPOINT).with_(**TWO_FORWARDS),
    Case("sp 4, ep 2: one kv head on two ranks", 4, 2, sp=4),
    Case("sp 2, ep 2", 4, 2, sp=2),
    Case("sp 4, ep 4, two forwards, reentrant", 4, 4, sp=4, prepare=REENTRANT).with_(
        **TWO_FORWARDS
    ),
    Case("sp 4, three tokens", 4, 2, sp=4, micro_batches=three_tokens),
    Case("sp 2, gather_logits", 4, 4, sp=2).with_config(gather_logits=True),
]


@pytest.mark.parametrize("claim", on_ranks(TWO_RANKS))
def test_split_sequences_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(TWO_RANKS_MORE + FOUR_RANKS, slow=True))
def test_more_splits_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def embeddings_of_the_whole_sequence_are_freed(rank: int, world: int) -> None:
    """A checkpointed layer keeps its arguments, but only a slice of the hidden states."""
    model = apply_ep_fsdp2(tiny(seed=rank), sp_size=2)
    parity.checkpointing(model, False)
    model.train()
    kept: list[weakref.ref[torch.Tensor]] = []
    model.model.embed_tokens.register_forward_hook(lambda *a: kept.append(weakref.ref(a[-1])))
    (micro,) = packed(model, 0, 1, 0)
    loss = model(**micro).loss
    gc.collect()
    assert len(kept) == 1 and kept[0]() is None
    loss.backward()


def a_packed_row_has_the_loss_of_its_documents(rank: int, world: int) -> None:
    """The stock model runs each document alone."""
    model, reference = tiny(seed=rank), tiny(seed=0)
    apply_ep_fsdp2(model, ep_size=2, sp_size=2)
    (micro,) = packed(reference, 0, 1, 0)
    got = model(**micro, num_items_in_batch=10).loss
    parts = zip(micro["input_ids"].split([5, 3, 4], 1), micro["labels"].split([5, 3, 4], 1))
    want = sum(reference(input_ids=i, labels=t, num_items_in_batch=10).loss for i, t in parts)
    assert_close("loss of three documents", got, want, FP32_INSIDE)
    mask = torch.ones_like(micro["input_ids"])
    got = model(**micro, attention_mask=mask, num_items_in_batch=10).loss
    assert_close("loss with a mask of ones", got, want, FP32_INSIDE)
    mask[:, -1] = 0
    with pytest.raises(ValueError, match="packed documents, but the attention_mask has zeros"):
        model(**micro, attention_mask=mask)


def aux_loss_counts_no_padding(rank: int, world: int) -> None:
    """Loss and router gradients equal those of stock, although slices are padded."""
    sizes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, reference = tiny(seed=rank, **sizes), tiny(seed=0, **sizes)
    apply_ep_fsdp2(model, ep_size=2, sp_size=2)
    (micro,) = padded("right", LENGTH, 6, reference, 0, 1, 0)
    for count in (None, global_token_count(model, micro["labels"])):
        model.zero_grad()
        reference.zero_grad()
        extra = {} if count is None else {"num_items_in_batch": count}
        got, want = model(**micro, **extra), reference(**micro, **extra)
        assert_close("aux loss", got.aux_loss, want.aux_loss, FP32_INSIDE)
        assert_close("loss with aux", got.loss, want.loss, FP32_INSIDE)
        (got.loss * data_parallel_size(model)).backward()
        want.loss.backward()
        for name, parameter in reference.named_parameters():
            if ".gate." in name:
                grad = model.get_parameter(name).grad.full_tensor()
                assert_close(f"{name}, count {count}", grad, parameter.grad, FP32_INSIDE)


def unsupported_arguments_raise(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(seed=rank), ep_size=2, sp_size=2)
    with pytest.raises(ValueError, match="given different batches"):
        model(**batch(model, 2, 9, seed=rank))
    micro = batch(model, 2, 9)
    with pytest.raises(ValueError, match="logits_to_keep=1 selects positions"):
        model(**micro, logits_to_keep=1)
    with pytest.raises(ValueError, match="return_dict=False is not supported"):
        model(**micro, return_dict=False)
    with pytest.raises(ValueError, match=r"output_attentions=True.*sp_size=2"):
        model(**micro, output_attentions=True)
    for name in ("labels", "attention_mask"):
        longer = torch.nn.functional.pad(micro[name], (0, 1))
        for wrong in (longer, micro[name][:, :8]):
            size = wrong.shape[1]
            with pytest.raises(ValueError, match=rf"{name} .*\(2, {size}\), .*2 rows of 9 tokens"):
                model(**micro | {name: wrong})


def shifted_labels_and_states_equal_stock(rank: int, world: int) -> None:
    """With labels, which the caller may shift, the output has only the loss.

    Without labels it has hidden states and router logits of the whole sequence.
    """
    model, reference = tiny(seed=rank), tiny(seed=0).eval()
    apply_ep_fsdp2(model, ep_size=2, sp_size=2)
    micro = batch(reference, 2, 9)
    outputs = model(**micro, output_hidden_states=True)
    assert outputs.keys() == {"loss"}, "nobody can use a slice of logits or hidden states"
    shifted = torch.nn.functional.pad(micro["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    want = reference(**micro, shift_labels=shifted, output_hidden_states=True)
    got = model(**micro, shift_labels=shifted).loss
    assert_close("shifted labels", got, want.loss, FP32_INSIDE)
    unlabelled = {name: x for name, x in micro.items() if name != "labels"}
    got = model(**unlabelled, output_hidden_states=True, output_router_logits=True)
    for state, other in zip(got.hidden_states, want.hidden_states, strict=True):
        assert_close("hidden states", state, other, FP64_MODEL)
    assert got.router_logits[0].shape[0] == micro["input_ids"].numel()


def a_mask_per_head_equals_stock(rank: int, world: int) -> None:
    """The caller may pass a mask (B, Q, S, S). This mask has another window for every head."""
    model, reference = tiny(seed=rank), tiny(seed=0)
    apply_ep_fsdp2(model, ep_size=2, sp_size=2)
    micro = batch(reference, 2, 9)
    distance = torch.arange(9).view(-1, 1) - torch.arange(9)
    windows = torch.tensor([2, 3, 5, 9]).view(-1, 1, 1)
    mask = ((distance >= 0) & (distance < windows)).expand(2, -1, -1, -1)
    got, want = (m(**micro | {"attention_mask": mask}).loss for m in (model, reference))
    assert_close("a mask per head", got, want, FP32_INSIDE)
    got.backward()
    want.backward()
    for name, parameter in reference.named_parameters():
        grad = model.get_parameter(name).grad.full_tensor()
        assert_close(name, grad, parameter.grad, FP64_MODEL)


def a_custom_ignore_index_equals_stock(rank: int, world: int) -> None:
    """Stock passes `ignore_index` on to its loss, also with shifted labels."""
    model, reference = tiny(seed=rank), tiny(seed=0)
    apply_ep_fsdp2(model, ep_size=2, sp_size=2)
    micro = batch(reference, 2, 9)
    labels = micro["labels"].masked_fill(micro["labels"] == -100, 3)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=3)[:, 1:].contiguous()
    for options in ({}, {"shift_labels": shifted}, {"num_items_in_batch": torch.tensor(5)}):
        inputs = {**micro, "labels": labels, "ignore_index": 3, **options}
        assert_close(str([*options]), model(**inputs).loss, reference(**inputs).loss, FP32_INSIDE)


def every_rank_generates_its_own_text(rank: int, world: int) -> None:
    """generate() does not split prompts, so each rank may have another prompt."""
    model, reference = tiny(seed=rank), tiny(seed=0).eval()
    apply_ep_fsdp2(model, ep_size=2, sp_size=2).eval()
    prompt = batch(reference, 1, 4, seed=rank)["input_ids"]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for use_cache in (True, False):
        got, want = (
            m.generate(prompt, **settings, use_cache=use_cache) for m in (model, reference)
        )
        assert torch.equal(got, want), f"use_cache={use_cache}"


def compiled_equals_stock(rank: int, world: int) -> None:
    """A checkpointed model is compiled, with graph breaks at exchanges, for two batch lengths."""
    reference, model = tiny(seed=0), tiny(seed=rank)
    CHECKPOINT(model)
    apply_ep_fsdp2(model, ep_size=2, sp_size=2)
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    for step, length in enumerate((9, 12)):
        micro = batch(reference, 2, length, seed=step, pad=2)
        got, want = compiled(**micro).loss, reference(**micro).loss
        assert_close(f"loss of step {step}", got, want, FP32_INSIDE)
        got.backward()
        want.backward()
    for name, parameter in reference.named_parameters():
        grad = model.get_parameter(name).grad.full_tensor()
        assert_close(name, grad, parameter.grad, FP64_MODEL)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


ON_TWO_RANKS = [
    # Older versions of transformers checkpoint a layer with its hooks, and keep its whole inputs.
    *([embeddings_of_the_whole_sequence_are_freed] if SINCE_5_23 else []),
    a_packed_row_has_the_loss_of_its_documents,
    aux_loss_counts_no_padding,
    unsupported_arguments_raise,
    shifted_labels_and_states_equal_stock,
    a_mask_per_head_equals_stock,
    a_custom_ignore_index_equals_stock,
    every_rank_generates_its_own_text,
]


@pytest.mark.parametrize(
    "claim",
    [
        *checks.on_ranks(2, *ON_TWO_RANKS),
        *checks.on_ranks(2, compiled_equals_stock, slow=True),
    ],
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("size", ["sp_size", "cp_size"])
def test_another_attention_after_patch_is_refused(size: str) -> None:
    """Masks would be built for the new function, but the old function would get them."""
    model = patch(tiny(), **{size: 2})
    attention = model.model.layers[0].self_attn
    copy_with_stock_config(attention)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"was 'sdpa' when this .* and is 'eager' now, but Qwen3"):
        copy_with_stock_config(attention)


def test_unpatch_removes_hooks_and_restores_attention() -> None:
    model, stock = tiny(), tiny()
    patch(model, sp_size=2)
    unpatch(model)
    assert vars(model).keys() == vars(stock).keys()
    for module, other in zip(model.modules(), stock.modules(), strict=True):
        assert not module._forward_pre_hooks and not module._forward_hooks
        if hasattr(other, "config"):
            assert module.config._attn_implementation == other.config._attn_implementation


def test_an_impossible_sp_size_names_possible_sizes() -> None:
    with pytest.raises(
        ValueError, match=r"sp_size \(3\) must divide the attention heads \(4\).*1, 2, 4"
    ):
        patch(tiny(), sp_size=3)
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        patch(tiny(attn_implementation="eager"), sp_size=2)


def test_heads_that_differ_by_layer_are_compared_before_training() -> None:
    heads = list_attention_heads(tiny_config("laguna", num_attention_heads_per_layer=[4, 6, 4, 6]))
    assert heads == {(4, 2), (6, 2)}
    check_heads(heads, 2)
    with pytest.raises(ValueError, match=r"sp_size \(4\).*attention heads \(6\).*; try 1, 2$"):
        check_heads(heads, 4)


def test_a_block_mask_per_head_is_cut_to_the_heads_of_a_rank() -> None:
    windows = torch.tensor([2, 3, 5, 8])

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < windows[head])

    mask = create_block_mask(mask_mod, 1, 4, 8, 8, device="cpu")
    whole = create_mask(mask_mod, 1, 4, 8, 8, device="cpu")
    computed: dict[Any, Any] = {}
    own = _slice_mask(mask, Slice(cast(Any, None), 1, 2, 8), computed)
    assert own.shape == (1, 2, 8, 8)
    assert torch.equal(create_mask(own.mask_mod, 1, 2, 8, 8, device="cpu"), whole[:, 2:])
    assert _slice_mask(mask, Slice(cast(Any, None), 1, 2, 8), computed) is own
