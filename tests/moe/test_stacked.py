"""`StackedExperts` give the results of a stock block that does not use the experts interface.

The block of these tests has a list of experts with biases. The blocks of model types are tested
with all other types, in tests/architectures, tests/checkpoints and tests/sequence.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.hub_files import assert_equal, read_all
from support.listed_experts import BLOCK, PLAN, Expert, listed
from support.parity import full_tensor
from support.tiny_models import batch
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, patch, save_pretrained, unpatch
from hf_moe_ep.moe.stacked import (
    StackedExperts,
    make_stacked_tensors,
    make_stock_tensors,
    stack_experts,
    unstack_experts,
)
from hf_moe_ep.plan import MoEBlock, WeightSource


def _assert_same_training(
    model: nn.Module, stock: nn.Module, by_rank: list[Any], rank: int
) -> None:
    world = len(by_rank)
    tokens = sum(inputs["labels"][:, 1:].ne(-100).sum() for inputs in by_rank)
    (model(**by_rank[rank], num_items_in_batch=tokens).loss * world).backward()
    for inputs in by_rank:
        stock(**inputs, num_items_in_batch=tokens).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gathered = make_stock_tensors(model, {name: full_tensor(grad) for name, grad in grads.items()})
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            assert_close(name, gathered[name], parameter.grad, FP64_MODEL)


def test_one_process_equals_stock() -> None:
    model, stock = patch(listed(), plan=PLAN), listed()
    assert isinstance(model.model.layers[0].mlp.experts, StackedExperts)
    _assert_same_training(model, stock, [batch(stock, 2, 9)], 0)


def test_an_unpatched_model_is_stock_again() -> None:
    """This holds for a model that was patched twice, and for a copy with changed weights."""
    model, stock = listed(), listed()
    patch(model, plan=PLAN)
    patch(model, plan=PLAN, experts_backend="torch")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for trained in (copied.model.layers[1].mlp.experts, stock.model.layers[1].mlp.experts):
            for parameter in trained.parameters():
                parameter.mul_(3)
    for unpatched, expected in ((unpatch(copied), stock), (unpatch(model), listed())):
        assert isinstance(unpatched.model.layers[0].mlp.experts[0], Expert)
        names = [name for name, _ in expected.named_parameters()]
        assert [name for name, _ in unpatched.named_parameters()] == names
        assert_equal(unpatched.state_dict(), expected.state_dict())
        inputs = batch(expected, 2, 9)
        assert torch.equal(unpatched(**inputs).loss, expected(**inputs).loss)


def test_a_state_dict_has_the_stock_parameters(tmp_path: Path) -> None:
    """Stock's code loads and saves stock's state dicts of a model that is not sharded."""
    model, stock, other = listed(), listed(), listed(seed=1)
    patch(model, plan=PLAN)
    assert_equal(model.state_dict(), stock.state_dict())
    model.load_state_dict(other.state_dict())
    assert_equal(model.state_dict(), other.state_dict())
    own = model.state_dict(keep_vars=True)
    assert_equal(
        make_stacked_tensors(model, model.state_dict()), {k: v.detach() for k, v in own.items()}
    )
    model.save_pretrained(tmp_path)
    assert_equal(load_file(tmp_path / "model.safetensors"), other.state_dict())


def test_a_frozen_block_stays_frozen() -> None:
    model = listed()
    model.model.layers[0].mlp.experts.requires_grad_(False)
    patch(model, plan=PLAN)
    frozen = [not p.requires_grad for p in model.model.layers[0].mlp.experts.parameters()]
    assert all(frozen) and len(frozen) == 4
    assert not any(p.requires_grad for p in unpatch(model).model.layers[0].mlp.experts.parameters())


# {WeightSource: {name: stock parameter}} of a block with 2 experts, [out 3, in 2].
_ONE = torch.arange(6.0).view(3, 2)
_TWO = 10 + _ONE
LAYOUTS = {
    WeightSource(("a.{}",)): {"a.0": _ONE, "a.1": _TWO},
    WeightSource(("a.{}",), transposed=True): {"a.0": _ONE.T, "a.1": _TWO.T},
    WeightSource(("a",), flat=True): {"a": torch.cat([_ONE, _TWO])},
    WeightSource(("a",), flat=True, transposed=True): {"a": torch.cat([_ONE.T, _TWO.T])},
    WeightSource(("a",), transposed=True): {"a": torch.stack([_ONE.T, _TWO.T])},
    WeightSource(("a", "b", "c"), flat=True): {
        name: torch.stack([_ONE[row], _TWO[row]]) for row, name in enumerate("abc")
    },
    WeightSource(("a", "b", "c")): {
        name: torch.stack([_ONE[row], _TWO[row]])[:, None] for row, name in enumerate("abc")
    },
    WeightSource(("a",)): {"a": torch.stack([_ONE, _TWO, 20 + _ONE])},  # the third is unused
}


class _BlockOfTensors(nn.Module):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.num_experts, self.act, self.other = 2, nn.SiLU(), nn.Linear(2, 2)
        self.held = nn.ParameterDict()
        for name, tensor in tensors.items():
            owner = self.held
            if "." in name:
                owner = self.held[name[0]] = self.held.get(name[0], nn.ParameterDict())
            owner[name[-1]] = nn.Parameter(tensor.clone())


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_of_stock_parameters_is_stacked_and_restored(source: WeightSource) -> None:
    """All layouts give the same stacked weight, and unstacking restores the parameters."""
    parts = tuple(f"held.{part}" for part in source.parts)
    description = MoEBlock(
        "block",
        {"down_proj": replace(source, parts=parts)},
        num_experts="num_experts",
        activation="act",
    )
    model = nn.ModuleDict({"block": _BlockOfTensors(LAYOUTS[source])})
    before = {name: p.clone() for name, p in model.named_parameters()}
    stack_experts(model, description)
    named = dict(model.named_parameters())
    assert torch.equal(named["block.experts.down_proj"], torch.stack([_ONE, _TWO]))
    assert_equal(make_stock_tensors(model, {n: p.detach() for n, p in named.items()}), before)
    assert_equal(model.state_dict(), before)
    unstack_experts(model)
    assert_equal(dict(model.named_parameters()), before)


def _without(weights: dict[str, WeightSource], name: str) -> dict[str, WeightSource]:
    return {weight: source for weight, source in weights.items() if weight != name}


REFUSED: dict[str, tuple[MoEBlock, str]] = {
    "no such parameter": (
        replace(
            BLOCK, weights={**BLOCK.weights, "down_proj": WeightSource(("experts.{}.w2.weight",))}
        ),
        r"layers.0.mlp \(ListedBlock\) has no parameter 'experts.0.w2.weight' for down_proj",
    ),
    "a parameter that is not named": (
        replace(BLOCK, weights=_without(BLOCK.weights, "down_proj_bias")),
        "'experts' of the MoE block model.layers.0.mlp .* also has 0.down.bias, 1.down.bias",
    ),
    "no number of experts": (
        replace(BLOCK, num_experts="num_routed"),
        "has no number 'num_routed'; name the attribute that holds the number of experts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_description_that_does_not_fit_is_refused(name: str) -> None:
    block, message = REFUSED[name]
    model = listed()
    with pytest.raises(ValueError, match=message):
        patch(model, plan=replace(PLAN, block=block))
    assert_equal(model.state_dict(), listed().state_dict())


def test_partly_frozen_experts_are_refused() -> None:
    model = listed()
    model.model.layers[1].mlp.experts[3].requires_grad_(False)
    message = r"gate_up_proj of the MoE block model\.layers\.1\.mlp .* cannot be stacked"
    with pytest.raises(ValueError, match=message):
        patch(model, plan=PLAN)


def test_too_few_rows_are_refused() -> None:
    model = nn.ModuleDict({"block": _BlockOfTensors({"a": torch.zeros(3, 4)})})
    model.block.num_experts = 4
    for flat in (True, False):
        description = MoEBlock(
            "block", {"down_proj": WeightSource(("held.a",), flat)}, num_experts="num_experts"
        )
        with pytest.raises(
            ValueError, match=r"'held\.a' of .* has 3 rows, which cannot be 4 experts"
        ):
            stack_experts(model, description)


def test_a_refused_model_is_unchanged() -> None:
    model = listed()
    with pytest.raises(ValueError, match=r"ep_size \(3\) must divide num_experts \(8\)"):
        patch(model, plan=PLAN, ep_size=3)
    with pytest.raises(ValueError, match="experts_backend='eager' runs the model's own experts"):
        patch(model, plan=PLAN, experts_backend="eager")
    assert isinstance(model.model.layers[0].mlp.experts[0], Expert)
    assert_equal(model.state_dict(), listed().state_dict())


def test_unpatch_restores_the_parameters_that_an_optimizer_holds() -> None:
    """The weights may have changed. A copy of the model gets parameters of its own."""
    model = listed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (held,) = (group["params"] for group in optimizer.param_groups)
    with pytest.raises(ValueError, match="ep_size"):
        patch(model, plan=PLAN, ep_size=64)
    assert [*map(id, model.parameters())] == [*map(id, held)]
    patch(model, plan=PLAN)
    copied = unpatch(copy.deepcopy(model))
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(3)
    unpatch(model)
    assert [*map(id, model.parameters())] == [*map(id, held)]
    assert set(map(id, held)).isdisjoint(map(id, copied.parameters()))
    changed = 0
    for name, stock in listed().named_parameters():
        is_tripled = torch.equal(model.get_parameter(name), 3 * stock)
        assert is_tripled or torch.equal(model.get_parameter(name), stock), name
        assert torch.equal(copied.get_parameter(name), stock), name
        changed += is_tripled and bool(stock.any())
    assert changed == model.config.num_experts


def test_compiled_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compile_layers cannot compile qwen3_moe: its plan has"):
        patch(listed(), plan=PLAN, compile_layers="aot_eager")


def test_without_a_description_the_error_names_the_notebook() -> None:
    with pytest.raises(ValueError, match=r"ModelPlan\(block=MoEBlock\(...\)\).*6_new_architecture"):
        patch(listed())


def test_adapters_on_stacked_experts_are_refused() -> None:
    config = LoraConfig(target_parameters=["experts.gate_up_proj"], init_lora_weights=False)
    with pytest.raises(ValueError, match=r"experts of model\.layers\.0\.mlp cannot have adapters"):
        get_peft_model(patch(listed(), plan=PLAN), config)
    on_modules = LoraConfig(target_modules=["gate"], init_lora_weights=False)
    with pytest.raises(ValueError, match="cannot have adapters"):
        patch(get_peft_model(listed(), on_modules), plan=PLAN)


def training_and_saved_files_equal_stock(rank: int, world: int, folder: str) -> None:
    model, stock = listed(seed=rank), listed()
    apply_ep_fsdp2(model, plan=PLAN, ep_size=2)
    _assert_same_training(model, stock, [batch(stock, 1 + r, 9, r) for r in range(world)], rank)
    save_pretrained(model, folder)
    assert_equal(read_all(Path(folder)), dict(stock.state_dict()))


@pytest.mark.parametrize("claim", on_ranks(2, training_and_saved_files_equal_stock))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
