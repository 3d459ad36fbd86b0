"""Run work on all ranks so that no rank waits forever for a rank that failed or never arrived.

Three checks compare the ranks before they start. Two of them use the store, the key-value store of
torch.distributed. If a rank does not arrive in time they raise an error that counts the ranks,
where a collective would hang or fail.

function               what it checks
check_everyone_calls   all ranks call a function (by the store)
check_alike            all ranks pass the same arguments
check_own_gpu          no two ranks compute on the same GPU, as NCCL requires (by the store)

Four functions run a part of the work on each rank. If one rank fails, all ranks raise an error:

function           who works     what is returned
run_on_all         every rank    each rank gets its own value
gather_from_all    every rank    each rank gets the values of all ranks
run_on_first       rank 0        each rank gets the value of rank 0
gather_on_first    every rank    rank 0 gets the values of all ranks

    model = run_on_all("loading", build)
    newest = run_on_first("looking for a checkpoint", find)

`StillHere` is for a loop with collectives. A rank that leaves the loop early informs the other
ranks.

An all-reduce of 8 bytes shows if a rank failed, and an all-reduce of 64 bytes (a hash and its
complement) shows if values differ (`find_differing`). Only if a rank failed or values differ, the
errors or values of all ranks are gathered. The bytes that a rank receives in a run without errors
therefore do not depend on the number of ranks. `gather_from_all` and `gather` are exceptions: they
always send all values to all ranks, padded to the longest value.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from hf_moe_ep.config import get_launched_rank, get_launched_world_size
from hf_moe_ep.ranks.timeouts import explain_timeout
from hf_moe_ep.upstream.process_groups import choose_device_of_objects, get_default_store

# How long ranks wait for each other at the start of a save.
PATIENCE = timedelta(minutes=5)
# How long rank 0 waits for the first other rank, in a function that scripts call inside
# `if is_main_process:` by mistake.
PATIENCE_OF_RANK_0 = timedelta(seconds=20)
# How long ranks wait for each other at the start of loading, and of sharding after each rank has
# loaded a model.
PATIENCE_OF_LOADING = timedelta(minutes=30)
# Errors of these classes (a wrong argument, a missing package) keep their class on all ranks.
_USER_ERRORS = (ValueError, ImportError)

Value = TypeVar("Value")


def check_everyone_calls(
    what: str,
    patience: timedelta | None = None,
    patience_of_rank_0: timedelta | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Check that all ranks of `group` call the function `what`.

    Args:
        what: the name of the function.
        patience: how long ranks wait for each other. None: PATIENCE.
        patience_of_rank_0: how long rank 0 waits for the first other rank. None: `patience`.
        group: the ranks; groups with the same first rank must have the same ranks. None: all ranks.

    Raises:
        RuntimeError: at least one rank did not call the function, for example because the call is
            inside `if is_main_process:`. Every rank that called it raises the error.
    """
    if not is_distributed():
        return
    patience = patience or PATIENCE
    store, world = get_default_store(), dist.get_world_size(group)
    calls = f"hf_moe_ep/{what}"
    if group is not None:
        calls = f"{calls}/from rank {dist.get_global_rank(group, 0)}"
    call_number = store.add(calls, 1)
    all_called = f"{calls}/{(call_number - 1) // world}"
    if call_number % world == 0:
        store.set(all_called, "")
    waited = (
        patience
        if patience_of_rank_0 is None or not is_first()
        else min(patience_of_rank_0, patience)
    )
    if _wait_for_key(all_called, waited):
        return
    if waited < patience and store.add(calls, 0) % world > 1:
        rest, waited = patience - waited, patience
        if _wait_for_key(all_called, rest):
            return
    present = store.add(calls, 0) % world
    store.add(calls, -1)
    raise RuntimeError(
        f"{what} was called on only {present} of {world} ranks within {waited}; call it on "
        f"every rank (rank 0 alone writes), not inside `if is_main_process:`"
    )


def _wait_for_key(key: str, patience: timedelta) -> bool:
    """Wait until a key of the store is set; return False if it is not set within `patience`."""
    try:
        get_default_store().wait([key], patience)
    except RuntimeError:  # DistStoreError
        return False
    return True


