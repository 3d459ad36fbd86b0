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

The model's own forward computes and adds it: for the time of one forward of a sharded model, or of
any that asks for each layer's own, the function of that name in its module is ours, and in the
module of a forward that somebody has bound to the model, as Liger's fused linear cross-entropy
does. Subtracting stock's term afterwards would keep its 0/0 on a rank whose batch is all padding.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
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


class GlobalAuxLoss(Ours):
    """Pre-forward hook of the causal LM: its forward will call `global_aux_loss`."""

    def __init__(
        self, state: ModelState, coefficient: str, routers_alone: RoutersAlone | None
    ) -> None:
        self.state, self.routers_alone = state, routers_alone
        self._path, _, self.name = coefficient.rpartition(".")
        self.stock: tuple[list[tuple[dict[str, Any], Any]], float] | None = None
        # Whether the loss of the forward that runs has a gradient; None: it has not asked for one.
        self.learns: bool | None = None

    def holder(self, model: nn.Module) -> Any:
        """Find what has the coefficient: the model itself or a part of its config."""
        return attrgetter(self._path)(model) if self._path else model

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        meshes, per_layer = self.state.meshes, self.state.config.aux_loss_per_layer
        alone = meshes is None or meshes.world_size == 1
        if alone and not per_layer:
            return
        fused = is_fused_head(kwargs)
        files = [fused_head_globals()] if fused else forward_globals(model)
        files = [names for names in files if _FUNCTION in names]
        if not files:
            raise ValueError(
                f"the forward of {type(model).__name__} was replaced by one that does not call "
                f"{_FUNCTION}, so the router's aux loss would be that of a rank alone, or of all "
                f"layers together; leave out what replaces it"
            )
        holder = self.holder(model)
        coefficient = getattr(holder, self.name)
        self.stock = ([(names, names[_FUNCTION]) for names in files], coefficient)
        self.learns = None
        if self.routers_alone is not None and model.training and torch.is_grad_enabled():
            self.routers_alone.begin()
        sequence: Slice | None = kwargs.get(SLICE)
        for names in files:
            names[_FUNCTION] = partial(self.compute, sequence=sequence)
        if alone:
            return
        assert meshes is not None
        if kwargs.get("num_items_in_batch") is not None and self.state.sums_losses:
            setattr(holder, self.name, coefficient / meshes.data_parallel_size)

    def compute(
        self, router_logits: tuple[Tensor, ...], *args: Any, sequence: Slice | None, **kwargs: Any
    ) -> Tensor:
        """What the model's forward calls for `load_balancing_loss_func`."""
        alone = self.routers_alone
        if alone is not None and alone.again is not None:
            router_logits = tuple(alone.of(logits) for logits in router_logits)
            alone.end()
        self.learns = any(logits.requires_grad for logits in router_logits)
        meshes = self.state.meshes
        return global_aux_loss(
            router_logits,
            *args,
            **kwargs,
            world_size=1 if meshes is None else meshes.world_size,
            per_layer=self.state.config.aux_loss_per_layer,
            sequence=sequence,
        )


class RestoreAuxLoss(Ours):
    """Forward hook, also called when forward raised: undoes what `GlobalAuxLoss` did."""

    def __init__(self, swapped: GlobalAuxLoss) -> None:
        self.swapped = swapped

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.swapped.stock is not None:
            files, coefficient = self.swapped.stock
            for names, function in files:
                names[_FUNCTION] = function
            setattr(self.swapped.holder(model), self.swapped.name, coefficient)
            self.swapped.stock = None
            if self.swapped.routers_alone is not None:
                self.swapped.routers_alone.end()
            # Where forward has raised, torch lets that error pass before this one.
            per_layer = self.swapped.state.config.aux_loss_per_layer
            if per_layer and model.training and torch.is_grad_enabled():
                _check_learns(self.swapped.learns)


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
