"""Compute the router's load-balancing loss over the global batch.

The formula is Switch Transformer's (arXiv 2101.03961, eq. 4-6), as transformers computes it in
`load_balancing_loss_func`. Both means are over the tokens of all layers:

    aux = E * sum_e  f_e * P_e        f_e: the share of tokens that chose expert e, a constant
                                      P_e: the mean router probability of e, with a gradient

Tokens that `attention_mask` marks as padding count neither in f nor in P.

`aux_loss_per_layer=True` computes the loss of each layer and returns their mean, which has the same
scale (the paper adds up the losses of the layers: multiply its coefficient by the number of
layers). Only the routers get a gradient from this loss (`routers_alone.py`). Stock's formula
balances only the sum over layers, so one layer's imbalance can hide another layer's imbalance:

    loads of two experts    stock's f, over both layers    per layer
    layer 0: 6, 2           8, 8: even, no gradient        6, 2
    layer 1: 2, 6                                          2, 6

In stock code each rank computes the loss of its own tokens. A mean of products is not the product
of means, so the mean loss of N ranks differs from the loss of one process with the same batch. The
Trainer also multiplies the loss by the number of processes, so stock's aux loss is N times too
strong.

Here each expert's (token, expert) pairs and probabilities, and the number of tokens, are summed
over ranks. Let P_re be the part of P_e that the tokens of rank r contribute, so `sum_r P_re = P_e`.
Then `E sum_e f_e P_re` is the term of rank r. The terms of all ranks add up to the loss of one
process, and each rank computes the gradient of its own term:

    outputs.aux_loss    value: aux, on every rank; gradient: W times the rank's own term, because
                        data parallelism averages gradients over the W ranks
    outputs.loss        includes coefficient * aux, or coefficient * aux / D if the caller passed
                        `num_items_in_batch` and therefore sums losses over the D ranks that have
                        different batches (the Trainer does so unless
                        average_tokens_across_devices=False)

The model's own forward calls `load_balancing_loss_func` of its file. `patch` replaces that function
by an `AuxLossSwitch`, once per file. One forward passes these steps:

    GlobalAuxLoss    hook before the causal LM's forward: decides whether our loss replaces stock's
    MarkLogits       hook after the decoder's forward: marks the router logits
    AuxLossSwitch    called by the causal LM's forward: if the logits are marked, computes our loss,
                     divided by D if losses are summed; otherwise calls stock's function
    FinishAuxLoss    hook after the causal LM's forward: outputs.aux_loss becomes the undivided
                     loss, and outputs.router_logits a plain tuple

With pipeline stages (`pipeline/`) a forward computes one micro-batch. Its sums are sent with the
hidden states from stage to stage, and the last stage computes the loss. With "1f1b" the batch of
the formula is the micro-batch of all ranks of a stage. The losses of the micro-batches are averaged
with their numbers of rows as weights, as if one process had accumulated over the micro-batches.
With "gpipe" all forwards run before the first backward, so the last stage computes the loss of the
whole batch.

The mark is an attribute of the logits, so a mark of an interrupted forward cannot reach another
forward or another model. The coefficient in the config is never changed. For its fused linear
cross-entropy, Liger binds another forward to the model; the file that defines this forward gets a
switch as well. It would be simpler to add "our loss minus stock's loss" after the forward, but
stock's loss is 0/0 on a rank whose batch is all padding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.moe.routers_alone import SecondRouterRuns, find_routers
from hf_moe_ep.pipeline.stage import Boundary
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, PackageHook
from hf_moe_ep.upstream.models import (
    get_fused_head_coefficient,
    get_fused_head_globals,
    is_fused_head,
    list_forward_globals,
)
from hf_moe_ep.upstream.modules import list_pre_forward_hooks

_FUNCTION = "load_balancing_loss_func"
# The largest number of logits in one stack. On a GPU the limit bounds the memory (256 MiB for an
# fp32 tensor). On a CPU a larger stack does not fit into the caches and costs more than it saves.
_MAX_STACKED, _MAX_STACKED_ON_CPU = 2**26, 2**20


def sum_over_layers(
    router_logits: tuple[Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: Tensor | None = None,
    *,
    per_layer: bool = False,
    sequence: Slice | None = None,
) -> Tensor:
    """Sum pairs and probabilities of each expert over this rank's tokens: [layers, 2, E].

    The sums of the layers are added up to [1, 2, E] unless `per_layer` is True. The first four
    arguments are the arguments of transformers' `load_balancing_loss_func`; the first is a tuple
    with the logits (T, E) of each layer. If `sequence` is given (sp_size > 1), the logits belong to
    this rank's slice, but `attention_mask` belongs to the whole sequence.
    """
    if sequence is not None:
        if attention_mask is None:
            batch_size = router_logits[0].shape[0] // sequence.local_length
            attention_mask = router_logits[0].new_ones(batch_size, sequence.length)
        attention_mask = sequence.take(attention_mask, 1)
    keep_T = None if attention_mask is None else attention_mask.reshape(-1).bool()
    # [layers, 2, E]: pairs and probabilities of each expert; [1, 2, E] if layers are added up.
    own_sums = torch.cat(
        [
            _sum_over_tokens(layers, num_experts, top_k, keep_T).to(router_logits[0].device)
            for layers in _group_layers(router_logits)
        ]
    )
    return own_sums if per_layer else own_sums.sum(0, keepdim=True)


def compute_terms(
    own_sums: list[Tensor],
    top_k: int,
    *,
    world_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return this rank's terms of the loss, one for each element of `own_sums`, and the loss.

    All elements of `own_sums` on all `world_size` ranks of `group` form one batch. The values of
    the terms add up to the loss. The gradient of each term reaches only its element of `own_sums`.
    """
    own_total = torch.stack(own_sums).sum(0) if len(own_sums) > 1 else own_sums[0]
    totals = own_total.detach() if world_size == 1 else sum_over_ranks(own_total, group)
    all_pairs_XE, all_probabilities_XE = totals.unbind(1)
    # Every token that is not padding has top_k pairs.
    num_tokens_X1 = all_pairs_XE.sum(1, keepdim=True) / top_k
    num_experts = totals.shape[-1]
    factor_XE = num_experts / len(totals) * all_pairs_XE / num_tokens_X1.square()
    own_terms = [world_size * (factor_XE * sums[:, 1]).sum() for sums in own_sums]
    loss = (factor_XE * all_probabilities_XE).sum()
    values = loss / len(own_sums)
    return [term + (values - term).detach() for term in own_terms], loss


