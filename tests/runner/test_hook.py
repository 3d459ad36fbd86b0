"""The hook patches each top-level MoE model that transformers returns, and no other model."""

import logging
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.hooked import hooked
from support.needs import needs_add_adapter
from support.tiny_models import tiny
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_moe_ep import patch, unpatch
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.hub import build_empty_model

DENSE = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save models with and without experts, for text, pictures and rewards, and an adapter."""
    root = tmp_path_factory.mktemp("models")
    models = {
        "text": tiny(dtype=torch.float32),
        "pictures": tiny("qwen3_vl_moe", dtype=torch.float32),
        "rewards": tiny("qwen3_moe, rewards", dtype=torch.float32, num_labels=1),
        "dense": LlamaForCausalLM(DENSE),
        "dense rewards": LlamaForSequenceClassification(DENSE),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(root / "text"), seed=0)
    adapted.save_pretrained(root / "adapter")
    return {name: root / name for name in (*models, "adapter")}


Build = Callable[[dict[str, Path]], Any]
PATCHED: dict[str, Build] = {
    "an auto class": lambda folders: AutoModelForCausalLM.from_pretrained(folders["text"]),
    "a class": lambda folders: Qwen3MoeForCausalLM.from_pretrained(folders["text"]),
    "a base model": lambda folders: AutoModel.from_pretrained(folders["text"]),
    "a model for pictures": lambda folders: AutoModelForImageTextToText.from_pretrained(
        folders["pictures"]
    ),
    "a reward model with experts": lambda folders: (
        AutoModelForSequenceClassification.from_pretrained(folders["rewards"])
    ),
    "a reward model from a language model": lambda folders: (
        AutoModelForSequenceClassification.from_pretrained(folders["text"], num_labels=1)
    ),
    "with a report of the loading": lambda folders: AutoModelForCausalLM.from_pretrained(
        folders["text"], output_loading_info=True
    )[0],
    "device_map": lambda folders: AutoModelForCausalLM.from_pretrained(
        folders["text"], device_map={"": "cpu"}
    ),
    "a device": lambda folders: AutoModelForCausalLM.from_pretrained(
        folders["text"], device_map="cpu"
    ),
    "the meta device": lambda folders: AutoModelForCausalLM.from_pretrained(
        folders["text"], device_map="meta"
    ),
    "an auto class, from_config": lambda folders: AutoModelForCausalLM.from_config(
        tiny(num_hidden_layers=1).config
    ),
    "a class, from_config": lambda folders: Qwen3MoeForCausalLM._from_config(
        tiny(num_hidden_layers=1).config
    ),
    "a model with parts, from_config": lambda folders: AutoModelForImageTextToText.from_config(
        tiny("qwen3_vl_moe").config
    ),
}


@pytest.mark.filterwarnings("ignore:.*newly initialized")
@pytest.mark.parametrize("case", PATCHED)
def test_a_top_level_model_is_patched(
    case: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooked(monkeypatch, ep_size=2, dispatch_chunks=3):
        model = PATCHED[case](folders)
    state = vars(model)["_hf_moe_ep"]  # of the whole model, not of a part
    assert (state.config.ep_size, state.config.dispatch_chunks) == (2, 3)
    assert state.is_reported and not state.adapts_experts


@needs_add_adapter
def test_a_model_with_an_adapter_that_transformers_loads_is_patched(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folders["adapter"])
    with hooked(monkeypatch, ep_size=2):
        model = AutoModelForCausalLM.from_pretrained(folders["adapter"])
    assert find_state(model) is not None
    want = {name: p for name, p in stock.named_parameters() if "lora_" in name}
    assert len(want) == 16
    for name, parameter in model.named_parameters():
        if name in want:
            assert torch.equal(parameter, want[name])


class ModelAroundModel(PreTrainedModel):
    """A model that builds another model in its constructor."""

    config_class = Qwen3MoeConfig
    _supports_sdpa = True

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config)
        self.inside = AutoModel.from_config(config)
        self.post_init()


def build_in_package(package: str, folders: dict[str, Path]) -> Any:
    """Load a model in a function that belongs to another package."""
    namespace: dict[str, Any] = {"__name__": f"{package}.worker"}
    exec("def build(make, argument):\n    return make(argument)\n", namespace)
    return namespace["build"](PATCHED["an auto class"], folders)


NOT_PATCHED: dict[str, Build] = {
    "a part of another model": lambda folders: (
        ModelAroundModel(tiny(num_hidden_layers=1).config).inside
    ),
    "in vLLM": lambda folders: build_in_package("vllm", folders),
    "in SGLang": lambda folders: build_in_package("sglang", folders),
    "in llm-compressor": lambda folders: build_in_package("llmcompressor", folders),
    "in GPTQModel": lambda folders: build_in_package("gptqmodel", folders),
    "in AutoRound": lambda folders: build_in_package("auto_round", folders),
    "by hf_moe_ep": lambda folders: build_empty_model(
        folders["text"], None, torch.get_default_dtype, {}
    ),
    "a constructor": lambda folders: Qwen3MoeForCausalLM(tiny(num_hidden_layers=1).config),
}


@pytest.mark.parametrize("case", NOT_PATCHED)
def test_another_model_is_not_patched(
    case: str,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with hooked(monkeypatch, ep_size=2):
        model = NOT_PATCHED[case](folders)
    assert find_state(model) is None
    assert "hf-moe-ep run" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dense", AutoModelForCausalLM), ("dense rewards", AutoModelForSequenceClassification)],
)
def test_a_dense_model_is_left_alone_with_one_warning(
    name: str,
    kind: Any,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A reward model that a trainer loads in addition to its policy may have no experts."""
    with hooked(monkeypatch, ep_size=2):
        models = [kind.from_pretrained(folders[name]) for _ in range(2)]
    assert [find_state(model) for model in models] == [None, None]
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("hf-moe-ep")]
    dense = type(models[0]).__name__
    assert line == f"hf-moe-ep run: warning: {dense} has no experts, so it is not patched"
    stock = kind.from_pretrained(folders[name])
    for got, want in zip(models[0].parameters(), stock.parameters(), strict=True):
        assert torch.equal(got, want)


