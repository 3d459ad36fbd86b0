"""Clipping and fused AdamW call few operators, for any number of parameters."""

from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.close import FP64_LAYER, assert_close
from support.tiny_models import tiny
from torch import Tensor, nn
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


def _build_model(lora: bool) -> tuple[nn.Module, list[Tensor]]:
    """Return a model of 8 layers with gradients, and its trained parameters."""
    model: Any = tiny(num_hidden_layers=8)
    if lora:
        model = with_lora(model, seed=0)
    apply_ep_fsdp2(model, ep_size=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(1)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
        local = parameter.grad.to_local()
        local.copy_(torch.randn(local.shape, generator=generator, dtype=local.dtype))
    meshes = {(p.device_mesh, p.placements) for p in trained}
    assert len(trained) > 60 and len(meshes) == 2
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
