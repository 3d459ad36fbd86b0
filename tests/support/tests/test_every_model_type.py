"""The tiny models of all types can be a reference: reproducible, without ties, all parts used."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from support.architectures import (
    FAMILIES,
    MODEL_TYPES,
    NEW_TYPES,
    NOT_BUILT_UPSTREAM,
    batch,
    loss_of,
    mixed_batch,
    takes_pictures,
    takes_sound,
    tiny,
)
from support.architectures.precision import FP32_EVERYWHERE, FP32_SUMS, budget
from support.close import max_error
from support.needs import SINCE_5_23
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

# The types of Transformers 5.23 that use its experts interface.
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
_OUTSIDE_OF_THE_INTERFACE = "dbrx jetmoe llama4 llama4_text longcat_flash step3p7"
_SINCE_5_24 = """
hy_v4_vl inkling2_loop inkling2_loop_text kimi_k25 lara_mini nemo_speechlm nemotron_h_omni
sarvam_mla sarvam_moe
"""
# Types that do not use all experts. The router of zaya chooses one expert per token, after two
# GELUs whose mean outweighs the differences between tokens. ernie4_5_vl_moe has experts for the
# tokens of pictures, which are few.
_LOPSIDED = ("zaya", "ernie4_5_vl_moe")
# Parameters without a gradient. An indexer chooses keys by a topk, a bias of keys does not change
# a softmax, Aria uses its tower's states before the last norm, and these pictures are too small
# for one kind of queries of DeepSeek-OCR-2. A norm over the batch removes the bias in front of it.
# In nemo_speechlm, speakers are chosen by a threshold, and time stamps have no part in the loss.
# Only videos use a projection of their own.
_WITHOUT_GRADIENT = re.compile(
    r"\.indexer\.|\.k_proj\.bias$|vision_tower\.post_layernorm\.|query_1024_resolution"
    r"|\.depthwise_conv\.bias$|\.diarization_model\.|word_timestamp_|\.video_patch_projection\."
)


class _Margins(TorchFunctionMode):
    """Records, for each call of topk, how close a token is to a tie.

    This is the smallest difference between the scores of the last chosen expert and of the next.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.margins: list[float] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            values = args[0].detach()
            k = out.values.shape[-1]
            if values.shape[-1] == self.num_experts > k:
                ordered = values.sort(-1, descending=True).values
                self.margins.append((ordered[..., k - 1] - ordered[..., k]).min().item())
        return out


def _experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if "has_gate" in vars(module)}


