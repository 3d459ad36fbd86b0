"""Models with cp_size > 1 compute the same as stock in one process, in fp64.

The tests compare the loss, logits, gradients, their norm, and parameters after three steps.
test_context_of_types.py compares all types of models.
"""

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from support import checks, parity, split_rows
from support.adapters import with_lora
from support.architectures import tiny as tiny_of
from support.checks import Check, Found
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.parity import CHECKPOINT, OF_ONE_SIZE, REENTRANT, TWO_FORWARDS, Case, on_ranks
from support.quantised import SIZES, dequantise_experts
from support.split_rows import padded, three_tokens
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_ep import apply_ep_fsdp2, describe, patch
from hf_moe_ep.sequence import context, slices

# No cp_size > 1 divides this length. The documents fill a row of 19 tokens.
LENGTH, DOCUMENTS = 13, (5, 3, 9, 2)
packed = partial(split_rows.packed, DOCUMENTS)
packed_by_lengths = partial(split_rows.packed_by_lengths, DOCUMENTS)
FLASH = {"prepare": use_fake_flash}
PADDED = {"micro_batches": partial(padded, "right", LENGTH, 7)}
LEFT = {"micro_batches": partial(padded, "left", LENGTH, 7)}
TWO_RANKS = [
    Case("cp 2", 2, 1, cp=2),
    Case("cp 2, packed, flash", 2, 2, cp=2, micro_batches=packed).with_(**FLASH),
]
TWO_RANKS_MORE = [
    Case("cp 2, padded right", 2, 2, cp=2).with_(**PADDED),
    Case("checkpoint", 2, 2, cp=2, prepare=CHECKPOINT),
    Case("packed", 2, 2, cp=2, micro_batches=packed),
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
        compile_layers=OF_ONE_SIZE
    ),
    Case("LoRA", 2, 2, cp=2, wrap=with_lora),
    *(
        Case(f"LoRA, experts in {kind}", 2, 2, cp=2, wrap=with_lora, model=SIZES[kind]).with_(
            config={"experts_dtype": kind}, change_reference=partial(dequantise_experts, kind=kind)
        )
        for kind in ("nf4", "fp8")
    ),
]
FOUR_RANKS = [
    Case("cp 2 x sp 2, ep 4, padded", 4, 4, cp=2, sp=2).with_(**PADDED),
]
FOUR_RANKS_MORE = [
    Case("cp 4, ep 4, packed", 4, 4, cp=4, micro_batches=packed),
    Case("cp 2, ep 2", 4, 2, cp=2),
    Case("cp 4, three tokens", 4, 2, cp=4, micro_batches=three_tokens),
    Case("cp 4, two heads", 4, 2, cp=4).with_(
        model={"num_attention_heads": 2, "num_key_value_heads": 1}
    ),
    *(
        # Layer 0 has gradients of queries alone, or of keys alone.
        Case(f"cp 4, three tokens, LoRA on {name}", 4, 2, cp=4, micro_batches=three_tokens).with_(
            wrap=partial(with_lora, parameters=(), modules=(name,))
        )
        for name in ("q_proj", "k_proj")
    ),
    Case("cp 2 x sp 2, packed", 4, 2, cp=2, sp=2, micro_batches=packed),
    Case("cp 2 x sp 2, flash", 4, 2, cp=2, sp=2, micro_batches=packed).with_(**FLASH),
    Case("cp 2, HSDP, padded left", 4, 2, 2, cp=2).with_(**LEFT),
    Case("cp 2, ep outside", 4, 2, cp=2).with_config(ep_outside=True),
    Case("cp 4, reentrant, two forwards", 4, 4, cp=4, prepare=REENTRANT).with_(**TWO_FORWARDS),
    Case("cp 4, hierarchical", 4, 4, cp=4).with_config(dispatcher="hierarchical", node_size=2),
]


