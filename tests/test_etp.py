"""The geometry of expert tensor parallelism without ranks, and what it refuses."""

import re
from typing import Any

import pytest
import torch
from support.architectures import tiny as tiny_of
from support.architectures.types import INSTALLED
from support.quantised import SIZES
from support.tiny_models import tiny

from hf_moe_ep import ParallelConfig, patch
from hf_moe_ep.etp import (
    Cut,
    convert_slabs_to_stock,
    count_whole,
    find_cut_of_factor,
    for_each_half,
    iterate_box_halves,
    repeat_part_weights,
    replace_by_part_ids,
)
from hf_moe_ep.state import STATE


def test_the_parts_of_experts_are_those_of_the_docstring() -> None:
    """4 experts on ep 2 x etp 2; the id 4 means "no expert", and becomes 8, the number of parts."""
    ids = torch.tensor([[1, 2], [0, 4]])
    parts = replace_by_part_ids(ids, num_local=2, num_experts=4, etp_size=2)
    assert parts.tolist() == [[1, 3, 4, 6], [0, 2, 8, 8]]
    # Rank d owns the parts 2 d and 2 d + 1: the token of expert 1 goes to the ranks 0 and 1.
    assert [part // 2 for part in parts[0].tolist()] == [0, 1, 2, 3]
    pairs_P = torch.bincount(parts.flatten(), minlength=9)[:8]
    assert count_whole(pairs_P, num_local=2, etp_size=2).tolist() == [1, 1, 1, 0]


def test_weights_of_parts_sum_their_gradients_once() -> None:
    weights = torch.tensor([[0.25, 0.75]], dtype=torch.bfloat16, requires_grad=True)
    parts = repeat_part_weights(weights, 2, torch.bfloat16)
    assert parts.dtype == torch.float32 and parts.tolist() == [[0.25, 0.25, 0.75, 0.75]]
    (parts * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [[3.0, 7.0]]


def test_a_rank_takes_the_same_rows_of_gate_and_up() -> None:
    """F = 4: rank 1 of 2 has the rows 2, 3 of gate and the rows 6, 7, which are those of up."""
    value = torch.arange(8.0).view(1, 8, 1).expand(2, 8, 3)
    cut = Cut(1, is_split=True)
    part = cut.take(value, 1, 2)
    assert part[0, :, 0].tolist() == [2, 3, 6, 7]
    assert cut.hold(part).shape == (2, 2, 2, 3) and cut.held_dim == 2
    # Transposed: columns. Interleaved rows are consecutive.
    turned = Cut(2, is_split=True).take(value.mT, 1, 2)
    assert turned[0, 0].tolist() == [2, 3, 6, 7]
    assert Cut(1).take(value, 1, 2)[0, :, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("turned", [False, True])
def test_factors_are_whole_on_the_side_of_the_hidden_states(turned: bool) -> None:
    """A of gate_up is whole and B is cut; A of down is cut and B is whole; or exchanged."""
    model = patch(tiny_of("llama4_text") if turned else tiny())
    layer = next(vars(m)[STATE] for m in model.modules() if hasattr(vars(m).get(STATE), "compute"))
    compute = layer.compute
    assert compute.turns_factors == turned
    cuts = {
        (name, factor): find_cut_of_factor(compute, name, is_b=factor == "b")
        for name in ("gate_up_proj", "down_proj")
        for factor in "ab"
    }
    up, down = ("a", "b") if turned else ("b", "a")
    assert cuts["gate_up_proj", up] == Cut(2 if turned else 1, is_split=True)
    assert cuts["down_proj", down] == Cut(1 if turned else 2)
    assert cuts["gate_up_proj", down] == cuts["down_proj", up] == Cut(None)


def test_boxes_and_slabs_have_stock_dims() -> None:
    """[2, 2, 4, 3] is [2, 8, 3] in files: the rows 1 .. 2 of both halves are 1 .. 2 and 5 .. 6."""
    box = ((0, 2), (0, 2), (1, 3), (0, 3))
    parts = list(iterate_box_halves(box, 1, 4))
    assert parts == [(0, ((0, 2), (1, 3), (0, 3))), (1, ((0, 2), (5, 7), (0, 3)))]
    stock = torch.arange(48.0).view(2, 8, 3)
    held = stock.unflatten(1, (2, 4))
    whole = tuple((0, size) for size in held.shape)
    ((stock_box, slab),) = convert_slabs_to_stock([(whole, held)], 1)
    assert stock_box == ((0, 2), (0, 8), (0, 3)) and torch.equal(slab, stock)

    def add_rows(box: Any, values: torch.Tensor) -> torch.Tensor:
        (start, stop) = box[1]
        return values + torch.arange(start, stop).view(1, -1, 1)

    changed = for_each_half(add_rows, 1, 4)(box, held[:, :, 1:3])
    want = (stock + torch.arange(8).view(1, -1, 1)).unflatten(1, (2, 4))[:, :, 1:3]
    assert torch.equal(changed, want)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "F": ({"etp_size": 5}, "etp_size (5) must divide the hidden size of an expert (24)"),
    "eager": (
        {"etp_size": 2, "experts_backend": "eager"},
        "experts_backend='eager' needs whole experts on every rank and cannot run with etp_size=2",
    ),
    "dim 1": (
        {"etp_size": 2, "expert_shard_dim": 1},
        "expert_shard_dim=1 and etp_size=2 would both cut dim 1",
    ),
    "scales": (
        {"etp_size": 2, "experts_dtype": "nf4", "experts_double_quant": True},
        "experts_double_quant=True quantises the scales of a whole matrix together, and with "
        "etp_size=2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_options_name_both_numbers(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        patch(tiny(), **options)


def test_a_quantised_block_is_never_cut() -> None:
    """F = 128 has 2 blocks of 64: half of them are a block, a quarter is not."""
    patch(tiny(**SIZES["nf4"]), experts_dtype="nf4", etp_size=2)
    with pytest.raises(ValueError, match=r"blocks of 64 of the 128 .*etp_size \(4\).* = 32"):
        patch(tiny(**SIZES["nf4"]), experts_dtype="nf4", etp_size=4)


@pytest.mark.skipif("muse_spark" not in INSTALLED, reason="transformers has no muse_spark")
def test_a_norm_after_each_expert_is_refused() -> None:
    with pytest.raises(ValueError, match=r"norm after each expert.*etp_size \(2\)"):
        patch(tiny_of("muse_spark"), etp_size=2)


def test_a_model_that_was_never_sharded_is_refused() -> None:
    model = patch(tiny(), etp_size=2)
    with pytest.raises(ValueError, match="etp_size=2 but never sharded"):
        model(torch.ones(1, 3, dtype=torch.int64))
    assert ParallelConfig(etp_size=2).needs_sharding
