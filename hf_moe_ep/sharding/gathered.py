"""Reshard FSDP2 units that a forward or an error has left gathered; let ranks generate together.

Some units stay gathered after a forward, because the backward that usually follows needs them:
FSDP2's root, at our request the last layer and the head, and with `reshard_after_forward=False` all
units. If an error ends a forward or a backward, other units stay gathered as well. The modules of a
gathered unit hold unsharded parameters, which have no gradients and which no optimizer trains:

    no backward          loss.backward(); model(**bad); clip_grad_norm_(model, 1.0)
                         the norm would lack the gradients of the gathered units
    requires_grad_       model(**batch); model.requires_grad_(False)
                         FSDP2 reads requires_grad of the shards only
    optimizer step       the shards change; the next forward would use the old, gathered weights

`ReshardHooks` reshards all units of a model

- before each forward, and after a forward without gradients, but not between the tokens of a call
  of `generate`, during which no shard changes;
- after a forward that raised an error.

Between a forward with gradients and its backward, a single rank may list modules or parameters
(`model.device`, a count of parameters), so nothing may be resharded: in backward this rank would
all-gather alone, and wait for ranks whose units are still gathered. If modules or parameters are
listed during this time, `ReshardHooks` only shows the shards: the modules hold the sharded
parameters, while the gathered parameters stay in memory. When the gradient of an output arrives, or
a unit runs again, the modules get the gathered parameters back. `parameters()`, `zero_grad`,
`requires_grad_` and PEFT's functions list modules, and so do optimizers and clipping through
`parameters()`. The list may begin at the model, at a module around it or at a unit. A list that
begins inside a unit is not noticed, and has the gathered parameters. With pipeline stages, forward
and backward are one call, and nothing has to be shown.

A caller may pass the batch to the decoder and bypass the hooks of the root, as TRL's distillation
trainers do with adapters. Units are then resharded before the decoder runs, and the checks of the
root's forward run as well. Such a forward leaves units gathered until the next one begins.

After an error in a backward, the gradients are incomplete: some layers have reduced them, and
others have not. The next forward and clipping raise an error until the gradients are deleted.

Ranks may need different numbers of forwards in a call of `generate`, for example because one rank
meets the end of its text early. But all ranks must run a forward together, because weights are
gathered from all of them. Before each forward an all-reduce therefore counts the ranks that still
generate, and a rank whose `generate` has ended runs a forward of one token per row with the others,
until the count is 0. transformers' own `synced_gpus` would instead continue to generate on such a
rank, which adds tokens to a cache of the caller, and it does not count the forwards of guidance or
those of a prefill in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.moe.forwards import KeepForwards
from hf_moe_ep.moe.layer import ForwardGuard
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sharding.checks import RefuseAdded, RefuseUnfrozen
from hf_moe_ep.sharding.units import list_units_in, reshard
from hf_moe_ep.state import STATE, MoELayer, find_state
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.autograd_modes import backward_is_running
from hf_moe_ep.upstream.code import accepts_keyword, is_checkpointed_layer
from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.models import (
    bind_forward,
    find_base_model_prefix,
    find_tokens,
    list_models_that_generate,
)
from hf_moe_ep.upstream.modules import list_forward_hooks
from hf_moe_ep.upstream.replaced import replaced
from hf_moe_ep.upstream.sharded_models import (
    backward_has_begun,
    begin_with_root,
    end_failed_backward,
    end_failed_forward,
    forward_has_begun,
    forward_of_root_has_begun,
    install_gathered,
    install_shards,
    reshard_unit,
)


def check_backward_has_ended(model: Any) -> None:
    """Raise ValueError if the last backward raised an error and its gradients still exist.

    The model must run neither a forward nor a backward.
    """
    if not any(map(backward_has_begun, list_units_in(model))):
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


def check_assistant_unsharded(assistant: Any) -> None:
    """Raise ValueError if the `assistant_model` of `generate` is sharded over several ranks.

    Ranks draft and verify unequal numbers of tokens, so one rank could run a forward of the
    assistant while another runs a forward of the model.
    """
    state = find_state(assistant) if isinstance(assistant, nn.Module) else None
    if state is not None and state.meshes is not None and state.meshes.world_size > 1:
        raise ValueError(
            f"generate(assistant_model=...) got an assistant that is sharded over "
            f"{state.meshes.world_size} ranks, which run different numbers of its forwards; load "
            f"the assistant with transformers' from_pretrained, and do not shard it"
        )


class ReshardHooks:
    """The hooks of a sharded model that reshard its units; the module docstring says when.

    Attributes:
        root: the root unit.
        may_show_shards: False if forward and backward are one call, as with pipeline stages.
        may_be_gathered: True from the end of a forward until all units are known to be resharded.
        is_showing_shards: True while modules of gathered units have their shards.
        generates: True during a call of `generate`.
        waits: True while this rank's `generate` has ended, and that of another rank has not.
    """

    def __init__(self, root: nn.Module, device: torch.device, *, may_show_shards: bool) -> None:
        assert isinstance(root, FSDPModule)
        self.root: Any = root
        self.may_show_shards = may_show_shards
        self.may_be_gathered = False
        self.is_showing_shards = False
        self.generates = self.waits = False
        self._num_rows = 1  # of this rank's last forward in `generate`
        self._device = device
        self._units = list_units_in(root)

    def attach(self) -> None:
        """Register the hooks on the root, and replace `named_modules` and `generate`."""
        unit: Any
        for unit in self._units:
            # A unit may be called alone, before the root has run or while the unit is still
            # gathered, or be recomputed in backward. All hooks with `prepend` must run before
            # FSDP2's own hooks, which gather units.
            unit.register_forward_pre_hook(self._begin_unit, prepend=True)
            # All lists of modules and parameters pass through the `named_modules` of the units.
            setattr(unit, "named_modules", partial(self._list_modules, unit))  # noqa: B010  mypy
        self.root.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True)
        self.root.register_forward_hook(self._end_forward, always_call=True)
        inner = without_adapters(self.root)
        if prefix := find_base_model_prefix(inner):
            decoder = getattr(inner, prefix)
            decoder.register_forward_pre_hook(self._begin_decoder, prepend=True, with_kwargs=True)
        for model in list_models_that_generate(self.root):
            own = vars(model).get("generate")  # set by a library or by the user
            setattr(model, "generate", partial(self._generate, model, own))  # noqa: B010

    @torch.compiler.disable  # FSDP2 disables the compiler for its own hooks too.
    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if backward_is_running():  # this forward is a recompute of the whole model
            return
        if backward_has_begun(self.root):
            check_backward_has_ended(self.root)
            end_failed_backward(self.root)
        elif forward_has_begun(self.root):  # an error or Ctrl-C has ended it
            end_failed_forward(self.root)
        elif self.generates:
            if not self.waits:
                self._count_generating_ranks(1)
                tokens = find_tokens(bind_forward(module, args, kwargs))
                self._num_rows = 1 if tokens is None else tokens.shape[0]
            return
        self._reshard()

    @torch.compiler.disable
    def _begin_decoder(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a forward of the decoder alone as a forward of the root."""
        if backward_is_running() or forward_of_root_has_begun(self.root):
            return
        self._begin_forward(decoder, args, kwargs)
        for hook in list_forward_hooks(self.root):
            if isinstance(hook, (KeepForwards, ForwardGuard, RefuseUnfrozen, RefuseAdded)):
                hook(self.root, ())

    @torch.compiler.disable
    def _begin_unit(self, *_: Any) -> None:
        begin_with_root(self.root)
        if self.is_showing_shards:
            self._show_gathered(None)

    @torch.compiler.disable
    def _end_forward(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if backward_is_running():
            return
        # FSDP2's own hook has run before, unless the forward has raised an error.
        if forward_has_begun(self.root):
            end_failed_forward(self.root)
        if not torch.is_grad_enabled() and not self.generates:
            self._reshard()
            return
        self.may_be_gathered = True
        if torch.is_grad_enabled():
            for tensor in list_tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._show_gathered)

    def _show_gathered(self, grad: torch.Tensor | None) -> None:
        """Give the modules their gathered parameters back, for a backward or a run of a unit."""
        if self.is_showing_shards:
            self.is_showing_shards = False
            for unit in self._units:
                install_gathered(unit)

    def _reshard(self) -> None:
        self.may_be_gathered = self.is_showing_shards = False
        for unit in self._units:
            reshard_unit(unit)

    def _generate(
        self, model: Any, own: Callable[..., Any] | None, *args: Any, **kwargs: Any
    ) -> Any:
        stock = partial(type(model).generate, model) if own is None else own
        if self.generates:  # a model inside of the one that generates
            return stock(*args, **kwargs)
        check_assistant_unsharded(kwargs.get("assistant_model"))
        if accepts_keyword(stock, "synced_gpus"):
            kwargs = {**kwargs, "synced_gpus": False}
        self._reshard()
        self.generates, self._num_rows = True, 1
        try:
            output = stock(*args, **kwargs)
            self._wait_for_ranks(model)
            return output
        finally:
            self.generates = self.waits = False
            self._reshard()

    def _wait_for_ranks(self, model: Any) -> None:
        """Run forwards of one token per row until no rank generates any more.

        The number of rows is that of this rank's last forward, because PEFT's hooks of activated
        LoRA and of `adapter_names` expect as many.
        """
        self.waits = True
        tokens = torch.zeros(self._num_rows, 1, dtype=torch.int64, device=self._device)
        # In training mode the tokens would be split over the ranks that share a batch, and dropout
        # would use up random numbers. The ranks compare the mode of the experts, and before
        # Transformers 5.23 layers with gradient checkpointing use it without gradients as well.
        with torch.no_grad(), ExitStack() as stack:
            for module in model.modules():
                is_experts = isinstance(getattr(module, STATE, None), MoELayer)
                is_recomputed = is_checkpointed_layer(module) and module.gradient_checkpointing
                if module.training and not is_experts and not is_recomputed:
                    stack.enter_context(replaced(module, "training", False))
            while self._count_generating_ranks(0):
                model(input_ids=tokens)

    def _count_generating_ranks(self, own: int) -> int:
        """Return the sum of `own` over all ranks; with several ranks this is a host sync."""
        if dist.get_world_size() == 1:
            return own
        return int(sum_over_ranks(torch.tensor(own, device=self._device)))

    def _list_modules(
        self, unit: Any, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return `unit.named_modules(...)`, and show the shards first if nothing runs."""
        if not torch.compiler.is_compiling() and not backward_is_running():
            runs = self.generates or forward_has_begun(self.root)
            if backward_has_begun(self.root):  # an error has ended it
                self._reshard()
            elif (
                self.may_be_gathered
                and self.may_show_shards
                and not (runs or self.is_showing_shards)
            ):
                shown = [install_shards(unit) for unit in self._units]
                # After a backward nothing is gathered, until a caller gathers a unit.
                self.may_be_gathered = self.is_showing_shards = any(shown)
        return type(unit).named_modules(unit, *args, **kwargs)
