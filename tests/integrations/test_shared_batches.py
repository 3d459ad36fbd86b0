"""Test that ranks of an sp group get the same batches from Accelerate's loaders.

sp_size is 2. A loop with an Accelerator runs on 4 ranks (2 groups), the Trainer on 2 (1 group).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import DataLoaderConfiguration
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched
from support.parity import full_tensor
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_moe_ep import data_parallel_rank, data_parallel_size, global_token_count, patch
from hf_moe_ep.integrations import shared_batches
from hf_moe_ep.integrations.shared_batches import count_processes_per_batch, share_trainer_batches
from hf_moe_ep.state import find_state

WORLD, DATA_RANKS, NUM_ROWS = 4, 2, 14
Row = dict[str, Tensor]


def _make_rows() -> list[Row]:
    model = tiny(num_hidden_layers=1)
    return [
        {name: value[0] for name, value in batch(model, 1, 9, seed=i, ignore=0.1 * (i % 7)).items()}
        for i in range(NUM_ROWS)
    ]


def _prepare_with_model(
    loader: DataLoader, accelerator: Accelerator | None = None, seed: int = 0, cp_size: int = 1
):
    accelerator = accelerator or Accelerator(cpu=True)
    model = patch(tiny(dtype=torch.float32, seed=seed), ep_size=2, sp_size=2, cp_size=cp_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def _a_loop_equals_one_process(rank: int) -> None:
    """14 rows in batches of 2 for 2 groups are 4 steps. The last step repeats the first rows."""
    message = r"with sp_size=2 .* makes 2 steps in each .*, not by accelerator.num_processes \(4\)"
    with pytest.warns(UserWarning, match=message) if rank == 0 else nullcontext():
        accelerator, model, optimizer, loader, scheduler = _prepare_with_model(
            DataLoader(_make_rows(), batch_size=2), seed=rank
        )
    assert (data_parallel_rank(model), data_parallel_size(model)) == (rank // 2, DATA_RANKS)
    stock = tiny(dtype=torch.float32)
    stock_optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    rows, steps = _make_rows(), 0
    for step, inputs in enumerate(loader):
        picked = [rows[i % NUM_ROWS] for i in range(4 * step, 4 * step + 4)]
        whole = {name: torch.stack([row[name] for row in picked]) for name in picked[0]}
        own_rows = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        assert torch.equal(inputs["input_ids"], whole["input_ids"][own_rows]), f"step {step}"
        num_tokens = global_token_count(model, inputs["labels"])
        loss = model(**inputs, num_items_in_batch=num_tokens).loss * data_parallel_size(model)
        accelerator.backward(loss)
        stock(**whole, num_items_in_batch=num_tokens).loss.backward()
        for either in (optimizer, stock_optimizer):
            either.step()
            either.zero_grad()
        # A prepared scheduler takes one step per data rank (2), as stock's does per process.
        scheduler.step()
        rate = stock_optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step + 1)
        assert optimizer.param_groups[0]["lr"] == rate, f"step {step}"
        steps += 1
    assert steps == len(loader) == 4
    for name, parameter in model.named_parameters():
        assert_close(name, full_tensor(parameter), stock.get_parameter(name), FP32_BUDGET)


def _ranks_of_a_group_shuffle_alike(rank: int) -> None:
    """Ranks of a group get the same order despite different seeds. Groups get different rows."""
    torch.manual_seed(rank)
    accelerator, _, _, loader, _ = _prepare_with_model(
        DataLoader(range(16), batch_size=2, shuffle=True)
    )
    orders = []
    for _ in range(2):
        rows = torch.cat(list(loader))
        by_rank = accelerator.gather(rows).view(WORLD, -1)
        assert torch.equal(by_rank[::2], by_rank[1::2])
        assert by_rank[::2].flatten().sort().values.tolist() == list(range(16))
        orders.append(rows.tolist())
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


def _a_generator_of_a_loader_orders_its_rows(rank: int) -> None:
    """The order is that of one process. With one data rank, all ranks use rank 0's generator."""
    orders = []
    for cp_size, seed in ((1, 42), (2, 42 + rank), (0, 42)):
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(range(16), batch_size=2, shuffle=True, generator=generator)
        if cp_size == 0:  # stock, in one process
            orders.append(torch.cat(list(loader)).tolist())
            continue
        accelerator, _, _, loader, _ = _prepare_with_model(loader, cp_size=cp_size)
        gathered = accelerator.gather(torch.cat(list(loader)))
        by_data_rank = gathered.view(DATA_RANKS // cp_size, 2 * cp_size, -1)
        assert torch.equal(by_data_rank, by_data_rank[:, :1].expand_as(by_data_rank))
        batches = by_data_rank[:, 0].unflatten(1, (-1, 2))
        orders.append(batches.transpose(0, 1).flatten().tolist())
    assert orders[0] == orders[1] == orders[2] != list(range(16))


class _DrawnByNumPy(Sampler[int]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.permutation(16).tolist()

    def __len__(self) -> int:
        return 16


def _a_sampler_may_have_a_generator_of_numpy(rank: int) -> None:
    """With one data rank, only torch's generators are synchronised."""
    loader = DataLoader(range(16), batch_size=2, sampler=_DrawnByNumPy())
    _, _, _, loader, _ = _prepare_with_model(loader, cp_size=DATA_RANKS)
    assert torch.cat(list(loader)).tolist() == list(_DrawnByNumPy())


class _Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def _a_stream_repeats_rows_at_its_end(rank: int) -> None:
    """With 9 rows the last batch repeats rows; `gather_for_metrics` drops the repeated rows."""
    accelerator, model, _, loader, _ = _prepare_with_model(DataLoader(_Stream(9), batch_size=2))
    model.eval()
    rows, gathered = [], []
    for batch_of_rank in loader:
        rows += batch_of_rank.tolist()
        gathered += accelerator.gather_for_metrics(batch_of_rank).tolist()
    assert rows == ([0, 1, 4, 5, 8, 0] if rank < 2 else [2, 3, 6, 7, 1, 2])
    assert gathered == list(range(9))


def _a_weighted_sampler_draws_every_row_once(rank: int) -> None:
    """A sampler without replacement draws every row once, although ranks have different seeds."""
    torch.manual_seed(rank)
    sampler = WeightedRandomSampler(torch.ones(16), 16, replacement=False)
    accelerator, _, _, loader, _ = _prepare_with_model(
        DataLoader(range(16), batch_size=2, sampler=sampler)
    )
    by_rank = accelerator.gather(torch.cat(list(loader))).view(WORLD, -1)
    assert torch.equal(by_rank[::2], by_rank[1::2])
    assert by_rank[::2].flatten().sort().values.tolist() == list(range(16))


def _a_sampler_draws_the_same_rows_on_ranks_with_other_seeds(rank: int) -> None:
    """The seeds of ranks differ, for example after a resume on another number of ranks."""
    accelerator = Accelerator(cpu=True)
    sampler = LengthGroupedSampler(2, lengths=[3 * i % 7 for i in range(16)])
    loader = accelerator.prepare(DataLoader(range(16), batch_size=2, sampler=sampler))
    torch.manual_seed(rank)
    shared_batches.share_generators(accelerator)
    rows = accelerator.gather(torch.cat(list(loader)))
    assert rows.sort().values.tolist() == list(range(16))


class _StreamOfLength(_Stream):
    def __len__(self) -> int:
        return self.length


def _a_stream_keeps_its_length(rank: int) -> None:
    *_, loader, _ = _prepare_with_model(DataLoader(_StreamOfLength(9), batch_size=2))
    assert len(loader) == 3
    *_, loader, _ = _prepare_with_model(DataLoader(_Stream(9), batch_size=2))
    with pytest.raises(TypeError, match="no len"):
        len(loader)


def _gather_for_metrics_drops_repeated_rows(rank: int) -> None:
    accelerator, _, _, loader, _ = _prepare_with_model(DataLoader(range(9), batch_size=2))
    tensors, objects, keys = [], [], []
    for rows in loader:
        tensors += accelerator.gather_for_metrics({"x": rows})["x"].tolist()
        objects += accelerator.gather_for_metrics([f"sample {x}" for x in rows.tolist()])
        by_sample = dict.fromkeys(rows.tolist())
        keys += accelerator.gather_for_metrics(by_sample, use_gather_object=True)
    assert tensors == list(range(9))
    assert objects == [f"sample {x}" for x in range(9)]
    assert keys == list(range(9)), "a dict that cannot be cut to its real samples"


def _loaders_and_schedulers_that_cannot_be_shared_are_refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(8)))
    with pytest.raises(ValueError, match="prepared a data loader before it saw the model"):
        _prepare_with_model(loader, accelerator)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2))
    with pytest.raises(ValueError, match="prepared a scheduler before it saw the model"):
        _prepare_with_model(DataLoader(range(8)), accelerator)
    options = DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(ValueError, match="dispatch_batches=True sends each rank a batch"):
        _prepare_with_model(DataLoader(range(8)), Accelerator(cpu=True, dataloader_config=options))
    with pytest.raises(ValueError, match=r"makes its own batches \(batch_size=None\)"):
        _prepare_with_model(DataLoader(_Stream(8), batch_size=None), Accelerator(cpu=True))


