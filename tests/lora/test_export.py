"""Compare adapter folders that are converted between stacked and single experts with stock PEFT.

The truth is PEFT's get_delta_weight and its logits. The tests multiply the factors of a converted
folder in plain torch, as PEFT documents them: the delta of a matrix is scale * B @ A.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import EXPERTS, with_lora
from support.close import assert_close
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep.cli.main import main
from hf_moe_ep.lora.export import CONFIG, WEIGHTS, export_adapter, fuse_adapter

E, H, F = 8, 32, 24
PATTERN = {
    "rank_pattern": {"mlp.experts.gate_up_proj": 5, "mlp.experts.down_proj": 4, "q_proj": 2},
    "alpha_pattern": {r"layers\.1\.mlp\.experts\.down_proj": 7, "experts.gate_up_proj": 9},
}
# Options of with_lora for each adapter. "model" has options of the tiny model.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1, rsLoRA": {"r": 1, "use_rslora": True, "modules": ()},
    "patterns": PATTERN,
    "gate_up alone": {"parameters": EXPERTS[:1]},
    "down alone, named bare": {"parameters": ("down_proj",)},
    "one layer": {"parameters": ("layers.1.mlp.experts.gate_up_proj", EXPERTS[1])},
    "router, a layer without experts": {
        "parameters": (*EXPERTS, "mlp.gate.weight"),
        "modules": ("q_proj",),
        "model": {"mlp_only_layers": [0]},
    },
}


def save_stock(folder: Path, name: str = "qwen3_moe", **options: Any) -> peft.PeftModel:
    """Build a model with LoRA in fp64, save its adapter to `folder` and return the model."""
    base = tiny(name, **options.pop("model", {}))
    options = {"r": 3, "seed": 0} | options
    model = with_lora(base, **options)
    model.double()
    model.save_pretrained(folder)
    return model


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text())


def edit(folder: Path, **changes: Any) -> None:
    (folder / CONFIG).write_text(json.dumps(read_config(folder) | changes, indent=2))


def compute_stock_deltas(model: nn.Module) -> dict[str, Tensor]:
    """Return PEFT's delta of every stacked parameter, of shape (E, out, in)."""
    return {
        f"{name.replace('.base_layer', '')}.{module.parameter_name}": module.get_delta_weight(
            "default"
        )
        for name, module in model.named_modules()
        if type(module).__name__ == "ParamWrapper" and module.num_experts > 1
    }


def match_pattern(config: dict[str, Any], kind: str, default: str, name: str) -> Any:
    for key, matched in config[kind].items():
        if re.match(rf"(.*\.)?({key})$", name):
            return matched
    return config[default]


def read_single_deltas(folder: Path) -> dict[str, Tensor]:
    """Return scale * B @ A of every expert's matrix by module name, as servers compute it."""
    config, tensors = read_config(folder), load_file(folder / WEIGHTS)
    deltas = {}
    for key, a in tensors.items():
        if re.search(r"experts\.\d+\.\w+\.lora_A\.weight$", key):
            name = key.removesuffix(".lora_A.weight")
            assert any(name.endswith(f".{target}") for target in config["target_modules"]), name
            rank = match_pattern(config, "rank_pattern", "r", name)
            alpha = match_pattern(config, "alpha_pattern", "lora_alpha", name)
            assert a.shape[0] == rank, name
            scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            deltas[name] = scale * (tensors[f"{name}.lora_B.weight"] @ a)
    return deltas


