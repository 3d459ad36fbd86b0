"""What some tests need of the versions at hand; a text is what is lacking, or empty."""

from inspect import signature

import pytest
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

# Older ones run the vision tower inside the model's forward, and `patch` refuses it.
VISION = "mm_encoder_outputs" in signature(Qwen3VLMoeModel.forward).parameters
VISION_MODEL = "" if VISION else "qwen3_vl_moe needs transformers 5.23"
needs_vision = pytest.mark.skipif(not VISION, reason=VISION_MODEL)
# Older ones checkpoint a layer's __call__, FSDP2's hooks with it: of two reentrant forwards before
# one backward FSDP2 then reduces no gradient, in plain torch too.
CHECKPOINTS_FORWARD = "__init_subclass__" in vars(GradientCheckpointingLayer)
REENTRANT_TWICE = (
    "" if CHECKPOINTS_FORWARD else "two reentrant forwards at once need transformers 5.23"
)
ARCHITECTURES = (
    "qwen3_moe",
    pytest.param("qwen3_vl_moe", marks=needs_vision),
)
