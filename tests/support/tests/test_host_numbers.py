"""`NoHostNumbers` refuses copies of numbers from the host to a device, and nothing else."""

import pytest
import torch
from support.host_numbers import NoHostNumbers

DEVICE = torch.device("cpu")


def test_copies_of_numbers_to_a_device_are_refused() -> None:
    x = torch.zeros(3)
    with NoHostNumbers():
        for copy in (
            lambda: torch.tensor([1, 2], device=DEVICE),
            lambda: torch.as_tensor(3, device=DEVICE),
            lambda: x.new_tensor([4]),
        ):
            with pytest.raises(AssertionError, match="is a host sync"):
                copy()
        assert torch.equal(torch.as_tensor(x, device=DEVICE), x)
        assert torch.tensor([1]).tolist() == [1] == torch.tensor([1], device="cpu").tolist()
        assert x.new_full((1,), 4).tolist() == torch.full((1,), 4.0, device=DEVICE).tolist() == [4]
