"""Compare ranks of a model with pipeline stages with a stock model in one process, in fp64.

Every rank builds its model from another seed, so each case also shows that initial values come from
rank 0. transformers computes losses, routers and rotary embeddings in fp64 (`support.fp64`), so the
loss is compared as closely as the gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep import (
    apply_ep_fsdp2,
    clip_grad_norm_,
    data_parallel_rank,
    data_parallel_size,
    global_token_count,
    patch,
)
from hf_moe_ep.etp import restore_stock_shapes
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.state import STATE, ModelState
from support.checks import PATIENT, Check
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.parity import full_tensor, whole_state
from support.quantised import in_place_of_bytes
from support.tiny_models import batch, tiny

Batch = dict[str, Any]
STEPS = 3


@dataclass(frozen=True)
class StagesCase:
    """A layout, a model and its data.

    Attributes:
        make: builds the stock model from a seed.
        batches: called as (model, data rank, step), returns the batches of an optimizer step, each
            of which a call of the model gets.
        wrap: a function that changes both models, each under its own seed.
        change_reference: a function that changes the reference only, after `wrap`.
        prepare: a function that changes both models.
        cut_reference: True if the reference computes each micro-batch by itself, as it must if the
            loss of a batch is not the sum of the losses of its rows.
        joined: True if the reference computes the batches of all data ranks as one batch. They must
            have rows of equal length.
        per_layer: True if the reference is a patched model with `aux_loss_per_layer`.
        factor: the loss is multiplied by this number.
    """

    name: str
    world: int
    pp: int = 2
    ep: int = 1
    sp: int = 1
    cp: int = 1
    etp: int = 1
    replicate: int = 1
    make: Callable[[int], nn.Module] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[nn.Module, int, int], list[Batch]] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
    change_reference: Callable[[nn.Module], None] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    cut_reference: bool = False
    joined: bool = False
    per_layer: bool = False
    factor: float = 1.0
    budget: float = FP64_MODEL

    def run(self, rank: int, world: int) -> None:
        run_case(self, rank, world)


def on_ranks(cases: list[StagesCase], **options: Any) -> list[Any]:
    """Make parameters for `parametrize`. Cases with the same number of ranks share one spawn."""
    return [
        Check(
            case.name,
            case.world,
            partial(run_case, case),
            **(PATIENT if "compile_layers" in case.config else {}),
            **options,
        ).as_parameter()
        for case in cases
    ]


def four_layers(seed: int, **config: Any) -> nn.Module:
    return tiny(seed=seed, num_hidden_layers=4, **config)


def rows_of(num_rows: int) -> Callable[[nn.Module, int, int], list[Batch]]:
    """Return `batches` with one padded batch of `num_rows` rows per step."""
    return partial(_padded_rows, num_rows)


def _padded_rows(num_rows: int, model: nn.Module, data_rank: int, step: int) -> list[Batch]:
    seed, length = 100 * step + data_rank, 6 + 2 * data_rank + step
    return [batch(model, num_rows, length, seed=seed, ignore=0.3, pad=3)]


def even_rows(model: nn.Module, data_rank: int, step: int) -> list[Batch]:
    """Return two batches per step, with rows of the same length on all data ranks."""
    seeds = (10 * step + data_rank, 100 + 10 * step + data_rank)
    return [batch(model, 4, 8, seed=seed, pad=3) for seed in seeds]


def packed(model: nn.Module, data_rank: int, step: int) -> list[Batch]:
    """Return four rows of three documents each; position_ids restart at 0 in each document."""
    rows = batch(model, 4, 9, seed=10 * step + data_rank)
    del rows["attention_mask"]
    positions = torch.cat([torch.arange(length) for length in (4, 3, 2)])
    rows["labels"][:, [0, 4, 7]] = -100
    # With a cache, stock treats a row as one document.
    return [{**rows, "position_ids": positions.expand(4, 9), "use_cache": False}]


def accumulated(model: nn.Module, data_rank: int, step: int) -> list[Batch]:
    """Return two batches per step, of different sizes."""
    first, second = 40 * step + data_rank, 40 * step + 20 + data_rank
    return [batch(model, 5, 7, seed=first, pad=2), batch(model, 3, 9, seed=second, ignore=0.5)]


def some_unlabelled(model: nn.Module, data_rank: int, step: int) -> list[Batch]:
    """Return one batch of 4 rows, of which the first two have no token with a loss."""
    rows = batch(model, 4, 7, seed=10 * step + data_rank, pad=2)
    rows["labels"][:2] = -100
    return [rows]


def run_case(case: StagesCase, rank: int, world: int) -> None:
    make = case.make or four_layers
    model, reference = make(rank), make(0)
    if case.wrap is not None:
        torch.manual_seed(rank)
        model = case.wrap(model)
        torch.manual_seed(0)
        reference = case.wrap(reference)
    if case.change_reference is not None:
        case.change_reference(reference)
    for changed in (model, reference):
        if case.prepare is not None:
            case.prepare(changed)
    if case.per_layer:
        patch(reference, aux_loss_per_layer=True, experts_backend="torch")
    sizes = {"pp_size": case.pp, "ep_size": case.ep, "sp_size": case.sp, "cp_size": case.cp}
    sizes |= {"etp_size": case.etp}
    apply_ep_fsdp2(model, **sizes, dp_replicate_size=case.replicate, **case.config)
    state = state_of(model)
    data_rank, num_data_ranks = data_parallel_rank(model), data_parallel_size(model)
    ranks_per_stage = world // case.pp
    ranks_per_batch = case.sp * case.cp
    assert data_rank == rank % ranks_per_stage // ranks_per_batch
    assert num_data_ranks == ranks_per_stage // ranks_per_batch
    assert state.stage.index == rank // ranks_per_stage
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False)
    batches_of = case.batches or rows_of(4)
    if "experts_dtype" in case.config:
        # FSDP2 allocates memory for gathered scales in the first forward, in fp64 under `FP64`.
        with torch.no_grad():
            model(**batches_of(reference, data_rank, 0)[0])
    for step in range(STEPS):
        where = f"{case.name} step {step}"
        by_rank = [batches_of(reference, other, step) for other in range(num_data_ranks)]
        own = by_rank[data_rank]
        num_tokens = global_token_count(model, [b["labels"] for b in own])
        counts = [b["labels"][:, 1:].ne(-100).sum() for batches in by_rank for b in batches]
        assert num_tokens == sum(counts), f"{where}: {num_tokens} tokens, want {sum(counts)}"
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        with ExitStack() as modes:
            modes.enter_context(FP64())
            losses = []
            for number, micro in enumerate(own):
                is_last = number == len(own) - 1
                model.set_requires_gradient_sync(is_last)
                model.set_is_last_backward(is_last)
                loss = model(**micro, num_items_in_batch=num_tokens).loss
                (loss * case.factor * num_data_ranks).backward()
                losses.append(loss.detach())
            if case.joined:
                by_rank = _join(by_rank)
                losses = [_sum_over_data_ranks(loss, num_data_ranks) for loss in losses]
            for other, batches in enumerate(by_rank):
                for number, micro in enumerate(batches):
                    total = torch.zeros((), dtype=torch.float64)
                    for loss in _reference_losses(case, reference, micro, num_tokens):
                        (loss * case.factor).backward()
                        total += loss.detach()
                    if other == data_rank or case.joined:
                        assert_close(f"{where}: loss {number}", losses[number], total, case.budget)
        compare(f"{where}: grad of", model, reference, lambda p: p.grad, case.budget)
        got = clip_grad_norm_(model, 0.5)
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert_close(f"{where}: norm", got, want, case.budget)
        optimizer.step()
        reference_optimizer.step()
    compare(f"{case.name} after {STEPS} steps:", model, reference, lambda p: p, case.budget)
    _compare_evaluation(case, model, reference, own[0])


def _join(by_rank: list[list[Batch]]) -> list[list[Batch]]:
    """Join the first, second, .. batches of all data ranks, as batches of a single data rank."""
    columns = zip(*by_rank, strict=True)
    return [[{n: torch.cat([b[n] for b in column]) for n in column[0]} for column in columns]]


def _sum_over_data_ranks(loss: Tensor, num_data_ranks: int) -> Tensor:
    total = loss.clone()
    dist.all_reduce(total)
    return total * num_data_ranks / dist.get_world_size()


def _reference_losses(
    case: StagesCase, reference: nn.Module, micro: Batch, num_tokens: Tensor
) -> Iterator[Tensor]:
    """Yield the losses whose sum is that of a batch."""
    if not case.cut_reference:
        yield reference(**micro, num_items_in_batch=num_tokens).loss
        return
    num_rows = len(micro["input_ids"])
    count = min(num_rows, case.config.get("pp_microbatches") or case.pp)
    parts = {name: value.tensor_split(count) for name, value in micro.items()}
    for index in range(count):
        part = {name: values[index] for name, values in parts.items()}
        output = reference(**part, num_items_in_batch=num_tokens)
        share = len(part["input_ids"]) / num_rows
        coefficient = reference.config.router_aux_loss_coef
        # Stock adds the aux loss of the micro-batch once.
        yield output.loss + (share - 1) * coefficient * output.aux_loss


def _compare_evaluation(
    case: StagesCase, model: nn.Module, reference: nn.Module, micro: Batch
) -> None:
    """Compare loss and logits without training, which every rank gets."""
    unlabelled = {n: value for n, value in micro.items() if n not in ("labels", "use_cache")}
    model.eval()
    reference.eval()
    with torch.no_grad(), FP64():
        got, want = model(**micro), reference(**micro)
        logits = model(**unlabelled, use_cache=False).logits
    assert got.logits is None
    name = f"{case.name} evaluation"
    if not case.cut_reference and not case.joined:
        assert_close(f"{name}: loss", got.loss, want.loss, case.budget)
    assert_close(f"{name}: logits", logits, want.logits, case.budget)
    model.train()
    reference.train()


def compare(
    where: str,
    model: nn.Module,
    reference: nn.Module,
    pick: Callable[[Tensor], Tensor | None],
    budget: float,
) -> None:
    """Compare all parameters of this stage, and check that no stage lacks one."""
    wanted = dict(reference.named_parameters())
    aliases = state_of(model).stage.aliases
    gathered = {name: full_tensor(pick(p)) for name, p in model.named_parameters()}
    gathered = restore_stock_shapes(model, {n: x for n, x in gathered.items() if x is not None}) | {
        name: None for name, x in gathered.items() if x is None
    }
    gathered = in_place_of_bytes(model, gathered)
    gathered |= pack_factors(model, {name: x for name, x in gathered.items() if x is not None})
    for name, got in gathered.items():
        want = pick(wanted[aliases.get(name, name)])
        assert (got is None) == (want is None), f"{where} {name}: {got}, want {want}"
        if want is not None:
            assert_close(f"{where} {name}", got, want, budget)
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, [aliases.get(name, name) for name in gathered])
    assert set().union(*names) == wanted.keys(), f"{where}: no stage has a parameter"


def state_of(model: nn.Module) -> ModelState:
    return next(
        vars(module)[STATE]
        for module in model.modules()
        if isinstance(vars(module).get(STATE), ModelState)
    )


def state_of_all_stages(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Gather parameters and moments of all stages by their names, on every rank."""
    stage = state_of(model).stage
    aliases = {} if stage is None else stage.aliases
    own = {}
    for key, tensor in whole_state(model, optimizer).items():
        name, comma, moment = key.partition(",")
        own[aliases.get(name, name) + comma + moment] = tensor
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    joined: dict[str, Tensor] = {}
    for tensors in by_rank:
        for name, tensor in tensors.items():
            assert torch.equal(joined.setdefault(name, tensor), tensor), f"{name} differs"
    return joined
