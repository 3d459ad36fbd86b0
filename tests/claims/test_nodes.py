"""Two nodes of two ranks, over a network of namespaces: what crosses it, what is computed."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from support.agents import PORT, run_agents, torchrun
from support.close import FP64_MODEL
from support.jobs.crossing import KINDS, PLACES, want
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
def test_rows_cross_once_for_each_token_and_node(tmp_path: Path) -> None:
    """In the code to the byte, and at the interface with no more than TCP adds: a header for each
    segment, an answer for each that came. Losses and gradients are those of all_to_all.
    """
    with Nodes(2) as nodes:
        commands = [
            torchrun(nodes, node, str(JOBS / "crossing.py"), str(tmp_path)) for node in range(2)
        ]
        run_agents(nodes, commands, tmp_path)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    for kind in KINDS:
        for node in range(2):
            of_node = ranks[node * PLACES : (node + 1) * PLACES]
            out, came = want(kind, node), want(kind, 1 - node)
            code = sum(rank[kind]["code"] for rank in of_node)
            sent = of_node[0][kind]["interface"]
            print(f"{kind}, node {node}: {out} bytes wanted, {code} in the code, {sent} sent")
            assert code == out, (kind, node)
            most = out * (1 + HEADERS / SEGMENT) + came * HEADERS / SEGMENT + TALK
            assert out < sent <= most, (kind, node, sent / out)
    assert want("hierarchical", 0) < 0.6 * want("all_to_all", 0)
    for rank in ranks:
        name, error = rank["largest"]
        assert error <= FP64_MODEL, (name, error)


@pytest.mark.slow
def test_the_launch_configuration_of_two_machines(tmp_path: Path) -> None:
    """gpu_2x8_hsdp.yaml as it is but for two ranks a machine, without GPUs, in fp32: every loss is
    that of four ranks on one machine.
    """
    config = yaml.safe_load(HSDP.read_text())
    assert (config["num_processes"], config["main_process_port"]) == (16, PORT)
    config |= {"num_processes": 4, "use_cpu": True, "mixed_precision": "no"}
    job = [str(JOBS / "going_on.py"), "--trainer", "--use_cpu", "--steps", "3", "--replicate", "2"]
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with Nodes(2) as nodes:
        config["main_process_ip"] = nodes.address(0)
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
        commands = [[*launch, "--machine_rank", str(node), *job, str(there)] for node in range(2)]
        run_agents(nodes, commands, tmp_path)
    run_script(Path(job[0]), *job[1:], str(here), output=tmp_path / "here.txt", config_file=CPU_4)
    got, want_ = read_losses(there), read_losses(here)
    assert sorted(want_) == [0, 1, 2]
    assert got == want_
