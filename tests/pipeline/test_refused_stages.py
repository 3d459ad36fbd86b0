"""Every rank refuses what pipeline stages cannot do, with an error that names a remedy."""

import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.ranks import run_ranks
from support.stages import four_layers, rows_of, state_of
from support.tiny_models import batch, tiny
from torch import nn
from torch.distributed.tensor import DTensor

from hf_moe_ep import (
    RoutingReplay,
    apply_ep_fsdp2,
    describe,
    patch,
)
from hf_moe_ep.pipeline import run as driver
from hf_moe_ep.pipeline.caller_loss import CallerLoss
from hf_moe_ep.sharding.units import reshard

# name: (a function that builds the model, options of patch, a match of the error)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "pictures": (
        lambda: tiny("qwen3_vl_moe"),
        {"pp_size": 2},
        r"pp_size \(2\) > 1 cannot place the encoders of pictures.*leave pp_size at 1",
    ),
    "no plan": (
        lambda: build("olmoe"),
        {"pp_size": 2},
        r"olmoe has no base_model_pp_plan.*pp_layers=\(2, 2\)",
    ),
    "rewards": (
        lambda: tiny("qwen3_moe, rewards"),
        {"pp_size": 2},
        r"Qwen3MoeForSequenceClassification is no causal language model",
    ),
    "too many": (tiny, {"pp_size": 3}, r"pp_size \(3\).*has 2 layers; try pp_size=2"),
    "wrong sum": (tiny, {"pp_layers": [1, 2]}, r"gives 3 layers to 2 stages.*has 2 layers"),
    "blocks": (lambda: build("dbrx"), {"pp_size": 2, "pp_layers": [2, 2]}, r"MoE blocks of dbrx"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_refused_by_patch(name: str) -> None:
    make, options, match = MODELS[name]
    with pytest.raises(ValueError, match=match):
        patch(make(), **options)


def test_a_model_without_a_plan_is_cut_by_hand() -> None:
    patch(build("olmoe"), pp_layers=[1, 3])


def test_a_model_that_was_never_sharded_raises() -> None:
    model = patch(tiny(), pp_size=2)
    with pytest.raises(ValueError, match=r"pp_size=2 but never sharded"):
        model(**batch(model, 2, 4))


def _shard(rank: int, make: Callable[[int], nn.Module] = four_layers, **options: Any) -> nn.Module:
    return apply_ep_fsdp2(make(rank), pp_size=2, **options)


def _expect_error(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def calls_are_refused(rank: int, world: int) -> None:
    model = _shard(rank)
    (rows,) = rows_of(4)(model, 0, 0)
    unlabelled = {name: value for name, value in rows.items() if name != "labels"}
    _expect_error(r"DPO, GRPO.*Pass labels and use outputs.loss", lambda: model(**unlabelled))
    _expect_error(r"output_hidden_states=True", lambda: model(**rows, output_hidden_states=True))
    with mock.patch.object(model.config, "output_hidden_states", True):
        _expect_error(
            r"output_hidden_states=True", lambda: model(**rows, output_hidden_states=None)
        )
    _expect_error(r"return_dict=False", lambda: model(**rows, return_dict=False))
    longer = torch.nn.functional.pad(rows["labels"], (0, 1))
    _expect_error(
        r"labels .*\(4, 7\), .*4 rows of 6 tokens", lambda: model(**rows | {"labels": longer})
    )
    _expect_error(r"without input_ids and inputs_embeds", lambda: model(labels=rows["labels"]))
    _expect_error(r"logits_to_keep=2 selects positions", lambda: model(**rows, logits_to_keep=2))
    none = {name: value[:0] for name, value in rows.items()}
    _expect_error(r"has 0 rows of 6 tokens.*drop the last batch", lambda: model(**none))
    match = r"without input_ids and inputs_embeds" if rank == 0 else r"rank 0 cannot run this call"
    _expect_error(match, lambda: model(**rows | ({"input_ids": None} if rank == 0 else {})))
    compiled = torch.compile(model, backend="eager")
    _expect_error(r"cannot be compiled as a whole.*compile_layers=True", lambda: compiled(**rows))
    with torch.autocast("cpu", torch.float16):
        _expect_error(r"gradients in fp16 would become zero; train in bf16", lambda: model(**rows))
    for trains in (False, True):
        model.train(trains)
        _expect_error(
            r"a KV cache.*pp_size=1", lambda: model.generate(rows["input_ids"], max_new_tokens=2)
        )
    before = RoutingReplay(patch(four_layers(rank), pp_size=2))
    _expect_error(
        r"can be recorded and replayed once the model is sharded", before.record().__enter__
    )
    assert torch.isfinite(model(**rows).loss), "the model works after every refusal"
    _expect_error(
        r"pp_size=2 computes gradients before a gradient scaler",
        lambda: apply_ep_fsdp2(four_layers(rank).half(), pp_size=2),
    )


def tensors_of_the_caller_are_refused(rank: int, world: int) -> None:
    """Without an error, such calls would compute other gradients, cut other rows, or step early."""
    model = _shard(rank)
    (rows,) = rows_of(4)(model, 0, 0)
    labels = rows["labels"]
    embeds = torch.randn(*labels.shape, model.config.hidden_size, requires_grad=True)
    match = r"inputs_embeds requires a gradient.*pp_size=2 the forward runs backward.*input_ids"
    _expect_error(match, lambda: model(inputs_embeds=embeds, labels=labels))
    assert embeds.grad is None
    assert torch.isfinite(model(inputs_embeds=embeds.detach(), labels=labels).loss)
    _expect_error(
        r"4 rows into micro-batches, but kinds is a list", lambda: model(**rows, kinds=[1] * 4)
    )
    match = r"but kinds has the shape \(11,\), without 4 rows in dim 0"
    _expect_error(match, lambda: model(**rows, kinds=torch.arange(11)))
    model.config.return_dict = False
    _expect_error(r"return_dict=False is not supported", lambda: model(**rows))
    model.config.return_dict = True
    # The first stage has no such hook.
    parameter = next(p for name, p in model.named_parameters() if "layers.3" in name or rank == 0)
    steps: list[Any] = []
    handle = parameter.register_post_accumulate_grad_hook(steps.append) if rank == 1 else None
    own = r"a parameter has a hook for accumulated gradients.*step the optimizer after backward"
    _expect_error(own if rank == 1 else r"rank 1 cannot run this call", lambda: model(**rows))
    if handle is not None:
        handle.remove()
    model(**rows).loss.backward()
    assert not steps
    tied = apply_ep_fsdp2(four_layers(rank, tie_word_embeddings=True), pp_size=2)
    names = dict(tied.named_parameters())
    if rank == 0:
        names["model.embed_tokens.weight"].requires_grad_(False)
    _expect_error(
        r"requires a gradient on rank 1 but not on rank 0, which holds the other copy",
        lambda: tied(**rows),
    )


def losses_of_other_outputs_are_refused(rank: int, world: int) -> None:
    """No gradient was computed for these outputs, so a part of such a loss would not be trained."""
    coefficient = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    model = _shard(rank, make=partial(four_layers, **coefficient), gather_logits=True)
    (rows,) = rows_of(4)(model, 0, 0)

    def backward(loss_of: Callable[[Any], torch.Tensor], **batch: Any) -> None:
        loss_of(model(**(rows | batch))).backward()

    aux_loss = r"outputs.aux_loss got a gradient.*aux loss times model.router_aux_loss_coef: set"
    _expect_error(aux_loss, lambda: backward(lambda out: out.loss + 0.1 * out.aux_loss))
    _expect_error(aux_loss, lambda: backward(lambda out: out.aux_loss))
    logits = r"outputs.logits got a gradient.*compute_loss_func.*or leave pp_size at 1"
    _expect_error(logits, lambda: backward(lambda out: out.loss + out.logits.square().mean()))
    assert all(p.grad is None for p in model.parameters())
    backward(lambda out: 2 * out.loss + 0 * out.logits.sum() + 0 * out.aux_loss)
    got = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    backward(lambda out: 2 * out.loss)
    for name, parameter in model.named_parameters():
        assert torch.equal(got[name], parameter.grad.full_tensor()), name
    # As in stock, outputs may be changed in place.
    output = model(**rows)
    output.logits.div_(2)
    output.loss /= 2
    output.loss.backward()

    model.eval()
    evaluated = r"has computed no gradients: with pp_size=2.*Call model.train\(\)"
    _expect_error(evaluated, lambda: backward(lambda out: out.loss))
    weight = torch.ones((), requires_grad=True)
    _expect_error(evaluated, lambda: backward(lambda out: out.loss + weight))
    _expect_error(evaluated, lambda: backward(lambda out: out.logits.mean() * weight, labels=None))
    with torch.no_grad():
        assert not model(**rows).loss.requires_grad
    # One stage alone has a trained parameter, and then no stage has one.
    model.requires_grad_(False)
    if rank == 0:
        next(model.parameters()).requires_grad_(True)
    _expect_error(evaluated, lambda: backward(lambda out: out.loss + weight))
    model.requires_grad_(False)
    weight.grad = None
    backward(lambda out: out.logits.detach().mean() * weight + out.loss, labels=rows["labels"])
    assert weight.grad is not None, "a frozen model has no gradients, with stages or without"


def an_aux_loss_that_is_not_computed_is_refused(rank: int, world: int) -> None:
    model = _shard(rank, aux_loss_per_layer=True)
    (rows,) = rows_of(4)(model, 0, 0)
    _expect_error(r"computed no aux loss; set output_router_logits=True", lambda: model(**rows))
    model(**rows, output_router_logits=True).loss.backward()


def packed_rows_with_padding_are_refused(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(build("qwen3_next", seed=rank), pp_size=2)
    rows = batch(model, 4, 8, seed=0)
    positions = torch.cat([torch.arange(5), torch.arange(3)]).expand(4, -1)
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[0, -1] = 0
    _expect_error(
        r"position_ids restart within a row.*leave the mask out",
        lambda: model(**(rows | {"position_ids": positions, "attention_mask": mask})),
    )
    axes = positions.expand(3, 4, -1)
    _expect_error(
        r"position_ids \(3, B, S\) restart within a row.*\(4, B, S\)",
        lambda: model(**(rows | {"position_ids": axes})),
    )
    _expect_error(
        r"cu_seq_lens_q describes packed documents, .* at token 5, but position_ids do not",
        lambda: model(**rows, cu_seq_lens_q=torch.tensor([0, 5, 8, 16, 24, 32])),
    )
    assert torch.isfinite(model(**rows).loss)


def ranks_that_share_a_batch_disagree(rank: int, world: int) -> None:
    model = _shard(rank, sp_size=2)
    rows = batch(model, 4, 6, seed=rank % 2)  # the columns agree
    _expect_error(
        r"ranks of one sp or cp group were given different batches", lambda: model(**rows)
    )
    model(**batch(model, 4, 6, seed=0)).loss.backward()


def no_rank_waits_for_one_that_refuses(rank: int, world: int) -> None:
    """Of 2 x 2 ranks, rank 3 shares neither a stage nor a column with rank 0, whose call fails."""
    model = _shard(rank)
    (rows,) = rows_of(4)(model, rank % 2, 0)
    refusal_of_others = r"rank \d cannot run this call of a model with pipeline stages"
    options = {"output_hidden_states": True} if rank == 0 else {}
    match = r"output_hidden_states=True asks" if rank == 0 else refusal_of_others
    _expect_error(match, lambda: model(**rows, **options))
    model.train(rank != 0)
    match = r"rank 0 for a forward with labels but no training, rank 2 for training"
    _expect_error(match if rank % 2 == 0 else refusal_of_others, lambda: model(**rows))
    model.train()
    labels = rows["labels"].clone()
    labels[0, 1] += rank == 0
    match = r"ranks of one pipeline column were given different batches" if rank % 2 == 0 else ""
    _expect_error(match or refusal_of_others, lambda: model(**(rows | {"labels": labels})))
    model(**rows).loss.backward()


def factors_that_differ_are_refused(rank: int, world: int) -> None:
    """Ranks 0 and 1 have two batches and one stage; ranks 0 and 2 have one batch and two stages."""
    model = _shard(rank, ep_size=2)
    (rows,) = rows_of(4)(model, rank % 2, 0)
    match = r"different factors on the ranks \(%s on this rank, 0.5 .. 1 on all.*num_items_in_batch"
    for place in (rank % 2, rank // 2):
        loss = model(**rows).loss * [0.5, 1.0][place]
        _expect_error(match % ["0.5", "1"][place], loss.backward)
        assert all(p.grad is None for p in model.parameters())
    (model(**rows).loss * 0.5).backward()
    assert all(p.grad is not None for p in model.parameters())


def stages_disagree(rank: int, world: int) -> None:
    model = _shard(rank)
    rows = batch(model, 4, 6, seed=rank)
    _expect_error(
        r"ranks of one pipeline column were given different batches", lambda: model(**rows)
    )
    rows = batch(model, 4, 6, seed=0)
    rows["attention_mask"] = {"full_attention": torch.full((4, 1, 6, 6), rank == 0)}
    _expect_error(
        r"ranks of one pipeline column were given different batches", lambda: model(**rows)
    )


def backward_runs_once(rank: int, world: int) -> None:
    model = _shard(rank)
    (rows,) = rows_of(4)(model, 0, 0)
    loss = model(**rows).loss
    before = [p.grad for p in model.parameters()]
    assert all(grad is None for grad in before), "gradients wait for backward()"
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"backward\(\) ran a second time"):
        loss.backward()


def warns_of_few_rows(rank: int, world: int) -> None:
    model = _shard(rank)
    rows = batch(model, 1, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**rows)
    texts = [str(item.message) for item in caught]
    match = (
        r"batches of 1 rows and pp_microbatches=2 make 1 micro-batches for 2 pipeline stages, "
        r".* waits for 50% of the time"
    )
    assert any(re.search(match, text) for text in texts) == (rank == 0), texts


def gradients_of_a_failed_step_stay(rank: int, world: int) -> None:
    """After a forward that fails, parameters have the gradients that they had before."""
    model = _shard(rank)
    (rows,) = rows_of(4)(model, 0, 0)
    model(**rows).loss.backward()
    grads = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}

    def fail(*args: Any) -> None:
        raise KeyError("planted")

    if rank == 0:  # fails before it sends anything
        model.model.layers[1].mlp.register_forward_pre_hook(fail)
    _ends_on_all_ranks(lambda: model(**rows), KeyError if rank == 0 else None, "forward", 0)
    reshard(model)
    # FSDP2 keeps some units gathered after an interrupted forward.
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    assert len(sharded) > len(grads) // 2
    for name, parameter in sharded.items():
        assert torch.equal(parameter.grad.full_tensor(), grads[name]), name


def _ends_on_all_ranks(
    call: Callable[[], Any], own: type[Exception] | None, kind: str, stage: int
) -> None:
    """Check that a call raises the error `own`, or names an error in an operation of a stage."""
    match = f"rank .* \\(pipeline stage {stage} of 2, the {kind} of micro-batch \\d: .*planted"
    with pytest.raises(own or RuntimeError, match="planted" if own else match):
        call()
    again = rf"an earlier call of this model ended because of {match}.*start the processes again"
    with pytest.raises(RuntimeError, match=again):
        call()


def errors_of_a_loss_end_all_ranks(rank: int, world: int) -> None:
    model = _shard(rank)
    (rows,) = rows_of(4)(model, 0, 0)
    labels = rows.pop("labels")

    def compute_loss(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("planted")

    state_of(model).caller_loss = CallerLoss(compute_loss, labels, 20)
    own = ZeroDivisionError if rank == 1 else None
    _ends_on_all_ranks(lambda: model(**rows), own, "forward", 1)


def errors_after_the_last_transfer_end_all_ranks(rank: int, world: int) -> None:
    model = _shard(rank)
    (rows,) = rows_of(4)(model, 0, 0)
    stock = driver.Pipeline._backward

    def fail(self: Any, run: Any, operation: Any) -> None:
        stock(self, run, operation)
        if rank == 0 and operation.micro_batch == 1:
            raise KeyError("planted")

    with mock.patch.object(driver.Pipeline, "_backward", fail):
        _ends_on_all_ranks(lambda: model(**rows), KeyError if rank == 0 else None, "backward", 0)


def errors_of_one_rank_end_all_ranks(rank: int, world: int) -> None:
    """Rank 1 waits for rank 0 in its stage, and rank 3 shares no group with rank 0."""
    model = _shard(rank, ep_size=2)
    (rows,) = rows_of(4)(model, rank % 2, 0)
    model(**rows).loss.backward()

    def fail(*args: Any) -> None:
        raise KeyError("planted")

    if rank == 0:
        model.model.layers[1].mlp.register_forward_pre_hook(fail)
    _ends_on_all_ranks(lambda: model(**rows), KeyError if rank == 0 else None, "forward", 0)
    other = _shard(rank, ep_size=2)
    other(**rows).loss.backward()  # other models have connections of their own


def arguments_are_moved_to_the_device_of_the_ranks(rank: int, world: int) -> None:
    """FSDP2 moves a batch only in the forward, but ranks compare their batches before."""
    model = _shard(rank)
    (rows,) = rows_of(4)(model, 0, 0)
    rows["attention_mask"] = {"full_attention": torch.ones(4, 8)}
    moved: list[Any] = []
    refusal = ValueError("planted")

    def agree(model: Any, state: Any, given: dict[str, Any]) -> Any:
        moved.append(given)
        return SimpleNamespace(refusal=refusal)

    meshes = replace(state_of(model).meshes, device=torch.device("meta"))
    with (
        mock.patch.object(driver, "agree", agree),
        mock.patch.object(state_of(model), "meshes", meshes),
        pytest.raises(ValueError, match="planted"),
    ):
        model(**rows)
    given = moved[0]
    tensors = [given["input_ids"], given["labels"], *given["attention_mask"].values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def is_described(rank: int, world: int) -> None:
    text = describe(_shard(rank, pp_layers=(1, 3), pp_microbatches=7))
    held = ["layers 0 .. 0 of 4, embedding", "layers 1 .. 3 of 4, final norm and head"][rank]
    assert f"stage      {rank} of 2 ({held}), column [0, 1]; 1f1b, 7 micro-batches" in text
    assert "waits 12% of the time" in text, text
    whole = sum(parameter.numel() for parameter in four_layers(0).parameters())
    assert f"parameters {whole:,} in the model" in text
    # The correction biases of DeepSeek-V3 are buffers in its state dict.
    model = apply_ep_fsdp2(build("deepseek_v3", seed=rank), pp_size=2)
    whole = sum(parameter.numel() for parameter in build("deepseek_v3").parameters())
    assert f"parameters {whole:,} in the model" in describe(model)


def copies_of_a_tied_weight_that_differ_are_refused(rank: int, world: int) -> None:
    """The weight is embed_tokens on the first stage and lm_head on the last one."""
    model = _shard(rank, partial(four_layers, tie_word_embeddings=True))
    (rows,) = rows_of(4)(model, 0, 0)
    decayed = [p for name, p in model.named_parameters() if "embed" not in name]
    others = [p for name, p in model.named_parameters() if "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model(**rows).loss.backward()
    model.eval()
    model(**rows)  # leaves units gathered on rank 1
    model.train()
    assert torch.isfinite(model(**rows).loss), "the copies are equal"
    optimizer.step()
    optimizer.zero_grad()
    match = r"rank 0 and rank 1 have different copies of the weight.*in one parameter group"
    _expect_error(match, lambda: model(**rows))


TWO_RANKS = (
    calls_are_refused,
    tensors_of_the_caller_are_refused,
    copies_of_a_tied_weight_that_differ_are_refused,
    stages_disagree,
    backward_runs_once,
    arguments_are_moved_to_the_device_of_the_ranks,
    warns_of_few_rows,
    is_described,
    losses_of_other_outputs_are_refused,
    an_aux_loss_that_is_not_computed_is_refused,
    packed_rows_with_padding_are_refused,
)
CLOSE_GROUPS = (
    gradients_of_a_failed_step_stay,
    errors_of_a_loss_end_all_ranks,
    errors_after_the_last_transfer_end_all_ranks,
)


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, *TWO_RANKS),
        *on_ranks(2, *CLOSE_GROUPS, alone=True),
        *on_ranks(4, errors_of_one_rank_end_all_ranks, factors_that_differ_are_refused),
        *on_ranks(
            4, no_rank_waits_for_one_that_refuses, ranks_that_share_a_batch_disagree, slow=True
        ),
    ],
)
def test_calls_are_refused_on_every_rank(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


TIMEOUT = 20.0


def _rank_dies(dying: int, name: str, rank: int, world: int) -> None:
    """A rank exits in one method of the pipeline; the others raise an error within the timeout."""
    model = _shard(rank, pp_microbatches=4)
    (rows,) = rows_of(4)(model, rank % (world // 2), 0)
    model(**rows).loss.backward()
    stock = getattr(driver.Pipeline, name)

    def die(self: Any, run: Any, operation: Any, *others: Any) -> None:
        if rank == dying and operation.micro_batch == 1:
            os._exit(3)
        stock(self, run, operation, *others)

    setattr(driver.Pipeline, name, die)
    start = time.monotonic()
    try:
        model(**rows)
    finally:
        waited = time.monotonic() - start
        assert waited < TIMEOUT + 5, f"the error came after {waited} s"


def _one_stage_stalls(rank: int, world: int) -> None:
    model = _shard(rank, pp_microbatches=4)
    (rows,) = rows_of(4)(model, 0, 0)
    if rank == 1:
        model.lm_head.register_forward_pre_hook(lambda *_: time.sleep(60))
    model(**rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying", "name", "tensors"),
    [(1, "_backward", "gradients"), (0, "_forward", "hidden states"), (1, "_forward", "")],
)
def test_a_stage_that_dies_ends_all_ranks(dying: int, name: str, tensors: str) -> None:
    """Stage 0 may still send hidden states, or await gradients, when stage 1 dies in a forward."""
    results = run_ranks(
        partial(_rank_dies, dying, name), 2, expect_errors=True, group_timeout=TIMEOUT
    )
    assert results[dying][1] == "ProcessDied"
    assert re.search(
        rf"pipeline stage {1 - dying} of 2, (receiving from|sending to) stage {dying} "
        rf"\(rank {dying}\): the {tensors or '(gradients|hidden states)'} of micro-batch \d could "
        rf"not be transferred; rank {dying} stopped",
        results[1 - dying][2],
    ), results


@pytest.mark.slow
def test_ranks_that_share_no_group_with_a_dead_rank_end_as_well() -> None:
    """Of 2 x 2 ranks, rank 0 shares neither a stage nor a column with rank 3, which dies."""
    dies = partial(_rank_dies, 3, "_backward")
    results = run_ranks(dies, 4, expect_errors=True, group_timeout=TIMEOUT)
    assert results[3][1] == "ProcessDied"
    for rank, result in enumerate(results[:3]):
        stage = f"pipeline stage {rank // 2} of 2"
        place = rf"{stage}, (the (for|back)ward of micro-batch \d|receiving from stage \d)"
        assert re.search(place, result[2]), result
        assert "pipeline stage 1 of 2" in result[2] or "stage 1 (rank 3)" in result[2], result


@pytest.mark.slow
def test_a_stage_that_stalls_ends_the_others_within_the_timeout() -> None:
    first, _ = run_ranks(_one_stage_stalls, 2, expect_errors=True, group_timeout=8.0, timeout=100)
    assert re.search(r"stage 0 of 2, receiving from stage 1.*micro-batch 0", first[2]), first
