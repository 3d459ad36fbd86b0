"""Compare LoRA on quantised experts with stock PEFT on experts with the dequantised values."""

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
from support.parity import CHECKPOINT, REENTRANT, Case, on_ranks
from support.quantised import SIZES, dequantise_experts
from support.tiny_models import QWEN3_VL_MOE, batch

from hf_moe_ep import apply_ep_fsdp2

# fp32 sums have another order, in two layers and in steps of AdamW. AdamW divides even a tiny
# gradient by its magnitude: without quantisation the same case has an error of 5e-5 in step 2.
FP32_MODEL = 1e-4
KINDS = {
    "nf4": {"experts_dtype": "nf4"},
    "nested": {"experts_dtype": "nf4", "experts_double_quant": True},
    "fp8": {"experts_dtype": "fp8"},
}


def quantise_case(
    kind: str, name: str, *layout: int, config: dict[str, Any] | None = None, **of: Any
) -> Case:
    """Build a case with quantised experts, whose reference has the dequantised values."""
    options = KINDS[kind]
    model = SIZES[options["experts_dtype"]] | of.pop("model", {})
    return Case(f"{kind}, {name}", *layout, model=model, wrap=with_lora, **of).with_(
        config=options | (config or {}), change_reference=partial(dequantise_experts, kind=kind)
    )


def cast_to_fp32(case: Case) -> Case:
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
        quantise_case(kind, "one rank", 1),
        quantise_case(kind, "ep 2", 2, 2),
        quantise_case(kind, "ep_fsdp 2", 2, 1, **ACCUMULATED),
        quantise_case(kind, "ep 2, ep_fsdp 2", 4, 2, prepare=CHECKPOINT, **ACCUMULATED),
    )
] + [
    cast_to_fp32(quantise_case("nf4", "ep 2, ep_fsdp 2", 4, 2)),
    cast_to_fp32(quantise_case("fp8", "ep 2", 2, 2)),
    quantise_case("nf4", "ep 4", 4, 4),
    quantise_case("nf4", "ep 1 on three ranks", 3, 1, budget=FP32_INSIDE),
    quantise_case("nf4", "ep 2, HSDP", 4, 2, 2),
    quantise_case("nf4", "ep 2, sp 2", 4, 2, sp=2),
    quantise_case("fp8", "sp 2", 2, 1, sp=2),
    quantise_case("nf4", "rows cut", 2, 1, config={"expert_shard_dim": 1}),
    quantise_case("nested", "rows cut", 2, 1, config={"expert_shard_dim": 1}).with_(
        model=SIZES["nf4"] | {"hidden_size": 128, "moe_intermediate_size": 256}
    ),
    quantise_case("fp8", "rows cut", 2, 1, config={"expert_shard_dim": 1}).with_(
        model=SIZES["fp8"] | {"hidden_size": 256, "moe_intermediate_size": 128}
    ),
    quantise_case("nf4", "ep 2, reentrant checkpoint", 2, 2, prepare=REENTRANT, **ACCUMULATED),
    quantise_case("fp8", "ep 4, two forwards", 4, 4, prepare=CHECKPOINT, **ACCUMULATED).with_(
        backward=parity.two_forwards_backward
    ),
    quantise_case("nf4", "ep 2, chunks", 2, 2, config={"dispatch_chunks": 2}),
    quantise_case("nf4", "ep 2, recomputed", 2, 2, config={"recompute_activations": True}),
    quantise_case("nf4", "ep 2, etp 2", 4, 2, config={"etp_size": 2}),
    quantise_case("nf4", "etp 2, ep_fsdp 2", 4, 1, config={"etp_size": 2}).with_(
        model=SIZES["nf4"] | {"hidden_size": 128, "num_experts": 1, "num_experts_per_tok": 1}
    ),
    quantise_case("fp8", "etp 2, ep_fsdp 2", 4, 1, config={"etp_size": 2}),
    quantise_case("nf4", "vision", 4, 2, micro_batches=modality_by_step).with_(
        model=PICTURES, budget=FP32_INSIDE
    ),
]


def _make_few_tokens(model: Any, rank: int, world: int, step: int) -> list[dict[str, Any]]:
    """Use few tokens, because the interpreter is slow, and each expert with a token runs a tile."""
    return [batch(model, 1, 4 + rank, seed=10 * step + rank)]


def kernel_case(kind: str) -> Case:
    """Build a case of one layer with the smallest sizes that the format and the kernels accept."""
    smallest = {"nf4": 64, "fp8": 128}[KINDS[kind]["experts_dtype"]]
    model = {
        "hidden_size": smallest,
        "moe_intermediate_size": smallest,
        "num_hidden_layers": 1,
        "dtype": torch.float32,
    }
    return quantise_case(
        kind,
        "ep 2, kernels, fp32",
        2,
        2,
        config={"experts_backend": "triton"},
        model=model,
        micro_batches=_make_few_tokens,
        budget=FP32_MODEL,
    )


KERNELS = [kernel_case(kind) for kind in ("nested", "fp8")]


@pytest.mark.parametrize("claim", on_ranks(KERNELS, slow=True, alone=True, timeout=480.0))
def test_kernels_equal_one_process(found: Found, claim: Check) -> None:
    """The Triton kernels run forward and backward on two ranks in Triton's interpreter."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(CASES, slow=True))
def test_quantised_experts_equal_one_process(found: Found, claim: Check) -> None:
    """Logits, loss, gradients, their norm, three AdamW steps and the quantised values are equal."""
    found.raise_if_failed(claim)


# gpt_oss has transposed, interleaved weights and biases. nemotron_h has no gate. ernie4_5_vl_moe
# has experts for images.
SIZES_OF_TYPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 128},
    "nemotron_h": {"hidden_size": 64, "moe_intermediate_size": 128},
    "ernie4_5_vl_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": [128, 64],
        "num_attention_heads": 2,
    },
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 128},
}
# A head has 32 features in both sizes: 16 frequencies in three sections (height, width, time).
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 6, 4]}
FIXED = {"ernie4_5_vl_moe": {"rope_parameters": _SECTIONS}}


def _compare_type(model_type: str, kind: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    sizes = SIZES_OF_TYPES[model_type]
    if kind == "fp8":
        sizes = {name: _double_size(size) for name, size in sizes.items()}
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


def _double_size(size: Any) -> Any:
    return [2 * each for each in size] if isinstance(size, list) else 2 * size


CHECKS = [
    Check(f"{name}, {kind}", 2, partial(_compare_type, name, kind), slow=True).as_parameter()
    for name in SIZES_OF_TYPES
    for kind in KINDS
]


@pytest.mark.parametrize("claim", CHECKS)
def test_other_kinds_of_experts_equal_stock(found: Found, claim: Check) -> None:
    """Losses, gradients of all factors and one AdamW step are equal at ep_size 2."""
    found.raise_if_failed(claim)
