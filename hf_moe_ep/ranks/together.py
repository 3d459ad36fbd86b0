"""Where ranks meet so that none waits for another that failed, or never came.

check_everyone_calls   at the store, before the first collective: a rank that stays away is
                       named after five minutes, where a collective would hang
check_alike            arguments that decide what ranks do together
check_own_gpu          at the store too: NCCL's first collective fails where ranks share a GPU

Each rank does its part, and the error of one becomes the error of all:

together    returns this rank's own value     folder, model = together("loading", build)
everyone    returns every rank's              sizes = everyone("counting", count)
on_first    rank 0 alone works, all get it    newest = on_first("looking", find)
for_first   each works, rank 0 gets it all    parts = for_first("hashing", read)

StillHere   of loops over what ranks gather together: one that leaves early tells the others.

What a rank receives here does not grow with their number, as long as nobody failed and all agree:
an all-reduce tells whether a rank has failed (8 bytes), or has another value than the others
(`differing`: a hash and its complement, 64 bytes). Only then is gathered who, and what. `everyone`
and `gather` do grow, padded to the longest value: for what every rank needs of every other.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from hf_moe_ep.ranks.missing import name_missing_ranks
from hf_moe_ep.upstream.process_groups import default_store, device_of_objects

# How far ranks may be apart when they begin to save.
PATIENCE = timedelta(minutes=5)
# How long rank 0 waits for the first of the others, where `if is_main_process:` is usual.
ALONE = timedelta(seconds=20)
# When they begin to shard, each after it has loaded a model.
_LOADING = timedelta(minutes=30)
# Errors that stay what they are: of an argument, of a package that lacks.
_OF_USER = (ValueError, ImportError)

Value = TypeVar("Value")


def check_everyone_calls(
    what: str, patience: timedelta | None = None, alone: timedelta | None = None
) -> None:
    """Meet at the store: inside `if is_main_process:` the first collective would hang.

    Rank 0 waits for `alone` only, where it is given, as long as none of the others has come.
    """
    if not is_distributed():
        return
    patience = patience or PATIENCE
    store, world = default_store(), dist.get_world_size()
    called = f"hf_moe_ep/{what}"
    number = store.add(called, 1)
    met = f"{called}/{(number - 1) // world}"
    if number % world == 0:
        store.set(met, "")
    waited = patience if alone is None or not is_first() else min(alone, patience)
    if _came(met, waited):
        return
    if waited < patience and store.add(called, 0) % world > 1:
        rest, waited = patience - waited, patience
        if _came(met, rest):
            return
    present = store.add(called, 0) % world
    store.add(called, -1)
    raise RuntimeError(
        f"{what} was called on {present} of {world} ranks only, {waited} ago; call it on "
        f"every rank (rank 0 alone writes), not inside `if is_main_process:`"
    )


def _came(key: str, patience: timedelta) -> bool:
    """Wait for a key of the store; False where nobody has set it by then."""
    try:
        default_store().wait([key], patience)
    except RuntimeError:  # DistStoreError
        return False
    return True


def check_alike(what: str, **mine: Any) -> None:
    """Raise on every rank where one of these arguments of `what` differs between ranks.

    Raises:
        ValueError: it names the argument and two ranks' values.
    """
    by_rank = differing(mine) or [mine]
    for name, first in by_rank[0].items():
        for rank, theirs in enumerate(by_rank):
            if theirs[name] != first:
                raise ValueError(
                    f"ranks called {what} with another {name}: rank 0 with {first!r}, rank {rank} "
                    f"with {theirs[name]!r}; take rank 0's on every rank (look for a time or a "
                    f"step in it that depends on the rank)"
                )


def check_own_gpu(gpu: str) -> None:
    """Raise on every rank where two of them would compute on the same GPU; `gpu` is its UUID.

    Raises:
        ValueError: it names both ranks.
    """
    store, rank, key = default_store(), this_rank(), "hf_moe_ep/gpu"
    holder = int(store.compare_set(f"{key}/{gpu}", "", str(rank)))
    if holder != rank:
        store.set(
            f"{key}/shared",
            f"ranks {holder} and {rank} would both compute on GPU {gpu} of "
            f"{socket.gethostname()}, and NCCL needs one for each; start one process a GPU with "
            f"torchrun or accelerate launch, and in each call "
            f"torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else",
        )
    check_everyone_calls("apply_ep_fsdp2 or from_pretrained", _LOADING)
    if store.check([f"{key}/shared"]):
        raise ValueError(store.get(f"{key}/shared").decode())


def together(what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Run `part` on every rank and return its value here; every rank of `group` calls this.

    Raises:
        ValueError: on every rank, where all errors were ValueErrors (the user's mistake).
        ImportError: on every rank, where every rank had one.
        RuntimeError: on every rank, naming each rank that failed and why.
    """
    tried = _try(part)
    try:
        failed = _any_rank(tried.failure is not None, group)
        failures = gather(tried.failure, group) if failed else []
    except RuntimeError as error:
        if tried.failure is None:
            raise _not_met(what, group, error) from error
        raise RuntimeError(
            f"{what} failed on rank {this_rank()}: {tried.failure.text}; ranks did not meet after "
            f"that, they wait for this one in a collective: {error}"
        ) from tried.cause
    _raise_any(what, failures, tried.cause)
    return tried.value


def _not_met(what: str, group: dist.ProcessGroup | None, error: RuntimeError) -> RuntimeError:
    """Say who did not come, in a group that still is one."""
    if not is_distributed():
        return error
    return RuntimeError(
        f"{what}: ranks did not meet; {name_missing_ranks(what, group)} stopped, or did not come "
        f"within the process group's timeout ({error})"
    )