def _create_trainer(folder: str, arguments: dict[str, Any], **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    return Trainer(args=args, **options)


def _build_model_of_sp_2() -> PreTrainedModel:
    return patch(tiny(dtype=torch.float32), ep_size=2, sp_size=2)


class _Augmented(Dataset):
    """Rows of random numbers that a worker of the data loader draws with its own seed."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Row:
        drawn = torch.randint(90, (6,))
        return {"input_ids": drawn, "labels": drawn, "attention_mask": torch.ones_like(drawn)}


def _workers_of_a_group_draw_the_same_numbers(rank: int, folder: str) -> None:
    trainer = _create_trainer(
        folder,
        {"dataloader_num_workers": 1},
        model=_build_model_of_sp_2(),
        train_dataset=_Augmented(),
    )
    drawn = next(iter(trainer.get_train_dataloader()))["input_ids"]
    by_rank = trainer.accelerator.gather(drawn).view(2, *drawn.shape)
    assert torch.equal(by_rank[0], by_rank[1])


def _a_model_that_model_init_builds_shares_batches(rank: int, folder: str) -> None:
    """`train` builds a new model. It creates the data loader before it prepares the model."""
    trainer = _create_trainer(
        folder,
        {"average_tokens_across_devices": False},
        model_init=_build_model_of_sp_2,
        train_dataset=_make_rows(),
    )
    first_model = trainer.model
    trainer.train()
    state = find_state(trainer.model)
    assert state is not None and trainer.model is not first_model
    assert state.sums_losses is False
    assert trainer.accelerator.even_batches and count_processes_per_batch(trainer.accelerator) == 2


def _flops_equal_one_process(rank: int, folder: str) -> None:
    stock = _create_trainer(folder, {}, model=tiny(dtype=torch.float32))
    rows = _make_rows()[:2]
    inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    expected = stock.floating_point_ops(inputs)
    trainer = _create_trainer(
        folder,
        {"train_sampling_strategy": "sequential"},
        model=_build_model_of_sp_2(),
        train_dataset=rows,
    )
    trainer.train()
    assert expected > 0 and trainer.state.total_flos == expected


def _a_sampler_that_divides_rows_over_all_ranks_is_refused(rank: int, folder: str) -> None:
    trainer = _create_trainer(
        folder,
        {"train_sampling_strategy": "batch_rebalance"},
        model=_build_model_of_sp_2(),
        train_dataset=_make_rows(),
    )
    with pytest.raises(ValueError, match=r"'batch_rebalance' assigns .* sp_size=2 several ranks"):
        trainer.get_train_dataloader()


def _run_launched(check: Callable[..., None], rank: int, world: int, folder: str) -> None:
    with launched():
        check(rank, folder) if "folder" in signature(check).parameters else check(rank)


CHECKS_BY_WORLD = {
    world: {check.__name__.strip("_"): partial(_run_launched, check) for check in checks}
    for world, checks in {
        WORLD: (
            _a_loop_equals_one_process,
            _ranks_of_a_group_shuffle_alike,
            _a_generator_of_a_loader_orders_its_rows,
            _a_sampler_may_have_a_generator_of_numpy,
            _a_weighted_sampler_draws_every_row_once,
            _a_sampler_draws_the_same_rows_on_ranks_with_other_seeds,
            _a_stream_repeats_rows_at_its_end,
            _a_stream_keeps_its_length,
            _gather_for_metrics_drops_repeated_rows,
            _loaders_and_schedulers_that_cannot_be_shared_are_refused,
        ),
        2: (
            _workers_of_a_group_draw_the_same_numbers,
            _a_model_that_model_init_builds_shares_batches,
            _flops_equal_one_process,
            _a_sampler_that_divides_rows_over_all_ranks_is_refused,
        ),
    }.items()
}


@pytest.mark.parametrize("claim", on_ranks(WORLD, CHECKS_BY_WORLD[WORLD]))
def test_on_four_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(2, CHECKS_BY_WORLD[2], slow=True))
def test_the_trainer_on_two_ranks_that_share_batches(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_trainers_that_generate_on_each_rank_are_refused() -> None:
    """GRPO and similar trainers are refused in their constructor."""
    model = patch(tiny(num_hidden_layers=1), sp_size=2)
    trainer: Any = SimpleNamespace(model=model, _generate_and_score_completions=None)
    state = find_state(model)
    assert state is not None
    with pytest.raises(ValueError, match=r"lets each rank generate .* with sp_size=2 ranks share"):
        share_trainer_batches(trainer, state)


@pytest.mark.parametrize(
    ("tools", "options", "words"),
    [
        ([print], {}, r"environment_factory.* 2 ranks .*use_vllm=True and vllm_mode='colocate'"),
        ([], {"use_transformers_continuous_batching": True}, "continuous_batching=True .* 2 ranks"),
        ([print], {"use_vllm": True}, ""),
        ([], {}, ""),
    ],
    ids=["tools", "continuous batching", "tools and vLLM", "generate"],
)
def test_trainers_whose_ranks_do_not_generate_equally_often_are_refused(
    tools: list[Any], options: dict[str, bool], words: str
) -> None:
    model = patch(tiny(num_hidden_layers=1))
    settings = {"use_vllm": False, "average_tokens_across_devices": True} | options
    trainer: Any = SimpleNamespace(
        model=model,
        _generate_and_score_completions=None,
        tools=tools,
        accelerator=SimpleNamespace(num_processes=2),
        args=SimpleNamespace(**settings),
    )
    state = find_state(model)
    assert state is not None
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        share_trainer_batches(trainer, state)
        assert state.sums_losses
    trainer.accelerator.num_processes = 1
    share_trainer_batches(trainer, state)


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize(
    "wrapper", [shared_batches.compute_loss_of_sft, shared_batches.compute_loss_of_swift]
)
def test_a_loss_gets_its_arguments_as_the_trainer_passes_them(
    wrapper: Callable[..., Any], pp_size: int
) -> None:
    """A user's method may accept only some of the arguments, like `user_loss` in this test."""
    trainer: Any = SimpleNamespace(
        model=patch(tiny(num_hidden_layers=2), pp_size=pp_size),
        accelerator=SimpleNamespace(num_processes=1),
        args=SimpleNamespace(average_tokens_across_devices=False),
        current_gradient_accumulation_steps=1,
    )

    def user_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kw: Any
    ) -> Any:
        return (self, model, inputs), return_outputs, kw

    for given in ({}, {"return_outputs": True}, {"num_items_in_batch": 3}):
        arguments, return_outputs, kwargs = wrapper(user_loss, trainer, "model", "inputs", **given)
        assert arguments == (trainer, "model", "inputs")
        assert {"return_outputs": return_outputs} | kwargs == {"return_outputs": False} | given
    assert wrapper(user_loss, trainer, "model", "inputs", True)[1]


