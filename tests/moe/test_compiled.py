"""torch.compile makes one graph for all forwards of a patched model that is not sharded.

`fullgraph=True` makes a second graph an error. Transformers tests its models in this way, in
training with padding and in generation with a static cache.
"""

from typing import Any

import pytest
import torch
from support.architectures import models
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from transformers import CompileConfig, Qwen3MoeModel

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


def _make_padded(model: Any, *, positions: bool) -> dict[str, Any]:
    inputs: dict[str, Any] = batch(model, 2, 10, pad=3)
    return inputs | ({"position_ids": torch.arange(10).unsqueeze(0)} if positions else {})


def _compute_grads(model: nn.Module, forward: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = forward(**inputs, use_cache=False).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return grads | {"loss": loss.detach()}


# gpt-oss has hooks that find packed documents in the position ids, which cannot be traced.
TYPES = ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_training_with_padding_is_traced_whole_and_equals_uncompiled(model_type: str) -> None:
    torch.compiler.reset()
    counters.clear()
    model = patch(models.tiny(model_type, output_router_logits=False), experts_backend="torch")
    inputs = _make_padded(model, positions=model_type != "gpt_oss")
    want = _compute_grads(model, model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = _compute_grads(model, compiled, inputs)
    assert want.keys() == got.keys() and len(want) > 1
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_generation_with_a_static_cache_is_traced_and_equals_uncompiled(model_type: str) -> None:
    torch.compiler.reset()
    counters.clear()
    model = patch(models.tiny(model_type, output_router_logits=False), experts_backend="torch")
    padded = batch(model.eval(), 2, 10, pad=3)
    prompt = {name: padded[name].flip(1) for name in ("input_ids", "attention_mask")}
    settings = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4}
    settings["cache_implementation"] = "static"
    want = model.generate(**prompt, **settings, disable_compile=True)
    assert not counters["stats"]["unique_graphs"]
    compilation = CompileConfig(fullgraph=True, backend="aot_eager", mode=None, dynamic=False)
    compilation._compile_all_devices = True  # otherwise transformers compiles on GPUs only
    got = model.generate(**prompt, **settings, compile_config=compilation)
    assert torch.equal(got, want)
    assert counters["stats"]["unique_graphs"]


def test_positions_of_packed_documents_break_a_full_graph_with_a_reason() -> None:
    """Stock code mixes packed documents in gpt-oss, so hooks read the position ids."""
    torch.compiler.reset()
    model = patch(models.tiny("gpt_oss", output_router_logits=False), experts_backend="torch")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"packed documents.*leave out fullgraph or position_ids"):
        compiled(**_make_padded(model, positions=True), use_cache=False)
