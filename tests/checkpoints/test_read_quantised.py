"""Experts quantised while they are read: to the bit what loading and quantising then gives."""

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
from hf_moe_ep.checkpoints.hub.in_files import InFiles
from hf_moe_ep.checkpoints.hub.quantised import HeldAsBytes
from hf_moe_ep.checkpoints.hub.read import described_model, find_weights
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader
from hf_moe_ep.checkpoints.training.base import describe_base
from hf_moe_ep.ops.quantised import (
    Quantisation,
    Quantised,
    empty_stack,
    quantise_stack,
    rows_may_be_cut,
)
from hf_moe_ep.state import quantised_matrices

HELD: dict[str, Quantisation] = {
    "nf4": Quantisation("nf4"),
    "nested": Quantisation("nf4", nested=True),
    "fp8": Quantisation("fp8"),
}
CONFIG: dict[str, dict[str, Any]] = {
    "nf4": {"experts_dtype": "nf4"},
    "nested": {"experts_dtype": "nf4", "experts_double_quant": True},
    "fp8": {"experts_dtype": "fp8"},
}
# Two ranks cut rows of all matrices at blocks, those of 256 scales of nested ones too.
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "initializer_range": 0.09}
MATRIX = "model.layers.1.mlp.experts"


def hub(folder: Path) -> None:
    """One tensor for each matrix of an expert, gate and up apart."""
    write_hub(folder, tiny(dtype=torch.bfloat16, **SIZES))


def stacked(folder: Path) -> None:
    """All experts in one tensor, as in memory."""
    tiny(dtype=torch.bfloat16, **SIZES).save_pretrained(folder, save_original_format=False)


def fp8(folder: Path) -> None:
    """Write FP8 as Qwen3 and DeepSeek-V3 do, with scales that quantising does not find."""
    write_fp8(folder, tiny(dtype=torch.bfloat16, **SIZES))
    state, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith("_scale_inv")]:
        state[name] *= 1 + torch.rand(state[name].shape, generator=generator)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def fp8_of_other_blocks(folder: Path) -> None:
    write_fp8(folder, tiny(dtype=torch.bfloat16, **SIZES), (64, 64))


def mxfp4(folder: Path) -> None:
    """In the layout of openai/gpt-oss, whose matrices are kept the other way round."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    model = tiny_type("gpt_oss", dtype=torch.bfloat16, **sizes)
    model.save_pretrained(folder)
    state, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = state.pop(name).shape
        shape = (experts, out, inner // 32)
        for what, low, high, dims in (("blocks", 0, 256, (16,)), ("scales", 120, 130, ())):
            state[f"{name}_{what}"] = torch.randint(
                low, high, (*shape, *dims), dtype=torch.uint8, generator=generator
            )
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def transposed(folder: Path) -> None:
    """The same type, its matrices in bf16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    tiny_type("gpt_oss", dtype=torch.bfloat16, **sizes).save_pretrained(folder)


FILES: dict[str, Callable[[Path], None]] = {
    "hub": hub,
    "stacked": stacked,
    "transposed": transposed,
    "fp8 files": fp8,
    "fp8 files of other blocks": fp8_of_other_blocks,
    "mxfp4 files": mxfp4,
}
DECODED: dict[str, Any] = {
    "fp8 files": partial(FineGrainedFP8Config, dequantize=True),
    "fp8 files of other blocks": partial(FineGrainedFP8Config, dequantize=True),
    "mxfp4 files": partial(Mxfp4Config, dequantize=True),
}


def stock(name: str, folder: str | Path) -> PreTrainedModel:
    """Return the tensors that stock reads from the files, in bf16."""
    config = {"quantization_config": DECODED[name]()} if name in DECODED else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **config)


