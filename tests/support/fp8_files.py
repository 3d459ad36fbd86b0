"""Write checkpoints in FP8 like the published ones, quantised by transformers' own operation."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.integrations import finegrained_fp8

from support.hub_files import hub_state

# Parts of the keys that published checkpoints do not quantise.
LEFT = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "visual")
# transformers 5.16 loads FP8 only with an implementation of experts that is in this table.
_OVERRIDES = getattr(finegrained_fp8.FP8Experts, "_impl_tp_layer_overrides", {})
for _implementation in (None, "eager", "batched_mm", "grouped_mm"):
    _OVERRIDES.setdefault(_implementation, {})


def write_fp8(folder: Path, model: PreTrainedModel, block: tuple[int, int] = (128, 128)) -> None:
    """Write `model` in the hub's layout, with every matrix in FP8 except those in LEFT."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state: dict[str, Tensor] = {}
    for key, tensor in hub_state(model).items():
        matrix = tensor.dim() > 1 and not any(word in key for word in LEFT)
        state |= quantised(key, tensor, block) if matrix else {key: tensor}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = published_config(block)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))


def published_config(block: tuple[int, int] = (128, 128)) -> dict[str, Any]:
    """Return the quantization_config of Qwen3-30B-A3B-FP8, with fewer modules_to_not_convert."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }


def quantised(key: str, tensor: Tensor, block: tuple[int, int]) -> dict[str, Tensor]:
    """Return a quantised weight and its scales by hub key.

    A matrix whose sizes are no multiples of a block is padded with zeros before it is quantised.
    """
    config = FineGrainedFP8Config(weight_block_size=block)
    operation = finegrained_fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))  # type: ignore[arg-type]
    rows, columns = tensor.shape[-2:]
    padding = (0, -columns % block[1], 0, -rows % block[0])
    padded = torch.nn.functional.pad(tensor, padding)
    values, scales = operation.convert({key: padded}).values()
    assert scales.numel() == math.prod(padded.shape) // math.prod(block)
    return {key: values[..., :rows, :columns].contiguous(), f"{key}_scale_inv": scales}


def stock_product(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantise in fp32 with stock's function, or by hand in transformers 5.17, which has none."""
    stock = getattr(finegrained_fp8, "_dequantize_fp8_weight", None)
    if stock is not None:
        product: Tensor = stock(values, scales, list(block), torch.float32)
        return product
    rows, columns = values.shape[-2:]
    by_row = scales.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return values.float() * by_row.repeat_interleave(block[1], dim=-1)[..., :columns]