def _group_layers(router_logits: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """Yield groups of layers whose logits can be stacked, with at most `_MAX_STACKED` logits."""
    layers_by_kind: dict[Any, list[Tensor]] = {}
    for logits_TE in router_logits:
        kind = logits_TE.device, logits_TE.dtype, logits_TE.shape
        layers_by_kind.setdefault(kind, []).append(logits_TE)
    for layers in layers_by_kind.values():
        limit = _MAX_STACKED_ON_CPU if layers[0].device.type == "cpu" else _MAX_STACKED
        size = max(1, limit // max(1, layers[0].numel()))
        for first in range(0, len(layers), size):
            yield layers[first : first + size]


def _sum_over_tokens(
    layers: list[Tensor], num_experts: int, top_k: int, keep_T: Tensor | None
) -> Tensor:
    """Sum pairs and probabilities of each expert over the tokens of this rank: [layers, 2, E].

    All layers are computed together, because on a GPU kernel launches dominate the time of the
    loss.
    """
    logits_XTE = torch.stack(layers)
    num_layers, num_tokens, _ = logits_XTE.shape
    if keep_T is None:
        keep_T = logits_XTE.new_ones(num_tokens, dtype=torch.bool)
    keep_T1 = keep_T.to(logits_XTE.device).unsqueeze(1)
    probabilities_XTE = logits_XTE.softmax(-1)
    chosen_XTK = probabilities_XTE.topk(top_k).indices
    # The counts are integers, because an fp32 sum of ones is not exact above 2**24.
    kept_XTK = keep_T1.long().expand(num_layers, -1, top_k)
    pairs_XE = kept_XTK.new_zeros(num_layers, num_experts)
    pairs_XE.scatter_add_(1, chosen_XTK.flatten(1), kept_XTK.flatten(1))
    wide = torch.promote_types(logits_XTE.dtype, torch.float32)
    probabilities_XE = (probabilities_XTE * keep_T1.to(wide)).sum(1)
    return torch.stack([pairs_XE.to(wide), probabilities_XE], 1)


@dataclass
class _Forward:
    """The forward of a causal LM whose aux loss is ours.

    Attributes:
        aux_loss: the hook of the model, which computes the loss.
        divisor: the number by which the aux loss is divided before the model adds it to the loss.
            With pipeline stages and "1f1b" it has the factor 1 / (share of the micro-batch in the
            batch).
        sequence: with `sp_size` > 1, this rank's slice of the sequences; otherwise None.
        has_fused_head: True if TRL's fused head computes the loss.
        learns: True if the aux loss has a gradient; None until the aux loss is computed.
        undivided, returned: the aux loss, and the divided aux loss that the switch has returned;
            None if `divisor` is 1.
    """

    aux_loss: GlobalAuxLoss
    divisor: float
    sequence: Slice | None
    has_fused_head: bool
    learns: bool | None = None
    undivided: Tensor | None = None
    returned: Tensor | None = None


class _MarkedLogits(tuple[Tensor, ...]):
    """The router logits of all layers, marked with the forward that has computed them."""

    forward: _Forward


class AuxLossSwitch:
    """The callable that replaces `load_balancing_loss_func` in a file of transformers or Liger.

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
    second_runs = None
    if state.config.aux_loss_per_layer:
        second_runs = SecondRouterRuns(model)
        for router in find_routers(parts):
            router.register_forward_hook(second_runs, with_kwargs=True)
    aux_loss = GlobalAuxLoss(model, state, second_runs)
    aux_loss.install_switches(model)
    model.register_forward_pre_hook(aux_loss, with_kwargs=True)
    first_experts = next(iter(parts.experts.values()))
    for child in model.children():
        if any(module is first_experts for module in child.modules()):
            child.register_forward_hook(MarkLogits(aux_loss))
    model.register_forward_hook(FinishAuxLoss(aux_loss), always_call=True)


def detach_aux_loss(model: nn.Module) -> None:
    """Restore stock's function in every file whose switch no other patched model uses."""
    for module in model.modules():
        for hook in list_pre_forward_hooks(module):
            if isinstance(hook, GlobalAuxLoss):
                hook.remove_switches(module)


class GlobalAuxLoss(PackageHook):
    """Pre-forward hook of the causal LM: decides whether our loss replaces stock's."""

    def __init__(
        self, model: nn.Module, state: ModelState, second_runs: SecondRouterRuns | None
    ) -> None:
        self.model, self.state, self.second_runs = model, state, second_runs
        # The current forward, or an earlier forward that was interrupted.
        self.forward: _Forward | None = None
        self._had_fused_head = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the forward: in a copy of the model no forward is running."""
        return vars(self) | {"forward": None}

    def install_switches(self, model: nn.Module) -> None:
        """Install a switch in every file that defines the model's forward."""
        for file_globals in list_forward_globals(model):
            if _FUNCTION in file_globals:
                self._install_switch(file_globals)

    def remove_switches(self, model: nn.Module) -> None:
        files = list_forward_globals(model)
        if self._had_fused_head:
            files.append(get_fused_head_globals())
        for file_globals in files:
            switch = file_globals.get(_FUNCTION)
            if isinstance(switch, AuxLossSwitch):
                switch.users.discard(self)
                if not switch.users:
                    file_globals[_FUNCTION] = switch.stock

    def _install_switch(self, file_globals: dict[str, Any]) -> None:
        if not isinstance(file_globals[_FUNCTION], AuxLossSwitch):
            file_globals[_FUNCTION] = AuxLossSwitch(file_globals[_FUNCTION])
        file_globals[_FUNCTION].users.add(self)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # In one process stock's loss is correct. torch.compile can then compile the whole forward,
        # because `_begin` does not run.
        is_global = self._world_size > 1 or self.state.stage is not None
        if is_global or self.state.config.aux_loss_per_layer:
            self._begin(model, kwargs)

    @property
    def _boundary(self) -> Boundary | None:
        """The boundary of this rank's pipeline stage; None without stages."""
        return None if self.state.stage is None else self.state.stage.boundary

    @property
    def _world_size(self) -> int:
        return 1 if self.state.meshes is None else self.state.meshes.world_size

    @torch.compiler.disable
    def _begin(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        self.end()
        fused = is_fused_head(kwargs)
        self._had_fused_head |= fused
        files = [get_fused_head_globals()] if fused else list_forward_globals(model)
        files = [file_globals for file_globals in files if _FUNCTION in file_globals]
        if not files:
            raise ValueError(
                f"the forward of {type(model).__name__} was replaced by a function that does not "
                f"call {_FUNCTION}, so hf_moe_ep cannot compute the router's aux loss over all "
                f"ranks (or per layer); leave out this replacement"
            )
        for file_globals in files:
            self._install_switch(file_globals)
        divisor = 1.0
        meshes, boundary = self.state.meshes, self._boundary
        losses_are_summed = kwargs.get("num_items_in_batch") is not None and self.state.sums_losses
        if boundary is not None:
            # The pipeline passes a number of items in any case.
            losses_are_summed &= boundary.losses_are_summed
            divisor = 1 if boundary.defers_aux_loss else 1 / boundary.share
        if meshes is not None and losses_are_summed:
            divisor *= meshes.data_parallel_size
        self.forward = _Forward(self, divisor, kwargs.get(SLICE), fused)
        if self.second_runs is not None and model.training and torch.is_grad_enabled():
            self.second_runs.begin()

    @torch.compiler.disable
    def compute(
        self, forward: _Forward, router_logits: tuple[Tensor, ...], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the loss that `load_balancing_loss_func` returns to the model's forward."""
        second_runs = self.second_runs
        if second_runs is not None and second_runs.is_recording:
            router_logits = tuple(map(second_runs.find_second_logits, router_logits))
            second_runs.end()
        forward.learns = any(logits.requires_grad for logits in router_logits)
        if self._boundary is not None:
            forward.learns |= not router_logits  # a stage of dense layers
        loss = self._compute_term(forward, router_logits, *args, **kwargs)
        if forward.divisor == 1:
            return loss
        forward.undivided, forward.returned = loss, loss / forward.divisor
        return forward.returned

    def _compute_term(
        self,
        forward: _Forward,
        router_logits: tuple[Tensor, ...],
        num_experts: int,
        top_k: int,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute this rank's term of the loss (`compute_terms`).

        A pipeline stage adds its sums to the sums of earlier stages. The last stage computes the
        loss; every other stage returns zero. With "gpipe" the last stage returns zero as well, and
        `finish_batch` computes the loss of all micro-batches.
        """
        boundary, per_layer = self._boundary, self.state.config.aux_loss_per_layer
        sums = None if boundary is None else boundary.received_sums
        if router_logits:
            own_sums = sum_over_layers(
                router_logits,
                num_experts,
                top_k,
                attention_mask,
                per_layer=per_layer,
                sequence=forward.sequence,
            )
            if sums is None:
                sums = own_sums
            else:
                sums = torch.cat([sums, own_sums]) if per_layer else sums + own_sums
        if sums is None:
            num_layers, device = 0 if per_layer else 1, self.state.mesh_device
            sums = torch.zeros(num_layers, 2, num_experts, dtype=torch.float32, device=device)
        if boundary is not None and not boundary.is_last:
            boundary.sent_sums = sums
        elif boundary is not None and boundary.defers_aux_loss:
            boundary.deferred.append(sums)
            factor = self._find_coefficient(fused=forward.has_fused_head) / forward.divisor
            boundary.finish_aux_loss = functools.partial(self.finish_batch, top_k, factor)
        else:
            group = None if self.state.meshes is None else self.state.meshes.stage_group
            (term,), _ = compute_terms([sums], top_k, world_size=self._world_size, group=group)
            return term
        return torch.zeros((), dtype=sums.dtype, device=sums.device)

    def finish_batch(
        self, top_k: int, factor: float, sums: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the term that is added to the loss of each micro-batch, and the aux loss."""
        meshes = self.state.meshes
        assert meshes is not None
        terms, loss = compute_terms(
            sums, top_k, world_size=self._world_size, group=meshes.stage_group
        )
        return [term * factor for term in terms], loss

    def _find_coefficient(self, *, fused: bool) -> float:
        """Return the factor of the aux loss in the loss of the model, or of TRL's fused head."""
        if fused:
            return get_fused_head_coefficient(self.model)
        assert self.state.plan.aux_loss_coef is not None
        coefficient: Any = self.model
        for name in self.state.plan.aux_loss_coef.split("."):
            coefficient = getattr(coefficient, name)
        return float(coefficient)

    def end(self) -> _Forward | None:
        """Return the forward that ran, or None, and forget it."""
        forward, self.forward = self.forward, None
        if self.second_runs is not None:
            self.second_runs.end()
        return forward


class MarkLogits(PackageHook):
    """Forward hook of the causal LM's decoder: marks the decoder's router logits."""

    def __init__(self, aux_loss: GlobalAuxLoss) -> None:
        self.aux_loss = aux_loss

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.aux_loss.forward is None:
            return None
        return self._mark(output, self.aux_loss.forward)

    @torch.compiler.disable
    def _mark(self, output: Any, forward: _Forward) -> Any:
        logits = getattr(output, "router_logits", None)
        if logits is None and self.aux_loss.state.stage is not None:
            logits = ()  # a stage of dense layers
        if not isinstance(logits, tuple):
            return None
        marked = _MarkedLogits(logits)
        marked.forward = forward
        return replace(output, router_logits=marked)


class FinishAuxLoss(PackageHook):
    """Forward hook of the causal LM: undoes the mark and the division, even after an error."""

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
        # If the forward has raised an error, torch raises that error instead of the errors below.
        per_layer = self.aux_loss.state.config.aux_loss_per_layer
        if per_layer and model.training and torch.is_grad_enabled():
            _check_learns(forward.learns)
        if forward.learns is None and isinstance(getattr(output, "aux_loss", None), Tensor):
            raise ValueError(
                f"the forward of {type(model).__name__} did not compute its aux loss from the "
                f"router_logits that its decoder returned, so each rank would compute the loss of "
                f"its own tokens; leave out output_router_logits=True"
            )
        return _restore_output(output, forward)


def _restore_output(output: Any, forward: _Forward) -> Any:
    """Return `output` with plain logits and the undivided loss, or None if nothing changes."""

    def restore(value: Any) -> Any:
        if isinstance(value, _MarkedLogits):
            return tuple(value)
        return value if value is None or value is not forward.returned else forward.undivided

    if isinstance(output, tuple):
        return tuple(map(restore, output))
    if not isinstance(output, Mapping):
        return None
    values = {name: restore(value) for name, value in output.items()}
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
            "aux_loss_per_layer=True, but no router would learn from this loss: no router's logits "
            "require a gradient. If gradient checkpointing with use_reentrant=True is the reason, "
            "use use_reentrant=False; if no router is trained, leave aux_loss_per_layer out"
        )
