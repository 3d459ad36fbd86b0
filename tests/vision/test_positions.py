"""PositionCollator computes position ids in the data loader; outputs are bit-equal to stock's."""

import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures.models import tiny as tiny_of_type
from support.ranks import run_ranks
from support.tiny_models import Row, tiny, vision_batch
from torch.utils.data import DataLoader

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.sequence.split import FindDocuments, check_packed_rows
from hf_moe_ep.vision.positions import PositionCollator

Batch = dict[str, torch.Tensor]
MODEL = {"name": "qwen3_vl_moe"}
TEXT: Row = [9]
ROWS: dict[str, list[Row]] = {
    "text": [TEXT, [5]],
    "image": [[3, (4, 6), 4], TEXT],
    "images": [[2, (2, 4), 3, (4, 2), 1, (6, 4), 2], [1, (2, 2), 20]],
    "video": [[2, (3, 4, 2), 5], TEXT],
    "both": [[3, (2, 2), 1, (2, 2, 4), 2], [2, (2, 2, 2), (4, 2), 1], TEXT],
}


def first_sample(samples: list[Batch]) -> Batch:
    """Collate by returning the first sample, which is a whole batch."""
    return dict(samples[0])


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("rows", ROWS)
def test_outputs_equal_stock(rows: str, left: bool) -> None:
    """`check_packed_rows` accepts the batch, because it does not take a picture for a document."""
    model = tiny(**MODEL)
    batch = vision_batch(model, ROWS[rows], left=left)
    collated = PositionCollator(model, first_sample)([batch])
    shape = None if rows == "text" else (3, *batch["input_ids"].shape)
    assert getattr(collated.pop("position_ids", None), "shape", None) == shape
    assert collated.keys() == batch.keys()
    again = PositionCollator(model, first_sample)([batch])
    check_packed_rows(model, again, FindDocuments(has_mixers=True))
    with torch.no_grad():
        want = model(**batch)
        got = model(**PositionCollator(model, first_sample)([batch]))
        with_wrong_positions = model(
            **batch, position_ids=torch.zeros(3, *batch["input_ids"].shape).long()
        )
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)
    assert not torch.equal(with_wrong_positions.logits, want.logits)


def test_positions_equal_an_example_by_hand() -> None:
    """Row 0 has two text tokens, a picture of 2 x 2 tokens, and text. Row 1 is shorter."""
    model = tiny(**MODEL)
    batch = vision_batch(model, [[2, (4, 4), 1], [3]])
    got = PositionCollator(model, first_sample)([batch])["position_ids"]
    pad = [0] * 4
    want = [
        [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, *pad]],
        [[0, 1, 2, 2, 3, 3, 4], [0, 1, 2, *pad]],
        [[0, 1, 2, 3, 2, 3, 4], [0, 1, 2, *pad]],
    ]
    assert got.tolist() == want


def test_a_batch_needs_no_attention_mask() -> None:
    model = tiny(**MODEL)
    batch = vision_batch(model, [ROWS["image"][0]])
    del batch["attention_mask"]
    with torch.no_grad():
        got = model(**PositionCollator(model, first_sample)([batch]))
        assert torch.equal(got.logits, model(**batch).logits)


def test_existing_positions_are_not_changed() -> None:
    model = tiny(**MODEL)
    batch = vision_batch(model, ROWS["image"])
    positions = torch.ones(3, *batch["input_ids"].shape).long()
    got = PositionCollator(model, first_sample)([batch | {"position_ids": positions}])
    assert got["position_ids"] is positions


@pytest.mark.slow
def test_spawned_workers_get_a_collator_without_weights() -> None:
    model = patch(tiny(**MODEL))
    collator = PositionCollator(model, first_sample)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert len(pickle.dumps(collator)) < 20_000 < weights / 10
    batches = [vision_batch(model, rows, seed=i) for i, rows in enumerate(ROWS.values())]
    loader = DataLoader(
        batches, 1, collate_fn=collator, num_workers=1, multiprocessing_context="spawn"
    )
    for got, batch in zip(loader, batches, strict=True):
        _assert_same(got, collator([batch]))


def _assert_same(got: Batch, want: Batch) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def _compare_after_sharding(rank: int, world: int) -> None:
    stock = tiny(**MODEL)
    batch = vision_batch(stock, ROWS["both"])
    want = PositionCollator(stock, first_sample)([batch])
    for model in (tiny(**MODEL), tiny(**MODEL).model):  # with its head, and without
        apply_ep_fsdp2(model)
        collator = pickle.loads(pickle.dumps(PositionCollator(model, first_sample)))
        _assert_same(collator([batch]), want)


def test_a_collator_of_a_sharded_model_computes_the_same_positions() -> None:
    run_ranks(_compare_after_sharding, 1)


@pytest.mark.parametrize("name", ["", "model"], ids=["with head", "without"])
def test_a_collator_of_a_peft_model_computes_the_same_positions(name: str) -> None:
    stock = tiny(**MODEL)
    batch = vision_batch(stock, ROWS["both"])
    wrapped = get_peft_model(
        tiny(**MODEL).get_submodule(name), LoraConfig(target_modules=["q_proj"])
    )
    _assert_same(
        PositionCollator(wrapped, first_sample)([batch]),
        PositionCollator(stock, first_sample)([batch]),
    )


def test_a_text_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM is not a vision-language model"):
        PositionCollator(tiny(), first_sample)


def test_a_model_with_sound_is_refused() -> None:
    """The forward computes the lengths of audio, so the collator cannot read them from a batch."""
    with pytest.raises(ValueError, match="numbers the tokens of pictures together with those of"):
        PositionCollator(tiny_of_type("qwen3_omni_moe_thinker"), list)


def test_pictures_without_token_types_are_refused() -> None:
    model = tiny(**MODEL)
    batch: dict[str, Any] = vision_batch(model, ROWS["image"])
    del batch["mm_token_type_ids"]
    with pytest.raises(ValueError, match="no mm_token_type_ids, only input_ids, attention_mask"):
        PositionCollator(model, first_sample)([batch])
