"""Whether a checkpoint is one of this model and this optimizer, before anything is read into them.

Loading in part would train on with a mixture of two runs, so every difference is an error that
names what differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_moe_ep.checkpoints.training.tensors import kind_of, model_slots, parameter_names

_SHOWN = 5


def check_model(model: nn.Module, document: dict[str, Any], where: str) -> None:
    """Raise ValueError where parameters and buffers are not those of the checkpoint."""
    index, scalars = document["tensors"], document["rest"]["scalars"]
    slots = model_slots(model)
    saved = {name.removeprefix("model.") for name in index if name.startswith("model.")}
    saved |= scalars.keys()
    problems = []
    if missing := slots.keys() - saved:
        problems.append(f"it lacks {_some(missing)}")
    if unexpected := saved - slots.keys():
        problems.append(f"the model lacks {_some(unexpected)}")
    wrong = []
    for name in sorted(slots.keys() & saved):
        slot = slots[name]
        if not slot.tensor.ndim or f"model.{name}" not in index:
            if slot.tensor.ndim or name not in scalars:
                wrong.append(f"{name} is a single number on one side only")
            continue
        entry, shape = index[f"model.{name}"], slot.file_shape()
        if shape != entry["shape"]:
            wrong.append(f"{name} has shape {entry['shape']}, the model's {shape}")
        dtype, mine = getattr(torch, entry["dtype"]), slot.tensor.dtype
        if torch.promote_types(dtype, mine) != mine:
            wrong.append(
                f"{name} is {dtype}, which the model's {mine} would round (a checkpoint of "
                f"fp32 masters wants model.float() or apply_ep_fsdp2(model))"
            )
    if wrong:
        problems.append("; ".join(wrong[:_SHOWN]) + _more(wrong))
    if problems:
        raise ValueError(f"{where} is a checkpoint of another model: " + "; ".join(problems))


def check_optimizer(model: nn.Module, optimizer: Any, rest: dict[str, Any], where: str) -> None:
    """Raise ValueError where it is another optimizer, or has other parameters in its groups."""
    was, now = rest.get("kind"), kind_of(optimizer)
    if was not in (None, now):
        raise ValueError(
            f"{where} was saved with {was}, this optimizer is {now}, which would go on with the "
            f"other's lr and without a state of its own; load with {was}, then make {now}"
        )
    names, _ = parameter_names(model, optimizer)
    mine = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    theirs = [set(group["names"]) for group in rest["groups"]]
    if len(mine) != len(theirs):
        raise ValueError(
            f"{where} was saved with {len(theirs)} groups of parameters, this optimizer has "
            f"{len(mine)}; make it as it was made then"
        )
    for index, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            raise ValueError(
                f"{where} was saved with another group {index} of parameters: only it has "
                f"{_some(there - here)}, only this optimizer has {_some(here - there)}"
            )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + _more(ordered) if ordered else "none"


def _more(items: list[str]) -> str:
    return f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
