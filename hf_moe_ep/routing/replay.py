"""`RoutingReplay`: take down which experts a model chooses, and have it choose the same again.

Two names of others for one need, in training by reinforcement (Megatron-LM and verl use them, see
https://github.com/volcengine/verl and https://arxiv.org/abs/2507.18071):

    R2   the forward that computes old log-probabilities is recorded; the forward of the update
         replays it
    R3   the inference engine reports what it chose; every forward over its samples replays that

Only indices are replayed. Scores are those of the live router at these indices, made into weights
as its architecture does, so it still learns. Losses that balance experts count what the router
itself would choose: set their coefficient to 0 where that is not wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from hf_moe_ep.moe.recompute import CheckpointWatch
from hf_moe_ep.routing.check_routes import check_ids, select_layers
from hf_moe_ep.routing.layers import find_routed_layers
from hf_moe_ep.routing.recording import Recording
from hf_moe_ep.routing.replaying import Replaying
from hf_moe_ep.routing.report import ReplayReport
from hf_moe_ep.routing.routes import Routes
from hf_moe_ep.routing.sessions import hooked
from hf_moe_ep.state import STATE, ModelState, patched_state
from hf_moe_ep.upstream.adapters import adapter_layers
from hf_moe_ep.upstream.modules import is_compiled


class RoutingReplay:
    """Records and replays the routing of one patched model.

        replay = RoutingReplay(model)
        with torch.no_grad(), replay.record() as routes:
            old = log_probabilities(model(input_ids))
        ...
        with replay.replay(routes):
            loss_of(model(input_ids), old).backward()

    The model may be sharded, prepared by Accelerate or wrapped by PEFT. Outside of the blocks
    nothing is different from a model without it. Backward may run inside of a block or behind it;
    checkpointed layers compute again with the routes of their own forward. (A checkpoint that
    neither Transformers nor torch's wrapper made has to do its backward inside.)
    """

    def __init__(self, model: nn.Module, *, on_missing: str = "live") -> None:
        """Find the layers of a patched model.

        Args:
            model: patched, or what Accelerate made of a patched model.
            on_missing: what tokens without routes (-1) do: "live" lets the router choose, "error"
                refuses them.

        Raises:
            ValueError: not patched; compiled; routers that do not choose by one `torch.topk` over
                their experts, or experts that do not see every token.
        """
        if on_missing not in ("live", "error"):
            raise ValueError(f"on_missing={on_missing!r} is neither 'live' nor 'error'")
        self._on_missing = on_missing
        self._state = patched_state(model)
        _check_not_compiled(model)
        self._root = next(m for m in model.modules() if isinstance(vars(m).get(STATE), ModelState))
        self._layers = find_routed_layers(self._root, self._state)
        self._watch = CheckpointWatch(self._state)
        self._last: Replaying | None = None

    @contextmanager
    def record(self) -> Iterator[Routes]:
        """Take down the experts of each token: `with replay.record() as routes: model(...)`.

        `routes` holds those of the last forward: [B, S, L, K], uint8 up to 256 experts, else int16,
        of all tokens, on every rank of an sp group. It is on the host, and complete when the block
        is left. A checkpointed layer that is computed again chooses the same.

        Raises:
            ValueError: no forward ended in the block; another block is open; experts that do not
                see every token.
        """
        session = Recording(self._state, self._layers)
        with self._open(session):
            yield session.routes
        session.close()

    @contextmanager
    def replay(self, routes: Routes | None, *, strict: bool = True) -> Iterator[None]:
        """Let forwards in the block choose `routes`; they have the batch that routes are of.

        Args:
            routes: of the batch, as the model is called with it: whole sequences, padded alike.
                Under sp every rank of the group has the same. None of a rank that has none, as one
                that got no sample and runs some other batch, while others replay theirs.
            strict: look at every id on entry; without, only at shapes.

        Alone, a rank raises on entry. Where ranks exchange tokens it goes on to the next exchange,
        and all of its group raise there, as they do where some of them replay and others do not
        (DeepEP does not carry such words: there the others raise at its time-out).

        Raises:
            ValueError: the model was unpatched or compiled since; routes that are not of this model
                or batch; another K or L; with `strict` an id out of range, a row of which some ids
                are -1 and not all, an expert twice in a row. Weights of routes where layers are
                checkpointed and `experts_backend="eager"` computes experts: what runs again would
                not know of them.
        """
        session = Replaying(self._state, self._layers, _switch_of_adapters(self._root))
        try:
            self._give(session, routes, strict)
        except ValueError as error:
            session.refuse(error)
        with self._open(session):
            yield
        self._last = session
        if session.refusal is not None:  # no forward came to tell the others
            raise session.refusal

    @property
    def last(self) -> ReplayReport:
        """What the last `replay` block did, on this rank; reading it waits for the device.

        Raises:
            ValueError: there was none.
        """
        if self._last is None:
            raise ValueError("no replay() block has ended yet")
        return self._last.counts.report()

    def _give(self, session: Replaying, routes: Routes | None, strict: bool) -> None:
        may_be_live = self._on_missing == "live"
        if routes is None:
            if not may_be_live:
                raise ValueError("no routes to replay, and on_missing='error'")
            return
        ids, weights = select_layers(routes, self._layers)
        check_ids(ids, self._layers, allow_live=may_be_live, strict=strict)
        session.give(ids, weights)

    @contextmanager
    def _open(self, session: Recording | Replaying) -> Iterator[None]:
        if vars(self._root).get(STATE) is not self._state:
            raise ValueError(
                "this RoutingReplay was made before the model was unpatched; patch the model, and "
                "make a new one"
            )
        _check_not_compiled(self._root)
        # What checkpoints is wrapped only where tokens travel; here it has to be anywhere.
        self._watch.look(self._root)
        with hooked(self._root, self._state, self._layers, session):
            yield


def _check_not_compiled(model: nn.Module) -> None:
    if any(is_compiled(module) for module in model.modules()):
        raise ValueError(
            "routing of a compiled model cannot be recorded or replayed: torch.compile has its "
            "topk already; leave torch.compile out"
        )


def _switch_of_adapters(model: nn.Module) -> Callable[[], bool]:
    """Return what tells whether adapters are switched off; PEFT switches all of them together."""
    first = next((layer for _, layer in adapter_layers(model)), None)
    return lambda: first is not None and bool(first.disable_adapters)
