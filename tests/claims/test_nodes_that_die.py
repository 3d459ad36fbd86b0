"""On two nodes ranks stall and agents are killed: training goes on, nobody does anything.

Each rank of two nodes, and each agent that was killed, is started again by torchrun or by whatever
looks after a machine (`support/agents.py`). Then it goes on from the newest complete checkpoint,
and every loss is, to the last bit, that of a run to which nothing happened.
"""

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.agents import Agents
from support.jobs.going_on import SMALL, read_losses, steps_taken
from support.jobs.resume import Layout, start, step
from support.namespaces import Nodes
from support.preloaded import serve
from support.ranks import run_ranks
from support.scripts import ROOT

from hf_moe_ep.checkpoints.storage import manifest

JOB = str(ROOT / "tests" / "support" / "jobs" / "going_on.py")
CONFIG = {"ep_size": 4, "dispatcher": "hierarchical", "node_size": 2}
OPTIONS = ["--steps", "100000", "--patience", "60", "--until_told"]


@pytest.fixture(autouse=True)
def _allowed() -> None:
    from support.namespaces import WHY_NOT

    if WHY_NOT:
        pytest.skip(WHY_NOT)


def _undisturbed(rank: int, world: int, steps: int, config: dict[str, Any]) -> list[str]:
    run = start("full", Layout("nodes", world, config), **SMALL)
    return [repr(step(run, number)) for number in range(steps)]


def _check_losses(folder: Path, config: dict[str, Any]) -> int:
    """Compare every loss that was noted, also those of steps that were taken again."""
    found = read_losses(folder)
    assert sorted(found) == list(range(len(found)))
    want = run_ranks(_undisturbed, 4, len(found), config)[0]
    assert found == {number: {loss} for number, loss in enumerate(want)}
    return len(found)


def _agents(nodes: Nodes, folder: Path, config: dict[str, Any], *options: str) -> Agents:
    for node in range(nodes.count):
        serve(nodes, node, folder)
    job = [JOB, str(folder), "--ep_size", str(config["ep_size"])]
    job += ["--dispatcher", config.get("dispatcher", "all_to_all"), *options]
    agents = Agents(nodes, folder, job)
    agents.start()
    return agents


def _until(agents: Agents, done: Callable[[], bool], patience: float, what: str) -> None:
    until = time.monotonic() + patience
    while not agents.look() and not done():
        if time.monotonic() > until:
            ends = "\n".join(agents.output(node).read_text()[-4000:] for node in range(2))
            raise AssertionError(f"{what}: not within {patience:g} s\n{ends}")
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "waiting"),
    [(CONFIG, {0: "default_pg of ranks 0, 1, 2, 3", 1: "default_pg of ranks 0, 1, 2, 3"})]
    + [({"ep_size": 2}, {1: "mesh_ep of ranks 2, 3"})],
    ids=["ep 4", "ep 2"],
)
def test_a_rank_that_stalls(
    tmp_path: Path, config: dict[str, Any], waiting: dict[int, str]
) -> None:
    """The others of its ep group give up at the timeout of `init_process_group`, with an error that
    names layer and group; torchrun starts all ranks of both nodes anew.
    """
    (tmp_path / "die-3-2").write_text("stall")
    with Nodes(2) as nodes:
        agents = _agents(nodes, tmp_path, config, "--steps", "4", "--patience", "15")
        _until(agents, lambda: False, 240, "the end")
        said = [agents.output(node).read_text() for node in range(2)]
    assert agents.starts == [1, 1]
    for node, group in waiting.items():
        where = rf"MoE layer 0 of forward 3 \(training.*\): counts, group {group}, could not be"
        assert re.search(where, said[node]), said[node][-4000:]
    assert (tmp_path / "done-3-2").exists()
    # Not from the beginning: a run that takes all steps again has the same losses.
    assert steps_taken(tmp_path) == [0, 1, 2, 3]
    assert _check_losses(tmp_path, config) == 4


def _go_on(agents: Agents, folder: Path, newest: int, patience: float) -> None:
    """Wait for a step: the one behind the newest complete checkpoint, none before it."""
    before = len(steps_taken(folder))
    _until(agents, lambda: len(steps_taken(folder)) > before, patience, "a step")
    assert steps_taken(folder)[before] >= newest


def _kills(folder: Path, kills: int, patience: float) -> dict[str, float]:
    rng, seen = random.Random(1), {"kills": 0, "torn": 0, "of the store": 0, "longest": 0.0}
    with Nodes(2) as nodes:
        agents = _agents(nodes, folder, CONFIG, *OPTIONS)
        newest = 0
        for _ in range(kills):
            began = time.monotonic()
            _go_on(agents, folder, newest, patience)
            seen["longest"] = max(seen["longest"], time.monotonic() - began)
            time.sleep(rng.uniform(0.0, 2.0))
            node = rng.randrange(2)
            agents.kill(node)
            seen["kills"] += 1
            seen["of the store"] += node == 0
            saved = {int(p.name[5:]): p / manifest.MANIFEST for p in folder.glob("step-*")}
            newest = max((number for number, file in saved.items() if file.exists()), default=0)
            seen["torn"] += any(not file.exists() for file in saved.values())
        _go_on(agents, folder, newest, patience)
        (folder / "stop").touch()
        _until(agents, lambda: False, patience, "the end")
        assert min(agents.starts) >= 2 and sum(agents.starts) >= kills + 2, agents.starts
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 20])
def test_agents_that_are_killed(tmp_path: Path, kills: int) -> None:
    """At random moments, on either node; the first one keeps the store in which agents meet."""
    seen = _kills(tmp_path, kills, 180)
    steps = _check_losses(tmp_path, CONFIG)
    print(f"{seen}, {steps} steps")
    assert seen["kills"] == kills and 0 < seen["of the store"] < kills
    # A step that was killed before it was saved is taken again.
    assert steps > kills // 2
