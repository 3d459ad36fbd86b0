"""After a kill during `accelerator.save_state`, a load gives one complete state or an error.

Each round saves state A, takes a step to state B and saves again, in the folder of A or in the next
folder of Accelerate's automatic naming. A rank is killed (SIGKILL) during the second save. Two new
ranks then load A or B bit by bit, or raise an error because the folder is torn; they never load a
mixture of A and B. With pipeline stages a rank compares the state of its stage.
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


def _start(
    root: str, automatic: bool, sizes: dict[str, int], seed: int
) -> tuple[Accelerator, Any, Any, str | None]:
    names = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=automatic)
    accelerator = Accelerator(cpu=True, project_config=names)
    num_layers = sizes.get("pp_size", 1)
    model = tiny(dtype=torch.float32, num_hidden_layers=num_layers, seed=seed)
    _, model, optimizer = prepared(model, accelerator, **sizes)
    return accelerator, model, optimizer, None if automatic else f"{root}/state"


def _rows(model: Any, sizes: dict[str, int], rank: int) -> Any:
    return batch(model, 2, 7, seed=0 if "pp_size" in sizes else rank)


def _save_twice(
    rank: int,
    world: int,
    root: str,
    automatic: bool,
    sizes: dict[str, int],
    victim: int,
    seconds: float,
) -> None:
    with launched(**SHARDED):
        accelerator, model, optimizer, folder = _start(root, automatic, sizes, seed=0)
        for which in "AB":
            accelerator.backward(model(**_rows(model, sizes, rank)).loss)
            optimizer.step()
            optimizer.zero_grad()
            torch.save(whole_state(model, optimizer), f"{root}/{which}-{rank}.pt")
            dist.barrier()
            if which == "B" and rank == victim:
                kill_later(seconds)
            accelerator.save_state(folder)


def _load(rank: int, world: int, root: str, automatic: bool, sizes: dict[str, int]) -> str:
    with launched(**SHARDED):
        accelerator, model, optimizer, folder = _start(root, automatic, sizes, seed=1)
        accelerator.backward(model(**_rows(model, sizes, rank)).loss)
        optimizer.step()
        try:
            accelerator.load_state(folder)
        except ValueError as error:
            return f"refused: {error}"
        got = whole_state(model, optimizer)
    for which in "AB":
        want = torch.load(f"{root}/{which}-{rank}.pt")
        if all(torch.equal(got[name], value) for name, value in want.items()):
            return which
    return "a mixture"


@pytest.mark.parametrize(
    ("rounds", "sizes"),
    [
        (1, {"ep_size": 2}),
        pytest.param(20, {"ep_size": 2}, marks=pytest.mark.slow),
        pytest.param(20, {"pp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["1", "20", "20, stages"],
)
def test_after_a_kill_no_mixture_is_loaded(
    rounds: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    generator, outcomes = random.Random(rounds), Counter[str]()
    for number in range(rounds):
        root = tmp_path / str(number)
        root.mkdir()
        automatic = bool(number % 2)
        victim, seconds = generator.randrange(WORLD), generator.uniform(0.0, 0.12)
        arguments = (str(root), automatic, sizes, victim, seconds)
        run_ranks(_save_twice, WORLD, *arguments, expect_errors=True, group_timeout=10.0)
        loaded = run_ranks(_load, WORLD, str(root), automatic, sizes)
        kinds = {outcome.partition(":")[0] for outcome in loaded}
        assert len(kinds) == 1, f"round {number}: ranks load a mixture {loaded}"
        outcomes[loaded[0].partition(":")[0]] += 1
        if automatic:  # the folder of A is complete
            assert loaded[0] in ("A", "B"), loaded
    print(dict(outcomes))
    assert not outcomes["a mixture"], outcomes
