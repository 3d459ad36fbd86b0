"""What `from_pretrained` makes of a folder's config; checkpoints/test_hub.py has the weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hub_files import write_hub
from support.ranks import run_ranks
from support.tiny_models import tiny
from transformers import AutoModelForCausalLM

from hf_moe_ep import from_pretrained
from hf_moe_ep.upstream import hub


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


def _named(rank: int, world: int, folder: str) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hub, "snapshot_download", lambda *_, **__: folder)
        model = from_pretrained("owner/model", dtype="bfloat16")
    assert model.config.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype 'bf16' is none of torch's; take 'bfloat16'"):
        from_pretrained(folder, dtype="bf16")
    with pytest.raises(ValueError, match=r"quantized by gptq, which cannot be trained here; take"):
        from_pretrained(f"{folder}/../gptq")
    return model.name_or_path, model.config.name_or_path


def test_a_name_of_the_hub_a_dtype_by_name_and_a_quantized_checkpoint(tmp_path: Path) -> None:
    """PEFT writes the name into the config of an adapter: a path in one's cache helps nobody."""
    for folder, more in ((tmp_path / "hub", {}), (tmp_path / "gptq", {"quant_method": "gptq"})):
        write_hub(folder, tiny(dtype=torch.float32), files=1)
        config = json.loads((folder / "config.json").read_text())
        config |= {"quantization_config": more} if more else {}
        (folder / "config.json").write_text(json.dumps(config))
    assert run_ranks(_named, 1, str(tmp_path / "hub")) == [("owner/model", "owner/model")]
