"""Padding tokens are not dispatched, not computed by experts and not counted; gradients are exact.

The reference of the parity cases is a stock model, which computes all tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import parity
from support.architectures.steps import assert_same_grads, build
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.parity import Case
from support.tiny_models import Row, batch, tiny, vision_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_moe_ep import (
    apply_ep_fsdp2,
    data_parallel_rank,
    data_parallel_size,
    expert_load,
    patch,
)
from hf_moe_ep.moe import layer as moe_layer
from hf_moe_ep.moe import padding
from hf_moe_ep.moe.padding import find_real_tokens
from hf_moe_ep.state import patched_state

HIDDEN, LAYERS, TOP_K = 32, 2, 2
Batch = dict[str, Tensor]


def _make_padded(model: nn.Module, rank: int, world: int = 2, step: int = 0) -> Batch:
    """Make 4 rows of 20 tokens, of which 0, 5, 10 and 16 are padding on the right."""
    return batch(model, 4, 20, seed=10 * step + rank, pad=16)


def _move_padding_to_the_left(inputs: Batch, *, first_label: bool) -> Batch:
    """Move the padding to the left. With `first_label`, each text's first token has a label."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    moved = {
        name: torch.stack([row.roll(len(row) - n) for row, n in zip(x, lengths, strict=True)])
        for name, x in inputs.items()
    }
    for row, n in enumerate(lengths):
        start = moved["labels"].shape[1] - n
        moved["labels"][row, start] = moved["input_ids"][row, start] if first_label else -100
    return moved


def _make_batches(
    model: nn.Module,
    rank: int,
    world: int,
    step: int,
    *,
    left: bool = False,
    first_label: bool = False,
) -> list[Batch]:
    inputs = _make_padded(model, rank, world, step)
    return [_move_padding_to_the_left(inputs, first_label=first_label) if left else inputs]


def _set_own_checkpoint(model: nn.Module, *, use_reentrant: bool) -> None:
    """Checkpoint every MoE block by a function that this package does not wrap."""
    for layer in model.model.layers:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=use_reentrant)


def _checkpointing(use_reentrant: bool) -> Any:
    return partial(parity.checkpointing, use_reentrant=use_reentrant)


RIGHT = Case("on the right", 2, 2, micro_batches=_make_batches)
FUSED = {"fused_loss": True}
NODES = {"dispatcher": "hierarchical", "node_size": 2}
CASES = [
    RIGHT,
    RIGHT.with_(name="on the left", micro_batches=partial(_make_batches, left=True)),
]
MORE_CASES = [
    RIGHT.with_(name="3 chunks, checkpoint", config={"dispatch_chunks": 3}).with_(
        prepare=_checkpointing(False)
    ),
    RIGHT.with_(
        name="on the left, first tokens predicted",
        micro_batches=partial(_make_batches, left=True, first_label=True),
    ),
    RIGHT.with_(name="sp", sp=2),
    RIGHT.with_(name="ep 1, checkpoint", ep=1, config=FUSED, prepare=_checkpointing(False)),
    RIGHT.with_(name="reentrant checkpoint", prepare=_checkpointing(True)),
    RIGHT.with_(name="own checkpoint", prepare=partial(_set_own_checkpoint, use_reentrant=False)),
    RIGHT.with_(
        name="own reentrant checkpoint", prepare=partial(_set_own_checkpoint, use_reentrant=True)
    ),
    RIGHT.with_(name="sp, checkpoint", sp=2, prepare=_checkpointing(False)),
    RIGHT.with_(name="ep 1, sp, reentrant", ep=1, sp=2, prepare=_checkpointing(True)),
    RIGHT.with_(name="ep 1, own checkpoint", ep=1, config=FUSED).with_(
        prepare=partial(_set_own_checkpoint, use_reentrant=False)
    ),
]
CASES_ON_NODES = [RIGHT.with_(name="2 nodes", world=4, ep=4, config=NODES)]


