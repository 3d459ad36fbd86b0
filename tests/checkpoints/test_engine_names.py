"""Classes of vLLM and SGLang take every key of `hub_tensors`, and skip none.

`benchmarks/engine_names.py` and `benchmarks/sglang_names.py` have recorded what the engines do with
each key. `hub_tensors` must still yield the recorded keys. The rows "head of .." are the engines'
classes for drafts, which get the keys of a trained head for multi-token prediction. The rows
"carrier of .." are vLLM's classes for main models, which also got the keys of a head that is not
trained, and skipped these keys only.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures.models import tiny
from support.extra_files import is_of_head, load_stock, read_files, write_with_extra
from transformers import AutoModelForCausalLM

from hf_moe_ep import SyncToken, hub_tensors, patch

TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("engine_names.json").read_text()
)
ROWS = [(engine, kind) for engine, rows in TABLE.items() for kind in rows]
HEAD = "head of "
CARRIER = "carrier of "
HEADS = ("qwen3_next", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe")


def test_the_table_has_the_types_that_people_train() -> None:
    for engine in ("vllm", "sglang"):
        (rows,) = (rows for name, rows in TABLE.items() if name.startswith(engine))
        types = {name for name in rows if not name.startswith((HEAD, CARRIER))}
        assert {"qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "mixtral"} <= types
        heads = {name.removeprefix(HEAD) for name in rows if name.startswith(HEAD)}
        assert len(types) >= 12
        assert heads == set(HEADS)
    (rows,) = (rows for name, rows in TABLE.items() if name.startswith("vllm"))
    carriers = {name.removeprefix(CARRIER) for name in rows if name.startswith(CARRIER)}
    assert carriers == {*HEADS, "qwen3_5_moe"}


@pytest.mark.parametrize(("engine", "model_type"), ROWS)
def test_the_engine_takes_every_key(engine: str, model_type: str, tmp_path: Path) -> None:
    row = TABLE[engine][model_type]
    assert row["skipped"] == [] and row["unfilled"] == []
    keys = _list_keys(model_type, row.get("options", {}), tmp_path)
    assert len(keys) == row["keys"]
    assert _hash(keys) == row["sha256"]
    assert set(row.get("together", [])) <= set(keys)


@pytest.mark.parametrize("model_type", HEADS)
def test_a_saved_checkpoint_has_the_keys_of_both_classes(model_type: str, tmp_path: Path) -> None:
    """One class of vLLM takes the model, one takes the carried head; no other key is left.

    DeepSeek-V3's head is in FP8, and each of its weights has a key of scales, too.
    """
    write_with_extra(tmp_path / "base", model_type, dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model = patch(base)
    model.save_pretrained(tmp_path / "saved")
    saved = read_files(tmp_path / "saved")
    infos = {info.key: info.dtype for info in hub_tensors(model).metadata()}
    assert infos == {key: tensor.dtype for key, tensor in saved.items()}
    in_fp8 = {key for key, dtype in infos.items() if dtype == torch.float8_e4m3fn}
    scales = {f"{key}_scale_inv" for key in in_fp8}
    assert scales <= saved.keys() and bool(scales) == (model_type == "deepseek_v3")
    of_head = {key for key in saved if is_of_head(key, model)}
    assert in_fp8 | scales <= of_head
    (rows,) = (rows for name, rows in TABLE.items() if name.startswith("vllm"))
    for name, keys in ((model_type, saved.keys() - of_head), (HEAD + model_type, of_head - scales)):
        assert _hash(keys) == rows[name]["sha256"]


def test_by_module_yields_all_keys_of_an_attention_in_one_list(tmp_path: Path) -> None:
    """An extra layer has scales, too, which the file does not store next to the weights."""
    write_with_extra(tmp_path, "deepseek_v3")
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path))
    lists = list(hub_tensors(model).by_module())
    keys = [key for key, _ in hub_tensors(model)]
    assert [key for tensors in lists for key, _ in tensors] == keys
    attentions = [
        {key.rpartition(".")[0].rpartition(".")[0] for key, _ in tensors}
        for tensors in lists
        if any(".self_attn." in key for key, _ in tensors)
    ]
    layers = model.config.num_hidden_layers + 1
    assert attentions == [{f"model.layers.{layer}.self_attn"} for layer in range(layers)]
    (rows,) = (rows for name, rows in TABLE.items() if name.startswith("sglang"))
    assert all(".self_attn." in key for key in rows["deepseek_v3"]["together"])


def test_a_module_is_sent_whole_if_one_of_its_tensors_has_changed() -> None:
    model, token = patch(tiny("deepseek_v3")), SyncToken()
    assert len(list(hub_tensors(model, since=token).by_module())) > 10
    with torch.no_grad():
        model.model.layers[1].self_attn.q_a_proj.weight.mul_(2)
    stream = hub_tensors(model, since=token)
    (sent,) = stream.by_module()
    keys = [key for key, _ in sent]
    assert keys == [key for key, _ in hub_tensors(model) if "layers.1.self_attn." in key]
    assert keys == [info.key for info in stream.metadata()] and len(keys) > 5


def _hash(keys: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()


def _list_keys(model_type: str, options: dict[str, Any], folder: Path) -> list[str]:
    """List the sorted keys that `hub_tensors` yields for a row of the table."""
    if model_type.startswith(CARRIER):
        write_with_extra(folder, model_type.removeprefix(CARRIER), dtype=torch.bfloat16)
        model = patch(load_stock(folder, dtype=torch.bfloat16))
        return sorted(info.key for info in hub_tensors(model).metadata())
    if not model_type.startswith(HEAD):
        model = patch(tiny(model_type, dtype=torch.bfloat16, **options))
        return sorted(info.key for info in hub_tensors(model).metadata())
    kind = model_type.removeprefix(HEAD)
    write_with_extra(folder / "base", kind, dtype=torch.bfloat16, in_fp8=False)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    model = patch(base, mtp_layers=1)
    infos = hub_tensors(model, extra_tensors=False).metadata()
    return sorted(info.key for info in infos if is_of_head(info.key, model))
