"""Pass the states of recurrences from piece to piece, so that every rank scans its own tokens.

A recurrence with a linear state, such as a delta net, KDA or Mamba-2, takes the state before some
tokens, and returns outputs and the state after these tokens. In one head a key has N elements, a
value has V elements, and a state is a matrix (N, V):

    out_t = out0_t + reads_t state     out0_t (V) and S0 (N, V) are the results for a zero state
    after = S0 + M state               reads_t (N) and M (N, N) do not depend on the state

One call of the stock function computes out0, reads, S0 and M. Each value gets N more elements,
which are zero, and the initial state is [zeros (N, V) | identity (N, N)]. The recurrence computes
each column of the values from the same column of the state alone, so the call returns

    [out0_t | reads_t]                      (N = 2, V = 3:  o o o | r r)
    [S0 | M]

Each rank calls the stock function once, with its pieces (`slices.py`) as rows of the batch. Then
[S0 | M] of all pieces is all-gathered. Every rank computes the states before its own pieces, and
adds reads_t state to its outputs. For example, with cp 2 in zigzag order (S0_i and M_i belong to
piece i, and state_i is the state before piece i):

    rank 0    scans pieces 0 and 3    state_0 = 0,  state_3 = S0_2 + M_2 (S0_1 + M_1 S0_0)
    rank 1    scans pieces 1 and 2    state_1 = S0_0,  state_2 = S0_1 + M_1 S0_0

For P pieces per rank, a rank sends (ranks - 1) * P * heads * N * (V + N) values per row in forward,
for any number of tokens, and as many gradients in backward. The scan computes and saves values of
N + V elements, where stock code has V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_moe_ep.sequence.slices import Slice, gather_slices
from hf_moe_ep.upstream.recurrences import Layout, Recurrence, StateArguments

_Given = dict[int | str, Any]


def passes_states(recurrence: Recurrence, given: _Given) -> bool:
    """Return True if `run_pieces` can run this call.

    The stock function must be able to start from a state. The call must pass both arguments of
    states: the initial state must be None, and the flag for the final state must be False. If the
    function applies a gate (`z` of Mamba-2), the result is False, because the gate would also have
    to multiply the numbers that `run_pieces` adds to the outputs.
    """
    state = recurrence.state
    if state is None or state.initial not in given or state.final not in given:
        return False
    is_free = given[state.initial] is None and not given[state.final]
    return is_free and not any(isinstance(given.get(name), Tensor) for name in state.without)


def run_pieces(
    part: Slice,
    recurrence: Recurrence,
    stock: Callable[..., Any],
    given: _Given,
    layouts: Mapping[int | str, Layout],
) -> Any:
    """Call a recurrence for the pieces of this rank, and add the effect of earlier pieces.

    Args:
        given: the arguments of `stock` by position or name, for the tokens of this rank.
        layouts: the layout of each tensor in `given`, by the same position or name.
    """
    state = recurrence.state
    assert state is not None
    num_pieces = len(part.piece_numbers)
    pieces = {
        key: given[key] if layout == Layout.PER_HEAD else _split(given[key], num_pieces)
        for key, layout in layouts.items()
    }
    values_BSQV = pieces[recurrence.like_output]
    rows, _, heads, value_size = values_BSQV.shape
    key_size = pieces[state.keys].shape[-1]
    pieces[recurrence.like_output] = functional.pad(values_BSQV, (0, key_size))
    dtype = torch.promote_types(values_BSQV.dtype, torch.float32)
    identity = torch.eye(key_size, dtype=dtype, device=values_BSQV.device)
    initial = functional.pad(identity, (value_size, 0)).expand(rows, heads, -1, -1)
    call: dict[Any, Any] = {**given, **pieces, state.final: True}
    call[state.initial] = _transpose_state(initial, state).contiguous()
    num_positional = sum(isinstance(key, int) for key in call)
    positional = [call.pop(index) for index in range(num_positional)]
    out, final = stock(*positional, **call)
    states = _find_states(_transpose_state(final, state), value_size, part)
    out0, reads = out.split([value_size, key_size], -1)
    # (B, S, Q, N) x (B, Q, N, V)
    added = torch.einsum("bsqn,bqnv->bsqv", reads.to(states.dtype), states)
    outputs = torch.cat((out0 + added).to(out.dtype).chunk(num_pieces), 1)
    return (outputs, None) if state.returns_pair else outputs


def _split(x: Tensor, num_pieces: int) -> Tensor:
    """Make a row of each piece of (B, S / ranks, ...); the first pieces of all rows come first."""
    return torch.cat(x.chunk(num_pieces, 1))


def _transpose_state(x: Tensor, state: StateArguments) -> Tensor:
    """Convert a state (B, Q, N, V) to the layout of the stock function, or back."""
    return x.mT if state.values_first else x


def _find_states(finals: Tensor, value_size: int, part: Slice) -> Tensor:
    """Compute the states (B, Q, N, V) before the pieces of this rank.

    Args:
        finals: [S0 | M] of the pieces of this rank, (B, Q, N, V + N), with the pieces as rows.
    """
    num_pieces = len(part.piece_numbers)
    by_piece = Slice(part.group, part.rank, part.size, length=len(part.order))
    gathered = gather_slices(torch.stack(finals.chunk(num_pieces), 1), by_piece)
    index_of_piece = {piece: index for index, piece in enumerate(part.order)}
    # Piece 0 starts from zeros. They are computed from `gathered`, so that every rank takes part in
    # the backward of the all-gather.
    everywhere = gathered.new_ones((), dtype=torch.bool)
    before = [gathered[:, 0, ..., :value_size].masked_fill(everywhere, 0)]
    sizes = [value_size, finals.shape[-1] - value_size]
    for piece in range(max(part.piece_numbers)):
        zero_state, transition = gathered[:, index_of_piece[piece]].split(sizes, -1)
        before.append(zero_state + transition @ before[piece])
    return torch.cat([before[piece] for piece in part.piece_numbers])
