"""Clipping and fused AdamW call few operators, for any number of parameters.

With CPU offload, no parameter of its own is read by the host or copied to another device.
"""

from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.close import FP64_LAYER, assert_close
from support.tiny_models import tiny
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_
from hf_moe_ep.upstream.process_groups import fake_group


class _Calls(TorchDispatchMode):
    """Lists the operators that are called, without markers of the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "profiler":
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class _HostCalls(TorchFunctionMode):
    """Lists the calls of Tensor methods that read a number, or may copy to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = (resolve_name(func) or "").removeprefix("torch.Tensor.")
        if name in _HOST_METHODS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


_CONVERSIONS = ("__bool__", "__float__", "__int__", "__index__")
_HOST_METHODS = ("item", "tolist", "numpy", "cpu", "cuda", "to", *_CONVERSIONS)


def _build_model(lora: bool, num_layers: int = 8, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    """Return a model with gradients, and its trained parameters."""
    model: Any = tiny(num_hidden_layers=num_layers)
    if lora:
        model = with_lora(model, seed=0)
    apply_ep_fsdp2(model, ep_size=2, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(1)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
        local = parameter.grad.to_local()
        local.copy_(torch.randn(local.shape, generator=generator, dtype=local.dtype))
    meshes = {(p.device_mesh, p.placements) for p in trained}
    assert len(trained) > 7 * num_layers and len(meshes) == 2
    return model, trained


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_clipping_calls_few_operators(lora: bool) -> None:
    with fake_group(0, 4):
        model, _ = _build_model(lora)
        for norm_type, limit in ((2.0, 30), (float("inf"), 45)):
            with _Calls() as calls:
                clip_grad_norm_(model, 1.0, norm_type)
            assert len(calls.names) <= limit, (norm_type, calls.names)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_fused_adamw_steps_all_meshes_in_one_call(lora: bool) -> None:
    """A loop over the parameters gives the same result, and calls ten operators per parameter."""
    results = []
    with fake_group(0, 4):
        for options in ({"fused": True}, {"foreach": False}):
            _, trained = _build_model(lora)
            optimizer = torch.optim.AdamW(trained, lr=1e-2, **options)
            optimizer.step()
            with _Calls() as calls:
                optimizer.step()
            results.append((calls.names, [p.detach().to_local() for p in trained]))
    (fused, got), (looped, want) = results
    assert fused.count("aten._fused_adamw_") == 1 and len(fused) <= 4, fused
    assert len(looped) >= 10 * len(want)
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert_close(f"parameter {index}", ours, theirs, FP64_LAYER)


@pytest.mark.parametrize(
    "lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "LoRA"]
)
def test_no_parameter_is_read_by_the_host_under_offload(lora: bool) -> None:
    """The calls do not depend on the number of parameters: at most 3 for each of the two meshes."""
    found = []
    with fake_group(0, 4):
        for num_layers in (2, 8):
            model, trained = _build_model(
                lora, num_layers, offload_policy=CPUOffloadPolicy(pin_memory=False)
            )
            optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
            optimizer.step()  # allocates the moments
            with _Calls() as operators, _HostCalls() as calls:
                clip_grad_norm_(model, 1.0)
                optimizer.step()
            assert "aten._local_scalar_dense" not in operators.names
            found.append(calls.names)
    few, many = found
    assert few == many and 0 < len(few) <= 3 * 2, found
