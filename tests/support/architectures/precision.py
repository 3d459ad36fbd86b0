"""Gradients that stock computes in fp32 even in an fp64 model. Their tolerance is 1e-6 or more.

`FP32_SUMS`: stock casts some weights of a type to fp32, so their gradients are sums over tokens in
fp32. Ranks with other tokens, or the same tokens in another order, round these sums differently.
All other gradients of such a type stay fp64. `FP32_EVERYWHERE`: the hidden states themselves are
summed in fp32, and all values after them are rounded. `test_every_model_type.py` checks both tables
by running the same sequences one by one and together.
"""

import re

from support.close import FP32_INSIDE, FP64_MODEL

_ROUTER = r"\.gate\.(weight|global_scale)$"  # F.linear(x.float(), weight.float())
_NORM = r"norm(_\w+)?\.weight$"  # (1 + weight.float()) * x.float()
_STATE = r"\.(A_log|D|dt_bias|dt_proj\.bias)$|\.forget_gate\.|\.o_norm\.weight$"
# The gradient of a scalar is a sum over all tokens and channels, in which most terms cancel.
_NUMBER = r"\.(global_scale|alpha)$"
_STREAMS = r"_hc\."  # mixes of hyper-connections

FP32_SUMS: dict[str, str] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_ocr2", "deepseek_v2", "deepseek_v3"), _ROUTER),
    **dict.fromkeys(("deepseek_v32", "dots1", "dots3_note", "dots3_note_text"), _ROUTER),
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "flint"), _ROUTER),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hy_v3"), _ROUTER),
    **dict.fromkeys(("inkling_mm_model", "inkling_text", "kimi_k25", "mimo_v2_flash"), _ROUTER),
    **dict.fromkeys(("sarvam_mla", "sarvam_moe", "solar_open", "unlimited_ocr"), _ROUTER),
    "mistral_large4": f"{_ROUTER}|{_NUMBER}",
    "longcat_flash": r"\.router\.classifier\.weight$",
    **dict.fromkeys(("cohere2_moe", "minimax_m3_vl", "minimax_m3_vl_text", "step3p7"), _NORM),
    **dict.fromkeys(("granitemoehybrid", "jamba"), _STATE),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), f"{_ROUTER}|{_STATE}"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), f"{_NORM}|{_STATE}"),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), f"{_NORM}|{_STATE}"),
    "glm5_next": f"{_ROUTER}|{_STATE}|{_STREAMS}",
    "lara_mini": f"{_ROUTER}|{_NORM}|{_STATE}",
}
# Model type -> the place where it sums hidden states in fp32.
FP32_EVERYWHERE: dict[str, str] = {
    "beam": "experts' activation and router",
    "deepseek_v4": "hyper-connections",
    "diffusion_gemma": "norms and logits",
    "diffusion_gemma_text": "norms",
    "gemma4": "norms, queries, keys and values",
    "gemma4_text": "norms, queries, keys and values",
    "hy_v4": "hyper-connections and indexer",
    "hy_v4_vl": "hyper-connections and indexer",
    "inkling2": "residual stream and experts",
    "inkling2_loop": "residual stream and experts",
    "inkling2_loop_text": "residual stream and experts",
    "inkling2_text": "residual stream and experts",
    "kolibri1": "router's logits",
    "muse_spark": "norms",
    "nemo_speechlm": "Mamba's states",
    "nemotron_h": "Mamba's states",
    "nemotron_h_omni": "Mamba's states",
    "openai_privacy_filter": "experts",
}


def budget(model_type: str, parameter: str = "") -> float:
    """Return the tolerance for a parameter's gradient, or for the loss if no parameter is named."""
    if model_type in FP32_EVERYWHERE:
        # Layers of a loop run several times, so their rounding errors grow.
        return (100 if "_loop" in model_type else 10) * FP32_INSIDE
    pattern = FP32_SUMS.get(model_type)
    if pattern is None or re.search(pattern, parameter) is None:
        return FP64_MODEL
    return FP32_INSIDE * (10 if re.search(_NUMBER, parameter) else 1)
