"""What sequence parallelism changes in Accelerate and the Trainer: sp ranks share their batches.

4 processes with sp_size 2 are 2 data ranks. To Accelerate every process has batches of its own, so
each place where it divides by the number of processes, or multiplies, learns better:

    data loaders          ranks of an sp group are given the same samples
    gather_for_metrics    each sample once: what the first rank of each group has
    schedulers            one step per data rank, not per process, and optimizer step
    Trainer               token count, loss scale and total batch size by data ranks; logits in
                          `predict()`; `num_input_tokens_seen`, `total_flos`

The Trainer divides by `get_tp_size()` wherever ranks share a batch, so that is what we answer.
`install.py` has the table of these wrappers; each is given what was there before as `original`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler, get_sampler
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler

from hf_moe_ep.config import launched_world_size
from hf_moe_ep.ranks.mesh import check_world
from hf_moe_ep.ranks.together import on_first
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.training_frameworks import prepared_loaders

_SHARING = "_hf_moe_ep_sharing"
Original = Callable[..., Any]


def share_batches(accelerator: Accelerator, state: ModelState) -> None:
    """Let `accelerator` know that `state.config.sp_size` consecutive ranks share their batches.

    Raises:
        ValueError: data loaders were prepared already, for ranks that share nothing; or the size
            does not divide the world.
    """
    size = state.config.sp_size or 1
    if size == sharing(accelerator):
        return
    check_world(1, 1, launched_world_size(), size)
    if prepared_loaders(accelerator):
        raise ValueError(
            f"sp_size={size}: this Accelerator prepared a data loader before it saw the model, so "
            f"the {size} ranks of an sp group would be given different batches; call "
            f"accelerator.prepare(model, optimizer, dataloader)"
        )
    setattr(accelerator, _SHARING, size)


def sharing(accelerator: Accelerator) -> int:
    """How many consecutive ranks share their batches."""
    return getattr(accelerator, _SHARING, 1)


@dataclass(frozen=True)
class _LoaderMesh:
    """To Accelerate's data loaders, a mesh with context parallelism (accelerate/data_loader.py)."""

    sizes: dict[str, int]

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def __getitem__(self, name: str) -> _LoaderMesh:
        return _LoaderMesh({name: self.sizes[name]})

    def size(self) -> int:
        (size,) = self.sizes.values()
        return size


def loader_mesh(original: Original, self: Accelerator) -> Any:
    """`Accelerator._prepare_device_mesh`, which its data loaders alone ask."""
    if sharing(self) == 1:
        return original(self)
    return _LoaderMesh(
        {"dp_shard": self.num_processes // sharing(self), "cp": sharing(self)},
    )


def prepare_data_loader(
    original: Original, self: Accelerator, data_loader: Any, *args: Any, **kwargs: Any
) -> Any:
    """`Accelerator.prepare_data_loader`: one order of samples on all ranks that share them."""
    if sharing(self) == 1:
        return original(self, data_loader, *args, **kwargs)
    if self.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True sends each rank a batch of its own, but with sp_size="
            f"{sharing(self)} that many ranks share one; set dispatch_batches=False"
        )
    if getattr(data_loader, "_is_accelerate_prepared", False):
        return original(self, data_loader, *args, **kwargs)
    data_loader = copy.copy(data_loader)
    sampler = get_sampler(data_loader)
    if isinstance(data_loader.dataset, IterableDataset):
        _check_stream(data_loader)
        # Behind the back of its __setattr__, which wants a new loader for a new data set.
        vars(data_loader)["dataset"] = _Stream(data_loader.dataset)
    elif "BatchRebalanceSampler" in (
        type(s).__name__ for s in (sampler, data_loader.batch_sampler)
    ):
        raise ValueError(
            f"train_sampling_strategy='batch_rebalance' deals samples to single processes, but "
            f"with sp_size={sharing(self)} that many share them; use another strategy"
        )
    elif getattr(sampler, "generator", self) is None and self.num_processes == sharing(self):
        # With one data rank Accelerate sees no need to keep ranks in step.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(_seed_of_rank_0(torch.initial_seed() % 2**63))
    data_loader.worker_init_fn = _seeded_alike(data_loader.worker_init_fn, sharing(self))
    with _options(self, type(sampler) is RandomSampler):
        loader = original(self, data_loader, *args, **kwargs)
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = _seed_of_rank_0(sampler.initial_seed)
    return loader


def gather_for_metrics(
    original: Original, self: Accelerator, input_data: Any, use_gather_object: bool = False
) -> Any:
    """`Accelerator.gather_for_metrics`: each sample once."""
    if sharing(self) == 1:
        return original(self, input_data, use_gather_object)
    _count_stream(self)
    if use_gather_object or not _all_tensors(input_data):
        first = self.process_index % sharing(self) == 0
        return original(self, input_data if first else input_data[:0], True)
    gather = self.gather
    # It gathers by self.gather and then drops what fills up the last batch, in that order.
    self.gather = lambda data: _first_of_each_group(gather(data), self)
    try:
        return original(self, input_data, False)
    finally:
        del self.gather


