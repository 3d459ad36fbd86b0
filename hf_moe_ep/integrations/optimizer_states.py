"""Save and load the optimizers of pipeline stages, and of parameters that had no gradient yet.

Accelerate saves and loads an optimizer with two functions of torch.distributed.checkpoint, which
`use_own_optimizer_states` replaces.

A parameter that never had a gradient, such as those of a vision tower in a training on text alone,
has no optimizer state. torch saves no state of it, but refuses to load a checkpoint without this
state. Here such a parameter has no state after the load either, as in the run that was saved.

Both runs must train the same parameters. torch would ignore a parameter that only the saved run
trained; here a load is refused if the model lacks this parameter.

On a rank the functions get the parameters of one pipeline stage, but files must not depend on the
number of stages:

    a tied weight        The last stage names its copy like the embedding, as a whole model does.
    a parameter group    It lists the parameters of all stages. Rank 0 writes these lists.
    loading              Each stage takes its own parameters from the list of the group with the
                         same number. torch would search for a group by its parameters, and could
                         not find a group that is empty on this stage.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions

from hf_moe_ep.checkpoints.hub.stages import gather_from_stages
from hf_moe_ep.checkpoints.training.same_run import check_optimizer, format_names
from hf_moe_ep.checkpoints.training.stages import join_groups
from hf_moe_ep.checkpoints.training.state_file import Group, OptimizerState
from hf_moe_ep.checkpoints.training.tensors import list_parameter_names
from hf_moe_ep.ranks.all_ranks import run_on_all, run_on_first
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.replaced import replaced


@contextmanager
def use_own_optimizer_states() -> Iterator[None]:
    """Replace torch's functions that get and set the state of an optimizer in the block.

    In the block every rank must call torch's functions.
    """
    get_state = partial(_get_state, torch_state_dict.get_optimizer_state_dict)
    set_state = partial(_set_state, torch_state_dict.set_optimizer_state_dict)
    with (
        replaced(torch_state_dict, "get_optimizer_state_dict", get_state),
        replaced(torch_state_dict, "set_optimizer_state_dict", set_state),
    ):
        yield


def _get_state(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Wrap `get_optimizer_state_dict`: use names of the whole model, and groups of all stages."""
    own, state = original(model, *args, **kwargs), find_state(model)
    if state is None or state.stage is None:
        return own
    aliases: dict[str, str] = state.stage.aliases
    groups = [_to_group(group, aliases) for group in own["param_groups"]]
    joined = join_groups(gather_from_stages(groups, state))
    return {
        "state": {aliases.get(name, name): values for name, values in own["state"].items()},
        "param_groups": [
            group.options | {"params": joined_group.names}
            for group, joined_group in zip(groups, joined, strict=True)
        ],
    }


def _set_state(
    original: Callable[..., Any],
    model: nn.Module,
    optimizers: Any,
    optim_state_dict: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap `set_optimizer_state_dict`: load the states of this stage's parameters.

    Raises:
        ValueError: on every rank: the optimizer has other parameter groups than the saved one, or
            the saved run trained parameters that the model lacks.
    """
    state = find_state(model)
    if state is None or not isinstance(optimizers, torch.optim.Optimizer):
        return original(model, optimizers, optim_state_dict, *args, **kwargs)
    if state.stage is None:
        return _set_whole(original, model, optimizers, optim_state_dict, *args, **kwargs)
    saved_groups = optim_state_dict["param_groups"]
    saved = OptimizerState(None, [], {}, [_to_group(group, {}) for group in saved_groups])
    where = "the checkpoint of the optimizer"

    def check() -> None:
        _check_has_trained_parameters(saved_groups, state.stage.tensors)
        check_optimizer(model, optimizers, saved, where)

    run_on_all(where, check)
    names, _ = list_parameter_names(model, optimizers)
    groups = [
        saved_group | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group, saved_group in zip(optimizers.param_groups, saved_groups, strict=True)
    ]
    optimizers.load_state_dict({"state": optim_state_dict["state"], "param_groups": groups})
    return None


def _set_whole(
    original: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions,
) -> Any:
    """Load the states of all parameters; those that had no gradient in the saved run get no state.

    Raises:
        ValueError: on every rank: in the saved run the optimizer did not have a parameter, it had
            parameters that the model lacks, or it had other groups of parameters.
    """
    names, trained = list_parameter_names(model, optimizer)

    def find_without_state() -> set[str]:
        saved_groups = optim_state_dict["param_groups"]
        _check_has_trained_parameters(saved_groups, set(names.values()))
        missing = trained.keys() - optim_state_dict["state"].keys()
        saved = {name for group in saved_groups for name in group["params"]}
        # DCP reads only as many groups as this optimizer has.
        in_other_groups = trained.keys() - missing - saved
        if in_other_groups or len(saved_groups) != len(optimizer.param_groups):
            raise ValueError(
                f"the optimizer of the saved run had other groups of parameters than this one, "
                f"which has {len(optimizer.param_groups)} (in other groups: "
                f"{format_names(in_other_groups or saved)}); create it with the same groups, or "
                f"load the model alone and start with a new optimizer"
            )
        if new := sorted(missing - saved):
            raise ValueError(
                f"the optimizer trains {new[0]} (and {len(new) - 1} more), which the optimizer of "
                f"the saved run did not; freeze these parameters as in that run, or load the model "
                f"alone and start with a new optimizer"
            )
        return missing

    # If rank 0 reads the file and sends the states, the other ranks have no state dict.
    without_state = run_on_first("the checkpoint of the optimizer", find_without_state)
    if without_state:
        options = replace(options, strict=False)
    result = original(model, optimizer, optim_state_dict, options=options)
    # torch first creates the states of all parameters, by a step with lr 0 that leaves `step` at 1.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if names[id(parameter)] in without_state:
                optimizer.state.pop(parameter, None)
    return result


def _check_has_trained_parameters(
    saved_groups: Iterable[dict[str, Any]], in_model: Container[str]
) -> None:
    """Raise ValueError if the saved run trained parameters that the model lacks.

    Accelerate reads only the tensors that the model has. If the resumed run has no adapters on
    experts, for example, it would continue without the experts' trained adapters.
    """
    saved = (name for group in saved_groups for name in group["params"])
    if lost := [name for name in saved if name not in in_model]:
        raise ValueError(
            f"the optimizer of the saved run trained {format_names(lost)}, which this model lacks, "
            f"so their values would be lost; build the model and its adapters as in that run, or "
            f"load the model alone and start with a new optimizer"
        )


def _to_group(group: dict[str, Any], aliases: dict[str, str]) -> Group:
    names = [aliases.get(name, name) for name in group["params"]]
    return Group(names, {key: value for key, value in group.items() if key != "params"})
