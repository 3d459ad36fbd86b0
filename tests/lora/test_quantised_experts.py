"""LoRA on quantised experts against stock PEFT on stock experts of the dequantised values."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import parity
from support.adapters import expert_matrices, with_lora
from support.architectures.steps import CUT_LOGITS, adamw, assert_same_step, build
from support.checks import Check, Found
from support.close import FP32_INSIDE
from support.modalities import modality_by_step
from support.parity import Case, on_ranks
from support.quantised import SIZES, dequantise_experts
from support.tiny_models import QWEN3_VL_MOE, batch

from hf_moe_ep import apply_ep_fsdp2

CHECKPOINT = partial(parity.checkpointing, use_reentrant=False)
REENTRANT = partial(parity.checkpointing, use_reentrant=True)
# Sums of fp32 in another order, through two layers and steps of AdamW, which divides by the size of
# a gradient, however small: without quantisation the same case is 5e-5 off in its second step.
FP32_MODEL = 1e-4
KINDS = {
    "nf4": {"experts_dtype": "nf4"},
    "nested": {"experts_dtype": "nf4", "experts_double_quant": True},
    "fp8": {"experts_dtype": "fp8"},
}


def held(
    kind: str, name: str, *layout: int, config: dict[str, Any] | None = None, **of: Any
) -> Case:
    """A case of `layout` whose experts are held in `kind`, and whose reference has their values."""
    options = KINDS[kind]
    model = SIZES[options["experts_dtype"]] | of.pop("model", {})
    return Case(f"{kind}, {name}", *layout, model=model, wrap=with_lora, **of).with_(
        config=options | (config or {}), change_reference=partial(dequantise_experts, kind=kind)
    )


def in_fp32(case: Case) -> Case:
    model = case.model | {"dtype": torch.float32}
    return case.with_(name=f"{case.name}, fp32", model=model, budget=FP32_MODEL)


ACCUMULATED = {"micro_batches": parity.three_micro_batches}
PICTURES = {
    "name": "qwen3_vl_moe",
    "text_config": QWEN3_VL_MOE["text_config"] | SIZES["nf4"],
    "vision_config": QWEN3_VL_MOE["vision_config"] | {"out_hidden_size": 64},
}
CASES = [
    case
    for kind in KINDS
    for case in (
        held(kind, "one rank", 1),
        held(kind, "ep 2", 2, 2),
        held(kind, "ep_fsdp 2", 2, 1, **ACCUMULATED),
        held(kind, "ep 2, ep_fsdp 2", 4, 2, prepare=CHECKPOINT, **ACCUMULATED),
    )
] + [
    in_fp32(held("nf4", "ep 2, ep_fsdp 2", 4, 2)),
    in_fp32(held("fp8", "ep 2", 2, 2)),
    held("nf4", "ep 4", 4, 4),
    held("nf4", "ep 1 on three ranks", 3, 1, budget=FP32_INSIDE),
    held("nf4", "ep 2, HSDP", 4, 2, 2),
    held("nf4", "ep 2, sp 2", 4, 2, sp=2),
    held("fp8", "sp 2", 2, 1, sp=2),
    held("nf4", "rows cut", 2, 1, config={"expert_shard_dim": 1}),
    held("nested", "rows cut", 2, 1, config={"expert_shard_dim": 1}).with_(
        model=SIZES["nf4"] | {"hidden_size": 128, "moe_intermediate_size": 256}
    ),
    held("fp8", "rows cut", 2, 1, config={"expert_shard_dim": 1}).with_(
        model=SIZES["fp8"] | {"hidden_size": 256, "moe_intermediate_size": 128}
    ),
    held("nf4", "ep 2, reentrant checkpoint", 2, 2, prepare=REENTRANT, **ACCUMULATED),
    held("fp8", "ep 4, two forwards", 4, 4, prepare=CHECKPOINT, **ACCUMULATED).with_(
        backward=parity.two_forwards_backward
    ),
    held("nf4", "ep 2, chunks", 2, 2, config={"dispatch_chunks": 2}),
    held("nf4", "ep 2, recomputed", 2, 2, config={"recompute_activations": True}),
    held("nf4", "pictures", 4, 2, micro_batches=modality_by_step).with_(
        model=PICTURES, budget=FP32_INSIDE
    ),
]


def _few_tokens(model: Any, rank: int, world: int, step: int) -> list[dict[str, Any]]:
    """An interpreter takes its time for each tile, of which every expert with a token has one."""
    return [batch(model, 1, 4 + rank, seed=10 * step + rank)]


def by_kernels(kind: str) -> Case:
    """One layer of the least size that a format and the kernels take."""
    smallest = {"nf4": 64, "fp8": 128}[KINDS[kind]["experts_dtype"]]
    model = {
        "hidden_size": smallest,
        "moe_intermediate_size": smallest,
        "num_hidden_layers": 1,
        "dtype": torch.float32,
    }
    of_kernels = {"experts_backend": "triton"}
    return held(
        kind,
        "ep 2, kernels, fp32",
        2,
        2,
        config=of_kernels,
        model=model,
        micro_batches=_few_tokens,
        budget=FP32_MODEL,
    )


KERNELS = [by_kernels(kind) for kind in ("nested", "fp8")]


@pytest.mark.parametrize("claim", on_ranks(KERNELS, slow=True, alone=True, timeout=480.0))
def test_kernels_equal_one_process(found: Found, claim: Check) -> None:
    """Forward and backward on two ranks by the Triton kernels in the interpreter."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(CASES, slow=True))
def test_quantised_experts_equal_one_process(found: Found, claim: Check) -> None:
    """Logits, loss, gradients, norm, three steps of AdamW, and the held values."""
    found.raise_if_failed(claim)


# Transposed and interleaved with biases; no gate; modules of text and of pictures side by side.
OF_TYPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 128},
    "nemotron_h": {"hidden_size": 64, "moe_intermediate_size": 128},
    "ernie4_5_vl_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": [128, 64],
        "num_attention_heads": 2,
    },
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 128},
}
# A head has 32 features in both sizes: 16 frequencies, in sections of height, width and time.
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 6, 4]}
FIXED = {"ernie4_5_vl_moe": {"rope_parameters": _SECTIONS}}


def _of_type(model_type: str, kind: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    sizes = OF_TYPES[model_type]
    if kind == "fp8":
        sizes = {name: _doubled(size) for name, size in sizes.items()}
    sizes = sizes | FIXED.get(model_type, {})
    models = []
    for seed in (rank, 0):
        model = build(model_type, seed=0, initializer_range=0.1, **sizes)
        matrices = expert_matrices(model)
        torch.manual_seed(seed)
        config = LoraConfig(r=3, target_parameters=matrices, init_lora_weights=False)
        models.append(get_peft_model(model, config))
    model, stock = models
    dequantise_experts(stock, kind)
    apply_ep_fsdp2(model, ep_size=2, **KINDS[kind])
    optimizers: Any = adamw(model), adamw(stock)
    assert_same_step(model_type, (model, stock), optimizers)


def _doubled(size: Any) -> Any:
    return [2 * one for one in size] if isinstance(size, list) else 2 * size


CHECKS = [
    Check(f"{name}, {kind}", 2, partial(_of_type, name, kind), slow=True).as_parameter()
    for name in OF_TYPES
    for kind in KINDS
]


@pytest.mark.parametrize("claim", CHECKS)
def test_types_with_other_experts(found: Found, claim: Check) -> None:
    """Losses, gradients of every factor and one step of AdamW, at ep 2."""
    found.raise_if_failed(claim)
