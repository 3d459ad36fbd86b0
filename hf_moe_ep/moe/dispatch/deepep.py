"""Dispatch and combine by DeepEP's kernels, behind the interface of `hf_moe_ep/dispatcher.py`.

With `dispatcher="deepep"` rows are sent from GPU to GPU over NVLink (and RDMA between nodes)
through a buffer that DeepEP owns, instead of through NCCL. Three things differ from all_to_all.py:
received rows are ordered by sender, including the rows of this rank; the weight of an expert of
another rank is received as 0; and the host waits for the number of rows in `start`, once per chunk.
For example, two ranks own the experts {0 1} and {2 3}. Rank 0 has token t0 with the experts [0, 3]
and the weights [.5, .25], and token t1 with the experts [2, 3] and the weights [2, 4]; rank 1 has
no tokens. The id L = 2 stands for an expert of another rank:

    rank 0 receives t0       ids [[0, L]]            weights [[.5, 0]]
    rank 1 receives t0, t1   ids [[L, 1], [0, 1]]    weights [[0, .25], [2, 4]]

Each of DeepEP's two operations is the adjoint of the other: dispatch copies a token to ranks, and
combine adds up the rows of a token. The gradient of dispatch is therefore a combine, and the
gradient of combine is a dispatch that reuses the routing of the first dispatch (`handle`). Our
experts apply the routing weights, so combine only adds rows.

A handle consists of tensors and can be used with every buffer that has the same number of SMs. A
larger buffer may therefore replace the current one between forward and backward.

This dispatcher does not detect that ranks are at different positions of the model. Such ranks
receive tokens of another layer, or run into DeepEP's time-out; `dispatcher="all_to_all"` raises an
error instead.

Interface: `Buffer` of https://github.com/deepseek-ai/DeepEP, deep_ep/buffer.py in V1.2 and
deep_ep/buffers/legacy.py in V2. The limits that are checked here come from csrc/deep_ep.cpp and
csrc/kernels/intranode.cu of the same repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.async_exchange import DispatchedRows, Wire
from hf_moe_ep.moe.dispatch.counts import check_max_rows
from hf_moe_ep.ranks.collectives import gather_counts
from hf_moe_ep.ranks.timeouts import explain_timeout

# The number of ranks that DeepEP treats as one node, and its default number of queue pairs (between
# nodes DeepEP needs one queue pair per SM).
_RANKS_PER_NODE, _QUEUE_PAIRS = 8, 24
# DeepEP copies a row in two halves of 16-byte words, and one warp handles the experts of a token.
_HIDDEN_MULTIPLE, _MAX_TOP_K = 16, 32
# The results of `get_dispatch_layout`, in order, as arguments of `dispatch`.
_LAYOUT = (
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "num_tokens_per_expert",
    "is_token_in_rank",
)
_REMEDY = 'or use dispatcher="all_to_all", which works everywhere'


def load_deep_ep() -> Any:
    """Import the class `deep_ep.Buffer`.

    Raises:
        ImportError: DeepEP is not installed, or lacks this class.
    """
    try:
        from deep_ep import Buffer
    except ImportError as error:
        raise ImportError(_explain_missing(str(error))) from error
    if Buffer is None:  # V2, built with DISABLE_LEGACY
        raise ImportError(_explain_missing("this build lacks the legacy Buffer"))
    return Buffer


def _explain_missing(why: str) -> str:
    return (
        f'dispatcher="deepep" needs the class deep_ep.Buffer: {why}. Build DeepEP 1.2 or newer '
        "from source (its README on GitHub says how), for NVIDIA GPUs that all see each "
        f"other over NVLink: sm_90, or sm_80 if DeepEP is built without SM90 features; {_REMEDY}"
    )


class GroupBuffer:
    """Makes, enlarges and frees DeepEP's buffer of one ep group.

    The dispatcher in the state of a model owns this object; no buffer is global. DeepEP allocates
    the GPU memory itself, not through torch: by its formula 126 MB for 8 ranks, 20 SMs and a hidden
    size of 2048.

    Args:
        group: 2, 4 or 8 ranks of one node, or several nodes of 8 consecutive ranks each.
        num_sms: the number of streaming multiprocessors that send rows, an even number; None for
            DeepEP's default (20).

    Raises:
        ImportError: deep_ep is not installed.
        ValueError: the number of SMs is odd, or DeepEP has no settings for the size of the group.
    """

    def __init__(self, group: dist.ProcessGroup, *, num_sms: int | None = None) -> None:
        self._class = load_deep_ep()
        self._buffer: Any = None
        self.hidden_bytes = 0
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        if num_sms is not None:
            if num_sms < 2 or num_sms % 2:
                raise ValueError(
                    f"DeepEP moves rows by pairs of SMs: num_sms must be even and >= 2, got "
                    f"{num_sms}; try {max(2, num_sms + 1)}"
                )
            # DeepEP stores this number once per process, but only the calls below read it.
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
        """Make a larger buffer if rows of `hidden_bytes` bytes do not fit into the current buffer.

        Every rank of the group calls this with the same number.
        """
        if self._buffer is not None and hidden_bytes <= self.hidden_bytes:
            return
        self.free()
        configs = (self.dispatch_config, self.combine_config)
        ranks = self.num_ranks
        nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs)
        rdma_bytes = 0
        if ranks > _RANKS_PER_NODE:  # a build without NVSHMEM raises even if the result is 0
            hints = [config.get_rdma_buffer_size_hint(hidden_bytes, ranks) for config in configs]
            rdma_bytes = max(hints)
        # With `explicitly_destroy` only `free` destroys the buffer. The buffer's destructor would
        # wait for other ranks, which may have ended.
        options = {"num_qps_per_rank": self._queue_pairs, "explicitly_destroy": True}
        self._buffer = self._class(self.group, nvl_bytes, rdma_bytes, **options)
        self.hidden_bytes = hidden_bytes

    def free(self) -> None:
        """Free the memory; every rank calls this before the process group is destroyed."""
        buffer, self._buffer, self.hidden_bytes = self._buffer, None, 0
        if buffer is not None:
            buffer.destroy()

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupBuffer:
        """Share the buffer with a copy of the model; layers run one after the other."""
        return self

    @property
    def current(self) -> Any:
        """The current `deep_ep.Buffer`. Reading it raises RuntimeError after `free`."""
        self.check_alive()
        return self._buffer

    def check_alive(self) -> None:
        """Raise RuntimeError if the buffer was freed."""
        if self._buffer is None:
            raise RuntimeError(
                "this ep group's DeepEP buffer was freed; free it after the last backward only"
            )

    def check_rows(self, rows_XH: Tensor) -> None:
        """Raise ValueError for rows with which DeepEP would fail an assertion or crash."""
        hidden = rows_XH.shape[1]
        num_bytes = hidden * rows_XH.element_size()
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
        self.check_alive()
        if num_bytes > self.hidden_bytes:
            raise ValueError(
                f"rows of {num_bytes} bytes do not fit the buffer, which was reserved for "
                f"hidden_bytes={self.hidden_bytes}; plan with the size of these hidden states"
            )


@dataclass(frozen=True)
class DeepEP:
    """The dispatcher of one ep group; see `hf_moe_ep.dispatcher.Dispatcher`.

    Args:
        num_experts: the number of experts on all ranks together; rank r owns experts r * L to
            (r + 1) * L - 1.
        num_chunks: the number of chunks into which the tokens of a layer are split.
        max_rows: the largest number of rows that a rank may receive in one layer; None for no
            limit. A limit costs a host sync, in which ranks all-gather the numbers of rows that
            they will send.
    """

    buffer: GroupBuffer
    num_experts: int
    num_chunks: int = 1
    max_rows: int | None = None

    def start_plan(
        self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int
    ) -> DeepEPPlanning:
        """Plan an exchange per chunk, and enlarge the buffer if necessary. The ids are int64.

        Raises:
            ValueError: a token has more experts than DeepEP can send.
            RuntimeError: on every rank of the group, before any rank allocates rows, if a rank
                would receive more than `max_rows` rows in this layer.
        """
        top_k = expert_ids_TK.shape[1]
        if top_k > _MAX_TOP_K:
            raise ValueError(
                f"DeepEP sends at most {_MAX_TOP_K} experts per token, but this router chooses "
                f"{top_k}; choose fewer, {_REMEDY}"
            )
        self.buffer.reserve(hidden_bytes)
        chunks = [ids.contiguous() for ids in expert_ids_TK.tensor_split(self.num_chunks)]
        find_layout = self.buffer.current.get_dispatch_layout
        layouts = [dict(zip(_LAYOUT, find_layout(ids, self.num_experts))) for ids in chunks]
        if self.max_rows is not None:
            # DeepEP's layout counts only the rows that this rank sends, so the ranks exchange their
            # counts.
            sent_D = torch.stack([layout["num_tokens_per_rank"] for layout in layouts]).sum(0)
            sent_DD = gather_counts(sent_D, self.buffer.group, where=header)
            rows_D = [sum(column) for column in zip(*sent_DD, strict=True)]
            check_max_rows(rows_D, self.max_rows, self.buffer.group, header)
        num_local = self.num_experts // self.buffer.num_ranks
        return DeepEPPlanning(
            [
                DeepEPExchange(self.buffer, len(ids), num_local, layout, header)
                for ids, layout in zip(chunks, layouts, strict=True)
            ]
        )

    @property
    def leaves_out_padding(self) -> bool:
        # DeepEP reads the ids again in a recompute, which does not know the padding.
        return False

    def prepare(self, tokens: Tokens) -> None:
        """Do nothing, because DeepEP sends rows, weights and ids as separate tensors."""


@dataclass(frozen=True)
class DeepEPPlanning:
    """A finished plan; see `hf_moe_ep.dispatcher.Planning`. DeepEP exchanges counts in `start`."""

    exchanges: list[DeepEPExchange]

    @property
    def pairs_E(self) -> None:
        return None

    def finish(self) -> list[DeepEPExchange]:
        return self.exchanges


@dataclass(frozen=True)
class DeepEPExchange:
    """The exchange of one chunk.

    Attributes:
        num_local: the number of experts of this rank.
        layout: the arguments of DeepEP's dispatch that describe the destinations of the tokens.
        where: the position in the model. Its text is made only for an error.
    """

    buffer: GroupBuffer
    num_tokens: int
    num_local: int
    layout: dict[str, Any]
    where: object

    def start(self, tokens: Tokens) -> DispatchedRows:
        """Start to send every token to the ranks of its experts, with its weights in fp32."""
        return DispatchedRows(_BufferWire(self), tokens)


@dataclass
class _Event:
    """A transfer of DeepEP. This object keeps the sent and received tensors alive."""

    event: Any
    tensors: Any

    def wait(self) -> None:
        self.event.current_stream_wait()


class _BufferWire(Wire):
    """Sends rows through DeepEP's buffer: its dispatch copies tokens, its combine adds rows.

    Attributes:
        handle: DeepEP's record of a dispatch, which all other transfers of the same rows need.
        absent_RK: True for each chosen expert that is on another rank.
    """

    def __init__(self, exchange: DeepEPExchange, handle: Any = None) -> None:
        super().__init__()
        self.exchange, self.handle = exchange, handle
        self.absent_RK: Tensor | None = None
        self._hidden = 0

    def make_combine_wire(self) -> _BufferWire:
        return _BufferWire(self.exchange, self.handle)

    def send_tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        x_TH = tokens.x_TH.to(tokens.row_dtype)
        self.exchange.buffer.check_rows(x_TH)
        self._hidden = x_TH.shape[1]
        routing = {
            "topk_idx": tokens.ids_TK.contiguous(),
            "topk_weights": tokens.weights_TK.float().contiguous(),
        }
        place, group = self.exchange.where, self.exchange.buffer.group
        failure, limit = ": DeepEP could not exchange rows", "DeepEP's time-out"
        with explain_timeout(place, group, failure, goal="this layer", limit=limit):
            sent = self._dispatch(x_TH, **routing, **self.exchange.layout)
        rows_RH, ids_RK, weights_RK, self.counts_L, self.handle = sent
        return rows_RH, weights_RK, ids_RK

    def convert_ids(self, ids_RK: Tensor) -> Tensor:
        self.absent_RK = ids_RK < 0
        return ids_RK.masked_fill(self.absent_RK, self.exchange.num_local)

    def send_row_grads(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        assert self.absent_RK is not None
        if grad_RK is not None:
            # Only the rank of an expert has received its weight; other ranks have received 0.
            grad_RK = grad_RK.masked_fill(self.absent_RK, 0)
        if grad_RH is not None:
            return self._combine(grad_RH, grad_RK)
        # DeepEP cannot send gradients of weights without rows, so empty rows are sent.
        shape = len(self.absent_RK), self._hidden
        rows_RH = self.absent_RK.new_zeros(shape, dtype=torch.bfloat16)
        return None, self._combine(rows_RH, grad_RK)[1]

    def send_results(self, rows_RH: Tensor) -> Tensor:
        self.exchange.buffer.check_rows(rows_RH)
        return self._combine(rows_RH)[0]

    def add_results(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        return received.to(dtype)

    def send_result_grads(self, grad_TH: Tensor) -> Tensor:
        return self._dispatch(grad_TH, handle=self.handle)[0]

    def _dispatch(self, x_TH: Tensor, **arguments: Any) -> list[Any]:
        """Start a dispatch; return rows, ids, weights, counts and handle, valid after `wait`."""
        buffer, x_TH = self.exchange.buffer, x_TH.contiguous()
        arguments = {"config": buffer.dispatch_config, "async_finish": True, **arguments}
        *results, event = buffer.current.dispatch(x_TH, **arguments)
        self.transfers.append(_Event(event, (x_TH, arguments, results)))
        return results

    def _combine(
        self, rows_RH: Tensor, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Start a combine; return tokens, and weights if any were given, valid after `wait`."""
        buffer, rows_RH = self.exchange.buffer, rows_RH.contiguous()
        arguments = {"config": buffer.combine_config, "async_finish": True}
        if weights_RK is not None:
            arguments["topk_weights"] = weights_RK.contiguous()
        x_TH, weights_TK, event = buffer.current.combine(rows_RH, self.handle, **arguments)
        self.transfers.append(_Event(event, (rows_RH, arguments, (x_TH, weights_TK))))
        return x_TH, weights_TK
