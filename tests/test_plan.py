"""Patterns match whole components at the end of a module name; plans have defaults and a prefix."""

from dataclasses import replace

import pytest
from support.tiny_models import tiny

from hf_moe_ep.architectures import find_parts
from hf_moe_ep.plan import ModelPlan, matches

MATCHES = [
    ("layers.*.mlp.experts", "model.layers.3.mlp.experts", True),
    ("layers.*.mlp.experts", "layers.3.mlp.experts", True),
    ("layers.*.mlp.experts", "base_model.model.model.layers.13.mlp.experts", True),
    ("layers.*.mlp.experts", "model.layers.3.mlp.experts.gate_up_proj", False),
    ("layers.*.mlp.experts", "model.layers.mlp.experts", False),
    ("layers.*.mlp.experts", "model.layers.3.4.mlp.experts", False),
    ("layers.*.mlp.experts", "model.old_layers.3.mlp.experts", False),
    ("layers.*.mlp.experts", "model.layers.3.mlp.shared_experts", False),
    ("layers.*.mlp.experts", "model.layers.3.mlpXexperts", False),
    ("layers.*", "model.layers.0", True),
    ("layers.*", "model.layers", False),
    ("layers.*", "model.layers.0.mlp", False),
    ("norm", "norm", True),
    ("norm", "model.norm", True),
    ("norm", "model.layers.0.self_attn.q_norm", False),
    ("norm", "model.norm.weight", False),
    ("norm", "", False),
    ("a.b+", "x.a.b+", True),  # patterns are names, not regular expressions
    ("a.b+", "x.a.bb", False),
]


@pytest.mark.parametrize(("pattern", "name", "expected"), MATCHES)
def test_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


# Options of the config, and the number of MoE layers that stock's decoder layer builds (of 6).
MOE_LAYERS = [
    ({}, 6),
    ({"mlp_only_layers": [0, 5]}, 4),
    ({"decoder_sparse_step": 2}, 3),  # layers 1, 3, 5
    ({"decoder_sparse_step": 4}, 1),  # layer 3
    ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 2),  # layers 3, 5
]


@pytest.mark.parametrize(("options", "expected"), MOE_LAYERS)
def test_config_and_model_have_the_same_number_of_moe_layers(
    options: dict[str, object], expected: int
) -> None:
    """`find_parts` computes the number from the config, and raises if the model differs."""
    parts = find_parts(tiny(num_hidden_layers=6, num_experts=12, **options))
    assert len(parts.experts) == expected
    assert parts.num_experts == 12 and parts.plan.num_experts == "num_experts"


def test_a_plan_needs_only_the_fields_that_differ_from_the_defaults() -> None:
    plain = ModelPlan("some_moe")
    assert (plain.layers, plain.experts) == ("layers.*", "layers.*.mlp.experts")
    assert (plain.attention, plain.final_norm) == ("layers.*.self_attn", "norm")
    with_options = ModelPlan(
        "other_moe", experts="layers.*.feed_forward.experts", final_norm="ln_f"
    )
    assert (with_options.experts, with_options.final_norm) == (
        "layers.*.feed_forward.experts",
        "ln_f",
    )


def test_the_prefix_is_added_once_to_every_pattern_of_the_language_model() -> None:
    given = ModelPlan("some_moe", prefix="language_model.", aux_loss_coef="router_aux_loss_coef")
    # `replace` runs __post_init__ again, which must not add the prefix a second time.
    for plan in (given, replace(given, aux_loss_coef=None)):
        assert plan.layers == "language_model.layers.*"
        assert plan.experts == "language_model.layers.*.mlp.experts"
        assert plan.router == "language_model.layers.*.mlp.gate"
        assert plan.attention == "language_model.layers.*.self_attn"
        assert plan.final_norm == "language_model.norm"
