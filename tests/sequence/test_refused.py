"""The modules that mix along the sequence are found, and some model types refuse sp_size > 1.

Sequences are gathered for modules that mix tokens without the attention interface, such as
convolutions, state space models and indexers. If the plan missed such a module, the module would
silently compute on slices.
"""

from typing import Any

import pytest
from support.architectures import MODEL_TYPES, few_fast, record_refusal, tiny
from support.architectures.mixers import MIXERS
from support.architectures.mixing import mixing
from support.architectures.parts import parts_of
from support.needs import SINCE_5_24
from support.tiny_models import tiny as tiny_qwen3_moe
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_moe_ep import patch
from hf_moe_ep.derive import is_mixer
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL
from hf_moe_ep.plan import matches

# This text model has no head, but sp_size > 1 needs a loss of tokens.
WITHOUT_HEAD = {"diffusion_gemma_text"} & {*MODEL_TYPES}
# The second tower attends to the tokens of the first tower, and their layers share all parameters.
TWO_TOWERS = {"diffusion_gemma"} & {*MODEL_TYPES}
# No module of these types mixes. They are refused only because no test compares them with stock.
NOT_COMPARED = set(MODEL_TYPES) - SEQUENCE_PARALLEL - WITHOUT_HEAD - TWO_TOWERS


def list_layers(model: nn.Module) -> list[str]:
    layers = parts_of(model).plan.layers
    return [name for name, _ in model.named_modules() if matches(layers, name)]


@pytest.mark.parametrize("model_type", few_fast(MIXERS))
def test_the_plan_names_all_mixing_modules(model_type: str) -> None:
    """The plan names every module that needs the whole sequence, and no other module."""
    model = tiny(model_type)
    plan = parts_of(model).plan
    names_and_classes = {
        (name.rpartition("layers.")[2].partition(".")[2], type(module).__name__)
        for name, module in model.named_modules()
        for pattern in plan.mixers
        if matches(pattern, name) and is_mixer(module)
    }
    assert names_and_classes == MIXERS[model_type]


# Routers of JetMoE return the tokens sorted by their experts, so a token that is changed moves the
# outputs of other tokens. In types with two towers, each tower has its own tokens.
NOT_IN_ORDER = (*TWO_TOWERS, "jetmoe")


@pytest.mark.parametrize(
    "model_type", few_fast(name for name in MODEL_TYPES if name not in NOT_IN_ORDER)
)
def test_the_table_lists_exactly_the_mixing_modules(model_type: str) -> None:
    """`mixing` changes one token, and finds the modules whose outputs change at other tokens."""
    model = tiny(model_type).eval()
    assert mixing(model, list_layers(model)) == MIXERS.get(model_type, set())


class PassesNothingOn(Qwen3MoeForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        loss = self.loss_function(logits, labels, self.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_forward_that_passes_nothing_on_to_its_loss_is_refused() -> None:
    model = PassesNothingOn(tiny_qwen3_moe().config)
    with pytest.raises(ValueError, match=r"sp_size \(2\).*PassesNothingOn passes no argument on"):
        patch(model, sp_size=2)
    patch(model)


@pytest.mark.parametrize("column", ["sp", "cp"])
@pytest.mark.parametrize("model_type", sorted(NOT_COMPARED | WITHOUT_HEAD | TWO_TOWERS))
def test_types_that_are_not_compared_with_stock_are_refused(model_type: str, column: str) -> None:
    size = f"{column}_size"
    message = rf"{size} \(2\) > 1 was not tested on {model_type}"
    if model_type in WITHOUT_HEAD:
        message = rf"{size} \(2\) > 1 needs a model that computes a loss of its tokens"
    elif model_type in TWO_TOWERS:
        message = rf"{size}=2 needs decoder layers that run once .*second tower attends"
    with pytest.raises(ValueError, match=message) as refused:
        patch(tiny(model_type), **{size: 2})
    record_refusal(model_type, column, str(refused.value))


def test_the_tables_have_only_types_of_transformers() -> None:
    if SINCE_5_24:  # older transformers lack some types, or their experts are of another kind
        assert set(MODEL_TYPES) >= SEQUENCE_PARALLEL | MIXERS.keys()
    folders = {name.removesuffix("_text").removesuffix("_mm_model") for name in MIXERS}
    assert len(SEQUENCE_PARALLEL) >= 60 and len(folders) == 27
