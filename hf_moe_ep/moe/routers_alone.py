"""A second run of every router, for a loss from which the routers alone learn.

    hidden states --+-----------> router -> logits, weights, choice      the model's own run
                    +- detached -> router -> logits                      the logits of the loss

Both runs have the same values. The gradient of the second logits ends at the router's own
parameters. With the first logits, the layers before a router would learn to even out its load as
well, and the model pays for that: `benchmarks/results/balance-cpu.md` has the held-out loss of a
model that was trained either way.

The second run costs one product, [T, H] by [H, E]. It runs in a hook behind the router's own
forward: there the router's parameters are gathered, and a checkpointed layer that is recomputed
runs the router twice again. Modes that replace the router's choice (`chosen_topk.py`) do not see
the second run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.plan import matches
from hf_moe_ep.state import Ours
from hf_moe_ep.upstream.autograd_modes import hidden_from_function_modes
from hf_moe_ep.upstream.module_names import stock_name


class RoutersAlone(Ours):
    """Forward hook of every router; it records the second logits between `begin` and `end`."""

    def __init__(self) -> None:
        # By the id of a tensor that a router has returned: that tensor and its second twin.
        self._recorded: dict[int, tuple[Tensor, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the logits of an interrupted forward: a copy of the model runs no forward."""
        return {"_recorded": None}

    def begin(self) -> None:
        """Record the logits of the forward that begins."""
        self._recorded = {}

    def end(self) -> None:
        """Drop the recorded logits; a recompute in backward records none."""
        self._recorded = None

    @property
    def is_recording(self) -> bool:
        return self._recorded is not None

    @torch.compiler.disable
    def __call__(
        self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # The router runs twice even if nothing is recorded: both runs of a checkpointed layer must
        # do the same.
        if not (router.training and torch.is_grad_enabled()):
            return
        inputs = [_detached(value) for value in args]
        named = {name: _detached(value) for name, value in kwargs.items()}
        before = [value._version for value in inputs if isinstance(value, Tensor)]
        with hidden_from_function_modes():
            second = router.forward(*inputs, **named)
        if before != [value._version for value in inputs if isinstance(value, Tensor)]:
            raise ValueError(
                f"aux_loss_per_layer=True: {type(router).__name__} changes its input in place (it "
                f"adds noise), so it cannot run twice; set the router's noise to 0 in the model's "
                f"config, or leave aux_loss_per_layer out"
            )
        if self._recorded is None:
            return
        for own, other in zip(_tensors(output), _tensors(second), strict=True):
            if own.is_floating_point():
                self._recorded[id(own)] = own, other

    def second_logits(self, logits: Tensor) -> Tensor:
        """Return the second run's twin of logits that a router has returned.

        Logits without a gradient need no twin and are returned as they are.

        Raises:
            ValueError: no router returned these logits.
        """
        own, other = (self._recorded or {}).get(id(logits), (None, None))
        if own is logits and other is not None:
            return other
        if not logits.requires_grad:
            return logits
        raise ValueError(
            "aux_loss_per_layer=True: the model computes its load-balancing loss from logits that "
            "none of its routers returned, so the loss cannot train the routers alone; leave "
            "aux_loss_per_layer out"
        )


def find_routers(parts: Parts) -> list[nn.Module]:
    """Return the routers of a model; an empty list if its router is no module of its own."""
    pattern = parts.plan.router
    named = parts.root.named_modules()
    return [module for name, module in named if pattern and matches(pattern, stock_name(name))]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [v for v in output if torch.is_tensor(v)]
