"""Steps of optimizers: which cannot take a sharded model's parameters, and what moves with a step.

FSDP2's parameters are DTensors. An optimizer that makes its state with `torch.zeros(shape)` has
plain tensors beside them, another computes in place what no shard can hold; torch names the
operation alone, at the first step.

Accelerate before 1.15 clips with torch's function, which refuses gradients on two meshes;
`clip_grad_norm` takes its place there.

With `bias_update_rate` the routers' biases of a model move after each step of an optimizer that
Accelerate prepared for it (`routing/bias.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_moe_ep.routing.bias import update_biases
from hf_moe_ep.sharding.clip import clip_gradients_of
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.sharded_models import is_refused_by_dtensor
from hf_moe_ep.upstream.training_frameworks import (
    clips_over_meshes,
    prepared_models,
    prepared_optimizers,
)
from hf_moe_ep.upstream.wrap import Wrap, bind_wrapper

_FOLLOWED = "_hf_moe_ep_followed"

# Of torch.optim: run on sharded models beside one process
# (tests/integrations/test_sharded_optimizers.py).
WORKING = (
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


def step(
    original: Callable[..., Any],
    self: AcceleratedOptimizer,
    closure: Callable[..., Any] | None = None,
) -> Any:
    """`AcceleratedOptimizer.step`, with an error that names the optimizer; then the biases.

    Raises:
        ValueError: its state or its arithmetic does not take DTensors.
    """
    try:
        result = original(self, closure)
    except RuntimeError as error:
        raise _named(self.optimizer, error) from error
    # Else gradients accumulate, and so do counts.
    if self.gradient_state.sync_gradients:
        for state in getattr(self, _FOLLOWED, ()):
            update_biases(state, skipped=self.step_was_skipped)
    return result


def follow_steps(accelerator: Accelerator, row: Wrap) -> None:
    """Bind `row`, the wrapper of `step`, to all optimizers that `accelerator` has prepared by now.

    Each optimizer learns which models with routers' biases it trains.
    """
    for optimizer in prepared_optimizers(accelerator):
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        followed = []
        for model in prepared_models(accelerator):
            state = find_state(model)
            if state is None or state.config.bias_update_rate is None:
                continue
            if any(id(parameter) in trained for parameter in model.parameters()):
                followed.append(state)
        setattr(optimizer, _FOLLOWED, followed)
        if row.name not in vars(optimizer):
            setattr(optimizer, row.name, bind_wrapper(optimizer, row))


def clip_grad_norm(
    original: Callable[..., Any],
    self: Accelerator,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """`Accelerator.clip_grad_norm_`, by our own clip for parameters of a sharded patched model.

    Only where Accelerate's own clip cannot take gradients on several meshes.
    """
    if clips_over_meshes(self) or isinstance(parameters, Tensor):
        return original(self, parameters, max_norm, norm_type)
    parameters = list(parameters)
    given = {id(parameter) for parameter in parameters}
    all_meshes = []
    for model in prepared_models(self):
        state = find_state(model)
        if state is None or state.meshes is None:
            continue
        if any(id(parameter) in given for parameter in model.parameters()):
            all_meshes.append(state.meshes)
    if not all_meshes:
        return original(self, parameters, max_norm, norm_type)
    self.unscale_gradients()
    # The one group over both axes of experts is known where one model alone is clipped.
    meshes = all_meshes[0] if len(all_meshes) == 1 else None
    return clip_gradients_of(parameters, max_norm, norm_type, meshes)


def _named(optimizer: Optimizer, error: RuntimeError) -> Exception:
    """Return what to raise for `error` of a step: itself, where DTensors have no part in it."""
    if not is_refused_by_dtensor(error) or not _holds_dtensors(optimizer):
        return error
    kind, said = type(optimizer), str(error).partition("\n")[0]
    return ValueError(
        f"{kind.__module__}.{kind.__qualname__} cannot train a sharded model: its state or "
        f"its arithmetic does not take FSDP2's DTensors ({said}). "
        f"Of torch.optim these can: {', '.join(WORKING)}"
    )


def _holds_dtensors(optimizer: Optimizer) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return any(isinstance(parameter, DTensor) for parameter in parameters)
