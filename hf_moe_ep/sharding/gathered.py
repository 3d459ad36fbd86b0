"""Reshard FSDP2 units that a forward or an error has left gathered.

FSDP2 keeps some units gathered after a forward, because the backward that usually follows needs
them: the last layer, the head and the root, and with `reshard_after_forward=False` all units. If an
error ends a forward or a backward, other units stay gathered as well. The modules of a gathered
unit hold unsharded parameters, which have no gradients and which no optimizer trains:

    skipped backward     loss.backward(); model(**bad); clip_grad_norm_(model, 1.0)
                         the norm would lack the gradients of the gathered units
    requires_grad_       model(**batch); model.requires_grad_(False)
                         FSDP2 reads requires_grad of the shards only
    optimizer step       changes the shards; gathered weights would be old in the next forward

`GatheredUnits` reshards all units of a model

- before each forward, and after a forward without gradients, but not between the tokens of a call
  of `generate`, during which no shard changes;
- after a forward that raised an error;
- when modules or parameters are listed for the first time after a forward, outside of forward and
  backward. `parameters()`, `zero_grad`, `requires_grad_` and PEFT's functions list modules, and so
  do optimizers and clipping through `parameters()`. The list may begin at the model, at a module
  around it or at a unit, but not inside a unit.

If a backward follows, FSDP2 gathers these units again. After an error in a backward, the gradients
are incomplete: some layers have reduced them, and others have not. The next forward and clipping
raise an error until the gradients are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationMixin

from hf_moe_ep.sharding.units import reshard, units_in
from hf_moe_ep.upstream.autograd_modes import backward_is_running
from hf_moe_ep.upstream.sharded_models import (
    backward_has_begun,
    end_failed_backward,
    end_failed_forward,
    forward_has_begun,
    reshard_unit,
)


def check_backward_has_ended(model: Any) -> None:
    """Raise ValueError if the last backward raised an error and its gradients still exist.

    The model must run neither a forward nor a backward.
    """
    if not any(map(backward_has_begun, units_in(model))):
        return
    reshard(model)
    with_grads = [name for name, p in model.named_parameters() if p.grad is not None]
    if with_grads:
        raise ValueError(
            f"the last backward raised an error, so the gradients of {len(with_grads)} parameters "
            f"({with_grads[0]}, ...) are incomplete; delete them with optimizer.zero_grad() and "
            f"model.zero_grad() (set_to_none=True, the default) and skip this step, or load a "
            f"checkpoint"
        )


class GatheredUnits:
    """The hooks of a sharded model that reshard its units; the module docstring says when.

    Attributes:
        root: the root unit.
        may_be_gathered: True from the end of a forward until all units are resharded.
        generates: True during a call of `generate`.
    """

    def __init__(self, root: nn.Module) -> None:
        assert isinstance(root, FSDPModule)
        self.root: Any = root
        self.may_be_gathered = False
        self.generates = False
        self._units = units_in(root)

    def attach(self) -> None:
        """Register the hooks on the root, and replace `named_modules` and `generate`."""
        # This hook must run before FSDP2's own hook, which gathers the root.
        self.root.register_forward_pre_hook(self._begin_forward, prepend=True)
        self.root.register_forward_hook(self._end_forward, always_call=True)
        for unit in self._units:
            # All lists of modules and parameters pass through the `named_modules` of the units.
            setattr(unit, "named_modules", partial(self._list_modules, unit))  # noqa: B010  mypy
        for module in self.root.modules():
            if isinstance(module, GenerationMixin):
                setattr(module, "generate", partial(self._generate, module))  # noqa: B010

    @torch.compiler.disable  # FSDP2 disables the compiler for its own hooks too.
    def _begin_forward(self, *_: Any) -> None:
        if backward_is_running():  # this forward is a recompute of the whole model
            return
        if backward_has_begun(self.root):
            check_backward_has_ended(self.root)
            end_failed_backward(self.root)
        elif forward_has_begun(self.root):  # an error or Ctrl-C has ended it
            end_failed_forward(self.root)
        elif self.generates:
            return
        self._reshard()

    @torch.compiler.disable
    def _end_forward(self, *_: Any) -> None:
        if backward_is_running():
            return
        # FSDP2's own hook has run before, unless the forward has raised an error.
        if forward_has_begun(self.root):
            end_failed_forward(self.root)
        if not torch.is_grad_enabled() and not self.generates:
            self._reshard()
        else:
            self.may_be_gathered = True

    def _reshard(self) -> None:
        self.may_be_gathered = False
        for unit in self._units:
            reshard_unit(unit)

    def _generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._reshard()
        self.generates = True
        try:
            return type(model).generate(model, *args, **kwargs)
        finally:
            self.generates = False
            self._reshard()

    def _list_modules(
        self, unit: Any, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return `unit.named_modules(...)`, and reshard all units first if nothing runs."""
        if not torch.compiler.is_compiling() and not backward_is_running():
            runs = self.generates or forward_has_begun(self.root)
            is_left = self.may_be_gathered and not runs
            if is_left or backward_has_begun(self.root):  # an error has ended the backward
                self._reshard()
        listed: Iterator[tuple[str, nn.Module]] = type(unit).named_modules(unit, *args, **kwargs)
        return listed
