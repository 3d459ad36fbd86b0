"""Test `hf-moe-ep convert`, `verify` and `inspect` on checkpoints that several ranks wrote."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.adapters import with_lora
from support.alive import alive_at_writes
from support.architectures import MODEL_TYPES
from support.architectures import tiny as tiny_of_type
from support.hub_files import assert_equal, hub_state, read_all, write_hub
from support.launched import launched, prepared
from support.needs import ARCHITECTURES
from support.ranks import run_ranks
from support.tiny_models import tiny
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

from hf_moe_ep import apply_ep_fsdp2, hub_tensors, patch, save_checkpoint, save_pretrained
from hf_moe_ep.checkpoints.convert import convert
from hf_moe_ep.checkpoints.hub.write import _HubWriter
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, Writer
from hf_moe_ep.checkpoints.verify import verify
from hf_moe_ep.cli import main as cli


def _build_shifted_model(name: str) -> nn.Module:
    """Build a model whose values differ from the values in the folder that --config names."""
    model = tiny(name, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    return model


def _save_checkpoints(rank: int, world: int, folder: str) -> None:
    """Save both architectures by save_checkpoint and by Accelerate, a bf16 model, and adapters."""
    for name in ARCHITECTURES:
        model = apply_ep_fsdp2(_build_shifted_model(name), ep_size=2)
        save_checkpoint(f"{folder}/ours {name}", model, torch.optim.AdamW(model.parameters()))
        with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
            accelerator, _, _ = prepared(_build_shifted_model(name), ep_size=2, expert_shard_dim=1)
            accelerator.save_state(f"{folder}/accelerate {name}")
    in_bf16 = apply_ep_fsdp2(_build_shifted_model("qwen3_moe").bfloat16(), ep_size=world)
    save_checkpoint(f"{folder}/bf16", in_bf16, torch.optim.AdamW(in_bf16.parameters()))
    adapted = apply_ep_fsdp2(with_lora(_build_shifted_model("qwen3_moe")), ep_size=2)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    save_checkpoint(f"{folder}/adapters", adapted, torch.optim.AdamW(trained))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_save_checkpoints, 4, str(folder))
    for name in ARCHITECTURES:
        write_hub(folder / f"base {name}", tiny(name, dtype=torch.float32))
    return folder


def _run_command(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["ours", "accelerate"])
def test_a_training_checkpoint_becomes_a_model(
    kind: str, name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", saved / f"base {name}"] if kind == "accelerate" else []
    (saved / f"base {name}" / "tokenizer.json").write_text("{}")
    out = tmp_path / "model"
    assert (
        _run_command("convert", saved / f"{kind} {name}", out, "--max-shard-size", "50KB", *config)
        == 0
    )
    model = _build_shifted_model(name)
    tensors = hub_state(model)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert f"{size:,} bytes" in capsys.readouterr().out
    assert_equal(read_all(out), tensors)
    assert len(list(out.glob("*.safetensors"))) > 3
    assert (out / "tokenizer.json").is_file() == bool(config)
    assert_equal(hub_state(type(model).from_pretrained(out)), tensors)
    assert _run_command("verify", out) == 0
    assert f"{len(tensors)}, files as long" in capsys.readouterr().out


def test_master_weights_are_saved_in_the_dtype_of_the_option(saved: Path, tmp_path: Path) -> None:
    tensors = hub_state(_build_shifted_model("qwen3_moe").bfloat16())
    assert _run_command("convert", saved / "bf16", tmp_path / "bf16", "--dtype", "bfloat16") == 0
    assert_equal(read_all(tmp_path / "bf16"), tensors)
    assert _run_command("convert", saved / "bf16", tmp_path / "masters", "--dtype", "float32") == 0
    assert_equal(
        read_all(tmp_path / "masters"), {key: tensor.float() for key, tensor in tensors.items()}
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "masters")
    assert loaded.dtype == torch.float32


def test_biases_stay_in_fp32(tmp_path: Path) -> None:
    """from_pretrained keeps correction biases of a bf16 model in fp32; so does save_pretrained."""
    model = tiny_of_type("glm4_moe", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    model = patch(type(model).from_pretrained(tmp_path / "base", dtype=torch.bfloat16))
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for bias in biases:
        assert bias.dtype == torch.float32
        bias += 0.25 + 1e-4 * torch.arange(len(bias))
    save_checkpoint(tmp_path / "step-1", model, None)
    convert(tmp_path / "step-1", tmp_path / "converted")
    save_pretrained(model, tmp_path / "saved")
    assert_equal(read_all(tmp_path / "converted"), read_all(tmp_path / "saved"))
    assert biases and torch.float32 in {x.dtype for x in read_all(tmp_path / "converted").values()}


@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float32])
def test_another_dtype_rounds_no_tensor_that_stock_keeps_in_fp32(
    loaded: torch.dtype, tmp_path: Path
) -> None:
    """Stock's from_pretrained(dtype=bfloat16) keeps DeepSeek-V3's correction biases in fp32."""
    tiny_of_type("deepseek_v3", dtype=torch.float32).save_pretrained(tmp_path / "base")
    auto = AutoModelForCausalLM
    model = patch(auto.from_pretrained(tmp_path / "base", dtype=loaded))
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias += 5 + 1e-3 * torch.arange(len(bias))
    stock_state = auto.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).state_dict()
    kept = {key for key, tensor in stock_state.items() if tensor.dtype == torch.float32}
    model_state = model.state_dict()
    assert any("e_score_correction_bias" in key for key in kept), "no bias is kept in fp32"
    save_checkpoint(tmp_path / "step-1", model, None)
    convert(tmp_path / "step-1", tmp_path / "converted", dtype=torch.bfloat16)
    save_pretrained(model, tmp_path / "saved", dtype=torch.bfloat16)
    yielded = dict(hub_tensors(model, dtype=torch.bfloat16))
    for tensors in (read_all(tmp_path / "converted"), read_all(tmp_path / "saved"), yielded):
        assert {key for key, tensor in tensors.items() if tensor.dtype == torch.float32} == kept
        assert all(torch.equal(tensors[key], model_state[key]) for key in kept)


@pytest.mark.skipif("diffusion_gemma" not in MODEL_TYPES, reason="needs transformers 5.23")
def test_two_towers_that_share_their_layers_are_converted(tmp_path: Path) -> None:
    """A training checkpoint has the encoder's names, and transformers saves the decoder's names."""
    model = patch(tiny_of_type("diffusion_gemma", dtype=torch.float32))
    save_checkpoint(tmp_path / "step-1", model, None)
    convert(tmp_path / "step-1", tmp_path / "converted")
    save_pretrained(model, tmp_path / "saved")
    assert_equal(read_all(tmp_path / "converted"), read_all(tmp_path / "saved"))


def test_a_config_of_fewer_layers_is_refused(saved: Path, tmp_path: Path) -> None:
    """Accelerate's save_state writes no config, and a config that the user names may be wrong.

    A config with fewer layers must not drop trained layers.
    """
    small = tiny(dtype=torch.float32, num_hidden_layers=1)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"unexpected 11 tensors: model\.layers\.1\."):
        convert(saved / "accelerate qwen3_moe", tmp_path / "out", config=tmp_path / "small")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_one_tensor_is_in_memory_at_a_time(saved: Path, tmp_path: Path) -> None:
    with alive_at_writes() as alive:
        convert(saved / "ours qwen3_moe", tmp_path / "model")
    largest = max(p.nbytes for p in tiny(dtype=torch.float32).parameters())
    assert max(alive) < 0.25 * largest, "more than the tensor that is written"


def test_folders_that_cannot_be_converted_are_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = saved / "ours qwen3_moe"
    cases = {
        "exists and is not empty": (ours, saved),
        "not a training checkpoint: it has neither": (saved / "base qwen3_moe", tmp_path / "a"),
        "has no config.json; name the model's folder with --config": (
            saved / "accelerate qwen3_moe",
            tmp_path / "a",
        ),
        "holds adapters": (saved / "adapters", tmp_path / "a"),
        "does not fit Qwen3VLMoeForConditionalGeneration: missing": (
            ours, tmp_path / "a", "--config", saved / "base qwen3_vl_moe",
        ),
    }  # fmt: skip
    for words, arguments in cases.items():
        assert _run_command("convert", *arguments) == 2, words
        assert words in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def _save_training_checkpoint(folder: Path) -> Path:
    """Save a complete training checkpoint from one process."""
    model = patch(tiny(dtype=torch.float32))
    save_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))
    return folder


def test_a_damaged_checkpoint_is_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub folder gets new hashes, so a later `verify` would not find the flipped bit."""
    source, out = _save_training_checkpoint(tmp_path / "training"), tmp_path / "model"
    part_file = next((source / "tensors").iterdir())
    _flip_bit(part_file)
    assert _run_command("convert", source, out) == 2
    assert f"{part_file} has changed since it was written: sha256" in capsys.readouterr().err
    _flip_bit(part_file)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace("1e-06", "1e-05"))
    with pytest.raises(ValueError, match=r"config.json has changed since it was written: sha256"):
        convert(source, out)
    assert os.listdir(tmp_path) == ["training"]
    (source / "config.json").write_text(config)
    _flip_bit(part_file)
    assert convert(source, out, check_hashes=False) > 0


