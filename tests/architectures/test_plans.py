"""The derived plan of each model type equals a table that was made without the derivation.

The table was made once, for Transformers 5.23.0: a model of each type was built with its default
config, and its module names and source code were read. Where a derived plan differs from the table,
`DIFFERENCES` or `STORED_OTHERWISE` gives the reason.
"""

import re
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, few_fast, model_class, tiny_config
from support.architectures.parts import parts_of
from transformers import PreTrainedConfig

from hf_moe_ep import patch
from hf_moe_ep.architectures import Parts, read_differences
from hf_moe_ep.checkpoints.hub.layout import find_hub_layout, list_distinct_tensors
from hf_moe_ep.plan import ModelPlan

# The columns of the table ("-" is none):
#
# model type
# scope         text: a text model; whole: the decoder is the module language_model
# experts       module name in a layer (several sets of experts: +)
# attention     module name in a layer
# final norm    module name
# num_experts   the config field with the number of experts
# aux loss      the config with router_aux_loss_coef: of the model (self) or its text_config (text)
# MoE layers    a rule of `_count_moe_layers`
MODULES = """
afmoe                  text  mlp.experts      self_attn norm num_experts       -    num_dense
aria                   whole mlp.experts      self_attn norm moe_num_experts   -    all
aria_text              text  mlp.experts      self_attn norm moe_num_experts   -    all
axk1                   text  mlp.experts      self_attn norm num_local_experts -    sparse
axk2                   text  mlp.experts      self_attn norm num_local_experts -    sparse
bailing_hybrid         text  mlp.experts      -         norm num_local_experts -    sparse
beam                   text  mlp.experts      self_attn norm num_experts       -    sparse
cohere2_moe            text  mlp.experts      self_attn norm num_experts       -    sparse
dbrx      text ffn.experts norm_attn_norm.attn norm_f num_experts       self all
deepseek_ocr2          whole mlp.experts      self_attn norm num_experts       -    sparse
deepseek_v2            text  mlp.experts      self_attn norm num_experts       -    first_k
deepseek_v3            text  mlp.experts      self_attn norm num_local_experts -    first_k
deepseek_v32           text  mlp.experts      self_attn norm num_local_experts -    sparse
deepseek_v4            text  mlp.experts      self_attn norm num_local_experts self all
diffusion_gemma whole experts+decoder.experts decoder.self_attn norm num_experts - all
diffusion_gemma_text   text  experts          self_attn norm num_experts       -    all
dots1                  text  mlp.experts      self_attn norm num_local_experts -    first_k
dots3_note             whole mlp.experts+vision_tower self_attn norm num_local_experts -    sparse
dots3_note_text        text  mlp.experts      self_attn norm num_local_experts -    sparse
ernie4_5_moe           text  mlp.experts      self_attn norm num_experts       self interval
ernie4_5_vl_moe whole mlp.text_moe.experts+vision_moe.experts self_attn norm num_experts self sparse
exaone_moe             text  mlp.experts      self_attn norm num_experts       -    sparse
flex_olmo              text  mlp.experts      self_attn norm num_local_experts self all
flint                  text  mlp.experts      self_attn norm num_experts       self step
gemma4                 whole experts          self_attn norm num_experts       -    all
gemma4_text            text  experts          self_attn norm num_experts       -    all
glm4_moe               text  mlp.experts      self_attn norm num_local_experts -    first_k
glm4_moe_lite          text  mlp.experts      self_attn norm num_local_experts -    sparse
glm4v_moe              whole mlp.experts      self_attn norm num_local_experts text first_k
glm5_next              whole mlp.experts      -         norm num_local_experts self sparse
glm_moe_dsa            text  mlp.experts      self_attn norm num_local_experts -    sparse
gpt_oss                text  mlp.experts      self_attn norm num_local_experts self all
granitemoe             text  block_sparse_moe.experts self_attn norm num_local_experts self all
granitemoe_swa         text  block_sparse_moe.experts self_attn norm num_local_experts self all
granitemoehybrid       text  block_sparse_moe.experts -         norm num_local_experts self all
granitemoeshared       text  block_sparse_moe.experts self_attn norm num_local_experts self all
hunyuan_v1_moe         text  mlp.experts      self_attn norm num_local_experts -    all
hy_v3                  text  mlp.experts      self_attn norm num_experts       -    sparse
hy_v4                  text  mlp.experts      self_attn norm num_local_experts -    sparse
hy_v4_vl               whole mlp.experts      self_attn norm num_local_experts -    sparse
inkling2               whole mlp.experts      self_attn norm n_routed_experts  -    all
inkling2_loop          whole mlp.experts      self_attn norm n_routed_experts  -    all
inkling2_loop_text     text  mlp.experts      self_attn norm n_routed_experts  -    all
inkling2_text          text  mlp.experts      self_attn norm n_routed_experts  -    all
inkling_mm_model       whole mlp.experts      self_attn norm n_routed_experts  -    sparse
inkling_text           text  mlp.experts      self_attn norm n_routed_experts  -    sparse
jamba text feed_forward.experts self_attn final_layernorm num_local_experts self period
jetmoe            text mlp.experts self_attention norm num_local_experts self all
kimi_linear            text  mlp.experts      -         norm num_local_experts -    sparse
kimi_k25               whole mlp.experts      self_attn norm num_local_experts -    first_k
kolibri1               text  mlp.experts      self_attn norm num_experts       -    all
laguna                 text  mlp.experts      self_attn norm num_experts       self sparse
lara_mini              text  mlp.experts      self_attn norm num_experts       self all
lfm2_moe text feed_forward.experts self_attn embedding_norm num_experts - num_dense
llama4           whole feed_forward.experts self_attn model.norm num_local_experts - moe_layers
llama4_text       text feed_forward.experts self_attn norm num_local_experts       - moe_layers
longcat_flash          text  mlp.experts      self_attn.* norm num_local_experts   - blocks_of_two
mellum                 text  mlp.experts      self_attn norm num_experts       self sparse
mimo_v2_flash          text  mlp.experts      self_attn norm num_local_experts -    sparse
minimax                text  mlp.experts      -         norm num_local_experts self all
minimax_m2             text  mlp.experts      self_attn norm num_local_experts self all
minimax_m3_vl          whole mlp.experts      self_attn norm num_local_experts text sparse
minimax_m3_vl_text     text  mlp.experts      self_attn norm num_local_experts self sparse
mistral4               text  mlp.experts      self_attn norm num_local_experts -    first_k
mistral_large4         whole mlp.experts      self_attn norm num_local_experts -    sparse
mixtral                text  mlp.experts      self_attn norm num_local_experts self all
muse_spark             whole mlp.experts      self_attn norm num_local_experts -    sparse
nemo_speechlm          whole mixer.experts    -         norm_f n_routed_experts  -    blocks
nemotron_h             text  mixer.experts    -         norm_f n_routed_experts  -    blocks
nemotron_h_omni        whole mixer.experts    -         norm_f n_routed_experts  -    blocks
olmoe                  text  mlp.experts      self_attn norm num_local_experts self all
openai_privacy_filter  text  mlp.experts      self_attn norm num_local_experts -    all
phimoe                 text  mlp.experts      self_attn norm num_local_experts self all
qwen2_moe              text  mlp.experts      self_attn norm num_experts       self step
qwen3_5_moe            whole mlp.experts      self_attn norm num_experts       text all
qwen3_5_moe_text       text  mlp.experts      self_attn norm num_experts       self all
qwen3_moe              text  mlp.experts      self_attn norm num_experts       self step
qwen3_next             text  mlp.experts      self_attn norm num_experts       self step
qwen3_omni_moe_thinker whole mlp.experts      self_attn norm num_experts       self step
qwen3_vl_moe           whole mlp.experts      self_attn norm num_experts       text step
qwen4_exp              whole mlp.experts      self_attn -    num_experts       text all
qwen4_exp_text         text  mlp.experts      self_attn -    num_experts       self all
sarvam_mla             text  mlp.experts      self_attn norm num_local_experts -    first_k
sarvam_moe             text  mlp.experts      self_attn norm num_local_experts -    first_k
solar_open             text  mlp.experts      self_attn norm num_local_experts -    all
step3p7                whole mlp.experts      self_attn norm num_local_experts -    sparse
unlimited_ocr          whole mlp.experts      self_attn norm num_experts       -    sparse
zaya                   text  mlp.experts      self_attn norm num_experts       -    all
"""
TABLE = {row[0]: row[1:] for row in map(str.split, MODULES.strip().splitlines())}
# The stacked weights of types that have others than gate_up_proj and down_proj.
WEIGHTS = {
    "gpt_oss": ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
    "muse_spark": ("gate_up_proj", "down_proj", "post_expert_norm.weight"),
    **dict.fromkeys(("nemo_speechlm", "nemotron_h", "nemotron_h_omni"), ("up_proj", "down_proj")),
    "openai_privacy_filter": (
        "gate_up_proj",
        "gate_up_proj_bias",
        "down_proj",
        "down_proj_bias",
    ),
}
# The name of the router in a layer, if it is not "gate".
ROUTER = dict.fromkeys(
    (
        *("afmoe", "aria", "aria_text", "diffusion_gemma", "diffusion_gemma_text"),
        *("gemma4", "gemma4_text"),
        *("gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        *("jamba", "jetmoe", "llama4", "llama4_text", "longcat_flash", "openai_privacy_filter"),
        "phimoe",
    ),
    "router",
) | {"dbrx": "layer"}
# The modules outside of the decoder that encode pictures or sound, in the order of the model.
ENCODERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("aria", "deepseek_ocr2", "minimax_m3_vl", "mistral_large4", "unlimited_ocr"),
        ("vision_tower", "multi_modal_projector"),
    ),
    **dict.fromkeys(
        ("glm4v_moe", "glm5_next", "qwen3_5_moe", "qwen3_vl_moe", "qwen4_exp"), ("visual",)
    ),
    **dict.fromkeys(("llama4", "step3p7"), ("vision_model", "multi_modal_projector")),
    "dots3_note": ("vision_tower", "audio_tower"),
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "hy_v4_vl", "inkling2", "inkling2_loop"), ("vision_tower",)
    ),
    "inkling_mm_model": ("audio_tower", "vision_tower"),
    "muse_spark": ("vision_tower", "vision_adapter", "vision_projection", "audio_tower"),
    "nemo_speechlm": ("audio_tower", "multi_modal_projector", "word_timestamp_encoder"),
    "nemotron_h_omni": ("vision_model", "multi_modal_projector", "audio_tower", "embed_audio"),
    "qwen3_omni_moe_thinker": ("audio_tower", "visual"),
}
# The encoders of types whose default config, which the table describes, has no tower.
TOWERS = {
    "gemma4": ("vision_tower", "embed_vision"),
    "kimi_k25": ("vision_tower", "mm_projector"),
}
# How the hub stores the first stacked weight of a layer, for types that do not store one gate_proj
# and one up_proj per expert.
_W13 = "w1.weight + w3.weight"
STORED = {
    **dict.fromkeys(
        (
            *("diffusion_gemma", "diffusion_gemma_text", "gemma4", "gemma4_text", "gpt_oss"),
            *("granitemoe_swa", "hy_v4", "hy_v4_vl", "inkling_text", "lara_mini", "llama4"),
            *(
                "llama4_text",
                "minimax_m3_vl_text",
                "mistral4",
                "muse_spark",
                "openai_privacy_filter",
            ),
            "zaya",
        ),
        "as in memory",
    ),
    **dict.fromkeys(
        (
            *("aria", "aria_text", "deepseek_v4", "granitemoe", "granitemoehybrid"),
            *("granitemoeshared", "mistral_large4"),
        ),
        "renamed",
    ),
    **dict.fromkeys(
        ("kimi_linear", "lfm2_moe", "minimax", "minimax_m2", "minimax_m3_vl", "mixtral", "phimoe"),
        _W13,
    ),
    **dict.fromkeys(
        (
            *("inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text"),
            "inkling_mm_model",
        ),
        "interleaved",
    ),
    "dbrx": "w1 + v1",
    "ernie4_5_vl_moe": "fused and split by ERNIE's own operation",
    "jetmoe": "renamed",
    **dict.fromkeys(("nemo_speechlm", "nemotron_h", "nemotron_h_omni"), "up_proj.weight"),
    "qwen3_vl_moe": "transposed",
}
# The storage that is derived instead of STORED, and the reason.
STORED_OTHERWISE = {
    "deepseek_v4": (_W13, "the table has only the new names; experts are also stored separately"),
    "ernie4_5_vl_moe": (
        "gate_proj.weight + up_proj.weight",
        "the table names the operation; these are the tensors that it writes",
    ),
    "mistral_large4": (
        _W13,
        "the table has only the new names; experts are also stored separately",
    ),
    **dict.fromkeys(
        ("dbrx", "jetmoe"),
        (
            "as stock's own parameters",
            "stock has no stacked gate and up; a file in model_patches names its parameters",
        ),
    ),
}
# The fields of a derived plan that differ from the table, and the reason.
_FOR_SOME_LAYERS = "the table lists only attention that every layer has"
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(
        ("bailing_hybrid", "granitemoehybrid", "kimi_linear", "minimax"),
        ({"attention": "layers.*.self_attn"}, _FOR_SOME_LAYERS),
    ),
    "glm5_next": ({"attention": "language_model.layers.*.self_attn"}, _FOR_SOME_LAYERS),
    "nemo_speechlm": ({"attention": "language_model.layers.*.mixer"}, _FOR_SOME_LAYERS),
    "nemotron_h": ({"attention": "layers.*.mixer"}, _FOR_SOME_LAYERS),
    "nemotron_h_omni": (
        {
            "layers": "language_model.model.layers.*",
            "experts": "language_model.model.layers.*.mixer.experts",
            "attention": "language_model.model.layers.*.mixer",
            "final_norm": "language_model.model.norm_f",
        },
        "the language model has a head, and so a base model inside",
    ),
    "dbrx": (
        {
            "layers": "blocks.*",
            "experts": "blocks.*.ffn.experts",
            "attention": "blocks.*.norm_attn_norm.attn",
            "num_experts": None,
        },
        "the table has only layers called layers; ffn_config holds the number of experts",
    ),
    "jetmoe": ({"aux_loss_coef": "aux_loss_coef"}, "the table has only router_aux_loss_coef"),
    **{
        name: (
            {
                "layers": f"{prefix}layers.*",
                "experts": f"{prefix}layers.*.feed_forward.experts",
                "attention": f"{prefix}layers.*.self_attn",
                "final_norm": f"{prefix}norm",
            },
            "the modules do not have the prefix of the base model",
        )
        for name, prefix in (("llama4", "language_model.model."), ("llama4_text", "model."))
    },
    "diffusion_gemma": (
        {
            "layers": "encoder.language_model.layers.*",
            "tied_layers": "decoder.layers.*",
            "experts": "layers.*.experts",
            "attention": "encoder.language_model.layers.*.self_attn",
            "final_norm": "encoder.language_model.norm",
            "encoders": ("encoder.vision_tower", "encoder.embed_vision"),
        },
        "two towers share their layers; names are from the first tower, experts are in both",
    ),
    "dots3_note": (
        {"experts": "language_model.layers.*.mlp.experts"},
        "experts of the tower are left to the stock model",
    ),
    "ernie4_5_vl_moe": (
        {
            "experts": "language_model.layers.*.mlp.*.experts",
            "encoders": ("vision_tower", "resampler_model"),
        },
        "one pattern matches both sets of experts; the resampler runs only when the tower runs",
    ),
    "muse_spark": (
        {"expert_weights": ("gate_up_proj", "down_proj")},
        "all experts share the norm behind them, so it is not stacked or split",
    ),
}


