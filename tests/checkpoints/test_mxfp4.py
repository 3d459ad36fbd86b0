"""Published gpt-oss weights (MXFP4 blocks and scales) are decoded to bf16 as in stock, bitwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.architectures import tiny
from support.close import assert_close
from support.hub_files import assert_equal, read_all
from support.parity import full_tensor
from support.ranks import run_ranks
from transformers import GptOssForCausalLM, Mxfp4Config

from hf_moe_ep import from_pretrained, patch, save_pretrained
from hf_moe_ep.checkpoints.hub.mxfp4 import join_blocks
from hf_moe_ep.checkpoints.hub.pieces import make_whole_piece
from hf_moe_ep.checkpoints.hub.read import build_model_from_config, find_weights
from hf_moe_ep.checkpoints.hub.stored_parameter import StoredParameter
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader, read_index

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def _write_published(folder: Path) -> None:
    """Write a model in the layout of openai/gpt-oss, with random bytes and scales 2^-7 to 2^2."""
    model = tiny("gpt_oss", dtype=torch.bfloat16, **SIZES)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = state.pop(name).shape
        shape = (experts, out, inner // 32)
        state[f"{name}_blocks"] = torch.randint(
            256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        state[f"{name}_scales"] = torch.randint(
            120, 130, shape, dtype=torch.uint8, generator=generator
        )
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*unquantised, "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def _load_stock(folder: Path) -> GptOssForCausalLM:
    return GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )


def test_a_byte_is_two_numbers_with_the_low_bits_first(tmp_path: Path) -> None:
    """0x72 with scale 130 is 8 * 1.0 and 8 * 6.0; 0xF1 with 126 is 0.5 * 0.5 and 0.5 * -6.0."""
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 1], blocks[0, 1, 0, 0] = 0x72, 0xF1
    scales = torch.tensor([130, 126], dtype=torch.uint8).view(1, 2, 1)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    entries = read_index(tmp_path)
    weight = torch.empty(1, 32, 2, dtype=torch.bfloat16)
    with Reader() as reader:
        piece = make_whole_piece("w", (1, 32, 2))
        stored = StoredParameter(
            [(piece, join_blocks(entries, {"w": [piece]})["w"])], torch.bfloat16
        )
        stored.read_into(weight, ((0, 1), (0, 32), (0, 2)), reader)
        part = torch.empty(1, 3, 1, dtype=torch.bfloat16)
        stored.read_into(part, ((0, 1), (1, 4), (0, 1)), reader)
    expected = torch.zeros(32, 2)
    expected[2, 0], expected[3, 0], expected[0, 1], expected[1, 1] = 8.0, 48.0, 0.25, -3.0
    assert torch.equal(weight[0].float(), expected)
    assert part[0, :, 0].tolist() == [0.0, 8.0, 48.0]


def _load_and_save(rank: int, world: int, folder: str) -> None:
    for dim in (0, 1):
        model = from_pretrained(folder, ep_size=2 - dim, expert_shard_dim=dim)
        assert getattr(model.config, "quantization_config", None) is None
        # Master weights are fp32, and stock's tensors are bf16.
        loaded = {name: full_tensor(t).float() for name, t in model.state_dict().items()}
        expected = _load_stock(Path(folder)).state_dict()
        assert_equal(loaded, {name: tensor.float() for name, tensor in expected.items()})
    save_pretrained(model, f"{folder}/saved")
    dist.barrier()


def test_two_ranks_read_the_values_that_stock_decodes(tmp_path: Path) -> None:
    """Each rank reads its experts, or its rows of all experts, and the model is saved in bf16."""
    _write_published(tmp_path)
    run_ranks(_load_and_save, 2, str(tmp_path))
    expected = _load_stock(tmp_path).state_dict()
    assert_equal(read_all(tmp_path / "saved"), dict(expected))
    loaded = GptOssForCausalLM.from_pretrained(tmp_path / "saved")
    assert_equal(loaded.state_dict(), dict(expected))
    ids = torch.arange(7)[None]
    assert_close("logits", loaded(ids).logits, _load_stock(tmp_path)(ids).logits, 0.0)


def test_a_model_that_stock_decoded_is_saved_under_loadable_names(tmp_path: Path) -> None:
    """transformers 5.23 saves decoded weights under names with "_blocks", which it cannot load."""
    _write_published(tmp_path)
    expected = dict(_load_stock(tmp_path).state_dict())
    save_pretrained(patch(_load_stock(tmp_path)), tmp_path / "saved")
    assert_equal(read_all(tmp_path / "saved"), expected)


@pytest.mark.parametrize("damage", ["scales", "shape"])
def test_missing_scales_and_wrong_shapes_are_refused(tmp_path: Path, damage: str) -> None:
    _write_published(tmp_path)
    state: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    if damage == "scales":
        del state[f"{name}_scales"]
        text = rf"missing 1 tensors: {name}_scales, the scales of {name}_blocks"
    else:
        state[f"{name}_blocks"] = state[f"{name}_blocks"][:, :60].contiguous()
        text = rf"{name}_blocks \(8, 60, 3, 16\) .*which needs \(8, 64, 3, 16\)"
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model, plan = build_model_from_config(tmp_path)
    with pytest.raises(ValueError, match=text):
        find_weights(model, tmp_path, plan, [name for name, _ in model.named_parameters()])
