"""Shard models that are evaluated but not trained: reference models and teachers.

TRL's trainers compare a policy with a reference model. Stock TRL calls `fully_shard` once, on the
root of the reference, so every forward gathers the whole model on every rank. Here the reference is
frozen and sharded layer by layer, so that a forward gathers one FSDP2 unit (a layer) at a time:

    reference                        how it is sharded
    a patched model                  by its own config
    a stock language model of the    by the policy's config, with which it is patched first: both
    policy's architecture            models then have the same units and shards
    another model: a stock reward    by TRL
    model, the reference of a
    stock policy

`sync_ref_model=True` mixes the policy's weights into the reference. Both models have the same
shards, so each rank mixes its own shards and gathers no parameter.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_moe_ep.architectures import find_block, find_parts
from hf_moe_ep.checkpoints.hub.tensors import hub_tensors
from hf_moe_ep.checkpoints.hub.unread import shard_and_read
from hf_moe_ep.config import get_launched_rank
from hf_moe_ep.integrations import shared_batches
from hf_moe_ep.integrations.prepare import build_options, check_parallelism, without_dynamo
from hf_moe_ep.moe.stacked import count_blocks
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import find_differing, get_rank_of_launch, run_on_all
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.models import get_output_head
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap

_logger = logging.getLogger("hf_moe_ep")
_POLICY = "_hf_moe_ep_policy"
_MESHES = "_hf_moe_ep_meshes"
Original = Callable[..., Any]


def remember_policy(trainer: transformers.Trainer, state: ModelState) -> None:
    """Store the state of the policy (the trained model) on its Accelerator, for its references."""
    setattr(trainer.accelerator, _POLICY, state)


def share_meshes(accelerator: Accelerator, state: ModelState) -> None:
    """Let a model use the process groups of the other models that `accelerator` shards."""
    if not hasattr(accelerator, _MESHES):
        setattr(accelerator, _MESHES, state.shared_meshes)
    state.shared_meshes = getattr(accelerator, _MESHES)


def take_over_meshes(earlier: Accelerator, accelerator: Accelerator) -> None:
    """Reuse process groups in a Trainer that creates a new Accelerator for each trial."""
    if hasattr(earlier, _MESHES):
        setattr(accelerator, _MESHES, getattr(earlier, _MESHES))


def hash_weights(original: Callable[[nn.Module], str], module: nn.Module) -> str:
    """Wrap TRL's `hash_module`: hash sharded weights, and read layers that are on meta before.

    The hash is a part of the key under which TRL caches log-probabilities of the reference. TRL
    cannot hash DTensors. The weights of a sharded model are gathered one after the other, so every
    rank must call this function, and gets the same hash.
    """
    state = find_state(module)
    if state is not None and state.meshes is not None:
        return _hash_gathered(module)
    if state is not None and state.unread is not None:
        if get_rank_of_launch() == 0:
            _logger.info("every process reads the whole model, because TRL hashes its weights")
        state.unread.read_whole(module)
    return original(module)


def _hash_gathered(model: nn.Module) -> str:
    """Return a hash of all weights of a sharded model, which does not depend on its layout."""
    sha256 = hashlib.sha256()
    try:
        for key, tensor in hub_tensors(model, merge_adapters=True, extra_tensors=False):
            sha256.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    except ValueError as error:  # quantised experts, or adapters that cannot be merged
        raise ValueError(
            f"TRL hashes the weights of a reference model for precompute_ref_log_probs=True, and "
            f"these sharded weights cannot be hashed ({error}); leave precompute_ref_log_probs out"
        ) from error
    return sha256.hexdigest()


def shard_reference(original: Original, model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Wrap TRL's `prepare_fsdp`: freeze a reference model and shard it layer by layer.

    Raises:
        ValueError: on every rank: the reference is a language model of another architecture or with
            other experts than the policy; its sp_size is > 1 and differs from the policy's; or
            ranks have different references.
    """
    policy: ModelState | None = getattr(accelerator, _POLICY, None)
    if not accelerator.is_fsdp2 or (find_state(model) is None and policy is None):
        return original(model, accelerator)
    kind = run_on_all(
        "the reference model", partial(_classify_reference, model, policy, accelerator)
    )
    if kinds := find_differing(kind):
        other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise ValueError(
            f"ranks disagree about the reference model: rank 0 has {kinds[0]}, rank {other} has "
            f"{kinds[other]}; pass the same reference model on every rank"
        )
    if kind == _OTHER:
        return original(model, accelerator)
    if kind == _STOCK:
        assert policy is not None and policy.patch_alike is not None
        # A reference model computes no loss, so it needs no head for multi-token prediction.
        # `experts_dtype` was chosen for the policy, and would round the weights of the reference.
        unlike_policy = {
            "mtp_layers": 0,
            "mtp_from_scratch": False,
            "experts_dtype": None,
            "experts_double_quant": False,
        }
        run_on_all("the reference model", partial(policy.patch_alike, model, **unlike_policy))
    _shard_frozen(model, accelerator)
    model.eval()
    return model


