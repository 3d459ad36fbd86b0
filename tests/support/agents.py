"""One launcher's agent on each node of `support.namespaces`, started and waited for together."""

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
    "PYTHONPATH": os.pathsep.join([os.fspath(ROOT), os.fspath(ROOT / "tests")]),
    "HF_HUB_OFFLINE": "1",
    # Of examples/slurm/, which says why.
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
    """Make the command of a node's agent; node 0 keeps the store in which agents meet.

    `num_nodes` is torchrun's `--nnodes`, by default all; "1:2" is one at least.
    """
    return [
        *[sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes or nodes.count}"],
        *[f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", f"--max-restarts={restarts}"],
        f"--rdzv-endpoint={nodes.address(0)}:{PORT}",
        # Agents are known to be dead after three seconds.
        f"--rdzv-conf=is_host={int(node == 0)},keep_alive_interval=1,last_call_timeout=3",
        *script,
    ]


def run_agents(
    nodes: Nodes, commands: list[list[str]], folder: Path, *, timeout: float = 300.0
) -> str:
    """Start a command on each node and wait until all have ended; return what they printed.

    Raises:
        AssertionError: one failed, or had not ended in time; with the end of what each printed.
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
    said = [output.read_text() for output in outputs]
    if any(code != 0 for code in codes):
        for node in range(nodes.count):
            nodes.kill(node)
        ends = "\n".join(f"node {node}: {text[-4000:]}" for node, text in enumerate(said))
        raise AssertionError(f"agents ended with {codes} (None: not in time):\n{ends}")
    return "\n".join(said)


@dataclass
class Agents:
    """torchrun's agents on all nodes, each started again when it ends with an error.

    As whatever looks after a machine does, what an agent left behind there is ended first.

    Attributes:
        servers: where the ranks' servers are (`support/preloaded.py`).
        ranks: of a node.
        num_nodes: torchrun's `--nnodes`.
        used: nodes that have an agent.
        starts: how often each node's agent was started.
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
        """Kill a node's agent by SIGKILL, and it alone."""
        self._running[node].kill()
        self._running[node].wait()

    def look(self) -> bool:
        """Start again what failed; return whether all have ended well."""
        for node, agent in self._running.items():
            if agent.poll():
                self._end_what_is_left(node)
                self._running[node] = self._start(node)
        return all(agent.poll() == 0 for agent in self._running.values())

    def lose(self, node: int) -> None:
        """Lose a node for good: its agent is not started again."""
        self.kill(node)
        self._end_what_is_left(node)
        del self._running[node]

    def end(self) -> None:
        """Kill whatever runs."""
        for node in list(self._running):
            self.lose(node)

    def _mark(self, node: int) -> str:
        return f"{self.folder}-{node}"

    def _end_what_is_left(self, node: int) -> None:
        kill_marked(self._mark(node))

    def _start(self, node: int) -> "subprocess.Popen[bytes]":
        self.starts[node] += 1
        start = ["--no-python", *client(self.servers, node), *self.script]
        restarts = self.restarts
        command = torchrun(
            self.nodes,
            node,
            *start,
            ranks=self.ranks,
            restarts=restarts,
            num_nodes=self.num_nodes,
        )
        own = ENVIRONMENT | {MARK: self._mark(node)}
        return self.nodes.start(node, *command, output=self.output(node), **own)
