"""Backward frees its large tensors before it allocates the gradients of the experts."""

import weakref
from typing import Any

import pytest
import torch
from expert_cases import ADAPTERS, FORMULAS, TRITON, draw_with_adapters

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.interface import ExpertWeights

# For each tensor that a launcher returns: True if the gradients of the experts need the tensor.
NEEDED_FOR_EXPERTS = {"grouped_mm": (False,), "up": (False, False), "dgated": (True, True, False)}


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("backend", "device"), TRITON)
def test_tensors_that_the_experts_gradients_do_not_need_are_freed(
    backend: str, device: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, gradients of rows [A, H] and pre-activations [A, 2F] take about 1 GB each."""
    case = FORMULAS["silu, bias"]
    inputs = draw_with_adapters(case, 2, torch.float32, device)
    rows_RH, weights_RK = inputs.pop("rows"), inputs.pop("weights")
    experts = ExpertWeights(**inputs)
    routing = triton_mlp.route(case.ids_RK(device), case.counts_L(), experts, rows_RH)
    call = (rows_RH, weights_RK, experts, routing)
    out_RH, pre_AG = triton_mlp.forward(*call, case.formula, True)
    watched_tensors: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    alive: list[str] = []

    def watch(name: str) -> Any:
        original = getattr(triton_mlp, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            parts = out if isinstance(out, tuple) else (out,)
            for number, (part, needed) in enumerate(
                zip(parts, NEEDED_FOR_EXPERTS[name], strict=True)
            ):
                if not needed:
                    watched_tensors.append((f"{name} {number}", weakref.ref(part)))
            return out

        return run

    original_outer = triton_mlp.outer

    def outer(*args: Any, **kwargs: Any) -> None:
        alive.extend(name for name, ref in watched_tensors if ref() is not None)
        original_outer(*args, **kwargs)

    for name in NEEDED_FOR_EXPERTS:
        monkeypatch.setattr(triton_mlp, name, watch(name))
    monkeypatch.setattr(triton_mlp, "outer", outer)
    pre_AG = None if recompute else pre_AG
    need = {"rows", "weights", "up", "up_bias", "down", "down_bias", *ADAPTERS}
    triton_mlp.backward(
        torch.ones_like(out_RH), *call, pre_AG, case.formula, grad_scale=1.0, need=need
    )
    assert len(watched_tensors) == (4 if recompute else 2)
    assert alive == []
