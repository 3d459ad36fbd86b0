"""`hf-moe-ep architecture`: the plan and what is granted, from a config alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.architectures import tiny_config
from support.needs import needs_tower_in_blocks
from transformers import CONFIG_MAPPING

from hf_moe_ep.cli.main import main


def _config(folder: Path, model_type: str, **fields: Any) -> str:
    tiny_config(model_type, **fields).save_pretrained(folder)
    return str(folder)


def _json(capsys: pytest.CaptureFixture[str], shape: str) -> dict[str, Any]:
    assert main(["architecture", shape, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page names every part and every option that is granted."""
    assert main(["architecture", _config(tmp_path, "qwen3_moe")]) == 0
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
        "  sp          yes",
        "  vision      no: the model has no vision tower",
    ]


def test_a_type_with_another_mixer(capsys: pytest.CaptureFixture[str]) -> None:
    """Sequence parallelism is refused with the module's name."""
    found = _json(capsys, "jamba")
    assert found["kind"] == "JambaForCausalLM" and found["plan"]["mixers"] == ["layers.*.mamba"]
    assert (found["layers"], found["moe_layers"], found["num_experts"]) == (32, 16, 16)
    assert found["granted"]["ep"] == found["granted"]["lora"] == "yes"
    assert "layers.*.mamba (JambaMambaMixer)" in found["granted"]["sp"]
    assert found["ep_sizes"] == [1, 2, 4, 8, 16]


@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason="no such type yet")
def test_a_gate_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, _config(tmp_path, "inkling2_text"))
    assert "the gate of Inkling2Experts" in found["granted"]["ep"] and found["ep_sizes"] == []
    assert found["granted"]["sp"] == found["granted"]["ep"]


@needs_tower_in_blocks
def test_a_model_that_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, _config(tmp_path, "qwen3_vl_moe"))
    assert found["plan"]["vision"]["tower"] == "visual" and found["granted"]["vision"] == "yes"
    assert found["plan"]["experts"] == "language_model.layers.*.mlp.experts"


REFUSED = {
    "llama": "unknown architecture 'llama'",
    "no_such_type": "'no_such_type' is no model type",
}


@pytest.mark.parametrize("shape", REFUSED)
def test_what_has_no_plan(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["architecture", shape]) == 2
    assert REFUSED[shape] in capsys.readouterr().err


def test_a_type_that_nobody_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder holds a user's own model. The error names its type and how to ask for it."""
    (tmp_path / "config.json").write_text('{"model_type": "of_my_own"}')
    for question in (["architecture"], ["memory", "--gpus", "2"]):
        assert main([*question, str(tmp_path)]) == 2
        message = capsys.readouterr().err
        for words in ("config.json", "'of_my_own'", "AutoConfig.register", "cli.main.main"):
            assert words in message, message
