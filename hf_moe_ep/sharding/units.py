"""Find the modules that become FSDP2 units, and set when FSDP2 gathers and reshards each unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.architectures import Parts, find_parts
from hf_moe_ep.mtp_head import MtpHead
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.upstream.sharded_models import (
    forget_finished_backward,
    gather_for_cache,
    gather_in_backward,
    gather_unit,
    reshard_unit,
)


@dataclass(frozen=True)
class Units:
    """The modules that become FSDP2 units.

    Attributes:
        experts: the experts modules of each layer, including PEFT's wrappers, by the layer's index.
        tied_modules: for a layer or an experts module, the module of a second tower that has the
            same parameters. Both modules are one unit.
        vision: the blocks of a vision tower, and the tower itself at the end.
        encoders: other encoders of pictures and sound (`vision/encoders.py`).
        tail: final norm and head, which are one unit. If the weights are tied, the unit begins with
            the embedding. With a second tower it includes the final norms and embeddings of both.
        head: the head, which is the last module of `tail`; None if there is none.
        tied: True if the embedding belongs to `tail`.
        mtp: the head for multi-token prediction, whose decoder layers are the last of `layers`.
    """

    layers: list[nn.Module]
    experts: dict[int, tuple[nn.Module, ...]]
    tied_modules: dict[nn.Module, nn.Module]
    vision: list[nn.Module]
    encoders: list[nn.Module]
    embedding: nn.Module | None
    tail: list[nn.Module]
    head: nn.Module | None
    tied: bool
    mtp: MtpHead | None

    @property
    def num_main_layers(self) -> int:
        """The number of decoder layers without the layers of `mtp`."""
        return len(self.layers) - (0 if self.mtp is None else len(self.mtp.blocks))

    @property
    def all_experts(self) -> list[nn.Module]:
        """The experts modules of all layers, in order."""
        modules = (module for modules in self.experts.values() for module in modules)
        return [other for module in modules for other in self.with_tied(module)]

    def with_tied(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that are one unit with a layer or with an experts module."""
        tied = self.tied_modules.get(module)
        return [module] if tied is None else [module, tied]


def find_units(model: nn.Module, plan: ModelPlan) -> Units:
    """Find the units of a model that is not sharded yet."""
    return list_units(find_parts(model, plan))


def list_units(parts: Parts) -> Units:
    """List the units of a model, or of the part that a pipeline stage holds."""
    tied = parts.tied or bool(parts.tied_modules)
    tied_embedding = [parts.embedding] if tied and parts.embedding is not None else []
    head = [] if parts.head is None else [parts.head]
    tail = [*tied_embedding, *parts.final_norm, *head]
    tower = [] if parts.tower is None else [*parts.tower.blocks, parts.tower.module]
    return Units(
        layers=list(parts.layers),
        experts=parts.adapted_experts,
        tied_modules=parts.tied_modules,
        vision=tower,
        encoders=[] if parts.encoders is None else [*parts.encoders.modules],
        embedding=parts.embedding,
        tail=[*tail, *(_find_owners_outside(parts.root, tail) if parts.tied_modules else ())],
        head=parts.head,
        tied=tied,
        mtp=parts.mtp,
    )