@contextmanager
def _dispatch_all_tokens() -> Iterator[None]:
    """Dispatch padding tokens like other tokens, as for a forward without labels."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(padding, "find_real_tokens", lambda given, **options: None)
        yield


@contextmanager
def _count_sent_bytes() -> Iterator[list[int]]:
    """Yield a list with the bytes that this rank sends in all-to-alls of rows."""
    sent, stock = [0], dist.all_to_all_single

    def counted(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and rows.is_floating_point():  # exchanges of attention pass no row counts
            sent[0] += rows.nbytes
        return stock(out, rows, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "all_to_all_single", counted)
        yield sent


def _run_step(model: nn.Module, inputs: Batch) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Run a step; return the bytes sent by all ranks, the load [L, E], and all gradients."""
    model.zero_grad()
    expert_load(model)  # resets the counts
    with _count_sent_bytes() as sent:
        model(**inputs).loss.backward()
    total = torch.tensor(sent)
    dist.all_reduce(total)
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return int(total), expert_load(model).counts, grads


# One picture in each row, and as many tokens per row as in `_make_texts`.
PICTURES: list[Row] = [
    [3, (4, 6), 11],
    [2, (4, 4), 10],
    [1, (2, 4), 9],
    [2, (2, 4), 4],
    [2, (2, 2), 1],
]


def _make_texts(model: Any, seed: int) -> Batch:
    """Make rows of 20, 16, 12, 8 and 4 tokens, with padding on the right."""
    return batch(model, 5, 20, seed=seed, pad=16)


def _make_pictures(model: Any, seed: int) -> Batch:
    return vision_batch(model, PICTURES, seed=seed)


def _take_row(inputs: Batch, row: int) -> Batch:
    """Return one row of a batch without its padding, with its picture if it has one."""
    length = int(inputs["attention_mask"][row].sum())
    taken = {}
    for name, x in inputs.items():
        if name == "pixel_values":
            taken[name] = x.split(inputs["image_grid_thw"].prod(1).tolist())[row]
        else:
            taken[name] = (
                x[row : row + 1] if name == "image_grid_thw" else x[row : row + 1, :length]
            )
    return taken


def _check_padding(
    make: Callable[[Any, int], Batch], name: str, sp_size: int, rank: int, world: int
) -> None:
    """With 40 % of padding (40 of 100 tokens) about 40 % fewer rows are sent.

    The number of rows depends on the router's choice. The exact number is compared with forwards of
    the same texts without padding, one text per forward.
    """
    model = apply_ep_fsdp2(tiny(name, num_hidden_layers=LAYERS), ep_size=2, sp_size=sp_size)
    inputs = make(model, data_parallel_rank(model))
    assert int((inputs["attention_mask"] == 0).sum()) == 40
    sent_bytes, load, grads = _run_step(model, inputs)
    with _dispatch_all_tokens():
        full_bytes, full_load, full_grads = _run_step(model, inputs)
    for parameter, grad in full_grads.items():
        parity.assert_close(parameter, grads[parameter], grad, 1e-12)
    assert load.sum(1).tolist() == [data_parallel_size(model) * 60 * TOP_K] * LAYERS
    assert torch.equal(load, full_load)
    unpadded_bytes = sum(_run_step(model, _take_row(inputs, row))[0] for row in range(5))
    assert sent_bytes == unpadded_bytes
    assert 0.5 < sent_bytes / full_bytes < 0.7, (sent_bytes, full_bytes)
    # Without expert parallelism padding is not counted either, also if the experts compute it.
    for fused_loss in (True, False):
        single = apply_ep_fsdp2(
            tiny(name, num_hidden_layers=LAYERS),
            ep_size=1,
            sp_size=sp_size,
            fused_loss=fused_loss,
        )
        assert torch.equal(_run_step(single, inputs)[1], load)


