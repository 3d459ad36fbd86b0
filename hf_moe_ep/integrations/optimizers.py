"""Run optimizer steps and clip gradients of patched models under Accelerate.

FSDP2's parameters are DTensors. Some optimizers cannot train DTensors: their state consists of
plain tensors, or they use operators that DTensor does not support. torch's error names only the
operator, so `step` raises an error with the name of the optimizer and the optimizers that work.

Accelerate before 1.15 clips with torch's function, which refuses gradients on two meshes. With
these versions, and with pipeline stages, `clip_grad_norm` uses `sharding/clip.py` instead.

With `bias_update_rate` the routers' biases of a model are updated after each step of an optimizer
that trains this model (`routing/bias.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_moe_ep.checkpoints.training.tensors import refuse_torch_muon
from hf_moe_ep.routing.bias import update_biases
from hf_moe_ep.sharding.clip import Scope, clip_gradients_of
from hf_moe_ep.sharding.gathered import check_backward_has_ended
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.accelerate_and_trainer import (
    clips_over_meshes,
    list_prepared_models,
    list_prepared_optimizers,
    one_group_for_all_meshes,
)
from hf_moe_ep.upstream.frameworks import drops_nan_gradients
from hf_moe_ep.upstream.sharded_models import is_refused_by_dtensor
from hf_moe_ep.upstream.wrap import Wrap, bind_wrapper

# This attribute of an optimizer lists the states of the models that it trains and whose routers'
# biases are updated.
_STATES_TO_UPDATE = "_hf_moe_ep_followed"

# The optimizers of torch.optim that train a sharded model with the same results as one process
# (tests/integrations/test_sharded_optimizers.py).
SUPPORTED_OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)


def create_optimizer(
    original: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Trainer.create_optimizer`: create the same groups before and after sharding.

    Checkpoints number the parameter groups. A model of `from_pretrained` is sharded already, and
    stock would create a group for each device mesh. All other models are sharded later.
    """
    with one_group_for_all_meshes():
        return original(self, *args, **kwargs)


def step(
    original: Callable[..., Any],
    self: AcceleratedOptimizer,
    closure: Callable[..., Any] | None = None,
) -> Any:
    """Wrap `AcceleratedOptimizer.step`: update routers' biases, and explain refused DTensors.

    Raises:
        ValueError: the optimizer does not support DTensors.
    """
    try:
        result = original(self, closure)
    except RuntimeError as error:
        if not is_refused_by_dtensor(error) or not _trains_dtensors(self.optimizer):
            raise
        raise _make_dtensor_error(self.optimizer, error) from error
    # Before the last micro-batch of a step, gradients and token counts are still accumulated.
    if self.gradient_state.sync_gradients:
        for state in getattr(self, _STATES_TO_UPDATE, ()):
            update_biases(state, skipped=self.step_was_skipped)
    return result


def wrap_steps(accelerator: Accelerator, row: Wrap) -> None:
    """Bind `row`, the wrapper of `step`, to all optimizers that `accelerator` has prepared so far.

    Each optimizer stores the states of the models with `bias_update_rate` that it trains.

    Raises:
        ValueError: torch.optim.Muon trains a patched model.
    """
    for optimizer in list_prepared_optimizers(accelerator):
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        biased_states = []
        for model in list_prepared_models(accelerator):
            state = find_state(model)
            if state is None or trained.isdisjoint(map(id, model.parameters())):
                continue
            refuse_torch_muon(optimizer)
            if state.config.bias_update_rate is not None:
                biased_states.append(state)
        setattr(optimizer, _STATES_TO_UPDATE, biased_states)
        if row.name not in vars(optimizer):
            setattr(optimizer, row.name, bind_wrapper(optimizer, row))


