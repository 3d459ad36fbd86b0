"""How `fully_shard` is called: the user's or Accelerate's choices, and an own loop's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True)
class ShardOptions:
    """How `fully_shard` is called: the user's or Accelerate's choices.

    Attributes:
        mp_policy: FSDP2's mixed precision.
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
    reduction; an fp32 or fp64 model is left as it is.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    low = sorted(dtypes & {torch.bfloat16, torch.float16}, key=str)
    if not low:
        return MixedPrecisionPolicy(), False
    return MixedPrecisionPolicy(param_dtype=low[0], reduce_dtype=torch.float32), True


def default_device() -> torch.device:
    """Find where the default group communicates: this rank's GPU under NCCL, else the CPU."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
