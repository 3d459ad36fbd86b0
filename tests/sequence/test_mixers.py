"""Packed documents are alone in types in which stock mixes them; other batches are refused.

`test_granted.py` compares these types with stock on padded rows. Stock mixes packed documents in
modules that mix tokens without the attention interface, and in attention whose mask is built
without positions. These tests therefore compare each document with a stock run of this document.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.architectures import MODEL_TYPES, batch, mixed_batch
from support.architectures.adapted import build_adapted
from support.architectures.mixers import MIXERS
from support.architectures.mixes import build_internvl
from support.architectures.split_steps import is_mean
from support.architectures.steps import (
    adamw,
    assert_same_grads,
    assert_same_update,
    build,
    count_tokens,
    exactly,
    loss_of_sum,
)
from support.checks import Check, Found, on_ranks
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.fp64 import FP64
from support.needs import SINCE_5_23, SINCE_5_24
from support.parity import checkpointing
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from hf_moe_ep import (
    RoutingReplay,
    apply_ep_fsdp2,
    data_parallel_rank,
    describe,
    patch,
    unpatch,
)
from hf_moe_ep.architectures import find_plan
from hf_moe_ep.model_patches.standard import MASKS_WITHOUT_POSITIONS, SEQUENCE_PARALLEL
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence import slices
from hf_moe_ep.sequence.mixer_arguments import Document, MixerArguments, read_mixer_arguments
from hf_moe_ep.sequence.mixers import LayerSlice
from hf_moe_ep.sequence.packed_rows import SeparateDocuments
from hf_moe_ep.sequence.slices import Slice

Batch = dict[str, Tensor]
# The attention of Llama-4 numbers the tokens of its input, so it runs once per document.
LLAMA_4 = {"llama4", "llama4_text"}
GRANTED = sorted(
    (MIXERS.keys() & SEQUENCE_PARALLEL | LLAMA_4 | MASKS_WITHOUT_POSITIONS) & set(MODEL_TYPES)
)
# The type of the fast tests, which has delta nets.
FAST = ("qwen3_next",)
# Lengths of the documents in two rows. At sp_size 2 a document of each row continues on rank 1.
DOCUMENTS = ((9, 3, 7), (2, 11, 6))


def make_documents(model: nn.Module, group: int = 0) -> list[Batch]:
    """Make a batch of each document. The first token of a document has no label.

    Every group of ranks that share a batch has other documents.
    """
    lengths = [length for row in DOCUMENTS for length in row]
    seeds = range(len(lengths) * group, len(lengths) * (group + 1))
    return [_make_document(model, *pair) for pair in zip(lengths, seeds, strict=True)]


def _make_document(model: nn.Module, length: int, seed: int) -> Batch:
    made = batch(model, 1, length, seed=seed)
    made["labels"][:, 0] = -100
    return made


def make_documents_with_pictures(model: Any) -> list[Batch]:
    """Make two documents with a picture, and one without a picture, for one row."""
    alone = [mixed_batch(model, [n], text=4, seed=seed) for seed, n in enumerate((1, 0, 1))]
    for document in alone:
        del document["attention_mask"]
        document["labels"][:, 0] = -100
    return alone


def pack(alone: list[Batch], row_sizes: tuple[int, ...] = tuple(map(len, DOCUMENTS))) -> Batch:
    """Pack the documents into rows, whose position_ids restart at 0 in each document.

    `row_sizes` are the numbers of documents of the rows.
    """
    of_tokens = [n for n in ("input_ids", "labels", "mm_token_type_ids") if n in alone[0]]
    rows: dict[str, list[Tensor]] = {name: [] for name in (*of_tokens, "position_ids")}
    remaining = iter(alone)
    for row in ([next(remaining) for _ in range(size)] for size in row_sizes):
        for name in of_tokens:
            rows[name].append(torch.cat([document[name] for document in row], dim=1))
        lengths = [document["input_ids"].shape[1] for document in row]
        rows["position_ids"].append(torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0))
    media = {name for document in alone for name in document} - rows.keys() - {"attention_mask"}
    rows |= {name: [x[name] for x in alone if name in x] for name in media}
    return {name: torch.cat(values) for name, values in rows.items()}


def find_positions(model: Any, document: Batch) -> Tensor:
    """Return the positions of one document: (1, S), or (4, 1, S) if the model has three axes.

    The first of the four rows has the positions of text, which begin at 0 in each document.
    """
    text = torch.arange(document["input_ids"].shape[1])[None]
    find = getattr(getattr(model, "model", model), "get_rope_index", None)
    if find is None:
        return text
    grids = document.get("image_grid_thw")
    axes, _ = find(document["input_ids"], document["mm_token_type_ids"], image_grid_thw=grids)
    return torch.cat([text[None], axes])


# In old versions, stock adds a mask of booleans to the scores of its indexer.
STOCK_IS_WRONG = {} if SINCE_5_23 else {"deepseek_v32": "this stock code adds boolean masks"}


def assert_documents_are_alone(
    where: str,
    model: nn.Module,
    stock: nn.Module,
    *,
    masked: bool = False,
    with_pictures: bool = False,
    with_cache: bool = True,
    groups: int = 1,
) -> None:
    """Compare loss, logits and gradients of packed rows with stock runs of each document.

    `groups` is the number of groups of ranks that share a batch, if there are several.
    """
    everyone = [make_documents(stock, group) for group in range(groups)]
    if with_pictures:
        everyone = [make_documents_with_pictures(stock)]
    alone = everyone[data_parallel_rank(model) if groups > 1 else 0]
    rows = pack(alone, (len(alone),)) if with_pictures else pack(alone)
    if with_pictures:
        rows["position_ids"] = torch.cat([find_positions(stock, x) for x in alone], dim=-1)
    if masked:
        rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    documents = [document for group in everyone for document in group]
    num_tokens = sum(document["labels"][:, 1:].ne(-100).sum() for document in documents)
    unlabelled = {name: x for name, x in rows.items() if name != "labels"}
    with torch.no_grad():
        inputs = [{n: x for n, x in document.items() if n != "labels"} for document in alone]
        logits = [stock(**x, use_cache=False).logits for x in inputs]
        # Without use_cache=False the model makes a cache, and no sequence is split in evaluation.
        for options in ({"use_cache": False}, {}) if with_cache else ({"use_cache": False},):
            got = model.eval()(**unlabelled, **options).logits.flatten(0, 1)
            want = torch.cat(logits, dim=1).flatten(0, 1)
            assert_close(f"{where}: logits, {options}", got, want, FP64_MODEL)
    cache = {} if with_cache else {"use_cache": False}
    loss = model.train()(**rows, **cache, num_items_in_batch=num_tokens).loss
    (loss * groups).backward()
    if groups > 1:  # all ranks of a group have the loss of the group
        loss = sum_over_ranks(loss.detach()) * groups / dist.get_world_size()
    total = torch.zeros_like(loss)
    labels = sum(document["labels"].ne(-100).sum() for document in documents)
    for document in documents:
        want = stock(**document, num_items_in_batch=num_tokens, use_cache=False).loss
        if is_mean(stock):
            want = want * document["labels"].ne(-100).sum() / labels
        want.backward()
        total += want.detach()
    assert_close(f"{where}: loss", loss, total, FP64_MODEL)
    assert_same_grads(where, model, stock, FP64_MODEL)
    del loss
    assert_no_slice_is_alive()


def assert_no_slice_is_alive() -> None:
    """Check that no slice outlives the graph, because a slice refers to whole masks."""
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Slice]


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(n, marks=() if n in FAST else pytest.mark.slow)
        for n in sorted(SEQUENCE_PARALLEL & set(MODEL_TYPES))
    ],
)
def test_packed_documents_are_alone_without_sequence_parallelism(model_type: str) -> None:
    """Where our hooks separate documents, they do so beside a mask of ones or a cache as well.

    All types are tested, to find a type in which neither stock nor our hooks separate documents.
    """
    if model_type in STOCK_IS_WRONG:
        pytest.skip(STOCK_IS_WRONG[model_type])
    by_hooks = model_type in GRANTED
    with FP64():
        for masked in (False, True) if by_hooks else (False,):
            model, stock = patch(build(model_type)), build(model_type)
            assert_documents_are_alone(model_type, model, stock, masked=masked, with_cache=by_hooks)


@pytest.mark.slow
@pytest.mark.skipif("qwen3_5_moe" not in GRANTED, reason="this transformers has no such type")
def test_packed_documents_with_pictures_are_alone() -> None:
    """The type has delta nets, and its positions have three axes."""
    model, stock = patch(build("qwen3_5_moe")), build("qwen3_5_moe")
    with FP64():
        assert_documents_are_alone("with pictures", model, stock, with_pictures=True)


def test_packed_documents_are_alone_in_a_model_around_gpt_oss() -> None:
    """transformers builds the masks of gpt-oss without positions inside other models as well."""
    model, stock = (build_internvl(0, "gpt_oss") for _ in range(2))
    with FP64():
        assert_documents_are_alone("internvl of gpt_oss", patch(model), stock, with_cache=False)


# The rows have 7 and 12 tokens. Their second documents begin at token 4 and at token 5.
POSITIONS = (torch.tensor([[*range(4), *range(3)]]), torch.tensor([[*range(5), *range(7)]]))


DICT = pytest.param("a dict", marks=pytest.mark.skipif(not SINCE_5_24, reason="not in qwen3_next"))


@pytest.mark.parametrize("kind", ["booleans", "numbers", DICT])
def test_documents_are_alone_beside_a_mask_of_the_caller(kind: str) -> None:
    """The mask hides later tokens, but not the other documents."""
    model, stock = patch(build("qwen3_next")).eval(), build("qwen3_next").eval()
    inputs = batch(stock, 1, 7)["input_ids"]
    visible = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    mask: Any = visible
    if kind == "numbers":
        low = torch.finfo(torch.float64).min
        mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, low)
    if kind == "a dict":
        mask = {"full_attention": visible, "linear_attention": None}
    with torch.no_grad():
        got = model(input_ids=inputs, position_ids=POSITIONS[0], attention_mask=mask).logits
        want = [stock(input_ids=x, use_cache=False).logits for x in inputs.split([4, 3], 1)]
    assert_close("logits", got, torch.cat(want, 1), FP64_MODEL)


def test_positions_that_skip_tokens_begin_no_document_beside_a_mask() -> None:
    model, stock = patch(build("qwen3_next")).eval(), build("qwen3_next").eval()
    inputs = {
        "input_ids": batch(stock, 1, 7)["input_ids"],
        "position_ids": torch.tensor([[0, 1, 2, 4, 5, 6, 9]]),
        "attention_mask": torch.ones(7, 7, dtype=torch.bool).tril()[None, None],
    }
    with torch.no_grad():
        got, want = (m(**inputs, use_cache=False).logits for m in (model, stock))
    assert_close("logits", got, want, FP64_MODEL)


def test_booleans_that_eager_attention_would_add_are_refused() -> None:
    model = build("qwen3_next")
    model.set_attn_implementation("eager")
    inputs = batch(model, 1, 7)["input_ids"]
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ValueError, match=r"Attention got an attention_mask of booleans, which eag"):
        patch(model)(input_ids=inputs, position_ids=POSITIONS[0], attention_mask=mask)


def test_masks_of_flex_attention_hide_other_documents() -> None:
    """The model's own mask hides later tokens. The second row has one document."""
    part = Slice(None, 0, 1, length=7)
    part.documents = [[(0, 4), (4, 7)], [(0, 7)]]
    module: Any = nn.Linear(2, 2)
    module.config = SimpleNamespace(_attn_implementation="flex_attention")
    arguments = MixerArguments("self_attn", frozenset({"attention_mask"}), ())
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 7, 7, device="cpu")
    given = {"attention_mask": mask, "hidden_states": torch.zeros(2, 7, 3)}
    call = SeparateDocuments(LayerSlice(part), arguments)(module, (), given)
    assert call is not None
    visible = create_mask(call[1]["attention_mask"].mask_mod, 2, 1, 7, 7, device="cpu")[:, 0]
    want = torch.ones(2, 7, 7, dtype=torch.bool).tril()
    want[0, 4:, :4] = False
    assert torch.equal(visible, want)
    again = SeparateDocuments(LayerSlice(part), arguments)(module, (), given)
    assert again is not None and again[1]["attention_mask"] is call[1]["attention_mask"]


