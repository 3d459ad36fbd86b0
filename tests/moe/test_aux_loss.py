"""The router's aux loss of N ranks is that of one process on the concatenated batch.

Three references. Stock on the concatenated batch gives the value; it sums in fp32, hence 1e-6
there. Its formula in fp64 over the router logits of all ranks gives gradients to 1e-10. And the
coefficient is so large that the aux loss outweighs the cross-entropy in the router's gradient.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.close import assert_close
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep import apply_ep_fsdp2, global_token_count
from hf_moe_ep.moe.aux_loss import global_aux_loss

COEFFICIENT = 5.0
FP32 = 1e-6  # stock computes the value, and HF the cross-entropy, in fp32
MODEL = {"router_aux_loss_coef": COEFFICIENT, "output_router_logits": True}
Batch = dict[str, Tensor]


def _reference_aux(logits: list[Tensor], masks: list[Tensor | None], top_k: int = 2) -> Tensor:
    """E sum_e f_e P_e over every kept (layer, token) row of all ranks, in fp64, written out."""
    kept = []
    for per_layer, mask in zip(logits, masks, strict=True):
        rows_T = slice(None) if mask is None else mask.flatten().bool()
        kept.append(per_layer.double()[rows_T])
    probs_RE = torch.cat(kept).softmax(-1)
    chosen_RK = probs_RE.topk(top_k).indices
    share_E = nn.functional.one_hot(chosen_RK, probs_RE.shape[1]).double().sum((0, 1))
    return probs_RE.shape[1] * (share_E / len(probs_RE) * probs_RE.mean(0)).sum()


def _batch(model: nn.Module, rank: int, kind: str) -> Batch:
    if kind == "no mask":
        inputs = batch(model, 2, 9, seed=rank)
        del inputs["attention_mask"]
        return inputs
    inputs = batch(model, 1 + rank % 2, 6 + 3 * rank, seed=rank, pad=2)
    if kind == "one rank all padding" and rank == 1:
        inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
        inputs["labels"] = torch.full_like(inputs["labels"], -100)
    return inputs


def _concatenated(batches: list[Batch]) -> Batch:
    """One batch, padded on the right to the longest."""
    length = max(b["input_ids"].shape[1] for b in batches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.cat(
            [
                nn.functional.pad(b[key], (0, length - b[key].shape[1]), value=fill[key])
                for b in batches
            ]
        )
        for key in batches[0]
    }


def _want(kind: str, world: int, summed: bool) -> tuple[nn.Module, list[Any], Tensor, Tensor]:
    """Reference with gradients, its outputs per rank, the aux loss in fp64, the token count."""
    reference = tiny(**MODEL)
    batches = [_batch(reference, rank, kind) for rank in range(world)]
    count = sum(b["labels"][:, 1:].ne(-100).sum() for b in batches)
    assert isinstance(count, Tensor)
    outputs, losses = [], []
    for b in batches:
        out = reference(**b, output_router_logits=True)
        per_token = {"num_items_in_batch": count} if summed else {}
        loss = reference.loss_function(out.logits, b["labels"], 97, **per_token)
        outputs.append(out)
        losses.append(loss if summed else loss / world)
    masks = [b.get("attention_mask") for b in batches for _ in range(2)]
    aux = _reference_aux([row for out in outputs for row in out.router_logits], masks)
    (sum(losses) + COEFFICIENT * aux).backward()
    return reference, [loss.detach() for loss in losses], aux.detach(), count


def _check_training(name: str, model: nn.Module, kind: str, summed: bool, positional: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    reference, losses, aux, count = _want(kind, world, summed)
    inputs = _batch(model, rank, kind)
    if kind != "no mask":
        masks = [_batch(model, other, kind) for other in range(world)]
        with torch.no_grad():
            stock = tiny(**MODEL)(**_concatenated(masks))
        assert_close(f"{name}: stock's value", aux, stock.aux_loss, FP32)
    extra = {"num_items_in_batch": count} if summed else {}
    assert count == global_token_count(model, inputs["labels"])
    args = ()
    if positional:
        args = (inputs.pop("input_ids"), inputs.pop("attention_mask"))
    model.zero_grad()
    out = model(*args, **inputs, **extra)
    assert_close(f"{name}: aux_loss", out.aux_loss, aux, 1e-10)
    want = losses[rank] * (1 if summed else world) + COEFFICIENT * aux / (world if summed else 1)
    assert_close(f"{name}: loss", out.loss, want, FP32)
    (out.loss * (world if summed else 1)).backward()
    wanted = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor), key
        assert_close(f"{name}: grad of {key}", grad.full_tensor(), wanted[key].grad, 1e-10)


def _check_outputs(model: nn.Module) -> None:
    """Evaluation, no labels, tuples, and nothing where nothing was asked for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    _, _, aux, _ = _want("padded", world, True)
    inputs = _batch(model, rank, "padded")
    labels = inputs.pop("labels")
    model.eval()
    with torch.no_grad():
        out = model(**inputs)
        assert out.loss is None
        assert_close("no labels", out.aux_loss, aux, 1e-10)
        out = model(**inputs, labels=labels)
        plain = model(**inputs, labels=labels, output_router_logits=False)
        assert_close("evaluation", out.loss, plain.loss + COEFFICIENT * aux, FP32)
        assert plain.aux_loss is None and plain.router_logits is None
        boolean = {**inputs, "attention_mask": inputs["attention_mask"].bool()}
        assert_close("boolean mask", model(**boolean).aux_loss, aux, 1e-10)
    model.train()


