"""Published FP8 weights (one scale per block of values) are decoded as in stock, bit by bit."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from support.checks import Check, Found, on_ranks
from support.fp8_files import published_config, quantised, stock_product, write_fp8
from support.hub_files import assert_equal, read_all
from support.parity import full_tensor
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from hf_moe_ep import apply_ep_fsdp2, from_pretrained, patch, save_pretrained
from hf_moe_ep.checkpoints.hub.fp8 import Fp8Tensor, join_scales
from hf_moe_ep.checkpoints.hub.read import build_model_from_config, find_weights
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader, read_index
from hf_moe_ep.checkpoints.verify import verify
from hf_moe_ep.ranks.boxes import Box
from hf_moe_ep.upstream.hub import build_empty_model

# These blocks divide SIZES. If they do not divide the columns, stock assumes smaller blocks.
BLOCK = (32, 32)
SIZES = {"hidden_size": 64, "moe_intermediate_size": 96}
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def _write_and_join(
    folder: Path, tensor: Tensor, block: tuple[int, int]
) -> tuple[Fp8Tensor, Tensor]:
    """Write a weight as FP8. Return its `Fp8Tensor`, and the fp32 values that stock decodes."""
    state = quantised("w", tensor, block)
    save_file(state, folder / "model.safetensors")
    config = {"quantization_config": published_config(block)}
    (folder / "config.json").write_text(json.dumps(config))
    entry = join_scales(read_index(folder), folder)["w"]
    values, scales = state.values()
    expected = stock_product(values, scales, block)
    assert isinstance(entry, Fp8Tensor)
    return entry, expected


def _decode(
    entry: Fp8Tensor, box: Box, view: tuple[int, ...], dtype: torch.dtype, reader: Reader
) -> Tensor:
    out = torch.empty([stop - start for start, stop in box], dtype=dtype)
    entry.read_into(out, box, view=view, dtype=dtype, reader=reader)
    return out


def test_a_value_is_a_byte_times_the_scale_of_its_block(tmp_path: Path) -> None:
    """A [192, 300] matrix has 2 x 3 scales. Row 130 is in the second row of blocks."""
    values, scales = torch.zeros(192, 300, dtype=torch.uint8), torch.ones(2, 3)
    values[130, 5], values[127, 256], scales[1, 0], scales[0, 2] = 0x38, 0xC0, 0.25, 8.0
    state = {"w": values.view(torch.float8_e4m3fn), "w_scale_inv": scales}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": published_config()}))
    entry = join_scales(read_index(tmp_path), tmp_path)["w"]
    assert isinstance(entry, Fp8Tensor)
    with Reader() as reader:
        whole = _decode(entry, ((0, 192), (0, 300)), (192, 300), torch.bfloat16, reader)
        part = _decode(entry, ((125, 131), (5, 257)), (192, 300), torch.bfloat16, reader)
    expected = torch.zeros(192, 300, dtype=torch.bfloat16)
    expected[130, 5], expected[127, 256] = 0.25, -16.0
    assert torch.equal(whole, expected) and torch.equal(part, expected[125:131, 5:257])


def test_every_box_of_every_view_equals_the_whole_tensor(tmp_path: Path) -> None:
    """A [3, 10, 7] stack with blocks of 4 x 3 is read by boxes of three views of its shape."""
    torch.manual_seed(0)
    entry, whole = _write_and_join(tmp_path, torch.randn(3, 10, 7), (4, 3))
    boxes = [[(0, size), (1, size), (size // 2, size // 2 + 1)] for size in (3, 10, 7)]
    with Reader() as reader:

        def decode(box: Box, view: tuple[int, ...]) -> Tensor:
            return _decode(entry, box, view, torch.float32, reader)

        for values in (1 << 22, 1):
            with mock.patch("hf_moe_ep.checkpoints.hub.fp8._VALUES_PER_STEP", values):
                for box in product(*boxes):
                    part = whole[tuple(slice(*dim) for dim in box)]
                    assert torch.equal(decode(box, (3, 10, 7)), part)
                pairs = decode(((1, 3), (1, 4), (1, 2), (2, 6)), (3, 5, 2, 7))
                assert torch.equal(pairs, whole.view(3, 5, 2, 7)[1:, 1:4, 1:2, 2:6])
                rows = decode(((8, 23), (0, 7)), (30, 7))
                assert torch.equal(rows, whole.view(30, 7)[8:23])
        with pytest.raises(ValueError, match=r"cannot decode \(3, 10, 7\) in the view"):
            decode(((0, 3), (0, 70)), (3, 70))


@pytest.mark.parametrize("kind", ["E8M0", "bytes", "bf16"])
def test_scales_may_have_any_of_three_dtypes(tmp_path: Path, kind: str) -> None:
    """Scales may be float8_e8m0fnu or its bytes, as in MXFP8, or bf16."""
    entry, _ = _write_and_join(tmp_path, torch.randn(8, 8), (4, 4))
    state = load_file(tmp_path / "model.safetensors")
    scales = torch.tensor([[0.5, 1.0], [8.0, 2.0**-20]])
    stored = {
        "E8M0": scales.to(torch.float8_e8m0fnu),
        "bytes": scales.to(torch.float8_e8m0fnu).view(torch.uint8),
        "bf16": scales.to(torch.bfloat16),
    }
    save_file(state | {"w_scale_inv": stored[kind]}, tmp_path / "model.safetensors")
    entry = join_scales(read_index(tmp_path), tmp_path)["w"]
    assert isinstance(entry, Fp8Tensor)
    with Reader() as reader:
        decoded = _decode(entry, ((0, 8), (0, 8)), (8, 8), torch.float32, reader)
    expected = state["w"].float() * scales.repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.equal(decoded, expected)


def test_a_large_box_is_decoded_in_parts(tmp_path: Path) -> None:
    entry, expected = _write_and_join(tmp_path, torch.randn(64, 8, 8), (4, 4))
    box = ((0, 64), (0, 8), (0, 8))
    with (
        Reader() as reader,
        mock.patch.object(reader, "read", wraps=reader.read) as read,
        mock.patch("hf_moe_ep.checkpoints.hub.fp8._VALUES_PER_STEP", 256),
    ):
        decoded = _decode(entry, box, (64, 8, 8), torch.float32, reader)
    assert torch.equal(decoded, expected)
    (scales, _), *values = [call.args[:2] for call in read.call_args_list]
    assert scales == entry.scales
    assert [part[0] for _, part in values] == [(i, i + 4) for i in range(0, 64, 4)]


def _load_stock(folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    config = FineGrainedFP8Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def _decode_like_stock(state: dict[str, Tensor], key: str) -> Tensor:
    """Decode like stock's FP8Linear, where blocks at an edge may be smaller, and round to bf16."""
    scales = state[f"{key}_scale_inv"]
    product = stock_product(state[key], scales, BLOCK)
    return product.bfloat16().float()


