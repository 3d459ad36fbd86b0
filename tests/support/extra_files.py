"""Write tiny checkpoints with layers for multi-token prediction, in the layouts of published ones.

    type                keys of the layer
    qwen3_next          mtp.fc, mtp.layers.0.., one key per expert
    qwen3_5_moe_text    the same, as stock saves the model's own experts
    qwen3_5_moe         mtp.fc, mtp.layers.0.., stacked experts as in the model itself, which has
                        model.language_model and model.visual (Qwen3.6-35B-A3B)
    deepseek_v3         model.layers.{n}.., n the number of layers, FP8 weights and their scales
    glm4_moe            model.layers.{n}.., as DeepSeek-V3 in bf16
    mimo_v2_flash       model.mtp.layers.0..

The keys are those that the loaders of vLLM 0.33.0 read (qwen3_next_mtp.py, qwen3_5_mtp.py,
deepseek_mtp.py, glm4_moe_mtp.py, mimo_v2_mtp.py). The weights of each layer are random; a layer of
the model itself gives the names and sizes of the decoder layer in it.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from support.architectures.models import tiny

INDEX = "model.safetensors.index.json"
TYPES = (
    "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "mimo_v2_flash"
)  # fmt: skip
# The field of config.json with the number of a model's layers for multi-token prediction.
LAYER_FIELDS = {
    "qwen3_next": {"num_nextn_predict_layers": 1},
    "qwen3_5_moe_text": {"mtp_num_hidden_layers": 1},
    "qwen3_5_moe": {"mtp_num_hidden_layers": 1},
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "glm4_moe": {"num_nextn_predict_layers": 1},
    "mimo_v2_flash": {"num_nextn_predict_layers": 1},
}
_BLOCK = 128


def write_with_extra(
    folder: Path,
    model_type: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    in_fp8: bool = True,
    std: float = 1.0,
) -> dict[str, Tensor]:
    """Write a tiny checkpoint in three files or more, and return its extra tensors by key.

    `in_fp8` stores the layer of DeepSeek-V3 in FP8. `std` is the size of the extra tensors' values.
    """
    model = tiny(model_type, dtype=dtype, seed=seed)
    for name, value in LAYER_FIELDS[model_type].items():
        setattr(model.config.get_text_config(), name, value)
    if model_type == "qwen3_5_moe":
        model._weight_conversions = []  # as if the model had been loaded from stacked experts
        for config in (model.config.text_config, model.config.vision_config):
            config.dtype = dtype  # as from_pretrained sets it
    model.save_pretrained(folder, max_shard_size="60KB")
    own = read_files(folder)
    extra = extra_of(model_type, model, own, in_fp8=in_fp8, std=std)
    assert not extra.keys() & own.keys()
    return extra if not extra else add_tensors(folder, extra)


def load_stock(folder: Path, **options: Any) -> PreTrainedModel:
    """Load a checkpoint with the class of transformers that its config names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model: PreTrainedModel = getattr(transformers, name).from_pretrained(folder, **options)
    return model


