"""What a rank that is aborted, or whose peer is gone, says of where it was."""

import ctypes
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from support.ranks import run_ranks

from hf_moe_ep import ParallelConfig
from hf_moe_ep.ranks import collectives, places
from hf_moe_ep.ranks.collectives import gather_counts
from hf_moe_ep.ranks.mesh import build_meshes
from hf_moe_ep.ranks.places import Place, enter, tell_on_abort

CPU = torch.device("cpu")


def _abort_from_a_thread_of_its_own() -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_create(
        ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None
    )


def _aborted_while_it_waits(rank: int, world: int, folder: str) -> None:
    """As under NCCL: a thread that knows no Python aborts the process, rank 1 never comes."""
    group = build_meshes(ParallelConfig(ep_size=2), CPU).ep.get_group()
    gather_counts(torch.zeros(1, dtype=torch.int64), group, where="MoE layer 4 of forward 7")
    if rank % 2:
        time.sleep(3)
        return
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    places._SECONDS = 0.05
    faulthandler.disable()  # run_ranks has it on, into a file of its own; a user's rank has it off
    tell_on_abort()
    tell_on_abort()  # once
    threading.Timer(1, _abort_from_a_thread_of_its_own).start()
    gather_counts(torch.zeros(1, dtype=torch.int64), group, where="MoE layer 5 of forward 7")


def test_an_abort_tells_the_place(tmp_path: Path) -> None:
    outcomes = run_ranks(_aborted_while_it_waits, 4, str(tmp_path), expect_errors=True)
    for rank in (0, 2):
        assert outcomes[rank][:2] == ("error", "ProcessDied"), outcomes
        stack = (tmp_path / f"stderr{rank}").read_text()
        where = "in MoE layer 5 of forward 7: counts, group mesh_ep of ranks"
        assert f"{where} {rank}, {rank + 1}\n" in stack, stack
        assert stack.count("oldest exchange of this rank that has not ended") == 1, stack
        assert "layer 4" not in stack, stack


def the_gpus_own_error_is_told_apart(rank: int, world: int) -> None:
    """A device-side assertion is found at the next exchange: no word of a rank that never came."""

    def stopped(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    match = r"^here: counts, group default_pg of ranks 0, 1: .* above on stderr.*device-side"
    for found_by in (stopped, lambda *_, **__: SimpleNamespace(wait=stopped)):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(collectives, "_all_gather", found_by)
            with pytest.raises(RuntimeError, match=match) as caught:
                gather_counts(torch.zeros(1), dist.group.WORLD, where="here")
        assert "never reached" not in str(caught.value)


def on_a_gpu_the_device_ends_an_exchange(rank: int, world: int) -> None:
    """Not the host, which goes on at once; it asks the device when its next exchange begins.

    No other thread asks: the one that sleeps under the name of a place reads what was seen.
    """
    reached: list[str] = []
    asked_by: set[int] = set()

    class Event:
        def record(self) -> None:
            self.number = len(begun)

        def query(self) -> bool:
            asked_by.add(threading.get_ident())
            if "the end" in reached:
                raise torch.AcceleratorError("CUDA error: device-side assert triggered")
            return len(reached) >= self.number

    def under_way() -> list[str]:
        return [str(place).partition(":")[0] for place in places._UNDER_WAY]

    begun: list[Place] = []
    places._UNDER_WAY.clear()
    places._SECONDS = 0.01
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.cuda, "Event", Event)
        for layer in range(3):
            begun.append(enter(f"layer {layer}", "rows", dist.group.WORLD))
            begun[-1].leave(on_gpu=True)
    assert under_way() == ["layer 0", "layer 1", "layer 2"]
    tell_on_abort()
    _wait_until_sleeping_in("layer 0")
    reached.append("the first")
    assert not begun[0].ended, "nobody has asked since"
    enter("the host", "counts", dist.group.WORLD).leave()
    assert under_way() == ["layer 1", "layer 2", "the host"]
    _wait_until_sleeping_in("layer 1")
    reached.append("the end")  # of a GPU that an assertion stopped: nothing more ends on it
    enter("the last", "counts", dist.group.WORLD)
    assert under_way() == ["layer 1", "layer 2", "the host", "the last"]
    assert asked_by == {threading.get_ident()}


def _wait_until_sleeping_in(place: str) -> None:
    """Wait until the thread that tells the place sleeps under this name."""
    (teller,) = (t for t in threading.enumerate() if isinstance(t, places._Teller))
    assert teller.ident is not None
    for _ in range(1000):
        frame = sys._current_frames()[teller.ident]
        if frame.f_code.co_name.startswith(place):
            return
        time.sleep(0.005)
    raise AssertionError(f"it never slept under the name of {place}")


ON_TWO_RANKS = on_ranks(
    2,
    the_gpus_own_error_is_told_apart,
    on_a_gpu_the_device_ends_an_exchange,
)


@pytest.mark.parametrize("claim", ON_TWO_RANKS)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
