"""Routing replay for TRL's GRPO: what it computes more than once chooses the same experts.

    replay_routing(trainer, "R2")      # before trainer.train()

    rollout            R3: what the engine chose is taken from its outputs
    old log-probs      R2: recorded                     R3: replayed
    reference          routes live, another model or the policy without its adapters
    update             replayed

Routes travel with the samples of a generation batch, as one more entry of TRL's dictionary, so
they are shuffled and split as everything else. What of TRL is replaced stands in
`upstream/grpo.py`; it is of one trainer, for its life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.routing.replay import RoutingReplay
from hf_moe_ep.routing.routes import Routes
from hf_moe_ep.state import find_state, patched_state
from hf_moe_ep.upstream.adapters import adapter_layers
from hf_moe_ep.upstream.grpo import GRPO, engine_of, replaced, routes_of_engine

# One more entry of a generation batch: [B, S, L, K].
ROUTES = "hf_moe_ep_routes"


def replay_routing(trainer: Any, mode: str = "R2") -> RoutingReplay:
    """Let a GRPOTrainer replay the routing of its policy; returns what does, with its report.

    Args:
        trainer: trl.GRPOTrainer, made with a patched model; before `train()`.
        mode: "R2", the update chooses the experts that the pass for old log-probabilities chose
            (TRL leaves that pass out where it would be the update's own: nothing to replay then);
            "R3", both choose what the rollout engine did. R3 needs vLLM in colocate mode with
            `enable_return_routed_experts`: TRL's server does not hand routes on.

    The load-balancing loss counts what the live router would choose.

    Raises:
        ValueError: another trainer, or mode; a model that is not patched, or whose routing cannot
            be replayed; R3 without such an engine. While it trains: an engine that returns no
            routes, or not those of the samples.
    """
    if mode not in ("R2", "R3"):
        raise ValueError(f"mode={mode!r} is neither 'R2' nor 'R3'")
    missing = [name for name in GRPO if not hasattr(trainer, name)]
    if missing:
        raise ValueError(
            f"{type(trainer).__name__} is no GRPOTrainer of TRL 1.15 or newer: it has no "
            f"{', '.join(missing)}; use RoutingReplay in a loop of your own"
        )
    seam = _Seam(trainer, RoutingReplay(trainer.model), strict=mode == "R3")
    if mode == "R3":
        engine = engine_of(trainer)
        if engine is None:
            raise ValueError(
                "mode='R3' takes routes from vLLM in this process; this trainer has none "
                "(use_vllm=True, vllm_mode='colocate'), so use mode='R2'"
            )
        replaced(engine, "generate", seam.generate)
    score, logps, loss = GRPO
    replaced(trainer, score, seam.score)
    replaced(trainer, logps, seam.log_probabilities)
    replaced(trainer, loss, seam.loss)
    return seam.replay


class _Seam:
    """One trainer's functions, with routes; `strict` looks at every id, which others chose."""

    def __init__(self, trainer: Any, replay: RoutingReplay, *, strict: bool) -> None:
        self._trainer, self._strict = trainer, strict
        self.replay, self._state = replay, patched_state(trainer.model)
        self._first_adapter = next((x for _, x in adapter_layers(trainer.model)), None)
        # Of the generation batch that is scored.
        self._scores = False
        self._engines: list[Any] | None = None
        self._kept: list[Routes] = []
        # Of the micro-batch whose loss is computed.
        self._current: Routes | None = None
        self._layers: tuple[int, ...] = ()

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the routes from what the engine returns (vllm.LLM.generate)."""
        outputs = original(*args, **kwargs)
        arrays = routes_of_engine(self._trainer, outputs)
        if arrays is None:
            raise ValueError(
                "vLLM returned samples without routed_experts; R3 wants its engine with "
                "enable_return_routed_experts=True, or use mode='R2'"
            )
        self._engines = arrays
        return outputs

    def score(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give the generation batch the routes that were found on the way."""
        self._scores, self._kept, self._engines = True, [], None
        try:
            batch = original(*args, **kwargs)
        finally:
            self._scores = False
        if self._engines is not None:
            self._kept = [self._of_engine(batch["prompt_mask"], batch["completion_mask"])]
        if self._kept:
            self._layers = self._kept[0].layers
            batch[ROUTES] = torch.cat([routes.ids for routes in self._kept])
        return batch

    def loss(self, original: Callable[..., Any], model: Any, inputs: Any) -> Any:
        """Replay, in the forward of the update, what the micro-batch came with."""
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
        """Record or replay each part of the batch; the reference routes live."""
        routed = model
        if find_state(model) is self._state and not self._adapters_are_off():
            if self._current is not None:
                routed = _Replayed(model, self.replay, self._current, self._strict)
            elif self._scores and self._engines is not None:
                prompts = attention_mask.shape[1] - logits_to_keep
                masks = attention_mask[:, :prompts], attention_mask[:, prompts:]
                routed = _Replayed(model, self.replay, self._of_engine(*masks), self._strict)
            elif self._scores:
                routed = _Recorded(model, self.replay, self._kept)
        return original(routed, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _adapters_are_off(self) -> bool:
        """Whether the policy stands in for its reference: without adapters, or with its first."""
        first = self._first_adapter
        if first is None:
            return False
        return bool(first.disable_adapters) or first.active_adapters == ["ref"]

    def _of_engine(self, prompt_mask: Tensor, completion_mask: Tensor) -> Routes:
        """Put the engine's arrays behind the padding of each row."""
        assert self._engines is not None
        prompts, completions = prompt_mask.sum(1).tolist(), completion_mask.sum(1).tolist()
        # TRL masks all of a completion that was cut off, where it is told to.
        lengths = [
            prompt + completion if completion else len(array) + 1
            for prompt, completion, array in zip(prompts, completions, self._engines, strict=False)
        ]
        width = prompt_mask.shape[1]
        return Routes.from_engine(
            self._engines,
            lengths,
            padded_to=width + completion_mask.shape[1],
            pad_side=[width - prompt for prompt in prompts],
        )


class _Replayed:
    """Stands for the model where TRL calls it with parts of a batch, one after the other."""

    def __init__(self, model: Any, replay: RoutingReplay, routes: Routes, strict: bool) -> None:
        self._model, self._replay, self._routes = model, replay, routes
        self._strict, self._done = strict, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start, self._done = self._done, self._done + len(kwargs["input_ids"])
        with self._replay.replay(self._routes.rows(start, self._done), strict=self._strict):
            return self._model(*args, **kwargs)


class _Recorded:
    """The same, which records."""

    def __init__(self, model: Any, replay: RoutingReplay, kept: list[Routes]) -> None:
        self._model, self._replay, self._kept = model, replay, kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._replay.record() as routes:
            output = self._model(*args, **kwargs)
        self._kept.append(routes)
        return output
