"""Every type with experts: its routing is replayed, or refused by name.

Random routes equal stock that is made to choose them by one topk in each layer; and the rows of
its experts are the tokens of a sequence, in their order.
"""

import re
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, batch, loss_of
from support.architectures.precision import budget
from support.architectures.steps import REFUSED as NOT_PATCHED
from support.architectures.steps import build
from support.close import assert_close
from support.forced import forced_topk, random_ids
from torch import Tensor, nn

from hf_moe_ep import Routes, RoutingReplay, patch

EXPERTS, SEQUENCE = 8, 11
REFUSED = {
    "ernie4_5_vl_moe": "has several experts modules",
    "phimoe": "PhimoeTopKRouter do not choose by one torch.topk over the 8 experts",
    "zaya": "ZayaRouter do not choose by one torch.topk over the 8 experts",
}
PATCHED = [name for name in MODEL_TYPES if name not in NOT_PATCHED]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in PATCHED if name not in REFUSED])
def test_random_routes_equal_stock_made_to_choose_them(model_type: str) -> None:
    model, stock = patch(build(model_type)), build(model_type)
    inputs = batch(model, 2, SEQUENCE)
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.record() as routes:
        loss_of(model, inputs)
    hashed = model_type == "deepseek_v4"  # its first layer chooses by a table of token ids
    with_experts = len(model._hf_moe_ep.moe_layers)
    assert len(routes.layers) == with_experts - hashed
    ids = random_ids(2, SEQUENCE, len(routes.layers), EXPERTS, routes.ids.shape[3])
    ids[1, 2:4] = -1
    with forced_topk(EXPERTS, ids):
        want = loss_of(stock, inputs)
    want.backward()
    with replay.replay(Routes(ids, routes.layers)):
        got = loss_of(model, inputs)
    got.backward()
    assert replay.last.replayed == len(routes.layers) * (2 * SEQUENCE - 2)
    assert replay.last.agreement < 0.9
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
