"""Checkpoints of the hub: every rank reads its shards alone, what is saved has the same bytes."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from run_ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_models import tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_moe_ep import checkpoint, from_pretrained, safetensors_file, save_pretrained

MODELS = ("qwen3_moe", "qwen3_vl_moe")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 1": {},
    "ep 2": {"ep_size": 2},
    "ep 4": {"ep_size": 4},
    "ep 1, dim 1": {"expert_shard_dim": 1},
    "ep 2, dim 1": {"ep_size": 2, "expert_shard_dim": 1},
    "ep 2 outside": {"ep_size": 2, "ep_outside": True},
    "ep 2, HSDP": {"ep_size": 2, "dp_replicate_size": 2},
    "ep 2, sp 2": {"ep_size": 2, "sp_size": 2},
}


def hub_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the hub has of a model, written down here by hand for both architectures."""
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
    """A sharded checkpoint as the hub has it; returns its tensors."""
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state = hub_state(model)
    names = [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
    places = {key: names[i % files] for i, key in enumerate(sorted(state))}
    for name in names:
        held = {key: state[key] for key, place in places.items() if place == name}
        save_file(held, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
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


class Counted:
    """os.preadv that counts how often every byte of a file is read."""

    def __init__(self) -> None:
        self.read: dict[str, Tensor] = {}
        self._preadv, self._open = safetensors_file.os.preadv, safetensors_file.os.open
        self._times: dict[int, Tensor] = {}

    def open(self, path: Any, flags: int) -> int:
        descriptor = self._open(path, flags)
        times = torch.zeros(Path(path).stat().st_size, dtype=torch.uint8)
        self._times[descriptor] = self.read[Path(path).name] = times
        return descriptor

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        got = self._preadv(descriptor, buffers, offset)
        self._times[descriptor][offset : offset + got] += 1
        return got


def _round_trip(rank: int, world: int, folder: str, name: str) -> dict[str, Any]:
    reads = {}
    for layout, sizes in LAYOUTS.items():
        counted = Counted()
        with (
            mock.patch.object(safetensors_file.os, "preadv", counted.preadv),
            mock.patch.object(safetensors_file.os, "open", counted.open),
        ):
            model = from_pretrained(f"{folder}/{name}", **sizes)
        reads[layout] = counted.read
        # Norms are gathered whole here, everything else part by part.
        with mock.patch.object(checkpoint, "_SMALL", 1000):
            save_pretrained(model, f"{folder}/{name} {layout}", max_shard_size=20_000)
    return reads


@pytest.mark.parametrize("name", MODELS)
def test_hub_to_shards_to_hub_keeps_every_byte(name: str, tmp_path: Path) -> None:
    for dtype in (torch.float32,):
        want = write_hub(tmp_path / name, tiny(name, dtype=dtype))
        reads = run_ranks(_round_trip, 4, str(tmp_path), name)
        size = sum(tensor.nbytes for tensor in want.values())
        for layout, sizes in LAYOUTS.items():
            folder = tmp_path / f"{name} {layout}"
            assert len(list(folder.glob("*.safetensors"))) > 3
            assert_equal(read_all(folder), want)
            names = set().union(*(rank[layout] for rank in reads))
            times = [sum(r[layout][n] for r in reads if n in r[layout]) for n in names]
            read = torch.cat([t[t > 0] for t in times])
            assert read.unique().tolist() == [sizes.get("dp_replicate_size", 1)], "no byte twice"
            assert len(read) == size, "every byte of every tensor"
            stock = AutoModelForCausalLM if name == "qwen3_moe" else type(tiny(name))
            assert_equal(hub_state(stock.from_pretrained(folder)), want)
