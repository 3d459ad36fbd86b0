"""Towers of any making, for pictures, videos or sound, where ranks differ in what they have.

Encoders are sharded over all ranks, one FSDP2 unit for every module beside the decoder, and a rank
without a picture does not run what others wait for in an all-gather. So no forward of theirs
gathers anything. Around the decoder's forward ranks tell each other twice what they have:

    before the towers    whether any rank has pictures or sound. If so all gather all encoders,
                         and each runs its own as often as it has input, like stock
    behind the towers    which parameters get a gradient on any rank. On a rank where one gets
                         none a function that adds nothing forward sends it exact zeros backward
                         (where nobody's does it has none, as in stock: unused layers stay as they
                         are under weight decay). Nobody sees into a reentrant checkpoint before it
                         is run again: what it may use gets zeros beside what comes out of there

The gradients leave at the end of the backward, on all ranks the same ones, in the order in which
the model holds its towers: FSDP2 passes over those where a rank has none. Whole encoders are
held from their forward to there, in the compute dtype, and whole gradients of them; where none of
them is trained, and under no_grad, until the decoder begins. A step of text alone gathers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.ops.autograd import nothing
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState, Ours, ShardedOnly
from hf_moe_ep.upstream.graph import reached_parameters, tensors_in, with_tensors
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.upstream.sharded_models import is_gathered, stock_class
from hf_moe_ep.upstream.towers import is_encoder_input

# What a rank says of a parameter that is sure to get a gradient; 1: a checkpoint may hide that.
_SURE = 2


class GatherEncoders(ShardedOnly):
    """Gathers all encoders where any rank has input for one: a pre-forward hook of their owner."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        # Of the forward that runs: None where nobody has input, else what was gathered for it.
        self.gathered: list[FSDPModule] | None = None
        # Whether what an encoder has made in it can be asked for gradients.
        self.in_graph = False

    def run(
        self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.gathered, self.in_graph = None, False
        given = bind_forward(owner, args, kwargs)
        if _any_rank(self.state, _sees(given)):
            self.gathered = _gather(self.state)
        return None


class TieEncoders(ShardedOnly):
    """Sees to it that every rank has gradients for the same encoders' parameters.

    A pre-forward hook of the decoder.
    """

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
        # A frozen encoder is in the graph where its inputs are asked for a gradient.
        in_graph = self.before.in_graph or any(mine)
        kept, *told = _tell(self.state, [in_graph, *mine])
        if not kept:
            for unit in gathered:
                unit.reshard()
            return None
        # All others are sure to get a gradient on every rank, or on none.
        unlike = [0 < count < _SURE * meshes.world_size for count in told]
        triples = zip(trained, mine, unlike, strict=True)
        missing = [parameter for parameter, here, differs in triples if differs and here < _SURE]
        embeds = given.get("inputs_embeds")
        assert isinstance(embeds, Tensor), "the model embeds its text before the decoder"
        passed = [embeds, *(tensor for tensor in with_grad if tensor is not embeds)]
        tied = _Tie.apply(self.state, len(passed), any(unlike), *passed, *missing)
        others = {id(tensor): other for tensor, other in zip(passed, tied, strict=True)}
        return (), with_tensors(given, others)

    def _trained(self) -> list[nn.Parameter]:
        """Whatever is trained of the encoders, the same list on every rank."""
        parts = [unit.parameters() for unit in self.state.encoders]
        parts.append(self.owner.parameters(recurse=False))
        return [*dict.fromkeys(p for part in parts for p in part if p.requires_grad)]


class OnlyGathered(Ours):
    """Refuses to run an encoder that nobody has gathered: a pre-forward hook of each."""

    def __call__(self, encoder: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(encoder, FSDPModule) and not is_gathered(encoder):
            raise ValueError(
                f"{stock_class(type(encoder)).__name__} of a sharded model was called on its own, "
                f"and other ranks know nothing of it; give pictures and sound to the forward or "
                f"to generate() of the whole model, which tell each other who has some"
            )


class NoteGraph(Ours):
    """Notes whether the outputs of an encoder can be asked for gradients: a forward hook."""

    def __init__(self, before: GatherEncoders) -> None:
        self.before = before

    def __call__(self, encoder: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        self.before.in_graph |= any(tensor.requires_grad for tensor in tensors_in(outputs))


def encode_ahead(
    state: ModelState,
    root: nn.Module,
    stock: Callable[[dict[str, Any]], Any],
    model_kwargs: dict[str, Any],
) -> Any:
    """Run the encoders in front of `generate`, whose ranks differ in what they have.

    It takes the place of the model's own function, `stock`. Outside of a forward the parameters
    that belong to no encoder, such as a separator of rows, are gathered with the root, and nobody
    but us casts pixels to the dtype that whole parameters have.
    """
    if state.meshes is None or not _any_rank(state, _sees(model_kwargs)):
        return stock(model_kwargs)
    model_kwargs = _cast_inputs(state, model_kwargs)
    gathered = _gather(state)
    if isinstance(root, FSDPModule) and not is_gathered(root):
        root.unshard()
        gathered.append(root)
    try:
        return stock(model_kwargs)
    finally:
        for unit in gathered:
            unit.reshard()


class _Tie(torch.autograd.Function):
    """Returns the first `count` tensors as they are; backward gives all others zeros.

    With `every` it does so too for what the decoder was given and has not used, such as features
    for more layers than it has: ranks count on the gradients behind it.

    Behind it in backward all encoders are whole: a backward before may have taken them away.
    """

    @staticmethod
    def forward(
        ctx: Any, state: ModelState, count: int, every: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.state, ctx.every = state, every
        ctx.like = [(tensor.new_empty(0), tensor.shape) for tensor in tensors]
        ctx.set_materialize_grads(False)
        # Copies, because FSDP2's hook on a view would be lost to an in-place op.
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _gather(ctx.state)
        passed, missing = ctx.like[: len(grads)], ctx.like[len(grads) :]
        through = [
            nothing(*like) if grad is None and ctx.every else grad
            for grad, like in zip(grads, passed, strict=True)
        ]
        return None, None, None, *through, *(nothing(*like) for like in missing)


def _gather(state: ModelState) -> list[FSDPModule]:
    """Gather all encoders; return those that were not whole before. Every rank calls this."""
    apart = [unit for unit in state.encoders if not is_gathered(unit)]
    for unit in apart:
        unit.unshard()
    return apart


def _cast_inputs(state: ModelState, given: dict[str, Any]) -> dict[str, Any]:
    """Cast pixels and sound as FSDP2's root does in front of a forward."""
    dtype = None if state.policy is None else state.policy.param_dtype
    if dtype is None:
        return given
    return {
        name: value.to(dtype)
        if is_encoder_input(name) and isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in given.items()
    }


def _sees(given: dict[str, Any]) -> bool:
    """Return whether anything that a model is given is of pictures or sound."""
    return any(
        is_encoder_input(name) and next(tensors_in(value), None) is not None
        for name, value in given.items()
    )


def _any_rank(state: ModelState, here: bool) -> bool:
    """Return whether something is true on any rank."""
    return _tell(state, [here])[0] > 0


def _tell(state: ModelState, here: Sequence[int]) -> list[int]:
    """Return for each element its sum over all ranks; the host waits for it."""
    told = torch.tensor(here, dtype=torch.int32, device=state.device)
    return sum_over_ranks(told).tolist()
