"""The router's load-balancing loss over the global batch.

The formula is Switch Transformer's (arXiv 2101.03961, eq. 4-6), as in transformers'
`load_balancing_loss_func`:

    aux = E * sum_e  f_e * P_e        f_e: share of (token, slot) pairs on expert e, no gradient
                                      P_e: mean router probability of e, both over all layers

`aux_loss_per_layer=True` averages the losses of the single layers instead. The value and the
coefficient keep stock's scale (arXiv 2101.03961 adds the layers' losses up: its coefficient, times
the number of layers, is the coefficient here). The gradient of this loss reaches the routers alone
(`routers_alone.py`). Stock's formula balances only the sum over layers, so the imbalance of one
layer can hide that of another:

    loads of two experts    stock's f, over both layers    per layer
    layer 0: 6, 2           8, 8: even, no gradient        6, 2
    layer 1: 2, 6                                          2, 6

Stock code computes the loss of each rank alone. A mean of products is not the product of means, so
N ranks get another loss than one process gets on the same batch. The Trainer moreover multiplies
the loss by the number of processes, which makes stock's aux loss N times too strong.

Here f_e and the number of tokens are summed over ranks. Let P_re be the part of P_e that the tokens
of rank r contribute, so `sum_r P_re = P_e`. The gradient of rank r's own term
`E sum_e f_e P_re` is the part of the gradient that belongs to rank r, and the terms of all ranks
add up to the loss of one process:

    outputs.aux_loss    value: aux, on every rank; gradient: W times the rank's own term, because
                        data parallelism averages gradients over the W ranks
    outputs.loss        includes coefficient * aux, or coefficient * aux / D where the caller passed
                        `num_items_in_batch` and therefore sums losses over the D ranks that have
                        different batches (the Trainer does so unless
                        average_tokens_across_devices=False)

The model's own forward calls `load_balancing_loss_func` of its file. `patch` replaces that function
by an `AuxLossSwitch`, once per file. One forward passes these steps:

    GlobalAuxLoss    hook before the causal LM's forward: decides whether our loss replaces stock's
    MarkLogits       hook behind the decoder's forward: marks the router logits as ours
    AuxLossSwitch    called by the causal LM's forward: computes our loss if the logits are marked,
                     divided by D where losses are summed, and calls stock's function otherwise
    FinishAuxLoss    hook behind the causal LM's forward: outputs.aux_loss becomes the undivided
                     loss, and outputs.router_logits a plain tuple

The mark travels with the logits. An interrupted forward therefore leaves nothing that another
model, or the next forward, could mistake for its own. The coefficient in the config is only read.
A forward that somebody has bound to the model, as Liger does for its fused linear cross-entropy,
has a file of its own, which gets a switch as well. Adding "our loss minus stock's loss" behind the
forward would be simpler, but stock's loss is 0/0 on a rank whose batch is all padding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.moe.routers_alone import RoutersAlone, find_routers
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, Ours
from hf_moe_ep.upstream.models import forward_globals, fused_head_globals, is_fused_head
from hf_moe_ep.upstream.modules import pre_forward_hooks

_FUNCTION = "load_balancing_loss_func"
# The most logits that are stacked: on a GPU 2**26 bound the memory (256 MiB for a tensor in fp32);
# on a CPU larger tensors than 2**20 do not fit into the caches, which costs more than it saves.
_MAX_STACKED, _MAX_STACKED_ON_CPU = 2**26, 2**20


def global_aux_loss(
    router_logits: tuple[Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: Tensor | None = None,
    *,
    world_size: int,
    per_layer: bool = False,
    sequence: Slice | None = None,
) -> Tensor:
    """Compute the loss above from the logits (T, E) of every layer on this rank.

    The positional arguments are those of transformers' `load_balancing_loss_func`. With a
    `sequence` the logits are those of this rank's slice, and the mask is that of the whole batch.
    """
    if sequence is not None:
        if attention_mask is None:
            batch_size = router_logits[0].shape[0] // sequence.local
            attention_mask = router_logits[0].new_ones(batch_size, sequence.length)
        attention_mask = sequence.take(attention_mask, 1)
    keep_T = None if attention_mask is None else attention_mask.reshape(-1).bool()
    # [layers, 2, E], or [1, 2, E] for all layers together: pairs and probabilities of each expert.
    own = torch.cat(
        [
            _sum_over_tokens(layers, num_experts, top_k, keep_T).to(router_logits[0].device)
            for layers in _group_layers(router_logits)
        ]
    )
    if not per_layer:
        own = own.sum(0, keepdim=True)
    totals = own.detach() if world_size == 1 else sum_over_ranks(own)
    all_pairs_XE, all_probabilities_XE = totals.unbind(1)
    # Every token that counts has top_k pairs.
    num_tokens_X1 = all_pairs_XE.sum(1, keepdim=True) / top_k
    factor_XE = num_experts / len(totals) * all_pairs_XE / num_tokens_X1.square()
    own_term = world_size * (factor_XE * own[:, 1]).sum()
    return own_term + ((factor_XE * all_probabilities_XE).sum() - own_term).detach()


def _group_layers(router_logits: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """Yield groups of layers whose logits can be stacked, none larger than the limit above."""
    alike: dict[Any, list[Tensor]] = {}
    for logits_TE in router_logits:
        key = logits_TE.device, logits_TE.dtype, logits_TE.shape
        alike.setdefault(key, []).append(logits_TE)
    for layers in alike.values():
        limit = _MAX_STACKED_ON_CPU if layers[0].device.type == "cpu" else _MAX_STACKED
        size = max(1, limit // max(1, layers[0].numel()))
        for first in range(0, len(layers), size):
            yield layers[first : first + size]


def _sum_over_tokens(
    layers: list[Tensor], num_experts: int, top_k: int, keep_T: Tensor | None
) -> Tensor:
    """Sum pairs and probabilities of each expert over the tokens of this rank: [layers, 2, E].

    All layers are computed at once, because on a GPU the loss takes as long as its kernel launches.
    """
    logits_LTE = torch.stack(layers)
    num_layers, num_tokens, _ = logits_LTE.shape
    if keep_T is None:
        keep_T = logits_LTE.new_ones(num_tokens, dtype=torch.bool)
    keep_T1 = keep_T.to(logits_LTE.device).unsqueeze(1)
    probabilities_LTE = logits_LTE.softmax(-1)
    chosen_LTK = probabilities_LTE.topk(top_k).indices
    # Counted as integers: sums of ones in fp32 would depend on their order above 2**24.
    kept_LTK = keep_T1.long().expand(num_layers, -1, top_k)
    pairs_LE = kept_LTK.new_zeros(num_layers, num_experts)
    pairs_LE.scatter_add_(1, chosen_LTK.flatten(1), kept_LTK.flatten(1))
    wide = torch.promote_types(logits_LTE.dtype, torch.float32)
    probabilities_LE = (probabilities_LTE * keep_T1.to(wide)).sum(1)
    return torch.stack([pairs_LE.to(wide), probabilities_LE], 1)


@dataclass
class _Forward:
    """The forward of a causal LM whose aux loss is ours.

    Attributes:
        aux_loss: the hook of the model, which computes the loss.
        divisor: the number by which the loss is divided before the model adds it to its own loss.
        sequence: how the batch was split, with `sp_size` > 1.
        learns: whether the loss has a gradient; None while it has not been computed.
        undivided, returned: the loss, and the divided loss that the model's forward got instead.
    """

    aux_loss: GlobalAuxLoss
    divisor: int
    sequence: Slice | None
    learns: bool | None = None
    undivided: Tensor | None = None
    returned: Tensor | None = None


class _MarkedLogits(tuple[Tensor, ...]):
    """The router logits of all layers, and the forward that has computed them."""

    forward: _Forward


class AuxLossSwitch:
    """The function that replaces `load_balancing_loss_func` in a file of transformers or Liger.

    Attributes:
        users: the hooks of the patched models whose forward calls this function.
    """

    def __init__(self, stock: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stock)
        self.stock = stock
        self.users: weakref.WeakSet[GlobalAuxLoss] = weakref.WeakSet()

    def __call__(self, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(router_logits, _MarkedLogits):
            forward = router_logits.forward
            return forward.aux_loss.compute(forward, tuple(router_logits), *args, **kwargs)
        return self.stock(router_logits, *args, **kwargs)


def attach_aux_loss(parts: Parts, state: ModelState) -> None:
    """Make the aux loss of a patched model global, if its causal LM has one."""
    model = parts.causal_lm
    if parts.plan.aux_loss_coef is None or model is None:
        return
    routers_alone = None
    if state.config.aux_loss_per_layer:
        routers_alone = RoutersAlone()
        for router in find_routers(parts):
            router.register_forward_hook(routers_alone, with_kwargs=True)
    aux_loss = GlobalAuxLoss(state, routers_alone)
    aux_loss.install_switches(model)
    model.register_forward_pre_hook(aux_loss, with_kwargs=True)
    first_experts = next(iter(parts.experts.values()))
    for child in model.children():
        if any(module is first_experts for module in child.modules()):
            child.register_forward_hook(MarkLogits(aux_loss))
    model.register_forward_hook(FinishAuxLoss(aux_loss), always_call=True)


def detach_aux_loss(model: nn.Module) -> None:
    """Put stock's function back into the files whose switch no other patched model uses."""
    for module in model.modules():
        for hook in pre_forward_hooks(module):
            if isinstance(hook, GlobalAuxLoss):
                hook.remove_switches(module)


