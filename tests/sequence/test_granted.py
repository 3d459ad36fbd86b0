"""Model types that may split their sequences: those that equal stock here, and no others.

Each granted type is split over two ranks and compared with stock on the whole batch: logits, loss,
every gradient, one step of AdamW, at 1e-10. All other types refuse sp_size > 1, and say why.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import (
    MODEL_TYPES,
    batch,
    mixed_batch,
    record_refusal,
    recording,
    tiny,
)
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.fp64 import FP64
from support.parity import full_tensor
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, data_parallel_rank, data_parallel_size, patch
from hf_moe_ep.derive import is_attention
from model_patches.standard import SEQUENCE_PARALLEL

Batch = dict[str, Tensor]
GRANTED = sorted(SEQUENCE_PARALLEL)
# Sinks under eager attention; MLA with a correction bias.
FAST = ("gpt_oss", "deepseek_v3")
# Layers of 4 heads and of 6: no other number divides both.
SP_2_ALONE = ("laguna",)


def padded(model: nn.Module, seed: int) -> Batch:
    """Two rows of 11 tokens, which 2 does not divide, the last three of one padded."""
    return batch(model, 2, 11, seed=seed, pad=3)


def packed(model: nn.Module, seed: int) -> Batch:
    """Documents of 5, 3 and 4 tokens in one row, told apart by positions that start again."""
    micro = batch(model, 1, 12, seed=seed)
    del micro["attention_mask"]
    micro["position_ids"] = torch.cat([torch.arange(n) for n in (5, 3, 4)]).unsqueeze(0)
    micro["labels"][:, [0, 5, 8]] = -100
    return micro


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
) -> None:
    """Split a model of other initial values on every rank, and compare a step with stock's."""
    with recording(model_type, "sp") as errors, FP64():
        model, stock = tiny(model_type, seed=rank), tiny(model_type)
        if flash:
            use_fake_flash(model)
            use_fake_flash(stock)
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
FLASH = [
    Check(f"{name}, flash", 2, partial(equals_stock, name, flash=True), slow=True).as_parameter()
    for name in ("gpt_oss", "qwen3_moe")
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


@pytest.mark.parametrize("claim", TWO_RANKS)
def test_every_granted_type_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", PACKED + FLASH)
def test_packed_rows_and_flash_attention_equal_stock(found: Found, claim: Check) -> None:
    """Documents in one row; sinks as an argument of flash attention, which a stand-in computes."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", FOUR_RANKS)
def test_on_four_ranks(found: Found, claim: Check) -> None:
    """Two sequences at a time, or one over more ranks than key-value heads."""
    found.raise_if_failed(claim)


# What mixes along the sequence past the attention interface: its name in a layer, and its class.
DELTA = r"linear_attn \({}GatedDeltaNet\)"
INDEXER = r"self_attn\.indexer \({}Indexer\)"
MIXERS = {
    "axk2": INDEXER.format("AXK2"),
    "bailing_hybrid": r"self_attn \(BailingHybridDeltaAttention\)",
    "deepseek_v32": INDEXER.format("DeepseekV32"),
    "deepseek_v4": r"compressor \(DeepseekV4CSACompressor\), .*\(DeepseekV4HCACompressor\)",
    "dots3_note": INDEXER.format("Dots3NoteText"),
    "dots3_note_text": INDEXER.format("Dots3NoteText"),
    "glm5_next": r"self_attn \(Glm5NextTextLinearAttention\)",
    "glm_moe_dsa": INDEXER.format("GlmMoeDsa"),
    "granitemoehybrid": r"mamba \(GraniteMoeHybridMambaLayer\)",
    "hy_v4": INDEXER.format("HYV4"),
    "inkling2": r"k_sconv \(Inkling2ShortConvolution\)",
    "inkling2_text": r"k_sconv \(Inkling2DynamicShortConvolution\)",
    "inkling_mm_model": r"attn_sconv \(InklingShortConvolution\)",
    "inkling_text": r"attn_sconv \(InklingShortConvolution\)",
    "jamba": r"mamba \(JambaMambaMixer\)",
    "kimi_linear": r"self_attn \(KimiLinearDeltaAttention\)",
    "lfm2_moe": r"conv \(Lfm2MoeShortConv\)",
    "minimax": r"self_attn \(MiniMaxLightningAttention\)",
    "minimax_m3_vl": INDEXER.format("MiniMaxM3VL"),
    "minimax_m3_vl_text": INDEXER.format("MiniMaxM3VL"),
    "mistral_large4": INDEXER.format("MistralLarge4Text"),
    "nemotron_h": r"mixer \(NemotronHMamba2Mixer\)",
    "qwen3_5_moe": DELTA.format("Qwen3_5Moe"),
    "qwen3_5_moe_text": DELTA.format("Qwen3_5Moe"),
    "qwen3_next": DELTA.format("Qwen3Next"),
    "qwen4_exp": DELTA.format("Qwen4ExpText") + r".*indexer \(Qwen4ExpTextQSAIndexer\)",
    "qwen4_exp_text": DELTA.format("Qwen4ExpText") + r".*indexer \(Qwen4ExpTextQSAIndexer\)",
    "zaya": r"qkv_proj \(ZayaCCAProjection\)",
}
# Tokens are classified, or a canvas denoised, where split losses are those of a language model.
WITHOUT_MIXERS = set(MODEL_TYPES) - SEQUENCE_PARALLEL - MIXERS.keys() - {"diffusion_gemma"}


@pytest.mark.parametrize("model_type", MIXERS)
def test_what_mixes_along_the_sequence_is_refused_by_name(model_type: str) -> None:
    """The module that would see a slice, by place and class, and nothing that is no such module."""
    model = tiny(model_type)
    wanted = f"mixes along the sequence in .*{MIXERS[model_type]}"
    with pytest.raises(ValueError, match=wanted) as refused:
        patch(model, sp_size=2)
    record_refusal(model_type, "sp", str(refused.value))
    named = str(refused.value).partition(" mixes ")[2].partition(" as well")[0]
    assert not re.search(r"Scaling|MoE\)|Rotary", named), named
    attention = {type(m).__name__ for m in model.modules() if is_attention(m)}
    assert not any(f"({kind})" in named for kind in attention), named


@pytest.mark.parametrize("model_type", sorted(WITHOUT_MIXERS))
def test_what_nobody_tested_is_refused(model_type: str) -> None:
    wanted = rf"sp_size \(2\) > 1 was not tested on {model_type}"
    with pytest.raises(ValueError, match=wanted) as refused:
        patch(tiny(model_type), sp_size=2)
    record_refusal(model_type, "sp", str(refused.value))


def test_every_type_is_granted_or_refused_for_one_reason() -> None:
    assert not SEQUENCE_PARALLEL & MIXERS.keys()
    assert set(MODEL_TYPES) >= SEQUENCE_PARALLEL | MIXERS.keys()
    assert len(SEQUENCE_PARALLEL) >= 30
