"""What a training state holds beside its tensors, as JSON and back."""

import json

import torch

from hf_moe_ep.plain import decode, encode


def test_tensors_come_back_on_the_host() -> None:
    """Else AdamW's `step` would go to the default device, and its next step would raise."""
    encoded = encode(torch.tensor(3.0), "step")
    torch.set_default_device("meta")
    try:
        back = decode(encoded)
    finally:
        torch.set_default_device(None)
    assert back.device.type == "cpu" and back == 3.0
