"""Ranks stall and agents are killed on two nodes, and training goes on without any help.

torchrun restarts the ranks of both nodes, and `support/agents.py` a killed agent, as a cluster
would. The run resumes from the newest complete checkpoint, and every loss is, bit by bit, that of
an undisturbed run.
"""

import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
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
# Sums of other ranks, and fp32 logits in transformers' loss.
ANOTHER_WORLD = 1e-9


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, Path]]:
    """Two nodes, and where the servers of their ranks are."""
    from support.namespaces import WHY_NOT

    if WHY_NOT:
        pytest.skip(WHY_NOT)
    servers = tmp_path_factory.mktemp("servers")
    with Nodes(2) as nodes:
        for node in range(nodes.count):
            serve(nodes, node, servers)
        yield nodes, servers


def _undisturbed(rank: int, world: int, steps: int, config: dict[str, Any]) -> list[str]:
    run = start("full", Layout("nodes", world, config), **SMALL)
    return [repr(step(run, number)) for number in range(steps)]


@cache
def _want(steps: int, config: tuple[tuple[str, Any], ...]) -> list[str]:
    return list(run_ranks(_undisturbed, 4, steps, dict(config))[0])


def _check_losses(folder: Path, config: dict[str, Any]) -> int:
    """Compare every loss that was noted, also those of steps that were taken again."""
    found = read_losses(folder)
    assert sorted(found) == list(range(len(found)))
    want = _want(len(found), tuple(config.items()))
    assert found == {number: {loss} for number, loss in enumerate(want)}
    return len(found)


def _agents(
    two: tuple[Nodes, Path], folder: Path, config: dict[str, Any], *options: str, **launch: Any
) -> Agents:
    nodes, servers = two
    job = [JOB, str(folder), "--ep_size", str(config["ep_size"])]
    job += ["--dispatcher", config.get("dispatcher", "all_to_all"), *options]
    agents = Agents(nodes, folder, job, servers, **launch)
    agents.start()
    return agents


def _said(agents: Agents) -> list[str]:
    return [agents.output(node).read_text() for node in agents.used]


def _until(agents: Agents, done: Callable[[], bool], patience: float, what: str) -> None:
    until = time.monotonic() + patience
    while not agents.look() and not done():
        if time.monotonic() > until:
            said = _said(agents)
            agents.end()
            ends = "\n".join(text[-4000:] for text in said)
            raise AssertionError(f"{what}: not within {patience:g} s\n{ends}")
        time.sleep(0.05)


