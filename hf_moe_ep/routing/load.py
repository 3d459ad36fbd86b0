"""Count the tokens that each expert received in training: `expert_load` returns an `ExpertLoad`.

An example with 4 experts on 2 ep ranks, top-2, and 8 tokens on all ranks together:

    counts           [7, 5, 3, 1]        mean 4
    busiest / mean   7 / 4 = 1.75        the ratio is 1 if all experts have equally many tokens
    busiest rank     (7 + 5) / 8 = 1.5   the busiest ep rank / the mean of the ep ranks; each of
                                         the two ranks owns 2 experts
    dead             0                   the number of experts that no token chose
    entropy          1.212 nats          the entropy of the experts' shares; ln 4 = 1.386 if all
                                         shares are equal
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_moe_ep.config import check_choice
from hf_moe_ep.ranks.all_ranks import PATIENCE_OF_RANK_0, check_everyone_calls, world_size
from hf_moe_ep.routing.counts import reset_counts, sum_counts
from hf_moe_ep.state import ModelState, iterate_experts_modules, patched_state
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.module_names import get_stock_name, unwrap


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """The tokens of each expert on all ranks together; `print(load)` prints a table.

    The model has L MoE layers. The E experts of a layer are divided among the D ranks of an ep
    group. A pair is a token and one of the experts that the token chose. Ratios and entropies of a
    layer without tokens are nan.

    Attributes:
        counts: [L, E] int64 on the host, the number of pairs of each expert.
        layers: the names of the L experts modules, in the model's order.
        ep_size: D; rank r of an ep group owns the experts whose slots are in
            range(r * E / D, (r + 1) * E / D).
        slots: [L, E] int64, the slot of each expert. None if `balance_experts` has moved no expert;
            expert e then has slot e.
    """

    counts: Tensor
    layers: tuple[str, ...]
    ep_size: int = 1
    slots: Tensor | None = None

    @property
    def max_over_mean(self) -> Tensor:
        """The pairs of each layer's busiest expert / the mean over experts: [L] float64, >= 1."""
        return _divide_max_by_mean(self.counts)

    @property
    def rank_max_over_mean(self) -> Tensor:
        """The pairs of each layer's busiest ep rank / the mean over ranks: [L] float64, >= 1."""
        counts = self.counts
        if self.slots is not None:
            counts = torch.empty_like(counts).scatter_(1, self.slots, counts)
        return _divide_max_by_mean(counts.view(len(counts), self.ep_size, -1).sum(2))

    @property
    def worst_layer(self) -> int:
        """The index of the layer with the greatest `max_over_mean`."""
        return int(self.max_over_mean.nan_to_num(0.0).argmax())

    @property
    def dead(self) -> Tensor:
        """The number of experts without tokens: [L] int64; 0 for a layer without tokens."""
        return (self.counts == 0).sum(1) * (self.counts.sum(1) > 0)

    @property
    def entropy(self) -> Tensor:
        """-sum p ln p in nats, where p are the experts' shares of a layer's pairs: [L] float64."""
        shares = self.counts.double() / self.counts.sum(1, keepdim=True)
        return torch.special.entr(shares).sum(1)

    @property
    def relative_entropy(self) -> Tensor:
        """`entropy` / ln E: [L] float64, at most 1. It is 1 if all experts have the same load."""
        num_experts = self.counts.shape[1]
        if num_experts == 1:
            return self.entropy + 1
        return self.entropy / math.log(num_experts)

    def __str__(self) -> str:
        num_layers, num_experts = self.counts.shape
        width = max(map(len, self.layers))
        lines = [
            f"expert load of {num_layers} layers of {num_experts} experts, ep_size {self.ep_size}: "
            f"{int(self.counts.sum()):,} (token, expert) pairs",
            f"  {'layer':{width}}  {'pairs':>12}  "
            "busiest / mean  busiest rank  dead  entropy / ln E",
        ]
        rows = zip(
            self.layers,
            self.counts.sum(1).tolist(),
            self.counts.argmax(1).tolist(),
            self.max_over_mean.tolist(),
            self.rank_max_over_mean.tolist(),
            self.dead.tolist(),
            self.relative_entropy.tolist(),
            strict=True,
        )
        for name, pairs, busiest, max_over_mean, rank_max_over_mean, dead, entropy in rows:
            if not pairs:
                lines.append(f"  {name:{width}}  {0:>12}  no tokens")
                continue
            expert = f"{max_over_mean:.2f} (e{busiest})"
            lines.append(
                f"  {name:{width}}  {pairs:>12,}  {expert:>14}  {rank_max_over_mean:>12.2f}  "
                f"{dead:>4}  {entropy:>14.3f}"
            )
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a heat map of layers x experts to a PNG file: tokens / mean of the layer.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from hf_moe_ep.routing.heat_map import draw_heat_maps

        draw_heat_maps([self.counts], [""], path)


