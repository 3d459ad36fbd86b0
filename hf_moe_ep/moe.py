"""One MoE layer: route -> dispatch -> experts -> combine, and the state behind it.

The stock router has already chosen when we are called: transformers hands the experts
`(hidden_states, top_k_index, top_k_weights)` and wants the weighted sum back. Without ep the
rows are the tokens themselves; with ep they travel first.

Shape legend of the package, as suffixes of names (`x_TH` is [T, H]):

    B batch    S sequence    T tokens of this rank    H hidden        K experts per token (top-k)
    E experts  L experts of this rank                 F expert hidden G = 2 F, gate over up
    N rows sent    R rows received    A (row, expert) pairs computed    D ranks of the ep group
    J rows per token, at most min(K, D)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_moe_ep import hf
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.dispatch import Header, combine, count_pairs, dispatch
from hf_moe_ep.experts import run_experts
from hf_moe_ep.mesh import Meshes
from hf_moe_ep.plan import ModelPlan

STATE = "_hf_moe_ep"


@dataclass
class ModelState:
    """What a patched model remembers; one object, shared by the model and its MoE layers."""

    config: ParallelConfig
    plan: ModelPlan
    num_experts: int
    meshes: Meshes | None = None
    policy: MixedPrecisionPolicy | None = None
    forward_number: int = 0
    undo: list[tuple[Any, ...]] = field(default_factory=list)

    def check_ready(self) -> None:
        """Raise where training would silently ignore what the config asks for."""
        if self.meshes is None and self.config.needs_sharding:
            raise ValueError(
                f"this model was patched with ep_size={self.config.ep_size}, "
                f"dp_replicate_size={self.config.dp_replicate_size} but never sharded: every "
                f"process would train alone. Launch with `accelerate launch --config_file` and "
                f"`distributed_type: FSDP`, `fsdp_version: 2` (examples/accelerate/), or call "
                f"apply_ep_fsdp2(model) in your own loop"
            )
        if hf.inside_ddp_forward():
            raise ValueError(
                "this patched model sits inside DistributedDataParallel, which knows nothing of "
                "its experts. Launch with `distributed_type: FSDP`, `fsdp_version: 2` "
                "(examples/accelerate/) instead of MULTI_GPU or MULTI_CPU"
            )


@dataclass
class MoELayer:
    """One experts module's place in its model."""

    index: int
    model: ModelState


def find_state(model: nn.Module) -> ModelState | None:
    """The state of a patched model, also behind torch.compile's or PEFT's wrapper."""
    for module in model.modules():
        state = getattr(module, STATE, None)
        if isinstance(state, ModelState):
            return state
    return None


class ForwardGuard:
    """Pre-forward hook of the root: checks that the model is sharded, counts forwards."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.check_ready()
        self.state.forward_number += 1


@torch.compiler.disable
def moe_forward(
    experts: nn.Module,
    hidden_states: Tensor,  # (T, H)
    top_k_index: Tensor,  # (T, K)
    top_k_weights: Tensor,  # (T, K)
) -> Tensor:
    """The weighted sum of each token's experts, (T, H); registered with transformers."""
    layer: MoELayer = getattr(experts, STATE)
    state, meshes = layer.model, layer.model.meshes
    state.check_ready()
    grad_scale = 1.0 if meshes is None else 1.0 / meshes.world_size
    if meshes is None or meshes.ep_size == 1:
        counts_E = count_pairs(top_k_index, state.num_experts).tolist()
        return run_experts(
            experts,
            hidden_states,
            top_k_index,
            top_k_weights,
            counts_L=counts_E,
            grad_scale=grad_scale,
        )
    group = meshes.ep.get_group()
    rows_RH, ids_RK, weights_RK, sent = dispatch(
        hidden_states,
        top_k_index,
        top_k_weights,
        num_experts=state.num_experts,
        group=group,
        header=_header(layer, experts.training),
    )
    rows_RH = run_experts(
        experts, rows_RH, ids_RK, weights_RK, counts_L=sent.counts_L, grad_scale=grad_scale
    )
    return combine(rows_RH, sent, group)


def _header(layer: MoELayer, training: bool) -> Header:
    return Header(
        forward=layer.model.forward_number,
        layer=layer.index,
        training=training,
        grad=torch.is_grad_enabled(),
        # A graph task is running exactly while backward is: a forward inside it is a recompute.
        recompute=torch._C._current_graph_task_id() != -1,
    )
