"""Every type with experts: its routing is recorded and replayed, or refused by name.

A record is what stock chooses, by decoder layer. Random routes equal stock that is made to choose
them by one topk in each layer, and replay answers one topk in each layer as well, however many its
router calls; the rows of its experts are the tokens of a sequence, in their order.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, batch, loss_of, tiny_config
from support.architectures.precision import budget
from support.architectures.sizes import TOP_K
from support.architectures.steps import REFUSED as NOT_PATCHED
from support.architectures.steps import build
from support.close import assert_close
from support.forced import forced_topk, random_ids
from torch import Tensor, nn

from hf_moe_ep import Routes, RoutingReplay, patch
from hf_moe_ep.routing import replaying

EXPERTS, SEQUENCE = 8, 11
REFUSED = {
    "ernie4_5_vl_moe": "has several experts modules",
    "phimoe": "PhimoeTopKRouter do not choose by one torch.topk over the 8 experts",
    "zaya": "ZayaRouter do not choose by one torch.topk over the 8 experts",
}
REPLAYED = [name for name in MODEL_TYPES if name not in NOT_PATCHED and name not in REFUSED]
# Their routers choose groups of experts first.
GROUPED = [n for n in REPLAYED if hasattr(tiny_config(n).get_text_config(), "topk_group")]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REPLAYED)
def test_random_routes_equal_stock_made_to_choose_them(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _equals_stock(model_type, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", GROUPED)
def test_a_choice_of_as_many_groups_is_not_that_of_experts(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four groups, then three experts: two calls of topk."""
    _equals_stock(model_type, monkeypatch, topk_group=TOP_K)


def _equals_stock(model_type: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    model, stock = patch(build(model_type, **options)), build(model_type, **options)
    inputs = batch(model, 2, SEQUENCE)
    layers = _layers_with_experts(stock)
    if model_type == "deepseek_v4":  # its first layer chooses by a table of token ids
        layers = layers[1:]
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.record() as routes:
        loss_of(model, inputs)
    assert routes.layers == tuple(layers)
    with torch.no_grad(), forced_topk(EXPERTS, torch.full(routes.ids.shape, -1)) as chosen:
        loss_of(stock, inputs)
    assert torch.equal(routes.ids.flatten(0, 1).long(), torch.stack(chosen, 1))
    ids = random_ids(2, SEQUENCE, len(layers), EXPERTS, routes.ids.shape[3])
    ids[1, 2:4] = -1
    with forced_topk(EXPERTS, ids) as lives:
        want = loss_of(stock, inputs)
    want.backward()
    answered = _count_answers(monkeypatch)
    with replay.replay(Routes(ids, routes.layers)):
        got = loss_of(model, inputs)
    got.backward()
    assert answered == [1] * len(layers), f"topks answered in each layer: {answered}"
    assert replay.last.replayed == len(layers) * (2 * SEQUENCE - 2)
    assert replay.last.agreement == _agreement(ids, lives) < 0.9
    assert_close(f"{model_type}: loss", got, want, budget(model_type))
    stocks = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        found, wanted = parameter.grad, stocks[name].grad
        if found is None or wanted is None:
            other = wanted if found is None else found
            assert other is None or not other.any(), name
            continue
        assert_close(f"{model_type}: grad of {name}", found, wanted, budget(model_type, name))
    _rows_are_tokens(model, inputs)


def _layers_with_experts(stock: nn.Module) -> list[int]:
    """Decoder layers, by the names of the stacked weights that stock has in them."""
    names = (name for name, p in stock.named_parameters() if p.ndim == 3 and "experts" in name)
    numbers = {int(found[1]) for n in names if (found := re.search(r"\blayers\.(\d+)\.", n))}
    return sorted(numbers)


def _count_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of topk that replay answers in each layer."""
    answered: list[int] = []
    original = replaying.ChosenTopK

    def chosen(num_experts: int, upcoming: Any, decide: Callable[..., Tensor]) -> Any:
        place = len(answered)
        answered.append(0)

        def counted(*given: Any) -> Tensor:
            answered[place] += 1
            return decide(*given)

        return original(num_experts, upcoming, counted)

    monkeypatch.setattr(replaying, "ChosenTopK", chosen)
    return answered


def _agreement(ids: Tensor, lives: list[Tensor]) -> float:
    """By hand: the share of given (token, expert) pairs that stock's router would choose."""
    pairs = [
        (expert, live)
        for place, live_TK in enumerate(lives)
        for given, live in zip(
            ids[:, :, place].flatten(0, 1).tolist(), live_TK.tolist(), strict=True
        )
        for expert in given
        if expert >= 0
    ]
    return sum(expert in live for expert, live in pairs) / len(pairs)


def _rows_are_tokens(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Another last token of the last sequence changes the last row, and none of other sequences."""
    experts = next(m for m in model.modules() if getattr(m, "_hf_moe_ep", 0) and m is not model)
    seen: list[Tensor] = []
    hook = experts.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    tokens = inputs["input_ids"].clone()
    tokens[-1, -1] = (tokens[-1, -1] + 1) % 50
    with torch.no_grad():
        loss_of(model, inputs)
        loss_of(model, inputs | {"input_ids": tokens})
    hook.remove()
    changed = (seen[0] != seen[1]).any(-1).nonzero().flatten().tolist()
    assert len(seen[0]) == 2 * SEQUENCE and changed[-1] == 2 * SEQUENCE - 1
    assert min(changed) >= SEQUENCE


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(model_type: str) -> None:
    model = patch(build(model_type))
    with pytest.raises(
        ValueError, match=f"routing of {model_type} .*{re.escape(REFUSED[model_type])}"
    ):
        RoutingReplay(model)
