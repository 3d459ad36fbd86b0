"""Compare conversions of adapter_config.json with configs that are written by hand."""

from typing import Any

import pytest

from hf_moe_ep.lora.adapter_config import (
    convert_config_to_single,
    convert_config_to_stacked,
    find_rank_and_alpha,
)
from hf_moe_ep.lora.names import Stack, list_matching_targets

EXPERTS = "model.layers.0.mlp.experts"
ATTENTION = ["model.layers.0.self_attn.q_proj"]
STACKS = [
    Stack(EXPERTS, "gate_up_proj", 2, 4, 16, f"{EXPERTS}.base_layer"),
    Stack(EXPERTS, "down_proj", 2, 8, 6, EXPERTS),
]
STACKED: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "rank_pattern": {"experts.gate_up_proj": 4},
    "alpha_pattern": {"experts.down_proj": 6},
}
SINGLE: dict[str, Any] = STACKED | {
    "target_modules": [
        "q_proj",
        "mlp.experts.0.gate_proj",
        "mlp.experts.0.up_proj",
        "mlp.experts.1.gate_proj",
        "mlp.experts.1.up_proj",
        "mlp.experts.0.down_proj",
        "mlp.experts.1.down_proj",
    ],
    "target_parameters": None,
    "rank_pattern": {r"experts.\d+\.(gate_proj|up_proj)": 4},
    "alpha_pattern": {r"experts.\d+\.down_proj": 6},
}


def test_conversions_give_the_table_of_the_docstring() -> None:
    assert convert_config_to_single(STACKED, STACKS, ATTENTION) == SINGLE
    same = {"gate_up_proj": 1, "down_proj": 1}
    assert convert_config_to_stacked(SINGLE, STACKS, ATTENTION, same) == STACKED


@pytest.mark.parametrize(
    "limits",
    [
        {"target_modules": r"layers\.0.*q_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0]},
    ],
)
def test_limited_targets_become_full_names(limits: dict[str, Any]) -> None:
    config = convert_config_to_single(STACKED | limits, STACKS, ATTENTION)
    assert config["target_modules"] == ATTENTION + SINGLE["target_modules"][1:]
    assert config["layers_to_transform"] is None


def test_different_a_of_gate_and_up_double_the_rank_and_keep_the_scale() -> None:
    growth = {"gate_up_proj": 2, "down_proj": 1}
    config = convert_config_to_stacked(SINGLE, STACKS, ATTENTION, growth)
    assert find_rank_and_alpha(config, f"{EXPERTS}.gate_up_proj") == (8, 32)  # 16 / 4 = 32 / 8
    assert find_rank_and_alpha(config, f"{EXPERTS}.down_proj") == (8, 6)


def test_an_entry_for_one_layer_does_not_change_another() -> None:
    """Layer 0 has rank 5, layer 1 has the default. A short key for layer 0 would match both."""
    first = Stack("model.layers.1.mlp.experts", "down_proj", 2, 8, 16, "w")
    second = Stack("model.layers.0.mlp.experts", "down_proj", 2, 8, 5, "w")
    old = {"r": 8, "lora_alpha": 16, "target_modules": ["down_proj"]}
    config = convert_config_to_stacked(
        old, [first, second], [], {"gate_up_proj": 1, "down_proj": 1}
    )
    assert find_rank_and_alpha(config, first.name) == (8, 16)
    assert find_rank_and_alpha(config, second.name) == (8, 5)


def test_targets_match_whole_components_of_a_name() -> None:
    hits = list_matching_targets(["layers.1.mlp.up_proj"])
    assert {"up_proj", "mlp.up_proj", "layers.1.mlp.up_proj"} <= hits
    assert "proj" not in hits and "layers.1" not in hits
