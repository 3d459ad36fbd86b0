"""Choose the dtype in which the experts compute."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which F.linear would compute with the input `x`.

    Autocast does not cast the inputs of `expert_mlp`, so its callers cast them to this dtype.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)
