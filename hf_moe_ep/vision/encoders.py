"""Run encoders of any class for pictures, videos or sound if ranks have different inputs.

The owner is the module that contains the encoders and the decoder. Each child of the owner, except
the decoder, is one FSDP2 unit, sharded over all ranks. A rank without a picture does not run the
encoder, so an all-gather inside the encoder's forward would make the other ranks wait forever.
Encoders are therefore gathered outside their forward. The ranks communicate twice:

    before the encoders  The ranks count how many of them have pictures or sound. If there is at
                         least one, all ranks gather all encoders, and each rank runs them as often
                         as it has input, as in stock code.
    after the encoders   The ranks find the parameters that get a gradient on at least one rank. If
                         the loss of a rank does not depend on such a parameter, `ZeroGradients`
                         gives the parameter exact zeros on this rank. A parameter that no rank uses
                         gets no gradient, as in stock code, so weight decay does not change it. The
                         graph inside a reentrant checkpoint is unknown before the recompute, so all
                         parameters that the checkpoint may use get zeros in addition.

FSDP2 reduces the gradients at the end of the backward, unit by unit, and skips units without
gradients. Because of the zeros all ranks reduce the same units in the same order.

Encoders and their gradients are unsharded, in the compute dtype, until the end of the backward. If
no encoder is trained, and under no_grad, the encoders are resharded when the decoder begins. If no
rank has pictures or sound in a step, nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE
from hf_moe_ep.state import ModelState, OfModel, PackageHook, ShardedOnly
from hf_moe_ep.upstream.graph import find_reached_parameters, list_tensors_in, with_tensors
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.upstream.sharded_models import get_stock_class, is_gathered, reshard_unit
from hf_moe_ep.upstream.towers import TOWER_OUTPUTS, is_encoder_input
from hf_moe_ep.vision.zero_gradients import ZeroGradients

# A rank counts 2 for a parameter that gets a gradient, 1 if a checkpoint may use it, else 0.
_HAS_GRADIENT = 2


class GatherEncoders(ShardedOnly):
    """Pre-forward hook of the owner that gathers all encoders if at least one rank has input."""

    def __init__(self, state: ModelState) -> None:
        super().__init__(state)
        # The units that were gathered for the current forward; None if no rank has input.
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


class AlignGradients(ShardedOnly):
    """Pre-forward hook of the decoder that gives all ranks gradients for the same parameters."""

    def __init__(self, state: ModelState, owner: nn.Module, encoders: GatherEncoders) -> None:
        super().__init__(state)
        self.owner, self.encoders = owner, encoders

    def run(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        gathered, self.encoders.gathered = self.encoders.gathered, None
        meshes = self.state.meshes
        if gathered is None or meshes is None:
            return None
        given = bind_forward(decoder, args, kwargs)
        with_grad = [tensor for tensor in list_tensors_in(given) if tensor.requires_grad]
        trained = self._list_trained_parameters()
        reached, hidden = find_reached_parameters(with_grad, trained)
        counts = [_HAS_GRADIENT if id(p) in reached else int(id(p) in hidden) for p in trained]
        # Backward also runs through a frozen encoder whose inputs require a gradient.
        in_graph = self.encoders.in_graph or any(counts)
        any_in_graph, *sums = sum_on_host(self.state, [in_graph, *counts])
        if not any_in_graph:
            for unit in gathered:
                unit.reshard()
            return None
        # If a sum is 0, no rank has a gradient. If it is the largest sum, every rank has one.
        differs = [0 < total < _HAS_GRADIENT * meshes.world_size for total in sums]
        rows = zip(trained, counts, differs, strict=True)
        missing = [p for p, count, differ in rows if differ and count < _HAS_GRADIENT]
        embeds = given.get("inputs_embeds")
        assert isinstance(embeds, Tensor), "the model embeds its text before the decoder"
        inputs = [embeds, *(tensor for tensor in with_grad if tensor is not embeds)]
        # A decoder may not use all of its inputs. For example, it may get features for more layers
        # than it has. If ranks differ, backward fills the missing gradients of such inputs with
        # zeros. Backward also gathers the encoders again, because an earlier backward may have
        # resharded them.
        regather = partial(_gather_encoders, self.state)
        outputs = ZeroGradients.apply(len(inputs), any(differs), regather, *inputs, *missing)
        replaced = {id(tensor): output for tensor, output in zip(inputs, outputs, strict=True)}
        return (), with_tensors(given, replaced)

    def _list_trained_parameters(self) -> list[nn.Parameter]:
        """List the trainable parameters of the encoders, in the same order on every rank."""
        groups = [unit.parameters() for unit in self.state.encoders]
        groups.append(self.owner.parameters(recurse=False))
        return [*dict.fromkeys(p for group in groups for p in group if p.requires_grad)]


class RefuseShardedEncoder(PackageHook):
    """Pre-forward hook of an encoder that raises ValueError if the encoder is not gathered."""

    def __call__(self, encoder: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(encoder, FSDPModule) and not is_gathered(encoder):
            raise ValueError(
                f"{get_stock_class(type(encoder)).__name__} of a sharded model was called on its "
                f"own, which other ranks do not notice, so its parameters cannot be gathered; pass "
                f"pictures and sound to the forward or to generate() of the whole model"
            )


class DropSlice(PackageHook):
    """Pre-forward hook of an encoder that removes the slice of the text from the arguments.

    Ranks that share a batch have the same pictures and sound, and each rank encodes all of them.
    """

    def __call__(
        self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name != SLICE}


class RecordGraph(OfModel):
    """Forward hook of an encoder that records if one of its outputs requires a gradient."""

    def __init__(self, encoders: GatherEncoders, root: nn.Module) -> None:
        super().__init__(root)
        self.encoders = encoders

    def __call__(self, encoder: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        self.encoders.in_graph |= any(tensor.requires_grad for tensor in list_tensors_in(outputs))


def encode_before_generate(
    state: ModelState,
    root: nn.Module,
    stock: Callable[[dict[str, Any]], Any],
    model_kwargs: dict[str, Any],
) -> Any:
    """Gather the encoders on all ranks, and call `stock`, by which `generate` runs the encoders.

    The root is gathered as well, because some parameters belong to no encoder, such as a separator
    between rows of a picture. FSDP2 casts inputs only in the root's forward, so this function casts
    pixels and sound.
    """
    if state.meshes is None or not _any_rank_has_input(state, model_kwargs):
        return stock(model_kwargs)
    model_kwargs = _cast_inputs(state, model_kwargs)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            reshard_unit(module)  # the unit may still be gathered from an earlier forward
    gathered = _gather_encoders(state)
    if isinstance(root, FSDPModule):
        root.unshard()
        gathered.append(root)
    try:
        return stock(model_kwargs)
    finally:
        for unit in gathered:
            unit.reshard()


def _gather_encoders(state: ModelState) -> list[FSDPModule]:
    """Gather all encoders on every rank, and return the encoders that were still sharded."""
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
    """Return True if the arguments of at least one rank have a tensor for an encoder.

    The outputs of an encoder count as well, because `generate` passes them to the forward, where
    Llama-4 projects them.
    """
    has_input = any(
        (is_encoder_input(name) or name == TOWER_OUTPUTS) and bool(list_tensors_in(value))
        for name, value in given.items()
    )
    return sum_on_host(state, [has_input])[0] > 0


def sum_on_host(state: ModelState, numbers: Sequence[int]) -> list[int]:
    """Sum each number over all ranks. The host waits for the result."""
    tensor = torch.tensor(numbers, dtype=torch.int32, device=state.mesh_device)
    return sum_over_ranks(tensor).tolist()
