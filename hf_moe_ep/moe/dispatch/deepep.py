"""Dispatch and combine by DeepEP's kernels, behind the contract of dispatch.py.

`dispatcher="deepep"`: rows go from GPU to GPU over NVLink (and RDMA between nodes) through a buffer
that DeepEP owns, instead of through NCCL. Three things differ from dispatch.py. Rows arrive in the
order of their senders, own ones among them. Weights of experts that are not here arrive as 0. And
`start` is where the host waits, once per chunk, for how many rows come. Two ranks with experts
{0 1} and {2 3}, rank 0 with t0 -> [0, 3], t1 -> [2, 3] and weights [.5, .25], [2, 4], rank 1 with
no token; L = 2 is "not here":

    rank 0 gets t0       ids [[0, L]]            weights [[.5, 0]]
    rank 1 gets t0, t1   ids [[L, 1], [0, 1]]    weights [[0, .25], [2, 4]]

DeepEP's two operations are each other's adjoint: dispatch copies a token to ranks, combine adds
what ranks hold of a token. So the gradient of dispatch is a combine, and that of combine a dispatch
along the same way (`handle`). Our experts have applied the weights before combine only adds rows.

A handle is made of tensors and fits any buffer of as many SMs: one may grow before backward.

Not noticed here: ranks at different places of the model. They get each other's tokens, or DeepEP's
time-out; `dispatcher="all_to_all"` finds out.

Interface: `Buffer` of https://github.com/deepseek-ai/DeepEP, deep_ep/buffer.py in V1.2 and
deep_ep/buffers/legacy.py in V2; the limits checked here stand in its csrc/deep_ep.cpp and
csrc/kernels/intranode.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.moe.dispatch.async_exchange import CombinedRows, Wire
from hf_moe_ep.ops.autograd import mark_without_grad, nothing
from hf_moe_ep.ranks.collectives import gather_counts

# Ranks that are one node to DeepEP, and its default of queue pairs: between nodes as many as SMs.
_RANKS_PER_NODE, _QUEUE_PAIRS = 8, 24
# Rows are copied in two halves of 16-byte words; one warp carries a token's experts.
_HIDDEN_MULTIPLE, _MAX_TOP_K = 16, 32
# What `get_dispatch_layout` returns, by the names that `dispatch` has for it.
_LAYOUT = (
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "num_tokens_per_expert",
    "is_token_in_rank",
)
_REMEDY = 'or use dispatcher="all_to_all", which works everywhere'


def load_deep_ep() -> Any:
    """The class `deep_ep.Buffer`, imported when it is first asked for."""
    try:
        from deep_ep import Buffer
    except ImportError as error:
        raise ImportError(_not_installed(str(error))) from error
    if Buffer is None:  # V2, built with DISABLE_LEGACY
        raise ImportError(_not_installed("this build lacks the legacy Buffer"))
    return Buffer


def _not_installed(why: str) -> str:
    return (
        f'dispatcher="deepep" needs the class deep_ep.Buffer: {why}. Build DeepEP 1.2 or newer '
        "from source (its README on GitHub says how), for NVIDIA GPUs that all see each "
        f"other over NVLink: sm_90, or sm_80 without its SM90 features; {_REMEDY}"
    )


class GroupBuffer:
    """DeepEP's buffer of one ep group: the one place that sizes, makes and frees it.

    Kept by what keeps the group, the state of a patched model: nothing is global. Its GPU memory is
    not torch's: by DeepEP's formula 126 MB for 8 ranks, 20 SMs and hidden 2048.

    Args:
        group: 2, 4 or 8 ranks of one node, or a multiple of 8 whose consecutive eights are nodes.
        num_sms: streaming multiprocessors that move rows, even; None leaves DeepEP's choice (20).

    Raises:
        ImportError: deep_ep is not there.
        ValueError: an odd number of SMs, or a group size that DeepEP has no settings for.
    """

    def __init__(self, group: dist.ProcessGroup, *, num_sms: int | None = None) -> None:
        self._class, self._buffer, self.hidden_bytes = load_deep_ep(), None, 0
        self.group, self.num_ranks = group, dist.get_world_size(group)
        if num_sms is not None:
            if num_sms < 2 or num_sms % 2:
                raise ValueError(
                    f"DeepEP moves rows by pairs of SMs: num_sms must be even and >= 2, got "
                    f"{num_sms}; try {max(2, num_sms + 1)}"
                )
            # One number for all buffers of the process; only the calls below read it.
            self._class.set_num_sms(num_sms)
        self._queue_pairs = max(_QUEUE_PAIRS, self._class.num_sms)
        try:
            self.dispatch_config = self._class.get_dispatch_config(self.num_ranks)
            self.combine_config = self._class.get_combine_config(self.num_ranks)
        except AssertionError as error:
            raise ValueError(
                f"DeepEP has no settings for ep_size={self.num_ranks}; try 2, 4, 8, 16, 32 or 64, "
                f"{_REMEDY}"
            ) from error

    def reserve(self, hidden_bytes: int) -> None:
        """Have room for rows of so many bytes, in a new buffer where the one that is there is too
        small; every rank of the group calls it with the same.
        """
        if self._buffer is not None and hidden_bytes <= self.hidden_bytes:
            return
        self.free()
        configs, ranks = (self.dispatch_config, self.combine_config), self.num_ranks
        nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs)
        rdma_bytes = 0
        if ranks > _RANKS_PER_NODE:  # a build without NVSHMEM raises even where the answer is 0
            hints = [config.get_rdma_buffer_size_hint(hidden_bytes, ranks) for config in configs]
            rdma_bytes = max(hints)
        # Freed by `free` alone: the destructor waits for other ranks, which may be gone by then.
        options = {"num_qps_per_rank": self._queue_pairs, "explicitly_destroy": True}
        self._buffer = self._class(self.group, nvl_bytes, rdma_bytes, **options)
        self.hidden_bytes = hidden_bytes

    def free(self) -> None:
        """Give the memory back; every rank of the group calls it, before the group is destroyed."""
        buffer, self._buffer, self.hidden_bytes = self._buffer, None, 0
        if buffer is not None:
            buffer.destroy()

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupBuffer:
        """The copy of a model runs in the same group, one layer after the other: one buffer."""
        return self

    @property
    def alive(self) -> Any:
        """The `deep_ep.Buffer` that is there now."""
        if self._buffer is None:
            raise RuntimeError(
                "this ep group's DeepEP buffer was freed; free it behind the last backward only"
            )
        return self._buffer

    def check_rows(self, rows_XH: Tensor) -> None:
        """Raise what DeepEP answers with an assertion of its own, or with the process's end."""
        hidden, num_bytes = rows_XH.shape[1], rows_XH.shape[1] * rows_XH.element_size()
        if rows_XH.dtype != torch.bfloat16:
            raise ValueError(
                f"DeepEP sends hidden states in torch.bfloat16 only, got {rows_XH.dtype}; load the "
                f"model in bf16 or train under bf16 mixed precision, {_REMEDY}"
            )
        if hidden % _HIDDEN_MULTIPLE:
            raise ValueError(
                f"DeepEP needs a hidden size that is a multiple of {_HIDDEN_MULTIPLE}, got "
                f"{hidden}; try {hidden + -hidden % _HIDDEN_MULTIPLE}, {_REMEDY}"
            )
        if self.alive and num_bytes > self.hidden_bytes:
            raise ValueError(
                f"rows of {num_bytes} bytes do not fit the buffer, which was reserved for "
                f"hidden_bytes={self.hidden_bytes}; plan with the size of these hidden states"
            )


