"""The routing of every type with experts is recorded and replayed, or refused by name.

Recorded ids must equal stock's choices in each decoder layer, and a replay of random ids must equal
a stock model that is forced to choose the same ids. Some routers call topk several times; replay
must replace exactly the call by which the layer chooses. The rows of experts must be the tokens in
their order.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, batch, loss_of, tiny_config
from support.architectures.precision import budget
from support.architectures.sizes import TOP_K
from support.architectures.steps import build, whole
from support.close import assert_close
from support.forced import draw_random_ids, force_topk
from torch import Tensor, nn

from hf_moe_ep import Routes, RoutingReplay, patch
from hf_moe_ep.routing import replaying

EXPERTS, SEQUENCE = 8, 11
REFUSED = {
    "dbrx": "Linear do not choose by one torch.topk over the 8 experts",
    "diffusion_gemma": "its layers run twice per forward, in two towers that share parameters",
    "ernie4_5_vl_moe": "has several experts modules",
    "longcat_flash": "its routers also choose experts that return their input",
    "phimoe": "PhimoeTopKRouter do not choose by one torch.topk over the 8 experts",
    "zaya": "ZayaRouter do not choose by one torch.topk over the 8 experts",
}
# The number of topk calls of a layer, if it is not 1. The router of Llama-4 does not return its
# choice, so our block calls topk again. JetMoE also chooses experts of its attention.
REPLACED_CALLS = {"llama4": 2, "llama4_text": 2}
STOCK_CALLS = {"jetmoe": 2}
# Some layers of these types run several times in a forward, and choose several times.
LOOPED = [name for name in MODEL_TYPES if "_loop" in name]
NOT_REPLAYED = {*REFUSED, *LOOPED}
REPLAYED = [name for name in MODEL_TYPES if name not in NOT_REPLAYED]
# The types whose routers choose groups of experts first.
GROUPED = [n for n in REPLAYED if hasattr(tiny_config(n).get_text_config(), "topk_group")]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REPLAYED)
def test_records_and_random_routes_equal_stock(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare_with_stock(model_type, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", GROUPED)
def test_a_choice_of_groups_is_not_replayed(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router calls topk for three of four groups, and then for three experts."""
    _compare_with_stock(model_type, monkeypatch, topk_group=TOP_K)


@pytest.mark.parametrize("model_type", LOOPED[-1:])
def test_layers_that_run_several_times_are_refused(model_type: str) -> None:
    model = patch(build(model_type))
    with (
        pytest.raises(ValueError, match="experts ran twice in one forward; recording needs one ch"),
        RoutingReplay(model).record(),
    ):
        loss_of(model, batch(model, 2, SEQUENCE))


def _compare_with_stock(model_type: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    model, stock = patch(build(model_type, **options)), build(model_type, **options)
    inputs = batch(model, 2, SEQUENCE)
    layers = _list_layers_with_experts(stock)
    if model_type == "deepseek_v4":  # its first layer chooses by a table of token ids
        layers = layers[1:]
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.record() as routes:
        loss_of(model, inputs)
    assert routes.layers == tuple(layers)
    calls = STOCK_CALLS.get(model_type, 1)
    all_live = torch.full(routes.ids.shape, -1)
    with torch.no_grad(), force_topk(EXPERTS, all_live, calls) as stock_ids:
        loss_of(stock, inputs)
    assert torch.equal(routes.ids.flatten(0, 1).long(), torch.stack(stock_ids, 1))
    ids = draw_random_ids(2, SEQUENCE, len(layers), EXPERTS, routes.ids.shape[3])
    ids[1, 2:4] = -1
    with force_topk(EXPERTS, ids, calls) as live_ids:
        want = loss_of(stock, inputs)
    want.backward()
    num_replaced = _count_replaced(monkeypatch)
    with replay.replay(Routes(ids, routes.layers)):
        got = loss_of(model, inputs)
    got.backward()
    want_replaced = [REPLACED_CALLS.get(model_type, 1)] * len(layers)
    assert num_replaced == want_replaced, f"topks replaced in each layer: {num_replaced}"
    assert replay.last.replayed == len(layers) * (2 * SEQUENCE - 2)
    assert replay.last.agreement == _compute_agreement(ids, live_ids) < 0.9
    assert_close(f"{model_type}: loss", got, want, budget(model_type))
    grads = whole(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, parameter in stock.named_parameters():
        grad, want_grad = grads.get(name), parameter.grad
        if grad is None or want_grad is None:
            other = want_grad if grad is None else grad
            assert other is None or not other.any(), name
            continue
        assert_close(f"{model_type}: grad of {name}", grad, want_grad, budget(model_type, name))
    _check_rows_are_tokens(model, inputs)


def _list_layers_with_experts(stock: nn.Module) -> list[int]:
    """List the decoder layers in which stock has stacked weights of experts."""
    names = (name for name, p in stock.named_parameters() if p.ndim == 3 and "experts" in name)
    numbers = {int(match[1]) for n in names if (match := re.search(r"\blayers\.(\d+)\.", n))}
    return sorted(numbers)


def _count_replaced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that will have the number of topk calls that replay replaces in each layer."""
    counts: list[int] = []
    original = replaying.ChosenTopK

    def chosen(num_experts: int, upcoming: Any, decide: Callable[..., Tensor]) -> Any:
        layer = len(counts)
        counts.append(0)

        def counted(*args: Any) -> Tensor:
            counts[layer] += 1
            return decide(*args)

        return original(num_experts, upcoming, counted)

    monkeypatch.setattr(replaying, "ChosenTopK", chosen)
    return counts


def _compute_agreement(ids: Tensor, live_ids: list[Tensor]) -> float:
    """Compute the share of replayed (token, expert) pairs that stock's router would choose."""
    pairs = [
        (expert, live)
        for layer, live_TK in enumerate(live_ids)
        for replayed, live in zip(
            ids[:, :, layer].flatten(0, 1).tolist(), live_TK.tolist(), strict=True
        )
        for expert in replayed
        if expert >= 0
    ]
    return sum(expert in live for expert, live in pairs) / len(pairs)


def _check_rows_are_tokens(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Check that a change of the last token changes the last row, and no other sequence's rows."""
    experts = next(m for m in model.modules() if getattr(m, "_hf_moe_ep", 0) and m is not model)
    rows: list[Tensor] = []
    hook = experts.register_forward_pre_hook(lambda module, args: rows.append(args[0].detach()))
    tokens = inputs["input_ids"].clone()
    tokens[-1, -1] = (tokens[-1, -1] + 1) % 50
    with torch.no_grad():
        loss_of(model, inputs)
        loss_of(model, inputs | {"input_ids": tokens})
    hook.remove()
    changed = (rows[0] != rows[1]).any(-1).nonzero().flatten().tolist()
    assert len(rows[0]) == 2 * SEQUENCE and changed[-1] == 2 * SEQUENCE - 1
    assert min(changed) >= SEQUENCE


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REFUSED)
def test_types_that_cannot_be_replayed_are_refused_by_name(model_type: str) -> None:
    model = patch(build(model_type))
    with pytest.raises(
        ValueError, match=f"routing of {model_type} .*{re.escape(REFUSED[model_type])}"
    ):
        RoutingReplay(model)
