"""`expert_shard_dim`, the dimension of expert weights that FSDP2 shards, and shared parameters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.tiny_models import tiny
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from hf_moe_ep import patch
from hf_moe_ep.sharding.expert_units import (
    check_expert_shard_dim,
    check_shared,
    choose_shard_dim,
)
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.units import find_units
from hf_moe_ep.sharding.values import find_entries
from hf_moe_ep.state import find_state

# name: (shape of a weight on an ep rank, size of ep_fsdp, the dimension that "auto" takes)
AUTO: dict[str, tuple[tuple[int, ...], int, int]] = {
    "one rank": ((3, 5, 7), 1, 0),
    "both divide": ((8, 32, 48), 4, 0),
    "one expert each": ((4, 32, 48), 4, 0),
    "experts alone divide": ((8, 33, 24), 2, 0),
    "dim 1 alone divides": ((6, 32, 48), 4, 1),
    "fewer experts than ranks": ((2, 32, 48), 4, 1),
    "more ranks than both": ((2, 4, 48), 8, 0),  # neither divides, so dim 0 is padded
    "neither divides": ((6, 33, 24), 4, 0),
    "dim 2 alone divides": ((3, 33, 48), 2, 0),
    "no power of two": ((8, 33, 47), 3, 1),
    "bias of each expert": ((3, 48), 2, 1),
    "a number per expert, even": ((4,), 2, 0),
    "a number per expert, uneven": ((3,), 2, 0),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_pads_only_if_neither_dimension_divides(name: str) -> None:
    """The option takes dim 0 or dim 1, in this order, if the ranks divide it, else dim 0."""
    shape, ranks, dim = AUTO[name]
    assert choose_shard_dim(shape, "auto", ranks) == dim


@pytest.mark.parametrize("name", AUTO)
def test_dim_0_is_used_even_if_ranks_do_not_divide_it(name: str) -> None:
    shape, ranks, _ = AUTO[name]
    assert choose_shard_dim(shape, 0, ranks) == 0


@pytest.mark.parametrize("name", AUTO)
def test_dim_1_is_used_if_ranks_divide_it_and_else_refused(name: str) -> None:
    """expert_shard_dim=1 never falls back to another dimension, but raises an error."""
    shape, ranks, _ = AUTO[name]
    if len(shape) > 1 and shape[1] % ranks == 0:
        assert choose_shard_dim(shape, 1, ranks) == 1
        return
    with pytest.raises(ValueError, match=r"dim 1 of .* does not divide dim 1") as refusal:
        choose_shard_dim(shape, 1, ranks)
    for part in (str(shape), f"({ranks})", "expert_shard_dim='auto'"):
        assert part in str(refusal.value)


ODD = {"hidden_size": 33, "head_dim": 4}  # down_proj (8, 33, 24), gate_up_proj (8, 48, 33)


@pytest.mark.parametrize("shard_dim", ["auto", 0])
def test_auto_and_dim_0_accept_a_model_that_dim_1_cannot_shard(shard_dim: str | int) -> None:
    _run_checks(patch(tiny(**ODD), expert_shard_dim=shard_dim))


def test_the_error_shows_the_shape_that_an_ep_rank_holds() -> None:
    """With ep 2, an ep rank holds half of 8 experts, and the ranks of ep_fsdp shard these."""
    with pytest.raises(ValueError, match=r"expert weight \(4, 33, 24\) evenly over ep_fsdp \(2\)"):
        _run_checks(patch(tiny(**ODD), expert_shard_dim=1))


def test_factors_of_adapters_may_be_uneven() -> None:
    """16 ranks divide dim 1 of the weights (48 and 32), but not dim 1 of the factors."""
    model = with_lora(tiny(), r=3)
    factors = [p.shape for name, p in model.named_parameters() if "experts.lora_B" in name]
    assert factors and all(shape[1] % 16 != 0 for shape in factors)
    _run_checks(patch(model, expert_shard_dim=1), ep_fsdp_size=16)


def _build_with_shared_scale(**config: Any) -> nn.Module:
    model = patch(tiny(), **config)
    for layer in model.model.layers:
        layer.mlp.experts.scale = nn.Parameter(torch.ones(5))
    return model


def test_a_shared_parameter_that_our_experts_do_not_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale of \w+Experts belongs to all experts of a layer"):
        _run_checks(_build_with_shared_scale())


def test_a_shared_parameter_is_accepted_with_the_eager_backend() -> None:
    _run_checks(_build_with_shared_scale(experts_backend="eager"))


def _run_checks(model: nn.Module, ep_fsdp_size: int = 2) -> None:
    """Run the checks of `shard_model` at ep 2."""
    state = find_state(model)
    assert state is not None
    options = ShardOptions(MixedPrecisionPolicy(), OffloadPolicy(), False, True)
    units = find_units(model, state.plan)
    entries = find_entries(model, units.all_experts, state.plan, options)
    sizes: Any = SimpleNamespace(ep_size=2, ep_fsdp_size=ep_fsdp_size, etp_size=1)
    for experts in units.all_experts:
        check_shared(experts, entries, state)
        check_expert_shard_dim(experts, entries, state, sizes)