def everyone(
    what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None
) -> list[Value]:
    """Run `part` on every rank and return all values, in rank order; raises as `together`."""
    return gather(together(what, part, group), group)


def for_first(
    what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None
) -> list[Value] | None:
    """Run `part` on every rank and return all values on rank 0, None elsewhere; as `everyone`."""
    value = together(what, part, group)
    if not is_distributed():
        return [value]
    by_rank: list[Any] | None = [None] * world_size(group) if is_first() else None
    dist.gather_object(value, by_rank, group=group, group_dst=0)
    return by_rank


def on_first(what: str, part: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Run `part` on rank 0 alone and return its value on every rank; raises as `together`."""
    value = together(what, lambda: part() if is_first() else None, group)
    if not is_distributed():
        return cast(Value, value)
    told = [value]
    dist.broadcast_object_list(told, group=group, group_src=0)
    return cast(Value, told[0])


def differing(value: Value, group: dist.ProcessGroup | None = None) -> list[Value] | None:
    """Return every rank's `value` where they differ, None where all are the same.

    `value` is told from others by its repr. Where two that are equal have another one, they come
    back here and whoever compares them finds no difference.
    """
    _check_alive(group)
    if not is_distributed():
        return None
    digest = hashlib.sha256(repr(value).encode()).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    highest = _highest(torch.cat((words, ~words)), group)
    # The complement of the lowest is the highest complement.
    return None if torch.equal(highest[:4], ~highest[4:]) else gather(value, group)


def _any_rank(here: bool, group: dist.ProcessGroup | None) -> bool:
    """Tell whether this is so on a rank of `group`."""
    _check_alive(group)
    return bool(_highest(torch.tensor(int(here)), group)) if is_distributed() else here


def _highest(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    numbers = numbers.to(device_of_objects(group))
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers.cpu()


class StillHere:
    """Ranks that go through one loop in step: `check` in each round, then `leave` or `end`.

    One small all-reduce each. What a rank calls last meets a `check` or the `end` of the others.
    """

    def __init__(self, what: str, device: torch.device) -> None:
        self._what, self._device = what, device

    def check(self) -> None:
        """Raise where another rank has left.

        Raises:
            RuntimeError: it names the rank.
        """
        if leaver := self._tell(0):
            raise RuntimeError(
                f"rank {leaver - 1} stopped iterating over {self._what} early; every rank has to "
                f"iterate to the end, also where it uses nothing of it: for _ in ...: pass"
            )

    def leave(self) -> None:
        """Tell the others that this rank goes no further."""
        if is_distributed():  # the interpreter may be ending
            self._tell(this_rank() + 1)

    def end(self) -> None:
        """Meet a rank that leaves after the last round, when it is missing nothing."""
        self._tell(0)

    def _tell(self, number: int) -> int:
        told = torch.tensor(number, device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return int(told)


@dataclass(frozen=True)
class _Failure:
    """The text of an error, for the other ranks."""

    text: str
    of_user: type[ValueError] | type[ImportError] | None


@dataclass(frozen=True)
class _Tried:
    """What came of a rank's part: its value, or an error and what is told of it."""

    value: Any = None
    failure: _Failure | None = None
    cause: BaseException | None = None


def _try(part: Callable[[], Any]) -> _Tried:
    try:
        return _Tried(part())
    # Any error: kept to itself it would leave the other ranks waiting. DCP's is no Exception.
    except (Exception, CheckpointException) as error:  # noqa: BLE001
        of_user = next((kind for kind in _OF_USER if isinstance(error, kind)), None)
        failure = _Failure(one_line(error), of_user)
        return _Tried(failure=failure, cause=error)


def _raise_any(what: str, by_rank: list[_Failure | None], cause: BaseException | None) -> None:
    failures = {rank: failure for rank, failure in enumerate(by_rank) if failure is not None}
    if not failures:
        return
    kinds = {failure.of_user for failure in failures.values()}
    of_user = kinds.pop()
    # What one machine lacks is told with its rank.
    everywhere = of_user is ValueError or len(failures) == len(by_rank)
    if of_user is not None and not kinds and everywhere:
        text = next(iter(failures.values())).text
        raise of_user(text.removeprefix(f"{of_user.__name__}: ")) from cause
    texts = {rank: failure.text for rank, failure in failures.items()}
    if len(set(texts.values())) == 1 and cause is not None:  # DCP tells every rank the same
        texts = {min(texts): next(iter(texts.values()))}
    lines = "; ".join(
        text if text.startswith("rank ") else f"rank {rank}: {text}" for rank, text in texts.items()
    )
    raise RuntimeError(f"{what} failed on {lines}") from cause


def gather(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Gather `value` of every rank, in order; of this process alone without a process group.

    Raises:
        RuntimeError: `group` was destroyed: a rank that went on alone would take itself for rank 0.
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
            "the process group was destroyed while a save ran in the background; call wait() on "
            "what save_checkpoint returned before destroy_process_group()"
        )


def is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    return this_rank() == 0


def this_rank() -> int:
    """This process's rank, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of `group`, 1 without a process group."""
    return dist.get_world_size(group) if is_distributed() else 1


def is_distributed() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def one_line(error: BaseException) -> str:
    """Put an error into one line; of DCP's error each rank's own."""
    if isinstance(error, CheckpointException):
        parts = [
            f"rank {rank}: {type(cause).__name__}: {cause}"
            for rank, (cause, _) in sorted(error.failures.items())
        ]
        return "; ".join(parts)
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
