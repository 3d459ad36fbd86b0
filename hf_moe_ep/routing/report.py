"""Report how many routes were replayed, and how often the router agreed with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_moe_ep.ranks.all_ranks import gather


@dataclass(frozen=True)
class ReplayReport:
    """The report of one `replay` block on this rank, with pipeline stages on this rank's layers.

    Attributes:
        replayed: the number of (token, layer) pairs that had routes.
        live: the number of (token, layer) pairs without routes, including the padding of a sequence
            that is split over ranks.
        pairs: {decoder layer: (agreed, replayed)}, where `replayed` is the number of replayed
            (token, expert) pairs, and `agreed` the number of these pairs that the router itself
            would have chosen as well.
    """

    replayed: int
    live: int
    pairs: Mapping[int, tuple[int, int]]

    @property
    def agreement(self) -> float:
        """The share of replayed (token, expert) pairs that the router itself would have chosen.

        The agreement is NaN if nothing was replayed, as in a pipeline stage of dense layers.
        """
        return _divide(*(sum(pair[index] for pair in self.pairs.values()) for index in (0, 1)))

    @property
    def by_layer(self) -> dict[int, float]:
        """The agreement of each decoder layer."""
        return {layer: _divide(*pairs) for layer, pairs in self.pairs.items()}

    def over_ranks(self) -> ReplayReport:
        """Add up the reports of all ranks; every rank calls this."""
        reports = gather((self.replayed, self.live, dict(self.pairs)))
        # Each pipeline stage has the pairs of its own layers.
        layers = sorted({layer for _, _, pairs in reports for layer in pairs})
        summed = {}
        for layer in layers:
            pairs_by_rank = [pairs.get(layer, (0, 0)) for _, _, pairs in reports]
            agreed = sum(agreed for agreed, _ in pairs_by_rank)
            summed[layer] = agreed, sum(replayed for _, replayed in pairs_by_rank)
        return ReplayReport(sum(r[0] for r in reports), sum(r[1] for r in reports), summed)


def _divide(agreed: int, replayed: int) -> float:
    return agreed / replayed if replayed else math.nan


class Counts:
    """The counts of one replay block by layer, on the device. Only `report` is a host sync."""

    def __init__(self, layers: tuple[int, ...], top_k: int) -> None:
        self._layers, self._top_k = layers, top_k
        self._given_and_agreed: dict[int, Tensor] = {}
        self._rows = 0

    def add(self, layer: int, ids_TK: Tensor, live_TK: Tensor, given_T1: Tensor) -> None:
        """Count a layer's tokens with routes, and the replayed ids that the router chose as well.

        `given_T1` is the mask of the tokens with routes, and `live_TK` the router's own choice.
        """
        agrees_TK = (ids_TK.unsqueeze(2) == live_TK.unsqueeze(1)).any(2)
        counts = torch.stack([given_T1.sum(), (agrees_TK & given_T1).sum()])
        earlier = self._given_and_agreed.get(layer)
        self._given_and_agreed[layer] = counts if earlier is None else earlier + counts
        self._rows += ids_TK.shape[0]

    def report(self) -> ReplayReport:
        """Copy the counts to the host and return the report."""
        counts = {layer: sums.tolist() for layer, sums in self._given_and_agreed.items()}
        replayed = sum(given for given, _ in counts.values())
        pairs = {
            layer: (counts[layer][1], counts[layer][0] * self._top_k) if layer in counts else (0, 0)
            for layer in self._layers
        }
        return ReplayReport(replayed, self._rows - replayed, pairs)
