"""Ranks that a server forks with all imports done, so that a launcher starts them quickly.

    preloaded.serve(nodes, node, folder)                    once a node
    torchrun ... --no-python $(preloaded.client(folder, node)) script.py arguments

What the launcher starts is a small client. It hands its arguments, environment and output to the
server on its node, which forks a process that runs the script, and ends as that one ends. Where the
client is killed, so is the process.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from support.namespaces import Nodes


def _socket(folder: Path, node: int) -> str:
    return os.fspath(folder / f"node{node}.socket")


def client(folder: Path, node: int) -> list[str]:
    """Make the beginning of a command that runs a script on a node's server."""
    return [sys.executable, "-S", __file__, "client", _socket(folder, node)]


def serve(nodes: "Nodes", node: int, folder: Path, *, patience: float = 180.0) -> None:
    """Start a node's server and wait until it has imported."""
    from support.agents import ENVIRONMENT

    output, place = folder / f"server{node}.txt", _socket(folder, node)
    command = [sys.executable, __file__, "serve", place]
    server: subprocess.Popen[bytes] = nodes.start(node, *command, output=output, **ENVIRONMENT)
    until = time.monotonic() + patience
    while not os.path.exists(place):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the server of node {node}: {output.read_text()[-3000:]}")
        time.sleep(0.1)


def _serve(place: str) -> NoReturn:
    from importlib import import_module

    sys.path.pop(0)  # this folder, whose names are not to be taken for those of packages
    from support.ranks import _IMPORTED_ONCE

    for name in _IMPORTED_ONCE:
        import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place + "~")
    listener.listen(64)
    os.rename(place + "~", place)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> NoReturn:
    """Run one script; kill it where its client is gone, else tell the client how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, outputs, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    order = json.loads(text)
    rank = os.fork()
    if rank == 0:
        connection.close()
        _run(order, outputs)
    while True:
        ended, status = os.waitpid(rank, os.WNOHANG)
        if ended:
            connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        if select.select([connection], [], [], 0.05)[0] and not connection.recv(1):
            os.kill(rank, signal.SIGKILL)
            os._exit(0)


def _run(order: dict[str, object], outputs: list[int]) -> NoReturn:
    import runpy
    import traceback

    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(order["environment"])  # type: ignore[call-overload]
    sys.argv = list(order["arguments"])  # type: ignore[call-overload]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:  # noqa: BLE001  this is the end of the process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ask(place: str, arguments: list[str]) -> NoReturn:
    order = {"arguments": arguments, "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        text = json.dumps(order).encode() + b"\n"
        sent = socket.send_fds(connection, [text], [1, 2])
        connection.sendall(text[sent:])
        code = json.loads(connection.recv(100) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    _ask(sys.argv[2], sys.argv[3:])