@pytest.mark.parametrize("masked", [False, True])
def test_positions_of_three_axes_that_restart_are_refused(masked: bool) -> None:
    """With text positions in front of the axes, each document is alone."""
    model, stock = (build("qwen3_5_moe_text").eval() for _ in range(2))
    patch(model)
    inputs = batch(stock, 1, 7)["input_ids"]
    given = {"input_ids": inputs} | ({"attention_mask": torch.ones(1, 7)} if masked else {})
    with pytest.raises(ValueError, match=r"\(3, B, S\) restart within a row.*\(4, B, S\)"):
        model(**given, position_ids=POSITIONS[0].expand(3, 1, 7))
    with torch.no_grad():
        got = model(**given, position_ids=POSITIONS[0].expand(4, 1, 7)).logits
        want = [stock(input_ids=x, use_cache=False).logits for x in inputs.split([4, 3], 1)]
    assert_close("logits", got, torch.cat(want, 1), FP32_INSIDE)


def test_routes_of_packed_documents_equal_those_of_each_document_alone() -> None:
    """The routes are recorded in one process, without process groups."""
    model = patch(build("qwen3_next"))
    inputs, replay = batch(model, 1, 7)["input_ids"], RoutingReplay(model)
    ids = []
    with torch.no_grad():
        for x, positions in ((inputs, POSITIONS[0]), (inputs[:, :4], None), (inputs[:, 4:], None)):
            with replay.record() as routes:
                model(input_ids=x, position_ids=positions)
            ids.append(routes.ids)
    assert torch.equal(ids[0], torch.cat(ids[1:], 1))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_forwards_before_one_backward_keep_their_documents(use_reentrant: bool | None) -> None:
    """Recomputed layers get the documents of their own forward; no slice is alive afterwards."""
    model, stock = build("qwen3_next"), build("qwen3_next")
    for trained in (model, stock):
        if use_reentrant is not None:
            checkpointing(trained, use_reentrant)
    patch(model)
    inputs = [batch(stock, 1, positions.shape[1])["input_ids"] for positions in POSITIONS]
    with FP64():
        losses = [
            model(input_ids=x, labels=x, position_ids=p, num_items_in_batch=1, use_cache=False).loss
            for x, p in zip(inputs, POSITIONS, strict=True)
        ]
        torch.stack(losses).sum().backward()
        for x, starts in zip(inputs, ((0, 4, 7), (0, 5, 12)), strict=True):
            for start, stop in pairwise(starts):
                # The label of a document's last token is the first token of the next document.
                labels = torch.cat([x, x[:, -1:] * 0 - 100], 1)[:, start + 1 : stop + 1]
                stock(
                    input_ids=x[:, start:stop],
                    labels=labels,
                    shift_labels=labels,
                    num_items_in_batch=1,
                    use_cache=False,
                ).loss.backward()
    assert_same_grads("two forwards", model, stock, FP64_MODEL)
    del losses
    assert_no_slice_is_alive()


