"""Intercept the copies between host and device that FSDP2 makes with CPUOffloadPolicy.

The private names come from torch/distributed/fsdp/_fully_shard/_fsdp_param.py and
_fsdp_collectives.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from hf_moe_ep.upstream.replaced import replaced

_FSDP2 = "torch.distributed.fsdp._fully_shard"
# The functions of FSDP2 that copy between host and device, with True if they copy to the host. The
# first function copies parameters to the device before their all-gather. The second one copies
# gradients to the host after their reduction.
_COPIES_TO_HOST = {"all_gather_inputs": False, "foreach_reduce": True}


def intercept_host_copies(
    copy: Callable[[Tensor, bool], Tensor],
) -> AbstractContextManager[None]:
    """Inside the block, make FSDP2 call `copy(x, to_host)` for its copies between host and device.

    On a CPU rank FSDP2's own calls would copy nothing, because host and device are the same. This
    function replaces `Tensor.to`, because a `TorchFunctionMode` does not see calls during backward.
    """
    stock = Tensor.to

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        caller = sys._getframe(1)
        to_host = _COPIES_TO_HOST.get(caller.f_code.co_name)
        if to_host is not None and caller.f_globals["__name__"].startswith(_FSDP2):
            return copy(x, to_host)
        return stock(x, *args, **kwargs)

    return replaced(Tensor, "to", to)
