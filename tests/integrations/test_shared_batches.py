"""A bare Accelerator loop in which pairs of ranks share their batches: 4 ranks, sp_size 2."""

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from support.close import assert_close
from support.launched import FP32_BUDGET, launched
from support.parity import full_tensor
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from hf_moe_ep import data_parallel_rank, data_parallel_size, global_token_count, patch

WORLD, DATA_RANKS, NUM_ROWS = 4, 2, 14
Row = dict[str, Tensor]


def test_shared_batches() -> None:
    run_ranks(_all, WORLD)


def _all(rank: int, world: int) -> None:
    for check in (_loop_equals_one_process, _shuffled, _weighted, _streamed, _gathered, _refused):
        with launched():
            check(rank)


def _rows() -> list[Row]:
    model = tiny(num_hidden_layers=1)
    return [
        {name: value[0] for name, value in batch(model, 1, 9, seed=i, ignore=0.1 * (i % 7)).items()}
        for i in range(NUM_ROWS)
    ]


def _prepared(loader: DataLoader, accelerator: Accelerator | None = None, seed: int = 0):
    accelerator = accelerator or Accelerator(cpu=True)
    model = patch(tiny(dtype=torch.float32, seed=seed), ep_size=2, sp_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def _loop_equals_one_process(rank: int) -> None:
    """An epoch of 7 batches of 2 rows: 4 steps, in the last of which rows come a second time."""
    accelerator, model, optimizer, loader, scheduler = _prepared(
        DataLoader(_rows(), batch_size=2), seed=rank
    )
    assert (data_parallel_rank(model), data_parallel_size(model)) == (rank // 2, DATA_RANKS)
    stock = tiny(dtype=torch.float32)
    wanted = torch.optim.SGD(stock.parameters(), lr=0.1)
    rows, steps = _rows(), 0
    for step, mine in enumerate(loader):
        picked = [rows[i % NUM_ROWS] for i in range(4 * step, 4 * step + 4)]
        whole = {name: torch.stack([row[name] for row in picked]) for name in picked[0]}
        half = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        assert torch.equal(mine["input_ids"], whole["input_ids"][half]), f"step {step}"
        num_tokens = global_token_count(model, mine["labels"])
        loss = model(**mine, num_items_in_batch=num_tokens).loss * data_parallel_size(model)
        accelerator.backward(loss)
        stock(**whole, num_items_in_batch=num_tokens).loss.backward()
        for one in (optimizer, wanted):
            one.step()
            one.zero_grad()
        # As in one process, where a scheduler that is not prepared would be stepped twice here.
        scheduler.step()
        wanted.param_groups[0]["lr"] = 0.1 * 0.5 ** (step + 1)
        assert optimizer.param_groups[0]["lr"] == wanted.param_groups[0]["lr"], f"step {step}"
        steps += 1
    assert steps == len(loader) == 4
    for name, parameter in model.named_parameters():
        assert_close(name, full_tensor(parameter), stock.get_parameter(name), FP32_BUDGET)


def _shuffled(rank: int) -> None:
    """Ranks of a group shuffle alike though each has another seed, and groups share nothing."""
    torch.manual_seed(rank)
    accelerator, _, _, loader, _ = _prepared(DataLoader(range(16), batch_size=2, shuffle=True))
    orders = []
    for _ in range(2):
        mine = torch.cat(list(loader))
        by_rank = accelerator.gather(mine).view(WORLD, -1)
        assert torch.equal(by_rank[::2], by_rank[1::2])
        assert by_rank[::2].flatten().sort().values.tolist() == list(range(16))
        orders.append(mine.tolist())
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


class _Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def _streamed(rank: int) -> None:
    """9 rows: the last batch is filled up for training, and metrics leave that out."""
    accelerator, _, _, loader, _ = _prepared(DataLoader(_Stream(9), batch_size=2))
    mine, gathered = [], []
    for batch_of_rank in loader:
        mine += batch_of_rank.tolist()
        gathered += accelerator.gather_for_metrics(batch_of_rank).tolist()
    assert mine == ([0, 1, 4, 5, 8, 0] if rank < 2 else [2, 3, 6, 7, 1, 2])
    assert gathered == list(range(9))


def _weighted(rank: int) -> None:
    """Without replacement: every row once, though each rank has another seed."""
    torch.manual_seed(rank)
    sampler = WeightedRandomSampler(torch.ones(16), 16, replacement=False)
    accelerator, _, _, loader, _ = _prepared(DataLoader(range(16), batch_size=2, sampler=sampler))
    by_rank = accelerator.gather(torch.cat(list(loader))).view(WORLD, -1)
    assert torch.equal(by_rank[::2], by_rank[1::2])
    assert by_rank[::2].flatten().sort().values.tolist() == list(range(16))


def _gathered(rank: int) -> None:
    accelerator, _, _, loader, _ = _prepared(DataLoader(range(9), batch_size=2))
    tensors, objects = [], []
    for mine in loader:
        tensors += accelerator.gather_for_metrics({"x": mine})["x"].tolist()
        objects += accelerator.gather_for_metrics([f"sample {x}" for x in mine.tolist()])
    assert tensors == list(range(9))
    assert objects == [f"sample {x}" for x in range(9)]


def _refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(8)))
    with pytest.raises(ValueError, match="prepared a data loader before it saw the model"):
        _prepared(loader, accelerator)
    options = DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(ValueError, match="dispatch_batches=True sends each rank a batch"):
        _prepared(DataLoader(range(8)), Accelerator(cpu=True, dataloader_config=options))
    with pytest.raises(ValueError, match=r"makes its own batches \(batch_size=None\)"):
        _prepared(DataLoader(_Stream(8), batch_size=None), Accelerator(cpu=True))
