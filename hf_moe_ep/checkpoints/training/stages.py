"""Join the parts of a training state that the pipeline stages hold.

A checkpoint has one `state.json` for the whole model, in which nothing depends on the number of
stages. Each rank knows the tensors of its own stage, so the ranks of a column exchange their parts
of `state.json`. The tensors themselves are written by the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hf_moe_ep.checkpoints.hub.stages import gather_stages
from hf_moe_ep.checkpoints.storage.json_values import encode
from hf_moe_ep.checkpoints.training.state_file import Group, OptimizerState, StateFile
from hf_moe_ep.state import ModelState

Value = TypeVar("Value")


def join_by_name(own: Mapping[str, Value], state: ModelState) -> dict[str, Value]:
    """Return the values of all stages by name, in the order of stages; every rank calls this."""
    return _join(gather_stages(own, state))


def join_stages(own: StateFile, state: ModelState) -> StateFile:
    """Return the state of the whole model, from the states of all stages; every rank calls this."""
    if state.stage is None:
        return own
    parts = gather_stages(own, state)
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


def join_groups(of_stages: Sequence[Sequence[Group]]) -> list[Group]:
    """Return the parameter groups of the whole model, from those of all stages.

    Raises:
        ValueError: the number of groups or an option of a group depends on the stage.
    """
    numbers = [len(groups) for groups in of_stages]
    if len(set(numbers)) > 1:
        raise ValueError(
            f"the optimizers of the pipeline stages have different numbers of parameter groups "
            f"({', '.join(map(str, numbers))}), and a checkpoint joins groups of equal numbers; "
            f"create the same groups on every stage, empty ones as well: {{'params': []}}"
        )
    joined = []
    for index, groups in enumerate(zip(*of_stages, strict=True)):
        _check_options([group.options for group in groups], index)
        # Two stages have a tied embedding; its name is listed once.
        names = dict.fromkeys(name for group in groups for name in group.names)
        joined.append(Group(list(names), groups[0].options))
    return joined


def _check_options(of_stages: list[dict[str, Any]], index: int) -> None:
    """Raise ValueError if the options of parameter group `index` depend on the pipeline stage."""
    encoded = [encode(options, f"param_groups[{index}]") for options in of_stages]
    for stage, (options, others) in enumerate(zip(of_stages, encoded, strict=True)):
        for name in encoded[0].keys() | others.keys():
            if encoded[0].get(name) != others.get(name):
                raise ValueError(
                    f"{name} of parameter group {index} is {of_stages[0].get(name)} on pipeline "
                    f"stage 0 and {options.get(name)} on stage {stage}, but a checkpoint has one "
                    f"set of options per group; create the groups in the same order and with the "
                    f"same options on every stage, or save with optimizer=None"
                )
