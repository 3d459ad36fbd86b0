"""Find the MoE types whose experts use the experts interface, or have a plan for their MoE blocks.

The interface is found by reading Transformers' files, and a plan in `model_patches`.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from hf_moe_ep.architectures import differences

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
    models = Path(transformers.__file__).parent / "models"
    folders = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text()
    }
    class_names = {}
    for model_type in CONFIG_MAPPING_NAMES:
        names = (head[model_type] for head in _HEADS if model_type in head)
        name = _HEADLESS.get(model_type) or next(names, None)
        in_folder = model_type_to_module_name(model_type) in folders
        has_plan = "block" in differences(model_type).fields
        if (in_folder or has_plan) and name is not None and name not in NOT_BUILT_UPSTREAM:
            class_names[model_type] = name
    return class_names


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
    sorted({*REFUSED_OUTSIDE, *(x for x in CLASS_NAMES if "block" in differences(x).fields)})
)
INSTALLED = tuple(sorted(CLASS_NAMES))
# Types that a newer Transformers adds have no tiny configs yet, and are "not tested" on the page.
# After their configs are added, `make architectures` tests all types, which records results.
NEW_TYPES = tuple(sorted(set() if RECORDS in os.environ else CLASS_NAMES.keys() - _recorded()))
MODEL_TYPES = tuple(name for name in INSTALLED if name not in NEW_TYPES)


def few_fast(model_types: Iterable[str]) -> list[Any]:
    """Make parameters for `parametrize`, where all types except FAMILIES are marked slow."""
    return [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow)
        for name in model_types
    ]
