"""The hooks of an open `record` or `replay`, and what both do with a forward.

    the model      before: how long its sequences are, and how they are split; behind: the end
    the owner      of a router and its experts: within it, until the experts run, topk is answered
    the experts    are handed the choice: taken down, or compared with what was to be replayed

A run in backward is none of these: a checkpointed layer does what its frame kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_moe_ep.dispatcher import RoutesTold
from hf_moe_ep.routing.layers import RoutedLayer, RoutedLayers
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, Ours
from hf_moe_ep.upstream.models import bind_forward, output_head
from hf_moe_ep.upstream.modules import own_children, runs_compiled

_OF_EXPERTS = ("hidden_states", "top_k_index", "top_k_weights")


class Forward(NamedTuple):
    """How the model was called: B rows of S tokens, of which `part` is this rank's."""

    batch: int
    sequence: int
    part: Slice | None
    device: torch.device

    @property
    def tokens(self) -> int:
        """Tokens of a row that this rank's layers see, padding of its slice included."""
        return self.sequence if self.part is None else self.part.local

    @property
    def rows(self) -> int:
        """Tokens that a layer of this rank sees."""
        return self.batch * self.tokens


class Session(Protocol):
    """What hooks tell of a forward."""

    @property
    def told(self) -> RoutesTold:
        """See `RoutingSession`."""

    @property
    def refusal(self) -> ValueError | None:
        """See `RoutingSession`."""

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """See `RoutingSession`."""

    def begin(self, forward: Forward) -> None:
        """Take note of a forward of the whole model."""

    def end(self, completed: bool) -> None:
        """End it; not completed where it raised."""

    def enter(self, layer: RoutedLayer, args: tuple[Any, ...]) -> None:
        """Begin the module that owns router and experts of a layer."""

    def leave(self) -> None:
        """End it, however."""

    def at_experts(self, layer: RoutedLayer, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Look at what experts are handed, and return the weights that they compute with."""


class OpenBlock:
    """What `record` and `replay` open: a copy of the model that is made inside has none open."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


@contextmanager
def hooked(
    root: nn.Module, state: ModelState, layers: RoutedLayers, session: Session
) -> Iterator[None]:
    """Let a session see the forwards of a model, inside the block.

    Raises:
        ValueError: another one is open.
    """
    if state.routing is not None:
        raise ValueError(
            "a record or replay of this model's routing is open already; leave its block first"
        )
    head = output_head(root)
    owners = (module for module in root.modules() if head in own_children(module))
    model = root if head is None else next(owners, root)
    handles = [
        model.register_forward_pre_hook(_Begin(session), with_kwargs=True),
        model.register_forward_hook(_End(session), always_call=True),
    ]
    for layer in layers.routed:
        handles += [
            layer.owner.register_forward_pre_hook(_Enter(session, layer)),
            layer.owner.register_forward_hook(_Leave(session), always_call=True),
            layer.experts.register_forward_pre_hook(_AtExperts(session, layer), with_kwargs=True),
        ]
    state.routing = session
    try:
        yield
    finally:
        # Where a forward was interrupted from the keyboard, hooks behind it did not run.
        session.leave()
        state.routing = None
        for handle in handles:
            handle.remove()


def exchanges_rows(state: ModelState) -> bool:
    """Whether MoE layers exchange rows; a frame keeps their choice for that."""
    return state.meshes is not None and state.meshes.ep_size > 1


class _Hook(Ours):
    """A hook that tells a session; one without does nothing, see `OpenBlock`."""

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session


class _HookOfLayer(_Hook):
    def __init__(self, session: Session, layer: RoutedLayer) -> None:
        super().__init__(session)
        self._layer = layer


class _Begin(_Hook):
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._session is None:
            return
        if runs_compiled():
            raise ValueError(
                "routing cannot be recorded or replayed within torch.compile; call the model that "
                "was compiled, not its compiled wrapper, inside of the block"
            )
        given = bind_forward(model, args, kwargs)
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        if tokens is None:
            return  # the model says that it wants one of them
        batch, sequence = tokens.shape[:2]
        self._session.begin(Forward(batch, sequence, given.get(SLICE), tokens.device))


class _End(_Hook):
    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._session is not None:
            self._session.end(output is not None)


class _Enter(_HookOfLayer):
    def __call__(self, owner: nn.Module, args: tuple[Any, ...]) -> None:
        if self._session is not None:
            self._session.enter(self._layer, args)


class _Leave(_Hook):
    def __call__(self, owner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._session is not None:
            self._session.leave()


class _AtExperts(_HookOfLayer):
    def __call__(
        self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._session is None:
            return None
        given = dict(zip(_OF_EXPERTS, args, strict=False)) | kwargs
        weights = given["top_k_weights"]
        used = self._session.at_experts(self._layer, given["top_k_index"], weights)
        return None if used is weights else ((), given | {"top_k_weights": used})