def all_tokens_are_sent_if_a_loss_may_read_them(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(num_hidden_layers=LAYERS), ep_size=2)
    inputs = _make_padded(model, rank)
    without_labels = {name: x for name, x in inputs.items() if name != "labels"}
    with _count_sent_bytes() as sent:
        got = model(**without_labels).logits
    with _count_sent_bytes() as want_sent, _dispatch_all_tokens():
        want = model(**without_labels).logits
    assert sent == want_sent and torch.equal(got, want)
    model.eval()
    with _count_sent_bytes() as sent:
        got = model(**inputs).logits
    assert sent == want_sent and torch.equal(got, want)
    assert patched_state(model).real_tokens is None


def max_tokens_per_rank_bounds_rows_without_padding(rank: int, world: int) -> None:
    """Each rank has one token and 19 of padding, so a rank receives at most 2 rows."""
    for limit, labels in ((2, True), (2, False)):
        model = apply_ep_fsdp2(tiny(num_hidden_layers=1), ep_size=2, max_tokens_per_rank=limit)
        inputs = {
            "input_ids": torch.zeros(1, 20, dtype=torch.int64),
            "attention_mask": torch.tensor([[1] + 19 * [0]]),
        }
        if labels:
            model(**inputs, labels=torch.full((1, 20), -100))
        else:
            with pytest.raises(RuntimeError, match="more than max_tokens_per_rank=2"):
                model(**inputs)


SENT = "padding is neither sent nor counted"
TWO_RANKS = on_ranks(
    2,
    {SENT: partial(_check_padding, _make_texts, "qwen3_moe", 1)},
    all_tokens_are_sent_if_a_loss_may_read_them,
    max_tokens_per_rank_bounds_rows_without_padding,
) + on_ranks(
    2,
    {
        f"{SENT}, pictures": partial(_check_padding, _make_pictures, "qwen3_vl_moe", 1),
        f"{SENT}, sp": partial(_check_padding, _make_texts, "qwen3_moe", 2),
    },
    slow=True,
)


