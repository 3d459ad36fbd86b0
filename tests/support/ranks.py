"""Run one function on N ranks of a gloo group, with a time limit.

`run_ranks(fn, 2, x)` starts two processes, which form a process group, calls `fn(rank, world_size,
x)` in each and returns the values in rank order. `fn` must be a module-level function of an
importable module. Arguments are pickled, and values are saved with `torch.save`. Ranks are forked
from a server that has imported what ranks need (`support.imported_once`) and has started no thread.

If a rank raises, RankError shows its traceback. If a rank hangs, every rank is killed after
`timeout` seconds of wall-clock time, imports included, and TimeoutError shows the stack of each
unfinished rank.
"""

import faulthandler
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hf_moe_ep.upstream.gloo import one_worker_thread
from support.poison import poison_empty

_ROOT = Path(__file__).resolve().parents[2]
_HOST = "127.0.0.1"
# Seconds to wait for the other ranks after one has failed. They fail as well, or hang.
_GRACE = 3.0


class RankError(RuntimeError):
    """A rank raised an error or died. The message holds its rank and traceback."""


class Outcome(NamedTuple):
    """The outcome of one rank: `value` if `ok`, and else a description of the error."""

    ok: bool
    finished_at: float
    value: Any = None
    error_type: str = ""
    message: str = ""
    trace: str = ""


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    group_timeout: float
    port: int
    folder: Path
    environment: dict[str, str]

    def outcome_file(self, rank: int) -> Path:
        return self.folder / f"outcome{rank}.pt"

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"stack{rank}.txt"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 240.0,
    group_timeout: float = 60.0,
    expect_errors: bool = False,
) -> list[Any]:
    """Return `[fn(rank, world_size, *args) for each rank]`, or raise RankError or TimeoutError.

    `timeout` limits the wall-clock time, and `group_timeout` is the timeout of the process group,
    both in seconds. With `expect_errors` no RankError is raised. The list then holds `("ok",
    value)` or `("error", type name, message)` per rank. If a process died, the type name is
    "ProcessDied".
    """
    with started_ranks(fn, world_size, *args, group_timeout=group_timeout) as ranks:
        ranks.wait(timeout, stop_on_error=not expect_errors)
        outcomes = ranks.outcomes()
    if expect_errors:
        return [
            ("ok", outcome.value) if outcome.ok else ("error", outcome.error_type, outcome.message)
            for outcome in outcomes.values()
        ]
    raise_if_failed(outcomes, world_size)
    return [outcome.value for outcome in outcomes.values()]


@contextmanager
def started_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, group_timeout: float = 60.0
) -> Iterator["Ranks"]:
    """Start ranks that call `fn(rank, world_size, *args)`. The end of the block kills them."""
    # This is no FileStore, because a rank that is killed may leave half a record in it. Another
    # rank that reads the record would wait forever, without a timeout.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        environment = dict(os.environ)
        job = _Job(fn, args, world_size, group_timeout, store.port, Path(folder), environment)
        processes = _start(job)
        try:
            yield Ranks(processes, job)
        finally:
            for process in processes:
                process.kill()
                process.join()


class Ranks:
    """The processes of `started_ranks`."""

    def __init__(self, processes: list[BaseProcess], job: _Job) -> None:
        self._processes = processes
        self._job = job

    def wait(
        self,
        timeout: float,
        until: Callable[[], bool] = lambda: False,
        *,
        stop_on_error: bool = True,
    ) -> None:
        """Return when all ranks have ended, `until()` is true, or _GRACE seconds after an error.

        Raises TimeoutError with the stacks of all ranks after `timeout` seconds of wall-clock time.
        """
        ends_at, given_up_at = time.time() + timeout, math.inf
        while alive := [process for process in self._processes if process.is_alive()]:
            if until():
                return
            if stop_on_error and any(process.exitcode for process in self._processes):
                given_up_at = min(given_up_at, time.time() + _GRACE)
            if time.time() >= given_up_at:
                return
            if time.time() >= ends_at:
                raise TimeoutError(_report_hang(self._processes, self._job, timeout))
            wait([process.sentinel for process in alive], 0.02)

    def outcomes(self) -> dict[int, Outcome]:
        """Return the outcome of each rank that has one; a rank that still runs has none."""
        return _collect(self._processes, self._job)


