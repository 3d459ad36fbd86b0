"""One MoE layer: route -> dispatch -> experts -> combine.

Read this file first; the other files of this folder are called from here. When transformers calls
`moe_forward`, the stock router has already chosen: the arguments are `(hidden_states, top_k_index,
top_k_weights)`, and the result is the weighted sum of each token's experts. Without expert
parallelism (ep) every rank computes all experts on its own tokens. With ep each rank has
E / ep_size of the experts (and with etp_size > 1 a part of each of these experts, `etp.py`):

    route      the stock router has chosen; in the recompute of a checkpointed layer, the router
               repeats the choice of the layer's first run. If `balance_experts` has moved experts,
               each expert id is replaced by the expert's slot, its row in the stacked weights of
               all ranks
    dispatch   each token is sent to every rank that has at least a part of one of its experts
    experts    each rank computes its experts on the rows that it received
    combine    the results are sent back and added up, one row per token

The tokens of a layer are exchanged in `dispatch_chunks` chunks: one chunk is sent while the experts
compute the previous chunk. Shared experts are computed while the last results are sent back
(`shared_experts.py`).

The dtypes of a layer. Experts compute in the dtype c: the dtype of autocast, or without autocast
(and in fp64) the dtype of the hidden states (`ops/dtypes.py`).

    rows         hidden states, results and the gradients of both are sent in c. The sum of a
                 token's results over all ranks is rounded to the dtype of the hidden states
    weights      routing weights are sent in fp32, or in a wider dtype if c or the router's dtype is
                 wider (`dispatcher.Tokens.join` casts them; DeepEP always sends fp32). FSDP2 does
                 not cast them. They are multiplied in the wider dtype of both factors (by the
                 Triton kernels in fp32)
    ids          expert ids are sent after the weights, in the same dtype (DeepEP: as int64)
    parameters   FSDP2 casts the experts' parameters to `param_dtype` when it all-gathers them.
                 `collect_weights` casts them under autocast, or if FSDP2 leaves them as they are

This legend of shapes holds for the whole package. In `sequence/` C counts channels, N the elements
of a key or the ranks of a slice, P pieces, and V the elements of a value. The letters are suffixes
of names: `x_TH` has the shape [T, H].

    B  batch                            S  sequence
    T  tokens of this rank              H  hidden
    E  experts                          L  experts of this rank
    K  experts per token (top-k)        D  ranks of the ep group
    N  rows sent or kept                J  rows per token, at most min(K, D)
    R  rows received or kept            Y  cells of a [D, T] table, flattened
    A  (row, expert) pairs computed     M  pairs of one block (BLOCK_M of the kernels)
    F  hidden of an expert              G  2 F, gate above up
    I  inputs of a matrix               O  outputs of a matrix
    P  rank of an adapter               C  blocks of columns (partial sums)
    Q  attention heads                  W  width of a head
    V  nodes of the ep group            U  ranks of the ep group on one node
    Z  rows forwarded inside a node     X  any number
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.dispatcher import Header, Planning, RouteSource, Tokens
from hf_moe_ep.etp import repeat_part_weights, replace_by_part_ids
from hf_moe_ep.moe.counting import count_choice
from hf_moe_ep.moe.dispatch.async_exchange import ArrivingRows, Exchange
from hf_moe_ep.moe.dispatch.auto_chunks import AUTO, apply_num_chunks, measure_and_choose_num_chunks
from hf_moe_ep.moe.dispatch.overlap import OverlappedChunks
from hf_moe_ep.moe.experts import collect_weights, run_experts
from hf_moe_ep.moe.padding import find_positions_without_padding, leave_out_padding
from hf_moe_ep.moe.recompute import CheckpointedRouting, CheckpointWatch
from hf_moe_ep.ops.autograd import replace_values
from hf_moe_ep.ops.expert_mlp import postpone_grads
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.permute import count_pairs
from hf_moe_ep.state import STATE, Compute, ModelState, MoELayer, PackageHook
from hf_moe_ep.upstream.autograd_modes import backward_is_running, hidden_from_modes
from hf_moe_ep.upstream.experts_interface import register_experts_forward


class ForwardGuard(PackageHook):
    """Pre-forward hook of the root: refuses a model that needs sharding but is not sharded.

    It also counts the forwards, and wraps the checkpointing functions of this forward.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self._checkpoints = CheckpointWatch(state)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)
        register_experts_forward(moe_forward)  # for a model that another process has pickled

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.check_ready()
        # Only a sharded model needs the number of the forward. In another model torch.compile would
        # recompile the forward each time the number changes.
        if self.state.meshes is not None or not torch.compiler.is_compiling():
            self._begin_forward(module)

    @torch.compiler.disable
    def _begin_forward(self, module: nn.Module) -> None:
        self.state.forward_number += 1
        apply_num_chunks(self.state)
        if module.training:
            self._checkpoints.wrap_functions(module, dispatches=self.state.exchanges_rows)