def _build_expected(model_type: str) -> dict[str, Any]:
    scope, experts, attention, final_norm, num_experts, aux, _ = TABLE[model_type]
    prefix = "language_model." if scope == "whole" else ""
    layers = f"{prefix}layers.*"
    coefficients = {
        "-": None,
        "self": "router_aux_loss_coef",
        "text": "config.text_config.router_aux_loss_coef",
    }
    return {
        "layers": layers,
        "tied_layers": "",
        "experts": f"{layers}.{experts}",
        "attention": "" if attention == "-" else f"{layers}.{attention}",
        "final_norm": "" if final_norm == "-" else prefix + final_norm,
        "num_experts": num_experts,
        "aux_loss_coef": coefficients[aux],
        "expert_weights": WEIGHTS.get(model_type, ("gate_up_proj", "down_proj")),
        "encoders": ENCODERS.get(model_type, ()),
        "router": ROUTER.get(model_type, "gate"),
        **DIFFERENCES.get(model_type, ({}, ""))[0],
    }


def _count_moe_layers(rule: str, config: Any) -> int:
    """Count the layers with experts by a rule from the source code of the model type."""
    layers = range(config.num_hidden_layers)
    match rule:
        case "all":
            return len(layers)
        case "sparse":
            return list(config.mlp_layer_types).count("sparse")
        case "first_k":
            return len(layers) - int(config.first_k_dense_replace)
        case "num_dense":
            return len(layers) - int(config.num_dense_layers)
        case "step":
            step, dense = config.decoder_sparse_step, config.mlp_only_layers
            return sum(i not in dense and (i + 1) % step == 0 for i in layers)
        case "interval":
            start, end = config.moe_layer_start_index, config.moe_layer_end_index
            end = end if end >= 0 else len(layers) - 1
            return sum(
                start <= i <= end and (i + 1) % config.moe_layer_interval == 0 for i in layers
            )
        case "period":
            return sum(config.layers_num_experts[i] > 1 for i in layers)
        case "moe_layers":
            return len(config.moe_layers)
        case "blocks_of_two":
            return int(config.num_layers)
        case "blocks":
            return list(config.layers_block_type).count("moe")
    raise ValueError(rule)


