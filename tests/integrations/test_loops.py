"""Test that Accelerate loops on 2 ranks train on the expected rows, as one process does.

Accelerate has several ways of dividing rows over ranks, which differ in the last batch of an epoch
if rows are missing. The expected rows of each rank are written by hand. The reference is one
process that trains on the same micro-batches one after the other. A run that loads its state in the
middle of the epoch, and skips the batches before it, ends with the same weights bit by bit.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched, prepared
from support.parity import whole_parameters
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hf_moe_ep import patch
from hf_moe_ep.lora.factors import pack_factors

Row = dict[str, Tensor]
Steps = list[list[list[int]]]  # row numbers, by optimizer step and micro-batch


def _make_rows(count: int) -> list[Row]:
    """Build rows of one length, which contain their number and have different counts of labels."""
    model = tiny(num_hidden_layers=1)
    batches = [batch(model, 1, 9, seed=i, ignore=0.1 * (i % 7)) for i in range(count)]
    return [
        {"number": torch.tensor(i), **{name: value[0] for name, value in row.items()}}
        for i, row in enumerate(batches)
    ]


class _Stream(IterableDataset):
    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        yield from self.rows


def _stream_rows(rows: list[Row]) -> datasets.IterableDataset:
    """Build a streaming data set of one shard, so that ranks cannot read different shards."""
    listed = [{name: value.tolist() for name, value in row.items()} for row in rows]
    return datasets.Dataset.from_list(listed).to_iterable_dataset().with_format("torch")


def _adapters_after_patch(**options: Any) -> nn.Module:
    model = patch(tiny(**options), ep_size=2)
    torch.manual_seed(0)
    return with_lora(model)


def _adapters_before_patch(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return patch(with_lora(tiny(**options)), ep_size=2)


def _without_adapters(**options: Any) -> nn.Module:
    return patch(tiny(**options), ep_size=2)


@dataclass(frozen=True)
class Loop:
    """A loop over `count` rows.

    Attributes:
        by_rank: the rows on which each rank must train.
        loader: arguments of DataLoader.
        dealt: arguments of DataLoaderConfiguration, which choose how ranks get their rows.
        skip: the number of micro-batches after which a second run resumes (0: no second run).
    """

    by_rank: tuple[Steps, Steps]
    data: Callable[[list[Row]], Any] = list
    count: int = 10
    accumulate: int = 1
    loader: dict[str, Any] = field(default_factory=dict)
    dealt: dict[str, Any] = field(default_factory=dict)
    skip: int = 2
    model: Callable[..., nn.Module] = _without_adapters


FILLED = ([[[0, 1]], [[4, 5]], [[8, 9]]], [[[2, 3]], [[6, 7]], [[0, 1]]])
DISPATCHED = ([[[0, 1]], [[4, 5]], [[8]]], [[[2, 3]], [[6, 7]], [[9]]])
HALVES = {"loader": {"batch_size": 4}, "dealt": {"split_batches": True}}
NO_DISPATCH = {"dispatch_batches": False}
LOOPS = {
    "filled up": Loop(FILLED),
    "accumulated, short at the end": Loop(
        ([[[0, 1], [4, 5]], [[8, 9]]], [[[2, 3], [6, 7]], [[0, 1]]]), accumulate=2
    ),
    "last batch dropped": Loop(
        ([[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]]),
        loader={"drop_last": True},
        dealt={"even_batches": False},
        skip=1,
    ),
    "split": Loop(FILLED, **HALVES),
    # It cannot resume: Accelerate 1.15 skips only batches of the rank that dispatches.
    "dispatched": Loop(DISPATCHED, dealt={"dispatch_batches": True}, skip=0),
    "stream": Loop(DISPATCHED, _Stream),
    "stream, one row too few": Loop(
        ([[[0, 1]], [[4, 5]], [[8]]], [[[2, 3]], [[6, 7]], [[0]]]), _Stream, count=9
    ),
    "stream, accumulated": Loop(
        ([[[0, 1], [4, 5]], [[8]]], [[[2, 3], [6, 7]], [[9]]]), _Stream, accumulate=2
    ),
    "stream, split": Loop(
        ([[[0, 1]], [[4, 5]], [[8]]], [[[2, 3]], [[6, 7]], [[9]]]), _Stream, **HALVES
    ),
    "stream of every rank": Loop(
        ([[[0, 1]], [[4, 5]], [[8, 0]]], [[[2, 3]], [[6, 7]], [[1, 2]]]),
        _Stream,
        count=9,
        dealt=NO_DISPATCH,
    ),
    "datasets' stream": Loop(DISPATCHED, _stream_rows),
    "datasets' stream of every rank": Loop(FILLED, _stream_rows, dealt=NO_DISPATCH),
    "adapters before patch": Loop(FILLED, model=_adapters_before_patch),
    "adapters after patch": Loop(FILLED, model=_adapters_after_patch),
}


@dataclass
class RunOfRank:
    """The rows, losses, gradient norms and final weights of one rank."""

    steps: Steps = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def _run(
    loop: Loop, seed: int, *, save_at: int = 0, load_at: int = 0, folder: str | None = None
) -> RunOfRank:
    """Train an epoch. Save the state after `save_at` micro-batches, or resume after `load_at`."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=loop.accumulate,
        dataloader_config=DataLoaderConfiguration(**loop.dealt),
    )
    model = loop.model(dtype=torch.float32, seed=seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
    loader = DataLoader(loop.data(_make_rows(loop.count)), **({"batch_size": 2} | loop.loader))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = loader
    if load_at:
        accelerator.load_state(folder)
        batches = accelerator.skip_first_batches(loader, load_at)
    run, numbers, losses = RunOfRank(), [], []
    for index, micro in enumerate(batches, start=1):
        numbers.append(micro.pop("number").tolist())
        with accelerator.accumulate(model):
            loss = model(**micro).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.steps.append(numbers)
            run.losses.append(losses)
            run.norms.append(float(norm))
            numbers, losses = [], []
        if index == save_at:
            accelerator.save_state(folder)
    assert not numbers, "an epoch ends with a step"
    run.weights = _gather_weights(model)
    return run


def _gather_weights(model: nn.Module) -> dict[str, Tensor]:
    return pack_factors(model, whole_parameters(model))


def _train_stock(loop: Loop, all_ranks: list[RunOfRank]) -> RunOfRank:
    """Train in one process on the micro-batches of all ranks."""
    rows, run = _make_rows(loop.count), RunOfRank()
    model = tiny(dtype=torch.float32)
    if loop.model is not _without_adapters:
        torch.manual_seed(0)
        model = with_lora(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.5)
    for by_rank in zip(*(rank.steps for rank in all_ranks), strict=True):
        losses = []
        for numbers in (micro for steps in by_rank for micro in steps):
            picked = {
                name: torch.stack([rows[number][name] for number in numbers])
                for name in rows[0]
                if name != "number"
            }
            loss = model(**picked).loss
            (loss / (loop.accumulate * len(all_ranks))).backward()
            losses.append(loss.item())
        run.losses.append(losses)
        run.norms.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return run


def _compare_with_one_process(name: str, rank: int, world: int, folder: str) -> None:
    loop = LOOPS[name]
    with launched():
        run = _run(loop, seed=rank, save_at=loop.skip, folder=folder)
    assert run.steps == loop.by_rank[rank], f"rank {rank} saw {run.steps}"
    all_ranks: list[Any] = [None] * world
    dist.all_gather_object(all_ranks, run)
    expected = _train_stock(loop, all_ranks)
    actual = [
        [loss for losses in by_rank for loss in losses]
        for by_rank in zip(*(of_rank.losses for of_rank in all_ranks), strict=True)
    ]
    for step, pair in enumerate(zip(actual, expected.losses, strict=True), start=1):
        assert_close(f"losses of step {step}", *map(torch.tensor, pair), FP32_BUDGET)
    assert_close("norms", torch.tensor(run.norms), torch.tensor(expected.norms), FP32_BUDGET)
    assert run.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        assert_close(key, run.weights[key], value, FP32_BUDGET)
    if loop.skip:
        _assert_resumes(loop, run, rank, folder)


def _assert_resumes(loop: Loop, whole: RunOfRank, rank: int, folder: str) -> None:
    """Load the state into another model, and train on the remaining micro-batches."""
    with launched():
        rest = _run(loop, seed=rank + 7, load_at=loop.skip, folder=folder)
    steps_before = loop.skip // loop.accumulate
    assert rest.steps == whole.steps[steps_before:] and rest.steps
    assert rest.losses == whole.losses[steps_before:] and rest.norms == whole.norms[steps_before:]
    for name, weight in whole.weights.items():
        assert torch.equal(rest.weights[name], weight), name


# The actions of the loop for a micro-batch: accumulate its gradients with no_sync, take a step with
# all accumulated gradients, compute only the loss, or set all gradients to zero.
ACTIONS = ("no_sync", "step", "forward", "step", "zero", "no_sync", "forward", "step", "forward")


def skipped_steps_equal_one_process(rank: int, world: int) -> None:
    stock = tiny(dtype=torch.float32)
    stock_optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    with launched():
        accelerator, model, optimizer = prepared(
            tiny(dtype=torch.float32, seed=rank), make_optimizer=torch.optim.SGD, ep_size=2
        )
        for index, action in enumerate(ACTIONS):
            micro = [batch(stock, 2, 7 + r, seed=10 * index + r) for r in range(world)]
            losses = [stock(**inputs).loss for inputs in micro]
            with accelerator.no_sync(model) if action == "no_sync" else nullcontext():
                loss = model(**micro[rank]).loss
                if action != "forward":
                    accelerator.backward(loss)
                    (sum(losses) / world).backward()
            assert_close(f"loss {index}", loss, losses[rank], FP32_BUDGET)
            if action == "step":
                optimizer.step()
                stock_optimizer.step()
            if action in ("step", "zero"):
                optimizer.zero_grad()
                stock_optimizer.zero_grad()
        weights = _gather_weights(model)
    for name, parameter in stock.named_parameters():
        assert_close(name, weights[name], parameter, FP32_BUDGET)


class Failing(GeneralTracker):
    """A tracker whose disk is full."""

    name = "failing"
    requires_logging_directory = False
    tracker = None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
        raise OSError("no space left")


def uneven_loaders_and_failing_trackers_raise_an_error(rank: int, world: int) -> None:
    """The loaders have more batches on rank 0 than on rank 1. The tracker fails on rank 0."""
    uneven = {
        "2 batches and rank 1 1": ({}, 6, {}),
        "3 batches and rank 1 2": ({"split_batches": True}, 10, {"batch_size": 4}),
    }
    for lengths, (dealt, count, options) in uneven.items():
        for loader_first in (True, False):
            with launched():
                config = DataLoaderConfiguration(even_batches=False, **dealt)
                accelerator = Accelerator(cpu=True, dataloader_config=config)
                model = _without_adapters(dtype=torch.float32)
                loader = DataLoader(_make_rows(count), **({"batch_size": 2} | options))
                trained = (model, torch.optim.SGD(model.parameters(), lr=0.1))
                calls = [(loader,), trained] if loader_first else [trained, (loader,)]
                with pytest.raises(ValueError, match=rf"rank 0 {lengths}, .*drop_last=True"):
                    for arguments in calls:
                        accelerator.prepare(*arguments)
    with launched():
        accelerator = Accelerator(cpu=True, log_with=Failing())
        accelerator, model, _ = prepared(tiny(dtype=torch.float32), accelerator, ep_size=2)
        accelerator.init_trackers("a run")
        if accelerator.is_main_process:
            message = r"tracker 'failing' .*Failing\) failed on rank 0: OSError: no space left"
            with pytest.raises(RuntimeError, match=message):
                accelerator.log({"loss": 1.0}, step=1)
            assert len(accelerator.trackers) == 1


ON_TWO_RANKS = {name: partial(_compare_with_one_process, name) for name in LOOPS}
QUICK = ("stream, accumulated",)


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, {name: ON_TWO_RANKS.pop(name) for name in QUICK}),
        *on_ranks(2, uneven_loaders_and_failing_trackers_raise_an_error),
        *on_ranks(2, ON_TWO_RANKS, skipped_steps_equal_one_process, slow=True),
    ],
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
