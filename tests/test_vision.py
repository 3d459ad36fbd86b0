"""Qwen3-VL-MoE where ranks differ in modality, against stock in one process, in fp64.

Stock code applies the tower's rotary embedding in fp32 whatever the model's dtype (transformers,
modeling_qwen3_vl_moe.py, apply_rotary_pos_emb_vision), so where a rounding falls otherwise a value
moves by 6e-8: cases with pixels have a budget of 1e-6.
"""

from functools import partial
from inspect import signature

import parity
import pytest
import torch
from close import assert_close
from parity import Batch, Case, run_cases
from run_ranks import run_ranks
from tiny_models import Row, tiny, vision_batch
from torch import nn
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

from hf_moe_ep import apply_ep_fsdp2, global_token_count, patch, unpatch
from hf_moe_ep.comm import sum_over_ranks

pytestmark = pytest.mark.skipif(
    "mm_encoder_outputs" not in signature(Qwen3VLMoeModel.forward).parameters,
    reason="this transformers runs the vision tower itself; patch() refuses the model",
)
MODEL = {"name": "qwen3_vl_moe"}
TEXT: Row = [9]
IMAGE: Row = [3, (4, 6), 4]
IMAGES: Row = [2, (2, 4), 3, (4, 2), 1, (6, 4), 2]
VIDEO: Row = [2, (3, 4, 2), 5]
BOTH: Row = [3, (2, 2), 1, (2, 2, 4), 2]
CHECKPOINT = partial(parity.checkpointing, use_reentrant=False)
REENTRANT = partial(parity.checkpointing, use_reentrant=True)


def rows_of(
    by_rank: tuple[list[Row], ...], model: nn.Module, rank: int, world: int, step: int
) -> list[Batch]:
    """`by_rank` again and again over the ranks; one text row more on every 2nd of them."""
    rows = [*by_rank[rank % len(by_rank)], *([[6 + rank]] if rank % 2 else [])]
    return [vision_batch(model, rows, seed=100 * step + rank, left=rank == 1)]


def modality_by_step(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Nobody has pixels in step 0, one rank in step 1, another kind on each rank in step 2."""
    rows = [[TEXT], [IMAGE if rank == 0 else TEXT], [(TEXT, IMAGES, VIDEO, BOTH)[rank % 4]]][step]
    return [vision_batch(model, rows, seed=10 * step + rank)]


DATA: dict[str, tuple[list[Row], ...]] = {
    "all text": ([TEXT],),
    "all image": ([IMAGE],),
    "image on one rank": ([IMAGE], [TEXT], [TEXT], [TEXT]),
    "video on one, image on another": ([VIDEO], [IMAGE], [TEXT]),
    "both on one, nothing on another": ([BOTH], [TEXT]),
    "several images": ([IMAGES, IMAGE], [TEXT], [IMAGES]),
}


def _cases(world: int, ep: int) -> list[Case]:
    budgets = {name: 1e-10 if name == "all text" else 1e-6 for name in DATA}
    return [
        Case(name, world, ep, model=MODEL, budget=budgets[name]).with_(
            micro_batches=partial(rows_of, by_rank)
        )
        for name, by_rank in DATA.items()
    ]


BY_STEP = {"model": MODEL, "micro_batches": modality_by_step, "budget": 1e-6}
ONE_RANK = [Case("1 rank", 1).with_(**BY_STEP)]
TWO_RANKS = [
    Case("modality by step, checkpoint", 2, 2, prepare=CHECKPOINT).with_(**BY_STEP),
    *_cases(2, 1)[-2:],
]
FOUR_RANKS = [
    Case("modality by step", 4, 2).with_(**BY_STEP),
    Case("modality by step, reentrant", 4, 2, prepare=REENTRANT).with_(**BY_STEP),
    Case("frozen tower", 4, 2, freeze=("model.visual",)).with_(**BY_STEP),
    Case("frozen language model", 4, 2, freeze=("model.language_model",)).with_(**BY_STEP),
]
FOUR_RANKS_MORE = [
    *_cases(4, 2),
    *_cases(4, 4),
    Case("modality by step, HSDP", 4, 2, 2).with_(**BY_STEP),
    Case("3 chunks", 4, 2).with_config(dispatch_chunks=3).with_(**BY_STEP),
]
TWO_RANKS_MORE = _cases(2, 1)[:-2] + _cases(2, 2)
EIGHT_RANKS = [Case("8 ranks, ep 2, HSDP", 8, 2, 2).with_(**BY_STEP)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ONE_RANK, id="1"),
        pytest.param(TWO_RANKS, id="2"),
        pytest.param(FOUR_RANKS, id="4"),
        pytest.param(TWO_RANKS_MORE, id="2_more", marks=pytest.mark.slow),
        pytest.param(FOUR_RANKS_MORE, id="4_more", marks=pytest.mark.slow),
        pytest.param(EIGHT_RANKS, id="8", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_different_modalities_equal_one_process(cases: list[Case]) -> None:
    run_ranks(run_cases, cases[0].world, cases, timeout=400)


def _sixty_steps(rank: int, world: int) -> None:
    """Another modality on every rank in every step, nobody's now and then."""
    model, reference = tiny(seed=rank, **MODEL), tiny(seed=0, **MODEL)
    apply_ep_fsdp2(model, ep_size=2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    draws = torch.randint(8, (60, world), generator=torch.Generator().manual_seed(5))
    kinds = [TEXT, TEXT, TEXT, TEXT, IMAGE, IMAGES, VIDEO, BOTH]
    assert (draws < 4).all(1).any() and not (draws < 4).all()
    for step, row in enumerate(draws.tolist()):
        everyone = [
            vision_batch(reference, [kinds[draw]], seed=step * world + other)
            for other, draw in enumerate(row)
        ]
        num_tokens = global_token_count(model, everyone[rank]["labels"])
        loss = model(**everyone[rank], num_items_in_batch=num_tokens).loss
        (loss * world).backward()
        want = sum(reference(**one, num_items_in_batch=num_tokens).loss for one in everyone)
        want.backward()
        assert_close(f"step {step}: loss", sum_over_ranks(loss), want, 1e-5)
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            assert grad is None or bool(grad.to_local().isfinite().all()), f"step {step}: {name}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_sixty_steps_of_random_modalities_equal_one_process() -> None:
    run_ranks(_sixty_steps, 4, timeout=240)


def test_unpatch_takes_the_hooks_of_the_tower_away() -> None:
    model = tiny(**MODEL)
    patch(model)
    unpatch(model)
    assert not model.model._forward_pre_hooks
    assert not model.get_input_embeddings()._forward_hooks


def test_a_model_whose_forward_runs_the_tower_itself_is_refused(monkeypatch) -> None:
    model = tiny(**MODEL)
    monkeypatch.setattr(type(model.model), "forward", lambda self, input_ids=None: None)
    with pytest.raises(ValueError, match=r"needs transformers 5\.23 or newer"):
        patch(model)