@dataclass(frozen=True)
class DeepEPPlan:
    """Where the rows of some tokens go; may be started again and again, with the same outcome.

    Attributes:
        num_local: experts of this rank.
        layout: what DeepEP's dispatch has to be told about the tokens, by its names for it.
        where: the place in the model, for errors.
    """

    buffer: GroupBuffer
    num_tokens: int
    num_local: int
    layout: dict[str, Any]
    where: str

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> DeepEPRows:
        """Send every token to the ranks of its experts; differentiable in tokens and weights.

        `expert_ids_TK` is what the plan was made from. Weights travel in fp32.
        """
        self.buffer.check_rows(x_TH)
        wire = _BufferWire(self)
        try:
            *rows, ids_RK = _StartDispatch.apply(wire, x_TH, weights_TK.float(), expert_ids_TK)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.where}: DeepEP could not exchange rows; a rank of this ep group stopped, "
                f"or never reached this layer within DeepEP's time-out ({error})"
            ) from error
        return DeepEPRows(wire, tuple(rows), ids_RK)


def plan_deepep(
    expert_ids_TK: Tensor,
    *,
    num_experts: int,
    buffer: GroupBuffer,
    hidden_bytes: int,
    num_chunks: int = 1,
    max_rows: int | None = None,
    where: str = "a MoE layer",
) -> list[DeepEPPlan]:
    """One plan for each of `num_chunks` consecutive parts of the tokens; no row travels yet.

    `hidden_bytes` is the size of one token's hidden states; ids are int64. `max_rows` costs a host
    sync: ranks gather how many rows they are going to send.

    Raises:
        ValueError: more experts per token than DeepEP can carry.
        RuntimeError: on every rank of the group and before it allocates a row, where one would get
            more than `max_rows` of them in this layer.
    """
    top_k = expert_ids_TK.shape[1]
    if top_k > _MAX_TOP_K:
        raise ValueError(
            f"DeepEP carries at most {_MAX_TOP_K} experts per token, this router chooses {top_k}; "
            f"choose fewer, {_REMEDY}"
        )
    buffer.reserve(hidden_bytes)
    parts = [ids.contiguous() for ids in expert_ids_TK.tensor_split(num_chunks)]
    find_layout = buffer.alive.get_dispatch_layout
    layouts = [dict(zip(_LAYOUT, find_layout(ids, num_experts))) for ids in parts]
    if max_rows is not None:
        _check_max_rows(layouts, max_rows, buffer.group, where)
    return [
        DeepEPPlan(buffer, len(ids), num_experts // buffer.num_ranks, layout, where)
        for ids, layout in zip(parts, layouts, strict=True)
    ]


class DeepEPRows:
    """Rows on their way to the ranks of their experts; made by `DeepEPPlan.start`."""

    def __init__(self, wire: _BufferWire, rows: tuple[Tensor, ...], ids_RK: Tensor) -> None:
        self.plan = wire.plan
        self._wire, self._rows, self._ids_RK = wire, rows, ids_RK

    @property
    def counts_L(self) -> list[int]:
        """(row, expert) pairs per local expert."""
        return self._wire.counts_L

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """rows_RH, weights_RK in fp32, and expert_ids_RK: local, L = "not here"."""
        rows_RH, weights_RK = _FinishDispatch.apply(self._wire, *self._rows)
        self._wire.absent_RK = self._ids_RK < 0
        ids_RK = self._ids_RK.masked_fill(self._wire.absent_RK, self.plan.num_local)
        return rows_RH, weights_RK, ids_RK

    def start_combine(self, rows_RH: Tensor) -> CombinedRows:
        """Send the experts' result of every row back to the rank of its token."""
        self.plan.buffer.check_rows(rows_RH)
        return CombinedRows(_BufferWire(self.plan, handle=self._wire.handle), rows_RH)


@dataclass
class _Event:
    """A transfer of DeepEP's, and the tensors it reads and writes."""

    event: Any
    tensors: Any

    def wait(self) -> None:
        self.event.current_stream_wait()


class _BufferWire(Wire):
    def __init__(self, plan: DeepEPPlan, handle: Any = None) -> None:
        super().__init__()
        self.plan, self.handle = plan, handle
        self.counts_L: list[int] = []
        self.absent_RK: Tensor | None = None

    def send_results(self, rows_RH: Tensor) -> Tensor:
        out_TH, _ = self.back(rows_RH)
        assert out_TH is not None
        return out_TH

    def take_results(self, arrived: Tensor) -> Tensor:
        return arrived

    def send_grads(self, grad_TH: Tensor) -> Tensor:
        rows_RH, *_ = self.out(grad_TH, handle=self.handle)
        return rows_RH

    def out(self, x_TH: Tensor, **arguments: Any) -> list[Any]:
        """[rows, ids, weights, counts, handle], filled once `wait` has returned."""
        buffer, x_TH = self.plan.buffer, x_TH.contiguous()
        arguments = {"config": buffer.dispatch_config, "async_finish": True, **arguments}
        *results, event = buffer.alive.dispatch(x_TH, **arguments)
        self.transfers.append(_Event(event, (x_TH, arguments, results)))
        return results

    def back(self, rows_RH: Tensor, weights_RK: Tensor | None = None) -> list[Tensor | None]:
        """[tokens, weights or None], filled once `wait` has returned."""
        buffer, rows_RH = self.plan.buffer, rows_RH.contiguous()
        arguments = {"config": buffer.combine_config, "async_finish": True}
        if weights_RK is not None:
            arguments["topk_weights"] = weights_RK.contiguous()
        *results, event = buffer.alive.combine(rows_RH, self.handle, **arguments)
        self.transfers.append(_Event(event, (rows_RH, arguments, results)))
        return results


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wire: _BufferWire, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.wire, wire.needs = wire, ctx.needs_input_grad[1:3]
        routing = {"topk_idx": ids_TK.contiguous(), "topk_weights": weights_TK.contiguous()}
        rows_RH, ids_RK, weights_RK, wire.counts_L, wire.handle = wire.out(
            x_TH, **routing, **wire.plan.layout
        )
        mark_without_grad(ctx, (rows_RH, weights_RK, ids_RK), (*wire.needs, False))
        return rows_RH, weights_RK, ids_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.wire.wait(), None)


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wire: _BufferWire, rows_RH: Tensor, weights_RK: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.wire = wire
        wire.wait()
        mark_without_grad(ctx, (rows_RH, weights_RK), ctx.needs_input_grad[1:])
        return rows_RH, weights_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor, grad_RK: Tensor) -> tuple[Tensor | None, ...]:
        wire: _BufferWire = ctx.wire
        assert wire.absent_RK is not None
        # A weight arrived at one rank, and as 0 at the others: no gradient comes from those.
        grad_RK = grad_RK.masked_fill(wire.absent_RK, 0)
        tokens_TH, weights_TK = wire.back(grad_RH, grad_RK if wire.needs[1] else None)
        wire.brought = (tokens_TH if wire.needs[0] else None, weights_TK)
        return None, nothing(grad_RH, grad_RH.shape), nothing(grad_RK, grad_RK.shape)


def _check_max_rows(
    layouts: list[dict[str, Any]], max_rows: int, group: dist.ProcessGroup, where: str
) -> None:
    """What a rank sends where only that rank knows: each tells all, and all raise together."""
    sent_D = torch.stack([layout["num_tokens_per_rank"] for layout in layouts]).sum(0)
    rows = [sum(column) for column in zip(*gather_counts(sent_D, group, where=where), strict=True)]
    if max(rows) > max_rows:
        worst = dist.get_process_group_ranks(group)[rows.index(max(rows))]
        raise RuntimeError(
            f"{where}: rank {worst} would get {max(rows)} rows, more than max_tokens_per_rank="
            f"{max_rows} (rows by rank of the ep group: {rows}). The router sends too many tokens "
            "to this rank's experts: raise max_tokens_per_rank, lower the batch size, or add the "
            "router's load-balancing loss"
        )