EVERYONE = "default_pg of ranks 0, 1, 2, 3"
# What happens to which rank, with which config; on which nodes which group waits, and what for.
STALLS: dict[str, tuple[str, int, dict[str, Any], dict[int, str], str]] = {
    "ep 4": ("stall", 3, CONFIG, {0: EVERYONE, 1: EVERYONE}, "rank 3"),
    "ep 2": ("stall", 3, {"ep_size": 2}, {1: "mesh_ep of ranks 2, 3"}, "rank 3"),
    # It keeps the store too.
    "rank 0, SIGSTOP": ("stop", 0, CONFIG, {0: EVERYONE, 1: EVERYONE}, "rank 0, or whoever else"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STALLS)
def test_a_rank_that_stalls(two: tuple[Nodes, Path], tmp_path: Path, case: str) -> None:
    """The other ranks of its ep group give up at the timeout of `init_process_group`. Their error
    names layer, group and rank, and torchrun restarts all ranks of both nodes.
    """
    what, rank, config, waiting, missing = STALLS[case]
    patience = 15.0
    (tmp_path / f"die-{rank}-2").write_text(what)
    agents = _agents(two, tmp_path, config, "--steps", "4", "--patience", str(patience))
    _until(agents, (tmp_path / f"done-{rank}-2").exists, 120, "the misfortune")

    def told() -> bool:
        said = _said(agents)
        return all(
            re.search(
                rf"MoE layer 0 of forward 3 \(training.*\): counts, group {group}, could not be "
                rf"exchanged; {missing}",
                said[node],
            )
            for node, group in waiting.items()
        )

    # Others are asked for a few seconds; a store that is silent, for twelve.
    _until(agents, told, patience + 16, "the error")
    assert told(), _said(agents)
    _until(agents, lambda: False, 240, "the end")
    assert agents.starts == [1, 1]
    # Not from the beginning: a run that takes all steps again has the same losses.
    assert steps_taken(tmp_path) == [0, 1, 2, 3]
    assert _check_losses(tmp_path, config) == 4


# Which rank waits for ever in which step and where; which agents are killed then; which steps are
# taken; options. In a save rank 0 has noted the step already.
KILLS: dict[str, tuple[str, str, list[int], list[int], list[str]]] = {
    "in the first step": ("3-0", "stall", [1], [0, 1, 2], []),
    "of the store, in the first step": ("3-0", "stall", [0], [0, 1, 2], []),
    "both, in the first step": ("3-0", "stall", [0, 1], [0, 1, 2], []),
    "both": ("3-1", "stall", [0, 1], [0, 1, 2], []),
    "in the first save": ("3-0", "stall in save", [1], [0, 0, 1, 2], []),
    "in a save": ("3-1", "stall in save", [1], [0, 1, 1, 2], []),
    "of the store, in a save": ("0-1", "stall in save", [0], [0, 1, 1, 2], []),
    "both, in a save": ("3-1", "stall in save", [0, 1], [0, 1, 1, 2], []),
    "in a save in the background": ("3-1", "stall in save", [1], [], ["--background"]),
    "none, in a save in the background": (
        *("3-1", "stall in save", [], []),
        ["--background", "--patience", "15"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KILLS)
def test_agents_that_are_killed_there(two: tuple[Nodes, Path], tmp_path: Path, case: str) -> None:
    """Ranks go on from the newest complete checkpoint."""
    at, what, killed, steps, options = KILLS[case]
    (tmp_path / f"die-{at}").write_text(what)
    agents = _agents(two, tmp_path, CONFIG, "--steps", "3", *options)
    _until(agents, (tmp_path / f"done-{at}").exists, 120, "the misfortune")
    for node in killed:
        agents.kill(node)
    _until(agents, lambda: False, 240, "the end")
    assert all(agents.starts[node] == 2 for node in killed), agents.starts
    taken = steps_taken(tmp_path)
    # In the background: nobody knows how far the others are when it stalls.
    assert taken == steps if steps else taken in ([0, 1, 1, 2], [0, 1, 2, 1, 2]), taken
    assert _check_losses(tmp_path, CONFIG) == 3
    if not killed:
        number = at.partition("-")[2]
        want = rf"saving \S+/step-{int(number) + 1}: ranks did not meet; rank 3 stopped"
        assert all(re.search(want, said) for said in _said(agents)), _said(agents)


def _check_near(folder: Path, config: dict[str, Any], steps: int) -> None:
    found = read_losses(folder)
    assert sorted(found) == list(range(steps))
    for number, want in enumerate(_want(steps, tuple(config.items()))):
        for loss in found[number]:
            assert abs(float(loss) - float(want)) <= ANOTHER_WORLD * float(want), (number, loss)


@pytest.mark.slow
def test_fewer_nodes(two: tuple[Nodes, Path], tmp_path: Path) -> None:
    """One node goes on from what two nodes saved, with as many ranks or half. An ep_size that does
    not fit is an error that lists the sizes that fit, and no checkpoint is lost.
    """
    agents = _agents(two, tmp_path, CONFIG, "--steps", "2")
    _until(agents, lambda: False, 240, "the end of two nodes")
    for ranks, steps in ((4, 3), (2, 4)):
        alone = {"ranks": ranks, "num_nodes": "1", "used": [0], "restarts": 0}
        if ranks == 2:
            agents = _agents(two, tmp_path, CONFIG, "--steps", str(steps), **alone)
            want = r"ep_size \(4\) must divide world size .* \(2 / 1 = 2\); try 1, 2"
            _until(agents, lambda: agents.starts[0] > 1, 120, "an error")  # noqa: B023
            agents.end()
            assert re.search(want, _said(agents)[0]), _said(agents)[0][-4000:]
            assert len(steps_taken(tmp_path)) == 3
        config = CONFIG | {"ep_size": ranks}
        agents = _agents(two, tmp_path, config, "--steps", str(steps), **alone)
        _until(agents, lambda: False, 240, f"the end of one node with {ranks} ranks")
        assert agents.starts[0] == 1, _said(agents)[0][-4000:]
    assert steps_taken(tmp_path) == [0, 1, 2, 3]
    _check_near(tmp_path, CONFIG, 4)
    assert "random generators are seeded anew" in _said(agents)[0]


@pytest.mark.slow
def test_a_node_that_never_comes_back(two: tuple[Nodes, Path], tmp_path: Path) -> None:
    """With `--nnodes=1:2` the other node goes on alone from the newest complete checkpoint."""
    config = {"ep_size": 2}
    (tmp_path / "die-3-2").write_text("stall")
    agents = _agents(two, tmp_path, config, "--steps", "4", num_nodes="1:2")
    _until(agents, (tmp_path / "done-3-2").exists, 120, "the misfortune")
    agents.lose(1)
    _until(agents, lambda: False, 240, "the end")
    assert steps_taken(tmp_path) == [0, 1, 2, 3]
    _check_near(tmp_path, config, 4)
    assert "random generators are seeded anew" in _said(agents)[0]


def _go_on(agents: Agents, folder: Path, newest: int, patience: float) -> None:
    """Wait for a step: the one behind the newest complete checkpoint, none before it."""
    before = len(steps_taken(folder))
    _until(agents, lambda: len(steps_taken(folder)) > before, patience, "a step")
    assert steps_taken(folder)[before] >= newest


def _kills(two: tuple[Nodes, Path], folder: Path, kills: int, patience: float) -> dict[str, float]:
    rng, seen = random.Random(1), {"kills": 0, "torn": 0, "of the store": 0, "longest": 0.0}
    agents = _agents(two, folder, CONFIG, *OPTIONS)
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
def test_agents_that_are_killed(two: tuple[Nodes, Path], tmp_path: Path, kills: int) -> None:
    """Kills come at random moments. The first node keeps the store of the agents."""
    seen = _kills(two, tmp_path, kills, 180)
    steps = _check_losses(tmp_path, CONFIG)
    print(f"{seen}, {steps} steps")
    assert seen["kills"] == kills and 0 < seen["of the store"] < kills
    # A step that was killed before it was saved is taken again.
    assert steps > kills // 2
