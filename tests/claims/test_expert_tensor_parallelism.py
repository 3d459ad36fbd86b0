"""With etp_size > 1 several ranks share each expert, and training equals stock in fp64.

Losses, every gradient, the gradient norm and the weights after three steps of AdamW are compared
with stock in one process.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.adapters import with_lora
from support.architectures.adapted import build_adapted
from support.architectures.steps import adamw, assert_same_step, build
from support.checks import Check, Found
from support.checks import on_ranks as on_ranks_of_checks
from support.parity import CHECKPOINT, REENTRANT, TWO_FORWARDS, Case, on_ranks
from support.tiny_models import batch, tiny
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.ranks.boxes import get_local_tensor

TWO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}


def _make_case(name: str, world: int, ep: int, etp: int, **options: Any) -> Case:
    config = options.pop("config", {})
    exact_loss = "compile_layers" not in config  # another graph would be traced in fp64
    return Case(name, world, ep, exact_loss=exact_loss, **options).with_config(
        etp_size=etp, **config
    )


TWO_RANKS = [_make_case("etp 2", 2, 1, 2)]
FOUR_RANKS = [
    _make_case("ep 2 x etp 2", 4, 2, 2, micro_batches=parity.three_micro_batches),
    _make_case("etp 2 x ep_fsdp 2, a single expert", 4, 1, 2).with_(
        model={"num_experts": 1, "num_experts_per_tok": 1}
    ),
    _make_case("etp 4", 4, 1, 4),
    _make_case("ep 2 x etp 2, all experts", 4, 2, 2, model=TWO_EXPERTS),
    _make_case("etp 2 x ep_fsdp 2", 4, 1, 2),
    _make_case("etp 2, HSDP", 4, 1, 2, replicate=2),
    _make_case("ep 2 x etp 2, sp 2", 4, 2, 2, sp=2),
    _make_case("etp 4, sp 4, checkpoint", 4, 1, 4, sp=4, prepare=CHECKPOINT),
    _make_case("checkpoint", 4, 2, 2, prepare=CHECKPOINT).with_(**TWO_FORWARDS),
    _make_case("reentrant checkpoint", 4, 2, 2, prepare=REENTRANT).with_(**TWO_FORWARDS),
    _make_case("3 chunks", 4, 2, 2, config={"dispatch_chunks": 3}),
    _make_case("hierarchical", 4, 2, 2, config={"dispatcher": "hierarchical", "node_size": 2}),
    _make_case("a rank without labels", 4, 2, 2, micro_batches=parity.one_rank_without_labels),
    _make_case("no resharding", 4, 1, 2, config={"reshard_after_forward": False}),
    _make_case("compiled layers", 4, 2, 2, config={"compile_layers": parity.OF_ONE_SIZE}),
    _make_case("recomputed activations", 4, 2, 2, config={"recompute_activations": True}),
]
EIGHT_RANKS = [
    _make_case("ep 2 x etp 2 x ep_fsdp 2", 8, 2, 2),
    _make_case("ep 2 x etp 2 x ep_fsdp 2, one expert a rank", 8, 2, 2, model=TWO_EXPERTS),
    _make_case("ep_outside", 8, 2, 2, config={"ep_outside": True}),
    _make_case("ep 2 x etp 2, HSDP", 8, 2, 2, replicate=2),
    _make_case("ep 2 x etp 4, hierarchical", 8, 2, 4).with_config(
        etp_size=4, dispatcher="hierarchical", node_size=4
    ),
]
LORA = [
    _make_case("LoRA, ep 2 x etp 2", 4, 2, 2, wrap=with_lora),
    _make_case("LoRA, etp 2 x ep_fsdp 2, checkpoint", 4, 1, 2, wrap=with_lora, prepare=CHECKPOINT),
]


@pytest.mark.parametrize("claim", on_ranks(TWO_RANKS))
def test_ranks_that_share_experts_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize(
    "claim",
    on_ranks(FOUR_RANKS + EIGHT_RANKS + LORA, slow=True),
)
def test_more_layouts_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


# The types have: biases and interleaved, transposed weights; shared experts; routing weights that
# multiply inputs, and transposed weights; two stock parameters for gate and up.
TYPES = ("mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "dbrx")


def _compare_with_stock(model_type: str, sizes: dict[str, int], rank: int, world: int) -> None:
    model, stock = build(model_type, seed=rank), build(model_type)
    apply_ep_fsdp2(model, **sizes)
    optimizers = adamw(model), adamw(stock)
    for step in range(3):
        assert_same_step(f"{model_type} step {step}", (model, stock), optimizers, seed=7 * step)


def _compare_adapters_with_peft(model_type: str, rank: int, world: int) -> None:
    model, stock = build_adapted(model_type, seed=rank), build_adapted(model_type, seed=0)
    apply_ep_fsdp2(model, ep_size=2, etp_size=2)
    optimizers = adamw(model), adamw(stock)
    for step in range(3):
        assert_same_step(f"{model_type} step {step}", (model, stock), optimizers, seed=7 * step)


# The types are: interleaved and transposed; transposed, which PEFT treats as [out, in]; no gate.
ADAPTED = [
    Check(name, 4, partial(_compare_adapters_with_peft, name), slow=True).as_parameter()
    for name in ("gpt_oss", "llama4_text", "nemotron_h")
]


@pytest.mark.parametrize("claim", ADAPTED)
def test_adapters_of_types_equal_stock_peft(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


OF_TYPES = [
    Check(
        f"{name}, {', '.join(f'{key} {size}' for key, size in sizes.items())}",
        4,
        partial(_compare_with_stock, name, sizes),
        slow=True,
    ).as_parameter()
    for name in TYPES
    for sizes in (
        {"ep_size": 2, "etp_size": 2},
        {"ep_size": 1, "etp_size": 2},
        {"ep_size": 1, "etp_size": 4},
    )
]


@pytest.mark.parametrize("claim", OF_TYPES)
def test_types_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _skip_a_step_on_all_ranks(modules: tuple[str, ...], part: str, rank: int, world: int) -> None:
    """The optimizer's first gradient belongs to a factor that all ranks of an etp group have."""
    model = apply_ep_fsdp2(with_lora(tiny(), modules=modules), etp_size=2)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    named.sort(key=lambda item: "experts" not in item[0])
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1.0)
    first = named[0][1]
    assert isinstance(first, DTensor) and Replicate() in first.placements
    before = [get_local_tensor(p).clone() for _, p in named]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(**batch(model, 2, 9, seed=rank)).loss).backward()
    if rank == 1:
        grad = next(p.grad for name, p in named if part in name)
        get_local_tensor(grad).view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    for (name, p), old in zip(named, before, strict=True):
        assert torch.equal(get_local_tensor(p), old), f"{name} was trained in a skipped step"


# The inner of PEFT's two wrappers has the factors of gate_up_proj.
SKIPS = {
    "B of gate_up": ((), "experts.base_layer.lora_B"),
    "A of down": ((), "experts.lora_A"),
    "attention": (("q_proj",), "q_proj.lora_B"),
}


@pytest.mark.parametrize(
    "claim",
    on_ranks_of_checks(
        2, {name: partial(_skip_a_step_on_all_ranks, *case) for name, case in SKIPS.items()}
    ),
)
def test_all_ranks_skip_a_step_with_an_infinity(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
