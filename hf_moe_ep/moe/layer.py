"""One MoE layer: route -> dispatch -> experts -> combine, the tokens in `dispatch_chunks` parts.

The stock router has already chosen when we are called: transformers hands the experts
`(hidden_states, top_k_index, top_k_weights)` and wants the weighted sum back. Without ep the
rows are the tokens themselves; with ep they travel first.

Shape legend of the package, as suffixes of names (`x_TH` is [T, H]; a test holds it):

    B  batch                            S  sequence
    T  tokens of this rank              H  hidden
    E  experts                          L  experts of this rank
    K  experts per token (top-k)        D  ranks of the ep group
    N  rows sent                        J  rows per token, at most min(K, D)
    R  rows received                    Y  cells of a [D, T] table, in one row
    A  (row, expert) pairs computed     M  pairs of one block (BLOCK_M of the kernels)
    F  hidden of an expert              G  2 F, gate over up
    I  columns into a matrix            O  columns out of it
    P  rank of an adapter               C  blocks of columns, summed later
    Q  attention heads                  W  width of a head
    V  nodes of the ep group            U  its ranks on one node
    Z  rows passed on in a node         X  any width, or any rows
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.dispatcher import Exchange, Header, RoutesTold
from hf_moe_ep.moe.counting import count_choice
from hf_moe_ep.moe.dispatch.overlap import WayHome
from hf_moe_ep.moe.experts import local_weights, run_experts
from hf_moe_ep.moe.recompute import CheckpointWatch
from hf_moe_ep.ops.expert_mlp import postpone_grads
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.state import STATE, ModelState, MoELayer, Ours
from hf_moe_ep.upstream.autograd_modes import backward_is_running, hidden_from_modes


class ForwardGuard(Ours):
    """Pre-forward hook of the root: checks that the model is sharded, counts forwards, and finds
    out which of its layers are checkpointed in this one.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self._checkpoints = CheckpointWatch(state)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.check_ready()
        # Unsharded, nobody reads the number, and torch.compile would compile anew for each.
        if self.state.meshes is not None:
            self._begin_forward(module, self.state.meshes)

    @torch.compiler.disable
    def _begin_forward(self, module: nn.Module, meshes: Meshes) -> None:
        self.state.forward_number += 1
        if meshes.ep_size > 1 and module.training:
            self._checkpoints.look(module)


def moe_forward(
    experts: nn.Module,
    hidden_states: Tensor,  # (T, H)
    top_k_index: Tensor,  # (T, K)
    top_k_weights: Tensor,  # (T, K)
) -> Tensor:
    """Sum each token's experts, weighted, into (T, H); transformers calls this for a module."""
    layer: MoELayer = getattr(experts, STATE)
    meshes = layer.model.meshes
    if top_k_index.is_floating_point():
        raise ValueError(
            f"{type(experts).__name__} was given experts of dtype {top_k_index.dtype}; call it as "
            f"transformers' experts interface does, (hidden_states, top_k_index, top_k_weights)"
        )
    if meshes is not None and meshes.ep_size > 1:
        return _ep_forward(experts, layer, hidden_states, top_k_index, top_k_weights)
    # The root's hook checks as well, and a compiled model cannot lose its mesh on the way.
    if not torch.compiler.is_compiling():
        layer.model.check_ready()
        top_k_weights = _kept_weights(layer, top_k_weights)
    assert layer.compute is not None
    count_choice(layer, experts.training, top_k_index)
    return run_experts(
        experts,
        layer.compute,
        hidden_states,
        top_k_index,
        top_k_weights,
        counts_L=None,
        grad_scale=1.0 / layer.grad_divisor,
    )


@torch.compiler.disable
def _ep_forward(
    experts: nn.Module, layer: MoELayer, x_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Dispatch, experts, combine.

    How many rows travel is known at run time only: torch.compile breaks its graph here.
    """
    state, meshes = layer.model, layer.model.meshes
    state.check_ready()
    weights_TK = _kept_weights(layer, weights_TK)
    assert meshes is not None and layer.compute is not None
    count_choice(layer, experts.training, expert_ids_TK)
    # Selective checkpointing must not see what a recompute leaves out.
    hidden = nullcontext() if state.frame is None else hidden_from_modes()
    with hidden:
        slots_TK = _slots(layer, expert_ids_TK)
        exchanges = _exchanges(layer, experts.training, x_TH, expert_ids_TK, slots_TK)
    first_expert = meshes.ep_rank * (state.num_experts // meshes.ep_size)
    weights: ExpertWeights | None = None
    with WayHome() as home:
        for arriving in home.overlapped(exchanges, x_TH, weights_TK, slots_TK):
            # Here, so that backward computes their gradients while those of the rows travel.
            weights = weights or local_weights(experts, layer.compute, x_TH, first_expert)
            weights = postpone_grads(weights)
            rows_RH, weights_RK, expert_ids_RK = arriving.finish()
            out_RH = run_experts(
                experts,
                layer.compute,
                rows_RH,
                expert_ids_RK,
                weights_RK,
                counts_L=arriving.counts_L,
                grad_scale=1.0 / layer.grad_divisor,
                weights=weights,
            )
            home.send(arriving, out_RH)
    return home.finish()


def _slots(layer: MoELayer, expert_ids_TK: Tensor) -> Tensor:
    """Say where the chosen experts lie: what goes where follows from that, and nothing else does.

    Whatever counts, records or repeats a choice is told experts, and never sees a slot.
    """
    if layer.placement is None:
        return expert_ids_TK
    return layer.placement.to(expert_ids_TK.device)[expert_ids_TK.long()].to(expert_ids_TK.dtype)


def _exchanges(
    layer: MoELayer, training: bool, x_TH: Tensor, expert_ids_TK: Tensor, slots_TK: Tensor
) -> Sequence[Exchange]:
    """Plan what goes where; a checkpoint's later run takes what its first run has planned."""
    state, frame = layer.model, layer.model.frame
    if frame is not None and frame.replaying:
        return frame.take(layer.index, expert_ids_TK)
    assert state.dispatcher is not None
    header = _header(layer, training, x_TH, expert_ids_TK)
    hidden_bytes = x_TH.shape[1] * x_TH.element_size()
    try:
        exchanges = state.dispatcher.plan(slots_TK, header, hidden_bytes=hidden_bytes)
    finally:
        # By now the other ranks have been told, and raise as well.
        if state.routing is not None and state.routing.refusal is not None:
            raise state.routing.refusal
    if frame is not None:
        frame.keep(layer.index, expert_ids_TK.detach(), exchanges)
    return exchanges


def _kept_weights(layer: MoELayer, weights_TK: Tensor) -> Tensor:
    """Return the router's weights; in a checkpoint's later run those that the first one had."""
    frame = layer.model.frame
    if frame is None or not frame.replaying:
        return weights_TK
    return frame.weights(layer.index, weights_TK)


def _header(layer: MoELayer, training: bool, x_TH: Tensor, expert_ids_TK: Tensor) -> Header:
    return Header(
        forward=layer.model.forward_number,
        layer=layer.index,
        training=training,
        grad=torch.is_grad_enabled(),
        checkpointed=layer.model.frame is not None,
        # A forward while backward runs is a recompute.
        recompute=backward_is_running(),
        top_k=expert_ids_TK.shape[1],
        itemsize=x_TH.element_size(),
        routes=RoutesTold.LIVE if layer.model.routing is None else layer.model.routing.told,
    )
