"""LoRA on stacked experts against stock PEFT on the stock model in one process, fp64."""

import copy
from functools import partial
from pathlib import Path

import parity
import peft
import pytest
import torch
from adapters import EXPERTS, with_lora
from close import assert_close
from gathers import gathered_units
from parity import Case, run_cases
from run_ranks import run_ranks
from test_vision import modality_by_step
from tiny_models import batch, tiny
from torch.nn.utils.parametrize import is_parametrized

from hf_moe_ep import apply_ep_fsdp2, patch, save_pretrained

CHECKPOINT = partial(parity.checkpointing, use_reentrant=False)


BOTH = with_lora
PICTURES = partial(with_lora, modules=("q_proj", "qkv"))
VISION = {"model": {"name": "qwen3_vl_moe"}, "micro_batches": modality_by_step, "budget": 1e-6}
TWO_RANKS = [
    Case("ep 2", 2, 2, wrap=BOTH),
    Case("ep 1, rank 1, experts only", 2, 1, wrap=partial(with_lora, r=1, modules=())),
    Case("ep 2, checkpoint, rsLoRA", 2, 2, wrap=partial(with_lora, use_rslora=True)).with_(
        prepare=CHECKPOINT, micro_batches=parity.three_micro_batches
    ),
]
FOUR_RANKS = [
    Case("ep 4, rank 16", 4, 4, wrap=partial(with_lora, r=16)),
    Case("ep 2, HSDP", 4, 2, 2, wrap=BOTH),
    Case("ep 2, sp 2", 4, 2, sp=2, wrap=BOTH),
]
FOUR_RANKS_MORE = [
    Case("ep 1", 4, 1, wrap=BOTH),
    Case("ep 2, attention only", 4, 2, wrap=partial(with_lora, parameters=())),
    Case("ep 4, two forwards, checkpoint", 4, 4, wrap=BOTH, prepare=CHECKPOINT).with_(
        micro_batches=parity.three_micro_batches, backward=parity.two_forwards_backward
    ),
    Case("ep 2, chunks", 4, 2, wrap=BOTH).with_config(dispatch_chunks=2),
    Case("pictures", 4, 2, wrap=PICTURES).with_(**VISION),
    Case("pictures, sp 2", 4, 2, sp=2, wrap=PICTURES).with_(**VISION),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TWO_RANKS, id="2"),
        pytest.param(FOUR_RANKS, id="4"),
        pytest.param(FOUR_RANKS_MORE, id="4_more", marks=pytest.mark.slow),
    ],
)
def test_adapters_equal_one_process(cases: list[Case]) -> None:
    run_ranks(run_cases, cases[0].world, cases, timeout=400)


def _saved_adapter(rank: int, world: int, folder: str) -> None:
    """Stock PEFT opens what was saved: the same bytes, and the logits of the sharded model."""
    torch.manual_seed(0)
    stock = with_lora(tiny(dtype=torch.float32))
    model = with_lora(tiny(dtype=torch.float32, seed=rank))
    model.load_state_dict(stock.state_dict())
    apply_ep_fsdp2(model, ep_size=world)
    inputs = batch(stock, 2, 9)
    with torch.no_grad():
        logits = model(**inputs).logits
    save_pretrained(model, folder)
    assert max(path.stat().st_size for path in Path(folder).iterdir()) < 500_000, "adapters alone"
    opened = peft.PeftModel.from_pretrained(tiny(dtype=torch.float32), folder)
    want = peft.get_peft_model_state_dict(stock)
    got = peft.get_peft_model_state_dict(opened)
    assert got.keys() == want.keys() and any("experts.base_layer.lora_B" in key for key in got)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    with torch.no_grad():
        assert_close("logits in stock PEFT", opened(**inputs).logits, logits, 1e-5)
        merged = opened.merge_and_unload()
        assert_close("logits when merged", merged(**inputs).logits, logits, 1e-5)


def test_saved_adapter_opens_in_stock_peft(tmp_path: Path) -> None:
    run_ranks(_saved_adapter, 2, str(tmp_path / "adapter"))


def test_adapters_switched_off_added_and_merged_as_in_stock() -> None:
    """One process, patched and not sharded; `stock` is never patched."""
    torch.manual_seed(0)
    stock = with_lora(tiny())
    model = copy.deepcopy(stock)
    patch(model)
    inputs = batch(stock, 2, 9)
    with torch.no_grad():

        def same(what: str) -> None:
            assert_close(what, model(**inputs).logits, stock(**inputs).logits, 1e-10)

        same("one adapter")
        with model.disable_adapter(), stock.disable_adapter():
            same("none")
        for one in (stock, model):
            torch.manual_seed(1)
            config = peft.LoraConfig(
                r=3, target_parameters=list(EXPERTS), init_lora_weights=False, lora_alpha=5
            )
            one.add_adapter("second", config)
            one.base_model.set_adapter(["default", "second"])
        same("two at once")
        for one in (stock, model):
            one.set_adapter("second")
        same("the second")
        model, stock = model.merge_and_unload(), stock.merge_and_unload()
        same("merged")


def test_adapters_attached_after_patch() -> None:
    stock, model = tiny(), patch(tiny())
    wrapped = []
    for one in (stock, model):
        torch.manual_seed(0)
        wrapped.append(with_lora(one))
    inputs = batch(stock, 2, 9)
    with torch.no_grad():
        want, got = (one(**inputs).logits for one in wrapped)
    assert_close("logits", got, want, 1e-10)


def _gathers_in_backward(rank: int, world: int) -> None:
    """Units gathered in backward: those that gradients pass, once, and none below them."""
    layers = {name: [f"{name}", f"{name}.mlp.experts"] for name in ("layers.0", "layers.1")}
    for trained in (("layers.0", "layers.1"), ("layers.1",)):
        model = with_lora(tiny(dtype=torch.float32), r=2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name and any(layer in name for layer in trained))
        apply_ep_fsdp2(model, ep_size=1)
        loss = model(**batch(model, 2, 9)).loss
        with gathered_units() as gathered:
            loss.backward()
        # The last layer stays gathered between forward and backward.
        want = layers["layers.0"] if "layers.0" in trained else []
        assert sorted(gathered) == sorted(want), f"adapters on {trained}"


def test_backward_gathers_only_what_gradients_pass() -> None:
    run_ranks(_gathers_in_backward, 2)


def _nothing_merged(rank: int, world: int) -> None:
    """PEFT's parametrization, which merges, is never there; AdamW's state is of shards alone."""
    torch.manual_seed(0)
    model = with_lora(tiny(dtype=torch.float32), r=2)
    apply_ep_fsdp2(model, ep_size=world)
    merged: list[bool] = []
    for name, module in model.named_modules():
        if name.endswith("experts.base_layer.base_layer"):
            module.register_forward_hook(lambda m, args, out: merged.append(is_parametrized(m)))
    model(**batch(model, 2, 9)).loss.backward()
    assert merged == [False] * model.config.num_hidden_layers
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = [state["exp_avg"].to_local().numel() for state in optimizer.state.values()]
    assert sum(moments) == sum(p.to_local().numel() for p in trained)
    whole = sum(p.numel() for p in trained)
    assert sum(moments) < 0.6 * whole, "each of two ranks has about a half"


def test_a_step_with_a_frozen_base_makes_no_merged_weight() -> None:
    run_ranks(_nothing_merged, 2)