def test_a_failed_conversion_leaves_no_files_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = _save_training_checkpoint(tmp_path / "training"), tmp_path / "model"

    def raise_no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(Writer, "write", raise_no_space)
        with pytest.raises(OSError, match="No space left"):
            convert(source, out)
    assert os.listdir(tmp_path) == ["training"]
    with monkeypatch.context() as patches:
        patches.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(ValueError, match=r"needs [\d,]+ bytes, but .* has room for 1,000"):
            convert(source, out)
    convert(source, out)
    assert_equal(read_all(out), hub_state(tiny(dtype=torch.float32)))


def test_a_killed_conversion_leaves_no_model(tmp_path: Path) -> None:
    source, out = _save_training_checkpoint(tmp_path / "training"), tmp_path / "model"
    if (child := os.fork()) == 0:
        _HubWriter.commit = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        convert(source, out)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not out.exists()
    convert(source, out)
    assert_equal(read_all(out), hub_state(tiny(dtype=torch.float32)))


def test_tensors_without_dims_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_checkpoint` stores 0-dim tensors, such as a norm's number of batches, as JSON."""
    build = Qwen3MoeModel.__init__

    def build_with_number(self: nn.Module, config: Any) -> None:
        build(self, config)
        self.register_buffer("num_batches", torch.tensor(0))

    monkeypatch.setattr(Qwen3MoeModel, "__init__", build_with_number)
    model = patch(tiny(dtype=torch.float32))
    model.model.num_batches += 3
    source = tmp_path / "training"
    save_checkpoint(source, model, torch.optim.AdamW(model.parameters()))
    convert(source, tmp_path / "model")
    assert read_all(tmp_path / "model")["model.num_batches"] == 3


def test_a_target_inside_the_source_is_refused(tmp_path: Path) -> None:
    source = _save_training_checkpoint(tmp_path / "training")
    (tmp_path / "link").symlink_to(source)
    for out in (source / "model", tmp_path / "link" / "deep" / "model"):
        with pytest.raises(ValueError, match=f"target {out} lies in {source}"):
            convert(source, out)
    assert verify(source).summary == "complete"


def test_pickles_are_not_copied(tmp_path: Path) -> None:
    source, out = _save_training_checkpoint(tmp_path / "training"), tmp_path / "model"
    for name in ("random_states_0.pkl", "custom_checkpoint_0.pkl", "chat_template.jinja"):
        (source / name).write_text("a")
    convert(source, out)
    assert (out / "chat_template.jinja").is_file()
    assert not list(out.rglob("*.pkl"))


def test_verify_finds_every_damage(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, training = tmp_path / "model", tmp_path / "training"
    unsharded = tiny(dtype=torch.float32)
    save_pretrained(patch(unsharded), model)
    save_checkpoint(training, unsharded, torch.optim.AdamW(unsharded.parameters()))
    for folder in (model, training):
        assert _run_command("verify", folder) == 0
    progress = capsys.readouterr().err
    for folder in (model, training):
        assert f"reading {folder}: 100%" in progress
    assert _run_command("inspect", training) == 0
    output = capsys.readouterr().out
    assert "training checkpoint" in output and "ep_size" in output and "torch" in output
    assert _run_command("inspect", model) == 0
    assert "torch.float32" in capsys.readouterr().out
    shard = next(model.glob("*.safetensors"))
    _flip_bit(shard)
    assert _run_command("verify", model) == 2
    assert f"{shard} has changed since it was written" in capsys.readouterr().err
    _flip_bit(shard)
    assert _run_command("verify", model) == 0
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 12}))
    assert _run_command("verify", model) == 2
    assert "misshapen 48 tensors" in capsys.readouterr().err
    part_file = next((training / "tensors").iterdir())
    _flip_bit(part_file)
    assert _run_command("verify", training) == 2
    assert f"{part_file} has changed" in capsys.readouterr().err
    assert _run_command("verify", tmp_path) == 2
    assert "holds no safetensors checkpoint" in capsys.readouterr().err


def test_verify_ignores_an_index_that_loaders_ignore(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stock has saved into our folder. It removed our shards, but our old index is still there."""
    model = tiny(dtype=torch.float32)
    save_pretrained(patch(model), tmp_path)
    tiny(dtype=torch.float32, seed=1).save_pretrained(tmp_path)
    assert (tmp_path / INDEX).is_file()
    assert _run_command("verify", tmp_path) == 0
    assert "none are known" in capsys.readouterr().out


def test_damaged_headers_and_indexes_are_named(tmp_path: Path) -> None:
    """The safetensors library refuses the same files."""
    good = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    headers: dict[str, Any] = {
        "overlap": {"a": good, "b": good | {"shape": [8], "data_offsets": [0, 32]}},
        "bytes of the header": {
            "a": good | {"data_offsets": [-8, 8]},
            "b": good | {"shape": [6], "data_offsets": [8, 32]},
        },
        "hole": {"a": good | {"data_offsets": [16, 32]}},
        "negative shape": {"a": good | {"shape": [-2, -4], "data_offsets": [0, 32]}},
        "words": {"a": good | {"shape": ["8"], "data_offsets": [0, 32]}},
        "no offsets": {"a": {"dtype": "F32", "shape": [8]}},
        "no tensor": {"a": "b"},
        "list": [good],
    }
    for header in headers.values():
        text = json.dumps(header).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
        with pytest.raises(ValueError, match=r"model.safetensors has a damaged header"):
            verify(tmp_path)
        with pytest.raises(SafetensorError):
            load_file(path)
    path.unlink()
    for text in ('{"weight_map": {"a', "{}", "[]", '{"weight_map": []}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match=rf"{INDEX} is not an index, or is damaged"):
            verify(tmp_path)
