"""Encoders for pictures, videos or sound, of any class, where ranks differ in their inputs.

Every child of the owner, except the decoder, is one FSDP2 unit, sharded over all ranks. A rank
without a picture does not run the encoder, so an all-gather inside the encoder's forward would make
the other ranks wait for ever. Encoders are therefore gathered outside of their forward. Ranks
exchange what they have twice:

    before the encoders  Does any rank have pictures or sound? If so, all ranks gather all encoders,
                         and each rank runs its own as often as it has input, as stock code does.
    after the encoders   Which parameters get a gradient on any rank? `ZeroGradients` sends exact
                         zeros to such a parameter on a rank where the loss does not reach it. A
                         parameter that no rank uses gets no gradient, as in stock, so weight decay
                         does not move it. A reentrant checkpoint hides its graph until it is
                         recomputed: all parameters that it may use get zeros in addition.

FSDP2 reduces the gradients at the end of the backward, unit by unit, and passes over units without
gradients. Because of the zeros these are the same units on all ranks, in the same order.

Encoders stay gathered, in the compute dtype, from before their forward until the end of the
backward, and so do their gradients. If no encoder is trained, and under no_grad, they are resharded
when the decoder begins. A step without pictures and sound on any rank gathers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState, Ours, ShardedOnly
from hf_moe_ep.upstream.graph import reached_parameters, tensors_in, with_tensors
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.upstream.sharded_models import is_gathered, stock_class
from hf_moe_ep.upstream.towers import is_encoder_input
from hf_moe_ep.vision.zero_gradients import ZeroGradients

# A parameter counts 2 on a rank where it gets a gradient, 1 where a checkpoint may use it, else 0.
_SURE = 2


class GatherEncoders(ShardedOnly):
    """Pre-forward hook of the owner: gather all encoders if any rank has input for one."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        # The units gathered for the current forward; None if no rank has input.
        self.gathered: list[FSDPModule] | None = None
        # True once an encoder returned a tensor that requires a gradient in the current forward.
        self.in_graph = False

    def run(
        self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.gathered, self.in_graph = None, False
        given = bind_forward(owner, args, kwargs)
        if _any_rank_has_input(self.state, given):
            self.gathered = _gather_encoders(self.state)
        return None


class TieEncoders(ShardedOnly):
    """Pre-forward hook of the decoder: give all ranks gradients for the same parameters."""

    def __init__(self, state: ModelState, owner: nn.Module, before: GatherEncoders) -> None:
        self.state, self.owner, self.before = state, owner, before

    def run(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        gathered, self.before.gathered = self.before.gathered, None
        meshes = self.state.meshes
        if gathered is None or meshes is None:
            return None
        given = bind_forward(decoder, args, kwargs)
        with_grad = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        trained = self._trained()
        reached, hidden = reached_parameters(with_grad, trained)
        mine = [_SURE if id(p) in reached else int(id(p) in hidden) for p in trained]
        # Backward also runs through a frozen encoder whose inputs require a gradient.
        in_graph = self.before.in_graph or any(mine)
        any_in_graph, *sums = sum_on_host(self.state, [in_graph, *mine])
        if not any_in_graph:
            for unit in gathered:
                unit.reshard()
            return None
        # Other sums mean a sure gradient on every rank, or none on any rank.
        differs = [0 < count < _SURE * meshes.world_size for count in sums]
        rows = zip(trained, mine, differs, strict=True)
        missing = [parameter for parameter, count, differ in rows if differ and count < _SURE]
        embeds = given.get("inputs_embeds")
        assert isinstance(embeds, Tensor), "the model embeds its text before the decoder"
        passed = [embeds, *(tensor for tensor in with_grad if tensor is not embeds)]
        # A decoder may leave some of its inputs unused, such as features for more layers than it
        # has. If ranks differ, these inputs need a gradient as well: `fill`. An earlier backward
        # may have resharded the encoders.
        regather = partial(_gather_encoders, self.state)
        tied = ZeroGradients.apply(len(passed), any(differs), regather, *passed, *missing)
        replaced = {id(tensor): other for tensor, other in zip(passed, tied, strict=True)}
        return (), with_tensors(given, replaced)

    def _trained(self) -> list[nn.Parameter]:
        """List the trainable parameters of the encoders, in the same order on every rank."""
        parts = [unit.parameters() for unit in self.state.encoders]
        parts.append(self.owner.parameters(recurse=False))
        return [*dict.fromkeys(p for part in parts for p in part if p.requires_grad)]


class OnlyGathered(Ours):
    """Pre-forward hook of an encoder: refuse to run if the encoder is sharded."""

    def __call__(self, encoder: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(encoder, FSDPModule) and not is_gathered(encoder):
            raise ValueError(
                f"{stock_class(type(encoder)).__name__} of a sharded model was called on its own, "
                f"which other ranks do not notice, so its parameters cannot be gathered; pass "
                f"pictures and sound to the forward or to generate() of the whole model"
            )


class NoteGraph(Ours):
    """Forward hook of an encoder: record if one of its outputs requires a gradient."""

    def __init__(self, before: GatherEncoders) -> None:
        self.before = before

    def __call__(self, encoder: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        self.before.in_graph |= any(tensor.requires_grad for tensor in tensors_in(outputs))


def encode_before_generate(
    state: ModelState,
    root: nn.Module,
    stock: Callable[[dict[str, Any]], Any],
    model_kwargs: dict[str, Any],
) -> Any:
    """Wrap `stock`, by which `generate` runs the encoders first: all ranks gather the encoders.

    The root is gathered too, for parameters that belong to no encoder, such as a separator between
    rows of a picture. Outside of the root's forward FSDP2 does not cast its inputs, so pixels and
    sound are cast here.
    """
    if state.meshes is None or not _any_rank_has_input(state, model_kwargs):
        return stock(model_kwargs)
    model_kwargs = _cast_inputs(state, model_kwargs)
    gathered = _gather_encoders(state)
    if isinstance(root, FSDPModule) and not is_gathered(root):
        root.unshard()
        gathered.append(root)
    try:
        return stock(model_kwargs)
    finally:
        for unit in gathered:
            unit.reshard()


def _gather_encoders(state: ModelState) -> list[FSDPModule]:
    """Gather all encoders and return those that were sharded. Every rank calls this."""
    sharded = [unit for unit in state.encoders if not is_gathered(unit)]
    for unit in sharded:
        unit.unshard()
    return sharded


def _cast_inputs(state: ModelState, given: dict[str, Any]) -> dict[str, Any]:
    """Cast pixels and sound as FSDP2's root does before a forward."""
    dtype = None if state.policy is None else state.policy.param_dtype
    if dtype is None:
        return given
    return {
        name: value.to(dtype)
        if is_encoder_input(name) and isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in given.items()
    }


def _any_rank_has_input(state: ModelState, given: dict[str, Any]) -> bool:
    """Return True if any rank was given a tensor for an encoder."""
    here = any(
        is_encoder_input(name) and next(tensors_in(value), None) is not None
        for name, value in given.items()
    )
    return sum_on_host(state, [here])[0] > 0


def sum_on_host(state: ModelState, numbers: Sequence[int]) -> list[int]:
    """Sum each number over all ranks. The host waits for the result."""
    tensor = torch.tensor(numbers, dtype=torch.int32, device=state.device)
    return sum_over_ranks(tensor).tolist()