def test_one_line_names_the_model_and_the_options(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("hf_moe_ep.runner")
    logger.addFilter(lambda record: False)  # as axolotl's class of loggers
    monkeypatch.setattr(logger, "disabled", True)  # as logging.config.fileConfig
    with hooked(monkeypatch, ep_size=2, fused_loss="true", report="0"):
        model = AutoModelForCausalLM.from_pretrained(folders["text"])
        monkeypatch.setenv("RANK", "1")
        AutoModelForCausalLM.from_pretrained(folders["text"])
    state = find_state(model)
    assert state is not None and not state.is_reported
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("hf-moe-ep")]
    assert lines == [
        "hf-moe-ep run: patched Qwen3MoeForCausalLM (--ep-size 2 --fused-loss true --no-report): 2 "
        "MoE layers of 8 experts"
    ]


@pytest.mark.parametrize(("found", "num_warnings"), [("0.17.1", 1), ("0.19.0", 0)])
def test_one_warning_names_an_old_trainer_and_the_tested_version(
    found: str,
    num_warnings: int,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    versions = metadata.version
    monkeypatch.setattr(metadata, "version", lambda x: found if x == "axolotl" else versions(x))
    monkeypatch.setitem(sys.modules, "axolotl", ModuleType("axolotl"))
    with hooked(monkeypatch, ep_size=2):
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(folders["text"])
    words = (
        f"warning: axolotl {found} is installed, and 0.19.0 is the oldest version that was tested"
    )
    assert capsys.readouterr().err.count(words) == num_warnings
    # The warning also comes if the model cannot be patched, by the loader or from a config.
    for build in (
        lambda: AutoModelForCausalLM.from_pretrained(folders["text"]),
        lambda: AutoModelForCausalLM.from_config(tiny(num_hidden_layers=1).config),
    ):
        with hooked(monkeypatch, ep_size=3), pytest.raises(ValueError, match="must divide num_exp"):
            build()
        assert capsys.readouterr().err.count(words) == num_warnings


@pytest.mark.parametrize(
    ("settings", "world", "match"),
    [
        ({"ep_size": 3}, 3, r"ep_size \(3\) must divide num_experts \(8\) of qwen3_moe; try 1, 2,"),
        ({"ep_size": 4}, 6, r"ep_size \(4\) must divide world size / dp_replicate_size \(6 / 1 ="),
        ({"dp_replicate_size": 3}, 2, r"dp_replicate_size \(3\) must divide the world size \(2\)"),
        ({"experts_backend": "triton"}, 1, r"experts_backend='triton' cannot run"),
    ],
)
def test_wrong_sizes_are_refused_before_weights_are_read(
    settings: dict[str, Any],
    world: int,
    match: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file of the weights is damaged, so reading it would raise another error."""
    (tmp_path / "config.json").write_text((folders["text"] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with hooked(monkeypatch, **settings), pytest.raises(ValueError, match=match):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with hooked(monkeypatch, ep_size=1), pytest.raises(Exception, match=r"[Hh]eader|safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_error_leaves_transformers_as_it_was(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = PreTrainedModel._load_pretrained_model
    with hooked(monkeypatch, ep_size=3):
        for _ in range(2):
            with pytest.raises(ValueError, match="must divide num_experts"):
                AutoModelForCausalLM.from_pretrained(folders["text"])
    assert PreTrainedModel._load_pretrained_model is stock
    assert find_state(AutoModelForCausalLM.from_pretrained(folders["text"])) is None


def test_a_script_that_patches_has_the_last_word(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooked(monkeypatch, ep_size=2):
        model = AutoModelForCausalLM.from_pretrained(folders["text"])
        patch(model, ep_size=4)
    state = find_state(model)
    assert state is not None and state.config.ep_size == 4 and state.is_reported
    unpatch(model)
    assert find_state(model) is None
