"""Model types whose sequences are not split: what mixes along them is named, all of it, and right.

Twenty-two architectures of Transformers have modules in their decoder layers that look along the
sequence past the attention interface; with text models of their own they are 28 model types.
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

# Model type, a module's place in a decoder layer, its class: as the code of Transformers has it.
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
inkling2           self_attn.k_sconv          Inkling2DynamicShortConvolution
inkling2           self_attn.k_sconv          Inkling2ShortConvolution
inkling2           self_attn.v_sconv          Inkling2DynamicShortConvolution
inkling2           self_attn.v_sconv          Inkling2ShortConvolution
inkling2_text      post_attention_convolution Inkling2ShortConvolution
inkling2_text      post_mlp_convolution       Inkling2ShortConvolution
inkling2_text      self_attn.k_sconv          Inkling2DynamicShortConvolution
inkling2_text      self_attn.k_sconv          Inkling2ShortConvolution
inkling2_text      self_attn.v_sconv          Inkling2DynamicShortConvolution
inkling2_text      self_attn.v_sconv          Inkling2ShortConvolution
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
for model_type, place, kind in map(str.split, MIXES.strip().splitlines()):
    MIXERS.setdefault(model_type, set()).add((place, kind))
FOLDERS = {name.removesuffix("_text").removesuffix("_mm_model") for name in MIXERS}
# A text model alone, and one that classifies tokens: the losses of slices are not theirs.
WITHOUT_HEAD = {"diffusion_gemma_text", "openai_privacy_filter"}
# Nothing mixes in these: that nobody has compared them with stock is the only reason.
NOT_COMPARED = (
    set(MODEL_TYPES) - SEQUENCE_PARALLEL - MIXERS.keys() - WITHOUT_HEAD - {"diffusion_gemma"}
)


def layers_of(model: nn.Module) -> list[str]:
    layers = find_plan(model).layers
    return [name for name, _ in model.named_modules() if matches(layers, name)]


@pytest.mark.parametrize("model_type", few_fast(MIXERS))
def test_what_mixes_is_refused_by_name(model_type: str) -> None:
    """Every module that would see a slice, by place and class, and nothing that is no such one."""
    with pytest.raises(ValueError, match="mixes along the sequence in") as refused:
        patch(tiny(model_type), sp_size=2)
    record_refusal(model_type, "sp", str(refused.value))
    named = (
        str(refused.value)
        .partition(" along the sequence in ")[2]
        .partition(", which does not use")[0]
    )
    found = re.findall(r"layers\.\*\.(\S+) \((\w+)\)", named)
    assert len(found) == named.count(" (") and set(found) == MIXERS[model_type], named


@pytest.mark.parametrize(
    "model_type", few_fast(name for name in MODEL_TYPES if name != "diffusion_gemma")
)
def test_what_is_named_is_what_mixes(model_type: str) -> None:
    """Of all types, by changing one token: nothing mixes in those that are split."""
    model = tiny(model_type).eval()
    assert mixing(model, layers_of(model)) == MIXERS.get(model_type, set())


@pytest.mark.parametrize("model_type", sorted(NOT_COMPARED | WITHOUT_HEAD))
def test_what_nobody_compared_is_refused(model_type: str) -> None:
    wanted = rf"sp_size \(2\) > 1 was not tested on {model_type}"
    if model_type in WITHOUT_HEAD:
        wanted = r"sp_size \(2\) > 1 needs a model with a language modelling head"
    with pytest.raises(ValueError, match=wanted) as refused:
        patch(tiny(model_type), sp_size=2)
    record_refusal(model_type, "sp", str(refused.value))


def test_every_type_is_granted_or_refused_for_one_reason() -> None:
    assert not SEQUENCE_PARALLEL & MIXERS.keys()
    if SINCE_5_23:  # older ones lack types, or have them with experts of another kind
        assert set(MODEL_TYPES) >= SEQUENCE_PARALLEL | MIXERS.keys()
    assert len(SEQUENCE_PARALLEL) >= 30
    assert len(FOLDERS) == 22
