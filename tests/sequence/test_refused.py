"""Model types that refuse sp_size > 1; the error names all modules that mix along the sequence.

22 architectures of Transformers have decoder layers with such modules outside of the attention
interface (convolutions, state space models, indexers). Some have a type of their own for the text
model, so these are 28 model types.
"""

import re

import pytest
from support.architectures import MODEL_TYPES, few_fast, record_refusal, tiny
from support.architectures.mixers import MIXERS
from support.architectures.mixing import mixing
from support.needs import SINCE_5_23
from torch import nn

from hf_moe_ep import patch
from hf_moe_ep.architectures import find_plan
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL
from hf_moe_ep.plan import matches

FOLDERS = {name.removesuffix("_text").removesuffix("_mm_model") for name in MIXERS}
# A text model without a head, and a token classifier: sp_size > 1 needs a language modelling head.
WITHOUT_HEAD = {"diffusion_gemma_text", "openai_privacy_filter"}
# No module mixes in these types. They are refused only because no test compares them with stock.
NOT_COMPARED = (
    set(MODEL_TYPES) - SEQUENCE_PARALLEL - MIXERS.keys() - WITHOUT_HEAD - {"diffusion_gemma"}
)


def layers_of(model: nn.Module) -> list[str]:
    layers = find_plan(model).layers
    return [name for name, _ in model.named_modules() if matches(layers, name)]


@pytest.mark.parametrize("model_type", few_fast(MIXERS))
def test_the_error_names_all_mixing_modules(model_type: str) -> None:
    """The error names every module that would need the whole sequence, and no other module."""
    with pytest.raises(ValueError, match="mixes along the sequence in") as refused:
        patch(tiny(model_type), sp_size=2)
    record_refusal(model_type, "sp", str(refused.value))
    named = (
        str(refused.value)
        .partition(" along the sequence in ")[2]
        .partition(", which does not use")[0]
    )
    names_and_classes = re.findall(r"layers\.\*\.(\S+) \((\w+)\)", named)
    assert (
        len(names_and_classes) == named.count(" (") and set(names_and_classes) == MIXERS[model_type]
    ), named


@pytest.mark.parametrize(
    "model_type", few_fast(name for name in MODEL_TYPES if name != "diffusion_gemma")
)
def test_the_table_lists_exactly_the_mixing_modules(model_type: str) -> None:
    """`mixing` changes one token and finds the modules that change at other tokens. It must find no
    module in the types that may split their sequences.
    """
    model = tiny(model_type).eval()
    assert mixing(model, layers_of(model)) == MIXERS.get(model_type, set())


@pytest.mark.parametrize("model_type", sorted(NOT_COMPARED | WITHOUT_HEAD))
def test_types_that_are_not_compared_with_stock_are_refused(model_type: str) -> None:
    message = rf"sp_size \(2\) > 1 was not tested on {model_type}"
    if model_type in WITHOUT_HEAD:
        message = r"sp_size \(2\) > 1 needs a model with a language modelling head"
    with pytest.raises(ValueError, match=message) as refused:
        patch(tiny(model_type), sp_size=2)
    record_refusal(model_type, "sp", str(refused.value))


def test_no_type_is_both_enabled_and_refused() -> None:
    assert not SEQUENCE_PARALLEL & MIXERS.keys()
    if SINCE_5_23:  # older transformers lack some types, or their experts are of another kind
        assert set(MODEL_TYPES) >= SEQUENCE_PARALLEL | MIXERS.keys()
    assert len(SEQUENCE_PARALLEL) >= 30
    assert len(FOLDERS) == 22