@pytest.mark.parametrize(
    "claim",
    TWO_RANKS
    + parity.on_ranks(CASES)
    + parity.on_ranks(MORE_CASES, slow=True)
    + parity.on_ranks(CASES_ON_NODES, slow=True),
)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@contextmanager
def _count_expert_rows() -> Iterator[list[int]]:
    """Yield a list with the number of rows of each call of the experts."""
    rows, stock = [], moe_layer.run_experts

    def counted(experts: Any, compute: Any, rows_RH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(len(rows_RH))
        return stock(experts, compute, rows_RH, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(moe_layer, "run_experts", counted)
        yield rows


OWN = {"own": False, "own reentrant": True}


@pytest.mark.parametrize("checkpoints", [None, "non-reentrant", "reentrant", *OWN])
def test_one_process_computes_no_padding(checkpoints: str | None) -> None:
    """A recompute computes the tokens of the first run.

    Inside a checkpoint that this package does not wrap, both runs compute all tokens.
    """
    model = patch(tiny(num_hidden_layers=LAYERS), **FUSED)
    stock = tiny(num_hidden_layers=LAYERS)
    inputs = _make_padded(stock, 0)
    if checkpoints in OWN:
        _set_own_checkpoint(model, use_reentrant=OWN[checkpoints])
    elif checkpoints is not None:
        parity.checkpointing(model, use_reentrant=checkpoints == "reentrant")
    with _count_expert_rows() as rows:
        model(**inputs).loss.backward()
    stock(**inputs).loss.backward()
    parity.assert_same_gradients("padding", model, stock, lambda _: FP64_MODEL)
    computed = 80 if checkpoints in OWN else 80 - 31
    assert rows == [computed] * (LAYERS if checkpoints is None else 2 * LAYERS)
    counted = int(inputs["attention_mask"].sum())
    assert expert_load(model).counts.sum(1).tolist() == [counted * TOP_K] * LAYERS
    assert patched_state(model).real_tokens is None
    with _count_expert_rows() as rows:
        model(**{name: x for name, x in inputs.items() if name != "labels"})
        model(**inputs, output_hidden_states=True)
        model.eval()(**inputs)
        patch(model.train(), fused_loss=False)(**inputs)
    assert rows == [80] * 4 * LAYERS


@pytest.mark.parametrize("output", ["router_logits", "attentions"])
def test_returned_outputs_at_padding_equal_stocks_outputs(output: str) -> None:
    model, stock = (tiny(num_hidden_layers=LAYERS, attn_implementation="eager") for _ in range(2))
    inputs = _make_padded(stock, 0) | {f"output_{output}": True}
    got, want = patch(model, **FUSED)(**inputs)[output], stock(**inputs)[output]
    assert len(got) == len(want) == LAYERS
    for layer in range(LAYERS):
        assert_close(f"layer {layer}", got[layer], want[layer], FP64_MODEL)


# A delta net, Mamba-2 and an indexer.
MIXERS = (
    "qwen3_next",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("nemotron_h", "deepseek_v32")),
)


@pytest.mark.parametrize("model_type", MIXERS)
def test_padding_behind_a_text_is_not_computed_in_models_with_mixers(model_type: str) -> None:
    """Padding in front of a text is computed, because a mixer's states may depend on it."""
    with FP64():
        for left in (False, True):
            model, stock = patch(build(model_type), **FUSED), build(model_type)
            inputs = _make_padded(stock, 0)
            inputs = _move_padding_to_the_left(inputs, first_label=False) if left else inputs
            with _count_expert_rows() as rows:
                model(**inputs).loss.backward()
            stock(**inputs).loss.backward()
            assert_same_grads(model_type, model, stock, FP64_MODEL)
            assert set(rows) == {80 if left else 80 - 31}


def test_a_batch_without_padding_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(tiny(num_hidden_layers=LAYERS), **FUSED)
    monkeypatch.setattr(torch.Tensor, "index_copy", None)
    with _count_expert_rows() as rows:
        model(**batch(model, 4, 20)).loss.backward()
    assert rows == [80] * LAYERS


MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
LABELS = torch.tensor([[7, 7, 7, -100, -100], [-100, -100, -100, 7, 7]])


def _find_tokens(**given: Any) -> list[list[int]] | None:
    real_T = find_real_tokens({"attention_mask": MASK, "labels": LABELS, **given})
    return None if real_T is None else real_T.view(2, 5).int().tolist()


def test_padding_is_left_out_in_the_example_of_the_docstring() -> None:
    assert _find_tokens() == MASK.tolist()
    assert _find_tokens(attention_mask=MASK.bool()) == MASK.tolist()


def test_a_row_with_padding_in_front_of_a_text_is_kept_for_mixers() -> None:
    real_T = find_real_tokens({"attention_mask": MASK, "labels": LABELS}, has_mixers=True)
    assert real_T is not None and real_T.view(2, 5).int().tolist() == [MASK[0].tolist(), [1] * 5]


def test_a_row_in_which_padding_predicts_a_label_is_kept() -> None:
    labels = LABELS.clone()
    labels[1, 2] = 7  # predicted by the last padding token of the row
    assert _find_tokens(labels=labels) == [MASK[0].tolist(), [1] * 5]
    labels = LABELS.clone()
    labels[0, 4] = 7  # a label of padding itself, predicted by the padding before it
    assert _find_tokens(labels=labels) == [[1] * 5, MASK[1].tolist()]
    shifted = torch.full_like(LABELS, -100)
    assert _find_tokens(labels=None, shift_labels=shifted) == MASK.tolist()
    shifted[0, 4] = 7  # the next label of the last token
    assert _find_tokens(labels=None, shift_labels=shifted) == [[1] * 5, MASK[1].tolist()]
    assert (
        _find_tokens(labels=torch.where(LABELS == -100, 0, LABELS), ignore_index=0) == MASK.tolist()
    )


@pytest.mark.parametrize(
    "given",
    [
        {"labels": None},
        {"attention_mask": None},
        {"attention_mask": torch.ones(2, 1, 5, 5)},
        {"labels": torch.tensor([0, 1])},  # of a classifier
        {"past_key_values": object()},
    ],
)
def test_arguments_that_do_not_show_the_padding_give_no_mask(given: dict[str, Any]) -> None:
    assert _find_tokens(**given) is None
