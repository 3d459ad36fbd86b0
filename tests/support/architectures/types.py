"""Which model types have experts on Transformers' experts interface: read from Transformers."""

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

# The first that knows a type says what is trained: the whole of a multimodal model.
_HEADS = (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
# Without a head in the auto classes, and yet a model of its own.
_HEADLESS = {"diffusion_gemma_text": "DiffusionGemmaEncoderTextModel"}
# Classes on the interface that no config of theirs builds, and the words of upstream's error.
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


def _on_the_interface() -> dict[str, str]:
    """Model type -> class that is trained, for every type whose file uses the interface."""
    models = Path(transformers.__file__).parent / "models"
    folders = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text()
    }
    found = {}
    for model_type in CONFIG_MAPPING_NAMES:
        names = (head[model_type] for head in _HEADS if model_type in head)
        name = _HEADLESS.get(model_type) or next(names, None)
        in_folder = model_type_to_module_name(model_type) in folders
        if in_folder and name is not None and name not in NOT_BUILT_UPSTREAM:
            found[model_type] = name
    return found


CLASS_NAMES = _on_the_interface()
MODEL_TYPES = tuple(sorted(CLASS_NAMES))


def few_fast(model_types: Iterable[str]) -> list[Any]:
    """Parameters for `parametrize`: types other than the families are for the full suite alone."""
    return [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow)
        for name in model_types
    ]
