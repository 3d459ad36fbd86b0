"""A lean load leaves decoder layers on meta, and loads everything else as stock does.

WORLD_SIZE is 2 in these tests, but there is only one process, because ranks exchange nothing before
sharding. `tests/runner/test_trl_commands.py` trains such models on two ranks.
"""

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from support import architectures
from support.adapters import ATTENTION, EXPERTS
from support.architectures import MODEL_TYPES
from support.hooked import hooked
from support.needs import needs_add_adapter
from support.tiny_models import batch, tiny
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from hf_moe_ep import hub_tensors, patch, unpatch
from hf_moe_ep.checkpoints.hub.unread import read_whole
from hf_moe_ep.integrations.prepare import move_to_device
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream import loading

VOCABULARY = 103


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    models = {
        "text": tiny(dtype=torch.float32),
        "tied": tiny(dtype=torch.float32, tie_word_embeddings=True),
        "pictures": tiny("qwen3_vl_moe", dtype=torch.float32),
    }
    for name, model in models.items():
        model.save_pretrained(root / name, max_shard_size="100KB")
    return {name: root / name for name in models}


@pytest.fixture(autouse=True)
def _set_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def load_lean(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any = AutoModelForCausalLM, **kwargs: Any
) -> PreTrainedModel:
    with hooked(monkeypatch, ep_size=2, **kwargs.pop("settings", {})):
        return kind.from_pretrained(folder, **kwargs)


