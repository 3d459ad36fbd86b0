"""For every type with a load-balancing (aux) loss, the loss on 2 ranks equals the loss of stock.

Rank 0 has one row of the batch and rank 1 has two, padded to one length, so ranks have different
numbers of tokens. The mean of losses that the ranks compute separately would be wrong.
"""

import inspect
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.architectures import MODEL_TYPES, batch, model_class, tiny, tiny_config
from support.architectures.parts import parts_of
from support.architectures.precision import budget
from support.architectures.steps import CUT_LOGITS, assert_same_grads
from support.checks import Check, Found
from support.close import FP32_INSIDE, assert_close, max_error

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.moe.routers_alone import find_routers

FUNCTION = "load_balancing_loss_func"
WITH_AUX_LOSS = (
    "dbrx",
    "deepseek_v4",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "flex_olmo",
    "flint",
    "glm4v_moe",
    "glm5_next",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "jamba",
    "jetmoe",
    "laguna",
    "lara_mini",
    "mellum",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_omni_moe_thinker",
    "qwen3_vl_moe",
    "qwen4_exp",
    "qwen4_exp_text",
)


# These losses also use logits of other routers: the second router of a layer, for pictures, and the
# routers of experts in the attention.
TYPES_WITH_OTHER_ROUTERS = ("ernie4_5_vl_moe", "jetmoe")


def _equals_stock(model_type: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    model, stock = tiny(model_type, seed=rank), tiny(model_type)
    apply_ep_fsdp2(model, ep_size=2)
    whole = batch(stock, 3, 11, pad=4)
    assert not whole["attention_mask"].all()
    inputs = {name: value[:1] if rank == 0 else value[1:] for name, value in whole.items()}
    options = {
        "num_items_in_batch": whole["labels"][:, 1:].ne(-100).sum(),
        "output_router_logits": True,
    }
    actual, expected = model(**inputs, **options), stock(**whole, **options)
    tolerance = max(budget(model_type), FP32_INSIDE)
    assert_close(f"{model_type}: aux loss", actual.aux_loss, expected.aux_loss, tolerance)
    total = actual.loss.detach().clone()
    dist.all_reduce(total)
    assert_close(f"{model_type}: loss", total, expected.loss, tolerance)
    (actual.loss * world).backward()
    expected.loss.backward()
    # Stock computes all rows in one batch, so its sums in fp32 have another order.
    assert_same_grads(model_type, model, stock, 10 * FP32_INSIDE)


CHECKS = [
    Check(name, 2, partial(_equals_stock, name), slow=True).as_parameter() for name in WITH_AUX_LOSS
]


@pytest.mark.parametrize("claim", CHECKS)
def test_aux_loss_on_two_ranks(found: Found, claim: Check) -> None:
    """Compare the value on each rank, the sum of the ranks' losses and every gradient."""
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [n for n in WITH_AUX_LOSS if n not in TYPES_WITH_OTHER_ROUTERS]
)
def test_aux_loss_per_layer_equals_the_mean_of_stocks_function(model_type: str) -> None:
    """The reference calls stock's function once for each layer of a stock model.

    Our loss has gradients for routers only. Only the last layer's loss depends on the last router,
    so the gradient of this router equals the reference's gradient.
    """
    stock, model = tiny(model_type), patch(tiny(model_type), aux_loss_per_layer=True)
    inputs = {**batch(stock, 3, 11, pad=4), "output_router_logits": True}
    names, calls = inspect.unwrap(type(stock).forward).__globals__, []
    function = names[FUNCTION]

    def record_call(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    with mock.patch.dict(names, {FUNCTION: record_call}):
        expected = stock(**inputs)
    ((layer_logits, *rest),) = calls
    mean = torch.stack([function((rows,), *rest) for rows in layer_logits]).mean()
    actual = model(**inputs)
    assert_close(f"{model_type}: aux loss", actual.aux_loss, mean, 10 * FP32_INSIDE)
    assert max_error(expected.aux_loss, mean) > 1e-4, "the layers must choose different experts"
    routers = find_routers(parts_of(model))
    router_parameters = {id(parameter) for router in routers for parameter in router.parameters()}
    actual.aux_loss.backward()
    with_grad = {id(p) for p in model.parameters() if p.grad is not None and p.grad.any()}
    assert with_grad and with_grad <= router_parameters
    mean.backward()
    last = [name for name, p in model.named_parameters() if id(p) in with_grad][-1]
    last_grad, stock_grad = (m.get_parameter(last).grad for m in (model, stock))
    assert_close(f"{model_type}: gradient of {last}", last_grad, stock_grad, 10 * FP32_INSIDE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changed", "error"),
    [
        *(
            (n, {}, "from logits that none of its routers returned")
            for n in TYPES_WITH_OTHER_ROUTERS
        ),
        ("phimoe", {"input_jitter_noise": 0.1}, "PhimoeTopKRouter changes its input in place"),
    ],
)
def test_aux_loss_per_layer_is_refused_for_unusual_routers(
    model_type: str, changed: dict[str, Any], error: str
) -> None:
    config = tiny_config(model_type)
    for name, value in changed.items():
        setattr(config, name, value)
    model = patch(model_class(model_type)(config), aux_loss_per_layer=True).train()
    inputs = {**batch(model, 3, 11, pad=4), "output_router_logits": True}
    with pytest.raises(ValueError, match=error):
        model(**inputs)
    model.eval()
    model(**inputs)


@pytest.mark.slow
def test_no_other_type_has_an_aux_loss() -> None:
    """A type with an aux loss calls the function in stock's forward, and its plan names the
    coefficient.
    """
    in_stock, in_plans = [], []
    for name in MODEL_TYPES:
        with torch.device("meta"):
            model = model_class(name)(tiny_config(name))
        if FUNCTION in inspect.unwrap(type(model).forward).__code__.co_names:
            in_stock.append(name)
        if parts_of(model).plan.aux_loss_coef is not None:
            in_plans.append(name)
    assert in_plans == list(WITH_AUX_LOSS)
    assert in_stock == list(WITH_AUX_LOSS)
