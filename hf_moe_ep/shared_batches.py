"""What sequence parallelism changes in Accelerate and the Trainer: sp ranks share their batches.

4 processes with sp_size 2 are 2 data ranks. To Accelerate every process has batches of its own, so
each place where it divides by the number of processes, or multiplies, learns better:

    data loaders          ranks of an sp group are given the same samples
    gather_for_metrics    each sample once: what the first rank of each group has
    schedulers            one step per data rank, not per process, and optimizer step
    Trainer               token count, loss scale and total batch size by data ranks; logits in
                          `predict()`; `num_input_tokens_seen`

The Trainer divides by `get_tp_size()` wherever ranks share a batch, so that is what we answer.
`accelerate.py` installs these wrappers; each is given what was there before as `original`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import recursively_apply
from torch import Tensor

from hf_moe_ep.config import launched_world_size
from hf_moe_ep.mesh import check_world
from hf_moe_ep.state import ModelState, find_state

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
    if accelerator._dataloaders:
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
    self.dataloader_config.dispatch_batches = False
    self.dataloader_config.use_seedable_sampler = True
    loader = original(self, data_loader, *args, **kwargs)
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = _from_rank0(sampler.initial_seed, self.device)
    return loader


def gather_for_metrics(
    original: Original, self: Accelerator, input_data: Any, use_gather_object: bool = False
) -> Any:
    """`Accelerator.gather_for_metrics`: each sample once."""
    if sharing(self) == 1:
        return original(self, input_data, use_gather_object)
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
    state = find_state(self.model)
    if state is not None:
        share_batches(self.accelerator, state)


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
        return getattr(self.__dict__["_scheduler"], name)


def _from_rank0(number: int, device: torch.device) -> int:
    told = torch.tensor(number, dtype=torch.int64, device=device)
    dist.broadcast(told, src=0)
    return int(told)


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
