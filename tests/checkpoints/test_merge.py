"""The model that `hf-moe-ep merge-adapter` writes equals the model that PEFT merges in memory."""

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
SLAB = 5_000  # bytes: two or three experts of these stacks


def write_base(folder: Path, name: str, dtype: torch.dtype, **config: Any) -> type[PreTrainedModel]:
    """Save a base model as stock does, in several files, with a tokenizer and a template."""
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
class PeftMerge:
    """The tensors that stock PEFT merges and saves; `truth` has the same merge in fp64."""

    values: dict[str, Tensor]
    truth: dict[str, Tensor]


def merge_with_peft(folder: Path, model_class: type[PreTrainedModel]) -> PeftMerge:
    tensors = []
    for name, options in (("peft", {}), ("truth", {"dtype": torch.float64})):
        base = model_class.from_pretrained(folder / BASE, **options)
        merged = PeftModel.from_pretrained(base, folder / ADAPTER).merge_and_unload()
        merged.save_pretrained(folder / name, max_shard_size="60KB")
        tensors.append(read_all(folder / name))
    return PeftMerge(*tensors)


def assert_merged(actual: dict[str, Tensor], peft: PeftMerge) -> None:
    """Check keys, dtypes and errors, and in bf16 that nearly all values are bitwise equal.

    The product of a slab may sum its terms in another order than PEFT's. So the error against fp64
    may be twice PEFT's error. It must be 0 where PEFT's is 0: no product changes these tensors.
    In bf16 this budget misses a product that is rounded once too often or too seldom,
    which changes at least a quarter of the values. Another order of summation changes an fp32 value
    by less than 2 (r + 3) 2**-24 of its terms, and bf16 values are at least 2**-8 apart. With
    r <= 7 it changes one bf16 value in 3,000, or ten times as many where terms cancel. More than
    one in 100 is therefore an error.
    """
    assert actual.keys() == peft.values.keys() == peft.truth.keys()
    for key, value in peft.values.items():
        assert actual[key].dtype == value.dtype, key
        budget = 2 * max_error(value, peft.truth[key])
        assert_close(key, actual[key], peft.truth[key], budget)
        if value.dtype == torch.bfloat16:
            differing = int((actual[key] != value).sum())
            assert differing <= 1 + value.numel() / 100, f"{key}: {differing} of {value.numel()}"