def list_meta_parameters(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


def assert_same_model(got: nn.Module, want: nn.Module) -> None:
    """Check that parameters, buffers and modes are equal bit by bit."""
    for kind in ("named_parameters", "named_buffers"):
        tensors, expected = dict(getattr(got, kind)()), dict(getattr(want, kind)())
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
            assert tensors[name].requires_grad == tensor.requires_grad, name
    assert got.training == want.training


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "text": ("text", AutoModelForCausalLM, {}),
    "tied": ("tied", AutoModelForCausalLM, {}),
    "rounded to bf16": ("text", AutoModelForCausalLM, {"dtype": torch.bfloat16}),
    "device_map": ("text", AutoModelForCausalLM, {"device_map": {"": "cpu"}}),
    "pictures": ("pictures", AutoModelForImageTextToText, {}),
    "pictures, rounded": ("pictures", AutoModelForImageTextToText, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_only_decoder_layers_are_unread(
    case: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the layers are read later, they have the values that stock loads."""
    name, kind, kwargs = CASES[case]
    want = kind.from_pretrained(folders[name], **kwargs)
    model = load_lean(folders[name], monkeypatch, kind, **kwargs)
    in_layers = {
        name
        for name, _ in model.named_parameters()
        if "layers." in name and "visual" not in name and "vision" not in name
    }
    assert list_meta_parameters(model) == in_layers and len(in_layers) > 15
    assert not any(buffer.is_meta for buffer in model.buffers())
    read_whole(model)
    assert_same_model(model, want)
    assert_same_model(unpatch(model), want)


def test_buffers_of_layers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3's correction biases are buffers that the checkpoint stores."""
    stock = architectures.tiny("deepseek_v3", dtype=torch.bfloat16)
    biases = [b for name, b in stock.named_buffers() if name.endswith("correction_bias")]
    assert biases and all(bias.any() for bias in biases)
    stock.save_pretrained(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load_lean(tmp_path, monkeypatch)
    assert len(list_meta_parameters(model)) > 15
    assert not any(buffer.is_meta for buffer in model.buffers())
    read_whole(model)
    assert_same_model(unpatch(model), want)


def test_why_stock_loads_all_weights(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = load_lean(folders["text"], monkeypatch, settings={"stock_load": "true"})
    assert not list_meta_parameters(model)
    assert "every process has read the whole model: --stock-load" in capsys.readouterr().err

    torch.save(tiny(dtype=torch.float32).state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((folders["text"] / "config.json").read_text())
    assert not list_meta_parameters(load_lean(tmp_path, monkeypatch))
    assert "whole model: the files are not safetensors" in capsys.readouterr().err

    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not list_meta_parameters(load_lean(folders["text"], monkeypatch))
    assert "whole model" not in capsys.readouterr().err


def test_stock_loads_weights_that_it_quantises(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    nf4 = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    model = load_lean(folders["text"], monkeypatch, **nf4)
    assert "whole model: they are quantised while they are loaded" in capsys.readouterr().err
    assert_same_model(unpatch(model), AutoModelForCausalLM.from_pretrained(folders["text"], **nf4))


def test_stock_loads_what_deepspeed_shards(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "is_deepspeed_zero3_enabled", lambda: True)
    assert not list_meta_parameters(load_lean(folders["text"], monkeypatch))
    assert "whole model: DeepSpeed loads them" in capsys.readouterr().err


def test_a_device_map_over_several_devices_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock loads such a model. Then `patch` refuses it, because a rank needs the whole model."""
    places = {"model": "cpu", "lm_head": "meta"}
    with pytest.raises(ValueError, match=r"placed parts of this model on .*load it without device"):
        load_lean(folders["text"], monkeypatch, device_map=places)


def write_two_models(folder: Path, case: str) -> dict[str, Any]:
    """Write a model to the usual files, and another model to files that the options choose."""
    tiny(dtype=torch.float32).save_pretrained(folder)
    other = tiny(seed=7, dtype=torch.float32)
    if case.startswith("variant"):
        size = "100KB" if "files" in case else "5GB"
        other.save_pretrained(folder, max_shard_size=size, variant="ema")
        return {"variant": "ema"}
    other.save_pretrained(folder / "other")
    if case == "subfolder":
        return {"subfolder": "other"}
    shutil.move(folder / "other" / "model.safetensors", folder / "other.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "other.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    return {}


@pytest.mark.parametrize(
    "case", ["variant", "variant in files", "subfolder", "named by the config"]
)
def test_the_files_that_stock_chooses_are_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder can hold several models. Layers come from the files of the embeddings."""
    options = write_two_models(tmp_path, case)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert torch.equal(want.lm_head.weight, tiny(seed=7, dtype=torch.float32).lm_head.weight)
    model = load_lean(tmp_path, monkeypatch, **options)
    assert len(list_meta_parameters(model)) > 15
    read_whole(model)
    assert_same_model(unpatch(model), want)


def test_moving_an_unsharded_model_raises(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_lean(folders["text"], monkeypatch)
    for move in (lambda: model.to("cpu"), lambda: nn.Sequential(model).to("cpu")):
        with pytest.raises(ValueError, match=r"ep_size=2, .* never sharded: .*accelerate launch"):
            move()
    with pytest.raises(ValueError, match="never sharded"):
        model(**batch(model, 2, 7))
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["text", "tied"])
def test_resized_embeddings_equal_stocks(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [
        AutoModelForCausalLM.from_pretrained(folders[name]),
        load_lean(folders[name], monkeypatch),
    ]
    for model in models:
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCABULARY)
        assert model.get_input_embeddings().weight.shape[0] == VOCABULARY
    read_whole(models[1])
    assert_same_model(*reversed(models))


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": list(ATTENTION)},
    "experts": {"target_modules": [], "target_parameters": list(EXPERTS)},
    "both": {"target_modules": list(ATTENTION), "target_parameters": list(EXPERTS)},
    "all linear": {"target_modules": "all-linear"},
    "gaussian": {"target_modules": list(ATTENTION), "init_lora_weights": "gaussian"},
    "random": {"target_modules": list(ATTENTION), "init_lora_weights": False},
    "a trained router": {"target_modules": list(ATTENTION), "modules_to_save": ["gate"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ADAPTERS)
def test_new_adapters_equal_stocks(
    case: str, dtype: torch.dtype, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factors are drawn in stock's order, in stock's dtype."""
    models = [
        AutoModelForCausalLM.from_pretrained(folders["text"], dtype=dtype),
        load_lean(folders["text"], monkeypatch, dtype=dtype),
    ]
    adapted = []
    for model in models:
        torch.manual_seed(0)
        adapted.append(get_peft_model(model, LoraConfig(r=3, **ADAPTERS[case])))
    assert list_meta_parameters(adapted[1]) and not any(
        "lora_" in name for name in list_meta_parameters(adapted[1])
    )
    read_whole(adapted[1])
    assert_same_model(*reversed(adapted))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("case", ["both", "a trained router"])
def test_loaded_adapters_equal_stocks(
    case: str,
    low_cpu_mem_usage: bool,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two adapters are loaded by PeftModel.from_pretrained and by load_adapter, in bf16.

    `modules_to_save` copies modules. A copy of an unread module cannot hold the loaded values, so
    every rank of a machine then reads the whole model.
    """
    monkeypatch.setenv("LOCAL_RANK", "1")
    base = AutoModelForCausalLM.from_pretrained(folders["text"])
    trained = get_peft_model(base, LoraConfig(r=3, **ADAPTERS[case]))
    for name in ("one", "two"):
        for parameter in trained.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        trained.save_pretrained(tmp_path / name)
    options = {"is_trainable": True, "low_cpu_mem_usage": low_cpu_mem_usage}
    adapted = []
    for load in (AutoModelForCausalLM.from_pretrained, partial(load_lean, monkeypatch=monkeypatch)):
        model = load(folders["text"], dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(model, tmp_path / "one", **options)
        model.load_adapter(tmp_path / "two", "two", **options)
        adapted.append(model)
    has_copies = case == "a trained router"
    assert bool(list_meta_parameters(adapted[1])) != has_copies
    warning = f"adapter {tmp_path}/one has values of modules_to_save"
    assert (warning in caplog.text) == has_copies
    read_whole(adapted[1])
    assert_same_model(*reversed(adapted))


@pytest.mark.parametrize("case", ["attention", "both"])
def test_adapters_that_are_merged_before_sharding_equal_stocks(
    case: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folders["text"])
    trained = get_peft_model(base, LoraConfig(r=3, **ADAPTERS[case]))
    for parameter in trained.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    trained.save_pretrained(tmp_path)
    merged: list[Any] = []
    for load in (AutoModelForCausalLM.from_pretrained, partial(load_lean, monkeypatch=monkeypatch)):
        model: Any = PeftModel.from_pretrained(load(folders["text"]), tmp_path)
        merged.append(model.merge_and_unload())
    assert not list_meta_parameters(merged[1])
    assert "because merge_and_unload changes its weights" in caplog.text
    assert_same_model(*reversed(merged))


@needs_add_adapter
@pytest.mark.parametrize("local_rank", [0, 1])
def test_an_adapter_that_transformers_loads_equals_stocks(
    local_rank: int, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """from_pretrained gets the folder of an adapter. Only the layers of its base are unread."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    base = AutoModelForCausalLM.from_pretrained(folders["text"])
    trained = get_peft_model(base, LoraConfig(r=3, **ADAPTERS["both"]))
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    trained.save_pretrained(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load_lean(tmp_path, monkeypatch)
    unread = list_meta_parameters(model)
    assert len(unread) > 15 and not any("lora_" in name for name in unread)
    read_whole(model)
    assert_same_model(model, want)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "'pissa'"),
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "DoRA"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3Config"),
    ],
)
def test_adapters_that_need_weights_make_every_process_read_them(
    config: Any,
    words: str,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapted = []
    with hooked(monkeypatch, ep_size=2):
        for settings in ({"stock_load": "true"}, {"stock_load": "false"}):
            monkeypatch.setenv("HF_MOE_EP_STOCK_LOAD", settings["stock_load"])
            model = AutoModelForCausalLM.from_pretrained(folders["text"])
            torch.manual_seed(0)
            adapted.append(get_peft_model(model, copy.deepcopy(config)))
    assert not list_meta_parameters(adapted[1])
    assert_same_model(*reversed(adapted))
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "every process reads" in x]
    assert words in line and line.endswith("needs its weights")


def test_lora_experts_extends_the_config(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second adapter with the same config gets the same parameters. The line appears once."""
    with hooked(monkeypatch, ep_size=2, lora_experts="true"):
        model = AutoModelForCausalLM.from_pretrained(folders["text"])
        config = LoraConfig(r=3, target_modules=["q_proj"])
        adapted = get_peft_model(model, config)
        adapted.add_adapter("reference", copy.deepcopy(config))
    assert set(config.target_parameters) == set(EXPERTS)
    for adapter in ("default", "reference"):
        names = [name for name, _ in adapted.named_parameters() if f".{adapter}." in name]
        assert sum("experts" in name for name in names) == 8 and len(names) == 12
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "--lora-experts:" in x]
    assert line.endswith(f"the LoraConfig also targets {', '.join(EXPERTS)}")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (LoraConfig(target_modules=["q_proj"], lora_dropout=0.1), r"lora_dropout=0\.1; set it to"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), r"has a IA3Config; train"),
    ],
)
def test_lora_experts_is_refused_if_experts_cannot_be_adapted(
    config: Any, match: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooked(monkeypatch, ep_size=2, lora_experts="true"):
        model = AutoModelForCausalLM.from_pretrained(folders["text"])
        with pytest.raises(ValueError, match=match):
            get_peft_model(model, config)


def test_writing_parameters_before_they_are_read_raises(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch ignores a write to a parameter on meta, so the written values would be lost."""
    model = load_lean(folders["text"], monkeypatch)
    nn.init.zeros_(model.lm_head.weight)  # this parameter was read already
    model.to(torch.bfloat16)  # a cast does not count as a write
    nn.init.zeros_(model.model.layers[1].mlp.experts.down_proj)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj was written "):
        read_whole(model)


def test_parameters_that_other_local_ranks_allocate_are_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On local rank 1, an allocated parameter has no values and is read. Rank 0 keeps values."""
    want = AutoModelForCausalLM.from_pretrained(folders["text"])
    for local_rank in (1, 0):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        model = load_lean(folders["text"], monkeypatch)
        experts = model.model.layers[1].mlp.experts
        experts.down_proj = nn.Parameter(torch.full_like(experts.down_proj, 7.0, device="cpu"))
        read_whole(model)
        unpatch(model)
        if local_rank == 1:
            assert_same_model(model, want)
        else:
            assert (model.model.layers[1].mlp.experts.down_proj == 7).all()


def test_copies_and_new_patches_keep_unread_layers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_lean(folders["text"], monkeypatch)
    want = AutoModelForCausalLM.from_pretrained(folders["text"])
    duplicate = copy.deepcopy(model)
    patch(model, ep_size=4)
    for other in (model, duplicate):
        state = find_state(other)
        assert state is not None and state.unread is not None and list_meta_parameters(other)
        assert_same_model(unpatch(other), want)


def test_trl_hashes_the_weights_of_unread_layers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """precompute_ref_log_probs names its cache after the weights, before the model is sharded."""
    utils = pytest.importorskip("trl.trainer.utils")
    want = utils.hash_module(AutoModelForCausalLM.from_pretrained(folders["text"]))
    model = load_lean(folders["text"], monkeypatch)
    assert list_meta_parameters(model)
    assert utils.hash_module(model) == want and not list_meta_parameters(model)


def test_a_full_evaluation_leaves_unread_layers_to_sharding(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bf16_full_eval, the Trainer moves a model to its device before it is sharded."""
    model = load_lean(folders["text"], monkeypatch)
    trainer = SimpleNamespace(is_fsdp_enabled=True)
    move_to_device(pytest.fail, trainer, model, torch.device("cpu"))
    trainer.is_fsdp_enabled = False
    with pytest.raises(ValueError, match="never sharded"):
        move_to_device(lambda _, m, device: m.to(device), trainer, model, torch.device("cpu"))


def test_unread_layers_are_listed_and_not_sent(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AsyncGRPOTrainer lists the tensors for its server before the model is sharded."""
    model = load_lean(folders["text"], monkeypatch)
    whole = hub_tensors(patch(AutoModelForCausalLM.from_pretrained(folders["text"])))
    assert hub_tensors(model).metadata_of_rank() == whole.metadata_of_rank()
    with pytest.raises(ValueError, match=r"on the meta device.*after accelerator\.prepare"):
        list(hub_tensors(model))


def test_a_conversion_on_the_host_leaves_layers_on_meta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers joins the shards of Qwen4-Exp's n-gram embedding on the CPU."""
    if "qwen4_exp_text" not in MODEL_TYPES:
        pytest.skip("this transformers has no qwen4_exp")
    architectures.tiny("qwen4_exp_text", dtype=torch.float32).save_pretrained(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load_lean(tmp_path, monkeypatch)
    assert any("ngram_embedding" in name for name in list_meta_parameters(model))
    read_whole(model)
    assert_same_model(unpatch(model), want)
