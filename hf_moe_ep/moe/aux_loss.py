"""The router's load-balancing loss over the global batch.

Switch-style (arXiv 2101.03961, eq. 4-6), as in transformers' `load_balancing_loss_func`:

    aux = E * sum_e  f_e * P_e        f_e: share of (token, slot) pairs on expert e, no gradient
                                      P_e: mean router probability of e, both over all layers

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

The model's own forward computes and adds it: for the time of one forward of a sharded model, the
function of that name in its module is ours, and in the module of a forward that somebody has bound
to the model, as Liger's fused linear cross-entropy does. Subtracting stock's term afterwards would
keep its 0/0 on a rank whose batch is all padding.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.ops.permute import count_pairs
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, Ours
from hf_moe_ep.upstream.models import forward_globals, fused_head_globals, is_fused_head

_FUNCTION = "load_balancing_loss_func"


class GlobalAuxLoss(Ours):
    """Pre-forward hook of the causal LM: its forward will call `global_aux_loss`."""

    def __init__(self, state: ModelState, coefficient: str) -> None:
        self.state = state
        self._path, _, self.name = coefficient.rpartition(".")
        self.stock: tuple[list[tuple[dict[str, Any], Any]], float] | None = None

    def holder(self, model: nn.Module) -> Any:
        """Find what has the coefficient: the model itself or a part of its config."""
        return attrgetter(self._path)(model) if self._path else model

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return
        fused = is_fused_head(kwargs)
        files = [fused_head_globals()] if fused else forward_globals(model)
        files = [names for names in files if _FUNCTION in names]
        if not files:
            raise ValueError(
                f"the forward of {type(model).__name__} was replaced by one that does not call "
                f"{_FUNCTION}, so the router's aux loss would be that of a rank alone; leave out "
                f"what replaces it"
            )
        holder = self.holder(model)
        coefficient = getattr(holder, self.name)
        self.stock = ([(names, names[_FUNCTION]) for names in files], coefficient)
        sequence: Slice | None = kwargs.get(SLICE)
        world = meshes.world_size
        for names in files:
            names[_FUNCTION] = partial(global_aux_loss, world_size=world, sequence=sequence)
        if kwargs.get("num_items_in_batch") is not None and self.state.sums_losses:
            setattr(holder, self.name, coefficient / meshes.data_parallel_size)


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


def global_aux_loss(
    router_logits: tuple[Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: Tensor | None = None,
    *,
    world_size: int,
    sequence: Slice | None = None,
) -> Tensor:
    """Compute the loss above from the logits (T, E) of every layer on this rank.

    The positional arguments are those of transformers' `load_balancing_loss_func`; with `sequence`
    the logits are those of its slice, the mask is for the whole.
    """
    wide = torch.promote_types(router_logits[0].dtype, torch.float32)
    pairs_E = router_logits[0].new_zeros(num_experts, dtype=wide)
    probability_E = torch.zeros_like(pairs_E)
    rows = pairs_E.new_zeros(1)
    if sequence is not None:
        if attention_mask is None:
            batch_size = router_logits[0].shape[0] // sequence.local
            attention_mask = router_logits[0].new_ones(batch_size, sequence.length)
        attention_mask = sequence.take(attention_mask, 1)
    keep_T = None if attention_mask is None else attention_mask.reshape(-1).bool()
    for logits_TE in router_logits:
        probs_TE = logits_TE.softmax(-1)
        top_TK = probs_TE.topk(top_k, dim=-1).indices
        kept_T = keep_T
        if kept_T is None:
            kept_T = probs_TE.new_ones(probs_TE.shape[0], dtype=torch.bool)
        # A masked token counts for the extra expert E, which is cut off again.
        top_TK = top_TK.masked_fill(~kept_T.unsqueeze(1), num_experts)
        pairs_E = pairs_E + count_pairs(top_TK, num_experts + 1)[:num_experts]
        probability_E = probability_E + (probs_TE.to(wide) * kept_T.unsqueeze(1)).sum(0)
        rows = rows + kept_T.sum()
    totals = sum_over_ranks(torch.cat([pairs_E, probability_E, rows]))
    all_pairs_E, all_probability_E, all_rows = totals.split([num_experts, num_experts, 1])
    factor_E = num_experts * all_pairs_E / all_rows.square()
    own = world_size * (factor_E * probability_E).sum()
    return own + ((factor_E * all_probability_E).sum() - own).detach()
