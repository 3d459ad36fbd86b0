"""Replay the routing of experts in TRL's GRPO.

    replay_routing(trainer, "R2")      # before trainer.train()

    forward            mode "R2"             mode "R3"
    rollout            routes are not read   routes are read from the engine's outputs
    old log-probs      routes are recorded   routes are replayed
    reference          no replay             no replay
    update             routes are replayed   routes are replayed

Routes are the experts of each token in each layer. A replayed forward sends each token to the
experts that were recorded (R2), or that the engine chose (R3). The reference is another model, or
the policy without its adapters.

The routes are stored as one more entry in TRL's dictionary of a generation batch, so TRL shuffles
and splits them with the samples. `upstream/grpo.py` names the trainer's methods that are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.routing.replay import RoutingReplay
from hf_moe_ep.routing.routes import Routes
from hf_moe_ep.state import find_state, patched_state
from hf_moe_ep.upstream.adapters import iterate_adapter_layers
from hf_moe_ep.upstream.grpo import (
    ATTRIBUTES_OF_SEVERAL_CALLS,
    GRPO_METHODS,
    get_engine,
    get_routes_of_engine,
    replace_method,
)

# The key of the routes, a tensor [B, S, L, K], in a generation batch.
ROUTES = "hf_moe_ep_routes"


def replay_routing(trainer: Any, mode: str = "R2") -> RoutingReplay:
    """Make a GRPOTrainer replay the routing of its policy, and return the `RoutingReplay`.

    Call this function before `trainer.train()`.

    Args:
        trainer: a trl.GRPOTrainer that was created with a patched model.
        mode: "R2" records the experts in the forward for old log-probabilities, and replays them in
            the update's forward. If both forwards would be the same, TRL skips the first one, and
            no routes are replayed. "R3" replays the experts that the rollout engine chose, in both
            forwards. R3 needs vLLM in colocate mode with `enable_return_routed_experts`, because
            TRL's server does not send routes.

    The load-balancing loss counts the experts that the router itself chooses in the update.

    Raises:
        ValueError: the trainer is not a GRPOTrainer; `mode` is neither "R2" nor "R3"; the model is
            not patched, or its routing cannot be replayed; with "R3" the trainer has no such
            engine, or calls the engine several times per sample (`tools`, `rollout_func`). During
            training: the engine returns no routes, or routes for other numbers of tokens.
    """
    if mode not in ("R2", "R3"):
        raise ValueError(f"mode={mode!r} is neither 'R2' nor 'R3'")
    missing = [name for name in GRPO_METHODS if not hasattr(trainer, name)]
    if missing:
        raise ValueError(
            f"{type(trainer).__name__} is not a GRPOTrainer of TRL 1.15 or newer: it has no "
            f"{', '.join(missing)}; use RoutingReplay in a loop of your own"
        )
    replaying = _ReplayingTrainer(trainer, RoutingReplay(trainer.model), strict=mode == "R3")
    if mode == "R3":
        engine = get_engine(trainer)
        if engine is None:
            raise ValueError(
                "mode='R3' reads routes from vLLM in this process, but this trainer has no engine; "
                "create it with use_vllm=True and vllm_mode='colocate', or use mode='R2'"
            )
        several = [name for name in ATTRIBUTES_OF_SEVERAL_CALLS if getattr(trainer, name, None)]
        if several:
            raise ValueError(
                f"mode='R3' replays the routes of one call of the engine per sample, but with "
                f"{several[0]} a sample is generated in several calls; use mode='R2', which "
                f"records whole sequences"
            )
        replace_method(engine, "generate", replaying.generate)
    score, logps, loss = GRPO_METHODS
    replace_method(trainer, score, replaying.score)
    replace_method(trainer, logps, replaying.log_probabilities)
    replace_method(trainer, loss, replaying.loss)
    return replaying.replay


class _ReplayingTrainer:
    """The wrappers of one trainer's methods, and the routes that they exchange.

    With `strict`, every replayed expert id is checked. Ids that an engine returned need this check.
    """

    def __init__(self, trainer: Any, replay: RoutingReplay, *, strict: bool) -> None:
        self._trainer, self._strict = trainer, strict
        self.replay, self._state = replay, patched_state(trainer.model)
        self._first_adapter = next(
            (layer for _, layer in iterate_adapter_layers(trainer.model)), None
        )
        # True while a generation batch is scored.
        self._is_scoring = False
        # The engine's arrays of routes for this generation batch, and the routes recorded so far.
        self._engine_arrays: list[Any] | None = None
        self._recorded: list[Routes] = []
        # The routes of the micro-batch whose loss is computed now, and the layers of all routes.
        self._current: Routes | None = None
        self._layers: tuple[int, ...] = ()

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap `vllm.LLM.generate`: store the routes that the engine returned."""
        outputs = original(*args, **kwargs)
        arrays = get_routes_of_engine(self._trainer, outputs)
        if arrays is None:
            raise ValueError(
                "vLLM returned samples without routed_experts; R3 needs an engine with "
                "enable_return_routed_experts=True, or use mode='R2'"
            )
        self._engine_arrays = arrays
        return outputs

    def score(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap the scoring of a generation batch: add the routes to the batch."""
        self._is_scoring, self._recorded, self._engine_arrays = True, [], None
        try:
            batch = original(*args, **kwargs)
        finally:
            self._is_scoring = False
        if self._engine_arrays is not None:
            masks = batch["prompt_mask"], batch["completion_mask"]
            self._recorded = [self._routes_from_engine(*masks)]
        if self._recorded:
            self._layers = self._recorded[0].layers
            batch[ROUTES] = torch.cat([routes.ids for routes in self._recorded])
        return batch

    def loss(self, original: Callable[..., Any], model: Any, inputs: Any) -> Any:
        """Wrap the loss: replay the routes stored with the micro-batch in the update's forward."""
        ids: Tensor | None = inputs.get(ROUTES)
        self._current = None if ids is None else Routes(ids, self._layers)
        try:
            return original(model, inputs)
        finally:
            self._current = None

    def log_probabilities(
        self,
        original: Callable[..., Any],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wrap the computation of log-probabilities: record or replay the policy's routing."""
        called_model = model
        if find_state(model) is self._state and not self._adapters_are_off():
            if self._current is not None:
                called_model = _ReplayingModel(model, self.replay, self._current, self._strict)
            elif self._is_scoring and self._engine_arrays is not None:
                prompt_width = attention_mask.shape[1] - logits_to_keep
                masks = attention_mask[:, :prompt_width], attention_mask[:, prompt_width:]
                routes = self._routes_from_engine(*masks)
                called_model = _ReplayingModel(model, self.replay, routes, self._strict)
            elif self._is_scoring:
                called_model = _RecordingModel(model, self.replay, self._recorded)
        return original(called_model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _adapters_are_off(self) -> bool:
        """Return True if the policy is evaluated as its own reference."""
        first = self._first_adapter
        if first is None:
            return False
        return bool(first.disable_adapters) or first.active_adapters == ["ref"]

    def _routes_from_engine(self, prompt_mask: Tensor, completion_mask: Tensor) -> Routes:
        """Build the routes of a padded batch from the engine's arrays, which have no padding."""
        assert self._engine_arrays is not None
        if len(self._engine_arrays) != len(prompt_mask):
            raise ValueError(
                f"the engine returned routes of {len(self._engine_arrays)} samples in its last "
                f"call, but the batch has {len(prompt_mask)}; R3 needs all samples from one call, "
                f"so use mode='R2'"
            )
        prompts, completions = prompt_mask.sum(1).tolist(), completion_mask.sum(1).tolist()
        # TRL may mask the whole of a truncated completion (mask_truncated_completions). Its length
        # then follows from the engine's array, which has no row for the last token.
        lengths = [
            prompt + completion if completion else len(array) + 1
            for prompt, completion, array in zip(
                prompts, completions, self._engine_arrays, strict=True
            )
        ]
        width = prompt_mask.shape[1]
        return Routes.from_engine(
            self._engine_arrays,
            lengths,
            padded_to=width + completion_mask.shape[1],
            pad_side=[width - prompt for prompt in prompts],
        )


class _ReplayingModel:
    """A callable that TRL gets instead of the model, and calls once for each part of a batch.

    Each call runs the model and replays the routes of this part.
    """

    def __init__(self, model: Any, replay: RoutingReplay, routes: Routes, strict: bool) -> None:
        self._model, self._replay, self._routes = model, replay, routes
        self._strict, self._num_rows_done = strict, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self._num_rows_done
        self._num_rows_done += len(kwargs["input_ids"])
        with self._replay.replay(
            self._routes.rows(start, self._num_rows_done), strict=self._strict
        ):
            return self._model(*args, **kwargs)


class _RecordingModel:
    """A callable that TRL gets instead of the model, and calls once for each part of a batch.

    Each call runs the model and appends the routes of this part to `recorded`.
    """

    def __init__(self, model: Any, replay: RoutingReplay, recorded: list[Routes]) -> None:
        self._model, self._replay, self._recorded = model, replay, recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._replay.record() as routes:
            output = self._model(*args, **kwargs)
        self._recorded.append(routes)
        return output