class GlobalAuxLoss(Ours):
    """Pre-forward hook of the causal LM: decides whether our loss replaces stock's."""

    def __init__(self, state: ModelState, routers_alone: RoutersAlone | None) -> None:
        self.state, self.routers_alone = state, routers_alone
        # The forward that runs now, or one that was interrupted.
        self.forward: _Forward | None = None
        self._had_fused_head = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out an interrupted forward: a copy of the model runs no forward."""
        return vars(self) | {"forward": None}

    def install_switches(self, model: nn.Module) -> None:
        """Put a switch into the file, or the files, of the model's forward."""
        for names in forward_globals(model):
            if _FUNCTION in names:
                self._put_switch(names)

    def remove_switches(self, model: nn.Module) -> None:
        files = forward_globals(model)
        if self._had_fused_head:
            files.append(fused_head_globals())
        for names in files:
            switch = names.get(_FUNCTION)
            if isinstance(switch, AuxLossSwitch):
                switch.users.discard(self)
                if not switch.users:
                    names[_FUNCTION] = switch.stock

    def _put_switch(self, names: dict[str, Any]) -> None:
        if not isinstance(names[_FUNCTION], AuxLossSwitch):
            names[_FUNCTION] = AuxLossSwitch(names[_FUNCTION])
        names[_FUNCTION].users.add(self)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # In one process stock's own loss is right, and torch.compile can compile the whole forward.
        if self._world_size > 1 or self.state.config.aux_loss_per_layer:
            self._begin(model, kwargs)

    @property
    def _world_size(self) -> int:
        return 1 if self.state.meshes is None else self.state.meshes.world_size

    @torch.compiler.disable
    def _begin(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        self.end()
        fused = is_fused_head(kwargs)
        self._had_fused_head |= fused
        files = [fused_head_globals()] if fused else forward_globals(model)
        files = [names for names in files if _FUNCTION in names]
        if not files:
            raise ValueError(
                f"the forward of {type(model).__name__} was replaced by a function that does not "
                f"call {_FUNCTION}, so the router's aux loss would be that of each rank alone, or "
                f"that of all layers together; leave out what replaces the forward"
            )
        for names in files:
            self._put_switch(names)
        divisor = 1
        meshes = self.state.meshes
        summed = kwargs.get("num_items_in_batch") is not None and self.state.sums_losses
        if meshes is not None and summed:
            divisor = meshes.data_parallel_size
        self.forward = _Forward(self, divisor, kwargs.get(SLICE))
        if self.routers_alone is not None and model.training and torch.is_grad_enabled():
            self.routers_alone.begin()

    @torch.compiler.disable
    def compute(
        self, forward: _Forward, router_logits: tuple[Tensor, ...], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the loss that `load_balancing_loss_func` returns to the model's forward."""
        alone = self.routers_alone
        if alone is not None and alone.is_recording:
            router_logits = tuple(map(alone.second_logits, router_logits))
            alone.end()
        forward.learns = any(logits.requires_grad for logits in router_logits)
        loss = global_aux_loss(
            router_logits,
            *args,
            **kwargs,
            world_size=self._world_size,
            per_layer=self.state.config.aux_loss_per_layer,
            sequence=forward.sequence,
        )
        if forward.divisor == 1:
            return loss
        forward.undivided, forward.returned = loss, loss / forward.divisor
        return forward.returned

    def end(self) -> _Forward | None:
        """Forget the forward that ran, and return it; None if none ran."""
        forward, self.forward = self.forward, None
        if self.routers_alone is not None:
            self.routers_alone.end()
        return forward


class MarkLogits(Ours):
    """Forward hook of the causal LM's decoder: marks its router logits with the forward."""

    def __init__(self, aux_loss: GlobalAuxLoss) -> None:
        self.aux_loss = aux_loss

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.aux_loss.forward is None:
            return None
        return self._mark(output, self.aux_loss.forward)

    @torch.compiler.disable
    def _mark(self, output: Any, forward: _Forward) -> Any:
        logits = getattr(output, "router_logits", None)
        if not isinstance(logits, tuple):
            return None
        marked = _MarkedLogits(logits)
        marked.forward = forward
        return replace(output, router_logits=marked)


class FinishAuxLoss(Ours):
    """Forward hook of the causal LM, called after an error as well: removes marks and division."""

    def __init__(self, aux_loss: GlobalAuxLoss) -> None:
        self.aux_loss = aux_loss

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.aux_loss.forward is None:
            return None
        return self._finish(model, output)

    @torch.compiler.disable
    def _finish(self, model: nn.Module, output: Any) -> Any:
        forward = self.aux_loss.end()
        assert forward is not None
        # If the forward has raised an error, torch raises that error rather than one of these.
        per_layer = self.aux_loss.state.config.aux_loss_per_layer
        if per_layer and model.training and torch.is_grad_enabled():
            _check_learns(forward.learns)
        if forward.learns is None and isinstance(getattr(output, "aux_loss", None), Tensor):
            raise ValueError(
                f"the forward of {type(model).__name__} computed its aux loss from other logits "
                f"than those that its decoder returned as router_logits, so the loss would be that "
                f"of each rank alone; leave out output_router_logits=True"
            )
        return _plain_output(output, forward)


def _plain_output(output: Any, forward: _Forward) -> Any:
    """Return the output with plain logits and the undivided loss, or None if it has both."""

    def plain(value: Any) -> Any:
        if isinstance(value, _MarkedLogits):
            return tuple(value)
        return value if value is None or value is not forward.returned else forward.undivided

    if isinstance(output, tuple):
        return tuple(map(plain, output))
    if not isinstance(output, Mapping):
        return None
    values = {name: plain(value) for name, value in output.items()}
    changed = {name: value for name, value in values.items() if value is not output[name]}
    return replace(output, **changed) if changed else None  # type: ignore[type-var]


def _check_learns(learns: bool | None) -> None:
    if learns is None:
        raise ValueError(
            "aux_loss_per_layer=True, but this training forward computed no aux loss; set "
            "output_router_logits=True in the model's config, or pass it to the forward"
        )
    if not learns:
        raise ValueError(
            "aux_loss_per_layer=True, but no router would learn from it: the logits of all routers "
            "have no gradients. If gradient checkpointing with use_reentrant=True hides them, use "
            "use_reentrant=False; if no router is trained, leave aux_loss_per_layer out"
        )
