"""At a layer's only sync the host reads few numbers, however many ranks there are.

Only one rank runs, in torch's fake process group. All other ranks are assumed to send the same
counts as this rank.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.upstream.process_groups import fake_group

TOKENS, TOP_K = 64, 8
HEADER = Header(1, 0, True, True, False, False, TOP_K, 4)


@contextmanager
def _simulate_equal_ranks(rank: int) -> Iterator[list[float]]:
    """Receive this rank's counts from every rank; yield the start times of all-to-alls of rows."""
    times: list[float] = []
    stock = dist.all_to_all_single

    def swap(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.dtype == torch.int64:
            handle = stock(out, rows, *args, **kwargs)
            out.copy_(rows[rank].expand_as(out))
            return handle
        times.append(time.perf_counter())
        return stock(out, rows, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "all_to_all_single", swap)
        yield times


@pytest.mark.parametrize("num_experts", [256, 512])
@pytest.mark.parametrize("world", [8, 64, 256])
def test_the_host_reads_two_numbers_per_rank_and_one_per_local_expert(
    world: int, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test prints the milliseconds from the counts to the start of the first transfer."""
    read: list[int] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        read.append(tensor.numel())
        return tolist(tensor)

    rank, milliseconds = world // 2, []
    ids_TK = torch.rand(TOKENS, num_experts).argsort(1)[:, :TOP_K]
    tokens = Tokens(torch.randn(TOKENS, 8), torch.rand(TOKENS, TOP_K), ids_TK)
    monkeypatch.setattr(Tensor, "tolist", counted)
    with fake_group(rank, world), _simulate_equal_ranks(rank) as transfers:
        assert dist.group.WORLD is not None
        dispatcher = AllToAll(dist.group.WORLD, num_experts)
        for _ in range(20):
            read.clear()
            transfers.clear()
            planning = dispatcher.start_plan(ids_TK, HEADER)
            dispatcher.prepare(tokens)
            start = time.perf_counter()
            (exchange,) = planning.finish()
            exchange.start(tokens)
            milliseconds.append(1e3 * (transfers[0] - start))
            assert read == [1 + 2 * world + num_experts // world]
    owners = (ids_TK // (num_experts // world)).tolist()
    to_ranks = [sum(other in ranks for ranks in owners) for other in range(world)]
    assert exchange.num_own == to_ranks[rank]
    to_ranks[rank] = 0
    assert exchange.send_counts == to_ranks
    # Every rank sends this rank as many rows as this rank keeps.
    assert exchange.recv_counts == [exchange.num_own * (other != rank) for other in range(world)]
    experts = range(rank * num_experts // world, (rank + 1) * num_experts // world)
    chosen = [int((ids_TK == expert).sum()) for expert in experts]
    assert exchange.counts_L == [world * count for count in chosen]
    median = statistics.median(milliseconds)
    print(f"{world} ranks, {num_experts} experts: {median:.3f} ms after the counts")
