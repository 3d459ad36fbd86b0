"""Measure the bytes between two and four nodes in network namespaces, and compare results."""

import json
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml
from support.agents import PORT, run_agents, torchrun
from support.close import FP64_MODEL
from support.jobs.crossing import (
    KINDS,
    OF_GROUPS,
    ROUTERS,
    TOKENS,
    Machines,
    pairs,
    want,
)
from support.jobs.going_on import read_losses
from support.namespaces import HEADERS, SEGMENT, Nodes, skip_without_namespaces
from support.scripts import CPU_4, ROOT, run_script

JOBS = ROOT / "tests" / "support" / "jobs"
HSDP = ROOT / "examples" / "accelerate" / "gpu_2x8_hsdp.yaml"
# The maximum number of bytes of a measurement for row counts, barriers and messages of the agents.
CONTROL_BYTES = 64 * 1024


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    skip_without_namespaces()


@pytest.mark.slow
@pytest.mark.parametrize("machines", [Machines(2, 2), Machines(4, 1), Machines(4, 2)], ids=str)
def test_a_token_crosses_once_to_each_node(tmp_path: Path, machines: Machines) -> None:
    """The bytes that our code counts are exact. At an interface, TCP adds a header for each
    segment, and an acknowledgement for each received segment. DeepSeek-V3's router limits a token
    to two groups of experts and so to two nodes. Gradients equal all_to_all's.
    """
    job = [str(JOBS / "crossing.py"), str(tmp_path)]
    with Nodes(machines.nodes) as nodes:
        commands = [
            torchrun(nodes, node, *job, ranks=machines.ranks_per_node)
            for node in range(machines.nodes)
        ]
        run_agents(nodes, commands, tmp_path)
    files = [tmp_path / f"rank-{rank}.json" for rank in range(machines.ranks)]
    ranks = [json.loads(file.read_text()) for file in files]
    for router, kind, node in product(ROUTERS, KINDS, range(machines.nodes)):
        first = node * machines.ranks_per_node
        ranks_of_node = [
            rank[f"{router}, {kind}"] for rank in ranks[first : first + machines.ranks_per_node]
        ]
        expected_sent, expected_received = want(kind, router, machines, node)
        code, sent = sum(rank["code"] for rank in ranks_of_node), ranks_of_node[0]["interface"]
        where = f"{router}, {kind}, node {node}"
        print(f"{where}: {expected_sent} bytes expected, {code} in code, {sent} sent")
        assert code == expected_sent, (router, kind, node)
        limit = (
            expected_sent * (1 + HEADERS / SEGMENT)
            + expected_received * HEADERS / SEGMENT
            + CONTROL_BYTES
        )
        assert expected_sent < sent <= limit, (router, kind, node, sent / expected_sent)
    for router in ROUTERS:
        rank_pairs, node_pairs = (sum(map(sum, pairs(kind, router, machines))) for kind in KINDS)
        factor = 0.7 if router == "any" else 1.0
        assert (
            (node_pairs < factor * rank_pairs)
            if machines.ranks_per_node > 1
            else (node_pairs == rank_pairs)
        )
    limit = TOKENS * machines.ranks * OF_GROUPS
    assert sum(map(sum, pairs("hierarchical", "groups", machines))) <= limit
    for rank in ranks:
        name, error = rank["largest"]
        assert error <= FP64_MODEL, (name, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "replicate", "ep"), [(2, 2, 2), (4, 4, 1), (4, 2, 2)], ids=str
)
def test_the_launch_configuration_of_several_machines_gives_the_losses_of_one(
    tmp_path: Path, machines: int, replicate: int, ep: int
) -> None:
    """gpu_2x8_hsdp.yaml is used with four CPU ranks on two nodes."""
    config = yaml.safe_load(HSDP.read_text())
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    assert config["main_process_port"] == PORT
    config |= {"num_machines": machines, "num_processes": 4}
    config |= {"use_cpu": True, "mixed_precision": "no"}
    job = [str(JOBS / "going_on.py"), "--trainer", "--use_cpu", "--steps", "3"]
    job += ["--replicate", str(replicate), "--ep_size", str(ep)]
    one_machine, several = tmp_path / "here", tmp_path / "there"
    one_machine.mkdir()
    several.mkdir()
    with Nodes(machines) as nodes:
        config["main_process_ip"] = nodes.address(0)
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
        commands = [
            [*launch, "--machine_rank", str(node), *job, str(several)] for node in range(machines)
        ]
        run_agents(nodes, commands, tmp_path)
    output = tmp_path / "here.txt"
    run_script(Path(job[0]), *job[1:], str(one_machine), output=output, config_file=CPU_4)
    losses = read_losses(one_machine)
    assert sorted(losses) == [0, 1, 2]
    assert read_losses(several) == losses