def check_alike(what: str, group: dist.ProcessGroup | None = None, /, **arguments: Any) -> None:
    """Compare arguments of the function `what` over all ranks, or over the ranks of `group`.

    Raises:
        ValueError: an argument differs. Every rank raises the error, with the values of two ranks.
    """
    by_rank = find_differing(arguments, group) or [arguments]
    ranks = range(len(by_rank)) if group is None else dist.get_process_group_ranks(group)
    for name, first in by_rank[0].items():
        for rank, values in zip(ranks, by_rank):
            if values[name] != first:
                raise ValueError(
                    f"ranks called {what} with different values of {name}: rank {ranks[0]} with "
                    f"{first!r}, rank {rank} with {values[name]!r}; pass the value of rank 0 on "
                    f"every rank (a time or a step in the value may depend on the rank)"
                )


def check_own_gpu(gpu: str) -> None:
    """Check that no two ranks compute on the same GPU; `gpu` is the UUID of this rank's GPU.

    Raises:
        ValueError: two ranks share a GPU. Every rank raises the error, which names both ranks.
    """
    store, rank, key = get_default_store(), this_rank(), "hf_moe_ep/gpu"
    holder = int(store.compare_set(f"{key}/{gpu}", "", str(rank)))
    if holder != rank:
        store.set(
            f"{key}/shared",
            f"ranks {holder} and {rank} would both compute on GPU {gpu} of "
            f"{socket.gethostname()}, and NCCL needs one GPU per rank; start one process per GPU "
            f"with torchrun or accelerate launch, and in each process call "
            f"torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else",
        )
    check_everyone_calls("apply_ep_fsdp2 or from_pretrained", PATIENCE_OF_LOADING)
    if store.check([f"{key}/shared"]):
        raise ValueError(store.get(f"{key}/shared").decode())


def run_on_all(
    what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None
) -> Value:
    """Run `part` on every rank of `group` and return the value of this rank.

    `what` describes the work in errors: "saving out/step-100". If a rank fails, every rank raises.

    Raises:
        ValueError: all errors were ValueErrors (a mistake of the user).
        ImportError: every rank raised an ImportError.
        RuntimeError: there were other errors; the message has each rank that failed, with its
            error.
    """
    value: Any = None
    failure: _Failure | None = None
    cause: BaseException | None = None
    try:
        value = part()
    # Every error is caught, because the other ranks would wait for this rank. CheckpointException,
    # the error of torch.distributed.checkpoint (DCP), is not an Exception.
    except (Exception, CheckpointException) as error:  # noqa: BLE001
        user_error = next((kind for kind in _USER_ERRORS if isinstance(error, kind)), None)
        failure, cause = _Failure(format_in_one_line(error), user_error), error
    explain = explain_timeout(what, group, ": ranks did not meet", goal="this point")
    try:
        with explain if failure is None else nullcontext():
            failed = _any_rank(failure is not None, group)
            failures = gather(failure, group) if failed else []
    except RuntimeError as error:
        if failure is None:
            raise
        raise RuntimeError(
            f"{what} failed on rank {this_rank()}: {failure.text}; the other ranks could not be "
            f"informed and wait for this rank in a collective: {error}"
        ) from cause
    _raise_any(what, failures, cause)
    return cast(Value, value)


def gather_from_all(
    what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None
) -> list[Value]:
    """Run `part` on every rank and return all values by rank. Errors are as in `run_on_all`."""
    return gather(run_on_all(what, part, group), group)


def gather_on_first(
    what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None
) -> list[Value] | None:
    """Run `part` on every rank and return all values on rank 0, and None on all other ranks."""
    value = run_on_all(what, part, group)
    if not is_distributed():
        return [value]
    by_rank: list[Any] | None = [None] * world_size(group) if is_first() else None
    dist.gather_object(value, by_rank, group=group, group_dst=0)
    return by_rank


def run_on_first(
    what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None
) -> Value:
    """Run `part` on rank 0 and return its value on every rank. Errors are as in `run_on_all`."""
    value = run_on_all(what, lambda: part() if is_first() else None, group)
    if not is_distributed():
        return cast(Value, value)
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return cast(Value, values[0])


def find_differing(value: Value, group: dist.ProcessGroup | None = None) -> list[Value] | None:
    """Return the values of all ranks if they differ, or None if all are the same.

    Values are compared by their repr. Equal values may have different reprs (1 and True), so a
    caller must compare the returned values itself.
    """
    _check_alive(group)
    if not is_distributed():
        return None
    digest = hashlib.sha256(repr(value).encode()).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    maxima = _max_over_group(torch.cat((words, ~words)), group)
    # maxima[4:] has the largest complements, so its complement has the smallest words.
    return None if torch.equal(maxima[:4], ~maxima[4:]) else gather(value, group)


