"""Write and read checkpoints in the hub's layout.

Only `assert_saved_as_read` calls the code under test.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_moe_ep import hub_tensors, save_pretrained


def hub_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model's checkpoint on the hub, for Qwen3-MoE or Qwen3-VL-MoE."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        head, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not head.endswith("experts"):
            state[name] = tensor
        elif model.config.model_type == "qwen3_vl_moe":
            state[name] = tensor.transpose(1, 2).contiguous()
        elif last == "down_proj":
            for expert in range(len(tensor)):
                state[f"{head}.{expert}.down_proj.weight"] = tensor[expert].clone()
        else:
            half = tensor.shape[1] // 2
            for expert in range(len(tensor)):
                state[f"{head}.{expert}.gate_proj.weight"] = tensor[expert, :half].clone()
                state[f"{head}.{expert}.up_proj.weight"] = tensor[expert, half:].clone()
    return state


def write_hub(folder: Path, model: PreTrainedModel, files: int = 3) -> dict[str, Tensor]:
    """Write a checkpoint of several files in the hub's layout, and return its tensors."""
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state = hub_state(model)
    names = [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
    file_of_key = {key: names[i % files] for i, key in enumerate(sorted(state))}
    for name in names:
        tensors = {key: state[key] for key, file in file_of_key.items() if file == name}
        save_file(tensors, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": file_of_key}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


def read_all(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    state: dict[str, Tensor] = {}
    for name in set(index.values()):
        state |= load_file(folder / name)
    assert state.keys() == index.keys()
    return state


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key


def assert_saved_as_read(model: PreTrainedModel, read: Path, saved: Path) -> None:
    """Save a sharded model, and compare its files and `hub_tensors` with those that were read.

    Every rank calls this.
    """
    save_pretrained(model, saved, max_shard_size="90KB")
    iterated = dict(hub_tensors(model, max_bytes=20_000))
    dist.barrier()
    written: dict[str, Tensor] = {}
    for file in read.glob("*.safetensors"):
        written |= load_file(file)
    assert_equal(read_all(saved), written)
    assert_equal(iterated, written)
