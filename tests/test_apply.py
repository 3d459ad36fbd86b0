"""What `from_pretrained` makes of a folder; `test_hub_files.py` has the weights."""

import json
from pathlib import Path

import torch
from run_ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_hub_files import write_hub
from tiny_models import tiny
from transformers import AutoModelForCausalLM

from hf_moe_ep import from_pretrained


def _mixed(rank: int, world: int, folder: str) -> torch.dtype:
    return from_pretrained(folder).config.dtype


def test_a_checkpoint_of_two_dtypes_whose_config_names_none(tmp_path: Path) -> None:
    """As stock: the library puts the few fp32 tensors in front, the model is no fp32 model."""
    folder = tmp_path / "hub"
    write_hub(folder, tiny(dtype=torch.bfloat16), files=1)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        routers = {k: t.float() for k, t in tensors.items() if k.endswith("mlp.gate.weight")}
        save_file(tensors | routers, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert run_ranks(_mixed, 1, str(folder)) == [torch.bfloat16]
