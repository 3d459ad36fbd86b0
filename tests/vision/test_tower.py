"""Qwen3-VL-MoE on ranks with different modalities equals stock in one process, in fp64.

Stock computes the tower's rotary embedding in fp32, whatever the dtype of the model (transformers,
modeling_qwen3_vl_moe.py, apply_rotary_pos_emb_vision). A value that is rounded to another fp32
number changes by 6e-8, so the budget of cases with pixels is FP32_INSIDE.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support import checks
from support.checks import Check, Found
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.modalities import BOTH, IMAGE, IMAGES, TEXT, VIDEO, modality_by_step, rows_of
from support.needs import NO_TOWER_IN_BLOCKS, needs_tower_in_blocks
from support.parity import CHECKPOINT, REENTRANT, Batch, Case, on_ranks
from support.ranks import run_ranks
from support.tiny_models import QWEN3_VL_MOE, Row, tiny, vision_batch
from torch import nn

from hf_moe_ep import apply_ep_fsdp2, global_token_count, patch, unpatch
from hf_moe_ep.derive import derive_plan
from hf_moe_ep.ranks.collectives import sum_over_ranks

MODEL = {"name": "qwen3_vl_moe"}


DATA: dict[str, tuple[list[Row], ...]] = {
    "all text": ([TEXT],),
    "all image": ([IMAGE],),
    "image on one rank": ([IMAGE], [TEXT], [TEXT], [TEXT]),
    "video on one, image on another": ([VIDEO], [IMAGE], [TEXT]),
    "both on one, nothing on another": ([BOTH], [TEXT]),
    "several images": ([IMAGES, IMAGE], [TEXT], [IMAGES]),
}
# These rows are for sp 2 and 4: pictures begin, end or continue at the edge of a slice, and a slice
# consists of one picture.
EDGES: dict[str, tuple[list[Row], ...]] = {
    "image at the edge of a slice": ([[2, (4, 4), 6]], [[5, (4, 6), 1]]),
    "one slice all image": ([[1, (8, 8), 2]], [TEXT]),
}


def make_packed(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Pack three documents into one row. Two have images, and position ids separate them."""
    rows: list[Row] = [IMAGE, [5 + rank], [2, (2, 4), 3]]
    parts = [vision_batch(model, [row], seed=10 * step + i) for i, row in enumerate(rows)]
    positions = []
    for part in parts:
        ids, types = part["input_ids"], part["mm_token_type_ids"]
        grid = part.get("image_grid_thw")
        index, _ = model.model.get_rope_index(ids, types, grid, None, None)
        positions.append(torch.cat([torch.arange(ids.shape[1]).view(1, 1, -1), index]))
        part["labels"][:, 0] = -100
    joined = {
        name: torch.cat([part[name] for part in parts], 1)
        for name in ("input_ids", "labels", "mm_token_type_ids")
    }
    for name in ("pixel_values", "image_grid_thw"):
        joined[name] = torch.cat([part[name] for part in parts if name in part])
    return [{**joined, "position_ids": torch.cat(positions, 2), "use_cache": False}]