def read_weight_map(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    return weight_map


def merge_and_read(folder: Path, **options: Any) -> dict[str, Tensor]:
    merge_adapter(folder / BASE, folder / ADAPTER, folder / "out", **{"max_bytes": SLAB, **options})
    return read_all(folder / "out")


def assert_same_as_peft(folder: Path, model_class: type[PreTrainedModel]) -> dict[str, Tensor]:
    """Check that a merge of the folder equals PEFT's, and return PEFT's tensors."""
    peft, base = merge_with_peft(folder, model_class), read_all(folder / BASE)
    assert any(not torch.equal(peft.values[key], base[key]) for key in peft.values if key in base)
    assert_merged(merge_and_read(folder), peft)
    return peft.values


# The dense modules that are adapted besides the experts, by model type.
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
def test_every_value_equals_the_value_of_peft(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model_class = write_base(tmp_path, name, dtype)
    write_adapter(tmp_path, model_class.from_pretrained(tmp_path / BASE), modules=TYPES[name])
    peft_tensors = assert_same_as_peft(tmp_path, model_class)
    base_files, files = read_weight_map(tmp_path / BASE), read_weight_map(tmp_path / "out")
    assert set(files.values()) <= set(base_files.values()) and len(set(files.values())) > 2
    # A stack that the base splits over several files is written to one; other tensors keep theirs.
    assert all(files[key] == base_files[key] for key in peft_tensors if ".experts." not in key)
    for file in ("config.json", "tokenizer.json", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / BASE / file).read_bytes()
    assert not list(tmp_path.glob(".out.partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_vision_model_is_written_in_the_hub_layout(dtype: torch.dtype, tmp_path: Path) -> None:
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
    peft, actual = PeftMerge(*map(hub_state, merged)), merge_and_read(tmp_path)
    assert sum(not torch.equal(peft.values[key], base[key]) for key in base) > 8
    assert_merged(actual, peft)
    reloaded = model_class.from_pretrained(tmp_path / "out")
    assert_merged(reloaded.state_dict(), PeftMerge(*(model.state_dict() for model in merged)))


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
def test_every_kind_of_adapter_is_merged(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, options = KINDS[kind]
    model_class = write_base(tmp_path, "qwen3_moe", dtype, **config)
    write_adapter(tmp_path, model_class.from_pretrained(tmp_path / BASE), **options)
    peft_tensors = assert_same_as_peft(tmp_path, model_class)
    assert ("lm_head.weight" in peft_tensors) == ("once tied" in kind or not config.get(*TIED))
    result = merge_adapter(tmp_path / BASE, tmp_path / ADAPTER, tmp_path / "again")
    assert any("tie_word_embeddings to false" in note for note in result.notes) == ("once" in kind)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a base, an adapter and PEFT's merge. No test changes its files."""
    folder = tmp_path_factory.mktemp("small")
    model_class = write_base(folder, "qwen3_moe", torch.float32)
    write_adapter(folder, model_class.from_pretrained(folder / BASE), modules=DENSE)
    merge_with_peft(folder, model_class)
    return folder


def read_peft_merge(inputs: Path) -> PeftMerge:
    return PeftMerge(read_all(inputs / "peft"), read_all(inputs / "truth"))


def test_an_adapter_in_several_files_is_merged(inputs: Path, tmp_path: Path) -> None:
    """transformers splits a large adapter. The base has a name on the hub and is in its cache."""
    tensors = load_file(inputs / ADAPTER / "adapter_model.safetensors")
    shutil.copytree(inputs / ADAPTER, tmp_path / ADAPTER)
    (tmp_path / ADAPTER / "adapter_model.safetensors").unlink()
    file_of = {
        key.removeprefix("base_model.model."): f"adapter_model-0000{1 + i % 2}-of-00002.safetensors"
        for i, key in enumerate(tensors)
    }
    for name in set(file_of.values()):
        part = {k: tensors[f"base_model.model.{k}"] for k, file in file_of.items() if file == name}
        save_file(part, tmp_path / ADAPTER / name)
    index = tmp_path / ADAPTER / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    cached = tmp_path / "cache" / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("f00d")
    shutil.copytree(inputs / BASE, cached / "snapshots" / "f00d")
    (tmp_path / ADAPTER / "tokenizer.json").write_text('{"of": "adapter"}')
    for name in ("chat_template.jinja", "added_tokens.json", "scheduler.pt", "README.md"):
        (tmp_path / ADAPTER / name).write_text("{}")
    _edit_json(tmp_path / ADAPTER / "adapter_config.json", base_model_name_or_path="somebody/tiny")
    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache")),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
    ):
        result = merge_adapter("somebody/tiny", tmp_path / ADAPTER, tmp_path / "out")
    assert_merged(read_all(tmp_path / "out"), read_peft_merge(inputs))
    assert result.notes == [
        "tokenizer.json comes from the base; the adapter's tokenizer.json is different",
        f"only the adapter has added_tokens.json, chat_template.jinja, so {tmp_path / 'out'} does "
        f"not; copy from {tmp_path / ADAPTER} what the model needs",
    ]


def test_a_base_whose_config_names_its_weights_is_merged(inputs: Path, tmp_path: Path) -> None:
    """The merged model has an index under the usual name, and its config names no weights."""
    base = tmp_path / BASE
    shutil.copytree(inputs / BASE, base)
    named = "other.safetensors.index.json"
    (base / "model.safetensors.index.json").rename(base / named)
    _edit_json(base / "config.json", transformers_weights=named)
    merge_adapter(base, inputs / ADAPTER, tmp_path / "out")
    assert_merged(read_all(tmp_path / "out"), read_peft_merge(inputs))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((inputs / BASE / "config.json").read_text())
    assert not (tmp_path / "out" / named).exists()


@pytest.mark.slow
def test_a_note_names_the_base_of_the_adapter(inputs: Path, tmp_path: Path) -> None:
    """The hub's name and the cache path count as the base. A base in one file gives one file."""
    for name in ("base", "Tiny", "models--somebody--Tiny/snapshots/f00d"):
        AutoModelForCausalLM.from_pretrained(inputs / BASE).save_pretrained(tmp_path / name)
    shutil.copytree(inputs / ADAPTER, tmp_path / ADAPTER)
    _edit_json(tmp_path / ADAPTER / "adapter_config.json", base_model_name_or_path="somebody/Tiny")
    for number, name in enumerate(("models--somebody--Tiny/snapshots/f00d", "Tiny", "base")):
        out = tmp_path / f"out{number}"
        result = merge_adapter(tmp_path / name, tmp_path / ADAPTER, out)
        assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
        assert_merged(read_all(out), read_peft_merge(inputs))
    assert result.notes == [
        f"the adapter was trained on somebody/Tiny; the merge is right if {tmp_path / BASE} "
        f"has the same values"
    ]


@pytest.mark.slow
def test_the_command_merges_and_refuses_a_target_that_exists(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["merge-adapter", *map(str, (inputs / BASE, inputs / ADAPTER, tmp_path / "out"))]
    assert cli.main(arguments) == 0
    output = capsys.readouterr()
    peft = read_peft_merge(inputs)
    assert f"{sum(tensor.nbytes for tensor in peft.values.values()):,} bytes" in output.out
    assert f"merging into {tmp_path / 'out'}: 100%" in output.err
    assert cli.main(["verify", str(tmp_path / "out")]) == 0
    assert "all right" in capsys.readouterr().out
    assert_merged(read_all(tmp_path / "out"), peft)
    assert cli.main(arguments) == 2
    assert f"target {tmp_path / 'out'} exists and is not empty" in capsys.readouterr().err


def test_the_largest_tensor_in_memory_is_a_slab(inputs: Path, tmp_path: Path) -> None:
    """The largest tensor may also be one expert or one factor, but never a whole matrix."""
    watch = LargestTensor(())

    def write(*arguments: Any, **options: Any) -> None:
        with watch:  # the model has been built before this call
            write_checkpoint(*arguments, **options)

    with mock.patch.object(merge, "write_checkpoint", write):
        merge_adapter(inputs / BASE, inputs / ADAPTER, tmp_path / "out", max_bytes=SLAB)
    parameters = list(AutoModelForCausalLM.from_pretrained(inputs / BASE).parameters())
    expert = max(p[0].nbytes for p in parameters if p.ndim == 3)  # a slab has at least one expert
    matrix = max(p.nbytes for p in parameters if p.ndim == 2)  # the embedding
    adapter = load_file(inputs / ADAPTER / "adapter_model.safetensors")
    factors = [tensor for key, tensor in adapter.items() if "lora_" in key]
    largest = max(SLAB, expert, *(tensor.nbytes for tensor in factors))
    assert largest < min(matrix, sum(factor.nbytes for factor in factors)) / 1.5
    assert watch.nbytes == largest


@pytest.mark.slow
def test_tensors_alive_at_a_write_are_small(inputs: Path, tmp_path: Path) -> None:
    with alive_at_writes() as alive:
        merge_adapter(inputs / BASE, inputs / ADAPTER, tmp_path / "out", max_bytes=SLAB)
    tensors = read_all(inputs / "peft")
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert max(alive) <= largest < sum(tensor.nbytes for tensor in tensors.values()) / 10


WIDE = {
    "num_experts": 32,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
MIB = 2**20


def _measure_peaks(rank: int, world: int, folder: Path) -> list[int]:
    return_what_is_freed()
    peaks = []
    for name, max_bytes in (("in one", 2**30), ("sliced", MIB)):  # the first includes imports
        with Resident() as resident:
            merge_adapter(folder / BASE, folder / ADAPTER, folder / name, max_bytes=max_bytes)
        peaks.append(resident.grown)
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_peak_of_memory_is_a_few_experts(dtype: torch.dtype, tmp_path: Path) -> None:
    """The experts of a stack are in five files. Resident memory is measured."""
    model = tiny_model(dtype=dtype, **WIDE)
    stack = max(parameter.nbytes for parameter in model.parameters())
    write_hub(tmp_path / BASE, model, files=5)
    with_lora(model, r=2, seed=1).save_pretrained(tmp_path / ADAPTER)
    whole_peak, sliced_peak = run_ranks(_measure_peaks, 1, tmp_path)[0]
    # 1 MiB each: a slab, its product and its sum in fp32, and the bytes read; small objects: 8 MiB.
    assert sliced_peak < 16 * MIB <= stack < whole_peak, (sliced_peak / MIB, whole_peak / MIB)
    sliced, whole = read_all(tmp_path / "sliced"), read_all(tmp_path / "in one")
    assert sliced.keys() == whole.keys()
    for key, tensor in whole.items():
        # Two sums of r = 2 products, scaled and added: 2 (r + 3) roundings of fp32; or one of bf16.
        assert_close(key, sliced[key], tensor, 10 * 2**-24 if dtype == torch.float32 else 2**-8)


@contextmanager
def failing_from(first: int, fail: Callable[[], object]) -> Iterator[None]:
    """Call `fail` before write number `first` and each later write; a copied file is a write."""
    remaining, stock_write, stock_copy = [first], Writer.write, merge._copy_small_file

    def counted(function: Any, *arguments: Any) -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            fail()
        function(*arguments)

    def write(file: Writer, *arguments: Any) -> None:
        counted(stock_write, file, *arguments)

    with (
        mock.patch.object(Writer, "write", write),
        mock.patch.object(merge, "_copy_small_file", partial(counted, stock_copy)),
    ):
        yield


def _raise_no_space() -> None:
    raise OSError("No space left on device")


def count_writes(inputs: Path, folder: Path) -> int:
    """Count the writes of tensors and the copies of files in a merge."""
    calls = [0]
    with failing_from(0, lambda: calls.append(1)):
        merge_adapter(inputs / BASE, inputs / ADAPTER, folder / "counted")
    return len(calls) - 1


@pytest.mark.slow
def test_an_error_leaves_no_files(inputs: Path, tmp_path: Path) -> None:
    total = count_writes(inputs, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    for first in (0, total // 2, total - 1):
        with failing_from(first, _raise_no_space), pytest.raises(OSError, match="No space left"):
            merge_adapter(inputs / BASE, inputs / ADAPTER, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def _merge_killed(rank: int, world: int, inputs: Path, out: Path, first: int) -> None:
    with failing_from(first, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        merge_adapter(inputs / BASE, inputs / ADAPTER, out)


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_that_loads(inputs: Path, tmp_path: Path) -> None:
    total = count_writes(inputs, tmp_path)
    for first in (0, total // 2, total - 1):
        errors = run_ranks(_merge_killed, 1, inputs, tmp_path / "out", first, expect_errors=True)
        assert errors[0][1] == "ProcessDied" and not (tmp_path / "out").exists()
    partial_folders = sorted(tmp_path.glob(".out.partial-*"))
    assert len(partial_folders) == 3
    for folder in partial_folders:
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(folder)
    result = merge_adapter(inputs / BASE, inputs / ADAPTER, tmp_path / "out")
    assert_merged(read_all(tmp_path / "out"), read_peft_merge(inputs))
    assert any(f"{partial_folders[-1]} is left from a killed run" in note for note in result.notes)


def _edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _quantize(method: str, base: Path, adapter: Path) -> None:
    _edit_json(base / "config.json", quantization_config={"quant_method": method})


def _edit_config(base: Path, adapter: Path, **values: Any) -> None:
    _edit_json(adapter / "adapter_config.json", **values)


def _save_kind(config: Any, base: Path, adapter: Path) -> None:
    shutil.rmtree(adapter)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)


def _save_for_base(base: Path, adapter: Path, **config: Any) -> None:
    shutil.rmtree(adapter)
    with_lora(tiny("qwen3_moe", dtype=torch.float32, **config), r=3).save_pretrained(adapter)


def _save_singles(base: Path, adapter: Path) -> None:
    key = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight"
    save_file({key: torch.zeros(3, 3)}, adapter / "adapter_model.safetensors")


def _swap_tensors(base: Path, adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors.pop(next(key for key in tensors if "lora_A" in key))
    save_file(tensors | {"surplus": torch.zeros(2)}, adapter / "adapter_model.safetensors")


def _pickle(base: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def _rename_attention(base: Path, adapter: Path) -> None:
    for path in base.glob("*.safetensors"):
        tensors = {key.replace("self_attn", "attention"): t for key, t in load_file(path).items()}
        save_file(tensors, path)
    weight_map = read_weight_map(base)
    renamed = {key.replace("self_attn", "attention"): file for key, file in weight_map.items()}
    (base / INDEX).write_text(json.dumps({"weight_map": renamed}))


FP8 = {"quant_method": "fp8"}
# Fields of LoraConfig whose update is more than a product of two factors.
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

# A function that spoils the base or the adapter, and a regular expression for the error.
REFUSED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "fp8": (partial(_quantize, "fp8"), r"quantized by fp8, so no adapter .* dequantize=True"),
    "mxfp4": (partial(_quantize, "mxfp4"), r"quantized by mxfp4, .*name a bf16 checkpoint"),
    "dora": (partial(_edit_config, use_dora=True), r"DoRA \(use_dora\), .*merge_and_unload"),
    "pissa": (
        partial(_edit_config, init_lora_weights="pissa"),
        r"init_lora_weights='pissa', which may change the base too; .*path_initial_model",
    ),
    "lokr": (
        partial(_save_kind, LoKrConfig(r=2, target_modules=["q_proj"])),
        r"peft_type LOKR, but only LORA is a product of two factors; merge the adapter in one",
    ),
    "prompt": (
        partial(_save_kind, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        r"is a trained prompt \(PROMPT_TUNING: .*cannot be merged into a weight",
    ),
    "shapes": (
        partial(_save_for_base, hidden_size=48),
        r"adapter does not fit .*base: misshapen \d+ tensors: .* \(3, 48\) instead of \(3, \d+\)",
    ),
    "layers": (
        partial(_save_for_base, num_hidden_layers=5),
        r"does not fit .*unexpected \d+ tensors: .*layers\.4\..*it was trained on .*: merge",
    ),
    "modules": (
        partial(_edit_config, target_modules=["c_attn"], target_parameters=None),
        r"adapter does not fit .*base: .*c_attn.* not found in the base model",
    ),
    "rank": (
        partial(_edit_config, r=8),
        r"misshapen .*\(3, \d+\) instead of \(8, .*, with the adapter_config.json that was saved",
    ),
    "tensors": (_swap_tensors, r"missing 1 tensors: .*lora.*; unexpected 1 tensors: .*surplus"),
    "single experts": (_save_singles, r"single experts, .*export-adapter .* --to fused"),
    "pickle": (_pickle, r"holds a pickle, adapter_model.bin; load it in PEFT and save it"),
    "layout": (
        _rename_attention,
        r"missing \d+ .*self_attn.*holds instead .*keys belong to another layout",
    ),
    "no adapter": (
        lambda _, adapter: shutil.rmtree(adapter),
        "is not an adapter folder: it has no",
    ),
    "no model": (
        lambda base, _: (base / "config.json").unlink(),
        "is not a model: it has no config",
    ),
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
        lambda base, _: _edit_json(base / "config.json", text_config={"quantization_config": FP8}),
        r"quantized by fp8, so no adapter can be merged",
    ),
}
REFUSED |= {
    field: (partial(_edit_config, **{field: value}), rf"LoRA with .*\({field}\), but only a pro")
    for field, value in BEYOND_A_PRODUCT.items()
    if hasattr(LoraConfig(), field)  # the oldest supported PEFT has fewer
}
FAST_REFUSED = (
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
    "case", [c if c in FAST_REFUSED else pytest.param(c, marks=pytest.mark.slow) for c in REFUSED]
)
def test_what_cannot_be_merged_is_refused(case: str, inputs: Path, tmp_path: Path) -> None:
    for name in (BASE, ADAPTER):
        shutil.copytree(inputs / name, tmp_path / name)
    spoil, words = REFUSED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spoil(tmp_path / BASE, tmp_path / ADAPTER)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=words):
        merge_adapter(tmp_path / BASE, tmp_path / ADAPTER, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_free_space_is_checked_before_the_first_write(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial-1").mkdir()
    usage = shutil.disk_usage(tmp_path)._replace(free=400_000)
    with (
        mock.patch.object(shutil, "disk_usage", return_value=usage),
        pytest.raises(ValueError, match=r"needs \d+,\d+ bytes, .*room for 400,000; .*partial-1 is"),
    ):
        merge_adapter(inputs / BASE, inputs / ADAPTER, tmp_path / "out")


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
def test_wrong_folders_are_refused(base: str, target: str, words: str, inputs: Path) -> None:
    base = os.fspath(inputs / base) if base == BASE else base
    before = sorted(inputs.rglob("*"))
    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        pytest.raises(ValueError, match=words),
    ):
        merge_adapter(base, inputs / ADAPTER, inputs / target)
    assert sorted(inputs.rglob("*")) == before


@pytest.mark.slow
def test_a_small_or_mounted_disk_is_an_error(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is too small from the start, is filled by the write, or is the target itself."""
    arguments = ["merge-adapter", *map(str, (inputs / BASE, inputs / ADAPTER))]
    with small_disk(tmp_path, 300_000):
        assert cli.main([*arguments, str(tmp_path / "out")]) == 2
        assert re.search(r"needs \d+,\d+ bytes, .* has room for \d+,\d+", capsys.readouterr().err)
        enough_space = shutil.disk_usage(tmp_path)._replace(free=2**30)
        with mock.patch.object(shutil, "disk_usage", return_value=enough_space):
            assert cli.main([*arguments, str(tmp_path / "out")]) == 2
        assert re.search(r"No space left on device: '.*\.safetensors'", capsys.readouterr().err)
        assert not list(tmp_path.iterdir())
        assert cli.main([*arguments, str(tmp_path)]) == 2
        assert f"a folder on that disk, like {tmp_path / 'model'}" in capsys.readouterr().err
