"""Types with pictures or sound equal stock with sequence and context parallelism, in fp64.

The rows of a group of ranks have pictures in front of, on and behind the cuts between slices. One
rank of a group may therefore have all pictures, and a whole group may have only text. With
cp_size=2 there are three cuts.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import recording, takes_pictures, takes_sound
from support.architectures.inputs import loss_of
from support.architectures.mixers import gathered_names
from support.architectures.mixes import (
    TYPES,
    build,
    make_image,
    make_sound,
    make_sounds,
    make_text,
    make_video,
)
from support.architectures.pictures import mixed_batch
from support.checks import Check, Found
from support.close import FP64_MODEL, ROUNDING_ERROR, assert_close
from support.fp64 import FP64
from support.needs import SINCE_5_23
from support.parity import OF_ONE_SIZE, checkpointing, full_tensor
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_, data_parallel_rank, data_parallel_size
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL
from hf_moe_ep.ranks.collectives import sum_over_ranks

Batch = dict[str, Tensor]
GRANTED = [name for name in TYPES if name in SEQUENCE_PARALLEL]
# The type of the fast test has delta nets, and positions of three axes.
FAST = "qwen3_5_moe"
# AdamW divides each gradient by its own size, and some gradients of this type are close to zero.
AFTER_STEP = {"inkling2_loop": 10 * FP64_MODEL}
# Stock cannot train these types with reentrant checkpointing. Layers of mistral_large4 share keys.
# The vision encoder of llama4 passes hidden states by keyword, so earlier modules get no gradient.
NOT_REENTRANT = ("llama4", "mistral_large4")


def one_and_none(model: nn.Module, seed: int) -> Batch:
    """Make two rows. The first row has a picture in its middle, which both slices share."""
    return mixed_batch(model, [1, 0], seed=seed)


def at_the_end(model: nn.Module, seed: int) -> Batch:
    """Make one row with two pictures behind a long text. Most tokens of rank 0 are text."""
    return mixed_batch(model, [2], text=3, seed=seed)


def list_steps(model: nn.Module, groups: int) -> list[list[Any]]:
    """List the functions that make the batches of all sp groups, one list for each step."""
    if not takes_pictures(model):
        steps = [[make_sound, make_text], [make_text, make_sounds], [make_text, make_text]]
        return [makes[:groups] for makes in steps]
    found: list[list[Any]] = [
        [one_and_none, make_text],
        [make_text, at_the_end],
        [make_text, make_text],
    ]
    forward = {name for module in model.modules() for name in _list_arguments(module)}
    if "pixel_values_videos" in forward:
        found.append([make_video, make_image])
    if takes_sound(model):
        found.append([make_sound, one_and_none])
    return [makes[:groups] for makes in found]


def _list_arguments(module: nn.Module) -> tuple[str, ...]:
    code = getattr(module.forward, "__wrapped__", module.forward).__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def compare_with_stock(
    name: str,
    rank: int,
    world: int,
    *,
    sp: int = 2,
    cp: int = 1,
    ep: int = 2,
    every_step: bool = False,
    use_reentrant: bool | None = None,
    **config: Any,
) -> None:
    """Compare losses, gradients and their norm in each step, and the parameters after AdamW.

    AdamW updates the parameters once, at the end, or in each step with `every_step`. `config` has
    other fields of ParallelConfig.
    """
    # FSDP2 warns of views among a module's outputs. Nothing modifies these views in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    column = "sp" if cp == 1 else "cp"
    with recording(name, column, gathered_names(build(name))) as errors, FP64():
        model, stock = build(name, seed=rank), build(name)
        if use_reentrant is not None:
            checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=ep, sp_size=sp, cp_size=cp, **config)
        groups, group = data_parallel_size(model), data_parallel_rank(model)
        ours = dict(model.named_parameters())
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (model, stock)
        ]
        all_steps = list_steps(stock, groups)
        for step, makes in enumerate(all_steps):
            where = f"{name}, step {step}, " + " and ".join(make.__name__ for make in makes)
            everyone = [make(stock, 10 * step + i) for i, make in enumerate(makes)]
            model.zero_grad()
            stock.zero_grad()
            loss = loss_of(model, everyone[group])
            (loss * groups).backward()
            want = torch.stack([loss_of(stock, x) for x in everyone]).sum()
            want.backward()
            total = sum_over_ranks(loss) / (sp * cp)  # all ranks of a group return its loss
            errors.append(assert_close(f"{where}: loss", total, want, FP64_MODEL))
            for key, parameter in stock.named_parameters():
                got = full_tensor(ours[key].grad)
                errors += _compare(f"{where}: grad of {key}", got, parameter.grad)
            norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
            got = clip_grad_norm_(model, 0.5)
            errors.append(assert_close(f"{where}: norm", got, norm, FP64_MODEL))
            if not every_step and step < len(all_steps) - 1:
                continue
            for optimizer in optimizers:
                optimizer.step()
            for key, parameter in stock.named_parameters():
                got = full_tensor(ours[key].detach())
                budget = AFTER_STEP.get(name, FP64_MODEL) if cp > 1 else FP64_MODEL
                errors.append(assert_close(f"{where}: {key} after AdamW", got, parameter, budget))


def _compare(where: str, got: Tensor | None, want: Tensor | None) -> list[float]:
    """Compare gradients. None equals zeros, for example for an expert without tokens."""
    if got is None or want is None:
        existing = want if got is None else got
        assert existing is None or not existing.any(), f"{where}: only one model has a gradient"
        return []
    if max(got.abs().max(), want.abs().max()) < ROUNDING_ERROR:
        return []
    return [assert_close(where, got, want, FP64_MODEL)]


def _list_checks(
    world: int, slow: bool, names: Sequence[str] = GRANTED, **options: Any
) -> list[Any]:
    kind = ", ".join([f"{world} ranks", *(f"{n}={x}" for n, x in options.items())])
    return [
        Check(
            f"{name}, {kind}",
            world,
            partial(compare_with_stock, name, **options),
            slow=slow or name != FAST,
            timeout=600.0 if "compile_layers" in options else 240.0,
            group_timeout=300.0 if "compile_layers" in options else 60.0,
        ).as_parameter()
        for name in names
        if not (options.get("use_reentrant") and name in NOT_REENTRANT)
    ]


ONE_GROUP = _list_checks(2, slow=False)
TWO_GROUPS = _list_checks(4, slow=True)
CONTEXT = _list_checks(2, slow=True, sp=1, cp=2) + _list_checks(4, slow=True, sp=1, cp=2)
# These types have a delta net, and a blockwise mask of pictures.
FOUR = ("qwen3_5_moe", "gemma4")
CONTEXT_OF_FOUR = [
    *_list_checks(4, True, FOUR, sp=1, cp=4),
    *_list_checks(4, True, FOUR, sp=1, cp=4, use_reentrant=True),
    *_list_checks(4, True, FOUR, sp=2, cp=2, use_reentrant=False),
    *_list_checks(4, True, FOUR[:1], sp=2, cp=2, compile_layers=OF_ONE_SIZE),
    *_list_checks(4, True, FOUR[:1], sp=1, cp=4, ep=4, every_step=True),
    *_list_checks(4, True, FOUR[:1], sp=2, cp=2, ep=4, every_step=True),
    *_list_checks(4, True, FOUR[:1], sp=1, cp=4, ep=4, dispatcher="hierarchical", node_size=2),
    # Each sp group divides the tower of this type.
    *_list_checks(4, True, ("qwen3_vl_moe",), sp=2, cp=2, every_step=True),
]
CHECKPOINTED = _list_checks(2, slow=True, use_reentrant=False) + _list_checks(
    2, slow=True, use_reentrant=True
)


needs_arguments_of_loss = pytest.mark.skipif(
    not SINCE_5_23, reason="models with pictures pass no argument on to their loss"
)


@needs_arguments_of_loss
@pytest.mark.parametrize("claim", ONE_GROUP)
def test_pictures_in_one_group_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@needs_arguments_of_loss
@pytest.mark.parametrize("claim", TWO_GROUPS)
def test_a_group_with_pictures_and_a_group_with_text_equal_stock(
    found: Found, claim: Check
) -> None:
    found.raise_if_failed(claim)


@needs_arguments_of_loss
@pytest.mark.parametrize("claim", CONTEXT)
def test_pictures_with_context_parallelism_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@needs_arguments_of_loss
@pytest.mark.parametrize("claim", CONTEXT_OF_FOUR)
def test_pictures_of_one_batch_on_four_ranks_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@needs_arguments_of_loss
@pytest.mark.parametrize("claim", CHECKPOINTED)
def test_checkpointed_types_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