def make_left_padded(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    rows: list[Row] = [IMAGES, TEXT, [2, (2, 4), 4 + rank]]
    return [vision_batch(model, rows, seed=10 * step + rank, left=True)]


BY_STEP = {"model": MODEL, "micro_batches": modality_by_step, "budget": FP32_INSIDE}
PACKED = {"model": MODEL, "micro_batches": make_packed, "budget": FP32_INSIDE}
LEFT = {"model": MODEL, "micro_batches": make_left_padded, "budget": FP32_INSIDE}
FROZEN = {"freeze": ("model.visual",), **BY_STEP}


def _list_cases(
    world: int,
    ep: int,
    replicate: int = 1,
    sp: int = 1,
    data: dict[str, tuple[list[Row], ...]] = DATA,
) -> list[Case]:
    where = f"{world} ranks, ep {ep}, sp {sp}, {replicate} replicas"
    return [
        Case(f"{name}: {where}", world, ep, replicate, sp, model=MODEL).with_(
            micro_batches=partial(rows_of, by_rank),
            budget=FP64_MODEL if name == "all text" else FP32_INSIDE,
        )
        for name, by_rank in data.items()
    ]


def _list_all_cases(world: int, ep: int, replicate: int = 1, sp: int = 1) -> list[Case]:
    """List the cases of one layout: all data, packed, padded, frozen and checkpointed cases."""
    layout = (world, ep, replicate, sp)
    where = f"{world} ranks, ep {ep}, sp {sp}, {replicate} replicas"
    return [
        *_list_cases(*layout, data=DATA | EDGES),
        Case(f"packed: {where}", *layout).with_(**PACKED),
        Case(f"padded left: {where}", *layout).with_(**LEFT),
        Case(f"frozen tower: {where}", *layout).with_(**FROZEN),
        Case(f"checkpoint: {where}", *layout, prepare=CHECKPOINT).with_(**BY_STEP),
        Case(f"reentrant: {where}", *layout, prepare=REENTRANT).with_(**BY_STEP),
    ]


ONE_RANK = [Case("1 rank", 1).with_(**BY_STEP)]
TWO_RANKS = [
    Case("modality by step, checkpoint", 2, 2, prepare=CHECKPOINT).with_(**BY_STEP),
]
TWO_RANKS_SP = [
    Case("sp 2, packed", 2, 1, sp=2).with_(**PACKED),
]
TWO_RANKS_SP_MORE = [
    Case("sp 2, flash", 2, 2, sp=2, prepare=use_fake_flash).with_(**BY_STEP),
    Case("sp 2, modality by step", 2, 1, sp=2).with_(**BY_STEP),
    *_list_cases(2, 2, sp=2)[-1:],
]
FOUR_RANKS = [
    Case("frozen tower", 4, 2).with_(**FROZEN),
]
FOUR_RANKS_SP = [
    Case("sp 2, modality by step, checkpoint", 4, 2, sp=2, prepare=CHECKPOINT).with_(**BY_STEP),
]
TWO_RANKS_MORE = [*_list_all_cases(2, 1, sp=2), *_list_cases(2, 2)]
FOUR_RANKS_MORE = [
    *_list_all_cases(4, 2),
    Case("modality by step, reentrant", 4, 2, prepare=REENTRANT).with_(**BY_STEP),
    Case("modality by step", 4, 2).with_(**BY_STEP),
    Case("frozen language model", 4, 2, freeze=("model.language_model",)).with_(**BY_STEP),
    *_list_cases(4, 4),
    Case("modality by step, HSDP", 4, 2, 2).with_(**BY_STEP),
    Case("3 chunks", 4, 2).with_config(dispatch_chunks=3).with_(**BY_STEP),
]
FOUR_RANKS_SP_MORE = [
    *_list_all_cases(4, 2, sp=2),
    *_list_cases(4, 4, sp=2, data=EDGES),
    *_list_cases(4, 2, sp=4, data=DATA | EDGES),
]
EIGHT_RANKS = [
    Case("8 ranks, ep 2, HSDP", 8, 2, 2).with_(**BY_STEP),
    *_list_all_cases(8, 2, 2, sp=2),
]


FAST_CASES = TWO_RANKS + TWO_RANKS_SP
SLOW_CASES = (
    ONE_RANK
    + TWO_RANKS_SP_MORE
    + FOUR_RANKS
    + FOUR_RANKS_SP
    + TWO_RANKS_MORE
    + FOUR_RANKS_MORE
    + FOUR_RANKS_SP_MORE
    + EIGHT_RANKS
)


def _mark_needs(cases: list[Case]) -> list[Case]:
    """Mark cases with sp > 1. They call the tower in our code, which needs new transformers."""
    return [case if case.sp == 1 else case.with_(needs=NO_TOWER_IN_BLOCKS) for case in cases]


@pytest.mark.parametrize("claim", on_ranks(_mark_needs(FAST_CASES)))
def test_ranks_with_different_modalities_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(_mark_needs(SLOW_CASES), slow=True))
def test_more_layouts_and_data_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _train_sixty_steps(rank: int, world: int) -> None:
    """Each rank draws a modality in every step. In some steps all ranks have only text."""
    model, reference = tiny(seed=rank, **MODEL), tiny(seed=0, **MODEL)
    apply_ep_fsdp2(model, ep_size=2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    draws = torch.randint(8, (60, world), generator=torch.Generator().manual_seed(5))
    kinds = [TEXT, TEXT, TEXT, TEXT, IMAGE, IMAGES, VIDEO, BOTH]
    assert (draws < 4).all(1).any() and not (draws < 4).all()
    for step, row in enumerate(draws.tolist()):
        everyone = [
            vision_batch(reference, [kinds[draw]], seed=step * world + drawing_rank)
            for drawing_rank, draw in enumerate(row)
        ]
        num_tokens = global_token_count(model, everyone[rank]["labels"])
        loss = model(**everyone[rank], num_items_in_batch=num_tokens).loss
        (loss * world).backward()
        want = sum(reference(**x, num_items_in_batch=num_tokens).loss for x in everyone)
        want.backward()
        # FP32_INSIDE holds for one step, and the difference grows over 60 steps.
        assert_close(f"step {step}: loss", sum_over_ranks(loss), want, 1e-5)
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            assert grad is None or bool(grad.to_local().isfinite().all()), f"step {step}: {name}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_sixty_steps_of_random_modalities_equal_one_process() -> None:
    run_ranks(_train_sixty_steps, 4, timeout=240)


def broken_pictures_stop_every_rank(rank: int, world: int) -> None:
    """If the batch of rank 1 is wrong, both ranks raise an error before they exchange features."""
    model = tiny(seed=rank, **MODEL)
    apply_ep_fsdp2(model, ep_size=2)
    good = vision_batch(model, [IMAGE], seed=rank)
    for change, message in (
        ({"image_grid_thw": torch.tensor([[1, 2, 6]])}, "has 12 patches, pixel_values has 24 rows"),
        ({"pixel_values": None, "image_grid_thw": None}, "6 tokens of image_token_id, .* makes 0"),
        ({"image_grid_thw": None}, "has 0 patches, pixel_values has 24 rows"),
        ({"pixel_values": None}, "has 24 patches, pixel_values has 0 rows"),
    ):
        broken = {name: x for name, x in (good | change).items() if x is not None}
        with pytest.raises(ValueError, match=message if rank == 1 else "another rank's images"):
            model(**(broken if rank == 1 else good))
    assert model(**good).loss.isfinite()


def a_new_embedding_keeps_the_tower_in_the_graph(rank: int, world: int) -> None:
    """A rank without pixels connects its tower to an embedding that was set after patch()."""
    model = tiny(seed=rank, **MODEL)
    patch(model, ep_size=2)
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    apply_ep_fsdp2(model)
    model(**vision_batch(model, [IMAGE if rank == 0 else TEXT], seed=rank)).loss.backward()
    assert all(p.grad is not None for p in model.model.visual.parameters())


def a_frozen_tower_keeps_nothing_for_backward(rank: int, world: int) -> None:
    """Ranks without pixels also run a frozen tower. Its outputs need no gradient."""
    model = tiny(seed=rank, **MODEL)
    model.model.visual.requires_grad_(False)
    apply_ep_fsdp2(model, ep_size=2)
    need_gradients = []

    def record(tower: nn.Module, args: object, outputs: Any) -> None:
        features = [outputs.pooler_output, *outputs.deepstack_features]
        need_gradients.append([feature.requires_grad for feature in features])

    model.model.visual.register_forward_hook(record)
    model(**vision_batch(model, [IMAGE if rank == 0 else TEXT], seed=rank)).loss.backward()
    assert need_gradients == [[False, False, False]]


def different_pixels_on_the_ranks_of_a_sequence_are_an_error(rank: int, world: int) -> None:
    model = tiny(seed=rank, **MODEL)
    apply_ep_fsdp2(model, sp_size=2)
    batch = vision_batch(model, [IMAGE])
    batch["pixel_values"][0, 0] += rank
    with pytest.raises(ValueError, match="given different batches"):
        model(**batch)


ON_TWO_RANKS = [
    broken_pictures_stop_every_rank,
    a_new_embedding_keeps_the_tower_in_the_graph,
    a_frozen_tower_keeps_nothing_for_backward,
    different_pixels_on_the_ranks_of_a_sequence_are_an_error,
]


@pytest.mark.parametrize("claim", checks.on_ranks(2, *ON_TWO_RANKS, skip=NO_TOWER_IN_BLOCKS))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@needs_tower_in_blocks
def test_sp_size_must_divide_the_heads_of_the_tower() -> None:
    tower = {"hidden_size": 24, "num_heads": 3}
    model = tiny(**MODEL, vision_config=QWEN3_VL_MOE["vision_config"] | tower)
    with pytest.raises(ValueError, match=r"sp_size \(2\) must divide the attention heads \(3\)"):
        patch(model, sp_size=2)


@needs_tower_in_blocks
def test_unpatch_removes_hooks_and_restores_attention() -> None:
    model, stock = tiny(**MODEL), tiny(**MODEL)
    patch(model, sp_size=2)
    unpatch(model)
    for module, other in zip(model.modules(), stock.modules(), strict=True):
        assert not module._forward_pre_hooks and not module._forward_hooks
        if hasattr(other, "config"):
            assert module.config._attn_implementation == other.config._attn_implementation


@needs_tower_in_blocks
def test_a_plan_with_tower_blocks_needs_a_forward_that_takes_features(monkeypatch) -> None:
    model = tiny(**MODEL)
    plan = derive_plan(model)
    monkeypatch.setattr(type(model.model), "forward", lambda self, input_ids=None: None)
    with pytest.raises(ValueError, match=r"leave out plan= \(then 'visual' is all-gathered"):
        patch(model, plan=plan)
