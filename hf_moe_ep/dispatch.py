"""Send each token to the ranks that own its experts, and bring the results home.

`dispatch` and `combine` are inverses. A token travels once to every rank that holds at least one
of its experts, with its expert ids and routing weights beside it; the receiver runs its experts
and returns one row, already weighted and summed. Two ranks, experts {0 1} and {2 3}, top-2, rank
0 has two tokens:

    expert_ids_TK = [[0, 3], [2, 3]]     rows to rank 0: t0          (experts 0)
                                         rows to rank 1: t0, t1      (experts 3; 2 and 3)

Rows lie destination by destination, in token order within one: `token_of_row_N = [0, 0, 1]`.

Before the rows travel, ranks gather one small vector each: a header (forward number, layer,
mode), rows per destination, pairs per expert. It tells every rank how much it receives without
a second exchange, it is the layer's only host sync, and ranks that are not in the same place of
the same step get an error instead of each other's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.comm import exchange_rows, gather_counts
from hf_moe_ep.ops.permute import count_pairs, gather_rows, invert, sum_rows


@dataclass(frozen=True)
class Header:
    """Where a rank is, and what it sends; equal on all ranks of an ep group."""

    forward: int
    layer: int
    training: bool
    grad: bool
    recompute: bool
    top_k: int
    itemsize: int

    def as_list(self) -> list[int]:
        return [int(getattr(self, field.name)) for field in fields(self)]

    @staticmethod
    def describe(values: list[int]) -> str:
        forward, layer, training, grad, recompute, top_k, itemsize = values
        mode = ["training" if training else "evaluation"]
        mode += [] if grad else ["no_grad"]
        mode += ["recompute"] if recompute else []
        sizes = f"top-{top_k}, {itemsize} bytes per element"
        return f"MoE layer {layer} of forward {forward} ({', '.join(mode)}; {sizes})"


@dataclass(frozen=True)
class DispatchState:
    """What `combine` needs to undo a `dispatch`, and the experts' work on this rank.

    Attributes:
        token_of_row_N: local token of each row sent.
        slots_TJ: rows sent for each token, see `ops/permute.py`.
        send_counts, recv_counts: rows to and from each rank of the ep group.
        counts_L: (row, expert) pairs per local expert.
    """

    token_of_row_N: Tensor
    slots_TJ: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    counts_L: list[int]


def dispatch(
    x_TH: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    header: Header,
) -> tuple[Tensor, Tensor, Tensor, DispatchState]:
    """Rows of this rank's experts, from all ranks of `group`.

    Returns rows_RH, expert_ids_RK (local ids, L = "not on this rank"), weights_RK in fp32 or
    wider, and the state for `combine`. Differentiable in `x_TH` and `weights_TK`.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    local = num_experts // ranks
    sends_DT = _destinations(expert_ids_TK // local, ranks)
    counts = torch.cat([sends_DT.sum(1), count_pairs(expert_ids_TK, num_experts)])
    gathered = _exchange_counts(counts, group, header)
    send_counts = gathered[rank][:ranks]
    recv_counts = [row[rank] for row in gathered]
    first = ranks + rank * local
    counts_L = [sum(row[first + expert] for row in gathered) for expert in range(local)]

    num_slots = min(ranks, expert_ids_TK.shape[1])
    token_of_row_N, destination_N, slots_TJ = _rows_to_send(sends_DT, sum(send_counts), num_slots)
    wide = torch.promote_types(weights_TK.dtype, torch.float32)
    ids_NK = expert_ids_TK.index_select(0, token_of_row_N) - (destination_N * local).unsqueeze(1)
    ids_NK = ids_NK.masked_fill((ids_NK < 0) | (ids_NK >= local), local)
    weights_NK = gather_rows(weights_TK.to(wide), token_of_row_N, slots_TJ)
    # Ids ride along as floats (exact below 2**24): one message less per layer.
    rows_RH, routing_R2K = exchange_rows(
        (
            gather_rows(x_TH, token_of_row_N, slots_TJ),
            torch.cat([weights_NK, ids_NK.to(wide)], dim=1),
        ),
        send_counts=send_counts,
        recv_counts=recv_counts,
        group=group,
    )
    weights_RK, ids_RK = routing_R2K.chunk(2, dim=1)
    state = DispatchState(token_of_row_N, slots_TJ, send_counts, recv_counts, counts_L)
    return rows_RH, ids_RK.detach().long(), weights_RK, state


def combine(rows_RH: Tensor, state: DispatchState, group: dist.ProcessGroup) -> Tensor:
    """out_TH: every row back at the rank of its token, and added there."""
    (rows_NH,) = exchange_rows(
        (rows_RH,),
        send_counts=state.recv_counts,
        recv_counts=state.send_counts,
        group=group,
    )
    return sum_rows(rows_NH, state.token_of_row_N, state.slots_TJ)


def _destinations(rank_of_pair_TK: Tensor, ranks: int) -> Tensor:
    sends_TD = rank_of_pair_TK.new_zeros(rank_of_pair_TK.shape[0], ranks, dtype=torch.bool)
    return sends_TD.scatter_(1, rank_of_pair_TK, True).t()


def _rows_to_send(sends_DT: Tensor, num_rows: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """token_of_row_N and destination_N (by destination, then token), and slots_TJ."""
    num_tokens = sends_DT.shape[1]
    # argsort, because the row count is known on the host and nonzero() would ask the device.
    cell_N = (~sends_DT).flatten().to(torch.uint8).argsort(stable=True)[:num_rows]
    token_of_row_N, destination_N = cell_N % max(num_tokens, 1), cell_N // max(num_tokens, 1)
    slot_DT = sends_DT.cumsum(0) - 1
    slot_of_row_N = slot_DT[destination_N, token_of_row_N]
    slots_TJ = invert(token_of_row_N, slot_of_row_N, (num_tokens, num_slots))
    return token_of_row_N, destination_N, slots_TJ


def _exchange_counts(counts: Tensor, group: dist.ProcessGroup, header: Header) -> list[list[int]]:
    mine = header.as_list()
    where = Header.describe(mine)
    vector = torch.cat([counts.new_tensor(mine), counts])
    gathered = gather_counts(vector, group, where=where)
    places = [row[: len(mine)] for row in gathered]
    if any(place != mine for place in places):
        ranks = dist.get_process_group_ranks(group)
        lines = [
            f"  rank {rank}: {Header.describe(place)}"
            for rank, place in zip(ranks, places, strict=True)
        ]
        raise RuntimeError(
            "ranks of one ep group are at different places of the model:\n"
            + "\n".join(lines)
            + "\nEvery rank must run the same forwards in the same order and mode; look for a "
            "branch, a skipped batch or a model.eval() that depends on the rank."
        )
    return [row[len(mine) :] for row in gathered]
