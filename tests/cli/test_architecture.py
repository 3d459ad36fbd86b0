"""`hf-moe-ep architecture` prints the plan and the supported features of a config."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.architectures import tiny_config
from support.needs import needs_tower_in_blocks

from hf_moe_ep.cli.main import main


def _write_config(folder: Path, model_type: str, **fields: Any) -> str:
    tiny_config(model_type, **fields).save_pretrained(folder)
    return str(folder)


def _run_with_json(capsys: pytest.CaptureFixture[str], shape: str) -> dict[str, Any]:
    assert main(["architecture", shape, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_the_page_lists_all_parts_and_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has a line for every part of the model and for every feature."""
    assert main(["architecture", _write_config(tmp_path, "qwen3_moe")]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith(f"{tmp_path}: Qwen3MoeForCausalLM (qwen3_moe); plan derived")
    assert lines == [
        "  layers      layers.*: 4",
        "  experts     layers.*.mlp.experts: 8 in each of 3 layers, 3 for a token",
        "  weights     gate_up_proj, down_proj",
        "  router      layers.*.mlp.gate",
        "  attention   layers.*.self_attn",
        "  mixers      none",
        "  final norm  norm",
        "  head        its own",
        "  tower       none",
        "  aux loss    router_aux_loss_coef",
        "supported",
        "  EP          ep_size 1, 2, 4, 8",
        "  LoRA        on stacked experts",
        "  sp_size     yes",
        "  cp_size     yes",
        "  etp_size    yes",
        "  pp_size     yes",
        "  vision      no: the model has no vision tower",
    ]


def test_a_type_outside_the_experts_interface_has_a_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan describes the MoE blocks, and a block knows how many experts a token chooses."""
    printed = _run_with_json(capsys, _write_config(tmp_path, "dbrx"))
    block = printed["plan"]["block"]
    assert block["forward"] == "hf_moe_ep.model_patches.dbrx._forward"
    assert block["weights"]["down_proj"]["parts"] == ["experts.mlp.w2"]
    assert (printed["num_experts"], printed["experts_per_token"]) == (8, 3)
    assert printed["granted"]["ep"] == printed["granted"]["etp_size"] == "yes"
    assert (
        "cut by layers" in printed["granted"]["pp_size"]
        or "MoE blocks of dbrx" in (printed["granted"]["pp_size"])
    )
    assert "cannot have adapters" in printed["granted"]["lora"]


def test_sequences_are_not_gathered_for_state_space_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """State space mixers are divided by heads."""
    printed = _run_with_json(capsys, "jamba")
    assert printed["kind"] == "JambaForCausalLM" and printed["plan"]["mixers"] == ["layers.*.mamba"]
    assert (printed["layers"], printed["moe_layers"], printed["num_experts"]) == (32, 16, 16)
    assert {printed["granted"][name] for name in ("ep", "lora", "sp_size")} == {"yes"}
    assert printed["ep_sizes"] == [1, 2, 4, 8, 16]
    assert main(["architecture", "jamba"]) == 0
    assert "  sp_size     yes" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("model_type", "gathered"),
    [
        ("minimax", "sequences are gathered for model.layers.*.self_attn"),
        ("deepseek_v32", "keys are gathered for model.layers.*.self_attn"),
    ],
)
def test_modules_for_which_sequences_or_keys_are_gathered_are_named(
    model_type: str, gathered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["architecture", _write_config(tmp_path, model_type)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  sp_size     yes; {gathered}" in lines and f"  cp_size     yes; {gathered}" in lines


def test_an_unsupported_gate_is_the_reason_for_every_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _write_config(tmp_path, "qwen3_moe", hidden_act="mish")
    printed = _run_with_json(capsys, folder)
    assert "the gate of Qwen3MoeExperts" in printed["granted"]["ep"] and printed["ep_sizes"] == []
    for size in ("sp_size", "cp_size", "etp_size", "pp_size"):
        assert printed["granted"][size] == printed["granted"]["ep"]


@needs_tower_in_blocks
def test_a_vision_model_has_a_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = _run_with_json(capsys, _write_config(tmp_path, "qwen3_vl_moe"))
    assert printed["plan"]["vision"]["tower"] == "visual" and printed["granted"]["vision"] == "yes"
    assert printed["plan"]["experts"] == "language_model.layers.*.mlp.experts"


@needs_tower_in_blocks
def test_a_vision_model_whose_encoders_are_gathered_is_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = _run_with_json(capsys, _write_config(tmp_path, "qwen3_5_moe"))
    assert printed["granted"]["vision"] == "yes"


REFUSED = {
    "llama": "unknown architecture 'llama'",
    "no_such_type": "'no_such_type' is not a model type",
}


@pytest.mark.parametrize("shape", REFUSED)
def test_types_without_a_plan_are_refused(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["architecture", shape]) == 2
    assert REFUSED[shape] in capsys.readouterr().err


def test_the_error_for_an_unregistered_type_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the user's own type, and says how to register it."""
    (tmp_path / "config.json").write_text('{"model_type": "of_my_own"}')
    for command in (["architecture"], ["memory", "--gpus", "2"]):
        assert main([*command, str(tmp_path)]) == 2
        message = capsys.readouterr().err
        for words in ("config.json", "'of_my_own'", "AutoConfig.register", "cli.main.main"):
            assert words in message, message