def moe_forward(
    experts: nn.Module,
    hidden_states: Tensor,  # (T, H)
    top_k_index: Tensor,  # (T, K)
    top_k_weights: Tensor,  # (T, K)
) -> Tensor:
    """Return the weighted sum of each token's experts, (T, H).

    transformers calls this function as the forward of every experts module of a patched model.
    """
    layer: MoELayer = getattr(experts, STATE)
    meshes = layer.model.meshes
    if top_k_index.is_floating_point():
        raise ValueError(
            f"{type(experts).__name__} was given expert ids of dtype {top_k_index.dtype}; call it "
            f"as transformers' experts interface does: (hidden_states, top_k_index, top_k_weights)"
        )
    if meshes is not None and meshes.dispatch.size() > 1:
        return _dispatch_and_compute(experts, layer, hidden_states, top_k_index, top_k_weights)
    # A compiled forward relies on the root's hook (ForwardGuard), which calls check_ready as well.
    positions: Tensor | None = None
    if not torch.compiler.is_compiling():
        layer.model.check_ready()
        top_k_weights = _choose_weights(layer, top_k_weights)
        positions = find_positions_without_padding(layer.model, hidden_states)
    count_choice(layer, experts.training, top_k_index)
    x_TH = hidden_states
    if positions is not None:
        hidden_states, top_k_index, top_k_weights = (
            x.index_select(0, positions) for x in (hidden_states, top_k_index, top_k_weights)
        )
    assert layer.compute is not None
    out = run_experts(
        experts,
        layer.compute,
        hidden_states,
        top_k_index,
        top_k_weights,
        counts_L=_count_on_host(top_k_index, layer) if layer.may_choose_no_expert else None,
        grad_scale=1.0 / layer.grad_divisor,
    )
    return out if positions is None else torch.zeros_like(x_TH).index_copy(0, positions, out)


@torch.compiler.disable
def _count_on_host(expert_ids_TK: Tensor, layer: MoELayer) -> list[int]:
    """Count the (token, expert) pairs of each expert. This is a host sync.

    The id `num_experts` means "no expert" and is not counted.
    """
    num_experts = layer.model.num_experts
    return count_pairs(expert_ids_TK, num_experts + 1)[:num_experts].tolist()