def _check_tuple(model: nn.Module) -> None:
    """return_dict=False hands out a tuple: the same numbers in it."""
    inputs = _batch(model, dist.get_rank(), "padded")
    with torch.no_grad():
        want = model(**inputs)
        got = model(**inputs, return_dict=False)
    assert isinstance(got, tuple)
    assert_close("loss in a tuple", got[0], want.loss, FP32)
    assert_close("aux_loss in a tuple", got[1], want.aux_loss, 1e-10)


def _sharded(**layout: Any) -> nn.Module:
    return apply_ep_fsdp2(tiny(**MODEL), **layout)


KINDS = ("padded", "no mask")


def _table(rank: int, world: int, layouts: list[dict[str, Any]]) -> None:
    for layout in layouts:
        model = _sharded(**layout)
        for kind in KINDS:
            for summed in (False, True):
                name = f"{layout}, {kind}, {'sum' if summed else 'mean'}"
                _check_training(name, model, kind, summed, positional=False)
        _check_training(f"{layout}, positional", model, "padded", True, positional=True)
        _check_outputs(model)


@pytest.mark.parametrize(
    ("world", "layouts"),
    [(2, [{"ep_size": 1}, {"ep_size": 2}]), (4, [{"ep_size": 2, "dp_replicate_size": 2}])],
)
def test_global_aux_loss(world: int, layouts: list[dict[str, Any]]) -> None:
    run_ranks(_table, world, layouts)


def _tuple_job(rank: int, world: int) -> None:
    _check_tuple(_sharded(ep_size=2))


def test_global_aux_loss_in_a_tuple() -> None:
    run_ranks(_tuple_job, 2)


def _padding_job(rank: int, world: int) -> None:
    model = _sharded(ep_size=2)
    _check_training("all padding", model, "one rank all padding", True, positional=False)


def test_a_rank_of_padding_alone_adds_nothing() -> None:
    """A mean over its own zero tokens is nan; the global mean is not."""
    run_ranks(_padding_job, 2)


def test_the_formula_by_hand() -> None:
    """Two experts, top-1, one layer of three tokens, the last one masked; one rank."""
    third = torch.log(torch.tensor(3.0))
    logits_TE = torch.tensor([[0.0, third], [0.0, 0.0], [9.0, -9.0]])
    logits_TE[1, 0] = -third  # probabilities (1/4, 3/4) twice, then a token that must not count
    mask = torch.tensor([[1, 1, 0]])
    got = global_aux_loss((logits_TE,), 2, 1, mask, world_size=1)
    assert_close("aux", got, torch.tensor(2 * (0 * 0.25 + 1 * 0.75)), 1e-6)  # fp32
