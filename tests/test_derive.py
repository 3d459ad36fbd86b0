"""`derive_plan` derives the plan of a model, or its error names the obstacle and the fix."""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.architectures import batch, model_class, tiny_config
from support.architectures import tiny as tiny_of
from support.needs import needs_tower_in_blocks
from support.tiny_models import tiny
from torch import nn
from transformers import CONFIG_MAPPING

from hf_moe_ep import model_patches, patch, unpatch
from hf_moe_ep.architectures import find_parts, find_plan
from hf_moe_ep.derive import derive_plan
from hf_moe_ep.plan import ModelPlan, VisionPlan
from hf_moe_ep.planner.config import build_meta_model, find_config
from hf_moe_ep.state import find_state

# Refused model types whose experts do not use transformers' experts interface: the model class,
# options of its config, and words of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "doge": ("DogeForCausalLM", {"is_moe": True}, "DogeCDMoE"),
    "nllb-moe": ("NllbMoeForConditionalGeneration", {}, "exceed the capacity of an expert"),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        {},
        "an encoder and in a decoder",
    ),
}


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(n, marks=() if n == "doge" else pytest.mark.slow) for n in REFUSED],
)
def test_refused_types_outside_the_interface_say_why(model_type: str) -> None:
    class_name, options, reason = REFUSED[model_type]
    config = CONFIG_MAPPING[model_type](**options)
    with torch.device("meta"):
        model = getattr(transformers, class_name)(config)
    with pytest.raises(ValueError) as raised:
        patch(model)
    message = str(raised.value)
    for words in (model_type, class_name, reason, "FSDP2"):
        assert words in message, message


def test_the_error_for_quantized_experts_names_the_load_option() -> None:
    """Where MXFP4 kernels run, gpt-oss has experts of another class, with packed weights."""

    class PackedExperts(nn.Module):
        """Has no weights that are stacked over experts."""

    model: Any = tiny()
    for layer in model.model.layers:
        layer.mlp.experts = PackedExperts()
    model.is_quantized = True
    with pytest.raises(ValueError, match=r"quantized experts \(PackedExperts.*dequantize=True"):
        patch(model)


def _add_second_router(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.other_gate = copy.deepcopy(layer.mlp.gate)


def _add_second_list(model: Any) -> None:
    model.model.more_layers = copy.deepcopy(model.model.layers)


def _remove_list(model: Any) -> None:
    model.model.first, model.model.layers = model.model.layers[0], nn.ModuleList()


def _add_second_norm(model: Any) -> None:
    model.model.other_norm = copy.deepcopy(model.model.norm)


def _make_experts_unlike(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:6].detach())


def _raise_experts_in_config(model: Any) -> None:
    model.config.num_experts = 16


def _raise_layers_in_config(model: Any) -> None:
    model.config.num_hidden_layers = 4


def _remove_experts_of_a_layer(model: Any) -> None:
    model.model.layers[1].mlp = nn.Linear(2, 2)


# A change of a model of 2 layers and 8 experts, and words of the error.
NOT_DERIVED: dict[Callable[[Any], None], tuple[str, ...]] = {
    _add_second_router: (
        "layers.*.mlp.gate",
        "layers.*.mlp.other_gate",
        "router",
        "plan=ModelPlan",
    ),
    _add_second_list: ("'model.layers', 'model.more_layers'", "decoder", "plan=ModelPlan"),
    _remove_list: ("model.first.mlp.experts", "no list of decoder layers", "plan=ModelPlan"),
    _add_second_norm: ("'model.norm', 'model.other_norm'", "plan=ModelPlan"),
    _make_experts_unlike: ("different numbers of experts, 6", "8 in model.layers.0"),
    _raise_experts_in_config: (
        "has 8 experts",
        "num_experts = 16",
        "as from_pretrained returns it",
    ),
    _raise_layers_in_config: ("found 2 decoder layers", "expected 4"),
    _remove_experts_of_a_layer: ("found 1 layers with experts", "expected 2"),
}


