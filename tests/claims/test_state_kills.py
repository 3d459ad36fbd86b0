"""Ranks killed at random moments of `accelerator.save_state`: one state, whole, or an error.

Each round saves state A, takes a step to state B and saves again, into the folder of A or into the
next one of Accelerate's own names; a rank is killed (SIGKILL) in that save. Two new ranks then load
A or B to the bit, or an error says that the folder is torn: never a mixture of the two.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from support.killing import kill_later
from support.launched import launched, prepared
from support.parity import whole_state
from support.ranks import run_ranks
from support.tiny_models import batch, tiny

WORLD = 2
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


def _start(root: str, automatic: bool, seed: int) -> tuple[Accelerator, Any, Any, str | None]:
    names = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=automatic)
    accelerator = Accelerator(cpu=True, project_config=names)
    model = tiny(dtype=torch.float32, num_hidden_layers=1, seed=seed)
    _, model, optimizer = prepared(model, accelerator, ep_size=2)
    return accelerator, model, optimizer, None if automatic else f"{root}/state"


def _save_twice(
    rank: int, world: int, root: str, automatic: bool, victim: int, seconds: float
) -> None:
    with launched(**SHARDED):
        accelerator, model, optimizer, folder = _start(root, automatic, seed=0)
        for which in "AB":
            accelerator.backward(model(**batch(model, 2, 7, seed=rank)).loss)
            optimizer.step()
            optimizer.zero_grad()
            values = whole_state(model, optimizer)
            if rank == 0:
                torch.save(values, f"{root}/{which}.pt")
            dist.barrier()
            if which == "B" and rank == victim:
                kill_later(seconds)
            accelerator.save_state(folder)


def _load(rank: int, world: int, root: str, automatic: bool) -> str:
    with launched(**SHARDED):
        accelerator, model, optimizer, folder = _start(root, automatic, seed=1)
        accelerator.backward(model(**batch(model, 2, 7, seed=rank)).loss)
        optimizer.step()
        try:
            accelerator.load_state(folder)
        except ValueError as error:
            return f"refused: {error}"
        got = whole_state(model, optimizer)
    for which in "AB":
        want = torch.load(f"{root}/{which}.pt")
        if all(torch.equal(got[name], value) for name, value in want.items()):
            return which
    return "a mixture"


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_no_kill_leaves_a_mixture(rounds: int, tmp_path: Path) -> None:
    draw, found = random.Random(rounds), Counter[str]()
    for number in range(rounds):
        root = tmp_path / str(number)
        root.mkdir()
        automatic = bool(number % 2)
        arguments = (str(root), automatic, draw.randrange(WORLD), draw.uniform(0.0, 0.12))
        run_ranks(_save_twice, WORLD, *arguments, expect_errors=True, group_timeout=10.0)
        ends = run_ranks(_load, WORLD, str(root), automatic)
        assert len({end.partition(":")[0] for end in ends}) == 1, ends
        found[ends[0].partition(":")[0]] += 1
        if automatic:  # the older folder is whole
            assert ends[0] in ("A", "B"), ends
    print(dict(found))
    assert not found["a mixture"], found
