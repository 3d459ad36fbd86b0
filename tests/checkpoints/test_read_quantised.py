"""Quantising experts while they are read gives the same bits as quantising after loading."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.adapters import EXPERTS
from support.architectures import tiny as tiny_type
from support.checks import Check, Found, on_ranks
from support.fp8_files import write_fp8
from support.hub_files import write_hub
from support.parity import full_tensor
from support.tiny_models import batch, tiny
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
)

from hf_moe_ep import apply_ep_fsdp2, from_pretrained
from hf_moe_ep.checkpoints.hub.quantised import HeldAsBytes
from hf_moe_ep.checkpoints.hub.read import build_model_from_config, find_weights
from hf_moe_ep.checkpoints.hub.stored_parameter import StoredParameter
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader
from hf_moe_ep.checkpoints.training.base import describe_base
from hf_moe_ep.ops.quantised import (
    Quantisation,
    Quantised,
    allocate_stack,
    can_cut_rows,
    quantise_stack,
)
from hf_moe_ep.state import iterate_quantised_matrices

FORMATS: dict[str, Quantisation] = {
    "nf4": Quantisation("nf4"),
    "nested": Quantisation("nf4", nested=True),
    "fp8": Quantisation("fp8"),
}
CONFIG: dict[str, dict[str, Any]] = {
    "nf4": {"experts_dtype": "nf4"},
    "nested": {"experts_dtype": "nf4", "experts_double_quant": True},
    "fp8": {"experts_dtype": "fp8"},
}
# Half of the rows of each matrix are whole blocks, also blocks of 256 scales.
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "initializer_range": 0.09}
MATRIX = "model.layers.1.mlp.experts"


def write_single_experts(folder: Path) -> None:
    """Write one tensor per expert and projection."""
    write_hub(folder, tiny(dtype=torch.bfloat16, **SIZES))


def write_stacked(folder: Path) -> None:
    """Write all experts of a layer in one tensor, as in memory."""
    tiny(dtype=torch.bfloat16, **SIZES).save_pretrained(folder, save_original_format=False)


def write_fp8_files(folder: Path) -> None:
    """Write FP8 as in Qwen3 and DeepSeek-V3, with scales that quantising again would not give."""
    write_fp8(folder, tiny(dtype=torch.bfloat16, **SIZES))
    state, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith("_scale_inv")]:
        state[name] *= 1 + torch.rand(state[name].shape, generator=generator)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def write_fp8_with_other_blocks(folder: Path) -> None:
    write_fp8(folder, tiny(dtype=torch.bfloat16, **SIZES), (64, 64))


def write_mxfp4(folder: Path) -> None:
    """Write the MXFP4 layout of openai/gpt-oss, whose parameters are transposed: [E, in, out]."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    model = tiny_type("gpt_oss", dtype=torch.bfloat16, **sizes)
    model.save_pretrained(folder)
    state, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = state.pop(name).shape
        shape = (experts, out, inner // 32)
        for kind, low, high, dims in (("blocks", 0, 256, (16,)), ("scales", 120, 130, ())):
            state[f"{name}_{kind}"] = torch.randint(
                low, high, (*shape, *dims), dtype=torch.uint8, generator=generator
            )
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def write_transposed(folder: Path) -> None:
    """Write a gpt-oss model, whose parameters are transposed, in bf16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    tiny_type("gpt_oss", dtype=torch.bfloat16, **sizes).save_pretrained(folder)


FILES: dict[str, Callable[[Path], None]] = {
    "hub": write_single_experts,
    "stacked": write_stacked,
    "transposed": write_transposed,
    "fp8 files": write_fp8_files,
    "fp8 files of other blocks": write_fp8_with_other_blocks,
    "mxfp4 files": write_mxfp4,
}
DEQUANTISING: dict[str, Any] = {
    "fp8 files": partial(FineGrainedFP8Config, dequantize=True),
    "fp8 files of other blocks": partial(FineGrainedFP8Config, dequantize=True),
    "mxfp4 files": partial(Mxfp4Config, dequantize=True),
}


def load_stock(name: str, folder: str | Path) -> PreTrainedModel:
    """Load the files with stock, decoded to bf16."""
    config = {"quantization_config": DEQUANTISING[name]()} if name in DEQUANTISING else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **config)


def read_fp8(folder: Path, weight: str) -> Quantised:
    """Read the FP8 bytes and scales of one matrix of all experts from the file."""
    state = load_file(folder / "model.safetensors")
    parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else ("down_proj",)

    def read_parts(suffix: str) -> Tensor:
        matrices_by_expert = [
            [state[f"{MATRIX}.{expert}.{part}.weight{suffix}"] for part in parts]
            for expert in range(8)
        ]
        return torch.stack([torch.cat(matrices) for matrices in matrices_by_expert])

    return Quantised(read_parts("").view(torch.uint8), read_parts("_scale_inv"))


def locate_weights(folder: Path) -> dict[str, StoredParameter]:
    """Find where the files of a checkpoint store each weight."""
    model, plan = build_model_from_config(folder)
    names = [name for name, _ in model.named_parameters()]
    return find_weights(model, folder, plan, names).stored


def cut_shards(whole: Quantised, quantisation: Quantisation) -> Iterator[tuple[Any, Quantised]]:
    """Yield the shards of four ranks: experts 3 and 4, no expert, and twice half of all rows."""
    rows = whole.values.shape[1]
    columns = whole.values.shape[2] * quantisation.values_per_byte
    cuts: list[tuple[slice, int, int]] = [(slice(3, 5), 0, 1), (slice(8, 8), 0, 1)]
    assert can_cut_rows((rows, columns), quantisation, 2)
    cuts += [(slice(0, 8), half, 2) for half in (0, 1)]
    for experts, half, halves in cuts:
        boxes, tensors = [], []
        for tensor in whole.by_name("").values():
            share = tensor.shape[1] // halves
            rows_of_half = (half * share, (half + 1) * share)
            boxes.append(((experts.start, experts.stop), rows_of_half, (0, tensor.shape[2])))
            tensors.append(tensor[experts, slice(*rows_of_half)])
        yield boxes, Quantised(*tensors)


def list_cases() -> Iterator[Any]:
    for name, kind in product(FILES, FORMATS):
        is_fast = (name, kind) in (("hub", "nested"), ("fp8 files", "fp8"), ("mxfp4 files", "nf4"))
        marks = [] if is_fast else [pytest.mark.slow]
        yield pytest.param(name, kind, id=f"{name}, {kind}", marks=marks)


@pytest.mark.parametrize(("name", "kind"), list(list_cases()))
def test_each_shard_equals_quantising_after_loading(name: str, kind: str, tmp_path: Path) -> None:
    """Files of each layout are read into the shards of `cut_shards`, FP8 into FP8 without decoding.

    Nested scales depend on the whole matrix, also on a rank that has only a part of its rows.
    """
    quantisation, folder = FORMATS[kind], tmp_path / "checkpoint"
    FILES[name](folder)
    stored = locate_weights(folder)
    decoded = load_stock(name, folder)
    experts = decoded.model.layers[1].mlp.experts
    transposed = name in ("transposed", "mxfp4 files")
    for weight in ("gate_up_proj", "down_proj"):
        values = getattr(experts, weight).detach()
        whole = quantise_stack(values.mT if transposed else values, quantisation)
        if (kind, name) == ("fp8", "fp8 files"):
            requantised = whole
            whole = read_fp8(folder, weight)
            assert not torch.equal(requantised.block_scale, whole.block_scale), "other scales"
        shape_EOI = values.mT.shape if transposed else values.shape
        for boxes, shard in cut_shards(whole, quantisation):
            tensors = [torch.full_like(tensor, 77) for tensor in shard.by_name("").values()]
            target = HeldAsBytes(
                Quantised(*tensors), boxes, (shape_EOI[1], shape_EOI[2]), quantisation, transposed
            )
            with Reader() as reader:
                target.read(stored[f"{MATRIX}.{weight}"], reader, torch.device("cpu"))
            for actual, tensor in zip(tensors, shard.by_name("").values(), strict=True):
                assert torch.equal(actual, tensor), (weight, boxes)


def test_fp8_files_with_our_blocks_are_not_decoded(tmp_path: Path) -> None:
    write_fp8_files(tmp_path / "128")
    write_fp8_with_other_blocks(tmp_path / "64")
    decoded = []
    for blocks in ("128", "64"):
        stored = locate_weights(tmp_path / blocks)[f"{MATRIX}.down_proj"]
        local = allocate_stack((8, 256, 256), FORMATS["fp8"], "cpu")
        boxes = [tuple((0, n) for n in tensor.shape) for tensor in local.by_name("").values()]
        target = HeldAsBytes(local, boxes, (256, 256), FORMATS["fp8"], False)
        with (
            Reader() as reader,
            mock.patch("hf_moe_ep.checkpoints.hub.quantised.quantise") as quantise,
            mock.patch("hf_moe_ep.checkpoints.hub.fp8.Fp8Tensor.read_into") as decode,
        ):
            quantise.return_value = local.matrix_of(0)
            target.read(stored, reader, torch.device("cpu"))
        decoded.append((decode.call_count, quantise.call_count))
    assert decoded == [(0, 0), (8, 8)]


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ep_size": 2}, {"ep_size": 1}, {"ep_size": 1, "expert_shard_dim": 1}],
    4: [{"ep_size": 2}, {"ep_size": 2, "expert_shard_dim": 1}],
}


def _make_lora_config() -> LoraConfig:
    return LoraConfig(r=2, target_parameters=list(EXPERTS), target_modules=["q_proj"])


def _compare_with_stock(name: str, rank: int, world: int, folder: str) -> None:
    """Weights, hashes, loss and gradients equal those of a loaded model that is quantised later."""
    files = Path(folder, "files")
    if rank == 0:
        FILES[name](files)
    dist.barrier()
    for kind, config in CONFIG.items():
        # Files other than "hub" are read at the last layout only, which splits rows.
        for layout in LAYOUTS[world] if name == "hub" else LAYOUTS[world][-1:]:
            torch.manual_seed(1)
            direct = from_pretrained(
                files, peft_config=_make_lora_config(), **config, **layout
            ).train()
            if (kind, name) == ("fp8", "fp8 files"):
                _assert_equals_files(files, direct)
                continue
            model = get_peft_model(load_stock(name, files), _make_lora_config())
            quantised_later = apply_ep_fsdp2(model, **config, **layout).train()
            parameters = dict(direct.named_parameters())
            assert parameters.keys() == dict(quantised_later.named_parameters()).keys()
            for key, parameter in quantised_later.named_parameters():
                assert parameters[key].dtype == parameter.dtype, key
                if "lora_A" in key:
                    with torch.no_grad():
                        parameters[key].copy_(parameter)
                else:
                    actual, expected = parameters[key].to_local(), parameter.to_local()
                    assert torch.equal(actual, expected), (kind, layout, key)
            assert describe_base(direct)["hashes"] == describe_base(quantised_later)["hashes"]
            inputs, results = batch(quantised_later, 2, 9, seed=rank), []
            for model_or_reference in (direct, quantised_later):
                loss = model_or_reference(**inputs).loss
                loss.backward()
                grads = {
                    n: p.grad for n, p in model_or_reference.named_parameters() if p.requires_grad
                }
                results.append((loss, {n: g.to_local() for n, g in grads.items()}))
            assert torch.equal(results[0][0], results[1][0])
            for key, grad in results[1][1].items():
                assert torch.equal(results[0][1][key], grad), (kind, layout, key)


def _assert_equals_files(files: Path, model: Any) -> None:
    num_tensors = 0
    for name, stack, _ in iterate_quantised_matrices(model):
        if ".layers.1." not in name:
            continue
        stored = read_fp8(files, name.rpartition(".")[2]).by_name("").values()
        for actual, tensor in zip(stack.by_name("").values(), stored, strict=True):
            assert torch.equal(full_tensor(actual), tensor), name
            num_tensors += 1
    assert num_tensors == 4


COMPARISONS = {f"{name} on ranks": partial(_compare_with_stock, name) for name in FILES}
HUB_ONLY = dict(list(COMPARISONS.items())[:1])


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(1, {f"{name}, one": run for name, run in HUB_ONLY.items()}, slow=True),
        *on_ranks(2, {f"{name}, two": run for name, run in COMPARISONS.items()}, slow=True),
        *on_ranks(4, {f"{name}, four": run for name, run in HUB_ONLY.items()}, slow=True),
    ],
)
def test_loss_and_gradients_equal_quantising_after_loading(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
