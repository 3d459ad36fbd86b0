"""A fake of the package `deep_ep` that runs on CPU ranks, written from DeepEP's documentation.

It behaves like V1's `Buffer` in normal mode between GPUs of one node. Results have the same shapes,
dtypes and order, and are `None` in the same cases, the handle has the same six tensors, and the
same arguments are refused. It is slow: every exchange is one `all_gather_object`.

It finds errors about which a GPU is silent. The results of an asynchronous call are full of NaN (or
of wrong ids) until `current_stream_wait` is called on its event. Ranks that call different
operations get an error. A transfer that is never waited for stays counted in `Buffer.under_way`.
`Buffer.log` lists the starts and the waits of all transfers, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_RANKS_WITH_SETTINGS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_SLOTS = 256  # rows that a buffer can hold per channel and peer
_NONSENSE = -12345
Handle = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Config:
    """The tuning of one operation, which determines the size of the buffer."""

    def __init__(self, num_sms: int, send_slots: int, receive_slots: int) -> None:
        assert num_sms >= 0 and 0 < send_slots < receive_slots
        self._num_channels, self._slots = num_sms // 2, receive_slots

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        metadata = 2048
        return self._num_channels * num_ranks * self._slots * (hidden_bytes + metadata)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        raise RuntimeError("Failed: Assertion error 'NVSHMEM is disable during compilation'")


class EventOverlap:
    """An event that can be waited for, or none."""

    def __init__(self, arrive: Callable[[], None] | None = None) -> None:
        self.event = arrive

    def current_stream_wait(self) -> None:
        assert self.event is not None, "only an asynchronous call has an event"
        self.event()


class Buffer:
    """The buffer of one process group. All ranks of the group call every method."""

    num_sms: int = 20
    log: list[str] = []  # noqa: RUF012  global like num_sms, because a process has one stream
    under_way: int = 0
    made: int = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_nvl_bytes % 128 == 0 and num_rdma_bytes == 0 and not low_latency_mode
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy, self.destroyed = explicitly_destroy, False
        self._gather_arguments("make", num_nvl_bytes)
        Buffer.made += 1

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        assert not self.destroyed
        self._gather_arguments("destroy", None)
        self.destroyed = True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in _RANKS_WITH_SETTINGS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 6, _SLOTS)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in _RANKS_WITH_SETTINGS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 4, _SLOTS)

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Return (tokens per rank, None, tokens per expert, is token in rank, empty event)."""
        assert not self.destroyed
        _check(topk_idx, torch.int64, (None, None))
        in_rank = _in_rank(topk_idx, num_experts, self.group_size)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        config: Config | None = None,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        """Return (rows, ids, weights, tokens per local expert, handle, event).

        If a handle is passed, all results but the rows and the event are None.
        """
        config = self.get_dispatch_config(self.group_size) if config is None else config
        self._check_rows(x, config)
        if handle is not None:
            layout = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
            assert all(argument is None for argument in (topk_idx, topk_weights, *layout))
            return self._dispatch_with_handle(x, handle, config, async_finish)
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        assert num_tokens_per_rank is not None and num_tokens_per_rdma_rank is None
        assert topk_idx is not None and topk_weights is not None, "this fake sends both"
        ranks, num_experts, top_k = self.group_size, len(num_tokens_per_expert), topk_idx.shape[1]
        _check(num_tokens_per_rank, torch.int32, (ranks,))
        _check(num_tokens_per_expert, torch.int32, (num_experts,))
        _check(is_token_in_rank, torch.bool, (len(x), ranks))
        _check(topk_idx, torch.int64, (len(x), None))
        _check(topk_weights, torch.float32, (len(x), top_k))
        assert num_experts % ranks == 0 and top_k <= 32
        assert torch.equal(is_token_in_rank, _in_rank(topk_idx, num_experts, ranks))
        arguments = self._gather_arguments(
            "dispatch",
            (
                x,
                topk_idx,
                topk_weights,
                is_token_in_rank,
                num_tokens_per_rank,
                num_tokens_per_expert,
            ),
        )
        rows, ids, weights = self._select_received(arguments, num_experts // ranks)
        per_expert = torch.stack([tensors[5] for tensors in arguments]).sum(0).view(ranks, -1)
        results = self._return_later("dispatch", async_finish, rows, ids, weights)
        handle = self._make_handle(arguments, is_token_in_rank, config)
        return *results[:3], per_expert[self.rank].tolist(), handle, results[3]

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        config: Config | None = None,
        async_finish: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return (tokens, weights or None, event).

        Tokens and weights are sums over ranks. Rows are summed in fp32 and rounded once.
        """
        config = self.get_combine_config(self.group_size) if config is None else config
        self._check_rows(x, config)
        prefix_DD, _, channels, source_R, _, heads_TD = handle
        assert channels.shape[1] == config._num_channels, "handle of another number of SMs"
        assert source_R.shape[0] == x.shape[0]
        if topk_weights is not None:
            _check(topk_weights, torch.float32, (len(x), None))
        arguments = self._gather_arguments("combine", (x, topk_weights, source_R))
        out_TH = torch.zeros(len(heads_TD), x.shape[1])
        out_TK = None
        if topk_weights is not None:
            out_TK = torch.zeros(len(heads_TD), topk_weights.shape[1])
        for rank, (rows, weights, source) in enumerate(arguments):
            first = int(prefix_DD[self.rank - 1, rank]) if self.rank else 0
            ours = slice(first, int(prefix_DD[self.rank, rank]))
            out_TH.index_add_(0, source[ours].long(), rows[ours].float())
            if out_TK is not None:
                out_TK.index_add_(0, source[ours].long(), weights[ours])
        results = self._return_later("combine", async_finish, out_TH.bfloat16(), out_TK)
        tokens, weights, event = results
        return tokens, weights, event

    def _dispatch_with_handle(
        self, x: Tensor, handle: Handle, config: Config, async_finish: bool
    ) -> tuple[Any, ...]:
        _, channels, _, source_R, in_rank, _ = handle
        assert channels.shape[1] == config._num_channels, "handle of another number of SMs"
        _check(in_rank, torch.bool, (len(x), self.group_size))
        arguments = self._gather_arguments("dispatch again", (x, in_rank))
        rows = torch.cat([x[in_rank[:, self.rank]] for x, in_rank in arguments])
        assert len(rows) == len(source_R)
        rows, event = self._return_later("dispatch", async_finish, rows)
        return rows, None, None, None, None, event

    def _select_received(
        self, arguments: list[Any], num_local: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows for this rank, ordered by sender and token, with their ids and weights.

        Ids count from this rank's first expert; experts of other ranks have id -1 and weight 0.
        """
        masks = [in_rank[:, self.rank] for _, _, _, in_rank, _, _ in arguments]
        x, ids, weights = (
            torch.cat([tensors[i][mask] for tensors, mask in zip(arguments, masks)])
            for i in range(3)
        )
        ids = ids - self.rank * num_local
        absent = (ids < 0) | (ids >= num_local)
        return x, ids.masked_fill(absent, -1), weights.masked_fill(absent, 0)

    def _make_handle(self, arguments: list[Any], in_rank: Tensor, config: Config) -> Handle:
        prefix_DD = torch.stack([tensors[4] for tensors in arguments]).cumsum(0).int()
        sources = [tensors[3][:, self.rank].nonzero()[:, 0] for tensors in arguments]
        source_R = torch.cat(sources).int()
        channels = torch.zeros(self.group_size, config._num_channels, dtype=torch.int32)
        heads_TD = torch.where(in_rank, in_rank.cumsum(0) - 1, -1).int()
        return prefix_DD, channels, channels.clone(), source_R, in_rank, heads_TD

    def _return_later(
        self, name: str, async_finish: bool, *results: Tensor | None
    ) -> tuple[Any, ...]:
        """Return `results` and an event. With `async_finish`, waiting for it fills the results.

        They are filled through `.data`, because a kernel on another stream increments no version
        counter.
        """
        Buffer.log.append(f"start {name}")
        if not async_finish:
            return *results, EventOverlap()
        empty = [None if result is None else _full_of_nonsense(result) for result in results]
        arrived = False

        def arrive() -> None:
            nonlocal arrived
            Buffer.log.append(f"wait {name}")
            Buffer.under_way -= not arrived
            arrived = True
            for tensor, result in zip(empty, results):
                if tensor is not None and result is not None:
                    tensor.data.copy_(result)

        Buffer.under_way += 1
        return *empty, EventOverlap(arrive)

    def _gather_arguments(self, name: str, tensors: Any) -> list[Any]:
        """Gather the arguments of a call from all ranks, which must call the same operation."""
        calls: list[Any] = [None] * self.group_size
        if isinstance(tensors, tuple):
            tensors = tuple(None if t is None else t.detach() for t in tensors)
        dist.all_gather_object(calls, (name, tensors), group=self.group)
        names = [name for name, _ in calls]
        assert len(set(names)) == 1, f"ranks call different operations: {names}"
        return [tensors for _, tensors in calls]

    def _check_rows(self, x: Tensor, config: Config) -> None:
        assert not self.destroyed
        _check(x, torch.bfloat16, (None, None))
        assert x.shape[1] % 16 == 0, "hidden_int4 % 2 == 0"
        needed = config._num_channels * self.group_size * _SLOTS * x.shape[1] * 2
        assert needed <= self.num_nvl_bytes, "the buffer is too small for this hidden size"


def _full_of_nonsense(result: Tensor) -> Tensor:
    return torch.full_like(result, float("nan") if result.is_floating_point() else _NONSENSE)


def _in_rank(topk_idx: Tensor, num_experts: int, ranks: int) -> Tensor:
    rank_of_pair_TK = topk_idx // (num_experts // ranks)
    return torch.stack([(rank_of_pair_TK == rank).any(1) for rank in range(ranks)], 1)


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    assert tensor.dtype == dtype, f"want {dtype}, got {tensor.dtype}"
    assert tensor.is_contiguous() and tensor.dim() == len(shape)
    assert all(want in (None, got) for got, want in zip(tensor.shape, shape))
