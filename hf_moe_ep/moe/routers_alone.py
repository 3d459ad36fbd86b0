"""The logits of every router once more, for a loss that the routers alone learn from.

    hidden states --+-----------> router -> logits, weights, choice      what the model goes on with
                    +- detached -> router -> logits                      what the loss is of

Values are the same; the gradient of the second logits ends at the router's own parameters. With
the first ones, whatever feeds a router learns to even out its load, and the model pays for that:
`benchmarks/results/balance-cpu.md` has the held-out loss of a model that was trained either way.

The second run is one product, [T, H] by [H, E]. It stands behind the first one, within the
module's own forward: there its parameters are gathered, and a layer that checkpointing computes
once more does the same once more. Who tells a router what to choose does not see it.
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
    """Forward hook of every router; between `begin` and `end` it keeps what `of` hands out."""

    def __init__(self) -> None:
        # By the address of an output of the model's own run: that one, and the second run's.
        self.again: dict[int, tuple[Tensor, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what an interrupted forward kept: a copy has no part in that forward."""
        return {"again": None}

    def begin(self) -> None:
        """Keep the logits of the forward that begins, and of no other."""
        self.again = {}

    def end(self) -> None:
        """Let go of them; a run in backward keeps nothing."""
        self.again = None

    @torch.compiler.disable
    def __call__(
        self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # Also where nothing is kept: a checkpointed layer must do the same twice.
        if not (router.training and torch.is_grad_enabled()):
            return
        inputs = [detached(value) for value in args]
        named = {name: detached(value) for name, value in kwargs.items()}
        before = [value._version for value in inputs if isinstance(value, Tensor)]
        with hidden_from_function_modes():
            second = router.forward(*inputs, **named)
        if before != [value._version for value in inputs if isinstance(value, Tensor)]:
            raise ValueError(
                f"aux_loss_per_layer=True: {type(router).__name__} changes its input in place (the "
                f"noise of routers of its kind), so it cannot run twice; set that noise to 0 in "
                f"the model's config, or leave aux_loss_per_layer out"
            )
        if self.again is None:
            return
        for own, other in zip(_tensors(output), _tensors(second), strict=True):
            if own.is_floating_point():
                self.again[id(own)] = own, other

    def of(self, logits: Tensor) -> Tensor:
        """Return the second run's twin of what a router handed out; it may have no gradient.

        Raises:
            ValueError: no router handed them out.
        """
        own, other = (self.again or {}).get(id(logits), (None, None))
        if own is logits and other is not None:
            return other
        if not logits.requires_grad:
            return logits
        raise ValueError(
            "aux_loss_per_layer=True: the model's load-balancing loss is of logits that none of "
            "its routers returned, so it cannot be told to the routers alone; leave it out"
        )


def find_routers(parts: Parts) -> list[nn.Module]:
    """Return the routers of a model; empty where choosing is no module of its own."""
    pattern = parts.plan.router
    named = parts.root.named_modules()
    return [module for name, module in named if pattern and matches(pattern, stock_name(name))]


def detached(value: Any) -> Any:
    """Cut a tensor off from autograd; anything else is as it is."""
    return value.detach() if isinstance(value, Tensor) else value


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [v for v in output if torch.is_tensor(v)]