def kept_of(folder: Path, weight: str) -> Quantised:
    """Bytes and scales of FP8 as they lie in a file, of one matrix of all experts."""
    state = load_file(folder / "model.safetensors")
    parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else ("down_proj",)

    def joined(suffix: str) -> Tensor:
        of_experts = [
            [state[f"{MATRIX}.{expert}.{part}.weight{suffix}"] for part in parts]
            for expert in range(8)
        ]
        return torch.stack([torch.cat(matrices) for matrices in of_experts])

    return Quantised(joined("").view(torch.uint8), joined("_scale_inv"))


def weights_of(folder: Path) -> dict[str, InFiles]:
    """Return the places of the weights of a checkpoint."""
    model, plan = described_model(folder)
    return find_weights(model, folder, plan, [name for name, _ in model.named_parameters()])


def parts_of(whole: Quantised, quantisation: Quantisation) -> Iterator[tuple[Any, Quantised]]:
    """Return the parts of ranks: experts 3 and 4, no expert, halves of the rows of all."""
    rows = whole.values.shape[1]
    columns = whole.values.shape[2] * quantisation.values_per_byte
    cuts: list[tuple[slice, int, int]] = [(slice(3, 5), 0, 1), (slice(8, 8), 0, 1)]
    assert rows_may_be_cut((rows, columns), quantisation, 2)
    cuts += [(slice(0, 8), half, 2) for half in (0, 1)]
    for experts, half, halves in cuts:
        boxes, tensors = [], []
        for tensor in whole.by_name("").values():
            share = tensor.shape[1] // halves
            own = (half * share, (half + 1) * share)
            boxes.append(((experts.start, experts.stop), own, (0, tensor.shape[2])))
            tensors.append(tensor[experts, slice(*own)])
        yield boxes, Quantised(*tensors)


def pairs() -> Iterator[Any]:
    for name, kind in product(FILES, HELD):
        usual = (name, kind) in (("hub", "nested"), ("fp8 files", "fp8"), ("mxfp4 files", "nf4"))
        marks = [] if usual else [pytest.mark.slow]
        yield pytest.param(name, kind, id=f"{name}, {kind}", marks=marks)


