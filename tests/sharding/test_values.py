"""find_entries lists the parameters of a model with their owners; materialize distributes them.

materialize runs the five steps of the docstring of sharding/values.py, from rank 0's value to the
registered parameter.
"""

from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.architectures.models import tiny as tiny_of
from support.checks import Check, Found, on_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2, patch
from hf_moe_ep.lora.factors import stack_b
from hf_moe_ep.ranks.mesh import Meshes, build_meshes
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.units import find_units
from hf_moe_ep.sharding.values import ParameterEntry, find_entries, materialize
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.process_groups import fake_group

MASTERS = ShardOptions(MixedPrecisionPolicy(), OffloadPolicy(), True, True)
NO_MASTERS = ShardOptions(MixedPrecisionPolicy(), OffloadPolicy(), False, True)


def test_a_tied_parameter_is_one_entry_with_two_owners() -> None:
    model = patch(tiny(tie_word_embeddings=True))
    entries = _find_entries_of(model, NO_MASTERS)
    assert entries.keys() == set(model.parameters())
    tied = entries[model.lm_head.weight]
    assert [(type(module).__name__, name) for module, name in tied.owners] == [
        ("Embedding", "weight"),
        ("Linear", "weight"),
    ]


def test_only_experts_and_their_factors_are_split_over_ep() -> None:
    model = patch(with_lora(tiny()))
    entries = _find_entries_of(model, NO_MASTERS)
    split = {name for name, p in model.named_parameters() if entries[p].over_ep}
    stacked = {name for name, p in model.named_parameters() if entries[p].stack is not None}
    assert {name.rpartition(".")[2] for name in split - stacked} == {"gate_up_proj", "down_proj"}
    assert stacked == {name for name in split if "lora_" in name}
    assert len(split) == 2 * 6  # 2 layers: 2 weights, each with an A and a B
    assert not any("self_attn" in name for name in split)


def test_ignored_and_subclassed_parameters_have_no_entry() -> None:
    class Packed(nn.Parameter):
        pass

    model = patch(tiny())
    model.model.norm.register_parameter("packed", Packed(torch.zeros(2)))
    ignored = model.model.norm.weight
    options = ShardOptions(
        MixedPrecisionPolicy(), OffloadPolicy(), False, True, ignored_params=frozenset([ignored])
    )
    missing = set(model.parameters()) - _find_entries_of(model, options).keys()
    assert missing == {ignored, model.model.norm.packed}


def _find_entries_of(model: nn.Module, options: ShardOptions) -> dict[nn.Parameter, ParameterEntry]:
    state = find_state(model)
    assert state is not None
    return find_entries(model, find_units(model, state.plan).all_experts, state.plan, options)


def test_a_correction_bias_is_never_sharded_or_cast() -> None:
    """This holds even if the script lets all parameters require gradients before sharding."""
    model = tiny_of("ernie4_5_moe", seed=0, dtype=torch.bfloat16)
    model.requires_grad_(True)
    with fake_group(0, 2):
        apply_ep_fsdp2(model, ep_size=2)
    biases = [p for name, p in model.named_parameters() if "correction_bias" in name]
    assert biases and not any(isinstance(bias, DTensor) for bias in biases)
    assert all(bias.dtype == torch.float32 and not bias.requires_grad for bias in biases)