def add_tensors(folder: Path, tensors: dict[str, Tensor], file: str = "extra") -> dict[str, Tensor]:
    """Add tensors to a checkpoint: half of them in a file of their own, half in its last file."""
    path = folder / INDEX
    if not path.is_file():
        keys = load_file(folder / "model.safetensors").keys()
        files = dict.fromkeys(keys, "model.safetensors")
        path.write_text(json.dumps({"metadata": {}, "weight_map": files}))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        text = path.read_text().replace("model.safetensors", "model-00001-of-00001.safetensors")
        path.write_text(text)
    index = json.loads(path.read_text())
    last = max(index["weight_map"].values())
    keys = sorted(tensors)
    first_half = {key: tensors[key] for key in keys[: len(keys) // 2]}
    second_half = {key: tensors[key] for key in keys[len(keys) // 2 :]}
    save_file(first_half, folder / f"{file}.safetensors", {"format": "pt"})
    save_file(load_file(folder / last) | second_half, folder / last, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(first_half, f"{file}.safetensors")
    index["weight_map"] |= dict.fromkeys(second_half, last)
    path.write_text(json.dumps(index))
    return tensors


def read_files(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, and check that the index names every tensor once."""
    if not (folder / INDEX).is_file():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(index.values())):
        in_file = load_file(folder / name)
        assert in_file.keys() == {key for key, file in index.items() if file == name}
        assert not in_file.keys() & tensors.keys()
        tensors |= in_file
    return tensors


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare keys, dtypes, shapes and bytes; `actual` may have other tensors, too."""
    assert expected.keys() <= actual.keys(), sorted(expected.keys() - actual.keys())[:3]
    for key, tensor in expected.items():
        other = actual[key]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(as_bytes(other), as_bytes(tensor)), key


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def is_of_head(key: str, model: Any) -> bool:
    """Return True if a key belongs to the layer for multi-token prediction."""
    layers = model.config.get_text_config().num_hidden_layers
    return bool(re.match(rf"(model\.)?mtp\.|model\.layers\.{layers}\.", key))


def extra_of(
    model_type: str,
    model: PreTrainedModel,
    own: dict[str, Tensor],
    *,
    seed: int = 17,
    in_fp8: bool = True,
    std: float = 1.0,
) -> dict[str, Tensor]:
    """Make the tensors of one layer for multi-token prediction."""
    draw = torch.Generator().manual_seed(seed)
    config: Any = model.config.get_text_config()
    hidden, layers = config.hidden_size, config.num_hidden_layers

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (std * torch.randn(shape, generator=draw)).to(dtype)

    def layer(prefix: str, like: int) -> dict[str, Tensor]:
        base = "model.language_model" if model_type == "qwen3_5_moe" else "model"
        of_layer = f"{base}.layers.{like}."
        return {
            prefix + key.removeprefix(of_layer): random(*tensor.shape)
            for key, tensor in own.items()
            if key.startswith(of_layer)
        }

    if model_type in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"):
        attends = next(
            index
            for index in range(layers)
            if any(f".layers.{index}.self_attn." in key for key in own)
        )
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        return {
            "mtp.fc.weight": random(hidden, 2 * hidden),
            **{f"mtp.{name}.weight": random(hidden) for name in norms},
            **layer("mtp.layers.0.", attends),
        }
    if model_type == "mimo_v2_flash":
        prefix = "model.mtp.layers.0."
        of_layer = {key: t for key, t in layer(prefix, 0).items() if ".mlp." not in key}
        return of_layer | {
            f"{prefix}eh_proj.weight": random(hidden, 2 * hidden),
            f"{prefix}enorm.weight": random(hidden),
            f"{prefix}hnorm.weight": random(hidden),
            f"{prefix}final_layernorm.weight": random(hidden),
            f"{prefix}mlp.gate_proj.weight": random(24, hidden),
            f"{prefix}mlp.up_proj.weight": random(24, hidden),
            f"{prefix}mlp.down_proj.weight": random(hidden, 24),
        }
    prefix = f"model.layers.{layers}."
    tensors = layer(prefix, layers - 1) | {
        f"{prefix}embed_tokens.weight": random(config.vocab_size, hidden),
        f"{prefix}enorm.weight": random(hidden),
        f"{prefix}hnorm.weight": random(hidden),
        f"{prefix}eh_proj.weight": random(hidden, 2 * hidden),
        f"{prefix}shared_head.norm.weight": random(hidden),
        f"{prefix}shared_head.head.weight": random(config.vocab_size, hidden),
    }
    if model_type == "glm4_moe" or not in_fp8:
        return tensors
    quantised = {
        key for key in tensors if ".experts." in key or ("_proj" in key and "eh_" not in key)
    }
    for key in quantised:
        rows, columns = tensors[key].shape
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
        blocks = (-(-rows // _BLOCK), -(-columns // _BLOCK))
        tensors[f"{key}_scale_inv"] = random(*blocks, dtype=torch.float32)
    bias = f"{prefix}mlp.gate.e_score_correction_bias"
    return tensors | {bias: random(*tensors[bias].shape, dtype=torch.float32)}
