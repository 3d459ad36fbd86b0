"""A process that loads a model holds little more than the parameters outside the layers."""

from pathlib import Path

import pytest
import torch
from support.hooked import hooked
from support.resident import Resident, return_what_is_freed
from support.tiny_models import tiny
from transformers import AutoModelForCausalLM

SIZES = {"hidden_size": 256, "moe_intermediate_size": 384, "num_experts": 32}
MIB = 2**20


def test_a_process_does_not_read_the_decoder_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a control, stock code loads the same model and must need the memory of all layers."""
    model = tiny(dtype=torch.float32, **SIZES)
    in_layers = sum(p.nbytes for name, p in model.named_parameters() if "layers." in name)
    outside = sum(p.nbytes for p in model.parameters()) - in_layers
    assert in_layers > 70 * MIB and outside < MIB
    model.save_pretrained(tmp_path)
    del model
    return_what_is_freed()
    monkeypatch.setenv("WORLD_SIZE", "2")
    grown = {}
    # The first load also imports modules and opens files, so it is not measured.
    for stock_load in ("true", "false", "true"):
        with hooked(monkeypatch, ep_size=2, stock_load=stock_load), Resident() as resident:
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
        grown[stock_load] = resident.grown
        del model
    assert grown["true"] > 0.9 * in_layers
    assert grown["false"] < 0.1 * in_layers + outside, grown
