"""`full_tensor` of `support.parity` gathers on the host what gloo cannot gather on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import parity


class Sharded:
    """A stand-in for a DTensor that records the calls and the device on which it is gathered."""

    def __init__(self, device: str, calls: list[str]) -> None:
        self.device, self.is_cuda, self.calls = torch.device(device), device == "cuda", calls
        self.device_mesh = SimpleNamespace(get_group=lambda dim: "the group of the mesh")

    def cpu(self) -> "Sharded":
        return Sharded("cpu", self.calls)

    def full_tensor(self) -> "Sharded":
        self.calls.append(f"gathered on {self.device}")
        return self

    def to(self, device: torch.device) -> "Sharded":
        return Sharded(device.type, self.calls)


@pytest.mark.parametrize(
    ("backend", "device", "gathered_on"),
    [("gloo", "cuda", "cpu"), ("gloo", "cpu", "cpu"), ("nccl", "cuda", "cuda")],
)
def test_gloo_gathers_tensors_of_a_gpu_on_the_host(
    backend: str, device: str, gathered_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's all-gather behind `DTensor.full_tensor()` reads GPU memory from the host."""
    backends = {"the group of the mesh": backend}
    monkeypatch.setattr(parity, "DTensor", Sharded)
    monkeypatch.setattr(parity.dist, "get_backend", backends.__getitem__)
    calls: list[str] = []
    gathered: Any = parity.full_tensor(Sharded(device, calls))  # type: ignore[arg-type]
    assert calls == [f"gathered on {gathered_on}"] and gathered.device.type == device
