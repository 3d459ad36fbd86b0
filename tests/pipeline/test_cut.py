"""Models are cut by layers, and batches by rows. The stages of a model compute what stock computes.

For every type of model that can be cut, the stages run one after the other in one process.
"""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, batch
from support.architectures.precision import budget
from support.architectures.steps import build
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.tiny_models import tiny
from torch import Tensor, nn

from hf_moe_ep import ParallelConfig, patch
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.pipeline.cut import (
    assign_layers_to_stages,
    cut_model,
    map_names_to_stages,
    select_parts_of_stage,
)
from hf_moe_ep.pipeline.micro_batches import check_can_be_cut, count_targets, cut_batch
from hf_moe_ep.pipeline.run import _move_to_device
from hf_moe_ep.sharding.units import list_units
from hf_moe_ep.state import STATE, ModelState


def test_layers_are_divided_evenly_or_as_given() -> None:
    def divide(num_layers: int, **config: Any) -> list[int]:
        ranges = assign_layers_to_stages(num_layers, ParallelConfig(**config))
        assert [index for layers in ranges for index in layers] == list(range(num_layers))
        return [len(layers) for layers in ranges]

    assert divide(8, pp_size=4) == [2, 2, 2, 2]
    assert divide(7, pp_size=3) == [3, 2, 2]
    assert divide(7, pp_size=2, pp_layers=[2, 5]) == [2, 5]
    with pytest.raises(ValueError, match=r"pp_size \(4\).*has 3 layers; try pp_size=3"):
        divide(3, pp_size=4)
    with pytest.raises(ValueError, match=r"gives 6 layers to 2 stages.*has 7 layers"):
        divide(7, pp_size=2, pp_layers=(2, 4))
    with pytest.raises(ValueError, match=r"has 3 numbers.*pp_size is 2; set pp_size=3"):
        ParallelConfig(pp_size=2, pp_layers=(1, 2, 3))
    with pytest.raises(ValueError, match=r"pp_layers must be a whole number >= 1, got 0"):
        ParallelConfig(pp_layers=(0, 4))


def test_a_batch_is_cut_by_rows() -> None:
    rows = torch.arange(7)
    given = {
        "input_ids": rows[:, None].expand(7, 3),
        "position_ids": rows[None, :, None].expand(3, 7, 3),
        "mask": {"full": rows[:, None, None, None].expand(7, 1, 3, 3)},
        "shared": torch.zeros(1, 3),
        "num_items_in_batch": torch.tensor(5),
        "use_cache": False,
    }
    tokens = torch.arange(7)  # as many tokens as rows, but an argument of all rows
    cut = cut_batch(given | {"cache_position": tokens}, 7, 4)
    assert [part.share for part in cut] == [2 / 7, 2 / 7, 2 / 7, 1 / 7]
    numbers = [part.arguments["input_ids"][:, 0].tolist() for part in cut]
    assert numbers == [[0, 1], [2, 3], [4, 5], [6]]
    for part, wanted in zip(cut, numbers, strict=True):
        assert part.arguments["position_ids"][2, :, 0].tolist() == wanted
        assert part.arguments["mask"]["full"][:, 0, 0, 0].tolist() == wanted
        assert part.arguments["shared"] is given["shared"]
        assert part.arguments["cache_position"] is tokens
        assert part.arguments["num_items_in_batch"] is given["num_items_in_batch"]
    assert cut_batch(given, 7, 1)[0].arguments is given
    check_can_be_cut(given | {"num_items_in_batch": [1]}, 7)
    for other, match in (
        (torch.zeros(5, 2), r"batch of 7 rows.*other has the shape \(5, 2\)"),
        ({"full": torch.zeros(5)}, r"batch of 7 rows.*other\['full'\] has the shape \(5,\)"),
        ([0] * 7, r"batch of 7 rows.*other is a list, whose rows are not known"),
    ):
        with pytest.raises(ValueError, match=match):
            check_can_be_cut(given | {"other": other}, 7)


