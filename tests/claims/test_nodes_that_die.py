"""After a stalled rank or a killed torchrun agent, training on two nodes resumes by itself.

torchrun restarts the ranks of both nodes. As a cluster would, support/agents.py restarts a killed
agent. The run resumes from the newest complete checkpoint, and every loss equals that of an
undisturbed run bit by bit.
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
from support.jobs.going_on import read_losses, steps_taken
from support.jobs.resume import Layout, start, step
from support.namespaces import Nodes, skip_without_namespaces
from support.preloaded import serve
from support.ranks import run_ranks
from support.scripts import ROOT

from hf_moe_ep.checkpoints.storage import manifest

JOB = str(ROOT / "tests" / "support" / "jobs" / "going_on.py")
CONFIG = {"ep_size": 4, "dispatcher": "hierarchical", "node_size": 2}
OPTIONS = ["--steps", "100000", "--patience", "60", "--until_told"]
# On another number of ranks, sums have another order, and transformers' loss has fp32 logits.
OTHER_WORLD_BUDGET = 1e-9
KILLED = 20


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, Path]]:
    """Yield two nodes, and the folder with the sockets of the servers that start their ranks."""
    skip_without_namespaces()
    servers = tmp_path_factory.mktemp("servers")
    with Nodes(2) as nodes:
        for node in range(nodes.count):
            serve(nodes, node, servers)
        yield nodes, servers


def _run_undisturbed(rank: int, world: int, steps: int, config: dict[str, Any]) -> list[str]:
    run = start("full", Layout("nodes", world, config), num_hidden_layers=1)
    return [repr(step(run, number)) for number in range(steps)]


@cache
def _read_undisturbed_losses(steps: int, config: tuple[tuple[str, Any], ...]) -> list[str]:
    return list(run_ranks(_run_undisturbed, 4, steps, dict(config))[0])


def _check_losses(folder: Path, config: dict[str, Any]) -> int:
    """Compare every written loss, also of repeated steps, and return the number of steps."""
    losses = read_losses(folder)
    assert sorted(losses) == list(range(len(losses)))
    want = _read_undisturbed_losses(len(losses), tuple(config.items()))
    assert losses == {number: {loss} for number, loss in enumerate(want)}
    return len(losses)


def _start_agents(
    two_nodes: tuple[Nodes, Path],
    folder: Path,
    config: dict[str, Any],
    *options: str,
    **launch: Any,
) -> Agents:
    nodes, servers = two_nodes
    job = [JOB, str(folder), "--ep_size", str(config["ep_size"])]
    job += ["--dispatcher", config.get("dispatcher", "all_to_all"), *options]
    agents = Agents(nodes, folder, job, servers, **launch)
    agents.start()
    return agents


def _read_outputs(agents: Agents) -> list[str]:
    return [agents.output(node).read_text() for node in agents.used]


def _wait_until(agents: Agents, done: Callable[[], bool], patience: float, what: str) -> None:
    deadline = time.monotonic() + patience
    while not agents.look() and not done():
        if time.monotonic() > deadline:
            outputs = _read_outputs(agents)
            agents.end()
            ends = "\n".join(text[-4000:] for text in outputs)
            raise AssertionError(f"{what}: not within {patience:g} s\n{ends}")
        time.sleep(0.05)


EVERYONE = "mesh_of_all_ranks of ranks 0, 1, 2, 3"
# name: (the action of the rank, the rank, config, {node: the group that waits there}, the rank that
# the error names).
STALLS: dict[str, tuple[str, int, dict[str, Any], dict[int, str], str]] = {
    "ep 4": ("stall", 3, CONFIG, {0: EVERYONE, 1: EVERYONE}, "rank 3"),
    "ep 2": ("stall", 3, {"ep_size": 2}, {1: "mesh_ep of ranks 2, 3"}, "rank 3"),
    # Rank 0 hosts the store as well.
    "rank 0, SIGSTOP": ("stop", 0, CONFIG, {0: EVERYONE, 1: EVERYONE}, "rank 0, or another rank"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STALLS)
def test_after_a_stall_the_run_resumes(
    two_nodes: tuple[Nodes, Path], tmp_path: Path, case: str
) -> None:
    """The other ranks of the stalled rank's ep group raise at the timeout of `init_process_group`.
    Their error names layer, group and rank, and torchrun restarts all ranks of both nodes.
    """
    failure, rank, config, waiting, missing = STALLS[case]
    patience = 15.0
    (tmp_path / f"die-{rank}-2").write_text(failure)
    agents = _start_agents(two_nodes, tmp_path, config, "--steps", "4", "--patience", str(patience))
    _wait_until(agents, (tmp_path / f"done-{rank}-2").exists, 120, "the stall")

    def ranks_have_raised() -> bool:
        outputs = _read_outputs(agents)
        return all(
            re.search(
                rf"MoE layer 0 of forward 3 \(training.*\): counts, group {group}, could not be "
                rf"exchanged; {missing}",
                outputs[node],
            )
            for node, group in waiting.items()
        )

    # To name the missing rank, an error asks the store for a few seconds, a silent store for 12.
    _wait_until(agents, ranks_have_raised, patience + 16, "the error")
    assert ranks_have_raised(), _read_outputs(agents)
    _wait_until(agents, lambda: False, 240, "the end")
    assert agents.starts == [1, 1]
    # The run resumed at step 2. The losses alone would not show a restart from the beginning.
    assert steps_taken(tmp_path) == [0, 1, 2, 3]
    assert _check_losses(tmp_path, config) == 4


# name: ("rank-step" of the rank that stalls, where it stalls, nodes whose agents are then killed,
# the steps that are taken, options). Rank 0 has written the loss of a step before the step's save.
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
def test_after_a_stall_and_a_kill_the_run_resumes(
    two_nodes: tuple[Nodes, Path], tmp_path: Path, case: str
) -> None:
    """Agents are killed at a known point, at which a rank stalls and the others wait for it."""
    rank_and_step, failure, killed, steps, options = KILLS[case]
    (tmp_path / f"die-{rank_and_step}").write_text(failure)
    agents = _start_agents(two_nodes, tmp_path, CONFIG, "--steps", "3", *options)
    _wait_until(agents, (tmp_path / f"done-{rank_and_step}").exists, 120, "the stall")
    for node in killed:
        agents.kill(node)
    _wait_until(agents, lambda: False, 240, "the end")
    assert all(agents.starts[node] == 2 for node in killed), agents.starts
    taken = steps_taken(tmp_path)
    # With a save in the background, the other ranks may or may not have taken the next step.
    assert taken == steps if steps else taken in ([0, 1, 1, 2], [0, 1, 2, 1, 2]), taken
    assert _check_losses(tmp_path, CONFIG) == 3
    if not killed:
        number = rank_and_step.partition("-")[2]
        want = rf"saving \S+/step-{int(number) + 1}: ranks did not meet; rank 3 stopped"
        assert all(re.search(want, output) for output in _read_outputs(agents)), _read_outputs(
            agents
        )


def _check_near(folder: Path, config: dict[str, Any], steps: int) -> None:
    losses = read_losses(folder)
    assert sorted(losses) == list(range(steps))
    for number, want in enumerate(_read_undisturbed_losses(steps, tuple(config.items()))):
        for loss in losses[number]:
            error = abs(float(loss) - float(want)) / float(want)
            assert error <= OTHER_WORLD_BUDGET, (number, loss)


@pytest.mark.slow
def test_a_run_continues_on_fewer_nodes(two_nodes: tuple[Nodes, Path], tmp_path: Path) -> None:
    """One node resumes the run of two nodes, with the same number of ranks or half of them. If
    ep_size does not fit, the error lists the sizes that fit, and no checkpoint is lost.
    """
    agents = _start_agents(two_nodes, tmp_path, CONFIG, "--steps", "2")
    _wait_until(agents, lambda: False, 240, "the end of two nodes")
    for ranks, steps in ((4, 3), (2, 4)):
        launch = {"ranks": ranks, "num_nodes": "1", "used": [0], "restarts": 0}
        if ranks == 2:
            agents = _start_agents(two_nodes, tmp_path, CONFIG, "--steps", str(steps), **launch)
            want = r"ep_size \(4\) must divide world size .* \(2 / 1 = 2\); try 1, 2"
            _wait_until(agents, lambda: agents.starts[0] > 1, 120, "an error")  # noqa: B023
            agents.end()
            assert re.search(want, _read_outputs(agents)[0]), _read_outputs(agents)[0][-4000:]
            assert len(steps_taken(tmp_path)) == 3
        config = CONFIG | {"ep_size": ranks}
        agents = _start_agents(two_nodes, tmp_path, config, "--steps", str(steps), **launch)
        _wait_until(agents, lambda: False, 240, f"the end of one node with {ranks} ranks")
        assert agents.starts[0] == 1, _read_outputs(agents)[0][-4000:]
    assert steps_taken(tmp_path) == [0, 1, 2, 3]
    _check_near(tmp_path, CONFIG, 4)
    assert "random generators are seeded anew" in _read_outputs(agents)[0]


@pytest.mark.slow
def test_a_run_continues_without_a_lost_node(two_nodes: tuple[Nodes, Path], tmp_path: Path) -> None:
    """With `--nnodes=1:2` the other node resumes alone from the newest complete checkpoint."""
    config = {"ep_size": 2}
    (tmp_path / "die-3-2").write_text("stall")
    agents = _start_agents(two_nodes, tmp_path, config, "--steps", "4", num_nodes="1:2")
    _wait_until(agents, (tmp_path / "done-3-2").exists, 120, "the stall")
    agents.lose(1)
    _wait_until(agents, lambda: False, 240, "the end")
    assert steps_taken(tmp_path) == [0, 1, 2, 3]
    _check_near(tmp_path, config, 4)
    assert "random generators are seeded anew" in _read_outputs(agents)[0]


def _wait_for_step(agents: Agents, folder: Path, newest: int, patience: float) -> None:
    """Wait for the next step. It must not precede the newest complete checkpoint."""
    before = len(steps_taken(folder))
    _wait_until(agents, lambda: len(steps_taken(folder)) > before, patience, "a step")
    assert steps_taken(folder)[before] >= newest


def _kill_agents(
    two_nodes: tuple[Nodes, Path], folder: Path, kills: int, patience: float
) -> dict[str, float]:
    rng, summary = random.Random(1), {"kills": 0, "torn": 0, "of the store": 0, "longest": 0.0}
    agents = _start_agents(two_nodes, folder, CONFIG, *OPTIONS)
    newest = 0
    for _ in range(kills):
        started = time.monotonic()
        _wait_for_step(agents, folder, newest, patience)
        summary["longest"] = max(summary["longest"], time.monotonic() - started)
        time.sleep(rng.uniform(0.0, 2.0))
        node = rng.randrange(2)
        agents.kill(node)
        summary["kills"] += 1
        summary["of the store"] += node == 0
        saved = {int(p.name[5:]): p / manifest.MANIFEST for p in folder.glob("step-*")}
        newest = max((number for number, file in saved.items() if file.exists()), default=0)
        summary["torn"] += any(not file.exists() for file in saved.values())
    _wait_for_step(agents, folder, newest, patience)
    (folder / "stop").touch()
    _wait_until(agents, lambda: False, patience, "the end")
    assert min(agents.starts) >= 2 and sum(agents.starts) >= kills + 2, agents.starts
    return summary


@pytest.mark.slow
def test_after_kills_at_random_moments_the_run_resumes(
    two_nodes: tuple[Nodes, Path], tmp_path: Path
) -> None:
    """Agents of both nodes are killed. Node 0 hosts the agents' store."""
    summary = _kill_agents(two_nodes, tmp_path, KILLED, 180)
    steps = _check_losses(tmp_path, CONFIG)
    print(f"{summary}, {steps} steps")
    assert summary["kills"] == KILLED and 0 < summary["of the store"] < KILLED
    # A step that is killed before its save is repeated, so there may be fewer steps than kills.
    assert steps > KILLED // 2