@pytest.mark.parametrize("change", NOT_DERIVED, ids=lambda change: change.__name__.strip("_"))
def test_the_error_names_modules_that_prevent_derivation(change: Callable[[Any], None]) -> None:
    model = tiny()
    change(model)
    with pytest.raises(ValueError) as raised:
        patch(model)
    for words in (type(model).__name__, *NOT_DERIVED[change]):
        assert words in str(raised.value), str(raised.value)


def test_a_given_plan_is_kept_when_the_model_is_patched_with_other_settings() -> None:
    model: Any = tiny()
    plan = replace(derive_plan(model), origin="given")
    _add_second_router(model)
    patch(model, plan=plan)
    patch(model, recompute_activations=True)
    state = find_state(model)
    assert state is not None and state.plan == plan and state.config.recompute_activations


def test_the_error_contains_a_plan_with_all_derived_fields() -> None:
    """For a model with two routers, the user only has to fill in `router=...`."""
    model: Any = tiny()
    derived = derive_plan(model)
    for layer in model.model.layers:  # names that differ from the defaults
        layer.moe, layer.attention = layer.mlp, layer.self_attn
        del layer.mlp, layer.self_attn
        layer.moe.other_gate = copy.deepcopy(layer.moe.gate)
    with pytest.raises(ValueError) as raised:
        derive_plan(model)
    _, _, code = str(raised.value).partition("plan=")
    plan = eval(code[:-1].replace("router=...", "router='layers.*.moe.gate'"))
    assert plan == replace(
        derived,
        experts="layers.*.moe.experts",
        router="layers.*.moe.gate",
        attention="layers.*.attention",
        origin="given",
    )
    assert find_parts(model, plan).plan is plan


def test_a_given_plan_does_what_derivation_cannot() -> None:
    model = tiny()
    _add_second_router(model)
    plan = ModelPlan("qwen3_moe", router="layers.*.mlp.gate")
    parts = find_parts(model, plan)
    assert parts.plan is plan and len(parts.experts) == 2 and len(parts.layers) == 2


def test_a_given_plan_need_not_list_the_mixers() -> None:
    """Without whole sequences, the delta nets of Qwen3-Next would mix packed documents."""
    model = tiny_of("qwen3_next")
    derived = find_parts(model)
    assert any(derived.mixers) and derived.plan.mixers
    given = find_parts(model, replace(derived.plan, mixers=(), origin="given"))
    assert given.mixers == derived.mixers


# A field of a given plan that does not fit the model, and words of the error.
NOT_FITTING: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"layers": "h.*"}, ("layers='h.*'", "model.layers.*", "ModelPlan(layers=...)")),
    ({"layers": "layers"}, ("num_hidden_layers = 2", "matches 1 modules")),
    (
        {"experts": "layers.*.moe.experts"},
        ("experts='layers.*.moe.experts'", "model.layers.*.mlp.experts", "ModelPlan(experts=...)"),
    ),
    (
        {"experts": "layers.*.mlp.gate"},
        ("do not use transformers' experts interface", "model.layers.0.mlp.gate"),
    ),
    ({"router": "layers.*.mlp.router"}, ("model.layers.*.mlp", "router='' if it has none")),
    ({"attention": "layers.*.attn"}, ("model.layers.*.self_attn", "attention=''")),
    ({"final_norm": "ln_f"}, ("final_norm='ln_f'", "has no such module")),
    ({"expert_weights": ("w1", "w2")}, ("('w1', 'w2')", "gate_up_proj, down_proj")),
    ({"num_experts": "num_experts_per_tok"}, ("has 8 experts", "num_experts_per_tok = 2")),
]


@pytest.mark.parametrize(("fields", "words"), NOT_FITTING, ids=lambda x: next(iter(x)))
def test_a_given_plan_that_does_not_fit_is_refused(
    fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as raised:
        patch(tiny(num_experts_per_tok=2), plan=ModelPlan("qwen3_moe", **fields))
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_experts_outside_the_layers_of_a_given_plan_are_named() -> None:
    model: Any = tiny()
    model.model.mlp = copy.deepcopy(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match=r"model\.mlp\.experts is in none of the 2 layers"):
        patch(model, plan=ModelPlan("qwen3_moe", experts="mlp.experts"))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "olmoe"])
