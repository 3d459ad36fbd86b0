"""The tiny models of all types are a fit reference: healthy, whole, reproducible, without ties."""

import re

import pytest
import torch
import transformers
from packaging.version import Version
from support.architectures import FAMILIES, MODEL_TYPES, batch, loss_of, tiny
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING

# Of Transformers 5.23.
_KNOWN = """
afmoe aria aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 diffusion_gemma diffusion_gemma_text dots1 dots3_note
dots3_note_text ernie4_5_moe ernie4_5_vl_moe exaone_moe flex_olmo flint gemma4 gemma4_text
glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa gpt_oss granitemoe granitemoe_swa
granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling2 inkling2_text
inkling_mm_model inkling_text jamba kimi_linear kolibri1 laguna lfm2_moe mellum mimo_v2_flash
minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text mistral4 mistral_large4 mixtral muse_spark
nemotron_h olmoe openai_privacy_filter phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe
qwen3_next qwen3_omni_moe_thinker qwen3_vl_moe qwen4_exp qwen4_exp_text solar_open
unlimited_ocr zaya
"""
# One expert per token, chosen behind two GELUs whose mean outweighs what differs between tokens.
_LOPSIDED = ("zaya",)
# An indexer chooses keys by a topk: stock trains it by no loss that reaches it.
_WITHOUT_GRADIENT = re.compile(r"\.indexer\.")


_TO_COME = {name for name in MODEL_TYPES if "text_config" in CONFIG_MAPPING[name].sub_configs}


class _Margins(TorchFunctionMode):
    """The least distance, over all tokens, of the last expert chosen to the first that is not."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.least: list[float] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            values = args[0].detach()
            k = out.values.shape[-1]
            if values.shape[-1] == self.num_experts > k:
                ordered = values.sort(-1, descending=True).values
                self.least.append((ordered[..., k - 1] - ordered[..., k]).min().item())
        return out


def _experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if "has_gate" in vars(module)}


def _check(model_type: str) -> None:
    model = tiny(model_type)
    experts = _experts_of(model)
    assert len(experts) >= 2, f"{model_type}: experts in {list(experts)}"
    inputs = batch(model, 4, 31, seed=1, pad=4)
    with _Margins(8) as margins:
        loss = loss_of(model, inputs)
    assert loss.isfinite(), f"{model_type}: loss {loss}"
    assert min(margins.least, default=1.0) > 1e-7, f"{model_type}: ties in routing"
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not _WITHOUT_GRADIENT.search(name):
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-9, (
                f"{model_type}: {name} has no gradient"
            )
    for name, module in experts.items():
        for part, parameter in module.named_parameters():
            per_expert = parameter.grad.flatten(1).abs().amax(1)
            used = (per_expert > 0).view(2, -1)  # by half: what two ranks hold
            enough = used.any(1) if model_type in _LOPSIDED else used
            assert enough.all(), f"{model_type}: {name}.{part} by expert: {per_expert}"
    again = tiny(model_type)
    second = loss_of(again, inputs)
    second.backward()
    assert torch.equal(loss, second), f"{model_type}: {loss} and then {second}"
    for (name, first), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(first, other), f"{model_type}: another {name}"
        if first.grad is not None:
            assert torch.equal(first.grad, other.grad), f"{model_type}: another gradient of {name}"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(MODEL_TYPES) - _TO_COME))
def test_a_step_of_stock(model_type: str) -> None:
    """fp64 forward and backward reach every parameter and expert, twice the same, without ties."""
    _check(model_type)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_of_stock_of_eight_families(model_type: str) -> None:
    _check(model_type)


def test_no_type_is_missing() -> None:
    """Types are found in Transformers' own files and auto classes; this names those of 5.23."""
    if Version(transformers.__version__).release[:2] == (5, 23):
        assert set(MODEL_TYPES) == set(_KNOWN.split())
    assert set(MODEL_TYPES) >= {"qwen3_moe", "qwen3_vl_moe", "mixtral"}
