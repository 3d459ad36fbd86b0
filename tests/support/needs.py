"""What some tests need of the versions and the CPU at hand; a text is what is lacking, or empty."""

from inspect import signature

import peft
import pytest
import torch
import transformers.integrations.peft
from packaging.version import Version
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

# Older ones run the vision tower inside the model's forward, and `patch` refuses it.
VISION = "mm_encoder_outputs" in signature(Qwen3VLMoeModel.forward).parameters
VISION_MODEL = "" if VISION else "qwen3_vl_moe needs transformers 5.23"
needs_vision = pytest.mark.skipif(not VISION, reason=VISION_MODEL)
# model.add_adapter() of transformers asks for a PEFT of its own, 0.22 since 5.24.
_ASKED = str(getattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0"))
needs_add_adapter = pytest.mark.skipif(
    Version(peft.__version__) < Version(_ASKED),
    reason=f"model.add_adapter() of this transformers needs peft {_ASKED}",
)


def _bf16_attention_runs() -> bool:
    """With ATEN_CPU_CAPABILITY=default on a CPU with AVX-512 torch's own kernel stops."""
    x = torch.zeros(1, 1, 64, 8, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    except RuntimeError:
        return False
    return True


needs_bf16_attention = pytest.mark.skipif(
    not _bf16_attention_runs(), reason="torch's attention in bf16 does not run on this CPU"
)
ARCHITECTURES = (
    "qwen3_moe",
    pytest.param("qwen3_vl_moe", marks=needs_vision),
)