def expert_load(model: nn.Module, reset: bool = True) -> ExpertLoad:
    """Return how many training tokens chose each expert of each layer, on all ranks together.

        trainer.train()
        print(expert_load(model))

    Only forwards in training mode with gradients are counted, without their recompute in backward.
    A token counts once for each expert that the token chose. Padding tokens, which a mask (B, S)
    hides, do not count.

    Every rank calls this function. A call costs one all-reduce and a host sync.

    Args:
        model: a patched model, sharded or not.
        reset: if True, the next call returns only the tokens since this call.

    Returns:
        `ExpertLoad` with the counts since the last call with `reset`, the same on every rank.

    Raises:
        ValueError: the model is not patched, or is patched with experts_backend="eager"; ranks pass
            different values of `reset`.
        RuntimeError: other ranks do not call this function.
    """
    check_choice("reset", reset, (True, False))
    state = patched_state(model)
    return read_load(model, state, "expert_load", reset)


def read_load(model: nn.Module, state: ModelState, reader: str, reset: bool) -> ExpertLoad:
    """Return the load since the last reset of `reader`, and raise the errors of `expert_load`.

    `reader` is a name for the caller. A reset by one reader does not change the counts that other
    readers get.
    """
    check_tokens_are_counted(state, "expert_load")
    if state.meshes is not None:
        check_everyone_calls("expert_load", patience_of_rank_0=PATIENCE_OF_RANK_0)
    counts, (resets,) = sum_counts(state, reader, int(reset))
    ranks = 1 if state.meshes is None else world_size()
    if int(resets) not in (0, ranks):
        raise ValueError(
            f"{int(resets)} of {ranks} ranks called expert_load with reset=True and the others "
            f"with reset=False; pass the same value on every rank"
        )
    if reset:
        reset_counts(state, reader)
    ep_size = 1 if state.meshes is None else state.meshes.ep_size
    names = _list_layer_names(model, state)
    return ExpertLoad(counts.cpu(), names, ep_size, list_slots(state))


def list_slots(state: ModelState) -> Tensor | None:
    """Return the slots of the experts of all layers, [L, E] on the host; None in hub order."""
    slots_of_layers = [layer.slots_E for layer in state.moe_layers]
    if all(slots_E is None for slots_E in slots_of_layers):
        return None
    hub_order = torch.arange(state.num_experts, device="cpu")
    return torch.stack([hub_order if slots is None else slots.cpu() for slots in slots_of_layers])


def check_tokens_are_counted(state: ModelState, what: str) -> None:
    """Raise ValueError if the experts run in the model's own loop, which counts no tokens."""
    if state.config.experts_backend == "eager":
        raise ValueError(
            f"{what} has no counts: with experts_backend='eager' the experts run in the model's "
            f"own loop, which counts no tokens; patch with experts_backend='torch' or 'auto'"
        )


def _list_layer_names(model: nn.Module, state: ModelState) -> tuple[str, ...]:
    if state.stage is not None:
        return tuple(state.stage.moe_names)
    inner = without_adapters(unwrap(model))
    names = {layer.index: get_stock_name(name) for name, _, layer in iterate_experts_modules(inner)}
    return tuple(name for _, name in sorted(names.items()))


def _divide_max_by_mean(counts: Tensor) -> Tensor:
    counts = counts.double()
    return counts.amax(1) / counts.mean(1)