@torch.compiler.disable
def _dispatch_and_compute(
    experts: nn.Module, layer: MoELayer, x_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Dispatch the tokens, compute this rank's experts, and combine the results.

    The number of rows that a rank receives is known only at run time, so torch.compile cannot trace
    this function and breaks its graph here.
    """
    state, meshes = layer.model, layer.model.meshes
    state.check_ready()
    weights_TK = _choose_weights(layer, weights_TK)
    assert meshes is not None and layer.compute is not None and state.dispatcher is not None
    # Selective checkpointing compares the operators of a layer's first run and of its recompute.
    # Only the first run plans exchanges, so the operators of the planning are hidden.
    hide_operators = nullcontext if state.checkpointed_routing is None else hidden_from_modes
    with hide_operators():
        slots_TK = _replace_ids_by_slots(layer, expert_ids_TK)
        if state.dispatcher.leaves_out_padding:
            slots_TK = leave_out_padding(state, slots_TK)
        if meshes.etp_size > 1:
            num_local = len(meshes.local_experts(state.num_experts))
            slots_TK = replace_by_part_ids(slots_TK, num_local, state.num_experts, meshes.etp_size)
            weights_TK = repeat_part_weights(weights_TK, meshes.etp_size, x_TH.dtype)
        tokens = Tokens(x_TH, weights_TK, slots_TK)
        planning = _start_plan(layer, experts.training, tokens)
    count_choice(layer, experts.training, expert_ids_TK, planning)
    state.dispatcher.prepare(tokens)
    with hide_operators():
        exchanges = _finish_plan(layer, planning, expert_ids_TK)
        if planning is not None:
            _choose_chunks(experts, layer, tokens)
    return compute_and_combine(
        experts,
        layer.compute,
        exchanges,
        tokens,
        first_expert=meshes.local_experts(state.num_experts).start,
        grad_scale=1.0 / layer.grad_divisor,
        meanwhile=None if layer.shared is None else layer.shared.run,
        state=state,
    )


def compute_and_combine(
    experts: nn.Module,
    compute: Compute,
    exchanges: Sequence[Exchange],
    tokens: Tokens,
    *,
    first_expert: int,
    grad_scale: float,
    meanwhile: Callable[[], object] | None = None,
    state: ModelState | None = None,
) -> Tensor:
    """Send the tokens, compute this rank's experts on the received rows, and combine the results.

    `meanwhile` is called while the last results are sent back. `state` is the state of a patched
    model, whose checkpointed layers are known.

    The recompute of most layers ends as soon as the experts have computed what backward needs, so
    nobody reads the results. The first recompute of a model therefore leaves them out, and computes
    and sends them only if the layer runs on, for example because a norm follows the MoE block. All
    later recomputes of such a model send the results of one chunk while they compute the next
    chunk, as forward does.
    """
    may_end = state is not None and _may_end_before_results(state)
    skipped: list[tuple[ArrivingRows, Tensor, Callable[[], Tensor]]] = []
    weights: ExpertWeights | None = None
    with OverlappedChunks() as chunks:
        for chunk in chunks.start_chunks(exchanges, tokens):
            # The autograd nodes of the weights are created before `finish`. Backward therefore runs
            # them while the rows' gradients are transferred.
            weights = weights or collect_weights(experts, compute, tokens.x_TH, first_expert)
            weights = postpone_grads(weights)
            rows_RH, weights_RK, expert_ids_RK = chunk.finish()
            run = partial(
                run_experts,
                experts,
                compute,
                rows_RH,
                expert_ids_RK,
                weights_RK,
                counts_L=chunk.counts_L,
                grad_scale=grad_scale,
                weights=weights,
            )
            if may_end:
                skipped.append((chunk, run(skip_output=True), run))
            else:
                chunks.send_back(chunk, run())
        if meanwhile is not None:
            meanwhile()
        for chunk, out_RH, compute_values in skipped:
            assert state is not None
            state.recomputes_outputs = True
            with hidden_from_modes(), torch.no_grad():
                values_RH = compute_values()
            chunks.send_back(chunk, replace_values(out_RH, values_RH))
    if weights is not None and weights.masters is not None:
        weights.masters.forget()
    return chunks.finish()


def _may_end_before_results(state: ModelState) -> bool:
    """Return True in a recompute that may end before the results of the experts are needed."""
    checkpointed: CheckpointedRouting | None = state.checkpointed_routing
    if checkpointed is None or state.recomputes_outputs:
        return False
    return checkpointed.may_stop_early


def _choose_chunks(experts: nn.Module, layer: MoELayer, tokens: Tokens) -> None:
    """With dispatch_chunks="auto", choose the number of chunks in the first forward in training."""
    state, meshes = layer.model, layer.model.meshes
    undecided = state.config.dispatch_chunks == AUTO and state.num_chunks is None
    # The first run of a reentrant checkpoint has no gradients, but a backward follows. The exchange
    # of counts has compared the modes of all ranks (`Header`), so all ranks decide alike.
    leads_to_backward = torch.is_grad_enabled() or state.checkpointed_routing is not None
    if not (undecided and experts.training and leads_to_backward):
        return
    assert meshes is not None and layer.compute is not None
    with torch.no_grad():
        weights = collect_weights(experts, layer.compute, tokens.x_TH)
    where = _make_header(layer, True, tokens)
    measure_and_choose_num_chunks(layer, meshes.dispatch.get_group(), tokens, weights, where)


def _replace_ids_by_slots(layer: MoELayer, expert_ids_TK: Tensor) -> Tensor:
    """Replace each expert id by the slot in which `balance_experts` has placed the expert.

    Rank r owns the slots r * L to (r + 1) * L - 1. Only the dispatch needs slots; all code that
    counts, records or replays a choice uses expert ids.
    """
    if layer.slots_E is None:
        return expert_ids_TK
    slots = layer.slots_E.to(expert_ids_TK.device)
    if layer.may_choose_no_expert:
        # `new_tensor` would copy the number to the device, which is a host sync.
        slots = torch.cat([slots, slots.new_full((1,), len(slots))])
    return slots[expert_ids_TK.long()].to(expert_ids_TK.dtype)


def _start_plan(layer: MoELayer, training: bool, tokens: Tokens) -> Planning | None:
    """Start to plan the exchanges of a layer.

    In a recompute return None, because a recompute uses the exchanges of the first run again.
    """
    state = layer.model
    checkpointed: CheckpointedRouting | None = state.checkpointed_routing
    if checkpointed is not None and checkpointed.is_recompute:
        return None
    assert state.dispatcher is not None
    header = _make_header(layer, training, tokens)
    hidden_bytes = tokens.x_TH.shape[1] * tokens.row_dtype.itemsize
    return state.dispatcher.start_plan(tokens.ids_TK, header, hidden_bytes=hidden_bytes)


def _finish_plan(
    layer: MoELayer, planning: Planning | None, expert_ids_TK: Tensor
) -> Sequence[Exchange]:
    """Return the exchange of each chunk of tokens."""
    state = layer.model
    checkpointed: CheckpointedRouting | None = state.checkpointed_routing
    if planning is None:
        assert checkpointed is not None
        return checkpointed.take(layer.index, expert_ids_TK)
    try:
        exchanges: Sequence[Exchange] = planning.finish()
    finally:
        # The other ranks have received the header of this rank by now, and raise an error too.
        if state.routing is not None and state.routing.refusal is not None:
            raise state.routing.refusal
    if checkpointed is not None:
        checkpointed.keep(layer.index, expert_ids_TK.detach(), exchanges)
    return exchanges


def _choose_weights(layer: MoELayer, weights_TK: Tensor) -> Tensor:
    """Return the router's weights; in a recompute, return the weights that a replay has stored."""
    checkpointed: CheckpointedRouting | None = layer.model.checkpointed_routing
    if checkpointed is None or not checkpointed.is_recompute:
        return weights_TK
    return checkpointed.choose_weights(layer.index, weights_TK)


def _make_header(layer: MoELayer, training: bool, tokens: Tokens) -> Header:
    routing = layer.model.routing
    return Header(
        forward=layer.model.forward_number,
        layer=layer.index,
        training=training,
        grad=torch.is_grad_enabled(),
        checkpointed=layer.model.checkpointed_routing is not None,
        # If a backward is running, this forward is a recompute.
        recompute=backward_is_running(),
        top_k=tokens.ids_TK.shape[1],
        itemsize=tokens.row_dtype.itemsize,
        routes=RouteSource.LIVE if routing is None else routing.route_source,
    )
