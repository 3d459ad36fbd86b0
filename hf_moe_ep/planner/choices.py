"""Draw the experts that the tokens of a planned step choose, evenly or as often as in a real run.

`Choices` stores how often each expert is chosen. Its draws are reproducible, because the seed is
the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_moe_ep.routing.load import ExpertLoad


@dataclass(frozen=True)
class Choices:
    """How often each expert is chosen.

    Attributes:
        top_k: experts per token.
        share_LE: the share of all tokens that choose each expert; one row per MoE layer, or a
            single row for all layers. Each row sums to `top_k`.
        groups: the number of groups of equal size into which the router divides the experts.
        groups_per_token: the number of groups from which a token may choose. A token of DeepSeek-V3
            chooses its 8 experts from 4 of 8 groups, so it is sent to at most 4 ranks if each rank
            has one group.
    """

    top_k: int
    share_LE: Tensor
    groups: int = 1
    groups_per_token: int = 1

    @classmethod
    def evenly(
        cls, num_experts: int, top_k: int, groups: int = 1, groups_per_token: int = 1
    ) -> Choices:
        """Return choices in which all experts are chosen equally often."""
        share_LE = torch.full((1, num_experts), top_k / num_experts, dtype=torch.float64)
        return cls(top_k, share_LE, groups, groups_per_token)

    @classmethod
    def of_load(cls, load: ExpertLoad, top_k: int, layers: int) -> Choices:
        """Return choices in which experts are chosen as often as in a recorded run.

        A share above 1 is set to 1, because a token chooses an expert at most once, and the shares
        of the other experts grow until a row sums to `top_k`. The load does not record which
        experts a token chose together, so groups of experts are ignored.

        Raises:
            ValueError: the load has another number of layers, or a layer without tokens.
        """
        counts_LE = load.counts.double()
        if len(counts_LE) != layers or not bool((counts_LE.sum(1) > 0).all()):
            raise ValueError(
                f"load has {len(counts_LE)} MoE layers, "
                f"{int((counts_LE.sum(1) > 0).sum())} of them with tokens, and the model has "
                f"{layers} MoE layers; call expert_load(model) after a training step of this model"
            )
        return cls(top_k, torch.stack([_compute_shares(counts_E, top_k) for counts_E in counts_LE]))

    def find_busiest_rank(self, ep_size: int) -> int:
        """Return the ep rank with the largest load in any single layer.

        A rank's load in a layer is the sum of its experts' shares. If several ranks have the
        largest load, the first of them is returned.
        """
        load_LD = self.share_LE.view(len(self.share_LE), ep_size, -1).sum(2)
        return int((load_LD - 1e-9 * torch.arange(ep_size)).amax(0).argmax())

    def draw(self, layer: int, tokens: int) -> Tensor:
        """Draw K = `top_k` different experts for each of T = `tokens` tokens; return ids (T, K).

        The method is systematic sampling (Madow 1949). Each token places the experts on a line in
        random order, each expert as long as its share, and marks K points at distances of 1. It
        chooses the experts at these points. Example: K = 2, and experts 0, 1 and 2 have the shares
        1.0, 0.5 and 0.5. The order 1, 0, 2 gives the line

            1 1 | 0 0 0 0 | 2 2     points 0.3 and 1.3 choose experts 1 and 0
            0  0.5       1.5   2    points 0.7 and 1.7 choose experts 0 and 2

        With groups of experts, only the experts of a token's groups are on its line.
        """
        share_E = self.share_LE[layer % len(self.share_LE)]
        generator = torch.Generator().manual_seed(tokens)
        order_TE = torch.rand(tokens, len(share_E), generator=generator).argsort(1)
        share_TE = share_E[order_TE]
        if self.groups_per_token < self.groups:
            place_TG = torch.rand(tokens, self.groups, generator=generator).argsort(1)
            group_TE = order_TE // (len(share_E) // self.groups)
            in_groups_TE = place_TG.gather(1, group_TE) < self.groups_per_token
            share_TE = share_TE * in_groups_TE * (self.groups / self.groups_per_token)
        end_TE = share_TE.cumsum(1)
        # Rounding may leave the line a little shorter than K.
        first_T1 = torch.rand(tokens, 1, generator=generator, dtype=torch.float64) * (1 - 1e-6)
        points_TK = (first_T1 + torch.arange(self.top_k)) * (end_TE[:, -1:] / self.top_k)
        return order_TE.gather(1, torch.searchsorted(end_TE, points_TK, right=True))


def _compute_shares(counts_E: Tensor, top_k: int) -> Tensor:
    """Return the share of tokens that choose each expert: at most 1, and `top_k` in all."""
    share_E = counts_E / counts_E.sum() * top_k
    while bool((share_E > 1 + 1e-9).any()):
        is_full_E = share_E >= 1
        rest_E = torch.where(is_full_E, 0.0, share_E)
        if not bool(rest_E.any()):  # fewer experts than `top_k` have tokens
            rest_E = (~is_full_E).double()
        rest_E *= (top_k - is_full_E.sum()) / rest_E.sum()
        share_E = torch.where(is_full_E, 1.0, rest_E)
    return share_E
