"""How `fully_shard` is called: the user's or Accelerate's choices, and an own loop's defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from hf_moe_ep.config import launched_local_rank
from hf_moe_ep.ranks.together import check_own_gpu
from hf_moe_ep.upstream.models import packed_parameters


@dataclass(frozen=True)
class ShardOptions:
    """How `fully_shard` is called: the user's or Accelerate's choices.

    Attributes:
        mp_policy: FSDP2's mixed precision. A `reduce_dtype` of None becomes `param_dtype` here:
            torch 2.15 would reduce in the dtype of the parameters, earlier versions in
            `param_dtype`, and one policy has to mean the same under each.
        offload_policy: FSDP2's CPU offload.
        fp32_masters: hold trainable parameters in fp32.
        reshard_after_forward: as in `fully_shard`.
        ignored_params: parameters FSDP2 leaves alone.
        empty_params: parameters on the meta device, which stay there, the same on every rank.
    """

    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    fp32_masters: bool
    reshard_after_forward: bool
    ignored_params: frozenset[nn.Parameter] = frozenset()
    empty_params: frozenset[nn.Parameter] = frozenset()

    def __post_init__(self) -> None:
        policy = self.mp_policy
        if policy.reduce_dtype is None and policy.param_dtype is not None:
            policy = replace(policy, reduce_dtype=policy.param_dtype)
            object.__setattr__(self, "mp_policy", policy)  # a frozen dataclass

    def fully_shard_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "mp_policy": self.mp_policy,
            "offload_policy": self.offload_policy,
            "reshard_after_forward": self.reshard_after_forward,
        }
        if self.ignored_params:
            kwargs["ignored_params"] = set(self.ignored_params)
        return kwargs


def default_policy(model: nn.Module) -> tuple[MixedPrecisionPolicy, bool]:
    """Choose for own loops to compute in the dtype the model was loaded in: (policy, fp32 masters).

    A bf16 or fp16 model trains in that dtype with fp32 master weights and fp32 gradient
    reduction; an fp32 or fp64 model is left as it is. Packed 4-bit weights say nothing of it.
    """
    packed = set(packed_parameters(model))
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p not in packed}
    low = sorted(dtypes & {torch.bfloat16, torch.float16}, key=str)
    if not low:
        return MixedPrecisionPolicy(), False
    return MixedPrecisionPolicy(param_dtype=low[0], reduce_dtype=torch.float32), True


def kept_whole(model: nn.Module) -> frozenset[nn.Parameter]:
    """Find packed 4-bit weights that are bytes: not every torch splits those, floats all do."""
    packed = packed_parameters(model)
    return frozenset(p for p in packed if not p.requires_grad and not p.is_floating_point())


def grad_divisors(
    dtype: torch.dtype, reduce_dtype: torch.dtype, *, ep_size: int, world_size: int
) -> tuple[int, int]:
    """Split world_size, which an expert's summed gradients are divided by: (before, after).

    Before is in our backward, where the quotient is rounded to `dtype`; after is behind the
    reduction, which would be one pass more. fp16 reaches down to 6e-8 only: there a gradient is
    rounded as the sum over its ep group's tokens divided by ep_size, as large as that of a weight
    which every rank has. Where the reduction adds in fp16 too, it is kept from 65504 as FSDP2 does
    it, by dividing by about the root of the rest before.
    """
    if dtype != torch.float16:
        return world_size, 1
    before, rest = ep_size, world_size // ep_size
    if reduce_dtype == torch.float16:
        root = 1
        while rest % (2 * root) == 0 and root * root < rest:
            root *= 2
        before *= root
    return before, world_size // before


def default_device() -> torch.device:
    """Find where the default group communicates: this rank's GPU under NCCL, else the CPU.

    Raises:
        ValueError: on every rank, where two of them would share a GPU.
    """
    # Not the backend's name: "undefined" after init_process_group() without one. A group of gloo
    # alone carries CUDA tensors too, but who asks for it means the CPU.
    if "cuda:nccl" not in dist.get_backend_config():
        return torch.device("cpu")
    index = _own_gpu()
    torch.cuda.set_device(index)
    check_own_gpu(str(torch.cuda.get_device_properties(index).uuid))
    return torch.device("cuda", index)


def _own_gpu() -> int:
    """Find the GPU that was chosen for this rank; where none was, the launcher's LOCAL_RANK."""
    assert dist.group.WORLD is not None
    bound: torch.device | None = dist.group.WORLD.bound_device_id
    if bound is not None and bound.index is not None:
        return bound.index
    local_rank = launched_local_rank()
    # A rank that chose nothing is on device 0, as soon as anything asked CUDA for anything. One
    # that sees a single GPU, because the launcher hides the others, has it as number 0.
    chosen = torch.cuda.is_initialized() and torch.cuda.current_device() != 0
    if local_rank is None or chosen or local_rank >= torch.cuda.device_count():
        return torch.cuda.current_device()
    return local_rank