def _any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return True if `flag` is true on at least one rank of `group`."""
    _check_alive(group)
    return bool(_max_over_group(torch.tensor(int(flag)), group)) if is_distributed() else flag


def _max_over_group(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    numbers = numbers.to(choose_device_of_objects(group))
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers.cpu()


class StillHere:
    """Detects that a rank leaves a loop with collectives early.

    Each rank calls `check` in each round. A rank that has finished all rounds calls `end`, and a
    rank that stops earlier calls `leave`. All three make the same small all-reduce, so `leave` on
    one rank runs together with the next `check` or `end` on the other ranks.
    """

    def __init__(self, what: str, device: torch.device) -> None:
        self._what, self._device = what, device

    def check(self) -> None:
        """Check that no other rank has left.

        Raises:
            RuntimeError: a rank has left the loop; the message names this rank.
        """
        if leaver := self._reduce(0):
            raise RuntimeError(
                f"rank {leaver - 1} stopped iterating over {self._what} early; every rank has to "
                f"iterate to the end, even if it does not use the items: for _ in ...: pass"
            )

    def leave(self) -> None:
        """Inform the other ranks that this rank leaves the loop."""
        if is_distributed():  # the process group may be destroyed while the interpreter exits
            self._reduce(this_rank() + 1)

    def end(self) -> None:
        """Finish the loop. It is not an error if another rank leaves after the last round."""
        self._reduce(0)

    def _reduce(self, number: int) -> int:
        largest = torch.tensor(number, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


@dataclass(frozen=True)
class _Failure:
    """The text of an error, which is sent to the other ranks.

    `user_error` is the class of the error if it is one of _USER_ERRORS, otherwise None.
    """

    text: str
    user_error: type[ValueError] | type[ImportError] | None


def _raise_any(what: str, by_rank: list[_Failure | None], cause: BaseException | None) -> None:
    """Raise one error for the failures of all ranks, if there are any."""
    failures = {rank: failure for rank, failure in enumerate(by_rank) if failure is not None}
    if not failures:
        return
    kinds = {failure.user_error for failure in failures.values()}
    kind = kinds.pop()
    # If only some ranks lack a package, a RuntimeError names these ranks.
    concerns_all = kind is ValueError or len(failures) == len(by_rank)
    if kind is not None and not kinds and concerns_all:
        text = next(iter(failures.values())).text
        raise kind(text.removeprefix(f"{kind.__name__}: ")) from cause
    texts = {rank: failure.text for rank, failure in failures.items()}
    # DCP raises the same error on every rank, which is then reported once.
    if len(set(texts.values())) == 1 and cause is not None:
        texts = {min(texts): next(iter(texts.values()))}
    lines = "; ".join(
        text if text.startswith("rank ") else f"rank {rank}: {text}" for rank, text in texts.items()
    )
    raise RuntimeError(f"{what} failed on {lines}") from cause


def gather(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks, by rank (without a process group, only this rank's value).

    Raises:
        RuntimeError: `group` was destroyed. Without this error, every rank would continue as if it
            were the only rank.
    """
    _check_alive(group)
    if not is_distributed():
        return [value]
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group=group)
    return by_rank


def _check_alive(group: dist.ProcessGroup | None) -> None:
    if group is not None and not is_distributed():
        raise RuntimeError(
            "the process group was destroyed while a save ran in the background; before "
            "destroy_process_group(), call wait() of the handle that save_checkpoint returned"
        )


def is_first() -> bool:
    """Return True on rank 0, and without a process group."""
    return this_rank() == 0


def this_rank() -> int:
    """Return the rank of this process (0 without a process group)."""
    return dist.get_rank() if is_distributed() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks of `group` (1 without a process group)."""
    return dist.get_world_size(group) if is_distributed() else 1


def is_distributed() -> bool:
    """Return True if torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def get_world_size_of_launch() -> int:
    """Return the number of ranks, also before torch.distributed is initialised."""
    return dist.get_world_size() if is_distributed() else get_launched_world_size()


def get_rank_of_launch() -> int:
    """Return the rank of this process, also before torch.distributed is initialised."""
    return dist.get_rank() if is_distributed() else get_launched_rank()


def format_in_one_line(error: BaseException) -> str:
    """Return the class and the text of an error; an error of DCP has both for each rank.

    Only the text of a ValueError is returned.
    """
    if isinstance(error, CheckpointException):
        errors = [
            f"rank {rank}: {type(cause).__name__}: {cause}"
            for rank, (cause, _) in sorted(error.failures.items())
        ]
        return "; ".join(errors)
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