class _Holder(nn.Module):
    """A module with one parameter, whose values are NaN on all ranks but rank 0."""

    def __init__(self, rank: int, values: Tensor, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        values = values if rank == 0 else torch.full_like(values, float("nan"))
        self.weight = nn.Parameter(values.to(dtype))


def _build_meshes() -> Meshes:
    return build_meshes(ParallelConfig(ep_size=2), torch.device("cpu"))


def a_lora_factor_is_stacked_split_and_registered(rank: int, world: int) -> None:
    """The packed factor has 5 rows and 3 * 4 columns: column r * 4 + e is rank r of expert e."""
    packed = torch.arange(60.0, dtype=torch.float64).view(5, 12)
    holder = _Holder(rank, packed)
    second_owner = nn.Module()
    second_owner.register_parameter("tied", holder.weight)
    entry = ParameterEntry(
        holder.weight,
        [(holder, "weight"), (second_owner, "tied")],
        stack=lambda factor: stack_b(factor, 4),
        over_ep=True,
    )
    (new,) = materialize(entry, _build_meshes(), NO_MASTERS, {})
    assert holder.weight is new and second_owner.tied is new
    assert isinstance(new, DTensor) and new.shape == (4, 5, 3)
    assert new.placements == (Shard(0),)
    local = new.to_local()
    assert local.is_contiguous() and local.shape == (2, 5, 3)
    for index, expert in enumerate((0, 1) if rank == 0 else (2, 3)):
        columns = [expert, 4 + expert, 8 + expert]
        assert torch.equal(local[index], packed[:, columns]), expert


def a_trained_weight_gets_an_fp32_master(rank: int, world: int) -> None:
    values = torch.tensor([[1.0, 2.0, 3.0]])
    holder = _Holder(rank, values, torch.bfloat16)
    entry = ParameterEntry(holder.weight, [(holder, "weight")], None, over_ep=False)
    (new,) = materialize(entry, _build_meshes(), MASTERS, {})
    assert not isinstance(new, DTensor) and torch.equal(new, values)
    frozen = _Holder(rank, values, torch.bfloat16).requires_grad_(False)
    entry = ParameterEntry(frozen.weight, [(frozen, "weight")], None, over_ep=False)
    (new,) = materialize(entry, _build_meshes(), MASTERS, {})
    assert new.dtype == torch.bfloat16
    assert not frozen.weight.requires_grad


def a_slice_of_experts_does_not_keep_all_experts_in_memory(rank: int, world: int) -> None:
    values = torch.arange(24.0).view(4, 3, 2)
    holder = _Holder(rank, values, torch.float32)
    entry = ParameterEntry(holder.weight, [(holder, "weight")], None, over_ep=True)
    (new,) = materialize(entry, _build_meshes(), MASTERS, {})
    local = new.to_local()
    assert torch.equal(local, values[:2] if rank == 0 else values[2:])
    assert local.untyped_storage().nbytes() == local.nbytes


def experts_on_meta_stay_there(rank: int, world: int) -> None:
    holder = _Holder(0, torch.zeros(4, 5, 3)).to("meta")
    entry = ParameterEntry(holder.weight, [(holder, "weight")], None, over_ep=True)
    options = ShardOptions(
        MixedPrecisionPolicy(),
        OffloadPolicy(),
        True,
        True,
        empty_params=frozenset([holder.weight]),
    )
    (new,) = materialize(entry, _build_meshes(), options, {})
    assert isinstance(new, DTensor) and new.shape == (4, 5, 3)
    assert new.to_local().is_meta and new.to_local().shape == (2, 5, 3)


def parameters_without_master_must_stay_frozen(rank: int, world: int) -> None:
    """A frozen parameter of a bf16 model has no fp32 master. Others may be frozen later."""
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj"):
        model = tiny(dtype=torch.bfloat16)
        model.get_parameter(name).requires_grad_(False)
        apply_ep_fsdp2(model, ep_size=2)
        dtypes = {n: p.dtype for n, p in model.named_parameters()}
        assert dtypes.pop(name) == torch.bfloat16 and set(dtypes.values()) == {torch.float32}
        rows = batch(model, 1, 5)
        for is_trained in (False, True):
            model.lm_head.requires_grad_(is_trained)
            model(**rows)
        model.get_parameter(name).requires_grad_(True)
        with torch.no_grad():
            model(**rows)
        with pytest.raises(ValueError, match=rf"{name} is trainable now, .* no fp32 master"):
            model(**rows)


def wide_parameters_may_be_unfrozen(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.float64):
        model = tiny(dtype=dtype)
        model.lm_head.requires_grad_(False)
        apply_ep_fsdp2(model, ep_size=2)
        model.lm_head.requires_grad_(True)
        model(**batch(model, 1, 5)).loss.backward()
        assert model.lm_head.weight.grad is not None


def trainable_parameters_that_are_added_later_are_refused(rank: int, world: int) -> None:
    """FSDP2 would not average their gradients. Frozen ones, such as a helper's, may be added."""
    model: Any = apply_ep_fsdp2(tiny(), ep_size=2)
    rows = batch(model, 1, 5)
    model.model.layers[0].helper = nn.Linear(4, 3).requires_grad_(False)
    model(**rows)
    model.set_input_embeddings(nn.Embedding(97, 32).double())
    with torch.no_grad():
        model(**rows)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.scale"):
        with pytest.raises(ValueError, match=rf"{name} was added .* each of the 2 ranks"):
            model(**rows)
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].mlp.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        a_lora_factor_is_stacked_split_and_registered,
        a_trained_weight_gets_an_fp32_master,
        a_slice_of_experts_does_not_keep_all_experts_in_memory,
        experts_on_meta_stay_there,
        parameters_without_master_must_stay_frozen,
        wide_parameters_may_be_unfrozen,
        trainable_parameters_that_are_added_later_are_refused,
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