def test_arguments_are_on_the_host_before_a_stage_of_the_host_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy from a GPU with `non_blocking=True` returns before the values are in host memory."""
    copies = []

    def to(self: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        copies.append((device.type, non_blocking))
        return self

    monkeypatch.setattr(Tensor, "to", to)
    for device in ("cpu", "cuda"):
        _move_to_device({"mask": torch.zeros(1)}, torch.device(device))
    assert copies == [("cpu", False), ("cuda", True)]


def test_targets_are_counted_after_the_shift() -> None:
    labels = torch.tensor([[5, -100, 6], [7, 8, -100]])
    assert count_targets({"labels": labels}, -100) == 2
    assert count_targets({"labels": labels, "shift_labels": labels}, -100) == 4
    assert count_targets({"labels": labels, "ignore_index": 8}, -100) == 3


def cut_copies(model: nn.Module, **config: Any) -> list[nn.Module]:
    """Patch a model, and return a copy of each of its stages."""
    patch(model, experts_backend="torch", **config)
    state: ModelState = getattr(model, STATE)
    layers = assign_layers_to_stages(len(find_parts(model, state.plan).layers), state.config)
    stages = []
    for index in range(len(layers)):
        part = copy.deepcopy(model)
        part_state: ModelState = getattr(part, STATE)
        parts = find_parts(part, part_state.plan)
        part_state.stage = cut_model(part, parts, part_state, index, layers)
        part_state.check_ready = lambda: None
        stages.append(part)
    return stages


def run_stages(stages: list[nn.Module], inputs: dict[str, Tensor]) -> Tensor:
    """Run the stages one after the other, and return the loss of the last one."""
    tensors: list[Tensor] = []
    for part in stages:
        boundary = getattr(part, STATE).stage.boundary
        boundary.begin(tensors, share=1.0, rows=slice(None), losses_are_summed=False)
        loss = part(**inputs, use_cache=False).loss
        tensors = boundary.end()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_stages_of_every_type_compute_as_stock(model_type: str) -> None:
    """Two stages give the loss and the gradients of stock. Types that are refused are skipped."""
    stock = build(model_type)
    try:
        stages = _cut_evenly_or_by_hand(stock)
    except ValueError as error:
        pytest.skip(str(error))
    inputs = batch(stock, 3, 9, seed=1)
    with FP64():
        want = stock(**inputs, use_cache=False).loss
        want.backward()
        got = run_stages(stages, inputs)
        got.backward()
    assert_close("loss", got, want, FP64_MODEL)
    grads: dict[str, Tensor] = {}
    for part in stages:
        for name, parameter in part.named_parameters():
            name = getattr(part, STATE).stage.aliases.get(name, name)
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # A tied weight has a part of its gradient on the first and on the last stage.
            grads[name] = grads[name] + grad if name in grads else grad
    wanted = dict(stock.named_parameters())
    assert grads.keys() == wanted.keys()
    for name, parameter in wanted.items():
        if parameter.grad is not None:
            # Some types compute a part in fp32 although the model is in fp64.
            assert_close(name, grads[name], parameter.grad, budget(model_type, name))


def _cut_evenly_or_by_hand(stock: nn.Module) -> list[nn.Module]:
    try:
        return cut_copies(copy.deepcopy(stock), pp_size=2)
    except ValueError as error:
        if "has no base_model_pp_plan" not in str(error):
            raise
    return cut_copies(copy.deepcopy(stock), pp_layers=[1, 3])


def test_names_and_units_of_the_stages() -> None:
    model = tiny(num_hidden_layers=4, mlp_only_layers=[0], tie_word_embeddings=True)
    names = [name for name, _ in model.named_parameters()]
    parts = find_parts(model)
    stages = assign_layers_to_stages(4, ParallelConfig(pp_size=3))
    stage_of = map_names_to_stages(model, parts, stages)
    assert stage_of["model.embed_tokens.weight"] == 0 and stage_of["lm_head.weight"] == 2
    assert stage_of["model.layers.1.mlp.experts.down_proj"] == 0
    assert stage_of["model.norm.weight"] == 2
    assert stage_of["model.rotary_emb.inv_freq"] is None
    held: list[str] = []
    for index, part in enumerate(cut_copies(model, pp_size=3)):
        stage = getattr(part, STATE).stage
        own = [stage.aliases.get(name, name) for name, _ in part.named_parameters()]
        held += [name for name in own if not (index == 2 and name == names[0])]
        assert (stage.tied is not None) == (index != 1)
        assert list(stage.tensors) == [n for n in names if n in dict(model.named_parameters())]
        left = find_parts(part, getattr(part, STATE).plan, complete=False)
        units = list_units(select_parts_of_stage(left, stage))
        assert len(units.layers) == len(stages[index])
        assert sorted(units.experts) == [[1], [0], [0]][index]
        assert (units.embedding is not None) == (index == 0) and not units.tied
        assert len(units.tail) == (2 if index == 2 else 0)
    assert sorted(held) == sorted(names)


def test_the_memory_of_other_stages_is_freed() -> None:
    model = tiny(num_hidden_layers=4)
    patch(model, pp_size=2, bias_update_rate=None)
    state: ModelState = getattr(model, STATE)
    removed = weakref.ref(model.model.layers[3].mlp.experts.down_proj)
    parts = find_parts(model, state.plan)
    state.stage = cut_model(model, parts, state, 0, assign_layers_to_stages(4, state.config))
    del parts
    gc.collect()
    assert removed() is None
