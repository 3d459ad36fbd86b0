"""Let several ranks share batches under Accelerate and the Trainer (sp, cp or pp_size > 1).

The processes that work on the same batch count as one data rank:

    4 processes, sp_size 2    data ranks {0 1} {2 3}: consecutive ranks share a batch
    4 processes, pp_size 2    data ranks {0 2} {1 3}: the ranks at the same position of each stage

`share_batches` stores the number of processes per batch on one Accelerator, and
`count_processes_per_batch` returns this number. Accelerate assumes that every process has its own
batches, so the wrappers below correct the counts of this Accelerator and of its Trainer.

The Trainer divides its counts by `get_tp_size()`, the only number of processes per batch that it
knows. The wrapper of `get_tp_size` multiplies it by the number of processes per data rank.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import accelerate.data_loader
import torch
import transformers
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler, get_sampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import convert_to_fp32, recursively_apply
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler

from hf_moe_ep.config import get_launched_world_size
from hf_moe_ep.integrations.uneven_loaders import check_batches_are_even
from hf_moe_ep.pipeline.caller_loss import CallerLoss, take_loss
from hf_moe_ep.ranks.all_ranks import run_on_first
from hf_moe_ep.ranks.mesh import check_world
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.accelerate_and_trainer import (
    generates_in_training,
    list_prepared_loaders,
    list_prepared_models,
    list_prepared_schedulers,
)
from hf_moe_ep.upstream.frameworks import (
    check_reads_no_logits,
    multiplies_by_processes,
    recount_steps,
    split_over_data_ranks,
)
from hf_moe_ep.upstream.wrap import runs_wrapper_first

_PROCESSES_PER_BATCH = "_hf_moe_ep_sharing"
_SIZES_TEXT = "_hf_moe_ep_batch_sizes"
_NUM_STAGES = "_hf_moe_ep_stages"
Original = Callable[..., Any]


def share_batches(accelerator: Accelerator, state: ModelState) -> None:
    """Let `cp_size * sp_size` ranks of each of the `pp_size` stages share batches.

    Raises:
        ValueError: a data loader was prepared earlier, with different batches for each rank, or a
            scheduler; or the sizes do not divide the number of ranks.
    """
    num_stages = state.config.pp_size or 1
    size = num_stages * state.config.ranks_per_batch
    if size == count_processes_per_batch(accelerator) and num_stages == _count_stages(accelerator):
        return
    check_world(state.config, get_launched_world_size())
    if list_prepared_loaders(accelerator):
        raise ValueError(
            f"{_describe_sizes(state)}: this Accelerator prepared a data loader before it saw the "
            f"model, so {size} ranks that share a batch would be given different ones; call "
            f"accelerator.prepare(model, optimizer, dataloader)"
        )
    if any(map(_steps_once_per_process, list_prepared_schedulers(accelerator))):
        raise ValueError(
            f"{_describe_sizes(state)}: this Accelerator prepared a scheduler before it saw the "
            f"model, so the scheduler would step once per process instead of once per data rank; "
            f"call accelerator.prepare(model, optimizer, scheduler)"
        )
    setattr(accelerator, _PROCESSES_PER_BATCH, size)
    setattr(accelerator, _SIZES_TEXT, _describe_sizes(state))
    setattr(accelerator, _NUM_STAGES, num_stages)


def _describe_sizes(state: ModelState) -> str:
    """Name the sizes that make ranks share a batch, for errors: "sp_size=2, pp_size=2"."""
    pp_size = state.config.pp_size or 1
    if pp_size == 1:
        return state.config.sequence_sizes
    split = state.config.ranks_per_batch > 1
    return f"{state.config.sequence_sizes}, pp_size={pp_size}" if split else f"pp_size={pp_size}"


def share_trainer_batches(trainer: transformers.Trainer, state: ModelState) -> None:
    """Let ranks share a Trainer's batches, and record how it averages losses.

    Raises:
        ValueError: ranks share batches, but in this Trainer each rank generates completions, or
            the Trainer reads the logits of whole sequences; or ranks would not generate equally
            often.
    """
    shares = state.config.ranks_per_batch * (state.config.pp_size or 1) > 1
    if shares and generates_in_training(trainer):
        raise ValueError(
            f"{type(trainer).__name__} lets each rank generate completions of its own, but with "
            f"{_describe_sizes(state)} ranks share one batch; patch with sp_size=1, cp_size=1 and "
            f"pp_size=1 (TRL refuses its own sequence parallelism here as well)"
        )
    if generates_in_training(trainer):
        _check_generates_equally_often(trainer)
    if shares:
        check_reads_no_logits(trainer)
    share_batches(trainer.accelerator, state)
    state.sums_losses = trainer.args.average_tokens_across_devices


def _check_generates_equally_often(trainer: Any) -> None:
    """Raise ValueError if some ranks would run forwards of the sharded model that others do not."""
    num_ranks, args = trainer.accelerator.num_processes, trainer.args
    if num_ranks == 1 or args.use_vllm:
        return
    if getattr(trainer, "tools", None):
        raise ValueError(
            f"with tools or an environment_factory, each rank generates again while its own "
            f"completions call tools, but the {num_ranks} ranks of a sharded model must generate "
            f"equally often; set use_vllm=True and vllm_mode='colocate', or train without tools"
        )
    if getattr(args, "use_transformers_continuous_batching", False):
        raise ValueError(
            f"use_transformers_continuous_batching=True runs as many forwards as the completions "
            f"of one rank need, but the {num_ranks} ranks of a sharded model must run the same "
            f"number; leave this option out, or set use_vllm=True"
        )


def correct_steps(trainer: transformers.Trainer) -> None:
    """Correct the steps that a framework has counted with a batch for each process.

    Raises:
        ValueError: the framework is axolotl, and the right number of steps is not known.
    """
    ranks_per_batch = count_processes_per_batch(trainer.accelerator)
    recount_steps(trainer, ranks_per_batch, describe_shared_batch(trainer.accelerator))


def count_processes_per_batch(accelerator: Accelerator) -> int:
    """Return the number of processes that share a batch, counted over all pipeline stages."""
    return getattr(accelerator, _PROCESSES_PER_BATCH, 1)


def describe_shared_batch(accelerator: Accelerator) -> str:
    """Name the sizes that make ranks share a batch, for errors: "sp_size=2, pp_size=2"."""
    return getattr(accelerator, _SIZES_TEXT, "sp_size=1")


def _count_stages(accelerator: Accelerator) -> int:
    return getattr(accelerator, _NUM_STAGES, 1)


def find_data_rank(accelerator: Accelerator, rank: int) -> int:
    """Return the index of the batch that a process works on."""
    num_stages = _count_stages(accelerator)
    ranks_per_stage = accelerator.num_processes // num_stages
    return rank % ranks_per_stage // (count_processes_per_batch(accelerator) // num_stages)


def _list_first_ranks(accelerator: Accelerator) -> list[int]:
    """Return the first process of each batch, in the order of the batches."""
    first: dict[int, int] = {}
    for rank in range(accelerator.num_processes):
        first.setdefault(find_data_rank(accelerator, rank), rank)
    return list(first.values())


def prepare_data_loader(
    original: Original,
    self: Accelerator,
    data_loader: Any,
    device_placement: bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap `Accelerator.prepare_data_loader`: let ranks share samples, refuse uneven loaders.

    Ranks that share a batch draw the same samples.

    Raises:
        ValueError: ranks share batches, and the loader assigns samples to single processes
            (`dispatch_batches=True`, "batch_rebalance") or is a stream that makes its own batches;
            or the loader has more batches for one rank than for another.
    """
    is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
    if is_prepared or count_processes_per_batch(self) == 1:
        prepared = original(self, data_loader, device_placement, *args, **kwargs)
    else:
        prepared = _prepare_shared(self, data_loader, device_placement)
    check_batches_are_even(self)
    return prepared