@pytest.mark.parametrize(("name", "kind"), list(pairs()))
def test_each_part_is_that_of_what_was_loaded_and_quantised(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Files have all layouts. A rank reads its experts, no expert, or halves of rows. FP8 into FP8
    copies bytes. Nested scales depend on the whole matrix, and ranks that split its rows agree.
    """
    quantisation, folder = HELD[kind], tmp_path / "checkpoint"
    FILES[name](folder)
    found = weights_of(folder)
    decoded = stock(name, folder)
    experts = decoded.model.layers[1].mlp.experts
    turned = name in ("transposed", "mxfp4 files")
    for weight in ("gate_up_proj", "down_proj"):
        values = getattr(experts, weight).detach()
        whole = quantise_stack(values.mT if turned else values, quantisation)
        if (kind, name) == ("fp8", "fp8 files"):
            again = whole
            whole = kept_of(folder, weight)
            assert not torch.equal(again.block_scale, whole.block_scale), "rounded twice"
        shape_EOI = values.mT.shape if turned else values.shape
        for boxes, want in parts_of(whole, quantisation):
            tensors = [torch.full_like(tensor, 77) for tensor in want.by_name("").values()]
            held = HeldAsBytes(
                Quantised(*tensors), boxes, (shape_EOI[1], shape_EOI[2]), quantisation, turned
            )
            with Reader() as reader:
                held.read(found[f"{MATRIX}.{weight}"], reader, torch.device("cpu"))
            for got, tensor in zip(tensors, want.by_name("").values(), strict=True):
                assert torch.equal(got, tensor), (weight, boxes)


def test_fp8_is_never_decoded_on_its_way_into_fp8(tmp_path: Path) -> None:
    fp8(tmp_path / "128")
    fp8_of_other_blocks(tmp_path / "64")
    decoded = []
    for blocks in ("128", "64"):
        stored = weights_of(tmp_path / blocks)[f"{MATRIX}.down_proj"]
        local = empty_stack((8, 256, 256), HELD["fp8"], "cpu")
        boxes = [tuple((0, n) for n in tensor.shape) for tensor in local.by_name("").values()]
        held = HeldAsBytes(local, boxes, (256, 256), HELD["fp8"], False)
        with (
            Reader() as reader,
            mock.patch("hf_moe_ep.checkpoints.hub.quantised.quantise") as quantise,
            mock.patch("hf_moe_ep.checkpoints.hub.fp8.ScaledTensor.read_into") as decode,
        ):
            quantise.return_value = local.of(0)
            held.read(stored, reader, torch.device("cpu"))
        decoded.append((decode.call_count, quantise.call_count))
    assert decoded == [(0, 0), (8, 8)]


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ep_size": 2}, {"ep_size": 1}, {"ep_size": 1, "expert_shard_dim": 1}],
    4: [{"ep_size": 2}, {"ep_size": 2, "expert_shard_dim": 1}],
}


def _lora() -> LoraConfig:
    return LoraConfig(r=2, target_parameters=list(EXPERTS), target_modules=["q_proj"])


def _loaded_lean_or_quantised_then(name: str, rank: int, world: int, folder: str) -> None:
    """Every parameter, hashes of the base, and a loss with its gradients."""
    files = Path(folder, "files")
    if rank == 0:
        FILES[name](files)
    dist.barrier()
    for kind, config in CONFIG.items():
        # Of other files the layout that asks most of them.
        for layout in LAYOUTS[world] if name == "hub" else LAYOUTS[world][-1:]:
            torch.manual_seed(1)
            lean = from_pretrained(files, peft_config=_lora(), **config, **layout).train()
            if (kind, name) == ("fp8", "fp8 files"):
                _equals_the_file(files, lean)
                continue
            model = get_peft_model(stock(name, files), _lora())
            want = apply_ep_fsdp2(model, **config, **layout).train()
            parameters = dict(lean.named_parameters())
            assert parameters.keys() == dict(want.named_parameters()).keys()
            for key, parameter in want.named_parameters():
                assert parameters[key].dtype == parameter.dtype, key
                if "lora_A" in key:
                    with torch.no_grad():
                        parameters[key].copy_(parameter)
                else:
                    own, theirs = parameters[key].to_local(), parameter.to_local()
                    assert torch.equal(own, theirs), (kind, layout, key)
            assert describe_base(lean)["hashes"] == describe_base(want)["hashes"]
            inputs, found = batch(want, 2, 9, seed=rank), []
            for either in (lean, want):
                loss = either(**inputs).loss
                loss.backward()
                grads = {n: p.grad for n, p in either.named_parameters() if p.requires_grad}
                found.append((loss, {n: g.to_local() for n, g in grads.items()}))
            assert torch.equal(found[0][0], found[1][0])
            for key, grad in found[1][1].items():
                assert torch.equal(found[0][1][key], grad), (kind, layout, key)


def _equals_the_file(files: Path, model: Any) -> None:
    number = 0
    for name, held, _ in quantised_matrices(model):
        if ".layers.1." not in name:
            continue
        want = kept_of(files, name.rpartition(".")[2])
        for got, tensor in zip(held.by_name("").values(), want.by_name("").values(), strict=True):
            assert torch.equal(full_tensor(got), tensor), name
            number += 1
    assert number == 4


ON_RANKS = {f"{name} on ranks": partial(_loaded_lean_or_quantised_then, name) for name in FILES}
HUB = dict(list(ON_RANKS.items())[:1])


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(1, {f"{name}, one": run for name, run in HUB.items()}, slow=True),
        *on_ranks(2, {f"{name}, two": run for name, run in ON_RANKS.items()}, slow=True),
        *on_ranks(4, {f"{name}, four": run for name, run in HUB.items()}, slow=True),
    ],
)
def test_ranks_hold_what_quantising_afterwards_gives(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
