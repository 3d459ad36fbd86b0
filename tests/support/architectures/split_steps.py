"""Compare steps of a model whose sequences are split over ranks with steps of stock.

`equals_stock` is the code that each rank runs. The functions that make batches are its argument
`make`. `equals_stock_backward` compares less, and can divide mixers in another way.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep import (
    apply_ep_fsdp2,
    clip_grad_norm_,
    data_parallel_rank,
    data_parallel_size,
    patch,
)
from hf_moe_ep.architectures import find_plan
from hf_moe_ep.ranks.collectives import sum_over_ranks
from support.architectures.inputs import batch
from support.architectures.mixers import gathered_names
from support.architectures.models import tiny
from support.architectures.results import recording
from support.architectures.steps import (
    assert_same_grads,
    build,
    count_tokens,
    loss_of_sum,
    whole,
)
from support.close import FP64_MODEL, ROUNDING_ERROR, assert_close
from support.fakes.flash import use_fake_flash
from support.fp64 import FP64
from support.parity import checkpointing

Batch = dict[str, Tensor]


def padded(model: nn.Module, seed: int) -> Batch:
    """Return two rows of 11 tokens, which 2 does not divide. One row ends in 3 padding tokens."""
    return batch(model, 2, 11, seed=seed, pad=3)


def padded_left(model: nn.Module, seed: int) -> Batch:
    """Return three rows; the first two begin with padding."""
    micro = batch(model, 3, 11, seed=seed)
    micro["attention_mask"][0, :4] = 0
    micro["attention_mask"][1, :1] = 0
    micro["labels"].masked_fill_(micro["attention_mask"] == 0, -100)
    return micro


def unpadded(model: nn.Module, seed: int) -> Batch:
    """Return two rows of 11 tokens without a mask, which stock code then may not build either."""
    micro = batch(model, 2, 11, seed=seed)
    del micro["attention_mask"]
    return micro


def packed(model: nn.Module, seed: int) -> Batch:
    """Pack documents of 9, 3 and 7 tokens in one row; position_ids restart at 0 in each. Two
    documents are longer than a window of 5, and one continues on the next rank.
    """
    micro = batch(model, 1, 19, seed=seed)
    del micro["attention_mask"]
    micro["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 7)]).unsqueeze(0)
    micro["labels"][:, [0, 9, 12]] = -100
    return micro


def shorter_than_sp(model: nn.Module, seed: int) -> Batch:
    """Return fewer tokens than ranks. The slices of the last ranks are padding."""
    return batch(model, 2, 3, seed=seed)


def equals_stock(
    model_type: str,
    rank: int,
    world: int,
    *,
    make: Any = padded,
    sp: int = 2,
    cp: int = 1,
    ep: int = 2,
    steps: int = 1,
    flash: bool = False,
    use_reentrant: bool | None = None,
    **config: Any,
) -> None:
    """Compare steps of AdamW with stock's: logits, loss, gradients, their norm and parameters.

    Each rank has another seed, and rank 0's values must replace the others. Reentrant checkpointing
    drops the gradients of the load-balancing loss, so with it stock is checkpointed as well.
    `config` has other fields of ParallelConfig.
    """
    column = "sp" if cp == 1 else "cp"
    with recording(model_type, column, gathered_names(tiny(model_type))) as errors, FP64():
        model, stock = tiny(model_type, seed=rank), tiny(model_type)
        if flash:
            use_fake_flash(model)
            use_fake_flash(stock)
        if use_reentrant is not None:
            checkpointing(model, use_reentrant)
        if use_reentrant:
            checkpointing(stock, use_reentrant)
        apply_ep_fsdp2(model, ep_size=ep, sp_size=sp, cp_size=cp, **config)
        assert data_parallel_size(model) == world // (sp * cp)
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (model, stock)
        ]
        for step in range(steps):
            errors += _compare_step(model, stock, make, 10 * step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            errors += _compare("value after a step", model, stock, lambda p: p.detach())


def equals_stock_backward(
    model_type: str,
    rank: int,
    world: int,
    *,
    length: int = 11,
    sizes: Mapping[str, int] = MappingProxyType({}),
    cp: int = 1,
    use_reentrant: bool | None = None,
    divides_mixers: bool = True,
) -> None:
    """Compare loss and gradients of one batch with stock's. All ranks share the batch.

    Args:
        length: the number of tokens in each of two rows.
        sizes: fields of the config.
        divides_mixers: False if mixers get whole sequences, which the plan does not choose.
    """
    with FP64():
        model, stock = build(model_type, seed=rank, **sizes), build(model_type, **sizes)
        if use_reentrant is not None:
            checkpointing(model, use_reentrant)
        layout = {"ep_size": 2, "sp_size": world // cp, "cp_size": cp}
        plan = find_plan(model)
        if not divides_mixers:
            plan = replace(plan, splits_mixers=False, gathers_keys=False)
        apply_ep_fsdp2(patch(model, plan=plan, **layout))
        inputs = batch(stock, 2, length)
        num_tokens = count_tokens([inputs])
        loss, want = (loss_of_sum(m, inputs, num_tokens) for m in (model, stock))
        loss.backward()
        want.backward()
        assert_close("loss", loss, want, FP64_MODEL)
        assert_same_grads(model_type, model, stock, FP64_MODEL)


def _compare_step(model: nn.Module, stock: nn.Module, make: Any, seed: int) -> list[float]:
    """Compare forward and backward over the batches of all groups of ranks, and clip gradients."""
    groups = data_parallel_size(model)
    everyone = [make(stock, seed + group) for group in range(groups)]
    own_batch = everyone[data_parallel_rank(model)]
    whole_batch = {name: torch.cat([x[name] for x in everyone]) for name in own_batch}
    num_tokens = whole_batch["labels"][:, 1:].ne(-100).sum()
    errors = [compare_logits(model, stock, own_batch)]
    loss = model(**own_batch, num_items_in_batch=num_tokens).loss
    if is_mean(stock):  # the mean of this group's tokens; stock's is that of all tokens
        own, total = (x["labels"].ne(-100).sum() for x in (own_batch, whole_batch))
        loss = loss * own / total
    (loss * groups).backward()
    want = stock(**whole_batch, num_items_in_batch=num_tokens, use_cache=False).loss
    want.backward()
    ranks_per_group = dist.get_world_size() // groups  # all of them return the loss of the group
    errors.append(assert_close("loss", sum_over_ranks(loss) / ranks_per_group, want, FP64_MODEL))
    errors += _compare("gradient", model, stock, lambda p: p.grad)
    want = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
    return [*errors, assert_close("norm", clip_grad_norm_(model, 0.5), want, FP64_MODEL)]


def is_mean(stock: nn.Module) -> bool:
    """Return True if a model's loss is always the mean of its tokens: that of a classifier."""
    return type(stock).__name__.endswith("ForTokenClassification")


def compare_logits(model: nn.Module, stock: nn.Module, micro: Batch) -> float:
    unlabelled = {name: x for name, x in micro.items() if name != "labels"}
    with torch.no_grad():
        got, want = (m(**unlabelled, use_cache=False).logits for m in (model, stock))
    return assert_close("logits", got, want, FP64_MODEL)


def _compare(kind: str, model: nn.Module, stock: nn.Module, pick: Any) -> list[float]:
    errors = []
    picked = {name: pick(parameter) for name, parameter in model.named_parameters()}
    gathered = whole(model, {name: x for name, x in picked.items() if x is not None})
    for name, parameter in stock.named_parameters():
        got, want = gathered.get(name), pick(parameter)
        if got is None or want is None:  # an expert without tokens has no gradient, or zeros
            other = want if got is None else got
            assert other is None or not other.any(), f"only one model has a {kind} of {name}"
        elif max(got.abs().max(), want.abs().max()) > ROUNDING_ERROR:
            errors.append(assert_close(f"{kind} of {name}", got, want, FP64_MODEL))
    return errors
