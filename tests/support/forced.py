"""A stock model that is made to choose: `torch.topk` over its experts gives what a test says.

Weights of what was chosen can be given as well.

Nothing of `hf_moe_ep` is in here: it is the truth that a replay is compared with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def random_ids(
    batch: int, sequence: int, layers: int, num_experts: int, top_k: int, seed: int = 0
) -> Tensor:
    """[B, S, L, K] of int16: K different experts for each token and layer, in any order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch, sequence, layers, num_experts, generator=generator)
    return drawn.argsort(-1)[..., :top_k].to(torch.int16)


@contextmanager
def forced_topk(num_experts: int, ids: Tensor) -> Iterator[list[Tensor]]:
    """Answer one topk of each layer, in their order, from ids [B, S, L, K]; -1 is what it would be.

    Yields what topk itself would have chosen, [T, K] of each layer. All layers have to have run.
    """
    by_layer = ids.long().flatten(0, 1).unbind(1)
    lives: list[Tensor] = []
    original = torch.topk

    def topk(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        found = original(scores, k, *args, **kwargs)
        tokens, top_k = by_layer[0].shape
        its_own = scores.shape[-1] == num_experts and found.indices.numel() == tokens * top_k
        if not its_own or len(lives) == len(by_layer):
            return found
        wanted = by_layer[len(lives)]
        live = found.indices.view(tokens, top_k)
        lives.append(live)
        chosen = torch.where(wanted < 0, live, wanted).view(found.indices.shape)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def of_tensor(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        return topk(scores, *args, **kwargs)

    with mock.patch.object(torch, "topk", topk), mock.patch.object(Tensor, "topk", of_tensor):
        yield lives
    assert len(lives) == len(by_layer), f"{len(lives)} of {len(by_layer)} layers were forced"


@contextmanager
def forced_weights(experts: Sequence[nn.Module], ids: Tensor, weights: Tensor) -> Iterator[None]:
    """Weigh experts, one module of each layer, by weights [B, S, L, K] where ids are not -1."""

    def reweigh(place: int) -> Any:
        given = ids[:, :, place].flatten(0, 1) >= 0
        mine = weights[:, :, place].flatten(0, 1)

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return *args[:2], torch.where(given, mine.to(args[2].dtype), args[2])

        return hook

    hooks = [e.register_forward_pre_hook(reweigh(place)) for place, e in enumerate(experts)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
