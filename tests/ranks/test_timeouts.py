"""If a rank does not take part in a collective, the other ranks time out and name this rank."""

import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from hf_moe_ep.ranks import timeouts
from hf_moe_ep.ranks.all_ranks import run_on_all
from hf_moe_ep.ranks.background import Saver
from hf_moe_ep.ranks.collectives import start_counts
from hf_moe_ep.upstream.process_groups import get_default_store

TIMEOUT_SECONDS = 2.0
QUIET_SECONDS = 0.5
PLACES = ("counts", "run_on_all", "saves")


def _wait_at(place: str, group: dist.ProcessGroup) -> None:
    if place == "counts":
        counts = torch.ones(dist.get_world_size(group), 2, dtype=torch.int64)
        start_counts(counts, group, where="MoE layer 0 of forward 1").wait()
    elif place == "run_on_all":
        run_on_all("saving out/step-1", lambda: None, group)
    else:
        Saver().start(Path("out/step-1"), lambda _: None, torch.device("cpu"))


def _wait_without(rank: int, world: int, gone: int) -> dict[str, str]:
    """Wait at each place without the rank `gone`, and return the errors."""
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    groups = {place: dist.new_group(timeout=timeout, group_desc=place) for place in PLACES}
    if rank == gone:
        get_default_store().wait([f"done {other}" for other in range(world) if other != gone])
        return {}
    errors = {}
    with mock.patch.object(timeouts, "_QUIET", QUIET_SECONDS):
        for place, group in groups.items():
            with pytest.raises(RuntimeError) as caught:
                _wait_at(place, group)
            errors[place] = str(caught.value)
    get_default_store().set(f"done {rank}", "")
    return errors


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str]]:
    return run_ranks(_wait_without, 3, 1, group_timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("place", PLACES)
def test_the_missing_rank_is_named(errors: list[dict[str, str]], place: str) -> None:
    """Ranks wait in a layer's exchange, in `run_on_all`, or where a save creates its group."""
    for rank in (0, 2):
        assert "; rank 1 stopped, or never reached this " in errors[rank][place]


def _name_missing(rank: int, world: int) -> tuple[str, str, str]:
    """Name the missing ranks of three failures.

    All ranks fail at one place; ranks fail at two places; or the store does not answer.
    """
    nobody = timeouts.name_missing_ranks("here", None)
    group_of_two = dist.new_group([0, 1], group_desc="two")
    elsewhere = timeouts.name_missing_ranks(f"place {rank}", group_of_two)

    class Silent:
        def append(self, *_: object) -> None:
            time.sleep(60)

    with (
        mock.patch.object(timeouts, "get_default_store", Silent),
        mock.patch.object(timeouts, "_STORE_TIMEOUT", 0.2),
    ):
        return nobody, elsewhere, timeouts.name_missing_ranks("here", None)


def test_the_network_another_place_or_the_host_of_the_store_is_named() -> None:
    first, second = run_ranks(_name_missing, 2)
    nobody = "none of these ranks, but the network between them,"
    host = "rank 0, or another rank that hosts the store,"
    assert first == (nobody, "rank 1 (place 1)", host)
    assert second == (nobody, "rank 0 (place 0)", host)
