"""After the backward of a checkpointed step no activations are alive, for every model type.

The step is a plan's: it runs the code of training on tensors without memory (`planner/step.py`), as
one of two ranks with ep_size 2. A tensor that refers to the graph of a recomputed layer keeps all
activations of this layer, and then gradient checkpointing saves no memory.
"""

import pytest
import torch
from support.architectures.steps import TRAINED, build

from hf_moe_ep import ParallelConfig
from hf_moe_ep.planner.counted import OPTIMIZER, TRANSIENT
from hf_moe_ep.planner.step import Batch, plan_step

# No transformers class makes a causal LM from the config of the first. The forward of the second
# needs the value of an activation, which a plan does not have. Stock does not checkpoint the third.
NOT_PLANNED = ("diffusion_gemma_text", "glm5_next", "jetmoe")
FAST = ("qwen3_next", "deepseek_v3")
TOKENS = 64


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in TRAINED
        if name not in NOT_PLANNED
    ],
)
def test_no_activations_outlive_backward(model_type: str) -> None:
    config = build(model_type).config
    plan = plan_step(
        config,
        ParallelConfig(ep_size=2),
        world_size=2,
        batch=Batch(TOKENS, checkpointing=True),
        optimizer="none",
        like_gpu=False,
        all_layers=True,
    )
    hidden_states = TOKENS * config.get_text_config().hidden_size * torch.bfloat16.itemsize
    assert plan.peak - plan.made_of[OPTIMIZER]["parameters"] > 4 * hidden_states
    assert plan.made_of[OPTIMIZER].get(TRANSIENT, 0) < 2 * hidden_states, plan.made_of[OPTIMIZER]