def _find_owners_outside(root: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Return the other modules in `root` that directly hold parameters of `modules`."""
    inside = {inner for module in modules for inner in module.modules()}
    shared = {parameter for module in inside for parameter in module.parameters(recurse=False)}
    return [
        module
        for module in root.modules()
        if module not in inside and not shared.isdisjoint(module.parameters(recurse=False))
    ]


# Routers that are units of their own, by the index of their layer (`shard.py`).
Routers = Mapping[int, Sequence[nn.Module]]


def keep_last_layer(units: Units, routers: Routers) -> None:
    """Keep the last layer gathered after forward, because backward begins with that layer.

    The head and the root stay gathered as well (`shard.py`). `gathered.py` reshards these units if
    no backward follows.
    """
    last_index = units.num_main_layers - 1
    inner = (*routers.get(last_index, ()), *units.experts.get(last_index, ()))
    for unit in (units.layers[last_index], *inner):
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(False, recurse=False)


def gather_for_caches(units: Units) -> None:
    """Gather a layer of the first tower when a gradient reaches its keys and values in the cache.

    The second tower reads this cache. If no loss reads the output of the first tower, no other
    gradient reaches its last layer.
    """
    for layer in units.layers if units.tied_modules else ():
        layer.register_forward_hook(gather_for_cache, with_kwargs=True)


def gather_with_norm(head: nn.Module, norm: nn.Module, root: nn.Module) -> None:
    """Gather a head that is a unit of its own when the final norm runs, and again in backward.

    TRL's fused head (trl/trainer/utils.py) reads the weight of the head and does not call the head,
    so FSDP2 would not gather it. The gradient of a shard is not averaged over the ranks.
    """
    norm.register_forward_pre_hook(partial(gather_unit, head))
    root.register_forward_hook(partial(gather_in_backward, head))


def allow_reentrant_checkpoints(units: Units, routers: Routers) -> None:
    """Register `forget_finished_backward` on all units that activation checkpointing may recompute.

    With this hook, reentrant checkpointing supports two forwards before one backward.
    """
    layers = (module for layer in units.layers for module in units.with_tied(layer))
    for unit in (*layers, *chain(*routers.values()), *units.all_experts, *units.vision):
        # This hook must run before FSDP2's own hook, which reads the state that this hook resets.
        # Experts that are part of their layer's unit have no state of FSDP2.
        if isinstance(unit, FSDPModule):
            unit.register_forward_pre_hook(forget_finished_backward, prepend=True)


def list_units_in(model: Any) -> list[FSDPModule]:
    """Return the modules of a model that are FSDP2 units, or parts of one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Reshard all units. The model must run neither a forward nor a backward.

    `gathered.py` says which units stay gathered.
    """
    for unit in list_units_in(model):
        reshard_unit(unit)


def set_prefetch(units: Units, routers: Routers) -> None:
    """Prefetch the layer that comes next, with its router and its experts.

    In forward this is the following layer, in backward the preceding one.

    FSDP2's implicit prefetch is too late: the host starts it after the dispatch, where the host
    waits for token counts. Backward ends at the first unit with trainable parameters. Units in
    front of this unit, such as the embedding under LoRA, are therefore not prefetched in backward.
    """
    # Each entry has the units that are gathered together: a layer, its router, its experts.
    main_chain: list[list[FSDPModule]] = []
    for index, layer in enumerate(units.layers):
        assert isinstance(layer, FSDPModule)
        inner = (*routers.get(index, ()), *units.experts.get(index, ()))
        main_chain.append([layer, *(unit for unit in inner if isinstance(unit, FSDPModule))])
    # A head for multi-token prediction has a chain of its own, because it runs only in training.
    mtp_chain, main_chain = main_chain[units.num_main_layers :], main_chain[: units.num_main_layers]
    if units.mtp is not None:
        assert isinstance(units.mtp, FSDPModule)
        mtp_chain.insert(0, [units.mtp])
    if isinstance(units.embedding, FSDPModule):
        main_chain.insert(0, [units.embedding])
    if units.tail and not units.tied:
        tail = units.tail[0]
        assert isinstance(tail, FSDPModule)
        main_chain.append([tail])
    # The tower has a chain of its own, because it does not run in a step without pixels.
    tower_chain: list[list[FSDPModule]] = []
    for module in (*units.vision[-1:], *units.vision[:-1]):
        assert isinstance(module, FSDPModule)
        tower_chain.append([module])
    for consecutive in (main_chain, tower_chain, mtp_chain):
        trains = False
        for group, next_group in pairwise(consecutive):
            group[0].set_modules_to_forward_prefetch(next_group)
            trains |= any(_is_trainable(unit) for unit in group)
            if trains:
                next_group[0].set_modules_to_backward_prefetch(group)
            else:
                for unit in next_group:
                    # With an empty list FSDP2 would prefetch the previous unit. If a unit is its
                    # own target, nothing is prefetched, because the unit is gathered already.
                    unit.set_modules_to_backward_prefetch([unit])


def _is_trainable(unit: Any) -> bool:
    return any(parameter.requires_grad for parameter in unit.parameters())
