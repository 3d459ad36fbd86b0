"""`expert_load(model)`: how evenly the tokens of training were spread over experts.

A layer of 4 experts on ep 2, of which each token takes 2, and 8 tokens of all ranks:

    counts           [7, 5, 3, 1]        mean 4
    busiest / mean   7 / 4 = 1.75        what the busiest expert computes, 1 where all are alike
    busiest rank     (7 + 5) / 8 = 1.5   the same of the ep ranks, which own 2 experts each
    dead             0                   experts that nobody chose
    entropy          1.212 nats          of the shares; ln 4 = 1.386 where all are alike
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_moe_ep.config import check_choice
from hf_moe_ep.ranks.together import ALONE, check_everyone_calls, world_size
from hf_moe_ep.routing.counts import count_anew, counts_of_all_ranks
from hf_moe_ep.state import STATE, ModelState, MoELayer, patched_state
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.module_names import stock_name, unwrap


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """Tokens per expert over all ranks; `print` it for a table.

    L layers with experts, E experts in each, D ranks of an ep group. Figures of a layer without
    tokens are nan.

    Attributes:
        counts: [L, E] int64 on the host: (token, slot) pairs, so a token counts once per expert.
        layers: names of the L experts modules, in the model's order.
        ep_size: D; rank r of an ep group owns experts r * E / D and those that follow.
        slots: [L, E] int64, what takes the place of these numbers where `balance_experts` has moved
            experts: rank r owns those with the slots r * E / D and so on. None where it has not.
    """

    counts: Tensor
    layers: tuple[str, ...]
    ep_size: int = 1
    slots: Tensor | None = None

    @property
    def max_over_mean(self) -> Tensor:
        """Pairs of a layer's busiest expert over the mean of its experts: [L], float64, >= 1."""
        return _max_over_mean(self.counts)

    @property
    def rank_max_over_mean(self) -> Tensor:
        """The same of the ep ranks instead of experts: [L], float64, >= 1."""
        counts = self.counts
        if self.slots is not None:
            counts = torch.empty_like(counts).scatter_(1, self.slots, counts)
        return _max_over_mean(counts.view(len(counts), self.ep_size, -1).sum(2))

    @property
    def worst_layer(self) -> int:
        """Index of the layer with the greatest `max_over_mean`."""
        return int(self.max_over_mean.nan_to_num(0.0).argmax())

    @property
    def dead(self) -> Tensor:
        """Experts without any token, of layers that had some: [L], int64."""
        return (self.counts == 0).sum(1) * (self.counts.sum(1) > 0)

    @property
    def entropy(self) -> Tensor:
        """-sum p ln p over the experts' shares p of a layer's pairs, in nats: [L], float64."""
        shares = self.counts.double() / self.counts.sum(1, keepdim=True)
        return torch.special.entr(shares).sum(1)

    @property
    def relative_entropy(self) -> Tensor:
        """`entropy` over ln E, its maximum: [L], float64, 1 where all experts are alike."""
        num_experts = self.counts.shape[1]
        if num_experts == 1:
            return self.entropy + 1
        return self.entropy / torch.tensor(float(num_experts)).double().log()

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
        for name, pairs, busiest, over_mean, of_ranks, dead, entropy in rows:
            if not pairs:
                lines.append(f"  {name:{width}}  {0:>12}  no tokens")
                continue
            expert = f"{over_mean:.2f} (e{busiest})"
            lines.append(
                f"  {name:{width}}  {pairs:>12,}  {expert:>14}  {of_ranks:>12.2f}  {dead:>4}  "
                f"{entropy:>14.3f}"
            )
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the heat map of layers x experts, tokens over the mean of the layer, into a file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from hf_moe_ep.routing.heat_map import draw_heat_maps

        draw_heat_maps([self.counts], [""], path)


def expert_load(model: nn.Module, reset: bool = True) -> ExpertLoad:
    """Return how many tokens of training each expert of each layer had, over all ranks.

        trainer.train()
        print(expert_load(model))

    Counted are forwards in training mode that lead to gradients, each once, however often
    checkpoints compute it: not evaluation, not what runs under `torch.no_grad()`. A token counts
    once for each expert that it chose, padding too, as experts compute it.

    Every rank calls this: one all-reduce, and the host waits for it.

    Args:
        model: patched; sharded or not.
        reset: count from here on the next time; else go on with the same.

    Returns:
        `ExpertLoad`: [L, E] counts since the last call with `reset`, the same on every rank.

    Raises:
        ValueError: the model is not patched, or patched with experts_backend="eager"; ranks
            disagree about `reset`.
        RuntimeError: other ranks do not call this.
    """
    check_choice("reset", reset, (True, False))
    state = patched_state(model)
    return load_of_reader(model, state, "expert_load", reset)


def load_of_reader(model: nn.Module, state: ModelState, reader: str, reset: bool) -> ExpertLoad:
    """Return the load since this reader's own zero; raises as `expert_load`."""
    check_counts(state, "expert_load")
    if state.meshes is not None:
        check_everyone_calls("expert_load", alone=ALONE)
    counts, (resets,) = counts_of_all_ranks(state, reader, int(reset))
    ranks = 1 if state.meshes is None else world_size()
    if int(resets) not in (0, ranks):
        raise ValueError(
            f"{int(resets)} of {ranks} ranks called expert_load with reset=True and the others "
            f"with reset=False; give every rank the same"
        )
    if reset:
        count_anew(state, reader)
    ep_size = 1 if state.meshes is None else state.meshes.ep_size
    return ExpertLoad(counts.cpu(), _names_of_layers(model), ep_size, slots_of_layers(state))


def slots_of_layers(state: ModelState) -> Tensor | None:
    """Return where the experts of all layers lie, [L, E] on the host; None in hub order."""
    placements = [layer.placement for layer in state.moe_layers]
    if all(placement is None for placement in placements):
        return None
    hub_order = torch.arange(state.num_experts)
    return torch.stack([hub_order if one is None else one.cpu() for one in placements])


def check_counts(state: ModelState, what: str) -> None:
    """Raise where the model's own loop computes experts, past everything that counts."""
    if state.config.experts_backend == "eager":
        raise ValueError(
            f"{what} has no counts: experts_backend='eager' is the model's own loop, which "
            f"hf_moe_ep does not see; patch with experts_backend='torch' or 'auto'"
        )


def _names_of_layers(model: nn.Module) -> tuple[str, ...]:
    names = {
        layer.index: stock_name(name)
        for name, module in without_adapters(unwrap(model)).named_modules()
        if isinstance(layer := vars(module).get(STATE), MoELayer)
    }
    return tuple(name for _, name in sorted(names.items()))


def _max_over_mean(counts: Tensor) -> Tensor:
    counts = counts.double()
    return counts.amax(1) / counts.mean(1)
