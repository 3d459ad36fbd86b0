"""The experts of one rank on the rows it holds: weights in, weighted rows out.

The weights are the stacked parameters of the stock module, under FSDP2 already gathered to this
rank's experts `[L, 2F, H]` and `[L, H, F]`. `grad_scale` is 1 / world: an expert receives the
gradients of its whole ep group through the dispatch, so its FSDP2 unit only sums, and the
division that FSDP2 does elsewhere happens here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.ops.expert_mlp import expert_mlp

SUPPORTED_ACTIVATIONS = ("silu",)


def run_experts(
    experts: Any,
    rows_RH: Tensor,
    expert_ids_RK: Tensor,
    weights_RK: Tensor,
    *,
    counts_L: list[int],
    grad_scale: float,
) -> Tensor:
    """out_RH in the dtype of `rows_RH`; see `hf_moe_ep.ops.expert_mlp`."""
    gate_up_LGH, down_LHF = _local(experts.gate_up_proj), _local(experts.down_proj)
    device = rows_RH.device.type
    # Like F.linear, which leaves fp64 alone under autocast.
    if not torch.is_autocast_enabled(device) or rows_RH.dtype == torch.float64:
        compute_RH = rows_RH
    else:
        # Our autograd function is opaque to autocast, so it casts what F.linear would have.
        compute = torch.get_autocast_dtype(device)
        compute_RH = rows_RH.to(compute)
        gate_up_LGH, down_LHF = gate_up_LGH.to(compute), down_LHF.to(compute)
    out_RH = expert_mlp(
        compute_RH,
        expert_ids_RK,
        weights_RK,
        gate_up_LGH,
        down_LHF,
        counts_L=counts_L,
        grad_scale=grad_scale,
    )
    return out_RH.to(rows_RH.dtype)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