def _with_exact_losses(cases: list[Case]) -> list[Case]:
    """Compare losses in fp64, but not where it would trace other graphs or gather other scales."""
    return [
        case.with_(exact_loss=not case.config.keys() & {"compile_layers", "experts_dtype"})
        for case in cases
    ]


@pytest.mark.parametrize("claim", on_ranks(_with_exact_losses(TWO_RANKS + FOUR_RANKS)))
def test_context_parallel_equals_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize(
    "claim", on_ranks(_with_exact_losses(TWO_RANKS_MORE + FOUR_RANKS_MORE), slow=True)
)
def test_more_layouts_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _swap_first_pieces(x: Tensor, part: slices.Slice) -> Tensor:
    first, second, *others = slices.gather_slices(x, part).split(part.piece_length, 1)
    return torch.cat([second, first, *others], 1)


def _let_queries_see_the_next_key(*args: Any) -> list[list[context.Call]]:
    """Mask the calls that have more keys than queries by a triangle that is shifted by one key."""
    return [
        [
            call
            if (keys := call.last - call.first) == (queries := call.stop - call.start)
            else replace(
                call,
                build_mask=partial(
                    torch.Tensor.tril, torch.ones(1, 1, queries, keys).bool(), keys - queries + 1
                ),
            )
            for call in calls
        ]
        for calls in _plan_calls(*args)
    ]


_plan_calls = context.plan_calls
# Errors on purpose: the function of context.py that is replaced, and its replacement.
WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "chunks of keys out of order": ("gather_slices", _swap_first_pieces),
    "a mask that is off by one": ("plan_calls", _let_queries_see_the_next_key),
}


def _parity_fails(name: str, rank: int, world: int) -> None:
    case = Case(name, 2, 1, cp=2, micro_batches=parity.even_batches)
    function, wrong = WRONG[name]
    with (
        mock.patch.object(context, function, side_effect=wrong) as replaced,
        pytest.raises(AssertionError, match=f"{name} step 0: logits"),
    ):
        parity.run_case(case, rank, world)
    assert replaced.called


