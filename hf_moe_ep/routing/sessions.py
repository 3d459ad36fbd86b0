"""Call the methods of an open `record` or `replay` block, a `Session`, from hooks of the model.

    hooks on       call
    the model      `begin` before the model's forward, with the shape of the batch; `end` after it
    the owners     `enter` and `leave`, before and after the forward of an owner: a module that
                   contains a router and its experts. Between the two calls topk may be replaced
    the experts    `receive_choice` before the experts' forward, with the ids and weights that the
                   experts receive

A session ignores the recompute of a checkpointed layer in backward, because the layer's
`CheckpointedRouting` (moe/recompute.py) repeats the choice of the layer's first run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_moe_ep.routing.layers import RoutedLayer, RoutedLayers
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, PackageHook, RoutingSession
from hf_moe_ep.upstream.models import bind_forward, find_tokens, get_output_head
from hf_moe_ep.upstream.modules import runs_compiled

_EXPERTS_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


class Forward(NamedTuple):
    """The input of one call of the model.

    Attributes:
        batch, sequence: the number of sequences, and the number of tokens of a whole sequence.
        part: with sp_size or cp_size > 1, this rank's slice of each sequence; otherwise None.
    """

    batch: int
    sequence: int
    part: Slice | None
    device: torch.device

    @property
    def tokens(self) -> int:
        """The number of tokens per sequence in this rank's layers, with the slice's padding."""
        return self.sequence if self.part is None else self.part.local_length

    @property
    def rows(self) -> int:
        """The number of tokens of all sequences in this rank's layers."""
        return self.batch * self.tokens


class Session(RoutingSession):
    """A base class of open blocks, with the methods that the hooks call during a forward."""

    def begin(self, forward: Forward) -> None:
        """Begin a forward of the whole model."""

    def end(self, completed: bool) -> None:
        """End a forward of the whole model; `completed` is false if it raised an error."""

    def enter(self, layer: RoutedLayer, args: tuple[Any, ...]) -> None:
        """Begin the forward of a layer's owner."""

    def leave(self) -> None:
        """End the forward of a layer's owner, even after an error."""

    def receive_choice(self, layer: RoutedLayer, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Record or check the experts of each token, and return the routing weights to use."""
        raise NotImplementedError


@contextmanager
def register_session_hooks(
    root: nn.Module, state: ModelState, layers: RoutedLayers, session: Session
) -> Iterator[None]:
    """Register the hooks that call the methods of a session, and remove the hooks after the block.

    Raises:
        ValueError: another session is open, or the model was not cut into its pipeline stages.
    """
    if state.routing is not None:
        raise ValueError(
            "a record() or replay() block of this model is open already; leave that block first"
        )
    if state.stage is None and (state.config.pp_size or 1) > 1:
        raise ValueError(
            f"routing of a model with pp_size={state.config.pp_size} can be recorded and replayed "
            f"once the model is sharded; shard it first"
        )
    head = get_output_head(root)
    owners = (module for module in root.modules() if any(x is head for x in module.children()))
    model = root if head is None else next(owners, root)
    handles = [
        model.register_forward_pre_hook(_Begin(session), with_kwargs=True),
        model.register_forward_hook(_End(session), always_call=True),
    ]
    for layer in layers.routed:
        handles += [
            layer.owner.register_forward_pre_hook(_Enter(session, layer)),
            layer.owner.register_forward_hook(_Leave(session), always_call=True),
            layer.experts.register_forward_pre_hook(_Receive(session, layer), with_kwargs=True),
        ]
    state.routing = session
    try:
        yield
    finally:
        # After a KeyboardInterrupt torch has not called the forward hooks.
        session.leave()
        state.routing = None
        for handle in handles:
            handle.remove()


class _Hook(PackageHook):
    """A hook of a session. In a deep copy of the model it has no session, and does nothing."""

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session


class _LayerHook(_Hook):
    def __init__(self, session: Session, layer: RoutedLayer) -> None:
        super().__init__(session)
        self._layer = layer


class _Begin(_Hook):
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._session is None:
            return
        if runs_compiled():
            raise ValueError(
                "routing cannot be recorded or replayed within torch.compile; inside the block "
                "call the original model, not its compiled wrapper"
            )
        arguments = bind_forward(model, args, kwargs)
        tokens = find_tokens(arguments)
        if tokens is None:
            return  # without input_ids and inputs_embeds, the model itself raises an error
        batch, sequence = tokens.shape[:2]
        self._session.begin(Forward(batch, sequence, arguments.get(SLICE), tokens.device))


class _End(_Hook):
    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._session is not None:
            self._session.end(output is not None)


# The modules with the following three hooks run inside of compiled layers. `disable` keeps
# torch.compile from tracing the hooks.
class _Enter(_LayerHook):
    @torch.compiler.disable
    def __call__(self, owner: nn.Module, args: tuple[Any, ...]) -> None:
        if self._session is not None:
            self._session.enter(self._layer, args)


class _Leave(_Hook):
    @torch.compiler.disable
    def __call__(self, owner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._session is not None:
            self._session.leave()


class _Receive(_LayerHook):
    @torch.compiler.disable
    def __call__(
        self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._session is None:
            return None
        arguments = dict(zip(_EXPERTS_ARGUMENTS, args, strict=False)) | kwargs
        weights = arguments["top_k_weights"]
        new_weights = self._session.receive_choice(self._layer, arguments["top_k_index"], weights)
        if new_weights is weights:
            return None
        return (), arguments | {"top_k_weights": new_weights}
