"""`hf-moe-ep merge-adapter` writes, piece by piece, what PEFT merges and saves in one process."""

import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub.constants
import pytest
import torch
from peft import LoKrConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.adapters import EXPERTS, with_lora
from support.alive import alive_at_writes
from support.architectures.models import tiny
from support.close import assert_close, max_error
from support.hub_files import hub_state, read_all, write_hub
from support.largest_tensor import LargestTensor
from support.ranks import run_ranks
from support.resident import Resident, return_what_is_freed
from support.small_disk import small_disk
from support.tiny_models import tiny as tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_moe_ep.checkpoints import merge
from hf_moe_ep.checkpoints.hub.write import write_checkpoint
from hf_moe_ep.checkpoints.merge import merge_adapter
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, Writer
from hf_moe_ep.cli import main as cli

BASE, ADAPTER = "base", "adapter"
DENSE = ("q_proj", "v_proj", "embed_tokens")
SLAB = 5_000  # bytes: of these stacks two experts or three


def write_base(folder: Path, name: str, dtype: torch.dtype, **config: Any) -> type[PreTrainedModel]:
    """Several files, as stock saves it, and files that describe it."""
    model = tiny(name, dtype=dtype, **config)
    model.save_pretrained(folder / BASE, max_shard_size="60KB")
    (folder / BASE / "tokenizer.json").write_text('{"of": "base"}')
    (folder / BASE / "additional_chat_templates").mkdir()
    (folder / BASE / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    return type(model)


def write_adapter(folder: Path, model: PreTrainedModel, **options: Any) -> None:
    """Write an adapter of random factors, with trained biases and modules_to_save."""
    adapted = with_lora(model, **{"r": 3, "seed": 1, **options})
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name or (options.get("bias") and name.endswith("bias")):
                parameter.add_(torch.randn_like(parameter))
    adapted.save_pretrained(folder / ADAPTER)


@dataclass(frozen=True)
class OfPeft:
    """The merged model that stock PEFT saves in one process, and the same in fp64: the truth."""

    values: dict[str, Tensor]
    truth: dict[str, Tensor]


def merged_by_peft(folder: Path, model_class: type[PreTrainedModel]) -> OfPeft:
    saved = []
    for name, options in (("of peft", {}), ("truth", {"dtype": torch.float64})):
        base = model_class.from_pretrained(folder / BASE, **options)
        merged = PeftModel.from_pretrained(base, folder / ADAPTER).merge_and_unload()
        merged.save_pretrained(folder / name, max_shard_size="60KB")
        saved.append(read_all(folder / name))
    return OfPeft(*saved)


def assert_merged(got: dict[str, Tensor], want: OfPeft) -> None:
    """The same keys and dtypes, no larger errors, and in bf16 nearly the same bits.

    Sums of a product may run in another order than PEFT's. So the error against fp64 is at most
    twice PEFT's, as for a kernel; it is none where PEFT has none, which are the tensors that no
    product changes. In bf16 that would not see a product that is rounded too often or too seldom,
    which moves one value in four or more. Another order of sums moves a value of fp32 by less than
    2 (r + 3) 2**-24 of its terms, values of bf16 are 2**-8 apart at least: with r <= 7 one in
    3,000 is rounded otherwise, ten times that where terms cancel; more than one in 100 is an error.
    """
    assert got.keys() == want.values.keys() == want.truth.keys()
    for key, value in want.values.items():
        assert got[key].dtype == value.dtype, key
        budget = 2 * max_error(value, want.truth[key])
        assert_close(key, got[key], want.truth[key], budget)
        if value.dtype == torch.bfloat16:
            others = int((got[key] != value).sum())
            assert others <= 1 + value.numel() / 100, f"{key}: {others} of {value.numel()}"


def index_of(folder: Path) -> dict[str, str]:
    places: dict[str, str] = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    return places


def written(folder: Path, **options: Any) -> dict[str, Tensor]:
    merge_adapter(folder / BASE, folder / ADAPTER, folder / "out", **{"max_bytes": SLAB, **options})
    return read_all(folder / "out")


def assert_as_peft(folder: Path, model_class: type[PreTrainedModel]) -> dict[str, Tensor]:
    """The same keys, dtypes and values; returns PEFT's."""
    want, base = merged_by_peft(folder, model_class), read_all(folder / BASE)
    assert any(not torch.equal(want.values[key], base[key]) for key in want.values if key in base)
    assert_merged(written(folder), want)
    return want.values


# By type, which dense modules are adapted beside the experts.
TYPES: dict[str, tuple[str, ...]] = {
    "qwen3_moe": DENSE,  # one key per expert
    "gpt_oss": DENSE,  # stacks [E, in, out], biases
    "mixtral": ("q_proj", "lm_head"),
    "deepseek_v3": ("q_b_proj", "kv_b_proj", "o_proj"),
}
FAST = (("qwen3_moe", "fp32"), ("gpt_oss", "bf16"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [
    pytest.param(
        name,
        dtype,
        id=f"{name}, {kind}",
        marks=() if (name, kind) in FAST else pytest.mark.slow,
    )
    for name in TYPES
    for kind, dtype in DTYPES.items()
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_value_is_that_of_peft(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_class = write_base(tmp_path, name, dtype)
    write_adapter(tmp_path, model_class.from_pretrained(tmp_path / BASE), modules=TYPES[name])
    want = assert_as_peft(tmp_path, model_class)
    base, places = index_of(tmp_path / BASE), index_of(tmp_path / "out")
    assert set(places.values()) <= set(base.values()) and len(set(places.values())) > 2
    # A stack of which several files have a part is in one of them.
    assert all(places[key] == base[key] for key in want if ".experts." not in key)
    for kept in ("config.json", "tokenizer.json", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "out" / kept).read_bytes() == (tmp_path / BASE / kept).read_bytes()
    assert not list(tmp_path.glob(".out.partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_of_pictures_is_as_on_the_hub(dtype: torch.dtype, tmp_path: Path) -> None:
    """Stock saves Qwen3-VL-MoE in its memory layout, which is not the layout on the hub."""
    model = tiny("qwen3_vl_moe", dtype=dtype)
    base = write_hub(tmp_path / BASE, model)
    model_class = type(model)
    modules = ("q_proj", "qkv", "linear_fc1")
    write_adapter(tmp_path, model_class.from_pretrained(tmp_path / BASE), modules=modules)
    merged = [
        PeftModel.from_pretrained(
            model_class.from_pretrained(tmp_path / BASE, dtype=kind), tmp_path / ADAPTER
        ).merge_and_unload()
        for kind in (dtype, torch.float64)
    ]
    want, got = OfPeft(*map(hub_state, merged)), written(tmp_path)
    assert sum(not torch.equal(want.values[key], base[key]) for key in base) > 8
    assert_merged(got, want)
    again = model_class.from_pretrained(tmp_path / "out")
    assert_merged(again.state_dict(), OfPeft(*(model.state_dict() for model in merged)))


BIASED: dict[str, Any] = {"attention_bias": True}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rslora, patterns, the router": (
        {},
        {
            "use_rslora": True,
            "rank_pattern": {"experts.gate_up_proj": 5, r"1\..*q_proj": 7},
            "alpha_pattern": {"down_proj": 11},
            "parameters": (*EXPERTS, "mlp.gate.weight"),
        },
    ),
    "the embedding, tied": (TIED, {"modules": DENSE}),
    "a trained embedding, once tied": (TIED, {"modules_to_save": ["embed_tokens"]}),
    "a trained head, once tied": (TIED, {"modules_to_save": ["lm_head"]}),
    "norms and a head": ({}, {"modules_to_save": ["lm_head", "norm", "q_norm"], "modules": ()}),
    "biases": (BIASED, {"bias": "all"}),
    "dense layers alone": ({}, {"parameters": ()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_every_kind(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, options = KINDS[kind]
    model_class = write_base(tmp_path, "qwen3_moe", dtype, **config)
    write_adapter(tmp_path, model_class.from_pretrained(tmp_path / BASE), **options)
    want = assert_as_peft(tmp_path, model_class)
    assert ("lm_head.weight" in want) == ("once tied" in kind or not config.get(*TIED))
    done = merge_adapter(tmp_path / BASE, tmp_path / ADAPTER, tmp_path / "again")
    assert any("tie_word_embeddings to false" in note for note in done.notes) == ("once" in kind)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an adapter that no test changes, and what PEFT makes of them."""
    folder = tmp_path_factory.mktemp("small")
    model_class = write_base(folder, "qwen3_moe", torch.float32)
    write_adapter(folder, model_class.from_pretrained(folder / BASE), modules=DENSE)
    merged_by_peft(folder, model_class)
    return folder


def of_peft(small: Path) -> OfPeft:
    return OfPeft(read_all(small / "of peft"), read_all(small / "truth"))


def test_what_transformers_saves_in_several_files(small: Path, tmp_path: Path) -> None:
    """The adapter has an index, and the base is a name in the hub's cache."""
    whole = load_file(small / ADAPTER / "adapter_model.safetensors")
    shutil.copytree(small / ADAPTER, tmp_path / ADAPTER)
    (tmp_path / ADAPTER / "adapter_model.safetensors").unlink()
    places = {
        key.removeprefix("base_model.model."): f"adapter_model-0000{1 + i % 2}-of-00002.safetensors"
        for i, key in enumerate(whole)
    }
    for name in set(places.values()):
        held = {k: whole[f"base_model.model.{k}"] for k, place in places.items() if place == name}
        save_file(held, tmp_path / ADAPTER / name)
    index = tmp_path / ADAPTER / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    cached = tmp_path / "cache" / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("f00d")
    shutil.copytree(small / BASE, cached / "snapshots" / "f00d")
    (tmp_path / ADAPTER / "tokenizer.json").write_text('{"of": "adapter"}')
    _edit(tmp_path / ADAPTER / "adapter_config.json", base_model_name_or_path="somebody/tiny")
    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache")),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
    ):
        done = merge_adapter("somebody/tiny", tmp_path / ADAPTER, tmp_path / "out")
    assert_merged(read_all(tmp_path / "out"), of_peft(small))
    assert done.notes == [
        "tokenizer.json comes from the base; the adapter's tokenizer.json is different"
    ]


@pytest.mark.slow
def test_a_base_of_one_file_by_other_names(small: Path, tmp_path: Path) -> None:
    """The result is one file as well. A warning says that the adapter names another base."""
    for name in ("base", "Tiny", "models--somebody--Tiny/snapshots/f00d"):
        AutoModelForCausalLM.from_pretrained(small / BASE).save_pretrained(tmp_path / name)
    shutil.copytree(small / ADAPTER, tmp_path / ADAPTER)
    _edit(tmp_path / ADAPTER / "adapter_config.json", base_model_name_or_path="somebody/Tiny")
    for number, name in enumerate(("models--somebody--Tiny/snapshots/f00d", "Tiny", "base")):
        out = tmp_path / f"out{number}"
        done = merge_adapter(tmp_path / name, tmp_path / ADAPTER, out)
        assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
        assert_merged(read_all(out), of_peft(small))
    assert done.notes == [
        f"the adapter was trained on somebody/Tiny; the merge is right if {tmp_path / BASE} "
        f"has the same values"
    ]


@pytest.mark.slow
def test_the_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["merge-adapter", *map(str, (small / BASE, small / ADAPTER, tmp_path / "out"))]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr()
    want = of_peft(small)
    assert f"{sum(tensor.nbytes for tensor in want.values.values()):,} bytes" in shown.out
    assert f"merging into {tmp_path / 'out'}: 100%" in shown.err
    assert cli.main(["verify", str(tmp_path / "out")]) == 0
    assert "all right" in capsys.readouterr().out
    assert_merged(read_all(tmp_path / "out"), want)
    assert cli.main(arguments) == 2
    assert f"target {tmp_path / 'out'} exists and is not empty" in capsys.readouterr().err


def test_no_more_than_a_few_experts_or_rows_are_in_memory(small: Path, tmp_path: Path) -> None:
    """The adapter is not read whole either."""
    watch = LargestTensor(())

    def write(*arguments: Any, **options: Any) -> None:
        with watch:  # of the values: the model is described by then
            write_checkpoint(*arguments, **options)

    with mock.patch.object(merge, "write_checkpoint", write):
        merge_adapter(small / BASE, small / ADAPTER, tmp_path / "out", max_bytes=SLAB)
    held = list(AutoModelForCausalLM.from_pretrained(small / BASE).parameters())
    expert = max(p[0].nbytes for p in held if p.ndim == 3)  # one is the least
    matrix = max(p.nbytes for p in held if p.ndim == 2)  # the embedding
    learnt = load_file(small / ADAPTER / "adapter_model.safetensors")
    factors = [tensor for key, tensor in learnt.items() if "lora_" in key]
    largest = max(SLAB, expert, *(tensor.nbytes for tensor in factors))
    assert largest < min(matrix, sum(factor.nbytes for factor in factors)) / 1.5
    assert watch.nbytes == largest


@pytest.mark.slow
def test_what_is_alive_while_a_tensor_is_written(small: Path, tmp_path: Path) -> None:
    with alive_at_writes() as alive:
        merge_adapter(small / BASE, small / ADAPTER, tmp_path / "out", max_bytes=SLAB)
    want = read_all(small / "of peft")
    largest = max(tensor.nbytes for tensor in want.values())
    assert max(alive) <= largest < sum(tensor.nbytes for tensor in want.values()) / 10


WIDE = {
    "num_experts": 32,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
MIB = 2**20


def _peaks(rank: int, world: int, folder: Path) -> list[int]:
    return_what_is_freed()
    peaks = []
    for name, max_bytes in (("in one", 2**30), ("sliced", MIB)):  # the first pays for imports
        with Resident() as resident:
            merge_adapter(folder / BASE, folder / ADAPTER, folder / name, max_bytes=max_bytes)
        peaks.append(resident.grown)
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_peak_is_that_of_a_few_experts(dtype: torch.dtype, tmp_path: Path) -> None:
    """Resident memory is measured while a stack lies in many files."""
    model = tiny_model(dtype=dtype, **WIDE)
    stack = max(parameter.nbytes for parameter in model.parameters())
    write_hub(tmp_path / BASE, model, files=5)
    with_lora(model, r=2, seed=1).save_pretrained(tmp_path / ADAPTER)
    in_one, sliced = run_ranks(_peaks, 1, tmp_path)[0]
    # Of 1 MiB each: a slab, its product and sum in fp32, what is read; 8 MiB of little things.
    assert sliced < 16 * MIB <= stack < in_one, (sliced / MIB, in_one / MIB)
    got, want = read_all(tmp_path / "sliced"), read_all(tmp_path / "in one")
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        # Two sums of r = 2 products, scaled and added: 2 (r + 3) roundings of fp32; or one of bf16.
        assert_close(key, got[key], tensor, 10 * 2**-24 if dtype == torch.float32 else 2**-8)


@contextmanager
def dying(at: int, how: Callable[[], object]) -> Iterator[None]:
    """Call `how` in front of the `at`-th write of a tensor, or of a file's copy after all those."""
    left, stock, copy = [at], Writer.write, merge._copy

    def counted(function: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            how()
        function(*arguments)

    def write(file: Writer, *arguments: Any) -> None:
        counted(stock, file, *arguments)

    with (
        mock.patch.object(Writer, "write", write),
        mock.patch.object(merge, "_copy", partial(counted, copy)),
    ):
        yield


def _no_space() -> None:
    raise OSError("No space left on device")


def num_writes(small: Path, folder: Path) -> int:
    """Count the writes of a merge, and the files that are copied behind them."""
    calls = [0]
    with dying(0, lambda: calls.append(1)):
        merge_adapter(small / BASE, small / ADAPTER, folder / "counted")
    return len(calls) - 1


@pytest.mark.slow
def test_an_error_leaves_nothing(small: Path, tmp_path: Path) -> None:
    total = num_writes(small, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    for at in (0, total // 2, total - 1):
        with dying(at, _no_space), pytest.raises(OSError, match="No space left"):
            merge_adapter(small / BASE, small / ADAPTER, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def _killed(rank: int, world: int, small: Path, out: Path, at: int) -> None:
    with dying(at, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        merge_adapter(small / BASE, small / ADAPTER, out)


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_that_loads(small: Path, tmp_path: Path) -> None:
    total = num_writes(small, tmp_path)
    for at in (0, total // 2, total - 1):
        died = run_ranks(_killed, 1, small, tmp_path / "out", at, expect_errors=True)
        assert died[0][1] == "ProcessDied" and not (tmp_path / "out").exists()
    left = sorted(tmp_path.glob(".out.partial-*"))
    assert len(left) == 3
    for folder in left:
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(folder)
    done = merge_adapter(small / BASE, small / ADAPTER, tmp_path / "out")
    assert_merged(read_all(tmp_path / "out"), of_peft(small))
    assert any(f"{left[-1]} is left from a killed run" in note for note in done.notes)


def _edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _quantized(method: str, base: Path, adapter: Path) -> None:
    _edit(base / "config.json", quantization_config={"quant_method": method})


def _adapter_config(base: Path, adapter: Path, **values: Any) -> None:
    _edit(adapter / "adapter_config.json", **values)


def _another_kind(config: Any, base: Path, adapter: Path) -> None:
    shutil.rmtree(adapter)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)


def _of_another_base(base: Path, adapter: Path, **config: Any) -> None:
    shutil.rmtree(adapter)
    with_lora(tiny("qwen3_moe", dtype=torch.float32, **config), r=3).save_pretrained(adapter)


def _single_experts(base: Path, adapter: Path) -> None:
    key = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight"
    save_file({key: torch.zeros(3, 3)}, adapter / "adapter_model.safetensors")


def _without_a_tensor(base: Path, adapter: Path) -> None:
    held = load_file(adapter / "adapter_model.safetensors")
    held.pop(next(key for key in held if "lora_A" in key))
    save_file(held | {"surplus": torch.zeros(2)}, adapter / "adapter_model.safetensors")


def _pickled(base: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def _another_layout(base: Path, adapter: Path) -> None:
    for path in base.glob("*.safetensors"):
        held = {key.replace("self_attn", "attention"): t for key, t in load_file(path).items()}
        save_file(held, path)
    places = index_of(base)
    renamed = {key.replace("self_attn", "attention"): place for key, place in places.items()}
    (base / INDEX).write_text(json.dumps({"weight_map": renamed}))


FP8 = {"quant_method": "fp8"}
BEYOND_A_PRODUCT: dict[str, Any] = {
    "trainable_token_indices": [1, 2],
    "alora_invocation_tokens": [3],
    "layer_replication": [[0, 1], [0, 1]],
    "lora_bias": True,
    "use_qalora": True,
    "kasa_config": {},
    "velora_config": {},
    "monteclora_config": {},
}

# What is done to the two folders, and the words of the error.
BAD: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "fp8": (partial(_quantized, "fp8"), r"quantized by fp8, to which .* dequantize=True"),
    "mxfp4": (partial(_quantized, "mxfp4"), r"quantized by mxfp4, .*name a bf16 checkpoint"),
    "dora": (partial(_adapter_config, use_dora=True), r"DoRA \(use_dora\), .*merge_and_unload"),
    "pissa": (
        partial(_adapter_config, init_lora_weights="pissa"),
        r"init_lora_weights='pissa', which may change the base too; .*path_initial_model",
    ),
    "lokr": (
        partial(_another_kind, LoKrConfig(r=2, target_modules=["q_proj"])),
        r"peft_type LOKR, but only LORA is a product of two factors; merge the adapter in one",
    ),
    "prompt": (
        partial(_another_kind, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        r"is a trained prompt \(PROMPT_TUNING: .*cannot be merged into a weight",
    ),
    "shapes": (
        partial(_of_another_base, hidden_size=48),
        r"adapter does not fit .*base: misshapen \d+ tensors: .* \(3, 48\) instead of \(3, \d+\)",
    ),
    "layers": (
        partial(_of_another_base, num_hidden_layers=5),
        r"does not fit .*unexpected \d+ tensors: .*layers\.4\..*it was trained on .*: merge",
    ),
    "modules": (
        partial(_adapter_config, target_modules=["c_attn"], target_parameters=None),
        r"adapter does not fit .*base: .*c_attn.* not found in the base model",
    ),
    "rank": (
        partial(_adapter_config, r=8),
        r"misshapen .*\(3, \d+\) instead of \(8, .*, with the adapter_config.json that was saved",
    ),
    "tensors": (_without_a_tensor, r"missing 1 tensors: .*lora.*; unexpected 1 tensors: .*surplus"),
    "single experts": (_single_experts, r"single experts, .*export-adapter .* --to fused"),
    "pickle": (_pickled, r"holds a pickle, adapter_model.bin; load it in PEFT and save it"),
    "layout": (
        _another_layout,
        r"missing \d+ .*self_attn.*holds instead .*keys belong to another layout",
    ),
    "no adapter": (lambda _, adapter: shutil.rmtree(adapter), "is no adapter folder: it has no"),
    "no model": (lambda base, _: (base / "config.json").unlink(), "is no model: it has no config"),
    "damaged config": (
        lambda base, _: (base / "config.json").write_text('{"model_type": '),
        r"base/config.json is damaged or not JSON: Expecting value",
    ),
    "a list": (
        lambda base, _: (base / "config.json").write_text("[]"),
        r"base/config.json contains a list, but must contain an object",
    ),
    "damaged adapter": (
        lambda _, adapter: (adapter / "adapter_config.json").write_text("{"),
        r"adapter has no config that PEFT [\d.]+ can read: JSONDecodeError",
    ),
    "a part quantized": (
        lambda base, _: _edit(base / "config.json", text_config={"quantization_config": FP8}),
        r"quantized by fp8, to which no adapter can be added",
    ),
}
BAD |= {
    field: (partial(_adapter_config, **{field: value}), rf"LoRA with .*\({field}\), but only a pro")
    for field, value in BEYOND_A_PRODUCT.items()
    if hasattr(LoraConfig(), field)  # of the oldest PEFT, too
}
FAST_BAD = (
    "fp8",
    "dora",
    "single experts",
    "pickle",
    "no adapter",
    "no model",
    "damaged config",
    "trainable_token_indices",
)


@pytest.mark.parametrize(
    "case", [c if c in FAST_BAD else pytest.param(c, marks=pytest.mark.slow) for c in BAD]
)
def test_what_cannot_be_merged(case: str, small: Path, tmp_path: Path) -> None:
    for name in (BASE, ADAPTER):
        shutil.copytree(small / name, tmp_path / name)
    spoil, words = BAD[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spoil(tmp_path / BASE, tmp_path / ADAPTER)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=words):
        merge_adapter(tmp_path / BASE, tmp_path / ADAPTER, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_room_is_looked_for_first(small: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial-1").mkdir()
    usage = shutil.disk_usage(tmp_path)._replace(free=400_000)
    with (
        mock.patch.object(shutil, "disk_usage", return_value=usage),
        pytest.raises(ValueError, match=r"needs \d+,\d+ bytes, .*room for 400,000; .*partial-1 is"),
    ):
        merge_adapter(small / BASE, small / ADAPTER, tmp_path / "out")


@pytest.mark.parametrize(
    ("base", "target", "words"),
    [
        (BASE, BASE, r"target .*base exists and is not empty; name another folder"),
        (BASE, f"{BASE}/out", r"target .*base/out lies in .*; name another folder"),
        (BASE, f"{BASE}/config.json/out", r"lies in .*config.json, which is a file; name another"),
        (
            "somebody/else",
            "out",
            r"'somebody/else' is neither a folder .* cannot be downloaded: .*cached",
        ),
        ("no model at all", "out", r"'no model at all' is neither a folder .*Repo id must use"),
    ],
)
def test_places_that_cannot_be(base: str, target: str, words: str, small: Path) -> None:
    base = os.fspath(small / base) if base == BASE else base
    before = sorted(small.rglob("*"))
    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        pytest.raises(ValueError, match=words),
    ):
        merge_adapter(base, small / ADAPTER, small / target)
    assert sorted(small.rglob("*")) == before


@pytest.mark.slow
def test_a_disk(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is too small from the start, filled during the write, or a mounted folder."""
    arguments = ["merge-adapter", *map(str, (small / BASE, small / ADAPTER))]
    with small_disk(tmp_path, 300_000):
        assert cli.main([*arguments, str(tmp_path / "out")]) == 2
        assert re.search(r"needs \d+,\d+ bytes, .* has room for \d+,\d+", capsys.readouterr().err)
        plenty = shutil.disk_usage(tmp_path)._replace(free=2**30)
        with mock.patch.object(shutil, "disk_usage", return_value=plenty):
            assert cli.main([*arguments, str(tmp_path / "out")]) == 2
        assert re.search(r"No space left on device: '.*\.safetensors'", capsys.readouterr().err)
        assert not list(tmp_path.iterdir())
        assert cli.main([*arguments, str(tmp_path)]) == 2
        assert f"a folder on that disk, {tmp_path / 'model'}" in capsys.readouterr().err