def _gather_fp32(model: Any) -> dict[str, Tensor]:
    """Gather all tensors in fp32, because master weights are fp32 and stock's tensors are bf16."""
    return {name: full_tensor(tensor).float() for name, tensor in model.state_dict().items()}


def _write_published(folder: str, name: str = "qwen3_moe", **sizes: Any) -> None:
    if dist.get_rank() == 0:
        write_fp8(Path(folder), tiny(name, dtype=torch.bfloat16, **sizes), BLOCK)
    dist.barrier()


def _load_equal_to_stock(folder: str, **sizes: int) -> Any:
    model = from_pretrained(folder, **sizes)  # type: ignore[arg-type]
    assert getattr(model.config, "quantization_config", None) is None
    assert_equal(_gather_fp32(model), _gather_fp32(_load_stock(folder)))
    return model


def _experts_or_rows_are_sharded(rank: int, world: int, folder: str) -> None:
    """Each of 2 ranks has 96 or 32 rows of experts, whole blocks, and cut blocks of attention."""
    _write_published(folder, **SIZES)
    for dim in (0, 1):
        _load_equal_to_stock(folder, ep_size=2 - dim, expert_shard_dim=dim)


def _blocks_are_cut_by_four_ranks(rank: int, world: int, folder: str) -> None:
    """Each of 4 ranks has 48 or 16 rows of experts: a block and a half, or half a block."""
    _write_published(folder, **SIZES)
    for sizes in ({"ep_size": 2, "expert_shard_dim": 1}, {"expert_shard_dim": 1}, {"ep_size": 4}):
        _load_equal_to_stock(folder, **sizes)


