"""gpt-oss as it is published, MXFP4 blocks and scales, read as bf16: equal to stock to the bit."""

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
from hf_moe_ep.checkpoints.hub.in_files import InFiles
from hf_moe_ep.checkpoints.hub.mxfp4 import join_blocks
from hf_moe_ep.checkpoints.hub.pieces import whole_piece
from hf_moe_ep.checkpoints.hub.read import described_model, find_weights
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader, read_index

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def _published(folder: Path) -> None:
    """A folder in the layout of openai/gpt-oss: random bytes, scales from 2^-7 to 2^2."""
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
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*left, "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def _stock(folder: Path) -> GptOssForCausalLM:
    return GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )


def test_a_byte_is_two_numbers_the_low_one_first(tmp_path: Path) -> None:
    """0x72 with scale 130 is 1.0 and 6.0 times 8. 0xF1 with scale 126 is 0.5 and -6.0, halved."""
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 1], blocks[0, 1, 0, 0] = 0x72, 0xF1
    scales = torch.tensor([130, 126], dtype=torch.uint8).view(1, 2, 1)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    entries = read_index(tmp_path)
    weight = torch.empty(1, 32, 2, dtype=torch.bfloat16)
    with Reader() as reader:
        piece = whole_piece("w", (1, 32, 2))
        stored = InFiles([(piece, join_blocks(entries, {"w": [piece]})["w"])], torch.bfloat16)
        stored.read_into(weight, ((0, 1), (0, 32), (0, 2)), reader)
        part = torch.empty(1, 3, 1, dtype=torch.bfloat16)
        stored.read_into(part, ((0, 1), (1, 4), (0, 1)), reader)
    want = torch.zeros(32, 2)
    want[2, 0], want[3, 0], want[0, 1], want[1, 1] = 8.0, 48.0, 0.25, -3.0
    assert torch.equal(weight[0].float(), want)
    assert part[0, :, 0].tolist() == [0.0, 8.0, 48.0]


def _on_two_ranks(rank: int, world: int, folder: str) -> None:
    for dim in (0, 1):
        model = from_pretrained(folder, ep_size=2 - dim, expert_shard_dim=dim)
        assert getattr(model.config, "quantization_config", None) is None
        # Masters are fp32, of values that are bf16.
        held = {name: full_tensor(t).float() for name, t in model.state_dict().items()}
        want = _stock(Path(folder)).state_dict()
        assert_equal(held, {name: tensor.float() for name, tensor in want.items()})
    save_pretrained(model, f"{folder}/saved")
    dist.barrier()


def test_two_ranks_read_what_stock_decodes(tmp_path: Path) -> None:
    """Each rank reads its experts or rows, equal to the bit, and saves them as bf16."""
    _published(tmp_path)
    run_ranks(_on_two_ranks, 2, str(tmp_path))
    want = _stock(tmp_path).state_dict()
    assert_equal(read_all(tmp_path / "saved"), dict(want))
    loaded = GptOssForCausalLM.from_pretrained(tmp_path / "saved")
    assert_equal(loaded.state_dict(), dict(want))
    ids = torch.arange(7)[None]
    assert_close("logits", loaded(ids).logits, _stock(tmp_path)(ids).logits, 0.0)


def test_what_stock_decoded_is_saved_under_names_that_stock_reads(tmp_path: Path) -> None:
    """Stock 5.23 writes decoded weights under names with "_blocks", which nothing reads."""
    _published(tmp_path)
    want = dict(_stock(tmp_path).state_dict())
    save_pretrained(patch(_stock(tmp_path)), tmp_path / "saved")
    assert_equal(read_all(tmp_path / "saved"), want)


@pytest.mark.parametrize("what", ["scales", "shape"])
def test_blocks_that_make_up_no_weight(tmp_path: Path, what: str) -> None:
    _published(tmp_path)
    state: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    if what == "scales":
        del state[f"{name}_scales"]
        text = rf"missing 1 tensors: {name}_scales, the scales of {name}_blocks"
    else:
        state[f"{name}_blocks"] = state[f"{name}_blocks"][:, :60].contiguous()
        text = rf"{name}_blocks \(8, 60, 3, 16\) .*which needs \(8, 64, 3, 16\)"
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model, plan = described_model(tmp_path)
    with pytest.raises(ValueError, match=text):
        find_weights(model, tmp_path, plan, [name for name, _ in model.named_parameters()])
