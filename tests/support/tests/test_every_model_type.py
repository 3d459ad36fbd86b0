"""The tiny models of all types are a fit reference: healthy, whole, reproducible, without ties."""

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
# One expert per token, chosen behind two GELUs whose mean outweighs what differs between tokens;
# experts of their own for the few tokens of pictures.
_LOPSIDED = ("zaya", "ernie4_5_vl_moe")
# An indexer chooses keys by a topk, a bias of keys moves no softmax, Aria takes its tower's states
# before the last norm, and these pictures are too small for the other queries of DeepSeek-OCR-2.
_WITHOUT_GRADIENT = re.compile(
    r"\.indexer\.|\.k_proj\.bias$|vision_tower\.post_layernorm\.|query_1024_resolution"
)


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


def _batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Rows with and without pictures and sound where a model takes them, text alone elsewhere."""
    if not takes_pictures(model):
        return batch(model, 4, 31, seed=1, pad=4)
    sounds = (1, 0, 1, 0) if takes_sound(model) else ()
    return mixed_batch(model, (2, 2, 1, 0), sounds=sounds, text=14, seed=1)


def _check(model_type: str) -> None:
    model = tiny(model_type)
    experts = _experts_of(model)
    assert len(experts) >= 2, f"{model_type}: experts in {list(experts)}"
    inputs = _batch(model)
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
            shape = tuple(parameter.shape)
            assert len({*shape}) == len(shape), f"{model_type}: {name}.{part} {shape}: swapped axes"
            if len(parameter) != 8:  # a norm behind them, of all
                continue
            per_expert = parameter.grad.flatten(1).abs().amax(1)
            used = (per_expert > 0).view(2, -1)  # by half: what two ranks hold
            enough = used.any(1) if model_type in _LOPSIDED else used
            assert enough.all(), f"{model_type}: {name}.{part} by expert: {per_expert}"
    # Models of more than text had none before transformers 5.23.
    has_loss = SINCE_5_23 or model.config is model.config.get_text_config()
    if has_loss and hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        with torch.no_grad():
            assert model(**inputs).aux_loss > 0, f"{model_type}: no auxiliary loss"
    again = tiny(model_type)
    second = loss_of(again, inputs)
    second.backward()
    assert torch.equal(loss, second), f"{model_type}: {loss} and then {second}"
    for (name, first), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(first, other), f"{model_type}: another {name}"
        if first.grad is not None:
            assert torch.equal(first.grad, other.grad), f"{model_type}: another gradient of {name}"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_step_of_stock(model_type: str) -> None:
    """fp64 reaches every parameter and expert, twice with one result, without ties."""
    _check(model_type)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_of_stock_of_eight_families(model_type: str) -> None:
    _check(model_type)


def test_no_type_is_missing() -> None:
    """Types are found in Transformers' own files and auto classes, and this test names those of
    5.23. Later types are new until a test has looked at them, and nothing has to name them.
    """
    if Version(transformers.__version__) >= Version("5.23"):
        assert set(MODEL_TYPES) == set(_KNOWN.split())
    assert not set(MODEL_TYPES) & set(NEW_TYPES)
    assert set(MODEL_TYPES) >= {"qwen3_moe", "qwen3_vl_moe", "mixtral"}


def _gradients(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the gradients of an fp64 loss; stock's own loss casts logits to fp32."""
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
def test_what_rounds_in_fp32(model_type: str) -> None:
    """Rows together and one by one differ only in sums that stock makes in fp32."""
    model = tiny(model_type)
    whole = batch(model, 4, 16, pad=4)
    rows = [{name: value[i : i + 1] for name, value in whole.items()} for i in range(4)]
    want, got = _gradients(model, [whole]), _gradients(model, rows)
    errors = {name: max_error(got[name], want[name]) for name in want}
    over = {n: error for n, error in errors.items() if error > budget(model_type, n)}
    assert not over, f"{model_type}: {over}"
    if model_type in FP32_EVERYWHERE or model_type in FP32_SUMS:
        assert max(errors.values()) > 1e-10, f"{model_type} does not round: {max(errors.values())}"


@pytest.mark.parametrize("name", NOT_BUILT_UPSTREAM)
def test_classes_that_their_own_configs_do_not_build(name: str) -> None:
    """Transformers itself lacks a field. If this fails, the class can be built again."""
    found = getattr(transformers, name)
    with torch.device("meta"), pytest.raises(AttributeError, match=NOT_BUILT_UPSTREAM[name]):
        found(found.config_class())
