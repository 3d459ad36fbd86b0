"""`run_experts` gives the results of each experts module of transformers.

`choose_compute` finds the formula of a module and chooses a backend, or refuses the module.
"""

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.architectures import NEW_TYPES
from support.close import assert_close
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.integrations.moe import use_experts_implementation
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_moe_ep import patch
from hf_moe_ep.moe.experts import choose_compute, run_experts
from hf_moe_ep.ops.formula import ExpertFormula

MODELS = Path(transformers.__file__).parent / "models"
CLASS = re.compile(r"@use_experts_implementation(?:\([^)]*\))?\s*class (\w+)")
CLASSES = sorted(
    (path.parent.name, path.stem, name)
    for path in MODELS.glob("*/modeling_*.py")
    for name in CLASS.findall(path.read_text(encoding="utf-8"))
)
NEW_FOLDERS = {model_type_to_module_name(name) for name in NEW_TYPES}
# These modules compute some steps in fp32, whatever the dtype of their inputs is.
FP32_INSIDE = {
    "BeamExperts",
    "Inkling2Experts",
    "Inkling2LoopExperts",
    "MuseSparkExperts",
    "OpenAIPrivacyFilterExperts",
}
TOP_K, EXPERTS, HIDDEN, FFN = 2, 6, 16, 8


class Config(SimpleNamespace):
    """A config with a value for every field that an experts module reads."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "limit" in name:
            return 0.8  # low enough that some pre-activations of these tests exceed it
        if "alpha" in name:
            return 1.702
        if "act" in name:
            return "silu"
        if "eps" in name:
            return 1e-6
        if "softcap" in name:
            return 0.7 if "gate" in name else 1.3
        if "experts" in name:
            return EXPERTS
        if "intermediate" in name or "ffn" in name:
            return FFN
        if "hidden" in name or "size" in name or "dim" in name:
            return HIDDEN
        raise AttributeError(name)


def _build(folder: str, module: str, name: str, **config: Any) -> Any:
    cls = getattr(importlib.import_module(f"transformers.models.{folder}.{module}"), name)
    experts = cls(Config(_experts_implementation="eager", hidden_act="silu", **config)).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    return experts


def _make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    x_TH = torch.randn(11, HIDDEN, dtype=torch.float64, requires_grad=True)
    ids_TK = torch.rand(11, EXPERTS).argsort(1)[:, :TOP_K]
    weights_TK = torch.rand(11, TOP_K, dtype=torch.float64, requires_grad=True)
    return x_TH, ids_TK, weights_TK


def test_the_search_finds_experts_classes() -> None:
    names = {name for _, _, name in CLASSES}
    assert {"Qwen3MoeExperts", "GptOssExperts"} <= names
    assert len(CLASSES) >= 50


@pytest.mark.parametrize(("folder", "module", "name"), CLASSES, ids=[c[2] for c in CLASSES])
def test_output_and_gradients_equal_the_modules_own(folder: str, module: str, name: str) -> None:
    """The reference is the module's own eager code in fp64."""
    experts = _build(folder, module, name)
    try:
        compute = choose_compute(experts, "auto", recompute=False)
    except ValueError as error:
        if folder not in NEW_FOLDERS:
            raise
        pytest.skip(f"transformers has added this type, and it is refused: {error}")
    x_TH, ids_TK, weights_TK = _make_inputs()
    leaves = {"rows": x_TH, "weights": weights_TK, **dict(experts.named_parameters())}

    def compute_gradients(out: Tensor) -> dict[str, Tensor]:
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream)))

    want = experts(x_TH, ids_TK, weights_TK)
    want_grads = compute_gradients(want)
    got = run_experts(experts, compute, x_TH, ids_TK, weights_TK, counts_L=None, grad_scale=1.0)
    budget = 1e-6 if name in FP32_INSIDE else 1e-12
    assert_close("out", got, want, budget)
    for key, grad in compute_gradients(got).items():
        assert_close(f"grad of {key}", grad, want_grads[key], budget)


FORMULAS = {
    "Qwen3MoeExperts": ExpertFormula(),
    "GptOssExperts": ExpertFormula(True, True, "swish", 1.702, 0.8, 1.0),
    "DeepseekV4Experts": ExpertFormula(limit=0.8),
    "NemotronHExperts": ExpertFormula(gated=False),
    "Inkling2Experts": ExpertFormula(gate_cap=0.7, up_cap=1.3),
}


