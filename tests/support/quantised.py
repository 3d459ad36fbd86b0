"""Compute the values of quantised experts, with bitsandbytes (nf4) or with a formula (fp8)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.ops.quantised import Quantised, dequantise
from hf_moe_ep.state import STATE, iterate_quantised_matrices

# Format -> sizes of a tiny model whose experts divide evenly into its blocks. The initializer_range
# is larger for smaller sizes, so that layers keep the scale of their input.
SIZES: dict[str, dict[str, Any]] = {
    "nf4": {"hidden_size": 64, "moe_intermediate_size": 128, "initializer_range": 0.12},
    "fp8": {"hidden_size": 128, "moe_intermediate_size": 256, "initializer_range": 0.09},
}


def nf4_values(weight_OI: Tensor, nested: bool = False) -> Tensor:
    """Quantise and dequantise a matrix with bitsandbytes, in fp32."""
    import bitsandbytes.functional as functional

    wide = weight_OI.float().contiguous()
    packed, state = functional.quantize_4bit(
        wide, blocksize=64, quant_type="nf4", compress_statistics=nested
    )
    if nested:
        # The first number of this table is -0.993. Up to 0.49, bitsandbytes changes it to -1 in a
        # process that has quantised on a CPU (csrc/cpu_ops.cpp).
        state.state2.code = functional.create_dynamic_map()
    return functional.dequantize_4bit(packed, state)


def fp8_values(weight_OI: Tensor) -> Tensor:
    """Round a matrix to e4m3 with one scale per 128 x 128 values, in fp32."""
    values = torch.empty(weight_OI.shape)
    for row in range(0, len(weight_OI), 128):
        for column in range(0, weight_OI.shape[1], 128):
            index = slice(row, row + 128), slice(column, column + 128)
            block = weight_OI[index].float()
            factor = 448 / block.abs().max()
            values[index] = (block * factor).to(torch.float8_e4m3fn).float() * (1 / factor)
    return values


VALUES = {"nf4": nf4_values, "nested": partial(nf4_values, nested=True), "fp8": fp8_values}


@torch.no_grad()
def dequantise_experts(model: nn.Module, kind: str) -> None:
    """Replace a stock model's expert weights by their values after quantising to `kind`."""
    num_weights = 0
    for module in model.modules():
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            weight = vars(module).get("_parameters", {}).get(name)
            if weight is None or weight.ndim != 3:
                continue
            for matrix in (
                weight.data.mT if getattr(module, "is_transposed", False) else weight.data
            ):
                matrix.copy_(VALUES[kind](matrix).to(matrix.dtype))
            num_weights += 1
    assert num_weights, f"{type(model).__name__} has no stacked experts"


def in_place_of_bytes(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Replace the bytes and scales of quantised matrices by their values.

    `tensors` are gathered tensors by parameter name. If the bytes are None, the values are None.
    """
    result = dict(tensors)
    for name, stack, quantisation in iterate_quantised_matrices(model):
        parts = {key: result.pop(key, None) for key in stack.by_name(name)}
        data, scale, *nested = parts.values()
        kind = quantisation.kind
        if data is None:
            result |= {name: None} if name in tensors else {}
            continue
        matrices = [
            dequantise(Quantised(data, scale, *nested).matrix_of(expert), kind, torch.float32)
            for expert in range(len(data))
        ]
        module = model.get_submodule(name.rpartition(".")[0])
        values = torch.stack(matrices)
        result[name] = values.mT if getattr(module, STATE).compute.transposed else values
    return result
