"""Types that a newer Transformers adds get a plan before anybody has written a tiny config of them.

`make test-newest` installs the newest Transformers. The model of such a type is built on the meta
device from the default config of its class. Known types are built as well, so that the test runs
with every Transformers.
"""

import pytest
import torch
from support.architectures import NEW_TYPES, model_class
from support.architectures.types import INSTALLED
from transformers import CONFIG_MAPPING

from hf_moe_ep.architectures import find_parts, read_experts_per_token
from hf_moe_ep.derive import has_experts

# A text model, a model with pictures, and a model whose head only its text model names.
_KNOWN = ("mixtral", "qwen3_vl_moe", "nemotron_h_omni")
KNOWN = [name for name in _KNOWN if name in INSTALLED and name not in NEW_TYPES]


@pytest.mark.parametrize("model_type", [*NEW_TYPES, *KNOWN])
def test_a_plan_is_derived_from_the_default_config(model_type: str) -> None:
    """The test is skipped only if stock cannot build the model, or builds one without experts."""
    with torch.device("meta"):
        try:
            model = model_class(model_type)(CONFIG_MAPPING[model_type]())
        except (AttributeError, TypeError, ValueError) as error:
            pytest.skip(f"stock cannot build {model_type} from its default config: {error}")
    if not has_experts(model):
        pytest.skip(f"a {model_type} of the default config has no experts")
    parts = find_parts(model)
    assert parts.plan.origin.startswith("derived") and parts.plan.router, parts.plan
    assert 1 <= read_experts_per_token(model, parts.plan, parts.config) <= parts.num_experts
    without_head = type(model).__name__.endswith("Model")
    assert without_head or parts.causal_lm is not None or parts.classifier is not None
    fields = ("vision_config", "audio_config")
    if any(getattr(model.config, name, None) is not None for name in fields):
        assert parts.tower is not None or parts.encoders is not None, parts.plan
