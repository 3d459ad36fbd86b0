"""What some tests need of the versions at hand; a text is what is lacking, or empty."""

from inspect import signature

import pytest
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

# Older ones run the vision tower inside the model's forward, and `patch` refuses it.
VISION = "mm_encoder_outputs" in signature(Qwen3VLMoeModel.forward).parameters
VISION_MODEL = "" if VISION else "qwen3_vl_moe needs transformers 5.23"
needs_vision = pytest.mark.skipif(not VISION, reason=VISION_MODEL)
ARCHITECTURES = (
    "qwen3_moe",
    pytest.param("qwen3_vl_moe", marks=needs_vision),
)
