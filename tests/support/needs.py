"""Requirements of some tests on installed versions and on the CPU.

Texts `NO_...` say what is missing, or are empty. Marks `needs_...` skip a test.
"""

from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature

import pytest
import torch
import transformers
import transformers.integrations.peft
from packaging.version import Version
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

# In older transformers the model's own forward runs the tower, so FSDP2 gathers the whole tower.
TOWER_IN_BLOCKS = "mm_encoder_outputs" in signature(Qwen3VLMoeModel.forward).parameters
NO_TOWER_IN_BLOCKS = "" if TOWER_IN_BLOCKS else "qwen3_vl_moe of this transformers runs its tower"
needs_tower_in_blocks = pytest.mark.skipif(not TOWER_IN_BLOCKS, reason=NO_TOWER_IN_BLOCKS)
# torch 2.11 recomputes a layer with forward's order of prefetches as well as backward's.
GATHERS_TWO_UNITS = hasattr(torch.distributed, "all_gather_single")
GATHERS_THREE_UNITS = "" if GATHERS_TWO_UNITS else "this torch gathers three units in recomputes"
SINCE_5_23 = Version(transformers.__version__) >= Version("5.23")
SINCE_5_24 = Version(transformers.__version__) >= Version("5.24")
# The PEFT version that model.add_adapter() of transformers needs: 0.22 since transformers 5.24.
_MIN_PEFT = str(getattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0"))
NO_ADD_ADAPTER = ""
# A GPU machine may have no PEFT, and its tests import this module.
if find_spec("peft") is None or Version(version("peft")) < Version(_MIN_PEFT):
    NO_ADD_ADAPTER = f"model.add_adapter() of this transformers needs peft {_MIN_PEFT}"
needs_add_adapter = pytest.mark.skipif(bool(NO_ADD_ADAPTER), reason=NO_ADD_ADAPTER)


def _bf16_attention_runs() -> bool:
    """Try bf16 attention: torch's kernel fails with ATEN_CPU_CAPABILITY=default and AVX-512."""
    x = torch.zeros(1, 1, 64, 8, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    except RuntimeError:
        return False
    return True


needs_bf16_attention = pytest.mark.skipif(
    not _bf16_attention_runs(), reason="torch's attention in bf16 does not run on this CPU"
)
ARCHITECTURES = ("qwen3_moe", "qwen3_vl_moe")
