"""Saved at one layout, loaded at another: the same bits, and the same next step."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close
from resume_job import ORIGIN, Layout, Run, assert_equal, draws, everything, start, step
from run_ranks import run_ranks
from torch import Tensor

from hf_moe_ep.training_state import load_checkpoint, save_checkpoint

BUDGET = 1e-10  # fp64, other orders of summation
PROGRESS = {"step": 2, "position": (3, 4), "seen": {5: [0.1, None, "x"]}}
LAYOUTS = {
    "full": [
        Layout("ep4", 4, {"ep_size": 4}),
        Layout("ep1", 4, {"ep_size": 1}),
        Layout("hsdp", 4, {"ep_size": 2, "dp_replicate_size": 2}),
        Layout("sp2", 4, {"ep_size": 2, "sp_size": 2}),
        Layout("dim1", 4, {"ep_size": 1, "expert_shard_dim": 1}),
        Layout("two", 2, {"ep_size": 2}),
        Layout("one", 1, {"ep_size": 1}),
        Layout("unsharded", 1),
    ],
    "lora": [
        Layout("ep4", 4, {"ep_size": 4}),
        Layout("dim1", 4, {"ep_size": 1, "expert_shard_dim": 1}),
        Layout("two", 2, {"ep_size": 1}),
        Layout("unsharded", 1),
    ],
    "vision": [Layout("two", 2, {"ep_size": 1})],
}


def _after_step(where: str, run: Run, want: dict[str, Any]) -> None:
    step(run, 2)
    got = everything(run)
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert_close(f"{where}: next step: {name}", got[name], value, BUDGET)
    assert got["scheduler"]["last_epoch"] == 3


def _save(rank: int, world: int, folder: str, kind: str) -> list[float]:
    torch.manual_seed(rank)
    run = start(kind, ORIGIN)
    for number in range(2):
        step(run, number)
    with torch.no_grad():  # leaves units gathered
        run.model.eval()(input_ids=torch.tensor([[1, 2, 3]]))
        run.model.train()
    save_checkpoint(f"{folder}/origin", run.model, run.optimizer, run.scheduler, progress=PROGRESS)
    drawn, want = draws(), everything(run)
    step(run, 2)
    after = everything(run)
    if rank == 0:
        torch.save((want, after), f"{folder}/wanted.pt")
    return drawn


def _load(
    rank: int, world: int, folder: str, kind: str, layouts: list[Layout], come: str, leave: str
) -> list[Any]:
    """Load `come`, compare, save as `leave`, step; by layout (random numbers, warnings)."""
    want, after = torch.load(f"{folder}/wanted.pt", weights_only=False)
    seen = []
    for layout in layouts:
        torch.manual_seed(100 + rank)
        run = start(kind, layout, seed=7)
        step(run, 9)  # a state to be replaced
        with torch.no_grad():
            run.model.eval()(input_ids=torch.tensor([[1, 2, 3]]))
            run.model.train()
        where = f"{kind} {come.format(layout.name)} at {layout.name}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            progress = load_checkpoint(
                f"{folder}/{come.format(layout.name)}", run.model, run.optimizer, run.scheduler
            )
        about = [str(w.message) for w in caught if "seeded anew" in str(w.message)]
        seen.append((draws(), about))
        assert progress == PROGRESS, progress
        assert_equal(where, everything(run), want)
        if leave:
            save_checkpoint(
                f"{folder}/{leave.format(layout.name)}",
                run.model,
                run.optimizer,
                run.scheduler,
                progress=progress,
            )
        _after_step(where, run, after)
        if dist.is_initialized():
            dist.barrier()
    return seen


def _back(rank: int, world: int, folder: str, kind: str, names: list[str]) -> None:
    for name in names:
        _load(rank, world, folder, kind, [ORIGIN], name, "")


@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_layout_to_any_other_and_back(tmp_path: Path, kind: str) -> None:
    folder = str(tmp_path)
    drawn = run_ranks(_save, 4, folder, kind)
    for world in (4, 2, 1):
        layouts = [layout for layout in LAYOUTS[kind] if layout.world == world and layout.config]
        if not layouts:
            continue
        ranks = run_ranks(_load, world, folder, kind, layouts, "origin", "from-{}")
        for index, layout in enumerate(layouts):
            numbers = [seen[index][0] for seen in ranks]
            texts = [text for seen in ranks for text in seen[index][1]]
            if layout.data_ranks == ORIGIN.data_ranks:
                assert numbers == drawn and not texts, layout
            else:
                assert len({tuple(n) for n in [*numbers, *drawn]}) == world + 4, "all differ"
                assert len(texts) == 1 and "by 4 data ranks" in texts[0], texts
                assert f"here are {layout.data_ranks} on cpu" in texts[0]
    for layout in LAYOUTS[kind]:
        if not layout.config:
            _load(0, 1, folder, kind, [layout], "origin", "from-{}")
    run_ranks(_back, 4, folder, kind, [f"from-{layout.name}" for layout in LAYOUTS[kind]])
