"""Ranks killed at random moments of save_checkpoint: what is resumed from is always complete.

Each round: two ranks resume from the folder (or start), take steps and save after each, in the
background or not; at a random moment one of them is killed (SIGKILL), mostly while it saves. The
next round's first loss must be that of the uninterrupted run at that step.
"""

import os
import random
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
from support.jobs.resume import Layout, start, step
from support.killing import kill_later
from support.ranks import RankError, run_ranks

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training import folder as training_folder
from hf_moe_ep.checkpoints.training.load import load_checkpoint
from hf_moe_ep.checkpoints.training.save import save_checkpoint
from hf_moe_ep.ranks import together as meet
from hf_moe_ep.ranks.background import SaveHandle

LAYOUTS = (Layout("ep2", 2, {"ep_size": 2}), Layout("ep1", 2, {"ep_size": 1}))
SMALL = {"num_hidden_layers": 1}
MODULES = {"folder": training_folder, "manifest": manifest}
# Which rank dies, when (seconds into a save, or the call of a function), in which save of a round.
Kill = tuple[int, float | str, int]
BUDGET = 1e-9  # fp32 logits in transformers' loss, summed by other ranks


def _folders(root: Path) -> list[Path]:
    return list(root.glob("step-*"))


def _reference(rank: int, world: int, steps: int) -> list[float]:
    run = start("full", LAYOUTS[0], **SMALL)
    return [step(run, number) for number in range(steps)]


def _go_on(rank: int, world: int, root: str, round_: int, kill: Kill) -> None:
    """Resume, note every loss, save every step; rank `kill[0]` dies `kill[1]` s into a save."""
    victim, moment, after = kill
    run = start("full", LAYOUTS[round_ % 2], seed=50 + round_, **SMALL)
    asynchronous, first = round_ % 3 != 0, 0
    if any((path / "manifest.json").exists() for path in _folders(Path(root))):
        first = load_checkpoint(root, run.model, run.optimizer, run.scheduler)["step"]
    else:
        run = start("full", LAYOUTS[round_ % 2], **SMALL)
    meet.PATIENCE = timedelta(seconds=5)  # a survivor is not to wait for the dead for minutes
    handle = SaveHandle(Path(root))  # of no save
    for number in range(first, first + 4):
        loss = step(run, number)
        if rank == 0:
            with open(f"{root}/losses", "a") as log:
                log.write(f"{number} {loss!r} {round_}\n")
        if rank == victim and number == first + after:
            if isinstance(moment, str):
                handle.wait()  # not in the save before, which may still run
            _die(moment)
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


def _die(moment: float | str) -> None:
    """In so many seconds, whatever runs then; or when a function is called."""
    if isinstance(moment, str):
        module, _, name = moment.rpartition(".")
        setattr(MODULES[module], name, lambda *args, **kw: os.kill(os.getpid(), signal.SIGKILL))
        return
    kill_later(moment)


def _rounds(root: Path, kills: list[Kill]) -> dict[str, int]:
    seen = {"died": 0, "torn": 0, "resumed": 0}
    root.mkdir()
    for round_, kill in enumerate(kills):
        before = {path.name for path in _folders(root) if (path / "manifest.json").exists()}
        try:
            run_ranks(_go_on, 2, str(root), round_, kill, timeout=90)
        except RankError as error:
            assert f"rank {kill[0]} of 2 raised ProcessDied" in str(error), error
            wrong = ("raised ValueError", "raised AssertionError")
            assert not any(text in str(error) for text in wrong), error
            seen["died"] += 1
        torn = [path for path in _folders(root) if not (path / "manifest.json").exists()]
        seen["torn"] += bool(torn)
        seen["resumed"] += bool(before)
        complete = {path.name for path in _folders(root)} - {path.name for path in torn}
        assert before <= complete, "what was complete stays so"
        for name in complete:
            manifest.check(root / name)  # a manifest means every byte
        if complete:
            newest = max(complete, key=lambda name: int(name.partition("-")[2]))
            assert manifest.newest_complete(root).name == newest
            for name in sorted(complete - {newest})[:-1]:
                shutil.rmtree(root / name)
    return seen


def _check(root: Path, kills: list[Kill]) -> tuple[dict[str, int], int]:
    seen = _rounds(root, kills)
    lines = [line.split() for line in (root / "losses").read_text().splitlines()]
    last = max(int(number) for number, *_ in lines)
    want = run_ranks(_reference, 2, last + 1)[0]
    for number, loss, round_ in lines:
        got = float(loss)
        assert abs(got - want[int(number)]) <= BUDGET * want[int(number)], (number, loss, round_)
    return seen, last


@pytest.mark.parametrize(
    "points",
    [
        ("folder.write_tensors", "manifest.write"),
        pytest.param(
            ("manifest.write_atomically", "folder.write_json", "folder.write_tensors"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kills_between_the_parts_of_a_save(points: tuple[str, ...], tmp_path: Path) -> None:
    """Each kill leaves a torn folder."""
    kills: list[Kill] = [(index % 2, point, 1) for index, point in enumerate(points)]
    seen, last = _check(tmp_path / "run", kills)
    count = len(points)
    assert seen == {"died": count, "torn": count, "resumed": count - 1}, (seen, last)
    assert last >= count


@pytest.mark.slow
def test_forty_kills(tmp_path: Path) -> None:
    rng = random.Random(0)
    kills: list[Kill] = [
        (rng.randrange(2), 10 ** rng.uniform(-3.0, -0.8), rng.randrange(4)) for _ in range(40)
    ]
    seen, last = _check(tmp_path / "run", kills)
    print(seen, last)
    assert seen["died"] == 40 and seen["torn"] >= 10 and seen["resumed"] >= 35, (seen, last)