def test_an_interrupted_forward_leaves_no_wrapper_after_unpatch() -> None:
    """After Ctrl-C, torch does not call the hook that restores the checkpointing function."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = build("qwen3_next")
    checkpointing(model, False)
    layer = model.model.layers[0]
    stock = layer._gradient_checkpointing_func
    patch(model)
    inputs = pack(make_documents(model))
    for _ in range(2):
        hook = layer.mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**inputs)
        hook.remove()
    unpatch(model)
    assert layer._gradient_checkpointing_func is stock


def _compare_packed_rows(
    model_type: str,
    rank: int,
    world: int,
    *,
    groups: int = 1,
    cp: int = 1,
    use_reentrant: bool | None = None,
    with_pictures: bool = False,
) -> None:
    with FP64():
        model, stock = build(model_type, seed=rank), build(model_type)
        if use_reentrant is not None:
            checkpointing(model, use_reentrant)
        apply_ep_fsdp2(model, ep_size=2, sp_size=world // cp // groups, cp_size=cp)
        assert_documents_are_alone(
            model_type, model, stock, masked=True, with_pictures=with_pictures, groups=groups
        )
        if cp > 1:
            assert_same_update(model_type, (model, stock), (adamw(model), adamw(stock)))


PACKED = [
    Check(
        name,
        2,
        partial(_compare_packed_rows, name),
        slow=name != FAST[0],
        skip=STOCK_IS_WRONG.get(name, ""),
    ).as_parameter()
    for name in GRANTED
]
WITH_PICTURES: dict[str, Any] = {
    "sp 2": {},
    "cp 2, checkpoint": {"cp": 2, "use_reentrant": False},
}
PACKED += [
    Check(
        f"{name} with pictures, {layout}",
        2,
        partial(_compare_packed_rows, name, with_pictures=True, **options),
        slow=True,
        skip="" if name in GRANTED else f"this version of transformers has no plan of {name}",
    ).as_parameter()
    for name in ("llama4", "qwen3_5_moe")  # the positions of the second type have three axes
    for layout, options in WITH_PICTURES.items()
]
# The layers of this type share keys, and stock cannot train it with reentrant checkpointing.
NOT_REENTRANT = ("mistral_large4",)
CHECKPOINTED: list[Any] = [
    Check(
        f"{name}, {'reentrant' if use_reentrant else 'not reentrant'}",
        2,
        partial(_compare_packed_rows, name, use_reentrant=use_reentrant),
        slow=True,
    ).as_parameter()
    for name in GRANTED
    for use_reentrant in (False, True)
    if not (use_reentrant and name in NOT_REENTRANT)
]
# Types with an indexer, a delta net, state spaces, lightning attention, and sinks and windows.
CONTEXT = [
    Check(
        f"{name}, {layout}", 4, partial(_compare_packed_rows, name, **options), slow=True
    ).as_parameter()
    for name in ("glm_moe_dsa", "qwen3_5_moe_text", "nemotron_h", "minimax", "gpt_oss")
    for layout, options in {
        "cp 4": {"cp": 4},
        "cp 4, checkpoint": {"cp": 4, "use_reentrant": False},
        "cp 2 x sp 2, reentrant": {"cp": 2, "use_reentrant": True},
        "sp 4": {},
    }.items()
]
# A type of each kind of mixer, on two groups of ranks with other documents.
TWO_GROUPS = [
    Check(
        f"{name}, ep 2 x sp 2", 4, partial(_compare_packed_rows, name, groups=2), slow=True
    ).as_parameter()
    for name in (
        *("qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2_moe", "inkling2_text"),
        *("deepseek_v32", "minimax_m3_vl_text", "deepseek_v4", "minimax"),
    )
    if name in GRANTED and name not in STOCK_IS_WRONG
]


@pytest.mark.parametrize("claim", PACKED)
def test_packed_documents_are_alone(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", CHECKPOINTED)
def test_checkpointed_packed_documents_are_alone(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", CONTEXT + TWO_GROUPS)
def test_packed_documents_are_alone_on_four_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_flash_attention_without_positions_is_refused() -> None:
    """GraniteMoeHybrid passes no positions to attention; GLM-4.5V passes no text positions."""
    for name in ("granitemoehybrid", "glm4v_moe"):
        model = build(name)
        use_fake_flash(model)
        patch(model)
        rows = {name: x[:1] for name, x in pack(make_documents(model)).items()}
        with pytest.raises(ValueError, match="Attention gets no positions of the text, so flash"):
            model(**rows)


def test_several_packed_rows_are_refused_with_flash_attention() -> None:
    """Flash attention would mix the documents, although the delta nets run them one by one."""
    model = build("qwen3_next")
    use_fake_flash(model)
    patch(model)
    rows = pack(make_documents(model))
    with pytest.raises(ValueError, match=r"2 rows with packed documents.*in a batch of one"):
        model(**rows)
    model(**{name: x[:1] for name, x in rows.items()})
    # With flash attention, a gap between positions does not begin a document.
    gaps = torch.tensor([[0, 1, 2, 7, 8, 9]]).expand(2, -1)
    model(input_ids=rows["input_ids"][:, :6], position_ids=gaps)


def test_masks_that_cannot_be_cut_into_documents_are_refused() -> None:
    arguments = read_mixer_arguments("layers.0.mixer", nn.Linear(2, 2))
    document = Document(row=0, rows=1, start=0, stop=2)
    with pytest.raises(ValueError, match=r"attention_mask of layers.0.mixer \(shape \(3,\)\) cann"):
        arguments.cut_document(((), {"attention_mask": torch.ones(3)}), document)


def test_a_mixer_beside_experts_is_refused_by_its_path() -> None:
    """The plan of this test names the parent of the experts as a module that mixes tokens."""
    model = build("mixtral")
    plan = replace(find_plan(model), mixers=("layers.*.mlp",), origin="given")
    with pytest.raises(
        ValueError, match=r"but not model.layers.0.mlp \(.*also contains the experts"
    ):
        patch(model, plan=plan, sp_size=2)


DESCRIBED = {
    "minimax": "gathered for model.layers.*.self_attn (MiniMaxLightningAttention); the computati",
    "lfm2_moe": "tokens of the previous rank sent for model.layers.*.conv (Lfm2MoeShortConv); eve",
    "nemotron_h": "heads split in model.layers.*.mixer (NemotronHMamba2Mixer); everything, except",
    "glm_moe_dsa": "keys gathered for model.layers.*.self_attn (GlmMoeDsaAttention); everything,",
    "qwen3_next": "heads split in model.layers.*.linear_attn (Qwen3NextGatedDeltaNet); everything",
}


@pytest.mark.skipif(not SINCE_5_23, reason="mixers of older transformers get whole sequences")
@pytest.mark.parametrize("model_type", sorted(DESCRIBED.keys() & set(MODEL_TYPES)))
def test_describe_says_how_mixers_are_divided(model_type: str) -> None:
    report = describe(patch(build(model_type), sp_size=2))
    (line,) = [line for line in report.splitlines() if line.startswith("  sequence")]
    assert DESCRIBED[model_type] in line and line.endswith("divided by sp_size 2")
    assert "  sequence" not in describe(patch(build(model_type)))
    assert "  sequence" not in describe(patch(build("mixtral"), sp_size=2))


def _compare_adapters(model_type: str, rank: int, world: int) -> None:
    """Train adapters on experts and on all linear layers, also inside mixers."""
    with FP64():
        model, stock = build_adapted(model_type, seed=rank), build_adapted(model_type, seed=0)
        apply_ep_fsdp2(model, ep_size=2, sp_size=world)
        inputs = batch(stock, 2, 11, pad=3)
        num_tokens = count_tokens([inputs])
        loss = loss_of_sum(model, inputs, num_tokens)
        loss.backward()
        want = loss_of_sum(stock, inputs, num_tokens)
        want.backward()
        assert_close("loss", loss, want, FP64_MODEL)
        assert_same_grads(model_type, model, stock, FP64_MODEL)


ADAPTED = [
    Check(name, 2, partial(_compare_adapters, name), slow=True).as_parameter()
    for name in ("qwen3_next", "glm_moe_dsa", "lfm2_moe", "minimax", "nemotron_h")
]


@pytest.mark.parametrize("claim", ADAPTED)
def test_adapters_equal_stock_peft(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _compare_bytes_of_a_step(
    model_type: str, values: Callable[[Any], tuple[Any, Any]], rank: int, world: int
) -> None:
    """Compare the bytes of a step with the values per token that the docstrings count.

    The docstrings are in mixers.py, gathering_cache.py, and GatherOutput in split.py.
    """
    with exactly(model_type):
        model = build(model_type, seed=rank)
        apply_ep_fsdp2(model, sp_size=world)
    inputs = batch(model, 2, 12)
    tokens = 2 * 12 // world
    sent = {"all_gather": 0.0, "swap_slices": 0.0}

    def counted(name: str) -> Any:
        stock = getattr(slices, name)

        def call(x: Tensor, group: Any) -> Tensor:
            # An all-gather sends `x` to each other rank. A swap sends each part but its own.
            sent[name] += x.nbytes * (world - 1 if name == "all_gather" else (world - 1) / world)
            return stock(x, group)

        return call

    counters = {name: counted(name) for name in sent}
    with exactly(model_type), mock.patch.multiple(slices, **counters):
        loss = model(**inputs, use_cache=False).loss
        forward = dict(sent)
        loss.backward()
    in_forward, in_backward = (8 * (world - 1) * tokens * n for n in values(model))
    loss_bytes = (world - 1) * loss.element_size()
    assert forward == {"all_gather": in_forward + loss_bytes, "swap_slices": 0}
    assert sent["swap_slices"] == in_backward


def _count_hidden_states(model: Any) -> tuple[int, int]:
    """Count the values per token in forward and in backward."""
    number = model.config.layer_types.count("linear_attention")
    return number * model.config.hidden_size, number * model.config.hidden_size


def _count_layer_outputs(model: Any) -> tuple[Fraction, Fraction]:
    """Count the inputs of attention, three in full attention, and the outputs of all layers.

    Two convolutions per layer get halos of two tokens, for slices of six tokens.
    """
    config = model.config
    full = config.layer_types.count("hybrid")
    layers = config.num_hidden_layers
    gathered = (layers - full + 3 * full) + layers
    values = config.hidden_size * (gathered + 2 * layers * Fraction(2, 6))
    return values, values


def _count_compressed_keys(model: Any) -> tuple[int, int]:
    """Count keys, and the keys and gates of compressors.

    Keys and gates of an indexer's compressor have no gradient.
    """
    config = model.config
    kinds = config.layer_types
    overlapping = kinds.count("compressed_sparse_attention")
    plain = kinds.count("heavily_compressed_attention")
    values = (overlapping + plain) * config.head_dim
    values += (2 * plain + 4 * overlapping) * config.head_dim
    return values + 4 * overlapping * config.index_head_dim, values


def _count_keys(model: Any) -> tuple[int, int]:
    """Count latents and rotary keys, and in forward the keys of indexers, without gradients."""
    config = model.config
    values = (config.kv_lora_rank + config.qk_rope_head_dim) * config.num_hidden_layers
    return values + config.index_head_dim * config.num_hidden_layers, values


BYTES: dict[str, Any] = {
    "whole sequences": partial(_compare_bytes_of_a_step, "minimax", _count_hidden_states),
    "only keys": partial(_compare_bytes_of_a_step, "deepseek_v32", _count_keys),
    "outputs of layers": partial(_compare_bytes_of_a_step, "inkling2_text", _count_layer_outputs),
    "keys of compressors": partial(_compare_bytes_of_a_step, "deepseek_v4", _count_compressed_keys),
}


@pytest.mark.skipif(not SINCE_5_23, reason="mixers of older transformers get whole sequences")
@pytest.mark.parametrize(
    "claim", on_ranks(2, {k: x for k, x in BYTES.items() if x.args[0] in MODEL_TYPES})
)
def test_as_many_bytes_are_sent_as_the_docstrings_say(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