def stack_deltas(deltas: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the deltas of single matrices. Per expert, the rows of up follow the rows of gate."""
    result = {}
    for experts in sorted({re.sub(r"\.\d+\.\w+$", "", name) for name in deltas}):
        for parameter, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            if f"{experts}.0.{parts[0]}" in deltas:
                result[f"{experts}.{parameter}"] = torch.stack(
                    [torch.cat([deltas[f"{experts}.{e}.{p}"] for p in parts]) for e in range(E)]
                )
    return result


def assert_same_deltas(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and expected
    for name, tensor in expected.items():
        # The product in fp64 may add in another order.
        assert_close(name, actual[name], tensor, 1e-15)


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def assert_same_bytes(actual: Path, expected: Path) -> None:
    copies, originals = load_file(actual / WEIGHTS), load_file(expected / WEIGHTS)
    assert copies.keys() == originals.keys()
    for name, tensor in originals.items():
        assert copies[name].dtype == tensor.dtype and copies[name].shape == tensor.shape, name
        assert to_bytes(copies[name]) == to_bytes(tensor), name


@pytest.mark.parametrize("case", CASES)
def test_export_keeps_deltas_and_fuse_restores_the_bytes(case: str, tmp_path: Path) -> None:
    model = save_stock(tmp_path / "a", **CASES[case])
    converted = export_adapter(tmp_path / "a", tmp_path / "b")
    deltas = compute_stock_deltas(model)
    assert_same_deltas(stack_deltas(read_single_deltas(tmp_path / "b")), deltas)
    layers = {name.rpartition(".")[0] for name in deltas}
    assert (converted.layers, converted.experts) == (len(layers), E)
    source = load_file(tmp_path / "a" / WEIGHTS)
    exported = load_file(tmp_path / "b" / WEIGHTS)
    copied = {name for name in source if "mlp.experts" not in name}
    assert converted.copied == len(copied) and converted.tensors == len(exported) - len(copied)
    assert all(torch.equal(exported[name], source[name]) for name in copied)
    assert converted.bytes == sum(tensor.nbytes for tensor in exported.values())
    fuse_adapter(tmp_path / "b", tmp_path / "c")
    assert_same_bytes(tmp_path / "c", tmp_path / "a")
    if "router" in case:  # PEFT saves a set of target_parameters as a list in any order
        for folder in (tmp_path / "a", tmp_path / "c"):
            edit(folder, target_parameters=sorted(read_config(folder)["target_parameters"]))
    assert (tmp_path / "c" / CONFIG).read_bytes() == (tmp_path / "a" / CONFIG).read_bytes()


@pytest.mark.parametrize("expert", ["fastest", "slowest"])
def test_the_comparison_notices_another_order_of_lora_b(expert: str, tmp_path: Path) -> None:
    """The columns of lora_B are (r, E). Read as (E, r), all sizes fit but experts are mixed."""
    deltas = compute_stock_deltas(save_stock(tmp_path / "a"))
    export_adapter(tmp_path / "a", tmp_path / "b")
    if expert == "slowest":
        source = load_file(tmp_path / "a" / WEIGHTS)
        tensors = load_file(tmp_path / "b" / WEIGHTS)
        prefix = "base_model.model.model.layers.0.mlp.experts"
        b_OER = source[f"{prefix}.lora_B.weight"].unflatten(1, (E, 3))
        for e in range(E):
            tensors[f"{prefix}.{e}.down_proj.lora_B.weight"] = b_OER[:, e].contiguous()
        save_file(tensors, tmp_path / "b" / WEIGHTS)
        with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.experts\.down_proj"):
            assert_same_deltas(stack_deltas(read_single_deltas(tmp_path / "b")), deltas)
    else:
        assert_same_deltas(stack_deltas(read_single_deltas(tmp_path / "b")), deltas)


def test_exported_factors_by_hand(tmp_path: Path) -> None:
    """The test uses the example in the docstring of per_expert.py, with H = 3 and F = 1."""
    prefix = "base_model.model.model.layers.0.mlp.experts"
    tensors = {  # an adapter on gate_up alone has one wrapper, so no "base_layer"
        f"{prefix}.lora_A.weight": torch.tensor([[1.0, 2, 3], [4, 5, 6]]),
        f"{prefix}.lora_B.weight": torch.tensor([[10.0, 20], [30, 40]]),
    }
    write(tmp_path / "a", tensors, r=1, target_parameters=["experts.gate_up_proj"])
    export_adapter(tmp_path / "a", tmp_path / "b")
    exported = load_file(tmp_path / "b" / WEIGHTS)
    assert {key.removeprefix(f"{prefix}."): t.tolist() for key, t in exported.items()} == {
        "0.gate_proj.lora_A.weight": [[1, 2, 3]],
        "0.gate_proj.lora_B.weight": [[10]],
        "0.up_proj.lora_A.weight": [[1, 2, 3]],
        "0.up_proj.lora_B.weight": [[30]],
        "1.gate_proj.lora_A.weight": [[4, 5, 6]],
        "1.gate_proj.lora_B.weight": [[20]],
        "1.up_proj.lora_A.weight": [[4, 5, 6]],
        "1.up_proj.lora_B.weight": [[40]],
    }
    targets = [f"experts.{e}.{part}" for e in range(2) for part in ("gate_proj", "up_proj")]
    assert read_config(tmp_path / "b")["target_modules"] == ["q_proj", *targets]
    assert read_config(tmp_path / "b")["target_parameters"] is None


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    defaults = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_rslora": False}
    targets = {"target_modules": ["q_proj"], "target_parameters": list(EXPERTS)}
    patterns = {"rank_pattern": {}, "alpha_pattern": {}, "lora_dropout": 0.0}
    (folder / CONFIG).write_text(json.dumps(defaults | targets | patterns | config))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe"])
def test_exported_deltas_give_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    model = save_stock(tmp_path / "a", name, modules=())
    export_adapter(tmp_path / "a", tmp_path / "b")
    plain = tiny(name)
    inputs = batch(plain, 2, 9)
    with torch.no_grad():
        expected, before = model(**inputs).logits, plain(**inputs).logits
        parameters = dict(plain.named_parameters())
        for key, delta in stack_deltas(read_single_deltas(tmp_path / "b")).items():
            parameter = parameters[key.removeprefix("base_model.model.")]
            parameter += delta if delta.shape == parameter.shape else delta.transpose(1, 2)
        assert_close("logits", plain(**inputs).logits, expected, 1e-10)
        assert (expected - before).abs().max() > 0.1, "the adapter changes them"


def test_stock_peft_opens_both_forms(tmp_path: Path) -> None:
    """PEFT >= 0.19 stacks single experts when it loads them (transformers_weight_conversion.py)."""
    model = save_stock(tmp_path / "a")
    export_adapter(tmp_path / "a", tmp_path / "b")
    fuse_adapter(tmp_path / "b", tmp_path / "c")
    inputs = batch(model, 2, 9)
    with torch.no_grad():
        for form in "bc":
            opened = peft.PeftModel.from_pretrained(tiny(), tmp_path / form).double()
            assert_close(form, opened(**inputs).logits, model(**inputs).logits, 1e-10)


@pytest.mark.parametrize("order", [EXPERTS, EXPERTS[::-1]], ids=["gate_up first", "down first"])
@pytest.mark.parametrize("reverse", [False, True], ids=["stock", "registered reversed"])
@pytest.mark.parametrize("ffn", [F, H // 2, H], ids=["F < H", "2F = H", "F = H"])
def test_wrappers_are_identified_by_their_shapes(
    order: tuple[str, ...], reverse: bool, ffn: int, tmp_path: Path
) -> None:
    """PEFT nests the wrappers in the order of named_parameters, which may differ."""
    base = tiny(moe_intermediate_size=ffn, num_hidden_layers=1)
    experts = base.model.layers[0].mlp.experts
    if reverse:
        gate_up = experts.gate_up_proj
        del experts.gate_up_proj
        experts.gate_up_proj = gate_up
    model = with_lora(base, r=3, seed=0, parameters=order, modules=()).double()
    outer = model.base_model.model.model.layers[0].mlp.experts
    assert outer.parameter_name == ("gate_up_proj" if reverse else "down_proj")
    model.save_pretrained(tmp_path / "a")
    export_adapter(tmp_path / "a", tmp_path / "b")
    assert_same_deltas(
        stack_deltas(read_single_deltas(tmp_path / "b")), compute_stock_deltas(model)
    )


def write_single_experts(folder: Path, rslora: bool = False, **config: Any) -> None:
    """Write an adapter on single experts, in which gate and up have different A."""
    torch.manual_seed(1)
    tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}"
        tensors[f"{prefix}.self_attn.q_proj.lora_A.weight"] = torch.randn(3, H)
        tensors[f"{prefix}.self_attn.q_proj.lora_B.weight"] = torch.randn(32, 3)
        for e in range(E):
            for part, (fan_in, fan_out) in {
                "gate_proj": (H, F),
                "up_proj": (H, F),
                "down_proj": (F, H),
            }.items():
                name = f"{prefix}.mlp.experts.{e}.{part}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(3, fan_in, dtype=torch.float64)
                tensors[f"{name}.lora_B.weight"] = torch.randn(fan_out, 3, dtype=torch.float64)
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    options = {"target_modules": targets, "target_parameters": None, "use_rslora": rslora}
    write(folder, tensors, **(options | config))


@pytest.mark.parametrize("rslora", [False, True], ids=["LoRA", "rsLoRA"])
def test_foreign_factors_are_stacked_exactly(rslora: bool, tmp_path: Path) -> None:
    write_single_experts(
        tmp_path / "a", rslora, alpha_pattern={r"experts\.\d+\.down_proj": 5}, lora_dropout=0.1
    )
    converted = fuse_adapter(tmp_path / "a", tmp_path / "b")
    config = read_config(tmp_path / "b")
    assert config["target_modules"] == ["q_proj"]
    assert config["target_parameters"] == list(EXPERTS)
    assert config["rank_pattern"] == {EXPERTS[0]: 6} and config["r"] == 3
    assert config["alpha_pattern"][EXPERTS[0]] == pytest.approx(6 * (2**0.5 if rslora else 2))
    assert any("lora_dropout 0.1" in note for note in converted.notes)
    assert any("vLLM" in note for note in converted.notes), "down_proj has another scale"
    opened = peft.PeftModel.from_pretrained(tiny(), tmp_path / "b").double()
    deltas = stack_deltas(read_single_deltas(tmp_path / "a"))
    for name, delta in compute_stock_deltas(opened).items():
        # alpha / sqrt(2r) has one more rounding than alpha / sqrt(r).
        assert_close(name, delta, deltas[name], 1e-14)
    inputs = batch(opened, 2, 9)
    assert torch.isfinite(opened(**inputs).logits).all()


def test_one_differing_a_doubles_the_rank(tmp_path: Path) -> None:
    save_stock(tmp_path / "a")
    export_adapter(tmp_path / "a", tmp_path / "b")
    tensors = load_file(tmp_path / "b" / WEIGHTS)
    name = "base_model.model.model.layers.1.mlp.experts.7.up_proj.lora_A.weight"
    tensors[name][2, 31] += 1
    save_file(tensors, tmp_path / "b" / WEIGHTS)
    fuse_adapter(tmp_path / "b", tmp_path / "c")
    opened = peft.PeftModel.from_pretrained(tiny(), tmp_path / "c").double()
    assert_same_deltas(
        compute_stock_deltas(opened), stack_deltas(read_single_deltas(tmp_path / "b"))
    )


@pytest.mark.parametrize(
    "limits",
    [
        {"target_modules": r".*layers\.0.*\.q_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0]},
        {
            "target_modules": ["q_proj", "k_proj"],
            "exclude_modules": ["k_proj", "1.self_attn.q_proj"],
        },
    ],
    ids=["regular expression", "layers_to_transform", "exclude_modules"],
)
def test_regexes_and_limits_become_full_names(limits: dict[str, Any], tmp_path: Path) -> None:
    save_stock(tmp_path / "a", modules=("layers.0.self_attn.q_proj",))
    edit(tmp_path / "a", **limits)
    export_adapter(tmp_path / "a", tmp_path / "b")
    fuse_adapter(tmp_path / "b", tmp_path / "c")
    config = read_config(tmp_path / "b")
    assert config["target_modules"][0] == "model.layers.0.self_attn.q_proj"
    parts = ("gate_proj", "up_proj", "down_proj")
    assert set(config["target_modules"][1:]) == {
        f"mlp.experts.{e}.{part}" for e in range(E) for part in parts
    }
    assert config["layers_to_transform"] is config["exclude_modules"] is None
    assert_same_bytes(tmp_path / "c", tmp_path / "a")
    opened = peft.PeftModel.from_pretrained(tiny(), tmp_path / "c")
    adapted = {name for name, module in opened.named_modules() if name.endswith("_proj.lora_A")}
    assert adapted == {"base_model.model.model.layers.0.self_attn.q_proj.lora_A"}


def test_other_files_dtypes_and_tensors_are_copied(tmp_path: Path) -> None:
    save_stock(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    tensors = {
        name: tensor.bfloat16() if "layers.0" in name else tensor.float()
        for name, tensor in tensors.items()
    }
    nan = torch.tensor([0x7FC1, -1], dtype=torch.int16).view(torch.bfloat16)
    tensors["base_model.model.lm_head.weight"] = nan  # modules_to_save; NaN keeps its payload
    tensors["base_model.model.score.bias"] = torch.tensor(3)
    save_file(tensors, tmp_path / "a" / WEIGHTS, metadata={"format": "pt", "who": "me"})
    (tmp_path / "a" / "tokenizer").mkdir()
    (tmp_path / "a" / "tokenizer" / "vocab.json").write_text("{}")
    (tmp_path / "a" / "adapter_model.bin").write_text("stale")
    (tmp_path / "b").mkdir()  # an empty target is allowed
    export_adapter(tmp_path / "a", tmp_path / "b")
    fuse_adapter(tmp_path / "b", tmp_path / "deep" / "c")
    names = {str(p.relative_to(tmp_path / "b")) for p in (tmp_path / "b").rglob("*") if p.is_file()}
    assert names == {CONFIG, WEIGHTS, "README.md", "tokenizer/vocab.json"}
    assert_same_bytes(tmp_path / "deep" / "c", tmp_path / "a")
    exported = load_file(tmp_path / "b" / WEIGHTS)
    assert exported["base_model.model.lm_head.weight"].view(torch.int16).tolist() == [0x7FC1, -1]
    assert {t.dtype for k, t in exported.items() if "0.mlp.experts" in k} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "deep"], "leftovers"


def set_tensor(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    full_name = next(key for key in tensors if key.endswith(name))
    del tensors[full_name]
    save_file(tensors | ({} if tensor is None else {full_name: tensor}), folder / WEIGHTS)


STACKED_ERRORS = {
    "rank": (lambda f: edit(f, r=5), "lora_A has 24 rows.*at rank 5.*correct r or rank_pattern"),
    "columns": (
        lambda f: set_tensor(f, "0.mlp.experts.lora_B.weight", torch.ones(H, 21)),
        "24 rows, lora_B has 21 columns",
    ),
    "experts": (
        lambda f: edit(f, rank_pattern={"layers.1.mlp.experts.down_proj": 6}),
        "4 experts at rank 6.*has 8",
    ),
    "targets": (
        lambda f: edit(f, target_parameters=list(EXPERTS[:1])),
        "LoRA on 2 parameters.*names 1",
    ),
    "sizes": (
        lambda f: set_tensor(f, "0.mlp.experts.base_layer.lora_A.weight", torch.ones(24, 33)),
        "33 -> 48 and 24 -> 32 are not H -> 2F and F -> H",
    ),
    "peft 0.18": (lambda f: swap_factors(f), r"48 -> 32 and 32 -> 24.*PEFT before 0\.19"),
    "magnitude": (
        lambda f: rename_tensor(f, "0.mlp.experts.lora_A.weight", "lora_A.", "lora_magnitude_"),
        "lora_magnitude_weight is not LoRA on stacked experts",
    ),
    "architecture": (
        lambda f: edit(f, auto_mapping={"parent_library": "transformers.models.gpt_oss.modeling"}),
        "adapters on single experts of 'gpt_oss' are not supported; supported: qwen3_moe",
    ),
    "base model": (lambda f: set_base(f, "gpt_oss"), "adapters on single experts of 'gpt_oss'"),
    "place": (
        lambda f: rename_tensor(f, "0.mlp.experts.lora_A.weight", "mlp", "ffn"),
        r"0\.ffn\.experts\.lora_A\.weight is not LoRA on stacked experts of 'layers",
    ),
    "peft_type": (lambda f: edit(f, peft_type="LOHA"), "'LOHA', not 'LORA'"),
    "weights": (lambda f: (f / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "config": (lambda f: (f / CONFIG).unlink(), f"has no {CONFIG}"),
    "damaged": (lambda f: (f / WEIGHTS).write_bytes(b"abc"), "cannot be read"),
}


def swap_factors(folder: Path) -> None:
    """Swap A and B as PEFT 0.17 and 0.18 do, which read a stack (E, out, in) as (E, in, out)."""
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in tensors if "experts" in name and "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = tensors[other].T.contiguous(), tensors[name].T.contiguous()
    save_file(tensors, folder / WEIGHTS)


def rename_tensor(folder: Path, end: str, old: str, new: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    full_name = next(key for key in tensors if key.endswith(end))
    tensors[full_name.replace(old, new)] = tensors.pop(full_name)
    save_file(tensors, folder / WEIGHTS)


def set_base(folder: Path, model_type: str) -> None:
    (folder.parent / "base").mkdir()
    (folder.parent / "base" / "config.json").write_text(json.dumps({"model_type": model_type}))
    edit(folder, base_model_name_or_path=str(folder.parent / "base"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "a"
    save_stock(folder)
    return folder


@pytest.mark.parametrize("case", STACKED_ERRORS)
def test_export_refuses(case: str, saved: Path, tmp_path: Path) -> None:
    spoil, message = STACKED_ERRORS[case]
    copy_folder(saved, tmp_path / "a")
    spoil(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        export_adapter(tmp_path / "a", tmp_path / "b")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("a", "base")]


def copy_folder(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


UP_A = "1.mlp.experts.7.up_proj.lora_A.weight"
SINGLE_ERRORS = {
    "an expert": (lambda f: set_tensor(f, UP_A, None), r"7\.up_proj\.lora_A.* is missing.*all 8"),
    "a rank": (lambda f: set_tensor(f, UP_A, torch.ones(4, H)), r"\[4, 32\].*\[3, 32\]"),
    "a dtype": (lambda f: set_tensor(f, UP_A, torch.ones(3, H)), r"float32.*float64"),
    "config": (lambda f: edit(f, r=4), r"has rank 3 in its file and rank and alpha \(4, 6\)"),
    "an alpha": (
        lambda f: edit(f, alpha_pattern={"experts.3.up_proj": 5}),
        r"experts\.3\.up_proj.*\(3, 5\).*\(3, 6\)",
    ),
    "DoRA": (lambda f: edit(f, use_dora=True), "no use_dora on stacked experts"),
}


@pytest.mark.parametrize("case", SINGLE_ERRORS)
def test_fuse_refuses(case: str, tmp_path: Path) -> None:
    spoil, message = SINGLE_ERRORS[case]
    write_single_experts(tmp_path / "a")
    spoil(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        fuse_adapter(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_forms_and_targets_that_are_refused(saved: Path, tmp_path: Path) -> None:
    export_adapter(saved, tmp_path / "b")
    with pytest.raises(ValueError, match=r"not LoRA on stacked experts.*fuse_adapter \(--to fused"):
        export_adapter(tmp_path / "b", tmp_path / "c")
    with pytest.raises(ValueError, match=r"not LoRA on single experts.*export_adapter \(--to per-"):
        fuse_adapter(saved, tmp_path / "c")
    for target in (saved, saved / "inside"):
        with pytest.raises(ValueError, match="is inside source"):
            export_adapter(saved, target)
    before = (tmp_path / "b" / WEIGHTS).read_bytes()
    for target in (tmp_path / "b", tmp_path / "b" / CONFIG):
        with pytest.raises(ValueError, match="exists and is not empty"):
            export_adapter(saved, target)
    assert (tmp_path / "b" / WEIGHTS).read_bytes() == before


def test_a_crash_leaves_no_target(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        assert list(tmp_path.iterdir()), "the temporary folder exists"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # the config, written last
    with pytest.raises(OSError, match="No space"):
        export_adapter(saved, tmp_path / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_converts_and_refuses(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, single, fused = str(saved), str(tmp_path / "b"), str(tmp_path / "c")
    command = [sys.executable, "-m", "hf_moe_ep", "export-adapter", source, single]
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "2 layers, 8 experts each, 96 tensors of experts, 8 copied, " in done.stdout
    assert main(["export-adapter", single, fused, "--to", "fused"]) == 0
    assert_same_bytes(Path(fused), saved)
    assert "c: 2 layers, 8 experts each, 8 tensors of experts, 8 copied" in capsys.readouterr().out
    assert main(["export-adapter", single, fused]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hf-moe-ep: error: target ") and captured.out == ""
    assert captured.err.count("\n") == 1, "no traceback"
    for wrong in (["export-adapter", source], ["export-adapter", source, fused, "--to", "x"]):
        with pytest.raises(SystemExit) as usage:
            main(wrong)
        assert usage.value.code == 2