def prepare_scheduler(original: Original, self: Accelerator, scheduler: Any) -> Any:
    """`Accelerator.prepare_scheduler`: as many steps as there are data ranks."""
    prepared = original(self, scheduler)
    per_process = prepared.step_with_optimizer and not prepared.split_batches
    if sharing(self) > 1 and per_process and prepared is not scheduler:
        prepared.scheduler = _EveryNth(prepared.scheduler, sharing(self))
    return prepared


def create_accelerator(original: Original, self: transformers.Trainer) -> None:
    """`Trainer.create_accelerator_and_postprocess`, before which it has its model."""
    original(self)
    _tell(self, self.model)


def call_model_init(original: Original, self: transformers.Trainer, *args: Any, **kw: Any) -> Any:
    """`Trainer.call_model_init`, from which a model may come later."""
    model = original(self, *args, **kw)
    _tell(self, model)
    return model


def get_num_items_in_batch(
    original: Original, self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """`Trainer._get_num_items_in_batch`, which divides a count of this rank alone as well."""
    count = original(self, *args, **kwargs)
    if count is None or self.args.average_tokens_across_devices:
        return count
    return count * sharing(self.accelerator)


def floating_point_ops(original: Original, self: transformers.Trainer, inputs: Any) -> Any:
    """`Trainer.floating_point_ops`, which it adds up over all processes."""
    return original(self, inputs) // sharing(self.accelerator)


def get_tp_size(original: Original, self: transformers.Trainer) -> int:
    """`Trainer.get_tp_size`: by how many processes outnumber data ranks."""
    size: int = original(self)
    return size * sharing(self.accelerator)


def prediction_step(
    original: Original,
    self: transformers.Trainer,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`Trainer.prediction_step`: whole logits where someone looks at them."""
    state = find_state(self.model)
    if state is None or sharing(self.accelerator) == 1:
        return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
    before, state.gather_logits = state.gather_logits, not prediction_loss_only
    try:
        return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
    finally:
        state.gather_logits = before


def track_num_input_tokens(original: Original, self: transformers.Trainer, inputs: Any) -> None:
    """`Trainer._track_num_input_tokens`, which adds up all processes."""
    before = self.state.num_input_tokens_seen
    original(self, inputs)
    seen = self.state.num_input_tokens_seen - before
    self.state.num_input_tokens_seen = before + seen // sharing(self.accelerator)


class _EveryNth:
    """A scheduler that takes every n-th step; the rest is the scheduler's own."""

    def __init__(self, scheduler: Any, n: int) -> None:
        self._scheduler, self._n, self._calls = scheduler, n, 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._calls += 1
        if self._calls % self._n == 0:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # not there yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self._scheduler, name)


class _Stream(IterableDataset[Any]):
    """A stream that every rank reads whole and takes its part of; counts its rows.

    `datasets` would otherwise deal whole files to data ranks, which end on different steps.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # Shared with a loader's worker.
        self.rows = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        self.rows.zero_()
        for sample in self.dataset:
            self.rows.add_(1)
            yield sample

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "rows"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _check_stream(data_loader: Any) -> None:
    if data_loader.batch_size is None:
        raise ValueError(
            "a stream that makes its own batches (batch_size=None) cannot be dealt to the data "
            "ranks of sp_size > 1; yield samples and set batch_size"
        )


def _count_stream(accelerator: Accelerator) -> None:
    """Say how many rows of a stream's last batch are no repetition; Accelerate leaves it open."""
    loader = accelerator.gradient_state.active_dataloader
    shard = getattr(loader, "dataset", None)
    if not (isinstance(shard, IterableDatasetShard) and isinstance(shard.dataset, _Stream)):
        return
    if accelerator.gradient_state.end_of_dataloader:
        loader.remainder = int(shard.dataset.rows) % (shard.batch_size * shard.num_processes)


@contextmanager
def _options(accelerator: Accelerator, seedable: bool) -> Iterator[None]:
    """Let each rank read one data loader for itself, and shuffle as all ranks do."""
    options = accelerator.dataloader_config
    before = options.dispatch_batches, options.use_seedable_sampler
    options.dispatch_batches = False
    options.use_seedable_sampler = options.use_seedable_sampler or seedable
    try:
        yield
    finally:
        options.dispatch_batches, options.use_seedable_sampler = before


def _seeded_alike(init: Any, sharing: int) -> Any:
    """Seed a loader's workers as the Trainer does, by data rank instead of process."""
    if isinstance(init, partial) and "rank" in init.keywords:
        rank = init.keywords["rank"] // sharing
        return partial(init.func, *init.args, **init.keywords | {"rank": rank})
    return init


def _tell(trainer: transformers.Trainer, model: Any) -> None:
    state = None if model is None else find_state(model)
    if state is not None:
        share_batches(trainer.accelerator, state)
        state.sums_losses = trainer.args.average_tokens_across_devices


def _seed_of_rank_0(seed: int) -> int:
    return on_first("accelerator.prepare", lambda: int(seed))


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _first_of_each_group(gathered: Any, accelerator: Accelerator) -> Any:
    def pick(x: Tensor) -> Tensor:
        by_rank = x.unflatten(0, (accelerator.num_processes, -1))
        return by_rank[:: sharing(accelerator)].flatten(0, 1)

    return recursively_apply(pick, gathered)
