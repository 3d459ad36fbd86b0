"""Join the parts of a training state that the pipeline stages hold.

A checkpoint has one `state.json` for the whole model, in which nothing depends on the number of
stages. A rank knows only the tensors of its own stage, so the ranks of a pipeline (one rank of each
stage) exchange their parts of `state.json`. Each rank writes its own tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hf_moe_ep.checkpoints.hub.stages import gather_from_stages
from hf_moe_ep.checkpoints.storage.json_values import encode
from hf_moe_ep.checkpoints.training.state_file import Group, OptimizerState, StateFile
from hf_moe_ep.state import ModelState

Value = TypeVar("Value")


def join_by_name(own: Mapping[str, Value], state: ModelState) -> dict[str, Value]:
    """Join a mapping of each stage, in the order of stages; every rank calls this."""
    return _join(gather_from_stages(own, state))


def join_stages(own: StateFile, state: ModelState) -> StateFile:
    """Join the states of all stages to the state of the whole model; every rank calls this."""
    if state.stage is None:
        return own
    parts = gather_from_stages(own, state)
    return replace(
        parts[0],
        tensors=_join([part.tensors for part in parts]),
        scalars=_join([part.scalars for part in parts]),
        optimizer=_join_optimizers([part.optimizer for part in parts]),
    )


def _join(parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    joined: dict[str, Value] = {}
    for part in parts:
        joined |= part
    return joined


def _join_optimizers(parts: list[OptimizerState | None]) -> OptimizerState | None:
    optimizers = [part for part in parts if part is not None]
    if not optimizers:
        return None
    groups = join_groups([part.groups for part in optimizers])
    return replace(optimizers[0], values=_join([part.values for part in optimizers]), groups=groups)


def join_groups(stage_groups: Sequence[Sequence[Group]]) -> list[Group]:
    """Join the parameter groups of all stages to the groups of the whole model.

    Raises:
        ValueError: the number of groups or an option of a group depends on the stage.
    """
    numbers = [len(groups) for groups in stage_groups]
    if len(set(numbers)) > 1:
        raise ValueError(
            f"the optimizers of the pipeline stages have different numbers of parameter groups "
            f"({', '.join(map(str, numbers))}), and a checkpoint joins groups of equal numbers; "
            f"create the same groups on every stage, empty ones as well: {{'params': []}}"
        )
    joined = []
    for index, groups in enumerate(zip(*stage_groups, strict=True)):
        _check_options([group.options for group in groups], index)
        # Two stages have a tied embedding; its name is listed once.
        names = dict.fromkeys(name for group in groups for name in group.names)
        joined.append(Group(list(names), groups[0].options))
    return joined


def _check_options(stage_options: list[dict[str, Any]], index: int) -> None:
    """Raise ValueError if the options of parameter group `index` depend on the pipeline stage."""
    encoded = [encode(options, f"param_groups[{index}]") for options in stage_options]
    for stage, (options, others) in enumerate(zip(stage_options, encoded, strict=True)):
        for name in encoded[0].keys() | others.keys():
            if encoded[0].get(name) != others.get(name):
                raise ValueError(
                    f"{name} of parameter group {index} is {stage_options[0].get(name)} on "
                    f"pipeline stage 0 and {options.get(name)} on stage {stage}, but a checkpoint "
                    f"has one set of options per group; create the groups in the same order and "
                    f"with the same options on every stage, or save with optimizer=None"
                )