_PATCHED, _STOCK, _OTHER = "a patched model", "a stock language model", "another model"


def _classify_reference(
    model: nn.Module, policy: ModelState | None, accelerator: Accelerator
) -> str:
    """Return one of the three kinds above.

    Raises:
        ValueError: the model cannot be a reference of the policy.
    """
    state = find_state(model)
    has_head = get_output_head(model) is not None  # False for a reward model
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if state is None and (not has_head or is_sharded):
        return _OTHER
    if policy is not None and has_head:
        _check_same_architecture(model, state, policy)
    if state is None:
        return _STOCK
    _check_shares_batches(state, accelerator)
    return _PATCHED


def _check_same_architecture(
    model: nn.Module, state: ModelState | None, policy: ModelState
) -> None:
    """Raise ValueError if a reference has another architecture, or other experts or MoE layers."""
    if state is not None:
        reference_sizes = (state.plan.model_type, state.num_experts, len(state.moe_layers))
    else:
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        reference_sizes = (str(model_type), 0, 0)
        if model_type == policy.plan.model_type:
            given_plan = policy.plan if policy.plan.origin == "given" else None
            if (block := find_block(model, given_plan)) is not None:
                reference_sizes = (model_type, *count_blocks(model, block))
            else:
                parts = find_parts(model, given_plan)
                reference_sizes = (parts.plan.model_type, parts.num_experts, len(parts.experts))
    policy_sizes = (policy.plan.model_type, policy.num_experts, len(policy.moe_layers))
    remedy = "pass the checkpoint that the policy was loaded from, or no reference"
    if reference_sizes[0] != policy_sizes[0]:
        raise ValueError(
            f"the reference model is of architecture {reference_sizes[0]!r} and the policy of "
            f"{policy_sizes[0]!r}, but a reference is the policy before training; {remedy}"
        )
    if reference_sizes != policy_sizes:
        raise ValueError(
            f"the reference model has {reference_sizes[2]} MoE layers of {reference_sizes[1]} "
            f"experts and the policy has {policy_sizes[2]} of {policy_sizes[1]}, but a reference "
            f"is the policy before training; {remedy}"
        )


def _check_shares_batches(state: ModelState, accelerator: Accelerator) -> None:
    """Raise ValueError if a model would split sequences over ranks that do not share batches."""
    size = state.config.ranks_per_batch
    if size not in (1, shared_batches.count_processes_per_batch(accelerator)):
        raise ValueError(
            f"this model was patched with {state.config.sequence_sizes}, but the trained model has "
            f"{shared_batches.describe_shared_batch(accelerator)}; patch both with the same sizes, "
            f"or this model with sp_size=1 and cp_size=1"
        )


