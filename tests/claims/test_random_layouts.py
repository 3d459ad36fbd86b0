"""Random layouts, models and features equal stock in one process, in fp64, for three steps.

Other tests vary one feature at a time. Here a seed draws the ranks, the sizes, a model, its
features, its batches and its optimizer. Losses, gradients, their norm and the parameters are
compared with the stock model. The name of a test has its seed, and `draw(seed)` draws it again.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.adapters import expert_matrices, with_lora
from support.architectures import batch
from support.architectures.steps import build, whole
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.parity import STEPS, checkpointing
from support.stages import state_of
from torch import Tensor, nn

from hf_moe_ep import (
    apply_ep_fsdp2,
    clip_grad_norm_,
    data_parallel_rank,
    data_parallel_size,
    global_token_count,
)
from hf_moe_ep.upstream.module_names import get_canonical_name

NUM_DRAWS = 40
_TYPES = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
)
_SIZES = ("pp_size", "dp_replicate_size", "cp_size", "sp_size", "ep_size", "etp_size")
# The values of these settings, and the probability that a value is drawn.
_CONFIG: dict[str, tuple[tuple[Any, ...], float]] = {
    "dispatch_chunks": ((2, 3), 0.25),
    "ep_outside": ((True,), 0.15),
    "expert_shard_dim": ((0, 1), 0.2),
    "fsdp_double_buffer": ((True,), 0.25),
    "fused_loss": ((True,), 0.3),
    "recompute_activations": ((True,), 0.25),
    "reshard_after_forward": ((False,), 0.2),
}


@dataclass(frozen=True)
class Draw:
    """The values that a seed has drawn.

    `lora` says which modules have adapters, besides the experts. `shape` is (rows, tokens) of rank
    0. In shorter rows the gradients of queries would be rounding errors alone.
    """

    world: int
    model: str
    sizes: dict[str, int]
    config: dict[str, Any]
    checkpoint: str
    lora: tuple[str, ...] | None
    padding: str
    num_batches: int
    shape: tuple[int, int]
    optimizer: str
    norm: tuple[float, float]


def draw(seed: int) -> Draw:
    choose = random.Random(seed)
    world = choose.choice([2, 2, 4])
    sizes, left = {}, world
    for name in _SIZES[:4]:
        sizes[name] = choose.choice([1, 1, 1, *(n for n in (2, 4) if left % n == 0)])
        left //= sizes[name]
    expert_ranks = world // sizes["pp_size"] // sizes["dp_replicate_size"]
    sizes["ep_size"] = choose.choice([n for n in (1, 2, 4) if expert_ranks % n == 0])
    expert_ranks //= sizes["ep_size"]
    sizes["etp_size"] = choose.choice([1, *(n for n in (1, 2, 4) if expert_ranks % n == 0)])
    config = {
        name: choose.choice(values)
        for name, (values, share) in _CONFIG.items()
        if choose.random() < share
    }
    if config.get("expert_shard_dim") == 1 and sizes["etp_size"] > 1:
        del config["expert_shard_dim"]  # both would cut dim 1
    drawn = Draw(
        world,
        choose.choice(_TYPES),
        sizes,
        config,
        checkpoint=choose.choice(["none", "none", "on", "reentrant"]),
        lora=choose.choice([None, None, (), ("o_proj",), ("lm_head",)]),
        padding=choose.choice(["right", "left", "no mask", "4-D", "embeddings"]),
        num_batches=choose.choice([1, 2]),
        shape=(choose.choice([2, 3]), choose.choice([5, 6, 11])),
        optimizer=choose.choice(["AdamW", "SGD"]),
        norm=choose.choice([(0.5, 2.0), (0.3, float("inf")), (1e9, 2.0)]),
    )
    if drawn.padding == "embeddings" and sizes["pp_size"] > 1:
        return replace(drawn, padding="left")  # stages refuse embeddings with a gradient
    return drawn


def _build_model(drawn: Draw, seed: int) -> Any:
    model = build(drawn.model, seed=seed)
    if drawn.lora is not None:
        torch.manual_seed(seed)
        model = with_lora(model, 4, tuple(expert_matrices(model)), drawn.lora, fp32=False)
    if drawn.checkpoint != "none":
        checkpointing(model, drawn.checkpoint == "reentrant")
        if drawn.lora is not None:
            model.enable_input_require_grads()  # for reentrant checkpoints of frozen layers
    return model.train()


def _make_batch(drawn: Draw, model: nn.Module, rank: int, number: int) -> dict[str, Tensor]:
    rows, length = drawn.shape[0], drawn.shape[1] + 2 * rank
    pad = min(3, length - 2) if drawn.padding in ("right", "left", "4-D") else 0
    inputs = batch(model, rows, length, seed=100 * number + rank, pad=pad)
    mask = inputs["attention_mask"].bool()
    if drawn.padding == "left":
        return {name: x.flip(1) for name, x in inputs.items()}
    if drawn.padding == "4-D" and drawn.model != "qwen3_next":  # delta nets need (B, S)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        inputs["attention_mask"] = causal & (mask[:, None, None] | torch.eye(length).bool())
    elif drawn.padding in ("no mask", "embeddings"):
        del inputs["attention_mask"]
    if drawn.padding == "embeddings":
        width = model.get_input_embeddings().weight.shape[1]
        torch.manual_seed(100 * number + rank)
        size = (*inputs.pop("input_ids").shape, width)
        # They need a gradient for a reentrant checkpoint of the first layer.
        inputs["inputs_embeds"] = torch.randn(size, dtype=torch.float64, requires_grad=True)
    return inputs


def _compare(where: str, model: nn.Module, stock: nn.Module, of: Any) -> None:
    stage = state_of(model).stage
    aliases = {} if stage is None else stage.aliases
    own = {get_canonical_name(name): of(p) for name, p in model.named_parameters()}
    wanted = {get_canonical_name(name): of(p) for name, p in stock.named_parameters()}
    for name, got in whole(model, {n: x for n, x in own.items() if x is not None}).items():
        want = wanted[aliases.get(name, name)]
        assert_close(f"{where} {name}", got, torch.zeros_like(got) if want is None else want, 1e-10)
    for name in (name for name, x in own.items() if x is None):
        want = wanted[aliases.get(name, name)]
        assert want is None or not want.any(), f"{where} {name}: only stock has it"


def _compare_with_stock(drawn: Draw, rank: int, world: int) -> None:
    model, stock = _build_model(drawn, rank), _build_model(drawn, 0)
    apply_ep_fsdp2(model, **drawn.sizes, **drawn.config)
    data_rank, size = data_parallel_rank(model), data_parallel_size(model)
    options = {"AdamW": {"lr": 1e-3, "eps": 1e-4}, "SGD": {"lr": 1e-2, "momentum": 0.9}}
    make = partial(getattr(torch.optim, drawn.optimizer), **options[drawn.optimizer])
    optimizers = make(_list_trainable(model)), make(_list_trainable(stock))
    for step in range(STEPS):
        numbers = range(step * drawn.num_batches, (step + 1) * drawn.num_batches)
        by_rank = [[_make_batch(drawn, stock, r, n) for n in numbers] for r in range(size)]
        tokens = global_token_count(model, [inputs["labels"] for inputs in by_rank[data_rank]])
        with FP64():
            for number, inputs in enumerate(by_rank[data_rank]):
                model.set_requires_gradient_sync(number == drawn.num_batches - 1)
                loss = model(**inputs, num_items_in_batch=tokens).loss
                (loss * size).backward()
            for other, batches in enumerate(by_rank):
                for inputs in batches:
                    want = stock(**inputs, num_items_in_batch=tokens).loss
                    want.backward()
                if other == data_rank:
                    assert_close(f"loss of step {step}", loss, want, FP64_MODEL)
        _compare(f"step {step}, grad of", model, stock, lambda p: p.grad)
        got = clip_grad_norm_(model, *drawn.norm)
        norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), *drawn.norm)
        assert_close(f"norm of step {step}", got, norm, FP64_MODEL)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _compare("after all steps,", model, stock, lambda p: p.detach())


def _list_trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _list_checks() -> Iterator[Any]:
    for seed in range(NUM_DRAWS):
        drawn = draw(seed)
        run = partial(_compare_with_stock, drawn)
        yield Check(f"{seed}: {drawn}", drawn.world, run, slow=True).as_parameter()


@pytest.mark.parametrize("claim", _list_checks())
def test_random_layouts_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
