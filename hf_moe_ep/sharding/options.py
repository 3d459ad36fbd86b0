"""Options of `fully_shard`: those of the user or Accelerate, and the defaults of own loops."""

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
    """Options of `fully_shard`, chosen by the user or by Accelerate.

    Attributes:
        mp_policy: FSDP2's mixed precision. A `reduce_dtype` of None is replaced by `param_dtype`.
            torch 2.15 would reduce in the dtype of the parameters, earlier versions in
            `param_dtype`, and a policy must mean the same with every version.
        offload_policy: FSDP2's CPU offload.
        fp32_masters: keep trainable parameters in fp32.
        reshard_after_forward: as in `fully_shard`.
        ignored_params: parameters that FSDP2 does not shard.
        empty_params: parameters that are on the meta device on every rank, and stay there.
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
    """Return the mixed precision of own loops, and True if they have fp32 master weights.

    A bf16 or fp16 model computes in that dtype, with fp32 master weights and fp32 gradient
    reduction. An fp32 or fp64 model has no mixed precision. Packed 4-bit weights are not
    considered.
    """
    packed = set(packed_parameters(model))
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p not in packed}
    low = sorted(dtypes & {torch.bfloat16, torch.float16}, key=str)
    if not low:
        return MixedPrecisionPolicy(), False
    return MixedPrecisionPolicy(param_dtype=low[0], reduce_dtype=torch.float32), True


def kept_whole(model: nn.Module) -> frozenset[nn.Parameter]:
    """Find packed 4-bit weights stored as bytes, which not every torch version can shard."""
    packed = packed_parameters(model)
    return frozenset(p for p in packed if not p.requires_grad and not p.is_floating_point())


def grad_divisors(
    dtype: torch.dtype, reduce_dtype: torch.dtype, *, ep_size: int, world_size: int
) -> tuple[int, int]:
    """Split world_size, the divisor of an expert's summed gradients: (before, after).

    The first divisor is applied in our backward, where the quotient is rounded to `dtype`; the
    second one after the reduction, in one more pass over the gradients. So all of world_size comes
    first, except with fp16, whose smallest number is 6e-8. There the sum over the tokens of an ep
    group is divided by ep_size first, which gives it the magnitude of the gradient of a weight that
    every rank has. If the reduction is in fp16 too, its sum must stay below 65504: as FSDP2 does,
    we also divide by about the square root of the rest before the reduction.
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
    """Return the device of the default process group: this rank's GPU with NCCL, else the CPU.

    Raises:
        ValueError: on every rank, if two ranks would share a GPU.
    """
    # The name of the backend is "undefined" after init_process_group() without one. Gloo can also
    # send CUDA tensors, but a user who asks for gloo alone means the CPU.
    if "cuda:nccl" not in dist.get_backend_config():
        return torch.device("cpu")
    index = _own_gpu()
    torch.cuda.set_device(index)
    check_own_gpu(str(torch.cuda.get_device_properties(index).uuid))
    return torch.device("cuda", index)


def _own_gpu() -> int:
    """Return the index of the GPU chosen for this rank, or the launcher's LOCAL_RANK."""
    assert dist.group.WORLD is not None
    bound: torch.device | None = dist.group.WORLD.bound_device_id
    if bound is not None and bound.index is not None:
        return bound.index
    local_rank = launched_local_rank()
    # Without a choice the current device is 0, once CUDA is initialised. A rank that sees a single
    # GPU, because the launcher hides the others, has index 0 as well.
    chosen = torch.cuda.is_initialized() and torch.cuda.current_device() != 0
    if local_rank is None or chosen or local_rank >= torch.cuda.device_count():
        return torch.cuda.current_device()
    return local_rank
