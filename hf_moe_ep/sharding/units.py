"""Find the modules that become FSDP2 units, and set the order in which FSDP2 gathers them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.architectures import find_parts
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.upstream.sharded_models import forget_finished_backward


@dataclass(frozen=True)
class Units:
    """The modules that become FSDP2 units.

    Attributes:
        experts: the experts modules of each layer, by the index of the layer, inside the wrappers
            of their adapters.
        vision: the blocks of a vision tower, and the tower itself at the end.
        encoders: other encoders of pictures and sound (`vision/encoders.py`).
        tail: final norm and head, which are one unit; with tied weights the embedding too.
        tied: True if the embedding and the head share their weight.
    """

    layers: list[nn.Module]
    experts: dict[int, tuple[nn.Module, ...]]
    vision: list[nn.Module]
    encoders: list[nn.Module]
    embedding: nn.Module | None
    tail: list[nn.Module]
    tied: bool

    @property
    def all_experts(self) -> list[nn.Module]:
        """The experts modules of all layers, in order."""
        return [module for modules in self.experts.values() for module in modules]


def find_units(model: nn.Module, plan: ModelPlan) -> Units:
    """Find the units of a model that is not sharded yet."""
    parts = find_parts(model, plan)
    in_front_of_tail = [parts.embedding] if parts.tied and parts.embedding is not None else []
    head = [] if parts.head is None else [parts.head]
    tower = [] if parts.tower is None else [*parts.tower.blocks, parts.tower.module]
    return Units(
        layers=list(parts.layers),
        experts=parts.adapted_experts,
        vision=tower,
        encoders=[] if parts.encoders is None else [*parts.encoders.modules],
        embedding=parts.embedding,
        tail=[*in_front_of_tail, *parts.final_norm, *head],
        tied=parts.tied,
    )


def keep_last_layer(units: Units, root: nn.Module) -> None:
    """Keep the last layer gathered after forward, because backward begins with that layer.

    The last layer, head and root are resharded in two cases:

    - After a forward without gradients. Otherwise the model would show gathered parameters, and
      FSDP2 never sees a change of those: adapters that PEFT freezes for a reference pass would stay
      frozen.
    - Before the next forward. The last forward may have had no backward, in a loop that skips a bad
      micro-batch or validates without `torch.no_grad`. An optimizer step then has changed the
      shards, but not the gathered weights. A graph that still waits for its backward is not
      affected: FSDP2 gathers the same parameters again.
    """
    last = len(units.layers) - 1
    kept = [units.layers[last], *units.experts.get(last, ())]
    for unit in kept:
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(False, recurse=False)
    kept += [*units.tail[:1], root]

    kept_units = [unit for unit in kept if isinstance(unit, FSDPModule)]

    @torch.compiler.disable  # as FSDP2's own hooks are
    def reshard_kept(*_: Any) -> None:
        for unit in kept_units:
            unit.reshard()

    @torch.compiler.disable
    def reshard_without_backward(*_: Any) -> None:
        if not torch.is_grad_enabled():
            reshard_kept()

    # Before FSDP2's own hook, which gathers the root.
    root.register_forward_pre_hook(reshard_kept, prepend=True)
    root.register_forward_hook(reshard_without_backward)


def allow_reentrant_checkpoints(units: Units) -> None:
    """Hook the units that a checkpoint may recompute."""
    for unit in (*units.layers, *units.all_experts, *units.vision):
        # Before FSDP2's own hook, which reads the state that this one resets.
        unit.register_forward_pre_hook(forget_finished_backward, prepend=True)


def reshard(model: nn.Module) -> None:
    """Reshard all units, some of which stay gathered after a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_prefetch(units: Units) -> None:
    """Prefetch the next unit and its experts while a unit computes, in forward and backward.

    FSDP2's implicit prefetch is too late: it starts when the host has passed the dispatch, where
    the host waits for token counts. Backward does not prefetch the units before the first one with
    trainable parameters, such as the embedding under LoRA, because it ends there.
    """
    stages: list[list[FSDPModule]] = []
    for index, layer in enumerate(units.layers):
        assert isinstance(layer, FSDPModule)
        experts = units.experts.get(index, ())
        stages.append([layer, *(one for one in experts if isinstance(one, FSDPModule))])
    if isinstance(units.embedding, FSDPModule):
        stages.insert(0, [units.embedding])
    if units.tail and not units.tied:
        tail = units.tail[0]
        assert isinstance(tail, FSDPModule)
        stages.append([tail])
    # The tower has a chain of its own, because it does not run on a step without pixels.
    tower: list[list[FSDPModule]] = []
    for part in (*units.vision[-1:], *units.vision[:-1]):
        assert isinstance(part, FSDPModule)
        tower.append([part])
    for chain in (stages, tower):
        reached = False
        for here, ahead in pairwise(chain):
            here[0].set_modules_to_forward_prefetch(ahead)
            reached |= any(_has_grads(unit) for unit in here)
            if reached:
                ahead[0].set_modules_to_backward_prefetch(here)
            else:
                for unit in ahead:
                    # The unit itself; an empty list would mean FSDP2's own choice, the unit before.
                    unit.set_modules_to_backward_prefetch([unit])


def _has_grads(unit: Any) -> bool:
    return any(parameter.requires_grad for parameter in unit.parameters())
