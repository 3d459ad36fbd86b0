"""What a training state holds beside its tensors, as JSON and back."""

import json

import pytest
import torch

from hf_moe_ep.checkpoints.storage.json_values import decode, encode


def test_tensors_come_back_on_the_host() -> None:
    """Else AdamW's `step` would go to the default device, and its next step would raise."""
    encoded = encode(torch.tensor(3.0), "step")
    torch.set_default_device("meta")
    try:
        back = decode(encoded)
    finally:
        torch.set_default_device(None)
    assert back.device.type == "cpu" and back == 3.0


def test_states_of_generators_and_no_larger_tensors() -> None:
    """As stateful data loaders keep them in their progress."""
    generator = torch.Generator().manual_seed(5)
    state = {"sampler": {"yielded": 3, "generator": generator.get_state()}}
    back = decode(json.loads(json.dumps(encode(state, "progress"))))
    assert back["sampler"]["yielded"] == 3
    assert torch.equal(back["sampler"]["generator"], generator.get_state())
    with pytest.raises(ValueError, match=r"progress\['x'\] is a tensor of 65537 .* up to 65536"):
        encode({"x": torch.zeros(65537)}, "progress")
