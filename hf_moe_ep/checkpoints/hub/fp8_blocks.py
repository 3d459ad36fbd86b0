"""Encode weights in FP8 as published checkpoints store them, while they are sent to an engine.

    x.weight            [192, 300]   E4M3, one byte per value
    x.weight_scale_inv  [2, 3]       fp32, one scale per block of 128 x 128 values

`encode_blocks` (`ops/quantised.py`) computes both tensors, and `fp8.py` decodes them. The weights
of experts and of Linear layers are encoded. Embeddings, the output head, norms, routers, and
matrices with fewer than 128 rows or columns keep their dtype, as in DeepSeek-V3 and Qwen3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hf_moe_ep.checkpoints.hub.fp8 import BLOCK
from hf_moe_ep.plan import ModelPlan, matches
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.hub import get_checkpoint_name
from hf_moe_ep.upstream.models import get_output_head

# The value of the argument `dtype` that asks for this encoding.
FP8 = "fp8"


def has_blocks(shape: tuple[int, ...]) -> bool:
    """Return True if a weight [.., out, in] has at least one block in both dims."""
    return len(shape) > 1 and min(shape[-2:]) >= BLOCK


def list_fp8_parameters(model: nn.Module, plan: ModelPlan) -> set[str]:
    """Return the names, in checkpoints, of the parameters that are encoded.

    These parameters are stacked experts, and the weights of Linear layers except the output head
    and routers. A checkpoint tensor that is smaller than a block keeps its dtype (`has_blocks`).
    """
    head = get_output_head(without_adapters(model))
    weights = set()
    for name, module in model.named_modules():
        stock = get_checkpoint_name(name)
        if isinstance(module, nn.Linear) and module is not head and not matches(plan.router, stock):
            weights.add(f"{stock}.weight")
        if matches(plan.experts, stock):
            # Biases and norms of experts are stacked as well, but they have two dims.
            stacks = {weight: getattr(module, weight, None) for weight in plan.expert_weights}
            weights |= {f"{stock}.{w}" for w, p in stacks.items() if p is not None and p.ndim > 2}
    return weights


def make_fp8_config(unencoded: Iterable[str]) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint in FP8 except the matrices `unencoded`."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(key.removesuffix(".weight") for key in unencoded),
    }
