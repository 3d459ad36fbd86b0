"""Training with pipeline stages equals stock in one process: losses, gradients, norms, steps."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
from support import checks
from support.adapters import with_lora
from support.architectures.steps import build
from support.checks import Check, Found
from support.parity import CHECKPOINT, OF_ONE_SIZE, REENTRANT
from support.quantised import SIZES, dequantise_experts
from support.stages import (
    StagesCase,
    accumulated,
    even_rows,
    four_layers,
    on_ranks,
    packed,
    rows_of,
    some_unlabelled,
)
from torch import nn

from hf_moe_ep.pipeline.run import Pipeline
from hf_moe_ep.sharding import clip

TWO_NODES: dict[str, Any] = {"dispatcher": "hierarchical", "node_size": 2}
AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def builder_of(model_type: str, **options: Any) -> Any:
    """Return the function that builds a model of a type from a seed."""
    return partial(_build, model_type, options)


def _build(model_type: str, options: dict[str, Any], seed: int) -> nn.Module:
    return build(model_type, seed=seed, **options)


def in_micro_batches(count: int, **options: Any) -> dict[str, Any]:
    return {"pp_microbatches": count, **options}


def quantised_case(kind: str, name: str, world: int, **options: Any) -> StagesCase:
    """Make a case with LoRA on quantised experts, and dequantised experts in its reference."""
    config = {"experts_dtype": "fp8"} if kind == "fp8" else {"experts_dtype": "nf4"}
    if kind == "nested":
        config["experts_double_quant"] = True
    return StagesCase(
        f"{kind}, {name}",
        world,
        make=partial(four_layers, **SIZES[config["experts_dtype"]]),
        wrap=partial(with_lora, r=3),
        change_reference=partial(dequantise_experts, kind=kind),
        config=config | options.pop("config", {}),
        **options,
    )


def adapted_case(name: str, layers: tuple[int, ...], **options: Any) -> StagesCase:
    """Make a case in which the other stage has no trained parameter."""
    modules = [f"layers.{layer}.self_attn.{kind}_proj" for layer in layers for kind in "qv"]
    wrap = partial(with_lora, r=3, parameters=(), modules=tuple(modules))
    return StagesCase(name, 2, wrap=wrap, **options)


FAST = [
    StagesCase(
        "tied, accumulation, times 0.37",
        2,
        make=partial(four_layers, tie_word_embeddings=True),
        batches=accumulated,
        factor=0.37,
    ),
]
TWO_RANKS = [
    StagesCase("7 rows in 4", 2, config=in_micro_batches(4), batches=rows_of(7)),
    StagesCase("4 rows in 1", 2, config=in_micro_batches(1)),
    StagesCase("4 rows in 2", 2),
    StagesCase("4 rows in 4", 2, config=in_micro_batches(4)),
    StagesCase("7 rows in 1", 2, config=in_micro_batches(1), batches=rows_of(7)),
    StagesCase("7 rows in 2", 2, batches=rows_of(7)),
    StagesCase("7 rows in 7", 2, config=in_micro_batches(7), batches=rows_of(7)),
    StagesCase("4 rows in 7", 2, config=in_micro_batches(7)),
    StagesCase("3 layers and 1", 2, config={"pp_layers": (3, 1)}),
    StagesCase("gpipe", 2, config=in_micro_batches(3, pp_schedule="gpipe"), batches=rows_of(7)),
    StagesCase(
        "aux loss of micro-batches",
        2,
        make=partial(four_layers, **AUX),
        config=in_micro_batches(3),
        batches=rows_of(7),
        cut_reference=True,
    ),
    StagesCase(
        "aux loss of the batch",
        2,
        make=partial(four_layers, **AUX),
        config=in_micro_batches(3, pp_schedule="gpipe"),
        batches=rows_of(7),
    ),
    StagesCase(
        "aux loss, a stage of dense layers",
        2,
        make=partial(four_layers, mlp_only_layers=[0, 1], **AUX),
        config={"pp_schedule": "gpipe"},
    ),
    StagesCase(
        "aux loss, dense layers at the end",
        2,
        make=partial(four_layers, mlp_only_layers=[2, 3], **AUX),
        config={"pp_schedule": "gpipe"},
    ),
    StagesCase("checkpoints", 2, prepare=CHECKPOINT),
    StagesCase("reentrant checkpoints", 2, prepare=REENTRANT),
    StagesCase("LoRA", 2, wrap=partial(with_lora, r=3)),
    adapted_case("adapters on the first stage", (0, 1), prepare=REENTRANT),
    adapted_case("adapters on the last stage", (2, 3), batches=accumulated),
    StagesCase("compiled", 2, config={"compile_layers": "aot_eager"}),
    StagesCase(
        "aux loss per layer",
        2,
        make=partial(four_layers, mlp_only_layers=[1], **AUX),
        config={"aux_loss_per_layer": True, "pp_schedule": "gpipe"},
        per_layer=True,
    ),
    StagesCase("fused loss", 2, config={"fused_loss": True}, batches=accumulated),
    StagesCase("a micro-batch without labels", 2, batches=some_unlabelled),
    StagesCase(
        "fused loss, without labels", 2, config={"fused_loss": True}, batches=some_unlabelled
    ),
    StagesCase("packed rows in 3", 2, config=in_micro_batches(3), batches=packed),
    StagesCase("deepseek_v3", 2, make=builder_of("deepseek_v3")),
    StagesCase("gpt_oss", 2, make=builder_of("gpt_oss")),
    StagesCase("qwen3_next", 2, make=builder_of("qwen3_next")),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "checkpoints": {"prepare": CHECKPOINT},
    "reentrant checkpoints": {"prepare": REENTRANT},
    "compiled": {"config": {"compile_layers": OF_ONE_SIZE}},
}
TWO_RANKS += [
    StagesCase(f"{name}, {variant}", 2, make=builder_of(name), **options)
    for name in ("deepseek_v3", "gpt_oss", "qwen3_next")
    for variant, options in VARIANTS.items()
]
FOUR_RANKS = [
    StagesCase("ep 2, 7 rows in 4", 4, ep=2, config=in_micro_batches(4), batches=rows_of(7)),
]
SLOW_FOUR_RANKS = [
    quantised_case("fp8", "ep 2, 4 rows in 3", 4, ep=2, config=in_micro_batches(3)),
    StagesCase("ep 2", 4, ep=2),
    StagesCase("ep 2, accumulation", 4, ep=2, batches=accumulated),
    StagesCase("ep_fsdp 2", 4, config=in_micro_batches(4)),
    StagesCase("HSDP", 4, replicate=2),
    StagesCase("sp 2", 4, sp=2),
    StagesCase("ep 2, sp 2", 4, ep=2, sp=2, config=in_micro_batches(3), batches=rows_of(7)),
    StagesCase("cp 2", 4, cp=2, config=in_micro_batches(3), batches=rows_of(7)),
    StagesCase("ep 2, cp 2", 8, ep=2, cp=2, config=in_micro_batches(3), batches=rows_of(7)),
    StagesCase("ep 2, sp 2, two batches", 8, ep=2, sp=2),
    StagesCase("ep 4, hierarchical", 8, ep=4, config=in_micro_batches(2, **TWO_NODES)),
    StagesCase("ep 2, ep outside", 8, ep=2, config={"ep_outside": True}),
    StagesCase("etp 2", 4, etp=2),
    StagesCase(
        "etp 2, tied, accumulation",
        4,
        etp=2,
        make=partial(four_layers, tie_word_embeddings=True),
        batches=accumulated,
    ),
    StagesCase(
        "cp 2, aux loss",
        4,
        cp=2,
        make=partial(four_layers, **AUX),
        config={"pp_schedule": "gpipe"},
    ),
    StagesCase("pp 4", 4, pp=4, batches=rows_of(7), config=in_micro_batches(7)),
    StagesCase("pp 4, 4 rows in 1", 4, pp=4, config=in_micro_batches(1)),
    StagesCase("pp 4, tied", 4, pp=4, make=partial(four_layers, tie_word_embeddings=True)),
    StagesCase("ep 2, tied", 4, ep=2, make=partial(four_layers, tie_word_embeddings=True)),
    StagesCase(
        "ep 2, aux loss",
        4,
        ep=2,
        make=partial(four_layers, **AUX),
        config={"pp_schedule": "gpipe"},
        batches=even_rows,
        joined=True,
    ),
    StagesCase(
        "sp 2, aux loss",
        4,
        sp=2,
        make=partial(four_layers, **AUX),
        config={"pp_schedule": "gpipe"},
    ),
    StagesCase("ep 2, checkpoints", 4, ep=2, prepare=CHECKPOINT),
    StagesCase("ep 2, reentrant checkpoints", 4, ep=2, prepare=REENTRANT),
    StagesCase("sp 2, checkpoints", 4, sp=2, prepare=CHECKPOINT),
    StagesCase("cp 2, reentrant checkpoints", 4, cp=2, prepare=REENTRANT),
    StagesCase("ep 2, compiled", 4, ep=2, config={"compile_layers": OF_ONE_SIZE}),
    StagesCase("ep 2, LoRA", 4, ep=2, wrap=partial(with_lora, r=3)),
    StagesCase("ep 2, deepseek_v3", 4, ep=2, make=builder_of("deepseek_v3")),
    StagesCase("ep 2, gpt_oss", 4, ep=2, make=builder_of("gpt_oss")),
    StagesCase("ep 2, packed rows in 3", 4, ep=2, config=in_micro_batches(3), batches=packed),
    StagesCase("ep 2, qwen3_next", 4, ep=2, make=builder_of("qwen3_next")),
    StagesCase(
        "ep 2, gpt_oss, accumulation", 4, ep=2, make=builder_of("gpt_oss"), batches=accumulated
    ),
    StagesCase("sp 2, gpt_oss", 4, sp=2, make=builder_of("gpt_oss")),
    StagesCase("cp 2, gpt_oss", 4, cp=2, make=builder_of("gpt_oss")),
    StagesCase("cp 2, deepseek_v3", 4, cp=2, make=builder_of("deepseek_v3")),
    StagesCase("ep 2, cp 2, deepseek_v3", 8, ep=2, cp=2, make=builder_of("deepseek_v3")),
    StagesCase("pp 4, qwen3_next", 4, pp=4, make=builder_of("qwen3_next")),
    StagesCase("sp 2, qwen3_next", 4, sp=2, make=builder_of("qwen3_next")),
    StagesCase("sp 2, deepseek_v3", 4, sp=2, make=builder_of("deepseek_v3")),
    StagesCase(
        "ep 2, LoRA, accumulation", 4, ep=2, wrap=partial(with_lora, r=3), batches=accumulated
    ),
    quantised_case("nf4", "ep 2, 4 rows in 3", 4, ep=2, config=in_micro_batches(3)),
    quantised_case("nf4", "ep 2, accumulation", 4, ep=2, batches=accumulated),
    quantised_case("nf4", "ep 2, checkpoints", 4, ep=2, prepare=CHECKPOINT),
    quantised_case("nf4", "ep 2, etp 2", 8, ep=2, etp=2),
    quantised_case("nf4", "ep_fsdp 2, recomputed", 4, config={"recompute_activations": True}),
    quantised_case("nf4", "ep 2, chunks", 4, ep=2, config={"dispatch_chunks": 2}),
    quantised_case(
        "nested", "ep 2, 7 rows in 4", 4, ep=2, config=in_micro_batches(4), batches=rows_of(7)
    ),
    quantised_case(
        "nf4", "pp 4, 7 rows in 4", 4, pp=4, config=in_micro_batches(4), batches=rows_of(7)
    ),
    quantised_case("fp8", "ep 2, reentrant checkpoints", 4, ep=2, prepare=REENTRANT),
    quantised_case("fp8", "etp 2", 4, etp=2),
    quantised_case("fp8", "ep 2, gpipe", 4, ep=2, config=in_micro_batches(4, pp_schedule="gpipe")),
    quantised_case("fp8", "sp 2", 4, sp=2),
]


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(FAST),
        *on_ranks(TWO_RANKS, slow=True),
        *on_ranks(FOUR_RANKS),
        *on_ranks(SLOW_FOUR_RANKS, slow=True),
    ],
)
def test_stages_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _add_tied_gradients_twice(self: Pipeline, stage: Any) -> None:
    _add_tied_gradients(self, stage)
    _add_tied_gradients(self, stage)


_add_tied_gradients = Pipeline._add_tied_gradients
# Errors on purpose: a function and its replacement, and what the comparison reports.
WRONG: dict[str, tuple[Any, str, Any, str]] = {
    "the norm of one stage": (clip, "sum_over_ranks", lambda total, group: total, "step 0: norm"),
    "a tied gradient counted twice": (
        Pipeline,
        "_add_tied_gradients",
        _add_tied_gradients_twice,
        r"step 0: grad of (model\.embed_tokens|lm_head)\.weight",
    ),
}


def _parity_fails(name: str, rank: int, world: int) -> None:
    owner, function, wrong, match = WRONG[name]
    case = StagesCase(name, 2, make=partial(four_layers, tie_word_embeddings=True))
    with mock.patch.object(owner, function, wrong), pytest.raises(AssertionError, match=match):
        case.run(rank, world)


@pytest.mark.parametrize(
    "claim",
    checks.on_ranks(2, {name: partial(_parity_fails, name) for name in WRONG}, slow=True),
)
def test_the_comparison_notices_errors_on_purpose(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