def _batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Make rows of text. If a model takes pictures or sound, some rows have them."""
    if not (takes_pictures(model) or takes_sound(model)):
        return batch(model, 4, 31, seed=1, pad=4)
    pictures = (2, 2, 1, 0) if takes_pictures(model) else (0, 0, 0, 0)
    sounds = (1, 0, 1, 0) if takes_sound(model) else ()
    return mixed_batch(model, pictures, sounds=sounds, text=14, seed=1)


def _check(model_type: str) -> None:
    model = tiny(model_type)
    experts = _experts_of(model)
    if model_type not in _OUTSIDE_OF_THE_INTERFACE.split():
        assert len(experts) >= 2, f"{model_type}: experts in {list(experts)}"
    inputs = _batch(model)
    with _Margins(8) as routing:
        loss = loss_of(model, inputs)
    assert loss.isfinite(), f"{model_type}: loss {loss}"
    assert min(routing.margins, default=1.0) > 1e-7, f"{model_type}: ties in routing"
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not _WITHOUT_GRADIENT.search(name):
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-9, (
                f"{model_type}: {name} has no gradient"
            )
    for name, module in experts.items():
        for part, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            assert len({*shape}) == len(shape), (
                f"{model_type}: {name}.{part} has equal sizes {shape}"
            )
            if len(parameter) != 8:  # a norm after the experts, which all experts share
                continue
            per_expert = parameter.grad.flatten(1).abs().amax(1)
            used = (per_expert > 0).view(2, -1)  # one row for the experts of each of two ranks
            enough = used.any(1) if model_type in _LOPSIDED else used
            assert enough.all(), f"{model_type}: unused experts of {name}.{part}: {per_expert}"
    # Multimodal models had no aux loss before transformers 5.23.
    has_loss = SINCE_5_23 or model.config is model.config.get_text_config()
    has_loss &= model_type not in _OUTSIDE_OF_THE_INTERFACE.split()
    if has_loss and hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        with torch.no_grad():
            assert model(**inputs).aux_loss > 0, f"{model_type}: no auxiliary loss"
    second_model = tiny(model_type)
    second_loss = loss_of(second_model, inputs)
    second_loss.backward()
    assert torch.equal(loss, second_loss), f"{model_type}: {loss} and then {second_loss}"
    pairs = zip(model.named_parameters(), second_model.parameters(), strict=True)
    for (name, first), second in pairs:
        assert torch.equal(first, second), f"{model_type}: {name} differs"
        if first.grad is not None:
            assert torch.equal(first.grad, second.grad), f"{model_type}: grad of {name} differs"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_step_of_stock(model_type: str) -> None:
    """Every parameter and expert gets a gradient, two runs are equal, and routing has no ties."""
    _check(model_type)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_of_stock_of_eight_families(model_type: str) -> None:
    _check(model_type)


def test_no_type_is_missing() -> None:
    """Types are found in Transformers' files and auto classes. This test lists those of 5.23 and
    5.24. Types of later versions are in NEW_TYPES until a test has recorded results, and need no
    list.
    """
    known = {*_KNOWN.split(), *_OUTSIDE_OF_THE_INTERFACE.split()}
    if Version(transformers.__version__) >= Version("5.24"):
        known |= set(_SINCE_5_24.split())
    if Version(transformers.__version__) >= Version("5.23"):
        assert set(MODEL_TYPES) == known
    assert not set(MODEL_TYPES) & set(NEW_TYPES)
    assert set(MODEL_TYPES) >= {"qwen3_moe", "qwen3_vl_moe", "mixtral"}


def _gradients(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the gradients of a loss in fp64. Stock's own loss would cast logits to fp32."""
    model.zero_grad()
    for inputs in batches:
        labels = inputs["labels"]
        out = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logits = getattr(out, "logits", None)
        if logits is None:
            logits = out.last_hidden_state @ model.get_input_embeddings().weight.T
        cross_entropy = F.cross_entropy(
            logits.double().flatten(0, 1), labels.flatten(), reduction="sum"
        )
        (cross_entropy / 64).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().max() > 1e-9
    }


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_which_gradients_are_sums_in_fp32(model_type: str) -> None:
    """Gradients of a batch and of its rows one by one differ only in sums of stock in fp32."""
    model = tiny(model_type)
    whole = batch(model, 4, 16, pad=4)
    rows = [{name: value[i : i + 1] for name, value in whole.items()} for i in range(4)]
    want, got = _gradients(model, [whole]), _gradients(model, rows)
    errors = {name: max_error(got[name], want[name]) for name in want}
    too_large = {n: error for n, error in errors.items() if error > budget(model_type, n)}
    assert not too_large, f"{model_type}: {too_large}"
    if model_type in FP32_EVERYWHERE or model_type in FP32_SUMS:
        largest = max(errors.values())
        assert largest > 1e-10, f"{model_type} sums in fp64: its largest error is {largest}"


@pytest.mark.parametrize("name", NOT_BUILT_UPSTREAM)
def test_classes_that_transformers_cannot_build_from_their_configs(name: str) -> None:
    """Transformers itself lacks a field. If this test fails, the class can be tested again."""
    model = getattr(transformers, name)
    with torch.device("meta"), pytest.raises(AttributeError, match=NOT_BUILT_UPSTREAM[name]):
        model(model.config_class())
