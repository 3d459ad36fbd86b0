"""Run every router a second time, for a loss that trains only the routers.

    hidden states --+-----------> router -> logits, weights, choice      the model's own run
                    +- detached -> router -> logits                      the logits of the loss

Both runs compute the same logits. The gradient of the second logits ends at the router's own
parameters. A loss of the first logits, like stock's aux loss, would also train the layers in front
of a router to even out the router's load. In `benchmarks/results/balance-cpu.md`, stock's aux loss
raises the held-out loss of a small model with each of three seeds; this loss raises the held-out
loss with one seed.

The second run costs one product, [T, H] by [H, E]. It runs in a forward hook of the router, where
the router's parameters are still gathered; a recompute of a checkpointed layer also runs the router
twice. Modes that replace the router's choice (`chosen_topk.py`) do not see the second run.

PEFT trains a copy of a router that is in modules_to_save. If PEFT makes this copy after `patch`,
the copy has the same hook object as the original router.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.plan import matches
from hf_moe_ep.state import PackageHook
from hf_moe_ep.upstream.adapters import returns_output_of_child
from hf_moe_ep.upstream.autograd_modes import hidden_from_function_modes
from hf_moe_ep.upstream.module_names import get_stock_name, remove_names_of_copies


class SecondRouterRuns(PackageHook):
    """Forward hook of every router: records the second logits between `begin` and `end`."""

    def __init__(self, model: nn.Module) -> None:
        # The causal LM whose forward calls `begin` and `end`.
        self._model = model
        # {id(first_output): (first_output, second_output)}, the outputs of a router's two runs.
        self._recorded: dict[int, tuple[Tensor, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out recorded logits: in a copy of the model no forward is running."""
        return vars(self) | {"_recorded": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> SecondRouterRuns:
        """Return this hook if only a router is copied, and a new hook if the model is copied."""
        if id(self._model) not in memo:
            return self
        copy = SecondRouterRuns(memo[id(self._model)])
        memo[id(self)] = copy
        return copy

    def begin(self) -> None:
        """Start to record logits, for the forward that begins."""
        self._recorded = {}

    def end(self) -> None:
        """Drop the recorded logits, and stop recording: a recompute in backward records nothing."""
        self._recorded = None

    @property
    def is_recording(self) -> bool:
        return self._recorded is not None

    @torch.compiler.disable
    def __call__(
        self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        # The router runs twice even if no logits are recorded, because the recompute of a
        # checkpointed layer must run the same operators as its first run.
        if not (router.training and torch.is_grad_enabled()):
            return
        inputs = [_detach(value) for value in args]
        named = {name: _detach(value) for name, value in kwargs.items()}
        versions = [value._version for value in inputs if isinstance(value, Tensor)]
        with hidden_from_function_modes():
            second = router.forward(*inputs, **named)
        if versions != [value._version for value in inputs if isinstance(value, Tensor)]:
            raise ValueError(
                f"aux_loss_per_layer=True: {type(router).__name__} changes its input in place (it "
                f"adds noise), so it cannot run twice; set the router's noise to 0 in the model's "
                f"config, or leave aux_loss_per_layer out"
            )
        if self._recorded is None:
            return
        for first_output, second_output in zip(
            _list_tensors(output), _list_tensors(second), strict=True
        ):
            if first_output.is_floating_point():
                self._recorded[id(first_output)] = first_output, second_output

    def find_second_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of a router's second run for the `logits` of its first run.

        Logits that require no gradient are returned unchanged.

        Raises:
            ValueError: no router returned these logits.
        """
        first, second = (self._recorded or {}).get(id(logits), (None, None))
        if first is logits and second is not None:
            return second
        if not logits.requires_grad:
            return logits
        raise ValueError(
            "aux_loss_per_layer=True: the model computes its load-balancing loss from logits that "
            "none of its routers returned, so the loss cannot train the routers alone; leave "
            "aux_loss_per_layer out"
        )


def find_routers(parts: Parts) -> list[nn.Module]:
    """Return the routers of a model, or an empty list if they are not separate modules.

    Copies of routers that PEFT trains are included. A PEFT wrapper that returns the output of the
    router inside it is left out: the second run of the wrapper would be a first run of the router.
    """
    pattern = parts.plan.router
    return [
        module
        for name, module in parts.root.named_modules()
        if pattern and matches(pattern, remove_names_of_copies(get_stock_name(name)))
        if not returns_output_of_child(module)
    ]


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _list_tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [v for v in output if torch.is_tensor(v)]
