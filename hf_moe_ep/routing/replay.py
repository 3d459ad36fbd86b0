"""`RoutingReplay`: record which experts a model chooses, and replay this choice.

Reinforcement learning uses two forms of replay, which Megatron-LM and verl call R2 and R3 (see
https://github.com/volcengine/verl and https://arxiv.org/abs/2507.18071):

    R2   record the forward that computes old log-probabilities, and replay its choice in the
         forward of the update
    R3   replay the choice of the inference engine in every forward over its samples

Unless the routes have weights, only expert ids are replayed: the architecture's own code computes
the routing weights from the router's present scores at these ids, so the router still learns.
Losses that balance experts count the choice that the router itself would make; set their
coefficient to 0 if you do not want this.
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
from hf_moe_ep.routing.report import Counts, ReplayReport
from hf_moe_ep.routing.routes import Routes
from hf_moe_ep.routing.sessions import register_session_hooks
from hf_moe_ep.state import STATE, ModelState, patched_state
from hf_moe_ep.upstream.adapters import iterate_adapter_layers
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
    model is not changed. Backward may run inside or after a block: a recompute of a checkpointed
    layer uses the routes of the layer's first run. (This holds for the checkpointing functions
    of transformers and torch. With another function, backward must run inside the block.)

    With pipeline stages every rank records the routes of all layers. The ranks of all stages that
    compute the same batch pass the same routes to `replay`.
    """

    def __init__(self, model: nn.Module, *, on_missing: str = "live") -> None:
        """Find the layers of a patched model whose routing can be recorded and replayed.

        Args:
            model: a patched model, or the result of Accelerate's `prepare` for it.
            on_missing: for tokens without routes (-1), "live" lets the router choose, and "error"
                raises an error.

        Raises:
            ValueError: the model is not patched, or is compiled; its routers do not choose by one
                `torch.topk` over the experts; a layer has several experts modules.
        """
        if on_missing not in ("live", "error"):
            raise ValueError(f"on_missing={on_missing!r} is neither 'live' nor 'error'")
        self._on_missing = on_missing
        self._state = patched_state(model)
        _check_not_compiled(model)
        self._root = next(m for m in model.modules() if isinstance(vars(m).get(STATE), ModelState))
        self._layers = find_routed_layers(self._root, self._state)
        self._stage = self._state.stage
        self._watch = CheckpointWatch(self._state)
        # Only the counts of the last session are kept, because a session holds its routes.
        self._last: Counts | None = None

    @contextmanager
    def record(self) -> Iterator[Routes]:
        """Record the experts of each token: `with replay.record() as routes: model(...)`.

        Each forward replaces `routes.ids` by its choices, [B, S, L, K], in uint8 for up to 256
        experts, otherwise in int16. With sp_size > 1 the ids of each rank contain all tokens of the
        sequences that this rank shares. The tensor is on the host, and complete when the block
        ends. A recompute of a checkpointed layer repeats the recorded choice.

        Raises:
            ValueError: no forward ended in the block; another block is open; an experts module did
                not receive each token once.
        """
        session = Recording(self._state, self._layers)
        with self._open(session):
            yield session.routes
        session.close()

    @contextmanager
    def replay(self, routes: Routes | None, *, strict: bool = True) -> Iterator[None]:
        """Make every forward in the block choose the experts of `routes`.

        Args:
            routes: the routes of the batch with which the model is called: whole sequences, with
                the same padding. With sp_size > 1 every rank of an sp group passes the same routes.
                A rank that has no sample left runs a batch whose loss does not count, and passes
                None.
            strict: if True, check every id on entry. If False, check only the shapes and, with
                on_missing="error", that every token has routes.

        With ep_size and sp_size 1, wrong routes raise an error on entry. Otherwise the ranks of a
        group compare their routes in the next forward, and all of them raise an error if at least
        one rank has wrong routes, or if only some ranks replay. (With DeepEP ranks are not
        compared, so the other ranks raise an error at DeepEP's time-out.)

        Raises:
            ValueError: the model was unpatched or compiled in the meantime; the routes belong to
                another model or batch, or have another K or L; with `strict`, an id is out of
                range, or the K ids of a token contain an expert twice, or -1 and an expert; the
                routes have weights, but layers are checkpointed and `experts_backend` is "eager",
                so the recompute in backward could not use these weights.
        """
        session = Replaying(self._state, self._layers, _make_adapters_off_test(self._root))
        try:
            self._set_routes(session, routes, strict)
        except ValueError as error:
            session.refuse(error)
        with self._open(session):
            yield
        self._last = session.counts
        if session.refusal is not None:  # no forward has raised this error
            raise session.refusal

    @property
    def last(self) -> ReplayReport:
        """The report of the last `replay` block on this rank; reading it is a host sync.

        Raises:
            ValueError: no `replay` block has ended yet.
        """
        if self._last is None:
            raise ValueError("no replay() block has ended yet")
        return self._last.report()

    def _set_routes(self, session: Replaying, routes: Routes | None, strict: bool) -> None:
        allow_live = self._on_missing == "live"
        if routes is None:
            if not allow_live:
                raise ValueError("no routes to replay, but on_missing='error' needs them")
            return
        ids, weights = select_layers(routes, self._layers)
        check_ids(ids, self._layers, allow_live=allow_live, strict=strict)
        session.set_routes(ids, weights)

    @contextmanager
    def _open(self, session: Recording | Replaying) -> Iterator[None]:
        if vars(self._root).get(STATE) is not self._state:
            raise ValueError(
                "this RoutingReplay was created before the model was unpatched; patch the model, "
                "and create a new RoutingReplay"
            )
        if self._state.stage is not self._stage:
            raise ValueError(
                "this RoutingReplay was created before the model was cut into pipeline stages; "
                "create it after the model was sharded"
            )
        _check_not_compiled(self._root)
        # ForwardGuard wraps checkpointing functions in a forward of the root, but a caller may call
        # the decoder without the root.
        self._watch.wrap_functions(self._root)
        with register_session_hooks(self._root, self._state, self._layers, session):
            yield


def _check_not_compiled(model: nn.Module) -> None:
    if any(is_compiled(module) for module in model.modules()):
        raise ValueError(
            "routing of a compiled model cannot be recorded or replayed, because torch.topk "
            "cannot be replaced in compiled code; leave torch.compile out"
        )


def _make_adapters_off_test(model: nn.Module) -> Callable[[], bool]:
    """Return a function that tests if the adapters are off; PEFT switches all of them together."""
    first = next((layer for _, layer in iterate_adapter_layers(model)), None)
    return lambda: first is not None and bool(first.disable_adapters)
