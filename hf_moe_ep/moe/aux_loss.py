"""The router's load-balancing loss over the global batch.

Switch-style (arXiv 2101.03961, eq. 4-6), as in transformers' `load_balancing_loss_func`:

    aux = E * sum_e  f_e * P_e        f_e: share of (token, slot) pairs on expert e, no gradient
                                      P_e: mean router probability of e, both over all layers

`aux_loss_per_layer=True` takes it of each layer for itself, and of these the mean: the value and
the coefficient keep stock's scale (arXiv 2101.03961 adds the layers' losses up: its coefficient,
times their number, is the one here). The routers alone learn from it (`routers_alone.py`). Stock's
formula is content when the layers make up for each other: what it evens out is their sum.

    loads of two experts    stock's f, over both layers    per layer
    layer 0: 6, 2           8, 8: even, no gradient        6, 2
    layer 1: 2, 6                                          2, 6

Stock code computes it per rank. A mean of products is not the product of means, so N ranks get
another loss than one process on the same batch, and the Trainer, which multiplies the loss by
the number of processes, makes it N times too strong besides.

Here f_e and the number of tokens are summed over ranks. With P_re the part of P_e that rank r
contributes, `sum_r P_re = P_e`, so rank r's term `E sum_e f_e P_re` has just the gradient that
belongs to it, and the terms add up to the loss of one process:

    outputs.aux_loss    value: aux, on every rank; gradient: W times the rank's own term, because
                        data parallelism averages gradients over the W ranks
    outputs.loss        holds coefficient * aux, or coefficient * aux / D where the caller passed
                        `num_items_in_batch` and so sums losses over the D ranks that have
                        different batches (the Trainer does, unless it is told
                        average_tokens_across_devices=False)

The model's own forward calls `load_balancing_loss_func` of its file. `patch` replaces that
function by an `AuxLossSwitch`, once per file. The switch calls stock's function, unless the logits
are marked as those of a patched model whose loss is ours:

    GlobalAuxLoss    before the causal LM's forward: decides whether and how its loss is ours
    MarkLogits       behind its decoder's forward: marks the router logits
    AuxLossSwitch    called by its forward: computes the loss, divided by D where losses are summed
    FinishAuxLoss    behind its forward: outputs.aux_loss is the loss that was not divided

The mark travels with the logits, so a forward that is interrupted leaves nothing behind that
another model, or the next forward, could see. The coefficient is never written. The file may also
be that of a forward that somebody has bound to the model, as Liger's fused linear cross-entropy
does. Subtracting stock's term afterwards would keep its 0/0 on a rank whose batch is all padding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.moe.routers_alone import RoutersAlone
from hf_moe_ep.ops.permute import count_pairs
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, Ours
from hf_moe_ep.upstream.models import forward_globals, fused_head_globals, is_fused_head

_FUNCTION = "load_balancing_loss_func"
_UNDIVIDED = "_hf_moe_ep_undivided"


@dataclass
class _Forward:
    """One forward of a causal LM whose aux loss is ours.

    Attributes:
        hook: the model's own hook, which computes the loss.
        divisor: what the loss is divided by before the forward adds it to the model's loss.
        sequence: how the batch was split, with `sp_size` > 1.
        learns: whether the loss has a gradient; None while it has not been computed.
    """

    hook: GlobalAuxLoss
    divisor: int
    sequence: Slice | None
    learns: bool | None = None


class _MarkedLogits(tuple[Tensor, ...]):
    """The router logits of all layers, and the forward that they belong to."""

    forward: _Forward


class AuxLossSwitch:
    """Stands for `load_balancing_loss_func` in a file of transformers or Liger.

    Attributes:
        users: the hooks of patched models whose forward calls this function.
    """

    def __init__(self, stock: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stock)
        self.stock = stock
        self.users: weakref.WeakSet[GlobalAuxLoss] = weakref.WeakSet()

    def __call__(self, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(router_logits, _MarkedLogits):
            forward = router_logits.forward
            return forward.hook.compute(forward, tuple(router_logits), *args, **kwargs)
        return self.stock(router_logits, *args, **kwargs)


class GlobalAuxLoss(Ours):
    """Pre-forward hook of the causal LM: decides whether this forward's aux loss is ours."""

    def __init__(self, state: ModelState, routers_alone: RoutersAlone | None) -> None:
        self.state, self.routers_alone = state, routers_alone
        # The forward that runs, or one that was interrupted.
        self.forward: _Forward | None = None
        self._had_fused_head = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the forward that was interrupted: a copy has no part in it."""
        return vars(self) | {"forward": None}

    def install(self, model: nn.Module) -> None:
        """Put a switch into the file, or the files, of the model's forward."""
        for names in forward_globals(model):
            if _FUNCTION in names:
                self._switch_in(names)

    def give_back(self, model: nn.Module) -> None:
        """Put stock's function back into files whose switch no other patched model uses."""
        files = forward_globals(model)
        if self._had_fused_head:
            files.append(fused_head_globals())
        for names in files:
            switch = names.get(_FUNCTION)
            if isinstance(switch, AuxLossSwitch):
                switch.users.discard(self)
                if not switch.users:
                    names[_FUNCTION] = switch.stock

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Stock's loss of one process is right: such a forward is compiled as a whole.
        if self._world_size > 1 or self.state.config.aux_loss_per_layer:
            self._begin(model, kwargs)

    @property
    def _world_size(self) -> int:
        return 1 if self.state.meshes is None else self.state.meshes.world_size

    @torch.compiler.disable
    def _begin(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        self.stop()
        fused = is_fused_head(kwargs)
        self._had_fused_head |= fused
        files = [fused_head_globals()] if fused else forward_globals(model)
        files = [names for names in files if _FUNCTION in names]
        if not files:
            raise ValueError(
                f"the forward of {type(model).__name__} was replaced by one that does not call "
                f"{_FUNCTION}, so the router's aux loss would be that of a rank alone, or of all "
                f"layers together; leave out what replaces it"
            )
        for names in files:
            self._switch_in(names)
        divisor = 1
        meshes = self.state.meshes
        summed = kwargs.get("num_items_in_batch") is not None and self.state.sums_losses
        if meshes is not None and summed:
            divisor = meshes.data_parallel_size
        self.forward = _Forward(self, divisor, kwargs.get(SLICE))
        if self.routers_alone is not None and model.training and torch.is_grad_enabled():
            self.routers_alone.begin()

    def stop(self) -> _Forward | None:
        """Forget the forward that ran, and return it; None where there was none."""
        forward, self.forward = self.forward, None
        if self.routers_alone is not None:
            self.routers_alone.end()
        return forward

    @torch.compiler.disable
    def compute(
        self, forward: _Forward, router_logits: tuple[Tensor, ...], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute what `load_balancing_loss_func` returns to the model's forward."""
        alone = self.routers_alone
        if alone is not None and alone.again is not None:
            router_logits = tuple(alone.of(logits) for logits in router_logits)
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
        divided = loss / forward.divisor
        setattr(divided, _UNDIVIDED, loss)
        return divided

    def _switch_in(self, names: dict[str, Any]) -> None:
        """Let the function in these globals be a switch that knows of this model."""
        if not isinstance(names[_FUNCTION], AuxLossSwitch):
            names[_FUNCTION] = AuxLossSwitch(names[_FUNCTION])
        names[_FUNCTION].users.add(self)


class MarkLogits(Ours):
    """Forward hook of the causal LM's decoder: says whose forward the router logits are of."""

    def __init__(self, aux_loss: GlobalAuxLoss) -> None:
        self.aux_loss = aux_loss

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.aux_loss.forward is None:
            return None
        return _marked(output, self.aux_loss.forward)


class FinishAuxLoss(Ours):
    """Forward hook, also called when forward raised: hands out plain logits and the whole loss."""

    def __init__(self, aux_loss: GlobalAuxLoss) -> None:
        self.aux_loss = aux_loss

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.aux_loss.forward is None:
            return None
        return self._finish(model, output)

    @torch.compiler.disable
    def _finish(self, model: nn.Module, output: Any) -> Any:
        forward = self.aux_loss.stop()
        assert forward is not None
        # Where forward has raised, torch lets that error pass before this one.
        per_layer = self.aux_loss.state.config.aux_loss_per_layer
        if per_layer and model.training and torch.is_grad_enabled():
            _check_learns(forward.learns)
        if forward.learns is None and isinstance(getattr(output, "aux_loss", None), Tensor):
            raise ValueError(
                f"the forward of {type(model).__name__} computed an aux loss of other logits than "
                f"those that its decoder returned as router_logits, so the loss would be that of a "
                f"rank alone; leave out output_router_logits=True"
            )
        return _as_documented(output)


@torch.compiler.disable
def _marked(output: Any, forward: _Forward) -> Any:
    logits = getattr(output, "router_logits", None)
    if not isinstance(logits, tuple):
        return None
    marked = _MarkedLogits(logits)
    marked.forward = forward
    return replace(output, router_logits=marked)


def _as_documented(output: Any) -> Any:
    """Return an output with plain tuples of logits and the undivided loss; None if it has both."""
    if isinstance(output, tuple):
        return tuple(map(_plain, output))
    if not isinstance(output, Mapping):
        return None
    plain = {name: _plain(value) for name, value in output.items()}
    changed = {name: value for name, value in plain.items() if value is not output[name]}
    return replace(output, **changed) if changed else None  # type: ignore[type-var]


def _plain(value: Any) -> Any:
    if isinstance(value, _MarkedLogits):
        return tuple(value)
    return getattr(value, _UNDIVIDED, value) if isinstance(value, Tensor) else value


def _check_learns(learns: bool | None) -> None:
    if learns is None:
        raise ValueError(
            "aux_loss_per_layer=True, but this forward of training computed no aux loss; set "
            "output_router_logits=True in the model's config, or pass it to the forward"
        )
    if not learns:
        raise ValueError(
            "aux_loss_per_layer=True, but nothing would learn from it: the logits of all routers "
            "are without gradients. Gradient checkpointing hides them with use_reentrant=True, use "
            "False; or no router is trained, leave it out"
        )


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

    The positional arguments are those of transformers' `load_balancing_loss_func`; with `sequence`
    the logits are those of its slice, the mask is for the whole.
    """
    if sequence is not None:
        if attention_mask is None:
            batch_size = router_logits[0].shape[0] // sequence.local
            attention_mask = router_logits[0].new_ones(batch_size, sequence.length)
        attention_mask = sequence.take(attention_mask, 1)
    keep_T = None if attention_mask is None else attention_mask.reshape(-1).bool()
    of_layers = [_sums(logits_TE, num_experts, top_k, keep_T) for logits_TE in router_logits]
    # A line for each layer, or one for all: pairs of E experts, probabilities of E, rows.
    own = torch.stack([sums.to(of_layers[0].device) for sums in of_layers])
    if not per_layer:
        own = own.sum(0, keepdim=True)
    totals = own.detach() if world_size == 1 else sum_over_ranks(own)
    all_pairs_XE, all_probability_XE, all_rows_X1 = totals.split([num_experts, num_experts, 1], 1)
    factor_XE = num_experts * all_pairs_XE / all_rows_X1.square() / len(totals)
    own_term = world_size * (factor_XE * own[:, num_experts:-1]).sum()
    return own_term + ((factor_XE * all_probability_XE).sum() - own_term).detach()


def _sums(logits_TE: Tensor, num_experts: int, top_k: int, keep_T: Tensor | None) -> Tensor:
    """Sum up a layer on this rank: pairs per expert, probability per expert, rows, in one line."""
    probs_TE = logits_TE.softmax(-1)
    top_TK = probs_TE.topk(top_k, dim=-1).indices
    if keep_T is None:
        keep_T = probs_TE.new_ones(probs_TE.shape[0], dtype=torch.bool)
    keep_T = keep_T.to(logits_TE.device)
    # A masked token counts for the extra expert E, which is cut off again.
    top_TK = top_TK.masked_fill(~keep_T.unsqueeze(1), num_experts)
    pairs_E = count_pairs(top_TK, num_experts + 1)[:num_experts]
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    probability_E = (probs_TE.to(wide) * keep_T.unsqueeze(1)).sum(0)
    return torch.cat([pairs_E.to(wide), probability_E, keep_T.sum().to(wide).view(1)])
