"""`Nodes` have names, count bytes, limit the rate of a link, and are always removed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.namespaces import HEADERS, SEGMENT, Nodes, skip_without_namespaces
from support.scripts import ROOT

SERVE = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    connection, (peer, _) = server.accept()
    total = 0
    while data := connection.recv(1 << 20):
        total += len(data)
    print(socket.gethostname(), peer, total, flush=True)
"""
SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection(("node0", 7000)) as connection:
    connection.sendall(bytes(int(sys.argv[1])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - began)
"""
SIZE, RATE = 10_000_000, 200e6 / 8


@pytest.fixture(autouse=True)
def _allowed() -> None:
    skip_without_namespaces()


def _wait_for(condition: object, message: str, patience: float = 30.0) -> None:
    until = time.monotonic() + patience
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, message
        time.sleep(0.05)


def _spaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_a_node_reaches_another_by_name_at_its_rate_and_counts_bytes(tmp_path: Path) -> None:
    """Headers count as well: at least one per packet of the kernel, at most one per segment."""
    served, sent = tmp_path / "served.txt", tmp_path / "sent.txt"
    with Nodes(2, rate="200mbit") as nodes:
        server = nodes.start(0, sys.executable, "-c", SERVE, output=served)
        _wait_for(lambda: "ready" in served.read_text(), "the server has not started")
        before = nodes.sent(1)
        client = nodes.start(1, sys.executable, "-c", SEND, str(SIZE), output=sent)
        assert client.wait(60) == 0 and server.wait(60) == 0, sent.read_text()
        counted = nodes.sent(1) - before
    assert served.read_text().split() == ["ready", "node0", "10.77.0.2", str(SIZE)]
    # A few more packets open and close the connection, and ask for the address.
    assert SIZE < counted <= SIZE * (1 + HEADERS / SEGMENT) + 20 * HEADERS, counted
    # The rate does not limit the first burst of 256 KiB.
    assert float(sent.read_text()) >= (SIZE - 256 * 1024) / RATE, sent.read_text()


def test_nodes_are_removed_if_the_process_that_made_them_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from support.namespaces import Nodes\n"
        "with Nodes(1) as nodes:\n"
        "    nodes.start(0, 'sleep', '1000', output=Path('/dev/null'))\n"
        "    print(nodes._tag, flush=True); time.sleep(1000)\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert maker.stdout is not None
    tag = maker.stdout.readline().strip()
    assert tag in _spaces() and Path(f"/etc/netns/{tag}_0").exists()
    maker.kill()
    maker.wait()
    _wait_for(lambda: tag not in _spaces(), "namespaces are still there")
    _wait_for(lambda: not Path(f"/etc/netns/{tag}_0").exists(), "files are still there")