def _decoded_weights_are_saved_in_bf16(rank: int, world: int, folder: str) -> None:
    _write_published(folder, **SIZES)
    save_pretrained(_load_equal_to_stock(folder, ep_size=world), f"{folder}/saved")
    dist.barrier()
    config = json.loads(Path(folder, "saved", "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    state = read_all(Path(folder, "saved"))
    assert not [key for key in state if "scale" in key] and state[DOWN].dtype == torch.bfloat16
    reloaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    assert_equal(_gather_fp32(reloaded), _gather_fp32(_load_stock(folder)))


def _loss_and_gradients_equal_stock(rank: int, world: int, folder: str) -> None:
    """Loss and gradients equal those of a model that stock decoded before it was sharded."""
    _write_published(folder, **SIZES)
    loaded = from_pretrained(folder, ep_size=2).train()
    config = AutoConfig.from_pretrained(folder)
    assert config.quantization_config["quant_method"] == "fp8"
    with init_empty_weights(include_buffers=False):
        meta_loaded = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    meta_loaded = apply_ep_fsdp2(meta_loaded, weights=folder, ep_size=2).train()
    stock = apply_ep_fsdp2(_load_stock(folder), ep_size=2).train()
    inputs, results = batch(stock, 2, 9, seed=rank), []
    for model in (stock, loaded, meta_loaded):
        assert getattr(model.config, "quantization_config", None) is None
        loss = model(**inputs).loss
        loss.backward()
        grads = {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach()} | grads)
    for other in results[1:]:
        assert_equal(other, results[0])
    assert len(results[0]) > 20


def _blocks_need_not_divide_the_sizes(rank: int, world: int, folder: str) -> None:
    """Stock refuses such sizes (DeepSeek-V3 has 576 rows in a matrix), or assumes other blocks."""
    _write_published(folder, hidden_size=72, moe_intermediate_size=40)
    state, experts = load_file(f"{folder}/model.safetensors"), "model.layers.1.mlp.experts"
    for dim in (0, 1):
        loaded = _gather_fp32(from_pretrained(folder, ep_size=2 - dim, expert_shard_dim=dim))
        for expert in range(8):
            gate, up, down = (
                _decode_like_stock(state, f"{experts}.{expert}.{part}_proj.weight")
                for part in ("gate", "up", "down")
            )
            assert torch.equal(loaded[f"{experts}.gate_up_proj"][expert], torch.cat((gate, up)))
            assert torch.equal(loaded[f"{experts}.down_proj"][expert], down)
        query = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(loaded[query], _decode_like_stock(state, query))


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, _experts_or_rows_are_sharded, slow=True),
        *on_ranks(1, {"saved_in_bf16, one rank": _decoded_weights_are_saved_in_bf16}, slow=True),
        *on_ranks(
            2,
            _decoded_weights_are_saved_in_bf16,
            _loss_and_gradients_equal_stock,
            _blocks_need_not_divide_the_sizes,
            slow=True,
        ),
        *on_ranks(4, _blocks_are_cut_by_four_ranks, slow=True),
    ],
)
def test_ranks_read_the_values_that_stock_decodes(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _remove_scales(state: dict[str, Tensor], folder: Path) -> None:
    del state[f"{DOWN}_scale_inv"]


def _cut_scales(state: dict[str, Tensor], folder: Path) -> None:
    state[f"{DOWN}_scale_inv"] = state[f"{DOWN}_scale_inv"][:1].contiguous()


def _decode_values(state: dict[str, Tensor], folder: Path) -> None:
    state[DOWN] = state[DOWN].bfloat16()


def _remove_block_size(state: dict[str, Tensor], folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = None
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove_scales, rf"missing 1 tensors: {DOWN}_scale_inv, but {DOWN} is stored in torch.f"),
        (
            _cut_scales,
            rf"{DOWN}_scale_inv \(1, 3\) does not fit {DOWN} \(64, 96\), whose blocks of 32 x "
            r"32 have scales \(2, 3\)",
        ),
        (_decode_values, rf"unexpected 1 tensors: {DOWN}_scale_inv"),
        (
            _remove_block_size,
            r"weight_block_size None\); published FP8 checkpoints have \[128, 128\]; for",
        ),
    ],
)
def test_an_incomplete_checkpoint_is_refused(
    tmp_path: Path, damage: Callable[[dict[str, Tensor], Path], None], words: str
) -> None:
    write_fp8(tmp_path, tiny(dtype=torch.bfloat16, **SIZES), BLOCK)
    assert verify(tmp_path).facts["shapes"] == "those of Qwen3MoeForCausalLM"
    state = load_file(tmp_path / "model.safetensors")
    damage(state, tmp_path)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model, plan = build_model_from_config(tmp_path)
    with pytest.raises(ValueError, match=words):
        find_weights(model, tmp_path, plan, [name for name, _ in model.named_parameters()])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        (published_config() | {"expert_dtype": "fp4"}, "fp8 with experts of fp4"),
        ({"bits": 4}, "an unknown method"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    tiny().config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    words = f"quantized by {kind}, which cannot be trained here; use a bf16 checkpoint of this "
    with pytest.raises(ValueError, match=words + "model, or one quantized by mxfp4 or fp8, whose"):
        build_empty_model(tmp_path, None, torch.get_default_dtype, {})


@pytest.mark.slow
def test_a_model_that_stock_decoded_is_saved_in_bf16(tmp_path: Path) -> None:
    """Stock's own save would write FP8 and stacked experts."""
    write_fp8(tmp_path, tiny(dtype=torch.bfloat16, **SIZES), BLOCK)
    stock = _load_stock(tmp_path)
    decoded = dict(stock.state_dict())
    save_pretrained(patch(stock), tmp_path / "saved")
    assert DOWN in read_all(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_equal(dict(loaded.state_dict()), decoded)


@pytest.mark.slow
@pytest.mark.parametrize("original_format", [True, False])
def test_files_that_transformers_quantised_are_read(tmp_path: Path, original_format: bool) -> None:
    """transformers stacks the scales of experts. Its quantiser asks for a GPU, but needs none."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    tiny(dtype=torch.bfloat16, **sizes).save_pretrained(tmp_path / "bf16")
    config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        stock = AutoModelForCausalLM.from_pretrained(
            tmp_path / "bf16", quantization_config=config, dtype=torch.bfloat16
        )
    stock.save_pretrained(tmp_path / "fp8", save_original_format=original_format)
    expected = dict(stock.state_dict())
    scales = [name for name in expected if name.endswith("_scale_inv")]
    assert f"{DOWN}_scale_inv" not in load_file(tmp_path / "fp8" / "model.safetensors")
    assert len(scales) == 2 * (4 + 2)
    for name in scales:
        values = expected[name.removesuffix("_scale_inv")]
        product = stock_product(values, expected.pop(name), (128, 128))
        expected[name.removesuffix("_scale_inv")] = product.bfloat16()
    (loaded,) = run_ranks(_load_in_fp32, 1, str(tmp_path / "fp8"))
    assert_equal(loaded, {name: tensor.float() for name, tensor in expected.items()})


def _load_in_fp32(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    return _gather_fp32(from_pretrained(folder))