@pytest.mark.parametrize(
    ("readers", "return_outputs", "dtype"),
    [
        ({"label_smoother": "smooths"}, False, torch.float32),
        ({"compute_loss_func": "computes"}, False, torch.float32),
        ({}, True, torch.float32),
        ({}, False, torch.bfloat16),
    ],
    ids=["label smoothing", "compute_loss_func", "outputs", "nobody"],
)
def test_outputs_that_are_read_are_in_fp32(
    readers: dict[str, str], return_outputs: bool, dtype: torch.dtype
) -> None:
    """As in one process, where Accelerate converts them. The state is that of a sharded model."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    config = SimpleNamespace(pp_size=1)
    state = SimpleNamespace(config=config, meshes="of ranks", stage=None, only_loss_is_read=False)
    nobody = {"label_smoother": None, "compute_loss_func": None}
    accelerator = SimpleNamespace(native_amp=True)
    trainer: Any = SimpleNamespace(model=model, accelerator=accelerator, **nobody | readers)

    def stock(self: Any, model: nn.Module, inputs: Row, return_outputs: bool) -> torch.dtype:
        return model(inputs["x"]).dtype

    inputs = {"x": torch.ones(1, 2, dtype=torch.bfloat16)}
    with mock.patch.object(shared_batches, "find_state", return_value=state):
        found = shared_batches.compute_loss(stock, trainer, model, inputs, return_outputs)
    assert found == dtype and model(inputs["x"]).dtype == torch.bfloat16


def test_attributes_that_accelerate_sets_are_set_on_the_inner_scheduler() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    inner = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    shared = shared_batches._EveryNthStep(inner, 2)
    shared._step_count += 1  # as in accelerate/scheduler.py, while gradients accumulate
    assert inner._step_count == 2
    optimizer.step()
    shared.step()
    shared.step()
    assert shared._step_count == inner._step_count == 3


@pytest.mark.parametrize(
    ("num_workers", "drop_last", "training", "remainder"),
    [
        (0, False, False, 1),
        (1, False, False, 1),
        (2, False, False, None),
        (2, False, True, -1),  # TRL gathers numbers of tokens in each training step
        (0, True, False, -1),
        (2, True, False, -1),
    ],
)
def test_the_remainder_of_a_stream_is_set_for_a_padded_last_batch(
    num_workers: int, drop_last: bool, training: bool, remainder: int | None
) -> None:
    """Each worker would pad its own last batch. With drop_last nothing is padded."""
    stream = shared_batches._Stream(list(range(25)))
    shard = IterableDatasetShard(
        stream, batch_size=4, num_processes=2, process_index=0, drop_last=drop_last
    )
    list(shard)
    loader = SimpleNamespace(dataset=shard, num_workers=num_workers, remainder=-1)
    state = SimpleNamespace(active_dataloader=loader, end_of_dataloader=True)
    accelerator: Any = SimpleNamespace(gradient_state=state, _hf_moe_ep_batch_sizes="sp_size=2")
    accelerator._models = [SimpleNamespace(training=training), SimpleNamespace(training=False)]
    if remainder is None:
        with pytest.raises(ValueError, match=r"^2 workers read .* with sp_size=2; set num_workers"):
            shared_batches._set_stream_remainder(accelerator)
    else:
        shared_batches._set_stream_remainder(accelerator)
        assert loader.remainder == remainder


@pytest.mark.parametrize(
    ("data", "options", "ranks", "is_refused"),
    [
        (_Stream(9), {}, 2, True),
        ({"a": [], "b": _Stream(9)}, {}, 2, True),
        ([], {}, 2, False),
        (_Stream(9), {}, 1, False),
        (_Stream(9), {"eval_strategy": "no"}, 2, False),
        (_Stream(9), {"dataloader_num_workers": 1}, 2, False),
        (_Stream(9), {"dataloader_drop_last": True}, 2, False),
    ],
)
def test_streams_of_evaluations_are_checked_before_training(
    data: Any, options: dict[str, Any], ranks: int, is_refused: bool
) -> None:
    given = {"eval_strategy": "steps", "dataloader_num_workers": 2, "dataloader_drop_last": False}
    accelerator = SimpleNamespace()
    setattr(accelerator, shared_batches._PROCESSES_PER_BATCH, ranks)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(**given | options), accelerator=accelerator, eval_dataset=data
    )
    expected = pytest.raises(ValueError, match="2 workers read") if is_refused else nullcontext()
    with expected:
        shared_batches.check_streams_of_evaluations(trainer)


def test_labels_on_the_host_are_counted_on_the_device_of_the_model() -> None:
    """NCCL cannot sum labels on the host. The meta device stands for a GPU."""
    meshes = SimpleNamespace(device=torch.device("meta"), pp_size=1, ranks_per_batch=1)
    with (
        mock.patch("hf_moe_ep.data_parallel._meshes", return_value=meshes),
        mock.patch("hf_moe_ep.data_parallel.sum_over_ranks", side_effect=lambda x: x) as summed,
    ):
        global_token_count(nn.Module(), torch.ones(2, 5, dtype=torch.int64))
    assert summed.call_args.args[0].device.type == "meta"