def raise_if_failed(outcomes: dict[int, Outcome], world_size: int) -> None:
    """Raise RankError with the tracebacks of all ranks that failed."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if not outcome.ok}
    if failed:
        raise RankError(_report(failed, world_size))


def _start(job: _Job) -> list[BaseProcess]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["support.imported_once"])
    ranks: list[BaseProcess] = [
        context.Process(target=_child, args=(rank, job), name=f"rank{rank}")
        for rank in range(job.world_size)
    ]
    # The first rank starts the server, which finds `support` by the path, and in which OpenMP reads
    # the number of threads when torch is imported.
    path = os.pathsep.join([os.fspath(_ROOT), os.fspath(_ROOT / "tests")])
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("OMP_NUM_THREADS", "1")
        patches.setenv("PYTHONPATH", path, prepend=os.pathsep)
        for process in ranks:
            process.start()
    return ranks


def _collect(ranks: list[BaseProcess], job: _Job) -> dict[int, Outcome]:
    outcomes = {}
    for rank, process in enumerate(ranks):
        if job.outcome_file(rank).exists():
            outcomes[rank] = torch.load(job.outcome_file(rank), weights_only=False)
        # A rank that ends with another exit code than 0 and 1 has died.
        if not process.is_alive() and (rank not in outcomes or process.exitcode not in (0, 1)):
            message = f"exit code {process.exitcode}, its stderr may say more"
            if job.stack_file(rank).exists():
                message += f"\n{job.stack_file(rank).read_text()}".rstrip()
            outcomes[rank] = Outcome(False, math.inf, None, "ProcessDied", message)
    return outcomes


def _report(failed: dict[int, Outcome], world_size: int) -> str:
    """Describe all failures in the order of time. Later ones often follow from the first."""
    in_order = sorted(failed.items(), key=lambda item: item[1].finished_at)
    return "\n".join(
        f"rank {rank} of {world_size} raised {failure.error_type}: {failure.message}\n"
        f"{failure.trace}"
        for rank, failure in in_order
    )


def _report_hang(ranks: list[BaseProcess], job: _Job, timeout: float) -> str:
    """Describe the state of each rank, with the stacks of those that hang."""
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hung:
        if job.stack_file(rank).exists():  # without its handler, the signal would kill the rank
            os.kill(ranks[rank].pid or 0, signal.SIGUSR1)
    time.sleep(0.3)
    lines = [f"ranks {hung} of {job.world_size} had not finished after {timeout:g} s"]
    for rank, process in enumerate(ranks):
        if job.outcome_file(rank).exists():
            outcome = torch.load(job.outcome_file(rank), weights_only=False)
            lines.append(f"rank {rank}: {'returned' if outcome.ok else outcome.trace}")
        elif rank not in hung:
            lines.append(f"rank {rank}: died with exit code {process.exitcode}")
        elif job.stack_file(rank).exists():
            lines.append(f"rank {rank} stood at:\n{job.stack_file(rank).read_text()}")
        else:
            lines.append(f"rank {rank} was still starting")
    return "\n".join(lines)


def _child(rank: int, job: _Job) -> None:
    os.environ.clear()  # it was the environment of the server
    os.environ.update(job.environment)
    with open(job.stack_file(rank), "w") as stack_file:
        # If a signal kills this rank, the file shows the stacks of all its threads.
        faulthandler.enable(stack_file)
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
        try:
            _join_group(rank, job)
            value = job.fn(rank, job.world_size, *job.args)
            _leave(job, rank, Outcome(True, time.time(), value))
        except BaseException as error:  # noqa: BLE001  the parent also reports pytest.fail
            trace = traceback.format_exc()
            outcome = Outcome(False, time.time(), None, type(error).__name__, str(error), trace)
            _leave(job, rank, outcome)
            exit_code = 1
        else:
            dist.destroy_process_group()
            exit_code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip destructors: threads of a broken group can block the interpreter's exit.
        os._exit(exit_code)


def _join_group(rank: int, job: _Job) -> None:
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    poison_empty()
    # FSDP2 warns that an in-place operation of the user would silently remove its hook.
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    # Since transformers 5.24 multimodal models return the features of their tower, which are views.
    vision = r"FSDP2-wrapped module \(FSDP\w+ForConditionalGeneration\)"
    warnings.filterwarnings("ignore", message=vision)
    with one_worker_thread():
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore(_HOST, job.port, is_master=False),
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.group_timeout),
        )


def _leave(job: _Job, rank: int, outcome: Outcome) -> None:
    partial = job.folder / f"partial{rank}.pt"
    torch.save(outcome, partial)
    partial.rename(job.outcome_file(rank))  # atomic, because the parent may kill this rank any time