def _find_parts(config: PreTrainedConfig, model_type: str) -> Parts:
    with torch.device("meta"):
        return parts_of(model_class(model_type)(config))


def test_the_table_has_every_type() -> None:
    assert set(MODEL_TYPES) <= TABLE.keys()


NOT_REFUSED = few_fast(name for name in MODEL_TYPES if not read_differences(name).refused)


@pytest.mark.parametrize("model_type", NOT_REFUSED)
def test_the_derived_plan_equals_the_table(model_type: str) -> None:
    """The model is on the meta device and has every kind of layer that the type has."""
    config = tiny_config(model_type)
    parts = _find_parts(config, model_type)
    expected = _build_expected(model_type)
    if getattr(config, "vision_config", None) is not None:
        expected["encoders"] = TOWERS.get(model_type, expected["encoders"])
    tower = parts.plan.vision
    derived = {name: getattr(parts.plan, name) for name in expected if name != "encoders"}
    derived["encoders"] = parts.plan.encoders if tower is None else (tower.tower,)
    derived["router"] = parts.plan.router.rpartition(".")[2]
    assert derived == expected
    rule = TABLE[model_type][-1]
    assert len(parts.adapted_experts) == _count_moe_layers(rule, config.get_text_config())
    assert parts.num_experts == 8


