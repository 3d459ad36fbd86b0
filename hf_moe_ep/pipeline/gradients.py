"""Keep the gradients that a schedule has computed until `loss.backward()` adds them.

A training forward of a pipeline also runs all backwards, with a gradient of 1 for the loss. The
returned loss is connected to the computed gradients by an autograd node:

    loss = model(**batch).loss       runs forward and backward; `.grad` of every parameter is as
                                     before the call
    (loss * 0.5).backward()          adds 0.5 times the gradients to `.grad`

No gradient was computed for the other outputs. They are connected as well, and their node raises an
error, for example if a caller adds `outputs.aux_loss` to the loss. The same holds for every output
of a forward that runs no backward, for example in evaluation mode. Every rank has all outputs and
runs backward through them, so every rank raises the error.

FSDP2 and the experts have summed the gradients over all batches before `backward()` knows the
factor, so the factor must be the same for all batches, and for the stages of one batch. All ranks
compare their factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.ranks.collectives import max_over_ranks
from hf_moe_ep.ranks.mesh import Stages
from hf_moe_ep.ranks.timeouts import explain_timeout

# The outputs of models, and of TRL's fused head, that have gradients without stages.
_DIFFERENTIABLE = ("loss", "aux_loss", "logits", "log_probs", "entropy")
# The largest relative difference of gradients and factors that counts as rounding.
ROUNDING = 1e-4


class StepGradients:
    """The gradients of one forward."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], stages: Stages, device: torch.device
    ) -> None:
        """Set aside the gradients that the parameters have before the forward.

        Args:
            device: where the ranks exchange numbers.
        """
        self._stages, self._device = stages, device
        self._before = [(p, p.grad) for p in parameters if p.requires_grad]
        self._new: list[tuple[nn.Parameter, Tensor]] | None = None
        for parameter, _ in self._before:
            parameter.grad = None

    def take(self) -> None:
        """Move the gradients that the forward has computed from the parameters to this object."""
        self._new = [(p, p.grad) for p, _ in self._before if p.grad is not None]
        self.restore()

    def restore(self) -> None:
        """Give the parameters the gradients back that they had before the forward."""
        for parameter, grad in self._before:
            parameter.grad = grad
        self._before = []

    @torch.no_grad()
    def add(self, scale: Tensor) -> None:
        """Multiply the gradients by `scale`, and add them to the gradients of the parameters.

        Raises:
            RuntimeError: the gradients were added already.
            ValueError: the scales of the ranks differ.
        """
        if self._new is None:
            raise RuntimeError(
                "backward() ran a second time through one forward of a model with pp_size > 1, "
                "whose gradients were added by the first backward(); call the model again"
            )
        _check_same_scale(scale, self._stages, self._device)
        for parameter, grad in self._new:
            _multiply(get_local_tensor(grad), scale)
            if parameter.grad is None:
                parameter.grad = grad
            else:
                get_local_tensor(parameter.grad).add_(get_local_tensor(grad))
        self._new = None

    def connect(
        self, outputs: dict[str, Tensor], scale_of: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Return outputs whose backward calls `add`.

        Args:
            scale_of: called with the gradient of each output or None, in order; returns the scale.
        """
        return _call_in_backward(outputs, lambda *grads: self.add(scale_of(*grads)))


def connect_loss(
    outputs: dict[str, Tensor], gradients: StepGradients, num_stages: int, coefficient: str | None
) -> dict[str, Tensor]:
    """Return the outputs of a forward in training. Only "loss" may get a gradient in backward.

    Args:
        coefficient: the attribute of the model with the coefficient of the aux loss, for the error.
    """
    return gradients.connect(outputs, partial(_find_scale, [*outputs], num_stages, coefficient))


def _find_scale(
    names: list[str], num_stages: int, coefficient: str | None, *grads: Tensor | None
) -> Tensor:
    by_name = dict(zip(names, grads, strict=True))
    loss_grad = by_name.pop("loss")
    for name, grad in by_name.items():
        # A term that is multiplied by 0 may be left out.
        if grad is not None and grad.ne(0).any():
            instead = (
                f"outputs.loss already contains the aux loss times model.{coefficient}: set this "
                f"coefficient, pass output_router_logits=True, and add nothing to outputs.loss"
                if name == "aux_loss"
                else "give the Trainer a compute_loss_func, or use outputs.loss alone"
            )
            raise ValueError(
                f"outputs.{name} got a gradient in backward(), but with pp_size={num_stages} the "
                f"forward has already computed all gradients, for outputs.loss alone, and the "
                f"other terms of this loss would be left out; {instead}, or leave pp_size at 1"
            )
    return torch.zeros(()) if loss_grad is None else loss_grad


def refuse_backward(output: Any, num_stages: int) -> Any:
    """Return the output of a forward that computes no gradients; its backward raises ValueError."""

    def refuse(*grads: Tensor | None) -> None:
        raise ValueError(
            f"backward() ran through a forward that has computed no gradients: with "
            f"pp_size={num_stages} only a forward in training mode with labels computes them. Call "
            f"model.train() and pass labels, detach these outputs, or leave pp_size at 1"
        )

    tensors = {n: x for n in _DIFFERENTIABLE if isinstance(x := output.get(n), Tensor)}
    return replace(output, **_call_in_backward(tensors, refuse))


def _call_in_backward(
    outputs: dict[str, Tensor], backward: Callable[..., None]
) -> dict[str, Tensor]:
    """Return outputs whose backward calls `backward` with the gradient of each, or None."""
    anchor = torch.zeros((), requires_grad=True)
    connected = _CallInBackward.apply(anchor, backward, *outputs.values())
    return dict(zip(outputs, connected, strict=True))


def _check_same_scale(scale: Tensor, stages: Stages, device: torch.device) -> None:
    """Raise ValueError on all ranks if their scales differ by more than rounding."""
    own = scale.detach().to(device, torch.float64)
    extremes = torch.stack([own, -own])
    # After both reductions every rank has the extremes of all ranks.
    for group in (stages.column.get_group(), stages.group):
        if dist.get_world_size(group) == 1:
            continue
        with explain_timeout(
            "loss.backward() of a model with pp_size > 1",
            group,
            ": ranks could not compare the factors of their losses",
            goal="backward",
        ):
            extremes = max_over_ranks(extremes, group)
    largest, negated = extremes.tolist()
    smallest = -negated
    if largest - smallest > ROUNDING * max(abs(largest), abs(smallest)):
        raise ValueError(
            f"outputs.loss is multiplied by different factors on the ranks ({float(own):g} on "
            f"this rank, {smallest:g} .. {largest:g} on all ranks), but with pp_size > 1 the "
            f"forward has already summed the gradients of all batches; pass the number of tokens "
            f"of all batches as num_items_in_batch instead of weighing losses by rank, or leave "
            f"pp_size at 1"
        )


def _multiply(grad: Tensor, scale: Tensor) -> None:
    """Multiply in place, at least in fp32: in bf16 a scale of 1/3 would be off by 0.2 %."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    scale = scale.to(grad.device, wide)
    if grad.dtype == wide:
        grad.mul_(scale)
    else:
        grad.copy_(grad.to(wide) * scale)


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, backward: Callable[..., None], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.backward_of_outputs = backward
        ctx.set_materialize_grads(False)
        # The outputs are not copied: logits may be large, and nothing else reads these tensors.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.backward_of_outputs(*grads)
        return None, None, *(None for _ in grads)
