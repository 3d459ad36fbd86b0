"""Check that a checkpoint belongs to this model and this optimizer, before anything is changed.

If only a part of a checkpoint were loaded, training would continue with a mixture of two runs.
Therefore `check_model` and `check_optimizer` raise an error that names the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_moe_ep.checkpoints.training.state_file import OptimizerState, SavedTensor, StateFile
from hf_moe_ep.checkpoints.training.tensors import (
    StateTensor,
    get_class_name,
    list_base_names,
    list_parameter_names,
    list_state_tensors,
)
from hf_moe_ep.state import find_state

_MODEL_PREFIX = "model."
# Entries of a parameter group that are not options.
_NOT_OPTIONS = {"params", "param_names"}
# Options that schedulers add to parameter groups (torch/optim/lr_scheduler.py).
_SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_MAX_NAMES = 5  # an error lists at most this many names


def check_model(
    model: nn.Module, saved: StateFile, where: str, *, allow_missing: bool = False
) -> None:
    """Raise ValueError if the parameters and buffers of a model differ from the saved ones.

    With `allow_missing`, the checkpoint may lack tensors of the model.
    """
    state_tensors = list_state_tensors(model)
    saved_tensors = {
        name.removeprefix(_MODEL_PREFIX): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(_MODEL_PREFIX)
    }
    names = saved_tensors.keys() | saved.scalars.keys()
    problems = []
    if not allow_missing and (missing := state_tensors.keys() - names):
        problems.append(f"it lacks {format_names(missing)}")
    state = find_state(model)
    in_other_stages = set() if state is None or state.stage is None else state.stage.tensors.keys()
    if unexpected := names - state_tensors.keys() - in_other_stages:
        problems.append(f"the model lacks {format_names(unexpected)}")
    differences: list[str] = []
    for name in sorted(state_tensors.keys() & names):
        is_scalar = not state_tensors[name].tensor.ndim
        if is_scalar != (name in saved.scalars):
            owner = "model" if is_scalar else "checkpoint"
            differences.append(f"{name} is a 0-dim tensor only in the {owner}")
        elif not is_scalar:
            differences += _find_differences(name, state_tensors[name], saved_tensors[name])
    if differences:
        problems.append("; ".join(differences[:_MAX_NAMES]) + _count_others(differences))
    if problems:
        raise ValueError(f"{where} is a checkpoint of another model: " + "; ".join(problems))


def _find_differences(name: str, tensor: StateTensor, saved: SavedTensor) -> Iterator[str]:
    shape = tensor.file_shape()
    if shape != saved.shape:
        yield f"{name} has shape {saved.shape}, the model's {shape}"
    dtype = tensor.tensor.dtype
    if torch.promote_types(saved.dtype, dtype) != dtype:
        yield (
            f"{name} is {saved.dtype}, which the model's {dtype} would round (a checkpoint of "
            f"fp32 master weights needs model.float() or apply_ep_fsdp2(model))"
        )


def check_optimizer(
    model: nn.Module, optimizer: Any, saved: OptimizerState | None, where: str
) -> None:
    """Raise ValueError if an optimizer has another class or other groups than the saved one."""
    if saved is None:
        raise ValueError(f"{where} was saved without an optimizer; call with optimizer=None")
    _check_class(optimizer, saved, where)
    names, _ = list_parameter_names(model, optimizer)
    groups = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    state = find_state(model)
    saved_groups = [set(group.names) for group in saved.groups]
    if state is not None and state.stage is not None:
        own = set(names.values())
        saved_groups = [group & own for group in saved_groups]
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"{where} was saved with {len(saved_groups)} groups of parameters, this optimizer has "
            f"{len(groups)}; create it with the same groups"
        )
    for index, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        if group != saved_group:
            raise ValueError(
                f"{where} was saved with another group {index} of parameters: only the saved group "
                f"has {format_names(saved_group - group)}, only the group of this optimizer has "
                f"{format_names(group - saved_group)}"
            )


def _check_class(optimizer: Any, saved: OptimizerState, where: str) -> None:
    """Raise ValueError unless the optimizer can use the saved state.

    The class must be the saved class, or a derived or a base class that has the same options.
    """
    saved_kind, kind = saved.kind, get_class_name(optimizer)
    if saved_kind in (None, kind):
        return
    if saved_kind not in list_base_names(optimizer) and kind not in saved.bases:
        raise ValueError(
            f"{where} was saved with {saved_kind}, this optimizer is {kind}, which would take over "
            f"the saved lr but cannot use the saved state; load into {saved_kind}, then create "
            f"{kind}"
        )
    options = set().union(*(group.keys() for group in optimizer.param_groups))
    saved_options = set().union(*(group.options.keys() for group in saved.groups))
    if others := (options ^ saved_options) - _NOT_OPTIONS - _SCHEDULER_OPTIONS:
        raise ValueError(
            f"{where} was saved with {saved_kind}, this optimizer is {kind}, and only one of them "
            f"has the options {format_names(others)}; load into {saved_kind}, then create {kind}"
        )


def format_names(names: Iterable[str]) -> str:
    """Join the first names with commas, followed by the number of the other names."""
    ordered = sorted(names)
    return ", ".join(ordered[:_MAX_NAMES]) + _count_others(ordered) if ordered else "none"


def _count_others(items: list[str]) -> str:
    return f" and {len(items) - _MAX_NAMES} more" if len(items) > _MAX_NAMES else ""
