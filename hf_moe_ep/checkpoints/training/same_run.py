"""Check that a checkpoint belongs to this model and this optimizer, before anything is changed.

A partial load would train on with a mixture of two runs, so every difference is an error that names
what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_moe_ep.checkpoints.training.state_file import OptimizerState, StateFile, TensorForm
from hf_moe_ep.checkpoints.training.tensors import (
    StateTensor,
    bases_of,
    kind_of,
    model_slots,
    parameter_names,
)

_OF_MODEL = "model."
_NO_OPTIONS = {"params", "param_names"}
# What schedulers leave in the groups (torch/optim/lr_scheduler.py).
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_SHOWN = 5


def check_model(model: nn.Module, saved: StateFile, where: str) -> None:
    """Raise ValueError if parameters and buffers differ from those of the checkpoint."""
    mine = model_slots(model)
    forms = {
        name.removeprefix(_OF_MODEL): form
        for name, form in saved.tensors.items()
        if name.startswith(_OF_MODEL)
    }
    names = forms.keys() | saved.scalars.keys()
    problems = []
    if missing := mine.keys() - names:
        problems.append(f"it lacks {_some(missing)}")
    if unexpected := names - mine.keys():
        problems.append(f"the model lacks {_some(unexpected)}")
    wrong: list[str] = []
    for name in sorted(mine.keys() & names):
        is_scalar = not mine[name].tensor.ndim
        if is_scalar != (name in saved.scalars):
            wrong.append(f"{name} is a single number on one side only")
        elif not is_scalar:
            wrong += _differences(name, mine[name], forms[name])
    if wrong:
        problems.append("; ".join(wrong[:_SHOWN]) + _more(wrong))
    if problems:
        raise ValueError(f"{where} is a checkpoint of another model: " + "; ".join(problems))


def _differences(name: str, tensor: StateTensor, saved: TensorForm) -> Iterator[str]:
    shape = tensor.file_shape()
    if shape != saved.shape:
        yield f"{name} has shape {saved.shape}, the model's {shape}"
    mine = tensor.tensor.dtype
    if torch.promote_types(saved.dtype, mine) != mine:
        yield (
            f"{name} is {saved.dtype}, which the model's {mine} would round (a checkpoint of "
            f"fp32 master weights needs model.float() or apply_ep_fsdp2(model))"
        )


def check_optimizer(
    model: nn.Module, optimizer: Any, saved: OptimizerState | None, where: str
) -> None:
    """Raise ValueError if the optimizer's class, groups or parameters differ."""
    if saved is None:
        raise ValueError(f"{where} was saved without an optimizer; call with optimizer=None")
    _check_kind(optimizer, saved, where)
    names, _ = parameter_names(model, optimizer)
    mine = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    theirs = [set(group.names) for group in saved.groups]
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


def _check_kind(optimizer: Any, saved: OptimizerState, where: str) -> None:
    """Accept the saved class, a class derived from it, or one of its bases."""
    was, now = saved.kind, kind_of(optimizer)
    if was in (None, now):
        return
    if was not in bases_of(optimizer) and now not in saved.bases:
        raise ValueError(
            f"{where} was saved with {was}, this optimizer is {now}, which would take over the lr "
            f"of {was} without its own state; load with {was}, then make {now}"
        )
    here = set().union(*(group.keys() for group in optimizer.param_groups))
    there = set().union(*(group.options.keys() for group in saved.groups))
    if others := (here ^ there) - _NO_OPTIONS - _OF_SCHEDULERS:
        raise ValueError(
            f"{where} was saved with {was}, this optimizer is {now}, and only one of them has the "
            f"options {_some(others)}; load with {was}, then make {now}"
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + _more(ordered) if ordered else "none"


def _more(items: list[str]) -> str:
    return f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
