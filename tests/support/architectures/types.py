"""Find the MoE types whose experts use the experts interface, or have a plan for their MoE blocks.

The interface is found by reading Transformers' files, and a plan in `model_patches`. A type may be
trained with the class of another one, such as `sarvam_moe` with that of `glm4_moe`, or have a text
model of another one, such as `kimi_k25` that of `deepseek_v3`. Types whose users choose any text
model, such as `internvl`, are not listed.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from hf_moe_ep.architectures import read_differences
from support.needs import SINCE_5_23

# The recorded results of all types, and the variable that `make architectures` sets (results.py).
RECORDED = Path(__file__).resolve().parents[2] / "architectures.json"
RECORDS = "RECORD_ARCHITECTURES"
# The first mapping that has a type names the class that is trained, a multimodal one if possible.
_HEADS = (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
# Types that no mapping has, and that can be trained nevertheless.
_HEADLESS = {"diffusion_gemma_text": "DiffusionGemmaEncoderTextModel"}
# Classes on the interface that Transformers cannot build from their own configs -> its error.
NOT_BUILT_UPSTREAM = {
    "Qwen3OmniMoeForConditionalGeneration": "shared_expert_intermediate_size",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "shared_expert_intermediate_size",
}
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
# In a config: the type of the text model, if the class of the config does not determine it.
_TEXT_TYPE = re.compile(r'"text_config": SubConfigSpec\([^()]*\bmodel_type="(\w+)"')
FAMILIES = (
    "qwen3_5_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "mixtral",
    "minimax_m2",
    "nemotron_h",
    "gemma4",
)


def _with_experts() -> dict[str, str]:
    """Return model type -> name of the class that is trained."""
    folders = Path(transformers.__file__).parent / "models"
    with_experts: set[str] = set()
    around_text: dict[str, str] = {}
    for path in folders.glob("*/modeling_*.py"):
        source = path.read_text()
        classes = _CLASS.findall(source)
        if "@use_experts_implementation" in source:
            with_experts |= {*classes}
        config = path.with_name(path.name.replace("modeling", "configuration"))
        if config.exists() and (text_type := _TEXT_TYPE.search(config.read_text())):
            around_text |= dict.fromkeys(classes, text_type[1])
    class_names, composites = {}, {}
    for model_type in CONFIG_MAPPING_NAMES:
        names = (head[model_type] for head in _HEADS if model_type in head)
        name = _HEADLESS.get(model_type) or next(names, None)
        has_plan = "block" in read_differences(model_type).fields
        if name is None or name in NOT_BUILT_UPSTREAM:
            continue
        if name in with_experts or has_plan:
            class_names[model_type] = name
        elif name in around_text and model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
            composites[model_type] = name
    composites = {n: name for n, name in composites.items() if around_text[name] in class_names}
    return class_names | composites


def _recorded() -> set[str]:
    """Return the types that have recorded results, from any version of Transformers."""
    types: dict[str, Any] = json.loads(RECORDED.read_text())["types"]
    return {
        model_type
        for model_type, columns in types.items()
        if any("none" not in result for result in columns.values())
    }


# Types outside of the experts interface, which patch() refuses (`model_patches`).
REFUSED_OUTSIDE = ("doge", "nllb-moe", "switch_transformers", "vitpose")
CLASS_NAMES = _with_experts()
# All types outside of the experts interface.
OUTSIDE = tuple(
    sorted({*REFUSED_OUTSIDE, *(x for x in CLASS_NAMES if "block" in read_differences(x).fields)})
)
INSTALLED = tuple(sorted(CLASS_NAMES))
# Types that a newer Transformers adds have no tiny configs yet, and are "not tested" on the page.
# tests/architectures/test_new_types.py derives their plans nevertheless. After their configs are
# added, `make architectures` tests all types, which records results.
_RECORDED = CLASS_NAMES.keys() if RECORDS in os.environ else _recorded()
NEW_TYPES = tuple(sorted(CLASS_NAMES.keys() - _RECORDED))
# The model needs a vision tower, which its config has not by default in older Transformers.
_NOT_BUILT = () if SINCE_5_23 else ("diffusion_gemma",)
MODEL_TYPES = tuple(name for name in INSTALLED if name not in (*NEW_TYPES, *_NOT_BUILT))


def few_fast(model_types: Iterable[str]) -> list[Any]:
    """Make parameters for `parametrize`, where all types except FAMILIES are marked slow."""
    return [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow)
        for name in model_types
    ]