def _describe_storage(model: Any, plan: ModelPlan) -> str:
    """Describe in the words of STORED how the first layer's experts are stored."""
    shapes = {name: tuple(tensor.shape) for name, tensor in list_distinct_tensors(model).items()}
    layout = find_hub_layout(model, plan, shapes)
    ending = f"experts.{plan.expert_weights[0]}"
    pieces_of_stack = [pieces for name, pieces in layout.items() if name.endswith(ending)]
    if not pieces_of_stack:
        return "as stock's own parameters"
    first, *others = pieces_of_stack[0]
    if any(piece.key != first.key for piece in others):
        keys_of_expert_0 = [piece.key for piece in (first, *others) if piece.start[0] == 0]
        return " + ".join(re.search(r"\w+(\.weight)?$", key)[0] for key in keys_of_expert_0)
    if others:
        return "interleaved"
    if first.axes != (0, 1, 2):
        return "transposed"
    return "as in memory" if first.key.endswith(ending) else "renamed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [name for name in MODEL_TYPES if not read_differences(name).refused]
)
def test_the_storage_of_experts_on_the_hub_equals_the_table(model_type: str) -> None:
    """The layout is derived from transformers' weight conversions, or the plan states it."""
    with torch.device("meta"):
        model = model_class(model_type)(tiny_config(model_type))
    if (
        "block" in read_differences(model_type).fields
    ):  # its stacked weights exist in the patched model
        patch(model)
    in_table = STORED.get(model_type, "gate_proj.weight + up_proj.weight")
    expected, _ = STORED_OTHERWISE.get(model_type, (in_table, ""))
    assert _describe_storage(model, parts_of(model).plan) == expected