def test_fields_of_another_architecture_are_not_read(model_type: str) -> None:
    """Transformers keeps unknown fields of a config.json, which the model never reads."""
    config = tiny_config(model_type)
    config.first_k_dense_replace = 1
    model = model_class(model_type)(config)
    assert find_parts(model).plan.model_type == model_type


def test_a_model_type_may_be_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`REFUSED` in `model_patches/TYPE.py` is the reason that the error gives."""
    tmp_path.joinpath("olmoe.py").write_text('REFUSED = "it is 12 moons old; wait for the next"\n')
    monkeypatch.setattr(model_patches, "__path__", [*model_patches.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "hf_moe_ep.model_patches.olmoe", raising=False)
    with pytest.raises(
        ValueError, match=r"OlmoeForCausalLM \(olmoe\) cannot .* 12 moons old; wait"
    ):
        patch(tiny_of("olmoe"))
    sys.modules.pop("hf_moe_ep.model_patches.olmoe")


def test_a_gate_that_no_backend_computes_runs_with_eager_and_without_ep() -> None:
    """Mish is not a known activation. The error recommends 'eager', which then runs."""
    model, stock = (tiny_of("qwen3_moe", hidden_act="mish") for _ in range(2))
    with pytest.raises(ValueError, match=r"gate of Qwen3MoeExperts of qwen3_moe .*'eager'"):
        patch(model)
    patch(model, experts_backend="eager")
    inputs = batch(stock, 2, 9)
    assert torch.equal(model(**inputs).loss, stock(**inputs).loss)
    unpatch(model)


def test_the_derived_plan_of_qwen3_moe_equals_a_plan_written_by_hand() -> None:
    plan = find_plan(tiny(num_hidden_layers=3, mlp_only_layers=[1]))
    assert (plan.layers, plan.experts) == ("layers.*", "layers.*.mlp.experts")
    assert (plan.router, plan.attention) == ("layers.*.mlp.gate", "layers.*.self_attn")
    assert (plan.final_norm, plan.num_experts) == ("norm", "num_experts")
    assert plan.expert_weights == ("gate_up_proj", "down_proj") and plan.mixers == ()
    assert plan.aux_loss_coef == "router_aux_loss_coef" and plan.vision is None
    assert plan.sequence_parallel and plan.model_type == "qwen3_moe"


@needs_tower_in_blocks
def test_the_derived_plan_of_qwen3_vl_moe_equals_a_plan_written_by_hand() -> None:
    plan = find_plan(tiny("qwen3_vl_moe"))
    by_hand = ModelPlan("qwen3_vl_moe", prefix="language_model.")
    for name in ("layers", "experts", "router", "attention", "final_norm", "expert_weights"):
        assert getattr(plan, name) == getattr(by_hand, name), name
    assert plan.num_experts == "num_experts" and plan.mixers == () and plan.sequence_parallel
    assert plan.aux_loss_coef == "config.text_config.router_aux_loss_coef"
    assert plan.vision == VisionPlan("visual", "visual.blocks.*", "visual.blocks.*.attn")


def test_a_model_of_235b_is_patched_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """94 layers on meta: `derive_plan` takes less than 1 s of CPU time, `patch` less than 5 s."""
    model = build_meta_model(find_config("Qwen/Qwen3-235B-A22B"), torch.bfloat16)
    start = time.process_time()
    derive_plan(model)
    derived = time.process_time()
    patch(model)
    patched = time.process_time()
    with capsys.disabled():
        print(
            f"\n  94 layers, 235B: plan {derived - start:.2f} s, patched {patched - derived:.2f} s"
        )
    assert derived - start < 1
    assert patched - derived < 5
