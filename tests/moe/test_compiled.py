"""torch.compile makes one graph for all forwards of a patched model that is not sharded."""

from typing import Any

import pytest
import torch
from support.architectures import models
from support.tiny_models import batch, tiny
from torch import nn
from transformers import Qwen3MoeModel

from hf_moe_ep import patch

MORE_THAN_RECOMPILE_LIMIT = 11
AUX_LOSS = {"router_aux_loss_coef": 2.0, "output_router_logits": True}


def _make_inputs(model: Any, *, labels: bool) -> dict[str, Any]:
    """Make a batch without a mask: stock code reads the mask's values, which breaks the graph."""
    names = ("input_ids", "labels") if labels else ("input_ids",)
    inputs = batch(model, 2, 9)
    return {**{name: inputs[name] for name in names}, "use_cache": False}


def _make_base() -> nn.Module:
    return Qwen3MoeModel(tiny().config).double()


def _make_with_tower() -> nn.Module:
    return tiny("qwen3_vl_moe")


def _make_with_encoders() -> nn.Module:
    return models.tiny("ernie4_5_vl_moe")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_make_base, marks=pytest.mark.slow),
        tiny,
        pytest.param(_make_with_tower, marks=pytest.mark.slow),
        pytest.param(_make_with_encoders, marks=pytest.mark.slow),
    ],
    ids=["base", "causal LM", "tower", "encoders"],
)
def test_a_function_that_calls_the_model_is_compiled_once(make: Any) -> None:
    """torch.compile traces the hooks as well, so no hook may read a number of the forward."""
    torch.compiler.reset()
    model = patch(make(), experts_backend="torch")
    inputs = _make_inputs(model, labels=False)
    want = model(**inputs)[0]
    compiled = torch.compile(lambda **kw: model(**kw)[0], backend="aot_eager", fullgraph=True)
    for _ in range(MORE_THAN_RECOMPILE_LIMIT):
        got = compiled(**inputs)
    assert torch.allclose(got, want, rtol=1e-10)


@pytest.mark.slow
def test_the_aux_losses_of_a_stock_and_a_patched_model_are_compiled() -> None:
    """Both models call the switch with which `patch` has replaced a function (`AuxLossSwitch`)."""
    stock = tiny(**AUX_LOSS, experts_implementation="batched_mm")
    patched = patch(tiny(**AUX_LOSS), experts_backend="torch")
    inputs = _make_inputs(stock, labels=True)
    for model in (stock, patched):
        torch.compiler.reset()
        want = model(**inputs)  # transformers installs its recorders here
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
        assert torch.allclose(got.loss, want.loss) and got.aux_loss > 0
        assert torch.allclose(got.aux_loss, want.aux_loss)
