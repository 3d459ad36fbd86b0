"""Make a stock model use given routes: `torch.topk` over its experts returns the ids of a test.

`force_weights` replaces the routing weights as well. This file does not use `hf_moe_ep`, because
the forced models are the reference for routing replay.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def draw_random_ids(
    batch: int, sequence: int, layers: int, num_experts: int, top_k: int, seed: int = 0
) -> Tensor:
    """Draw K different experts for each token and layer: int16 ids [B, S, L, K], in any order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch, sequence, layers, num_experts, generator=generator)
    return drawn.argsort(-1)[..., :top_k].to(torch.int16)


@contextmanager
def force_topk(num_experts: int, ids: Tensor, calls_per_layer: int = 1) -> Iterator[list[Tensor]]:
    """Make one topk of each layer return `ids` [B, S, L, K]. An id of -1 leaves the choice to topk.

    Yields a list with the ids [T, K] that topk would have chosen in each layer. All layers must run
    inside the block, in their order. If a layer calls topk over the experts more than once, the
    last of these calls is forced.
    """
    by_layer = ids.long().flatten(0, 1).unbind(1)
    chosen_by_topk: list[Tensor] = []
    original = torch.topk
    num_calls = 0

    def topk(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        out = original(scores, k, *args, **kwargs)
        tokens, top_k = by_layer[0].shape
        is_routing = scores.shape[-1] == num_experts and out.indices.numel() == tokens * top_k
        if not is_routing or len(chosen_by_topk) == len(by_layer):
            return out
        num_calls += 1
        if num_calls % calls_per_layer:
            return out
        given = by_layer[len(chosen_by_topk)]
        chosen = out.indices.view(tokens, top_k)
        chosen_by_topk.append(chosen)
        indices = torch.where(given < 0, chosen, given).view(out.indices.shape)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def tensor_topk(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        return topk(scores, *args, **kwargs)

    with mock.patch.object(torch, "topk", topk), mock.patch.object(Tensor, "topk", tensor_topk):
        yield chosen_by_topk
    num_forced = len(chosen_by_topk)
    assert num_forced == len(by_layer), f"{num_forced} of {len(by_layer)} layers were forced"


@contextmanager
def force_weights(experts: Sequence[nn.Module], ids: Tensor, weights: Tensor) -> Iterator[None]:
    """Replace the routing weights by `weights` [B, S, L, K] where `ids` are not -1.

    `experts` are the experts modules, one per layer.
    """

    def make_hook(layer: int) -> Any:
        given_TK = ids[:, :, layer].flatten(0, 1) >= 0
        weights_TK = weights[:, :, layer].flatten(0, 1)

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return *args[:2], torch.where(given_TK, weights_TK.to(args[2].dtype), args[2])

        return hook

    hooks = [e.register_forward_pre_hook(make_hook(layer)) for layer, e in enumerate(experts)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