@pytest.mark.parametrize("name", sorted(FORMULAS.keys() & {name for _, _, name in CLASSES}))
def test_the_formula_of_a_module_is_found(name: str) -> None:
    experts = _build(*next(c for c in CLASSES if c[2] == name))
    formula = FORMULAS[name]
    if name == "GptOssExperts":  # older transformers has a constant limit instead of the config's
        formula = replace(formula, limit=experts.limit)
    assert choose_compute(experts, "auto", recompute=False).formula == formula


@pytest.mark.parametrize(
    ("act", "formula"),
    [
        ("gelu", ExpertFormula(activation="gelu")),
        ("gelu_pytorch_tanh", ExpertFormula(activation="gelu_tanh")),
        ("gelu_new", ExpertFormula(activation="gelu_tanh")),
        ("relu2", ExpertFormula(activation="relu2")),
    ],
)
def test_the_activation_of_a_module_is_found(act: str, formula: ExpertFormula) -> None:
    experts = _build("qwen3_moe", "modeling_qwen3_moe", "Qwen3MoeExperts")
    experts.act_fn = transformers.activations.ACT2FN[act]
    assert choose_compute(experts, "auto", recompute=False).formula == formula


def test_finding_the_formula_does_not_advance_the_random_generator() -> None:
    experts = _build("qwen3_moe", "modeling_qwen3_moe", "Qwen3MoeExperts")
    state = torch.get_rng_state()
    choose_compute(experts, "auto", recompute=False)
    assert torch.equal(torch.get_rng_state(), state)


def _build_aligned() -> Any:
    """Build experts whose sizes are multiples of 16, as the Triton kernels require."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4}
    return _build("qwen3_moe", "modeling_qwen3_moe", "Qwen3MoeExperts", **sizes).float()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reasons differ on a machine with a GPU")
def test_the_reason_not_to_use_triton_is_known() -> None:
    aligned = _build_aligned()
    auto = choose_compute(aligned, "auto", recompute=False)
    assert (auto.backend, auto.reason) == ("torch", "no CUDA GPU")
    asked = choose_compute(aligned, "torch", recompute=False)
    assert (asked.backend, asked.reason) == ("torch", "torch was requested")
    odd = _build("qwen3_moe", "modeling_qwen3_moe", "Qwen3MoeExperts")
    with pytest.raises(ValueError, match=r"sizes 16 and 8 are not both multiples of 16"):
        choose_compute(odd, "triton", recompute=False)
    for folder, name, reason in (
        ("muse_spark", "MuseSparkExperts", "a norm follows each expert"),
        ("inkling2", "Inkling2Experts", "its gate has soft caps"),
    ):
        if (MODELS / folder).is_dir():  # older transformers lack these models
            experts = _build(folder, f"modeling_{folder}", name)
            with pytest.raises(ValueError, match=f"{name} here: {reason}"):
                choose_compute(experts, "triton", recompute=False)


_IMPORTS_OF_PATCH = """
import sys
from support.tiny_models import tiny
from hf_moe_ep import patch

# Triton in sys.modules proves nothing: torch.compile imports it wherever it is installed.
def our_modules_import_triton():
    ours = [name for name in sys.modules if name.partition(".")[0] == "hf_moe_ep"]
    return any(hasattr(sys.modules[name], "triton") for name in ours)

sizes = {"hidden_size": 32, "moe_intermediate_size": 16}
patch(tiny(**sizes))
print(our_modules_import_triton())
patch(tiny(**sizes), experts_backend="triton")
print(our_modules_import_triton())
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU patch() chooses Triton")
def test_without_a_gpu_patch_imports_triton_only_on_request() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _IMPORTS_OF_PATCH],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["False", "True"]