def clip_grad_norm(
    original: Callable[..., Any],
    self: Accelerator,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Wrap `Accelerator.clip_grad_norm_`: clip gradients on two meshes, and over pipeline stages.

    Accelerate's own function is called if it accepts gradients on several meshes (since 1.15) and
    the model has no pipeline stages.

    Raises:
        ValueError: one of several models has pp_size > 1.
    """
    if isinstance(parameters, Tensor):
        return original(self, parameters, max_norm, norm_type)
    states = [(model, find_state(model)) for model in list_prepared_models(self)]
    sharded = [m for m, state in states if state is not None and state.meshes is not None]
    for model in sharded:
        reshard(model)
    # This list is made after the units were resharded: a generator `model.parameters()` that the
    # caller passes must yield the sharded parameters.
    parameters = list(parameters)
    parameter_ids = {id(parameter) for parameter in parameters}
    clipped = [m for m in sharded if not parameter_ids.isdisjoint(map(id, m.parameters()))]
    if not parameters:
        # A stage on which nothing is trained takes part in the norm of all stages.
        clipped = [m for m in sharded if Scope.of(m).stages is not None]
    scopes = []
    for model in clipped:
        check_backward_has_ended(model)
        scopes.append(Scope.of(model))
    has_stages = any(scope.stages is not None for scope in scopes)
    if not scopes or (clips_over_meshes(self) and not has_stages):
        # torch also takes "inf" as a string, but Accelerate's norm over several meshes does not.
        return original(self, parameters, max_norm, float(norm_type))
    if has_stages and len(scopes) > 1:
        raise ValueError(
            f"gradients of {len(scopes)} models cannot be clipped together if one of them has "
            f"pp_size > 1; clip each model with hf_moe_ep.clip_grad_norm_(model, max_norm)"
        )
    self.unscale_gradients()
    # The meshes of a single model are passed, because their process group over all axes of the
    # experts' mesh saves all-reduces.
    scope = scopes[0] if len(scopes) == 1 else Scope()
    return clip_gradients_of(parameters, max_norm, norm_type, scope)


def clip_grad_norm_of_trainer(
    original: Callable[..., Any], self: transformers.Trainer, model: Any
) -> Any:
    """Wrap `Trainer._clip_grad_norm`: clip by the norm of all stages, and unscale fp16 before.

    `_needs_clip_of_accelerator` says when the Trainer's own function would be wrong.
    """
    if not _needs_clip_of_accelerator(self):
        return original(self, model)
    return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)


def get_grad_norm(
    original: Callable[..., Any], self: transformers.Trainer, model: Any, grad_norm: Any = None
) -> Any:
    """Wrap `Trainer._get_grad_norm`: log the norm of all stages, and unscale fp16 before.

    If ms-swift runs, a step whose norm is NaN changes no parameter, as in stock. ms-swift's own
    check is in a function that the Trainer (since 5.19) does not call for gradients on two meshes.

    `_needs_clip_of_accelerator` says when the Trainer's own function would be wrong.
    """
    if grad_norm is None and _needs_clip_of_accelerator(self):
        grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    grad_norm = original(self, model, grad_norm)
    # The Trainer calls this function before each step, also after it has clipped.
    if drops_nan_gradients() and isinstance(grad_norm, Tensor) and grad_norm.isnan().item():
        for parameter in model.parameters():
            parameter.grad = None
    return grad_norm


def _needs_clip_of_accelerator(trainer: transformers.Trainer) -> bool:
    """Return True if the Trainer's own norm of the gradients would be wrong.

    With pipeline stages, the Trainer computes the norm of only one stage. With fp16, transformers
    computes the norm of gradients on several meshes (since 5.24) before they are unscaled.
    """
    state = find_state(trainer.model)
    if state is None:
        return False
    scales = state.meshes is not None and trainer.accelerator.scaler is not None
    return state.stage is not None or scales


def _make_dtensor_error(optimizer: Optimizer, error: RuntimeError) -> ValueError:
    """Make an error that names an optimizer in whose step DTensor has raised `error`."""
    kind, first_line = type(optimizer), str(error).partition("\n")[0]
    return ValueError(
        f"{kind.__module__}.{kind.__qualname__} cannot train a sharded model: its state or "
        f"its operators do not support FSDP2's DTensors ({first_line}). "
        f"Use one of these optimizers of torch.optim: {', '.join(SUPPORTED_OPTIMIZERS)}"
    )


def _trains_dtensors(optimizer: Optimizer) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return any(isinstance(parameter, DTensor) for parameter in parameters)
