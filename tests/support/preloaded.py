"""Start ranks quickly: a server that has done all imports forks them.

    preloaded.serve(nodes, node, folder)                    once per node
    torchrun ... --no-python $(preloaded.client(folder, node)) script.py arguments

    torchrun ... --no-python $(preloaded.client_here()) script.py arguments     without nodes

The launcher starts a small client. It sends its arguments, environment, folder and output files to
the server on its node, which forks a process that runs the script. The client ends with the exit
code of this process. If the client is killed, the process is killed too.
"""

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from support.namespaces import Nodes


def _socket(folder: Path, node: int) -> str:
    return os.fspath(folder / f"node{node}.socket")


def client(folder: Path, node: int) -> list[str]:
    """Return the part of a command that stands before the script, to run it on a node's server."""
    return [sys.executable, "-S", __file__, "client", _socket(folder, node)]


def serve(nodes: "Nodes", node: int, folder: Path, *, patience: float = 180.0) -> None:
    """Start a node's server, and wait until it has done its imports."""
    from support.agents import ENVIRONMENT

    output, path = folder / f"server{node}.txt", _socket(folder, node)
    command = [sys.executable, __file__, "serve", path]
    server = nodes.start(node, *command, output=output, **ENVIRONMENT)
    _wait_for(server, path, output, patience)


@functools.cache
def client_here() -> list[str]:
    """Start this process's own server, and return what `client` returns.

    The server ends with this process.
    """
    from support.agents import ENVIRONMENT

    folder = Path(tempfile.mkdtemp(prefix="preloaded_"))
    path, output = _socket(folder, 0), folder / "server.txt"
    with open(output, "wb") as file:
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", path, "while stdin is open"],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
        )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    _wait_for(server, path, output, 180.0)
    return client(folder, 0)


def _wait_for(server: "subprocess.Popen[bytes]", path: str, output: Path, patience: float) -> None:
    until = time.monotonic() + patience
    while not os.path.exists(path):
        if server.poll() is not None or time.monotonic() > until:
            text = output.read_text()[-3000:]
            raise RuntimeError(f"the server of {path} has not started: {text}")
        time.sleep(0.1)


def _serve(path: str, while_stdin_is_open: bool) -> NoReturn:
    sys.path.pop(0)  # removes this folder, because its files have names of packages
    import support.imported_once  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + "~")
    listener.listen(64)
    os.rename(path + "~", path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these children
    waits_for = [listener, sys.stdin] if while_stdin_is_open else [listener]
    while True:
        if sys.stdin in select.select(waits_for, [], [])[0]:
            os._exit(0)  # the process that started this server has ended
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _run_for_client(connection)
        connection.close()


def _run_for_client(connection: socket.socket) -> NoReturn:
    """Run a script in a child process, and send its exit code to the client.

    If the client is gone, the child process is killed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, outputs, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    request = json.loads(text)
    rank = os.fork()
    if rank == 0:
        connection.close()
        _run_script(request, outputs)
    while True:
        ended, status = os.waitpid(rank, os.WNOHANG)
        if ended:
            connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        if select.select([connection], [], [], 0.05)[0] and not connection.recv(1):
            os.kill(rank, signal.SIGKILL)
            os._exit(0)


def _run_script(request: dict[str, object], outputs: list[int]) -> NoReturn:
    """Run a script as `python script.py arguments` does, and end this process as Python does."""
    import runpy

    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    sys.argv = list(request["arguments"])  # type: ignore[call-overload]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def _run_on_server(path: str, arguments: list[str]) -> NoReturn:
    """Send a request to the server, and end like the process that runs the script."""
    environment = dict(os.environ)
    request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [text], [1, 2])
        connection.sendall(text[sent:])
        code = json.loads(connection.recv(100) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2], while_stdin_is_open=len(sys.argv) > 3)
    _run_on_server(sys.argv[2], sys.argv[3:])