def test_requested_triton_refuses_dtypes_without_kernels() -> None:
    aligned = _build_aligned().double()
    compute = choose_compute(aligned, "triton", recompute=False)
    x_TH = torch.randn(3, 32, dtype=torch.float64)
    ids_TK, weights_TK = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    with pytest.raises(ValueError, match=r"'triton' computes bfloat16.*not torch.float64 on cpu"):
        run_experts(aligned, compute, x_TH, ids_TK, weights_TK, counts_L=None, grad_scale=1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU instead")
def test_requested_triton_runs_the_kernels() -> None:
    aligned = _build_aligned()
    x_TH = torch.randn(5, 32)
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 1], [2, 0]])
    weights_TK = torch.rand(5, 2)

    def run(backend: str) -> Tensor:
        compute = choose_compute(aligned, backend, recompute=False)
        assert compute.backend == backend
        return run_experts(
            aligned, compute, x_TH, ids_TK, weights_TK, counts_L=None, grad_scale=1.0
        )

    got, want = run("triton"), run("torch")
    assert_close("out", got, want, 1e-6)  # fp32
    assert not torch.equal(got, want)  # equal bits would mean that both runs used the same code


def _build_own(*, up: str = "gate_up_proj", order: str = "out, in", **flags: bool) -> nn.Module:
    """Build experts of a user: the rows of gate are in front of the rows of up; no act_fn."""

    class OwnExperts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            shapes = {up: (EXPERTS, 2 * FFN, HIDDEN), "down_proj": (EXPERTS, HIDDEN, FFN)}
            for name, (experts, rows, columns) in shapes.items():
                size = (rows, columns) if order == "out, in" else (columns, rows)
                setattr(self, name, nn.Parameter(torch.ones(experts, *size)))

        def forward(self, *args: Tensor) -> None:
            """This is never called."""

    experts_class: Any = use_experts_implementation(**flags)(OwnExperts)
    experts: nn.Module = experts_class(Config())
    return experts


# Arguments of _build_own, and a pattern of the error.
NOT_OF_THE_INTERFACE: list[tuple[dict[str, Any], str]] = [
    ({"up": "w1"}, r"no gate_up_proj but w1, down_proj; .*needs gate_up_proj and down_proj"),
    ({"has_gate": False}, r"no up_proj but gate_up_proj, down_proj; with has_gate=False"),
    ({"order": "in, out"}, r"\[6, 16, 16\] and down_proj \[6, 8, 16\] .*is_transposed=True"),
    ({"is_transposed": True}, r"\[6, 16, 16\] and down_proj \[6, 16, 8\] .*is_transposed=False"),
    ({}, r"gate of OwnExperts does not run: .*act_fn.*_apply_gate"),
]


@pytest.mark.parametrize(("arguments", "words"), NOT_OF_THE_INTERFACE)
def test_experts_that_do_not_fit_the_interface_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    """Their weights have other names or are transposed, or the activation is missing."""
    with pytest.raises(ValueError, match=words):
        choose_compute(_build_own(**arguments), "torch", recompute=False)


def test_a_matrix_of_another_dtype_is_trained() -> None:
    """An fp32 down_proj in a bf16 model is cast to bf16, and gets the gradient of its bf16 copy."""
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        model: Any = patch(tiny(dtype=torch.bfloat16), experts_backend="torch")
        experts = model.model.layers[1].mlp.experts
        experts.down_proj.data = experts.down_proj.to(dtype)
        model(**batch(model, 2, 7)).loss.backward()
        grads.append([experts.gate_up_proj.grad, experts.down_proj.grad])
    assert grads[1][1].dtype == torch.float32
    for want, got in zip(*grads, strict=True):
        assert got.any() and torch.equal(got.bfloat16(), want)


@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode_differentiation_is_refused(frozen: bool) -> None:
    """The operator of the experts has no formula for forward mode.

    If no parameter is trained, torch would treat its result as a constant.
    """
    model: Any = patch(tiny(attn_implementation="eager"), experts_backend="torch")
    model.requires_grad_(not frozen)
    inputs = batch(model, 2, 7)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(embeds, torch.ones_like(embeds))
        with pytest.raises(ValueError, match="forward_ad"):
            model(**inputs, inputs_embeds=dual)
    with pytest.raises(ValueError, match="forward_ad"):
        model.eval()  # in training, tokens are counted in place, which jvp refuses
        torch.func.jvp(
            lambda x: model(**inputs, inputs_embeds=x).loss, (embeds,), (torch.ones_like(embeds),)
        )
