"""Run a launcher's agent on each node of `support.namespaces`.

`run_agents` starts one agent per node and waits for all. `Agents` also restarts agents that fail.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.marked import MARK, kill_marked
from support.namespaces import Nodes
from support.preloaded import client
from support.scripts import ROOT

PORT = 29500
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        [os.fspath(ROOT), os.fspath(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    ).strip(os.pathsep),
    "HF_HUB_OFFLINE": "1",
    # The files of examples/slurm/ set this variable too, and say why.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def torchrun(
    nodes: Nodes,
    node: int,
    *script: str,
    ranks: int = 2,
    restarts: int = 0,
    num_nodes: str | None = None,
) -> list[str]:
    """Make the command of a node's agent. Node 0 hosts the store of the rendezvous.

    `num_nodes` is torchrun's `--nnodes`, by default the number of all nodes; "1:2" means 1 or 2.
    """
    return [
        *[sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes or nodes.count}"],
        *[f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", f"--max-restarts={restarts}"],
        f"--rdzv-endpoint={nodes.address(0)}:{PORT}",
        # An agent counts as dead after three seconds without a sign of life.
        f"--rdzv-conf=is_host={int(node == 0)},keep_alive_interval=1,last_call_timeout=3",
        *script,
    ]


def run_agents(
    nodes: Nodes, commands: list[list[str]], folder: Path, *, timeout: float = 300.0
) -> str:
    """Start a command on each node, wait until all have ended, and return their output.

    Raises:
        AssertionError: a command failed or did not end in time. The message holds the end of the
            output of each command.
    """
    outputs = [folder / f"node{node}.txt" for node in range(nodes.count)]
    agents = [
        nodes.start(node, *command, output=outputs[node], **ENVIRONMENT)
        for node, command in enumerate(commands)
    ]
    until = time.monotonic() + timeout
    while any(agent.poll() is None for agent in agents) and time.monotonic() < until:
        if any(agent.poll() for agent in agents):
            until = min(until, time.monotonic() + 10)
        time.sleep(0.1)
    codes = [agent.poll() for agent in agents]
    texts = [output.read_text() for output in outputs]
    if any(code != 0 for code in codes):
        for node in range(nodes.count):
            nodes.kill(node)
        ends = "\n".join(f"node {node}: {text[-4000:]}" for node, text in enumerate(texts))
        raise AssertionError(f"agents ended with {codes} (None: did not end in time):\n{ends}")
    return "\n".join(texts)


@dataclass
class Agents:
    """torchrun's agents on all nodes. `look` restarts those that ended with an error.

    Before a restart, all processes that the failed agent left on its node are killed, as the
    scheduler of a cluster does.

    Attributes:
        servers: the folder with the sockets of the ranks' servers (`support/preloaded.py`).
        ranks: the number of ranks per node.
        num_nodes: torchrun's `--nnodes`.
        used: the nodes that have an agent.
        starts: how often the agent of each node was started.
    """

    nodes: Nodes
    folder: Path
    script: list[str]
    servers: Path
    ranks: int = 2
    num_nodes: str | None = None
    used: list[int] = field(default_factory=lambda: [0, 1])
    restarts: int = 100
    starts: list[int] = field(default_factory=list)
    _running: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def output(self, node: int) -> Path:
        return self.folder / f"node{node}.txt"

    def start(self) -> None:
        self.starts = [0] * self.nodes.count
        self._running = {node: self._start(node) for node in self.used}

    def kill(self, node: int) -> None:
        """Kill a node's agent with SIGKILL; its ranks keep running."""
        self._running[node].kill()
        self._running[node].wait()

    def look(self) -> bool:
        """Restart the agents that failed. Return True if all agents have ended without an error."""
        for node, agent in self._running.items():
            if agent.poll():
                self._kill_processes(node)
                self._running[node] = self._start(node)
        return all(agent.poll() == 0 for agent in self._running.values())

    def lose(self, node: int) -> None:
        """Kill all processes of a node; its agent is not restarted."""
        self.kill(node)
        self._kill_processes(node)
        del self._running[node]

    def end(self) -> None:
        """Kill the processes of all nodes."""
        for node in list(self._running):
            self.lose(node)

    def _mark(self, node: int) -> str:
        return f"{self.folder}-{node}"

    def _kill_processes(self, node: int) -> None:
        kill_marked(self._mark(node))

    def _start(self, node: int) -> "subprocess.Popen[bytes]":
        self.starts[node] += 1
        script = ["--no-python", *client(self.servers, node), *self.script]
        command = torchrun(
            self.nodes,
            node,
            *script,
            ranks=self.ranks,
            restarts=self.restarts,
            num_nodes=self.num_nodes,
        )
        environment = ENVIRONMENT | {MARK: self._mark(node)}
        return self.nodes.start(node, *command, output=self.output(node), **environment)
