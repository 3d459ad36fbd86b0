"""After a kill during save_checkpoint, a run resumes from a complete checkpoint.

In each round two ranks resume from the folder, or start. They save after each step, in some rounds
in the background. One rank is killed (SIGKILL) at a random moment, mostly during a save. Every loss
must equal the loss of an uninterrupted run at the same step.

Other kinds of saves are killed in test_hub_memory_and_kills.py (`save_pretrained`),
test_state_kills.py (`save_state` and the Trainer), checkpoints/test_switch.py (before each file
operation) and checkpoints/test_extra_tensors.py.
"""

import os
import random
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
from support.jobs.resume import Layout, Run, start, step
from support.killing import kill_later
from support.ranks import RankError, run_ranks

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training import folder as training_folder
from hf_moe_ep.checkpoints.training.load import load_checkpoint
from hf_moe_ep.checkpoints.training.save import save_checkpoint
from hf_moe_ep.ranks import all_ranks
from hf_moe_ep.ranks.background import SaveHandle

# kind of run: (the layouts of even and odd rounds, the number of layers)
RUNS = {
    "ep": ((Layout("ep2", 2, {"ep_size": 2}), Layout("ep1", 2, {"ep_size": 1})), 1),
    "stages": ((Layout("pp2", 2, {"pp_size": 2}),) * 2, 2),
}
MODULES = {"folder": training_folder, "manifest": manifest}
# (the rank that dies; the seconds after the start of a save, or the function in which it dies; the
# number of the save in the round)
Kill = tuple[int, float | str, int]
BUDGET = 1e-9  # transformers' loss has fp32 logits, and another layout sums in another order


def _list_folders(root: Path) -> list[Path]:
    return list(root.glob("step-*"))


def _start(kind: str, round_: int, seed: int = 0) -> Run:
    layouts, num_layers = RUNS[kind]
    return start("full", layouts[round_ % 2], seed=seed, num_hidden_layers=num_layers)


def _compute_reference_losses(rank: int, world: int, kind: str, steps: int) -> list[float]:
    run = _start(kind, 0)
    return [step(run, number) for number in range(steps)]


def _resume_and_die(rank: int, world: int, kind: str, root: str, round_: int, kill: Kill) -> None:
    """Resume, write every loss to a file and save after every step, until the kill."""
    victim, moment, after = kill
    run = _start(kind, round_, seed=50 + round_)
    asynchronous, first = round_ % 3 != 0, 0
    if any((path / "manifest.json").exists() for path in _list_folders(Path(root))):
        first = load_checkpoint(root, run.model, run.optimizer, run.scheduler)["step"]
    else:
        run = _start(kind, round_)
    all_ranks.PATIENCE = timedelta(seconds=5)  # instead of 5 minutes for the killed rank
    handle = SaveHandle(Path(root))  # a handle without a save, so that wait() returns at once
    for number in range(first, first + 4):
        loss = step(run, number)
        if rank == 0:
            with open(f"{root}/losses", "a") as log:
                log.write(f"{number} {loss!r} {round_}\n")
        if rank == victim and number == first + after:
            if isinstance(moment, str):
                handle.wait()  # the previous save may still run, and must not fail
            _schedule_kill(moment)
        handle = save_checkpoint(
            f"{root}/step-{number + 1}",
            run.model,
            run.optimizer,
            run.scheduler,
            progress={"step": number + 1},
            asynchronous=asynchronous,
        )
    handle.wait()
    time.sleep(0.2)


def _schedule_kill(moment: float | str) -> None:
    """Kill this process after `moment` seconds, or when the function `moment` is called."""
    if isinstance(moment, str):
        module, _, name = moment.rpartition(".")
        setattr(MODULES[module], name, lambda *args, **kw: os.kill(os.getpid(), signal.SIGKILL))
        return
    kill_later(moment)


def _run_rounds(kind: str, root: Path, kills: list[Kill]) -> dict[str, int]:
    counts = {"died": 0, "torn": 0, "resumed": 0}
    root.mkdir()
    for round_, kill in enumerate(kills):
        before = {path.name for path in _list_folders(root) if (path / "manifest.json").exists()}
        try:
            run_ranks(_resume_and_die, 2, kind, str(root), round_, kill, timeout=90)
        except RankError as error:
            assert f"rank {kill[0]} of 2 raised ProcessDied" in str(error), error
            wrong = ("raised ValueError", "raised AssertionError")
            assert not any(text in str(error) for text in wrong), error
            counts["died"] += 1
        torn = [path for path in _list_folders(root) if not (path / "manifest.json").exists()]
        counts["torn"] += bool(torn)
        counts["resumed"] += bool(before)
        complete = {path.name for path in _list_folders(root)} - {path.name for path in torn}
        assert before <= complete, "a complete checkpoint must stay complete"
        for name in complete:
            manifest.check(root / name)  # a folder with a manifest must be complete
        if complete:
            newest = max(complete, key=lambda name: int(name.partition("-")[2]))
            assert manifest.find_newest_complete(root).name == newest
            for name in sorted(complete - {newest})[:-1]:
                shutil.rmtree(root / name)
    return counts


def _check_losses(kind: str, root: Path, kills: list[Kill]) -> tuple[dict[str, int], int]:
    counts = _run_rounds(kind, root, kills)
    lines = [line.split() for line in (root / "losses").read_text().splitlines()]
    last = max(int(number) for number, *_ in lines)
    want = run_ranks(_compute_reference_losses, 2, kind, last + 1)[0]
    for number, loss, round_ in lines:
        got = float(loss)
        assert abs(got - want[int(number)]) <= BUDGET * want[int(number)], (number, loss, round_)
    return counts, last


@pytest.mark.slow
@pytest.mark.parametrize(
    "points",
    [
        ("folder.write_tensors", "manifest.write"),
        ("manifest.write_atomically", "folder.write_json", "folder.write_tensors"),
    ],
)
def test_kills_between_the_steps_of_a_save(points: tuple[str, ...], tmp_path: Path) -> None:
    """Each kill leaves a torn folder."""
    kills: list[Kill] = [(index % 2, point, 1) for index, point in enumerate(points)]
    counts, last = _check_losses("ep", tmp_path / "run", kills)
    num_kills = len(points)
    assert counts == {"died": num_kills, "torn": num_kills, "resumed": num_kills - 1}, last
    assert last >= num_kills


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_kills"), [("ep", 40), ("stages", 20)])
def test_kills_at_random_moments(kind: str, num_kills: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    kills: list[Kill] = [
        (rng.randrange(2), 10 ** rng.uniform(-3.0, -0.8), rng.randrange(4))
        for _ in range(num_kills)
    ]
    counts, last = _check_losses(kind, tmp_path / "run", kills)
    print(counts, last)
    assert counts["died"] == num_kills, (counts, last)
    # The number of kills during a save depends on the machine.
    assert counts["torn"] >= num_kills // 8, (counts, last)
    assert counts["resumed"] >= num_kills * 7 // 8, (counts, last)
