"""Simulate several machines by network namespaces on one machine, with slow links between them.

    with Nodes(2, rate="200mbit") as nodes:
        agents = [nodes.start(n, "torchrun", ..., output=folder / f"{n}.txt") for n in range(2)]

A node has its own interface `eth0`, address (10.77.0.1, 10.77.0.2, ..) and host name (`node0`, ..).
Nodes share cores, memory and files. A bridge in one more namespace connects their interfaces, so
the network of the machine itself does not change. `rate` limits what a node may send (`tc tbf`),
and its interface counts the bytes that it has sent.

Namespaces need root and iproute2; `WHY_NOT` says what is missing. A guard process kills all
processes of the nodes and removes the namespaces when the block ends, or when the process that made
them dies, even by SIGKILL.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NETWORK = "10.77.0"
DEVICE = "eth0"
# Variables with which torch's processes talk to other nodes through this interface.
INTERFACES = {"GLOO_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE}
# Bytes of headers in an Ethernet frame with a TCP segment: Ethernet, IPv4, TCP, TCP time stamps.
HEADERS = 14 + 20 + 20 + 12
SEGMENT = 1500 - (HEADERS - 14)
# A shell command that sets the host name of a node to $0 and then becomes the command "$@".
_BEGIN = 'hostname "$0" && exec "$@"'


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    """Run a command and return its output. Raise OSError with its stderr if it fails."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


@functools.cache
def _why_not() -> str:
    """Return the reason why nodes do not work on this machine, or an empty string."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare", "hostname") if not shutil.which(name)]
    if missing:
        return f"network namespaces need {', '.join(missing)} (apt-get install iproute2)"
    try:
        with Nodes(1, rate="1gbit") as nodes:
            first = nodes.start(0, "true", output=Path(os.devnull))
            return "" if first.wait(20) == 0 else "`ip netns exec` is not allowed here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces are not allowed here: {error}"


class Nodes:
    """Context manager that makes nodes and numbers them from 0.

    Args:
        count: the number of nodes.
        rate: the rate at which each node may send, in the units of `tc` ("200mbit"). None means no
            limit.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        self.count, self._rate = count, rate
        self._tag = f"hf_moe_ep_{os.getpid()}_{time.monotonic_ns()}"

    def __enter__(self) -> "Nodes":
        self._guard = subprocess.Popen(
            [sys.executable, "-S", __file__, self._tag],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take_down()

    def address(self, node: int) -> str:
        return f"{NETWORK}.{node + 1}"

    def start(
        self, node: int, *command: str, output: Path, **environment: str
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a node. Its output is appended to the file `output`."""
        with open(output, "ab") as file:
            return subprocess.Popen(
                [*self.prefix(node), *command],
                env=os.environ | INTERFACES | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def prefix(self, node: int) -> list[str]:
        """Return the words in front of a command that run it on a node."""
        inside = ["ip", "netns", "exec", self._space(node), "unshare", "--uts"]
        return [*inside, "sh", "-c", _BEGIN, f"node{node}"]

    def kill(self, node: int) -> int:
        """Kill all processes on a node, as a power failure would, and return their number."""
        return _kill(self._space(node))

    def sent(self, node: int) -> int:
        """Return the number of bytes that a node has sent, including headers."""
        return _sent(["ip", "netns", "exec", self._space(node)])

    def _space(self, node: int) -> str:
        return f"{self._tag}_{node}"

    def _make(self) -> None:
        hub = f"{self._tag}_hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        names = [f"{self.address(node)} node{node}\n" for node in range(self.count)]
        for node in range(self.count):
            space, port = self._space(node), f"port{node}"
            _ip("netns", "add", space)
            peer = ["peer", "name", port, "netns", hub]
            _ip("link", "add", DEVICE, "netns", space, "type", "veth", *peer)
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", DEVICE)
            _ip("-n", space, "link", "set", DEVICE, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            if self._rate is not None:
                # A burst holds several of the kernel's packets of 64 KiB.
                shape = ["tbf", "rate", self._rate, "burst", "256kb", "latency", "200ms"]
                _run("tc", "-n", space, "qdisc", "add", "dev", DEVICE, "root", *shape)
            # `ip netns exec` mounts these files over the files of the same names in /etc.
            files = _files(space)
            files.mkdir(parents=True)
            (files / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))

    def _take_down(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)


def sent_here() -> int:
    """Return the number of bytes that the node of this process has sent."""
    return _sent([])


def _sent(prefix: list[str]) -> int:
    return int(_run(*prefix, "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"))


def _files(space: str) -> Path:
    return Path("/etc/netns", space)


def _kill(space: str) -> int:
    killed = set()
    while pids := [int(pid) for pid in _ip("netns", "pids", space).split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        time.sleep(0.05)  # killed processes are listed until they are reaped
    return len(killed)


def _guard(tag: str) -> None:
    """Wait until the process that made the nodes closes stdin or dies, and remove all nodes."""
    sys.stdin.buffer.read()
    spaces = [line.split()[0] for line in _ip("netns", "list").splitlines() if tag in line]
    for space in spaces:
        _kill(space)
    for space in spaces:
        _ip("netns", "delete", space)
        shutil.rmtree(_files(space), ignore_errors=True)


def __getattr__(name: str) -> Any:
    """Compute `WHY_NOT` when it is read first, because that takes some time."""
    if name != "WHY_NOT":
        raise AttributeError(name)
    return _why_not()


def skip_without_namespaces() -> None:
    """Skip the current test if this machine does not let it create namespaces."""
    import pytest

    if reason := _why_not():
        pytest.skip(reason)


if __name__ == "__main__":
    _guard(sys.argv[1])
