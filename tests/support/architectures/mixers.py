"""The modules of decoder layers that mix tokens outside of the attention interface (`MIXERS`).

27 architectures of Transformers have such modules: convolutions, state space models, indexers. Some
have a type of their own for the text model, so these are 34 model types. test_refused.py compares
this table with the behaviour of the modules and with the derived plans.
"""

from torch import nn

from hf_moe_ep.sequence.attach import group_mixers_by_split
from hf_moe_ep.sequence.mixers import MixerSplit
from support.architectures.parts import parts_of

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
hy_v4_vl           self_attn.indexer          HYV4VLIndexer
inkling2           post_attention_convolution Inkling2ShortConvolution
inkling2           post_mlp_convolution       Inkling2ShortConvolution
inkling2           self_attn.k_proj           Inkling2KeyValueProjection
inkling2           self_attn.v_proj           Inkling2KeyValueProjection
inkling2_loop      post_attention_convolution Inkling2LoopShortConvolution
inkling2_loop      post_mlp_convolution       Inkling2LoopShortConvolution
inkling2_loop      self_attn.k_proj           Inkling2LoopKeyValueProjection
inkling2_loop      self_attn.v_proj           Inkling2LoopKeyValueProjection
inkling2_loop_text post_attention_convolution Inkling2LoopShortConvolution
inkling2_loop_text post_mlp_convolution       Inkling2LoopShortConvolution
inkling2_loop_text self_attn.k_proj           Inkling2LoopKeyValueProjection
inkling2_loop_text self_attn.v_proj           Inkling2LoopKeyValueProjection
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
lara_mini          linear_attn                LaraMiniGatedDeltaNet
lfm2_moe           conv                       Lfm2MoeShortConv
minimax            self_attn                  MiniMaxLightningAttention
minimax_m3_vl      self_attn.indexer          MiniMaxM3VLIndexer
minimax_m3_vl_text self_attn.indexer          MiniMaxM3VLIndexer
mistral_large4     self_attn.indexer          MistralLarge4TextIndexer
nemo_speechlm      mixer                      NemotronHMamba2Mixer
nemotron_h         mixer                      NemotronHMamba2Mixer
nemotron_h_omni    mixer                      NemotronHMamba2Mixer
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


def gathered_names(model: nn.Module) -> list[str]:
    """List the modules of a model for which sequences or keys are gathered, as Markdown."""
    mixers = group_mixers_by_split(parts_of(model))
    names = [f"`{name}` ({kind})" for name, kind in mixers.get(MixerSplit.WHOLE, ())]
    keys = [f"`{name}` ({kind}), only keys" for name, kind in mixers.get(MixerSplit.QUERIES, ())]
    return names + keys
