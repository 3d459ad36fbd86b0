"""Later versions read the `state.json` of earlier versions, and refuse later formats.

hf_moe_ep 0.1.0 wrote `without_a_format/` after two steps of AdamW on the model below, when the file
had no format number yet. The random numbers and the loss in the test come from that run.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import load_checkpoint, patch
from hf_moe_ep.checkpoints.training import state_file
from hf_moe_ep.checkpoints.training.state_file import (
    Group,
    OptimizerState,
    OptimizerValue,
    StateFile,
)

OLD = Path(__file__).with_name("without_a_format")
SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}


def _make_model() -> nn.Module:
    config = Qwen3MoeConfig(**SIZES, experts_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        return patch(Qwen3MoeForCausalLM(config))


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:5], "weight_decay": 0.1}, {"params": parameters[5:]}]
    return torch.optim.AdamW(groups, lr=0.5)


def test_a_checkpoint_without_a_format_number_is_read() -> None:
    model = _make_model()
    optimizer = _make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=99)
    progress = load_checkpoint(OLD, model, optimizer, scheduler)
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
    assert drawn == [0.8383050560951233, 0.13436424411240122, 0.417022004702574]
    assert progress == {"step": 2, "position": (3, 4), "seen": {5: [0.1, None, "x"]}}
    (file,) = (OLD / "tensors").iterdir()
    saved = load_file(file)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved.pop(f"model.{name}")), name
        state = optimizer.state[parameter]
        assert state["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], saved.pop(f"optimizer.{key}.{name}")), (key, name)
    assert not saved
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert scheduler.T_max == 10 and scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == 0.009045084971874737
    ids = torch.arange(8).reshape(1, 8)
    assert abs(model(input_ids=ids, labels=ids).loss.item() - 2.185211420059204) < 1e-5  # fp32


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    content = json.loads((OLD / "state.json").read_text())
    assert "format" not in content
    written = StateFile.from_json(content).to_json()
    assert written["format"] == state_file.FORMAT == 1
    (tmp_path / "state.json").write_text(json.dumps(written | {"format": 7}))
    with pytest.raises(ValueError, match=r"state.json .* format 7, this version reads 1"):
        state_file.read(tmp_path / "state.json")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ('{"layout": {}', "[]", '{"layout": {}}', "\udcff"):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=r"state.json (is damaged|cannot be read)"):
            state_file.read(path)


def test_a_state_is_read_back_and_its_digest_ignores_the_layout() -> None:
    state = {
        "w": {
            "step": OptimizerValue(value=torch.tensor(3.0), on_device=True),
            "count": OptimizerValue(value=4),
            "exp_avg": OptimizerValue(tensor_name="optimizer.exp_avg.w"),
        }
    }
    groups = [Group(["w"], {"lr": 0.1, "betas": (0.9, 0.999)})]
    saved = StateFile(
        layout={"world_size": 2},
        progress={"seen": {3: "a"}},
        scheduler={"last_epoch": 4},
        tensors={"model.w": state_file.SavedTensor([2, 3], torch.bfloat16)},
        scalars={"scale": torch.tensor(2)},
        optimizer=OptimizerState("My", ["AdamW"], state, groups),
    )
    loaded = StateFile.from_json(json.loads(json.dumps(saved.to_json())))
    assert loaded == saved
    model_only = replace(saved, optimizer=None, scheduler=None)
    assert StateFile.from_json(json.loads(json.dumps(model_only.to_json()))) == model_only
    other_scalars = replace(saved, scalars={"scale": torch.tensor(5)})
    assert state_file.compute_digest(other_scalars.to_json()) != state_file.compute_digest(
        saved.to_json()
    )
    other_layout = replace(saved, progress={}, layout={"world_size": 9})
    assert state_file.compute_digest(other_layout.to_json()) == state_file.compute_digest(
        saved.to_json()
    )
