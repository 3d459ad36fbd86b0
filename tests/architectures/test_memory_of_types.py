"""Every model type can be planned, and after a checkpointed step no activations are alive.

A plan runs the code of training on tensors without memory (`planner/step.py`), as one of two ranks
with ep_size 2. If a tensor refers to the graph of a recomputed layer, all activations of this layer
stay alive, and gradient checkpointing saves no memory.
"""

import pytest
import torch
from support.architectures import MODEL_TYPES
from support.architectures.steps import build

from hf_moe_ep import ParallelConfig
from hf_moe_ep.planner.counted import OPTIMIZER, TRANSIENT
from hf_moe_ep.planner.step import Batch, plan_step

# Type -> a match of the error that refuses a plan of a step.
REFUSED = {
    "diffusion_gemma": "the forward of diffusion_gemma takes no labels",
    "diffusion_gemma_text": "no diffusion_gemma_text with a language model head",
    "glm5_next": r"glm5_next_text needs the value of an activation \(aten.nonzero",
    "jetmoe": "jetmoe needs the value of an activation",
    "openai_privacy_filter": "no openai_privacy_filter with a language model head",
}
FAST = ("deepseek_v3",)
TOKENS = 64


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in MODEL_TYPES
        if name not in REFUSED
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
        all_layers=True,
    )
    hidden_states = TOKENS * config.get_text_config().hidden_size * torch.bfloat16.itemsize
    assert plan.peak - plan.made_of[OPTIMIZER]["parameters"] > 4 * hidden_states
    assert plan.made_of[OPTIMIZER].get(TRANSIENT, 0) < 2 * hidden_states, plan.made_of[OPTIMIZER]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in REFUSED])
def test_a_step_with_split_sequences_can_be_planned(model_type: str) -> None:
    """The plan needs no value of an activation."""
    layout = ParallelConfig(ep_size=2, sp_size=2)
    plan = plan_step(build(model_type).config, layout, world_size=2, batch=Batch(TOKENS))
    assert plan.work.flops("grouped") > 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in REFUSED if name in MODEL_TYPES])
def test_a_step_that_cannot_be_planned_is_refused_by_name(model_type: str) -> None:
    config = build(model_type).config
    with pytest.raises(ValueError, match=REFUSED[model_type]):
        plan_step(config, ParallelConfig(ep_size=2), world_size=2, batch=Batch(TOKENS))