@pytest.mark.parametrize(
    "claim",
    checks.on_ranks(2, {name: partial(_parity_fails, name) for name in WRONG}, slow=True),
)
def test_the_comparison_notices_errors_on_purpose(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_describe_names_the_order_of_consecutive_parts() -> None:
    """Attention with an indexer takes the queries of a rank for consecutive tokens."""
    report = describe(patch(tiny_of("glm_moe_dsa"), cp_size=4))
    assert "  context    cp rank i has part i of 4 of each sequence\n" in report


def logits_are_in_the_order_of_the_tokens(rank: int, world: int) -> None:
    """A forward with labels returns only the loss; with gather_logits also the logits."""
    reference = tiny(seed=0)
    micro = batch(reference, 2, 13)
    want = reference(**micro)
    for gather_logits in (False, True):
        model = tiny(seed=rank)
        apply_ep_fsdp2(model, ep_size=2, cp_size=2, gather_logits=gather_logits)
        got = model(**micro)
        assert_close("loss", got.loss, want.loss, FP32_INSIDE)
        if gather_logits:
            assert_close("logits", got.logits, want.logits, FP64_MODEL)
        else:
            assert got.logits is None
    hidden = model(input_ids=micro["input_ids"], use_cache=False, output_hidden_states=True)
    with torch.no_grad():
        stock = reference(input_ids=micro["input_ids"], output_hidden_states=True)
    for got_states, want_states in zip(hidden.hidden_states, stock.hidden_states, strict=True):
        assert_close("hidden states", got_states, want_states, FP64_MODEL)


def every_rank_generates_its_own_text(rank: int, world: int) -> None:
    """generate() does not split prompts, so each rank may have another prompt."""
    model, reference = tiny(seed=rank), tiny(seed=0).eval()
    apply_ep_fsdp2(model, ep_size=2, cp_size=2).eval()
    prompt = batch(reference, 1, 4, seed=rank)["input_ids"]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for use_cache in (True, False):
        got, want = (
            m.generate(prompt, **settings, use_cache=use_cache) for m in (model, reference)
        )
        assert torch.equal(got, want), f"use_cache={use_cache}"


def use_masks_of_keys(model: Any) -> None:
    """Select an attention function whose masks (B, S) have no row for each query."""
    ALL_ATTENTION_FUNCTIONS.register("masks_of_keys", ALL_ATTENTION_FUNCTIONS["sdpa"])
    masks = ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"]
    ALL_MASK_ATTENTION_FUNCTIONS.register("masks_of_keys", masks)
    model.config._attn_implementation_internal = "masks_of_keys"


def wrong_batches_are_refused(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(seed=rank), ep_size=2, cp_size=2)
    with pytest.raises(
        ValueError, match=r"given different batches \(rank 0: 2 x 9, rank 1: 2 x 10"
    ):
        model(**batch(model, 2, 9 + rank))
    micro = batch(model, 2, 9)
    with pytest.raises(ValueError, match=r"logits_to_keep=1 selects .* with cp_size=2 a forward"):
        model(**micro, logits_to_keep=1)
    with pytest.raises(ValueError, match="return_dict=False is not supported with cp_size=2"):
        model(**micro, return_dict=False)
    masked = tiny(seed=rank)
    use_masks_of_keys(masked)
    apply_ep_fsdp2(masked, ep_size=2, cp_size=2)
    want = r"model.layers.0.self_attn \(shape \(2, 9\)\) has no row .* cp_size=2 cannot slice it"
    with pytest.raises(ValueError, match=want):
        masked(**batch(masked, 2, 9, pad=3))
    report = describe(model)
    assert "cp group [0, 1]" in report
    assert "cp rank i has the chunks i and 3 - i of 4 of each sequence" in report
    # 2 key-value heads of 8 values, in fp64.
    assert (
        "Attention): keys and values of all tokens all-gathered; sends 256 bytes per token of"
        in report
    )


def describe_says_what_is_sent(rank: int, world: int) -> None:
    """A line of `describe` has the bytes that a rank sends in forward and in backward.

    In forward it sends 2 x 2 heads of 8 values per token with sdpa, and latents with a rotary key
    in DeepSeek-V3. In backward it sends gradients, and keys again if they were not kept.
    """
    for kind, is_checkpointed in product(("sdpa", "flash", "latents"), (False, True)):
        model = tiny_of("deepseek_v3") if kind == "latents" else tiny()
        if kind == "flash":
            use_fake_flash(model)
        apply_ep_fsdp2(model, ep_size=1, cp_size=2)
        if is_checkpointed:
            CHECKPOINT(model)
        layers = model.config.num_hidden_layers
        line = next(x for x in describe(model).splitlines() if "bytes per token" in x)
        forward, backward, *more = (int(x.replace(",", "")) for x in _SENT.findall(line))
        assert bool(more) == (kind != "sdpa")
        want = [forward, more[0] if is_checkpointed and more else backward]
        assert _count_sent_per_token(model, layers) == want, f"{kind}, {is_checkpointed=}: {line}"
        if kind == "sdpa":
            assert want == [256, 512]


def keys_travel_while_attention_is_computed(rank: int, world: int) -> None:
    """The second of two heads of keys travels during attention to the first one, and gradients too.

    The results equal those of one transfer of both heads, to the bit.
    """
    events: list[str] = []

    def noting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(name)
            return stock(*args)

        return call

    def separate(*args: Tensor) -> Any:
        keys, values = stock_separate(*args)
        if keys.requires_grad:
            keys.register_hook(lambda grad: events.append("gradients"))
        return keys, values

    stock_separate = context._separate
    results = []
    for number in (1, 4):
        torch.manual_seed(0)
        model = tiny(num_hidden_layers=1)
        apply_ep_fsdp2(model, ep_size=1, cp_size=2)
        events.clear()
        with (
            mock.patch.object(context, "_MAX_SHARES", number),
            mock.patch.object(context, "_separate", separate),
            mock.patch.object(context, "gather_slices", noting("gather", slices.gather_slices)),
            mock.patch.object(context, "_run", noting("attend", context._run)),
            mock.patch.object(slices, "start_all_gather", noting("start", slices.start_all_gather)),
            mock.patch.object(slices, "start_swap", noting("send back", slices.start_swap)),
            mock.patch.object(slices._Running, "wait", noting("arrived", slices._Running.wait)),
        ):
            loss = model(**batch(model, 2, 16), use_cache=False).loss
            loss.backward()
        results.append([loss, *(p.grad.to_local() for p in model.parameters())])
        # Attention to one share has one call for each of this rank's two pieces.
        attend = ["attend", "attend"]
        forward, backward = ["gather", *attend], ["gradients"]
        if number == 4:
            forward = ["gather", "start", *attend, "arrived", *attend]
            backward = ["gradients", "send back", "gradients", "arrived"]
        assert events == [*forward, *forward, *backward], f"{number}: {events}"
    assert all(map(torch.equal, *results))


def anomaly_detection_reads_no_buffer_in_flight(rank: int, world: int) -> None:
    """Anomaly detection reads every gradient. The tests fill new memory with NaN (poison.py)."""
    model = tiny(num_attention_heads=8, num_key_value_heads=4)
    apply_ep_fsdp2(model, ep_size=1, cp_size=2)
    with torch.autograd.detect_anomaly(check_nan=True):
        model(**batch(model, 2, 16), use_cache=False).loss.backward()


def an_error_between_start_and_wait_frees_the_keys(rank: int, world: int) -> None:
    model = tiny(num_attention_heads=8, num_key_value_heads=4)
    apply_ep_fsdp2(model, ep_size=1, cp_size=2)
    transfers: list[weakref.ref[Any]] = []
    start = slices.start_all_gather

    def remember(*args: Any) -> Any:
        transfer = start(*args)
        transfers.append(weakref.ref(transfer))
        return transfer

    def fail(*args: Any) -> Any:
        raise KeyError("no memory")

    with (
        mock.patch.object(slices, "start_all_gather", remember),
        mock.patch.object(context, "_run", fail),
        pytest.raises(KeyError, match="no memory"),
    ):
        model(**batch(model, 2, 16), use_cache=False)
    gc.collect()
    assert len(transfers) == 3 and not any(transfer() for transfer in transfers)


# This pattern finds the numbers of bytes in a line of `describe`.
_SENT = re.compile(r"([0-9,]+) (?:bytes per token|in backward|with activation)")


def _count_sent_per_token(model: nn.Module, layers: int) -> list[int]:
    """Count the bytes per token and layer that a rank sends in forward and in backward."""
    micro = batch(model, 2, 16)
    sent = 0

    def counted(name: str) -> Any:
        stock = getattr(slices, name)

        def call(x: torch.Tensor, group: Any) -> Any:
            nonlocal sent
            sent += x.nbytes // (1 if "all_gather" in name else 2)
            return stock(x, group)

        return call

    names = ("all_gather", "swap_slices", "start_all_gather", "start_swap")
    with mock.patch.multiple(slices, **{name: counted(name) for name in names}):
        loss = model(**micro, use_cache=False).loss
        forward = sent
        loss.backward()
    # The losses of the slices are gathered as well, and so are their gradients.
    totals = forward - loss.nbytes, sent - forward - loss.nbytes
    tokens = layers * 2 * 8
    assert [n % tokens for n in totals] == [0, 0]
    return [n // tokens for n in totals]


CASES = [
    logits_are_in_the_order_of_the_tokens,
    every_rank_generates_its_own_text,
    wrong_batches_are_refused,
    describe_says_what_is_sent,
    keys_travel_while_attention_is_computed,
    anomaly_detection_reads_no_buffer_in_flight,
    an_error_between_start_and_wait_frees_the_keys,
]


@pytest.mark.parametrize("claim", checks.on_ranks(2, {case.__name__: case for case in CASES}))
def test_forwards_and_errors(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
