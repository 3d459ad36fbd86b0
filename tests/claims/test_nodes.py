"""Two and four nodes, over a network of namespaces: what crosses it, what is computed."""

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
from support.namespaces import HEADERS, SEGMENT, Nodes
from support.scripts import CPU_4, ROOT, run_script

JOBS = ROOT / "tests" / "support" / "jobs"
HSDP = ROOT / "examples" / "accelerate" / "gpu_2x8_hsdp.yaml"
# Counts of the plan, barriers and what agents say to each other, in all of a measurement.
TALK = 64 * 1024


@pytest.fixture(autouse=True)
def _allowed() -> None:
    from support.namespaces import WHY_NOT

    if WHY_NOT:
        pytest.skip(WHY_NOT)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [Machines(2, 2), Machines(4, 1), Machines(4, 2)], ids=str)
def test_rows_cross_once_for_each_token_and_node(tmp_path: Path, machines: Machines) -> None:
    """Bytes counted in code are exact. An interface sends at most what TCP adds: a header per
    segment and an acknowledgement per received one. DeepSeek-V3's router limits a token to two
    groups of experts and so to two nodes. Gradients are those of all_to_all.
    """
    job = [str(JOBS / "crossing.py"), str(tmp_path)]
    with Nodes(machines.nodes) as nodes:
        commands = [
            torchrun(nodes, node, *job, ranks=machines.places) for node in range(machines.nodes)
        ]
        run_agents(nodes, commands, tmp_path)
    files = [tmp_path / f"rank-{rank}.json" for rank in range(machines.ranks)]
    ranks = [json.loads(file.read_text()) for file in files]
    for router, kind, node in product(ROUTERS, KINDS, range(machines.nodes)):
        first = node * machines.places
        of_node = [rank[f"{router}, {kind}"] for rank in ranks[first : first + machines.places]]
        out, came = want(kind, router, machines, node)
        code, sent = sum(rank["code"] for rank in of_node), of_node[0]["interface"]
        print(f"{router}, {kind}, node {node}: {out} bytes wanted, {code} in code, {sent} sent")
        assert code == out, (router, kind, node)
        most = out * (1 + HEADERS / SEGMENT) + came * HEADERS / SEGMENT + TALK
        assert out < sent <= most, (router, kind, node, sent / out)
    for router in ROUTERS:
        of_ranks, of_nodes = (sum(map(sum, pairs(kind, router, machines))) for kind in KINDS)
        fewer = 0.7 if router == "any" else 1.0
        assert (of_nodes < fewer * of_ranks) if machines.places > 1 else (of_nodes == of_ranks)
    most = TOKENS * machines.ranks * OF_GROUPS
    assert sum(map(sum, pairs("hierarchical", "groups", machines))) <= most
    for rank in ranks:
        name, error = rank["largest"]
        assert error <= FP64_MODEL, (name, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "replicate", "ep"), [(2, 2, 2), (4, 4, 1), (4, 2, 2)], ids=str
)
def test_the_launch_configuration_of_several_machines(
    tmp_path: Path, machines: int, replicate: int, ep: int
) -> None:
    """gpu_2x8_hsdp.yaml on four CPU ranks gives the losses of one machine."""
    config = yaml.safe_load(HSDP.read_text())
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    assert config["main_process_port"] == PORT
    config |= {"num_machines": machines, "num_processes": 4}
    config |= {"use_cpu": True, "mixed_precision": "no"}
    job = [str(JOBS / "going_on.py"), "--trainer", "--use_cpu", "--steps", "3"]
    job += ["--replicate", str(replicate), "--ep_size", str(ep)]
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with Nodes(machines) as nodes:
        config["main_process_ip"] = nodes.address(0)
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
        commands = [
            [*launch, "--machine_rank", str(node), *job, str(there)] for node in range(machines)
        ]
        run_agents(nodes, commands, tmp_path)
    run_script(Path(job[0]), *job[1:], str(here), output=tmp_path / "here.txt", config_file=CPU_4)
    got, want_ = read_losses(there), read_losses(here)
    assert sorted(want_) == [0, 1, 2]
    assert got == want_
