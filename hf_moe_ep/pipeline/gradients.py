"""Keep the gradients that a schedule has computed until `loss.backward()` adds them.

A training forward of a pipeline also runs all backwards, with a gradient of 1 for the loss. The
returned loss is connected to the computed gradients by an autograd node:

    loss = model(**batch).loss       runs forward and backward; `.grad` of every parameter is as
                                     before the call
    (loss * 0.5).backward()          adds 0.5 times the gradients to `.grad`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_moe_ep.ranks.boxes import local_tensor


class StepGradients:
    """The gradients of one forward."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set aside the gradients that the parameters have before the forward."""
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
        """
        if self._new is None:
            raise RuntimeError(
                "backward() ran a second time through one forward of a model with pp_size > 1, "
                "whose gradients were added by the first backward(); call the model again"
            )
        for parameter, grad in self._new:
            _multiply(local_tensor(grad), scale)
            if parameter.grad is None:
                parameter.grad = grad
            else:
                local_tensor(parameter.grad).add_(local_tensor(grad))
        self._new = None

    def connect(self, loss: Tensor) -> Tensor:
        """Return a loss whose backward calls `add`."""
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        (connected,) = _AddGradients.apply(anchor, self, lambda grad: grad, loss)
        return connected

    def connect_all(
        self, outputs: dict[str, Tensor], scale_of: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Return outputs whose backward calls `add`.

        Args:
            scale_of: called with the gradient of each output or None, in order; returns the scale.
        """
        anchor = torch.zeros((), requires_grad=True)
        connected = _AddGradients.apply(anchor, self, scale_of, *outputs.values())
        return dict(zip(outputs, connected, strict=True))


def _multiply(grad: Tensor, scale: Tensor) -> None:
    """Multiply in place, at least in fp32: in bf16 a scale of 1/3 would be off by 0.2 %."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    scale = scale.to(grad.device, wide)
    if grad.dtype == wide:
        grad.mul_(scale)
    else:
        grad.copy_(grad.to(wide) * scale)


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        gradients: StepGradients,
        scale_of: Callable[..., Tensor],
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.scale_of = gradients, scale_of
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.gradients.add(ctx.scale_of(*grads))
        return None, None, None, *(None for _ in grads)