def prepare_evaluated(
    original: Original,
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """Prepare a patched model. A model that is only evaluated (a teacher) is sharded first."""
    state = find_state(model) if evaluation_mode and self.is_fsdp2 else None
    if state is not None and state.meshes is None:
        run_on_all("accelerator.prepare_model", partial(_check_shares_batches, state, self))
        policy: ModelState | None = getattr(self, _POLICY, None)
        _shard(model, self, frozen=policy is not None and policy is not state)
    with without_dynamo(self):  # a model that is only evaluated is not compiled
        return original(self, model, device_placement, evaluation_mode)


def shard_own_reference(
    original: Original, self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `compute_ref_log_probs` of DPO and KTO: shard a policy that is its own reference.

    A policy with adapters is its own reference: the reference's forward disables the adapters. With
    `precompute_ref_log_probs=True` TRL evaluates the reference before `train` shards the policy.
    TRL 1 passes (model, inputs). TRL 0.29 and ms-swift pass only the inputs and use the policy.
    """
    model = args[0] if args and isinstance(args[0], nn.Module) else self.model
    state = find_state(model)
    if state is not None and state.meshes is None and self.accelerator.is_fsdp2:
        _shard(model, self.accelerator, frozen=False)
    return original(self, *args, **kwargs)


def _shard_frozen(model: nn.Module, accelerator: Accelerator) -> None:
    """Freeze a patched reference, shard it unless it is sharded already, and log this on rank 0."""
    state = find_state(model)
    assert state is not None
    name = type(model).__name__
    if state.meshes is None:
        _shard(model, accelerator, frozen=True)
    else:
        model.requires_grad_(False)
    if get_launched_rank() == 0:
        _logger.info(
            "the reference %s is frozen, and sharded layer by layer (ep_size %d)",
            name,
            state.config.ep_size,
        )


def _shard(model: nn.Module, accelerator: Accelerator, *, frozen: bool) -> None:
    """Shard a patched model with the options of `accelerator`."""
    state, inner = find_state(model), unwrap(model)
    assert state is not None
    check_parallelism(accelerator.parallelism_config, state)
    if frozen:
        model.requires_grad_(False)
    options = build_options(accelerator, inner)
    if frozen:
        # No backward follows, which would need the gathered parameters again.
        options = replace(options, reshard_after_forward=True)
    share_meshes(accelerator, state)
    shard_and_read(inner, state, options, accelerator.device)


def mix_shards(original: Original, model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """Wrap `SyncRefModelCallback._sync_target_model`: mix `alpha` of the policy into its reference.

    Raises:
        ValueError: on every rank: a parameter is sharded differently in the two models.
    """
    if find_state(model) is None or find_state(target_model) is None:
        original(model, target_model, alpha)
        return
    with experts_in_hub_order(model), experts_in_hub_order(target_model):
        _mix_resharded(model, target_model, alpha)


def _mix_resharded(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    reshard(model)
    reshard(target_model)
    sources, targets = _get_parameters_by_name(model), _get_parameters_by_name(target_model)
    for name in sorted(sources.keys() | targets.keys()):
        in_policy = _describe_layout(sources.get(name))
        in_reference = _describe_layout(targets.get(name))
        if in_policy != in_reference:
            raise ValueError(
                f"sync_ref_model=True mixes shards, and {name} is {in_policy} in the policy and "
                f"{in_reference} in the reference; pass a stock reference, which is sharded like "
                f"the policy, or patch both with the same sizes"
            )
    with torch.no_grad():
        for name, target in targets.items():
            get_local_tensor(target).mul_(1.0 - alpha).add_(
                get_local_tensor(sources[name]), alpha=alpha
            )


def _get_parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {get_canonical_name(name): parameter for name, parameter in model.named_parameters()}


def _describe_layout(tensor: Tensor | None) -> str:
    """Describe the shape and the sharding of a parameter, for comparisons and errors."""
    if tensor is None:
        return "absent"
    if not isinstance(tensor, DTensor):
        return f"{tuple(tensor.shape)}"
    mesh = tensor.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return f"{tuple(tensor.shape)} {tensor.placements} over {sizes}"
