"""Model types that refuse sp_size > 1; the error names all modules that mix along the sequence.

22 architectures of Transformers have decoder layers with such modules outside of the attention
interface (convolutions, state space models, indexers). Some have a type of their own for the text
model, so these are 28 model types.
"""

import re

import pytest
from support.architectures import MODEL_TYPES, few_fast, record_refusal, tiny
from support.architectures.mixing import mixing
from support.needs import SINCE_5_23
from torch import nn

from hf_moe_ep import patch
from hf_moe_ep.architectures import find_plan
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL
from hf_moe_ep.plan import matches

# Model type, name of a module in its decoder layer, and class of the module in Transformers.
MIXES = """
axk2               self_attn.indexer          AXK2Indexer
bailing_hybrid     self_attn                  BailingHybridDeltaAttention
deepseek_v32       self_attn.indexer          DeepseekV32Indexer
deepseek_v4        self_attn.compressor       DeepseekV4CSACompressor
deepseek_v4        self_attn.compressor       DeepseekV4HCACompressor
dots3_note         self_attn.indexer          Dots3NoteTextIndexer
dots3_note_text    self_attn.indexer          Dots3NoteTextIndexer
glm5_next          self_attn                  Glm5NextTextLinearAttention
glm5_next          self_attn.indexer          Glm5NextTextIndexer
glm_moe_dsa        self_attn.indexer          GlmMoeDsaIndexer
granitemoehybrid   mamba                      GraniteMoeHybridMambaLayer
hy_v4              self_attn.indexer          HYV4Indexer
inkling2           post_attention_convolution Inkling2ShortConvolution
inkling2           post_mlp_convolution       Inkling2ShortConvolution
inkling2           self_attn.k_proj           Inkling2KeyValueProjection
inkling2           self_attn.v_proj           Inkling2KeyValueProjection
inkling2_text      post_attention_convolution Inkling2ShortConvolution
inkling2_text      post_mlp_convolution       Inkling2ShortConvolution
inkling2_text      self_attn.k_proj           Inkling2KeyValueProjection
inkling2_text      self_attn.v_proj           Inkling2KeyValueProjection
inkling_mm_model   attn_sconv                 InklingShortConvolution
inkling_mm_model   mlp_sconv                  InklingShortConvolution
inkling_mm_model   self_attn.k_sconv          InklingShortConvolution
inkling_mm_model   self_attn.v_sconv          InklingShortConvolution
inkling_text       attn_sconv                 InklingShortConvolution
inkling_text       mlp_sconv                  InklingShortConvolution
inkling_text       self_attn.k_sconv          InklingShortConvolution
inkling_text       self_attn.v_sconv          InklingShortConvolution
jamba              mamba                      JambaMambaMixer
kimi_linear        self_attn                  KimiLinearDeltaAttention
lfm2_moe           conv                       Lfm2MoeShortConv
minimax            self_attn                  MiniMaxLightningAttention
minimax_m3_vl      self_attn.indexer          MiniMaxM3VLIndexer
minimax_m3_vl_text self_attn.indexer          MiniMaxM3VLIndexer
mistral_large4     self_attn.indexer          MistralLarge4TextIndexer
nemotron_h         mixer                      NemotronHMamba2Mixer
qwen3_5_moe        linear_attn                Qwen3_5MoeGatedDeltaNet
qwen3_5_moe_text   linear_attn                Qwen3_5MoeGatedDeltaNet
qwen3_next         linear_attn                Qwen3NextGatedDeltaNet
qwen4_exp          linear_attn                Qwen4ExpTextGatedDeltaNet
qwen4_exp          ple                        Qwen4ExpTextPLELayer
qwen4_exp          self_attn.indexer          Qwen4ExpTextQSAIndexer
qwen4_exp_text     linear_attn                Qwen4ExpTextGatedDeltaNet
qwen4_exp_text     ple                        Qwen4ExpTextPLELayer
qwen4_exp_text     self_attn.indexer          Qwen4ExpTextQSAIndexer
zaya               self_attn.qkv_proj         ZayaCCAProjection
"""
MIXERS: dict[str, set[tuple[str, str]]] = {}
for model_type, module_name, class_name in map(str.split, MIXES.strip().splitlines()):
    MIXERS.setdefault(model_type, set()).add((module_name, class_name))
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
