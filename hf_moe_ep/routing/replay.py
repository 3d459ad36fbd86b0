"""`RoutingReplay`: record which experts a model chooses, and replay this choice.

Reinforcement learning needs this in two forms, which Megatron-LM and verl call R2 and R3 (see
https://github.com/volcengine/verl and https://arxiv.org/abs/2507.18071):

    R2   the forward that computes old log-probabilities is recorded; the forward of the update
         replays it
    R3   the inference engine reports its choice; every forward over its samples replays it

Only indices are replayed. The routing weights are made, as the architecture does it, from the live
router's scores at these indices, so the router still learns. Losses that balance experts count the
choice that the router itself would make; set their coefficient to 0 if that is not wanted.
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

    The model may be sharded, prepared by Accelerate or wrapped by PEFT. Outside of the blocks the
    model is not changed. Backward may run inside of a block or after it; checkpointed layers are
    recomputed with the routes of their own forward. (With a checkpointing function other than
    transformers' and torch's own, backward has to run inside of the block.)
    """

    def __init__(self, model: nn.Module, *, on_missing: str = "live") -> None:
        """Find the layers of a patched model.

        Args:
            model: a patched model, or the result of Accelerate's `prepare`.
            on_missing: "live" lets the router choose for tokens without routes (-1), "error"
                refuses them.

        Raises:
            ValueError: the model is not patched, or is compiled; its routers do not choose by one
                `torch.topk` over their experts, or its experts do not see every token.
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
        """Record the experts of each token: `with replay.record() as routes: model(...)`.

        `routes` contains the choices of the last forward, [B, S, L, K], in uint8 up to 256 experts
        and in int16 above; all tokens, on every rank of an sp group. The tensor is on the host, and
        complete when the block ends. A recomputed checkpointed layer repeats its choice.

        Raises:
            ValueError: no forward ended in the block; another block is open; the experts do not see
                every token.
        """
        session = Recording(self._state, self._layers)
        with self._open(session):
            yield session.routes
        session.close()

    @contextmanager
    def replay(self, routes: Routes | None, *, strict: bool = True) -> Iterator[None]:
        """Make every forward in the block choose `routes`; its batch must be that of the routes.

        Args:
            routes: the routes of the batch with which the model is called: whole sequences, with
                the same padding. Under sp every rank of the group passes the same routes. A rank
                passes None if it has no routes (it got no sample, and runs some other batch) while
                other ranks replay theirs.
            strict: check every id on entry; otherwise only the shapes.

        Without ep and sp a rank raises an error on entry. Where ranks exchange tokens, the error is
        raised in the next exchange, on all ranks of the group. Ranks that replay and ranks that do
        not, in one group, raise there as well. (DeepEP cannot compare ranks: there the other ranks
        raise an error at DeepEP's time-out.)

        Raises:
            ValueError: the model was unpatched or compiled in the meantime; the routes belong to
                another model or batch, or have another K or L; with `strict`, an id is out of
                range, a row has -1 for some of its ids but not all, or a row has an expert twice;
                the routes have weights, layers are checkpointed and `experts_backend="eager"`
                computes the experts, whose recompute could not use these weights.
        """
        session = Replaying(self._state, self._layers, _adapters_off_test(self._root))
        try:
            self._give(session, routes, strict)
        except ValueError as error:
            session.refuse(error)
        with self._open(session):
            yield
        self._last = session
        if session.refusal is not None:  # no forward has raised it
            raise session.refusal

    @property
    def last(self) -> ReplayReport:
        """The report of the last `replay` block on this rank; reading it is a host sync.

        Raises:
            ValueError: no `replay` block has ended yet.
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
                "make a new RoutingReplay"
            )
        _check_not_compiled(self._root)
        # ForwardGuard wraps checkpointing functions only with ep; here they are always wrapped.
        self._watch.look(self._root)
        with hooked(self._root, self._state, self._layers, session):
            yield


def _check_not_compiled(model: nn.Module) -> None:
    if any(is_compiled(module) for module in model.modules()):
        raise ValueError(
            "routing of a compiled model cannot be recorded or replayed: its topk is compiled "
            "already; leave torch.compile out"
        )


def _adapters_off_test(model: nn.Module) -> Callable[[], bool]:
    """Return a function that returns whether PEFT has switched the adapters off (all or none)."""
    first = next((layer for _, layer in adapter_layers(model)), None)
    return lambda: first is not None and bool(first.disable_adapters)
