"""Values and small tensors of a training state are written to JSON and read back."""

import json

import pytest
import torch

from hf_moe_ep.checkpoints.storage.json_values import decode, encode


def test_tensors_are_decoded_on_the_host() -> None:
    """AdamW's `step` on another default device would make the next step raise."""
    encoded = encode(torch.tensor(3.0), "step")
    torch.set_default_device("meta")
    try:
        decoded = decode(encoded)
    finally:
        torch.set_default_device(None)
    assert decoded.device.type == "cpu" and decoded == 3.0


def test_a_generator_state_is_encoded_and_a_larger_tensor_refused() -> None:
    """The state of a stateful data loader contains the state of a generator."""
    generator = torch.Generator().manual_seed(5)
    state = {"sampler": {"yielded": 3, "generator": generator.get_state()}}
    decoded = decode(json.loads(json.dumps(encode(state, "progress"))))
    assert decoded["sampler"]["yielded"] == 3
    assert torch.equal(decoded["sampler"]["generator"], generator.get_state())
    with pytest.raises(ValueError, match=r"progress\['x'\] is a tensor of 65537 .* up to 65536"):
        encode({"x": torch.zeros(65537)}, "progress")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(0),
        torch.tensor([[1 + 2j, 3 - 4j]]),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(0, 2, dtype=torch.complex128),
        torch.tensor(float("nan")),
        torch.tensor([[True], [False]]),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_a_tensor_keeps_its_shape_dtype_and_values(tensor: torch.Tensor) -> None:
    decoded = decode(json.loads(json.dumps(encode(tensor, "progress"))))
    assert decoded.dtype == tensor.dtype and decoded.shape == tensor.shape
    assert torch.allclose(decoded, tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"]
)
def test_a_tensor_without_plain_values_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"progress\['x'\] is a tensor without plain values"):
        encode({"x": tensor}, "progress")


def test_a_tensor_that_an_older_version_encoded_without_its_shape_is_read() -> None:
    assert decode({"__tensor__": [[1, 2]], "dtype": "int32"}).tolist() == [[1, 2]]
