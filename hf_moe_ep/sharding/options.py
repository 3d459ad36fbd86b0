"""Choose the options of `fully_shard` for a training loop without Accelerate.

With Accelerate, its FSDP plugin has the options (`build_options` in `integrations/prepare.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from hf_moe_ep.config import get_launched_local_rank
from hf_moe_ep.ranks.all_ranks import check_own_gpu
from hf_moe_ep.upstream.models import list_packed_parameters


@dataclass(frozen=True)
class ShardOptions:
    """Options of `fully_shard`, chosen by the user or by Accelerate.

    Attributes:
        mp_policy: FSDP2's mixed precision. `param_dtype` replaces a `reduce_dtype` of None, because
            None has two meanings: torch 2.15 reduces in the dtype of the sharded parameters, and
            earlier versions reduce in `param_dtype`.
        offload_policy: FSDP2's CPU offload.
        fp32_masters: keep trainable parameters in fp32.
        reshard_after_forward: as in `fully_shard`.
        ignored_params: parameters that FSDP2 does not shard.
        empty_params: parameters that are on the meta device on every rank, and that sharding leaves
            on the meta device.
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


def choose_default_policy(model: nn.Module) -> tuple[MixedPrecisionPolicy, bool]:
    """Return (mixed precision, fp32_masters) for a training loop without Accelerate.

    A bf16 or fp16 model computes in that dtype, with fp32 master weights and fp32 gradient
    reduction. An fp32 or fp64 model has no mixed precision. The dtype in which 4-bit weights are
    packed does not matter.
    """
    packed = set(list_packed_parameters(model))
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p not in packed}
    half_dtypes = sorted(dtypes & {torch.bfloat16, torch.float16}, key=str)
    if not half_dtypes:
        return MixedPrecisionPolicy(), False
    return MixedPrecisionPolicy(param_dtype=half_dtypes[0], reduce_dtype=torch.float32), True


def list_kept_whole(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the 4-bit weights that every rank keeps whole.

    These weights are stored as bytes, which some torch versions cannot shard.
    """
    packed = list_packed_parameters(model)
    return frozenset(p for p in packed if not p.requires_grad and not p.is_floating_point())


def choose_grad_divisors(
    dtype: torch.dtype, reduce_dtype: torch.dtype, *, ep_size: int, world_size: int
) -> tuple[int, int]:
    """Return (before, after), two divisors of the experts' gradients. Their product is world_size.

        dtype  reduce_dtype  ep_size  world_size  (before, after)
        bf16   any           8        64          (64, 1)
        fp16   fp32          8        64          (8, 8)
        fp16   fp16          8        64          (32, 2)

    Our backward divides by `before`, and rounds the quotient to `dtype`. FSDP2 then sums the
    gradients over ranks. If `after` is not 1, one more pass over the sum divides it by `after`.

    In fp16, small gradients divided by the world size would become 0, because the smallest positive
    number is 6e-8. Backward therefore divides by ep_size only: the tokens of ep_size ranks
    contribute to the gradient, so the quotient is about as large as the gradient of a dense weight.
    If the reduction is in fp16 too, its sum must stay below 65504. Like FSDP2, we then also divide
    by about the square root of the remaining factor before the reduction.
    """
    if dtype != torch.float16:
        return world_size, 1
    before, remaining = ep_size, world_size // ep_size
    if reduce_dtype == torch.float16:
        root = 1
        while remaining % (2 * root) == 0 and root * root < remaining:
            root *= 2
        before *= root
    return before, world_size // before


def choose_default_device() -> torch.device:
    """Return the device of the default process group: this rank's GPU with NCCL, else the CPU.

    Raises:
        ValueError: on every rank, if two ranks would share a GPU.
    """
    # `get_backend` returns "undefined" if init_process_group() was called without a backend, so the
    # backend config is read. Gloo can send CUDA tensors too, but gloo without NCCL means the CPU.
    if "cuda:nccl" not in dist.get_backend_config():
        return torch.device("cpu")
    index = _choose_gpu()
    torch.cuda.set_device(index)
    check_own_gpu(str(torch.cuda.get_device_properties(index).uuid))
    return torch.device("cuda", index)


def _choose_gpu() -> int:
    """Return the index of the GPU that the script chose, or LOCAL_RANK if it chose none."""
    assert dist.group.WORLD is not None
    group_device: torch.device | None = dist.group.WORLD.bound_device_id
    if group_device is not None and group_device.index is not None:
        return group_device.index
    local_rank = get_launched_local_rank()
    # The current device is 0 until a script chooses another device, so 0 is not taken as a choice.
    # LOCAL_RANK is not a valid index if the launcher shows each rank a single GPU.
    was_chosen = torch.cuda.is_initialized() and torch.cuda.current_device() != 0
    if local_rank is None or was_chosen or local_rank >= torch.cuda.device_count():
        return torch.cuda.current_device()
    return local_rank