def get_train_dataloader(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ms-swift's `get_train_dataloader`: let ranks that share batches draw the same samples.

    ms-swift divides the samples itself, and does not give this loader to Accelerate.

    Raises:
        ValueError: ranks share batches, and the data is a stream or pp_size > 1.
    """
    loader = original(self, *args, **kwargs)
    size = count_processes_per_batch(self.accelerator)
    if size > 1:
        if (num_stages := _count_stages(self.accelerator)) > 1:
            raise ValueError(
                f"ms-swift divides samples over consecutive ranks, but with pp_size={num_stages} "
                f"the ranks of a batch are not consecutive; patch with pp_size=1"
            )
        split_over_data_ranks(loader, size)
        loader.worker_init_fn = _seed_by_data_rank(loader.worker_init_fn, self.accelerator)
    return loader


def _prepare_shared(self: Accelerator, data_loader: Any, device_placement: bool | None) -> Any:
    """Call Accelerate's `prepare_data_loader` with data ranks instead of processes."""
    if self.dispatch_batches:
        raise ValueError(
            f"dispatch_batches=True sends each rank a batch of its own, but with "
            f"{describe_shared_batch(self)} several ranks share one batch; set "
            f"dispatch_batches=False"
        )
    data_ranks = self.num_processes // count_processes_per_batch(self)
    data_loader = copy.copy(data_loader)
    sampler = get_sampler(data_loader)
    # Accelerate does not draw from a sampler's own generator if it makes the sampler seedable.
    has_no_generator = type(sampler) is RandomSampler and sampler.generator is None
    if isinstance(data_loader.dataset, IterableDataset):
        _check_stream(data_loader, describe_shared_batch(self))
        # DataLoader.__setattr__ refuses a new data set, so it is set in __dict__.
        vars(data_loader)["dataset"] = _Stream(data_loader.dataset)
    elif _rebalances(sampler) or _rebalances(data_loader.batch_sampler):
        raise ValueError(
            f"train_sampling_strategy='batch_rebalance' assigns samples to single processes, but "
            f"with {describe_shared_batch(self)} several ranks share their samples; use another "
            f"strategy"
        )
    elif data_ranks == 1 and hasattr(sampler, "generator"):
        # With one data rank Accelerate does not synchronise the generators of the ranks.
        if sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        if isinstance(sampler.generator, torch.Generator):  # a sampler of the user may have NumPy's
            state_of_rank_0 = run_on_first("accelerator.prepare", sampler.generator.get_state)
            sampler.generator.set_state(state_of_rank_0)
    data_loader.worker_init_fn = _seed_by_data_rank(data_loader.worker_init_fn, self)
    loader = accelerate.data_loader.prepare_data_loader(
        data_loader,
        self.device,
        num_processes=data_ranks,
        process_index=find_data_rank(self, self.process_index),
        split_batches=self.split_batches,
        put_on_device=self.device_placement if device_placement is None else device_placement,
        rng_types=self.rng_types.copy(),
        dispatch_batches=False,
        even_batches=self.even_batches,
        use_seedable_sampler=self.use_seedable_sampler or has_no_generator,
        data_seed=self.dataloader_config.data_seed,
        non_blocking=self.non_blocking,
        use_stateful_dataloader=self.use_stateful_dataloader,
    )
    list_prepared_loaders(self).append(loader)
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = _share_seed_of_rank_0(sampler.initial_seed)
    return loader


def gather_for_metrics(
    original: Original, self: Accelerator, input_data: Any, use_gather_object: bool = False
) -> Any:
    """Wrap `Accelerator.gather_for_metrics`: gather each sample once, from one rank per batch.

    Raises:
        ValueError: ranks share batches, and several workers read a stream whose end is padded.
    """
    if count_processes_per_batch(self) == 1:
        return original(self, input_data, use_gather_object)
    _set_stream_remainder(self)
    if use_gather_object or not _are_all_tensors(input_data):
        is_first = self.process_index in _list_first_ranks(self)
        return original(self, input_data if is_first else [], True)
    gather = self.gather
    # Stock code calls self.gather, and then drops the samples that pad the last batch.
    self.gather = lambda data: _select_first_of_group(gather(data), self)
    try:
        return original(self, input_data, False)
    finally:
        del self.gather


def prepare_scheduler(original: Original, self: Accelerator, scheduler: Any) -> Any:
    """Wrap `Accelerator.prepare_scheduler`: step once per data rank, not once per process.

    In each optimizer step, stock Accelerate steps a scheduler once per process. Its examples
    multiply the length of a schedule by this number. Rank 0 warns that it is another one here.
    """
    prepared = original(self, scheduler)
    num_sharing = count_processes_per_batch(self)
    if num_sharing > 1 and _steps_once_per_process(prepared) and prepared is not scheduler:
        prepared.scheduler = _EveryNthStep(prepared.scheduler, num_sharing)
        if self.is_main_process:
            warnings.warn(
                f"with {describe_shared_batch(self)} a prepared scheduler makes "
                f"{self.num_processes // num_sharing} steps in each optimizer step, one for each "
                f"data rank; multiply the lengths of the schedule (warm-up steps, training steps) "
                f"by this number, not by accelerator.num_processes ({self.num_processes})",
                stacklevel=2,
            )
    return prepared


def _steps_once_per_process(scheduler: AcceleratedScheduler) -> bool:
    """Return True if stock steps a prepared scheduler once per process in an optimizer step."""
    return bool(scheduler.step_with_optimizer and not scheduler.split_batches)


def get_num_items_in_batch(
    original: Original, self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Trainer._get_num_items_in_batch`: do not divide the tokens of one rank by tp_size.

    The Trainer divides losses by this count of label tokens, and stock divides the count by
    `get_tp_size()`. With `average_tokens_across_devices=False` only the tokens of this rank were
    counted, so the wrapper undoes the division.
    """
    count = original(self, *args, **kwargs)
    if count is None or self.args.average_tokens_across_devices:
        return count
    return count * count_processes_per_batch(self.accelerator)


def floating_point_ops(original: Original, self: transformers.Trainer, inputs: Any) -> Any:
    """Wrap `Trainer.floating_point_ops`: count total_flos once per data rank.

    The Trainer adds up the FLOPs of all ranks, so each rank divides its own by the number of ranks
    that share a sequence. They are not divided by the number of stages: each stage counts only its
    own parameters, so the FLOPs of all stages add up to the FLOPs of the model.
    """
    num_ranks = count_processes_per_batch(self.accelerator) // _count_stages(self.accelerator)
    return original(self, inputs) // num_ranks


def get_tp_size(original: Original, self: transformers.Trainer) -> int:
    """Wrap `Trainer.get_tp_size`: count the ranks that share a batch.

    The Trainer computes the samples per step, and from them epochs and max_steps, from this number.
    """
    size: int = original(self)
    return size * count_processes_per_batch(self.accelerator)


def prediction_step(
    original: Original,
    self: transformers.Trainer,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap `Trainer.prediction_step`: gather logits of whole sequences if they are returned."""
    state = find_state(self.model)
    if state is None:
        return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
    before = state.gather_logits, state.only_loss_is_read
    state.gather_logits = not prediction_loss_only
    # A subclass that overrides compute_loss may read the outputs.
    state.only_loss_is_read = prediction_loss_only and runs_wrapper_first(self, "compute_loss")
    try:
        with _fp32_outputs(self, state, model, are_read=not prediction_loss_only):
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
    finally:
        state.gather_logits, state.only_loss_is_read = before


def compute_loss(
    original: Original,
    self: transformers.Trainer,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap `Trainer.compute_loss`: let the model leave out logits that nobody reads.

    If no outputs are returned, the caller reads only the loss. With pipeline stages the last stage
    calls the Trainer's `compute_loss_func`. Logits that are read are in fp32, as in one process.
    """
    state = find_state(self.model)
    if state is None:
        return original(self, model, inputs, return_outputs, *args, **kwargs)
    num_items = kwargs.get("num_items_in_batch", args[0] if args else None)
    before = state.only_loss_is_read
    computes_loss = self.label_smoother is not None or self.compute_loss_func is not None
    with (
        _loss_on_last_stage(self, state, inputs.get("labels"), num_items),
        _fp32_outputs(self, state, model, are_read=return_outputs or computes_loss),
    ):
        state.only_loss_is_read = before or not return_outputs
        try:
            return original(self, model, inputs, return_outputs, *args, **kwargs)
        finally:
            state.only_loss_is_read = before


@contextmanager
def _fp32_outputs(
    trainer: transformers.Trainer, state: ModelState, model: Any, *, are_read: bool
) -> Iterator[None]:
    """Let the forward of a model on ranks return outputs in fp32 inside the block, if `are_read`.

    With `bf16` or `fp16`, a model in one process returns fp32, because Accelerate converts the
    outputs. It does not convert those of FSDP2. Label smoothing, for example, would then take
    logarithms in bf16. The outputs of pipeline stages are not converted.
    """
    is_mixed = trainer.accelerator.native_amp and state.meshes is not None and state.stage is None
    if not (is_mixed and are_read):
        yield
        return
    handle = model.register_forward_hook(_convert_output_to_fp32)
    try:
        yield
    finally:
        handle.remove()


def _convert_output_to_fp32(model: Any, args: Any, output: Any) -> Any:
    return convert_to_fp32(output)


@contextmanager
def _loss_on_last_stage(
    trainer: transformers.Trainer, state: ModelState, labels: Any, num_items: Any
) -> Iterator[None]:
    """Let the last pipeline stage call `compute_loss_func` if the block is a training step.

    Raises:
        ValueError: ranks share the sequences of a batch, or the number of tokens is unknown.
    """
    function = trainer.compute_loss_func
    trains = trainer.model.training and torch.is_grad_enabled()
    if function is None or labels is None or not trains or (state.config.pp_size or 1) == 1:
        yield
        return
    if state.config.ranks_per_batch > 1:
        raise ValueError(
            f"compute_loss_func with pp_size={state.config.pp_size} needs whole sequences, but "
            f"{state.config.ranks_per_batch} ranks share each batch; use sp_size=1 and cp_size=1, "
            f"or the model's own loss"
        )
    if num_items is None:
        raise ValueError(
            f"compute_loss_func with pp_size={state.config.pp_size} must divide by "
            f"num_items_in_batch, which the Trainer has not counted; use the model's own loss, or "
            f"leave pp_size at 1"
        )
    try:
        state.caller_loss = CallerLoss(function, labels, num_items)
        trainer.compute_loss_func = take_loss
        yield
    finally:
        state.caller_loss, trainer.compute_loss_func = None, function


def compute_loss_of_swift(
    original: Original,
    self: transformers.Trainer,
    model: Any,
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap ms-swift's `compute_loss`: average over data ranks, not over processes.

    ms-swift multiplies the loss per token by the number of processes, because gradients are
    averaged over processes. Here the loss must be multiplied by the number of data ranks, as the
    Trainer does, so the wrapper divides it by the number of processes that share a batch.
    """
    result = original(self, model, inputs, *args, **kwargs)
    size, num_items = count_processes_per_batch(self.accelerator), _find_num_items(args, kwargs)
    if size == 1 or not multiplies_by_processes(self, num_items):
        return result
    return (result[0] / size, *result[1:]) if isinstance(result, tuple) else result / size


def compute_loss_of_sft(
    original: Original, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap SFTTrainer's `compute_loss`: pass the loss's divisor to the stages before the forward.

    With pipeline stages the loss is computed inside the forward. The trainer's loss (TRL 1.15) is

        sum * data_ranks / num_items + aux / accumulation

    where data_ranks is replaced by 1 without `average_tokens_across_devices`. Stages compute
    sum / divisor + aux, which has the same gradients up to a factor (`pipeline/token_losses.py`)
    if the divisor is num_items / (data_ranks * accumulation).
    """
    state = find_state(self.model)
    if state is None or (state.config.pp_size or 1) == 1:
        return original(self, model, inputs, *args, **kwargs)
    if (num_items := _find_num_items(args, kwargs)) is not None:
        factor = self.current_gradient_accumulation_steps
        if self.args.average_tokens_across_devices:
            factor *= self.accelerator.num_processes // self.get_tp_size()
        state.loss_divisor = num_items / factor
    try:
        return original(self, model, inputs, *args, **kwargs)
    finally:
        state.loss_divisor = None


def _find_num_items(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `num_items_in_batch` of a call `compute_loss(model, inputs, *args, **kwargs)`.

    The callers pass `args` and `kwargs` on as they were given, because the method of a subclass may
    accept only some of these arguments.
    """
    return kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)


def track_num_input_tokens(original: Original, self: transformers.Trainer, inputs: Any) -> None:
    """Wrap `Trainer._track_num_input_tokens`: count input tokens once per data rank."""
    before = self.state.num_input_tokens_seen
    original(self, inputs)
    new_tokens = self.state.num_input_tokens_seen - before
    num_processes = count_processes_per_batch(self.accelerator)
    self.state.num_input_tokens_seen = before + new_tokens // num_processes


class _EveryNthStep:
    """A scheduler that makes a step only in every n-th call of `step`.

    All other attributes are read from the scheduler, and set on it: Accelerate increases the
    scheduler's count of steps while gradients accumulate, and compares the count for OneCycleLR.
    """

    def __init__(self, scheduler: Any, n: int) -> None:
        self._scheduler = scheduler
        self._n = n
        self._calls = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._calls += 1
        if self._calls % self._n == 0:
            self._scheduler.step(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_scheduler", "_n", "_calls"):
            super().__setattr__(name, value)
        else:
            setattr(self._scheduler, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # copy and pickle read it before __init__
            raise AttributeError(name)
        return getattr(self._scheduler, name)


class _Stream(IterableDataset[Any]):
    """A stream that every rank reads completely; Accelerate then selects the rank's samples.

    Without this class, the data ranks would read different files of a streaming data set of
    `datasets`, and would end at different steps. `rows` counts the samples that were read.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # The count is in shared memory, because a worker process writes it and this process reads.
        self.rows = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        self.rows.zero_()
        for sample in self.dataset:
            self.rows.add_(1)
            yield sample

    def __len__(self) -> int:
        """Return the length of the data set; as in stock, TypeError is raised if it has none."""
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "rows"):  # copy and pickle read them before __init__
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _rebalances(sampler: Any) -> bool:
    """Return True for the Trainer's sampler of `train_sampling_strategy="batch_rebalance"`."""
    return type(sampler).__name__ == "BatchRebalanceSampler"


def _check_stream(data_loader: Any, sizes: str) -> None:
    """Raise ValueError if a stream makes its own batches."""
    if data_loader.batch_size is None:
        raise ValueError(
            f"a stream that makes its own batches (batch_size=None) cannot be split over the data "
            f"ranks of a model with {sizes}; yield samples and set batch_size"
        )


def _set_stream_remainder(accelerator: Accelerator) -> None:
    """Set `remainder` of a stream's loader to the number of real samples in the last batch.

    If `remainder` is set, Accelerate drops the samples that pad this batch. Accelerate itself sets
    no `remainder` for a stream, because the length of a stream is unknown. In training, samples
    that pad a batch are trained and counted, as in stock code.

    Raises:
        ValueError: in an evaluation, several workers read the stream. Each of them pads its own
            last batch, and the numbers of padding samples are unknown.
    """
    loader = accelerator.gradient_state.active_dataloader
    shard = getattr(loader, "dataset", None)
    if not (isinstance(shard, IterableDatasetShard) and isinstance(shard.dataset, _Stream)):
        return
    if shard.drop_last:
        return  # Nothing is padded.
    if any(model.training for model in list_prepared_models(accelerator)):
        return
    if loader.num_workers > 1:
        raise _make_stream_refusal(loader.num_workers, accelerator)
    if accelerator.gradient_state.end_of_dataloader:
        loader.remainder = int(shard.dataset.rows) % (shard.batch_size * shard.num_processes)


def check_streams_of_evaluations(trainer: transformers.Trainer) -> None:
    """Raise ValueError before training if an evaluation would read a stream with several workers.

    `gather_for_metrics` raises the same error, but only at the first evaluation.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if args.eval_strategy == "no" or args.dataloader_drop_last or args.dataloader_num_workers < 2:
        return
    data = trainer.eval_dataset
    data_sets = data.values() if isinstance(data, dict) else [data]
    is_stream = any(isinstance(data_set, IterableDataset) for data_set in data_sets)
    if is_stream and count_processes_per_batch(accelerator) > 1:
        raise _make_stream_refusal(args.dataloader_num_workers, accelerator)


def _make_stream_refusal(num_workers: int, accelerator: Accelerator) -> ValueError:
    return ValueError(
        f"{num_workers} workers read this stream, and each of them fills its last batch with "
        f"samples of its first one, which an evaluation would count twice with "
        f"{describe_shared_batch(accelerator)}; set num_workers (dataloader_num_workers of the "
        f"Trainer) to 0 or 1"
    )


def _seed_by_data_rank(init: Any, accelerator: Accelerator) -> Any:
    """Make the Trainer's `worker_init_fn` seed by data rank instead of by process."""
    if isinstance(init, partial) and "rank" in init.keywords:
        rank = find_data_rank(accelerator, init.keywords["rank"])
        return partial(init.func, *init.args, **init.keywords | {"rank": rank})
    return init


def share_generators(accelerator: Accelerator) -> None:
    """Create a generator, equal on all ranks, for each sampler that uses torch's default generator.

    Each data rank selects its batches from a list of all batches, so all ranks must draw the same
    list. After `rng.reseed`, torch's default generators of the data ranks differ.
    """
    seed = _share_seed_of_rank_0(torch.initial_seed() % 2**63)
    for loader in list_prepared_loaders(accelerator):
        batches: Any = getattr(loader, "batch_sampler", None)
        while hasattr(batches, "batch_sampler"):
            batches = batches.batch_sampler
        sampler: Any = getattr(batches, "sampler", None)
        if getattr(sampler, "generator", seed) is None:
            sampler.generator = torch.Generator().manual_seed(seed)


def _share_seed_of_rank_0(seed: int) -> int:
    """Return the seed of rank 0 on every rank."""
    return run_on_first("accelerator.prepare", lambda: int(seed))


def _are_all_tensors(data: Any) -> bool:
    """Return True if all leaves of nested data are tensors."""
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _select_first_of_group(gathered: Any, accelerator: Accelerator) -> Any:
    """Select the rows of the first rank of each batch from the gathered rows of all ranks."""

    def select(rows: Tensor) -> Tensor:
        by_rank = rows.unflatten(0, (accelerator.num_processes, -1))
        return by_rank[_list_first_ranks(accelerator)].flatten(0, 1)

    return recursively_apply(select, gathered)
