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
from hf_moe_ep.sequence.packed_rows import number_documents
from hf_moe_ep.sequence.slices import SLICE
from hf_moe_ep.sequence.split import FindDocuments

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


def _make_padded(model: Any) -> dict[str, Any]:
    return {**batch(model, 2, 10, pad=3), "position_ids": torch.arange(10).unsqueeze(0)}


def _compute_grads(model: nn.Module, forward: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = forward(**inputs, use_cache=False).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return grads | {"loss": loss.detach()}


TYPES = ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_training_with_padding_is_traced_whole_and_equals_uncompiled(model_type: str) -> None:
    torch.compiler.reset()
    counters.clear()
    model = patch(models.tiny(model_type, output_router_logits=False), experts_backend="torch")
    inputs = _make_padded(model)
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


ONE_DOCUMENT = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
TWO_DOCUMENTS = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]]
# Without a mask, a document also begins after a gap between positions. A mask that hides no token
# does not count if the positions of any row restart.
WITH_GAP = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]]
ONLY_GAPS = [[0, 1, 2, 6, 7, 8, 9, 10, 11, 12], [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "has_mask"),
    [("gpt_oss", False), ("gpt_oss", True), ("afmoe", False), ("afmoe", True)],
)
def test_attention_separates_packed_documents_in_the_same_graph_for_all_positions(
    model_type: str, has_mask: bool
) -> None:
    """Stock code mixes the documents of these models. They have eager attention and sdpa."""
    torch.compiler.reset()
    counters.clear()
    model = patch(models.tiny(model_type, output_router_logits=False), experts_backend="torch")
    inputs: dict[str, Any] = batch(model, 2, 10)
    if has_mask:
        inputs["attention_mask"] = torch.ones(2, 10, dtype=torch.int64)
    else:
        inputs.pop("attention_mask", None)
    inputs["position_ids"] = torch.tensor(ONE_DOCUMENT)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the first forward allocates the counts of chosen experts
        _compute_grads(model, compiled, inputs)
    num_graphs = counters["stats"]["unique_graphs"]
    losses = []
    for positions in (ONE_DOCUMENT, TWO_DOCUMENTS, WITH_GAP, ONLY_GAPS):
        inputs["position_ids"] = torch.tensor(positions)
        want = _compute_grads(model, model, inputs)
        got = _compute_grads(model, compiled, inputs)
        assert want.keys() == got.keys() and len(want) > 1
        for name in want:
            assert torch.allclose(got[name], want[name], rtol=1e-10, atol=1e-13), (positions, name)
        losses.append(float(want["loss"]))
    assert len(set(losses)) == len(losses)
    assert 0 < num_graphs == counters["stats"]["unique_graphs"]


# Positions of padding, as `generate` makes them.
PADDED = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 1, 1, 1, 1]]
VISIBLE = torch.ones(2, 10, dtype=torch.int64)
# A document may begin after a gap only if there is no mask (B, S) that hides a token.
MASKS = [None, VISIBLE, VISIBLE.bool()]
BATCHES = [(x, mask) for x in (ONE_DOCUMENT, TWO_DOCUMENTS, WITH_GAP, ONLY_GAPS) for mask in MASKS]
HIDES_PADDING = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
BATCHES += [(x, HIDES_PADDING) for x in (ONE_DOCUMENT, PADDED, ONLY_GAPS)]
BATCHES += [([row], mask) for row in (*TWO_DOCUMENTS, ONLY_GAPS[0]) for mask in MASKS]


def test_a_trace_finds_the_documents_that_other_forwards_find() -> None:
    model, tokens = models.tiny("gpt_oss"), torch.zeros(2, 10, dtype=torch.int64)
    for rows, mask in BATCHES:
        positions = torch.tensor(rows)
        given = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
        changed = FindDocuments(has_mixers=False)(model, (), given)
        documents = changed[1][SLICE].documents if changed else [[(0, 10)]] * 2
        want = [
            [number for number, (start, stop) in enumerate(row) for _ in range(start, stop)]
            for row in documents
        ]
        assert number_documents(positions, mask).expand(2, -1).tolist() == want, (rows, mask)


def test_positions_of_packed_documents_break_a_full_graph_of_mixers_with_a_reason() -> None:
    """A mixer runs once per document, and the number of documents is not known in a trace."""
    torch.compiler.reset()
    model = patch(models.tiny("lfm2_moe", output_router_logits=False), experts_backend="torch")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"packed documents.*leave out fullgraph or position_ids"):
        compiled(**_make_padded(model), use_cache=False)
