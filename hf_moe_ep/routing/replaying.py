"""Replay routes: make the routers choose the given experts of each token in each layer.

While a router runs, `torch.topk` returns the expert ids of the routes. The router still computes
its own scores, and from these scores the routing weights and the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.dispatcher import RouteSource
from hf_moe_ep.moe.chosen_topk import ChosenTopK
from hf_moe_ep.moe.recompute import CheckpointedRouting
from hf_moe_ep.ops.devices import copy_to_device
from hf_moe_ep.routing.layers import RoutedLayer, RoutedLayers
from hf_moe_ep.routing.report import Counts
from hf_moe_ep.routing.routes import LIVE
from hf_moe_ep.routing.sessions import Forward, Session
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.autograd_modes import assert_later, backward_is_running, hidden_from_modes


class Replaying(Session):
    """An open `replay` block: every forward in the block replays the routes of one batch."""

    def __init__(
        self, state: ModelState, layers: RoutedLayers, adapters_off: Callable[[], bool]
    ) -> None:
        self._state, self._layers = state, layers
        self._adapters_off, self._were_off = adapters_off, adapters_off()
        self.counts = Counts(layers.own_keys, layers.top_k)
        self._ids_BSLK: Tensor | None = None
        self._weights_BSLK: Tensor | None = None
        # True during a forward that is not replayed.
        self._is_not_replayed = False
        # The routes of this rank in the current forward, by layer.
        self._ids_LTK: Tensor | None = None
        self._weights_LTK: Tensor | None = None
        # In the current layer: the mode that replaces topk, and the number of replaced calls.
        self._mode: ChosenTopK | None = None
        self._num_topks = 0
        # In the current layer: the ids that the last call of topk returned, the ids that the router
        # itself would have chosen, and the mask of the tokens that have routes.
        self._returned_TK: Tensor | None = None
        self._own_choice_TK: Tensor | None = None
        self._has_routes_T1: Tensor | None = None

    def set_routes(self, ids_BSLK: Tensor, weights_BSLK: Tensor | None) -> None:
        """Set the routes to replay; their third dim has the layers of `RoutedLayers.keys`."""
        self._ids_BSLK, self._weights_BSLK = ids_BSLK, weights_BSLK

    def refuse(self, error: ValueError) -> None:
        """Raise `error`, or store it if the ranks compare their routes in the next forward.

        After that comparison every rank raises an error.
        """
        if not ranks_compare_routes(self._state):
            raise error
        self.refusal = error

    @property
    def route_source(self) -> RouteSource:
        if self.refusal is not None:
            return RouteSource.REFUSED
        return RouteSource.LIVE if self._is_not_replayed else RouteSource.REPLAYED

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        if self._adapters_off() != self._were_off:
            return {}
        if self.refusal is not None or self._ids_BSLK is None:
            # A tensor of another name makes the comparison with a rank that has routes fail.
            name = "no routes" if self.refusal is None else "refused routes"
            return {name: torch.ones(1, dtype=torch.int64, device=device)}
        tensors = {"routes": self._ids_BSLK.to(device)}
        if self._weights_BSLK is not None:
            tensors["weights of routes"] = self._weights_BSLK.to(device)
        return tensors

    def begin_batch(self, num_rows: int, num_tokens: int) -> None:
        if self._adapters_off() == self._were_off:
            self._check_size(num_rows, num_tokens)

    def _check_size(self, num_rows: int, num_tokens: int) -> None:
        if self._ids_BSLK is None or self.refusal is not None:
            return
        rows, tokens = self._ids_BSLK.shape[:2]
        if (rows, tokens) != (num_rows, num_tokens):
            self.refuse(
                ValueError(
                    f"routes of {rows} rows of {tokens} tokens cannot be replayed in a "
                    f"forward of {num_rows} rows of {num_tokens}: one replay() is "
                    f"for the whole batch of one call of the model"
                )
            )

    def begin(self, forward: Forward) -> None:
        """Slice the routes as the inputs of this forward are sliced."""
        # If the adapters were switched on or off inside the block, this forward computes another
        # model, such as a reference model, and is not replayed.
        self._is_not_replayed = self._adapters_off() != self._were_off
        if self._is_not_replayed:
            return
        if self._state.stage is None:
            self._check_size(forward.batch, forward.sequence)
        if self.refusal is None:
            if self._ids_BSLK is not None:
                self._slice_routes(forward)
        elif not self._state.exchanges_rows:
            raise self.refusal

    def end(self, completed: bool) -> None:
        self._is_not_replayed = False

    def enter(self, layer: RoutedLayer, args: tuple[Any, ...]) -> None:
        """Replace topk until the layer's experts run."""
        if not self._must_replay():
            return
        # If the decoder is called without the model, `begin` has not run, and the inputs of the
        # decoder are not split over ranks.
        if self._ids_LTK is None:
            assert self._ids_BSLK is not None
            batch, sequence = self._ids_BSLK.shape[:2]
            self._slice_routes(Forward(batch, sequence, None, args[0].device))
        assert self._ids_LTK is not None
        ids_TK = self._ids_LTK[self._find_position(layer)].long()
        has_routes_T1 = ids_TK[:, :1] != LIVE
        self._has_routes_T1, self._returned_TK, self._num_topks = has_routes_T1, None, 0

        def decide(ids_TK: Tensor, live: Callable[[], Tensor]) -> Tensor:
            self._num_topks += 1
            self._own_choice_TK = live()
            self._returned_TK = torch.where(has_routes_T1, ids_TK, self._own_choice_TK)
            return self._returned_TK

        self._mode = ChosenTopK(self._layers.num_experts, lambda: ids_TK, decide)
        self._mode.__enter__()

    def leave(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def receive_choice(self, layer: RoutedLayer, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Check that the experts receive the replayed ids, and return the routing weights to use.

        A token with routes gets the weights of its routes, if the routes have weights. Otherwise
        the weights are `weights_TK`, the router's weights.
        """
        self.leave()
        if not self._must_replay():
            return weights_TK
        error = self._find_error(layer, ids_TK)
        if error is not None:
            if not self._state.exchanges_rows:
                raise error
            self.refusal = error  # this layer's exchange makes the other ranks raise an error, too
            return weights_TK
        assert self._returned_TK is not None and self._has_routes_T1 is not None
        with hidden_from_modes():
            if ids_TK is not self._returned_TK:
                assert_later(
                    (ids_TK == self._returned_TK).all(),
                    f"{layer.name} chose by topk, but the experts got other ids than topk returned",
                )
            self._count(layer)
            checkpointed: CheckpointedRouting | None = self._state.checkpointed_routing
            if checkpointed is not None and not self._state.exchanges_rows:
                checkpointed.keep(layer.index, self._returned_TK, None, self._num_topks)
            if self._weights_LTK is None:
                return weights_TK
            stored_TK = self._weights_LTK[self._find_position(layer)].to(weights_TK.dtype)
            if checkpointed is not None:
                checkpointed.keep_weights(layer.index, stored_TK, self._has_routes_T1)
        return torch.where(self._has_routes_T1, stored_TK, weights_TK)

    def _find_error(self, layer: RoutedLayer, ids_TK: Tensor) -> ValueError | None:
        """Return an error if the routes cannot be replayed in this layer, otherwise None."""
        if self._returned_TK is None or self._returned_TK.shape != ids_TK.shape:
            assert self._ids_LTK is not None
            return ValueError(
                f"{layer.name} did not choose by one torch.topk for the {self._ids_LTK.shape[1]} "
                f"tokens of the routes (its experts got ids {list(ids_TK.shape)}), so its routes "
                f"cannot be replayed"
            )
        reads_stored_weights = self._state.config.experts_backend != "eager"
        is_checkpointed = self._state.checkpointed_routing is not None
        if self._weights_LTK is None or not is_checkpointed or reads_stored_weights:
            return None
        return ValueError(
            f"weights of routes cannot be replayed if layers are checkpointed and "
            f"experts_backend='eager': in the recompute of backward, the experts of {layer.name} "
            f"would use the router's weights; use experts_backend='torch', or replay without "
            f"weights, or train without checkpointing"
        )

    def _count(self, layer: RoutedLayer) -> None:
        if backward_is_running():
            return
        assert self._ids_LTK is not None and self._own_choice_TK is not None
        assert self._has_routes_T1 is not None
        ids_TK = self._ids_LTK[self._find_position(layer)]
        self.counts.add(layer.decoder_layer, ids_TK, self._own_choice_TK, self._has_routes_T1)

    def _find_position(self, layer: RoutedLayer) -> int:
        return self._layers.own_keys.index(layer.decoder_layer)

    def _must_replay(self) -> bool:
        """Return True if the current layer must replay the given expert ids.

        In a recompute the `CheckpointedRouting` repeats the ids instead.
        """
        if self._ids_BSLK is None or self._is_not_replayed or self.refusal is not None:
            return False
        checkpointed = self._state.checkpointed_routing
        return checkpointed is None or not checkpointed.is_recompute

    def _slice_routes(self, forward: Forward) -> None:
        """Copy the routes to the device of the forward, and keep only this rank's tokens."""
        assert self._ids_BSLK is not None
        ids = copy_to_device(self._take_micro_batch(self._ids_BSLK), forward.device)
        self._ids_LTK = _take_own_tokens(
            ids if ids.dtype.is_signed else ids.to(torch.int16), forward, LIVE
        )
        if self._weights_BSLK is not None:
            weights = copy_to_device(self._take_micro_batch(self._weights_BSLK), forward.device)
            self._weights_LTK = _take_own_tokens(weights, forward, 0)

    def _take_micro_batch(self, x_BSLK: Tensor) -> Tensor:
        """With pipeline stages, take the rows of the micro-batch and the layers of the stage."""
        stage, layers = self._state.stage, self._layers
        if stage is None:
            return x_BSLK
        own_indices = [layers.keys.index(key) for key in layers.own_keys]
        return x_BSLK[stage.boundary.rows][:, :, own_indices]


def _take_own_tokens(x_BSLK: Tensor, forward: Forward, fill: int) -> Tensor:
    """Return [L, T, K]: for each layer, this rank's slice of each sequence, padded with `fill`."""
    if forward.part is not None:
        x_BSLK = forward.part.take(x_BSLK, 1, fill=fill)
    return x_BSLK.flatten(0, 1).movedim(1, 0).contiguous()


def ranks_compare_routes(state: ModelState) -> bool:
    """Return True if ranks compare their routes, or their `RouteSource`s, in a forward."""
    meshes = state.meshes
    shares_batch = meshes is not None and (meshes.ranks_per_batch > 1 or meshes.pp_size > 1)
    return state.exchanges_rows or shares_batch
