"""`ExpertLoadCallback`: expert load among what the Trainer logs, and as heat maps over time; with
`rebalance_every` experts move to where that load is even (`placement/balance.py`).

The Trainer runs the callbacks of tensorboard, wandb and trackio before those of its user, and keeps
its own history before all of them. So the callback adds nothing itself: `Trainer.log` is wrapped,
and puts its values into the logs of training before anybody sees them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from hf_moe_ep.placement.balance import balance_experts, check_has_ep
from hf_moe_ep.ranks.together import on_first
from hf_moe_ep.routing.counts import count_anew
from hf_moe_ep.routing.load import ExpertLoad, check_counts, load_of_reader
from hf_moe_ep.state import ModelState, find_state

_READER = "ExpertLoadCallback"
_BALANCER = "ExpertLoadCallback, rebalance_every"
# Panels of the picture; two neighbours become one where there would be more.
_MOST_MAPS = 12


@dataclass
class _Map:
    """What was counted in some steps, the first one and the last one included."""

    first: int
    last: int
    counts: Tensor


class ExpertLoadCallback(transformers.TrainerCallback):
    """Log the expert load of a patched model through the Trainer.

        Trainer(model=patch(model, ep_size=8), callbacks=[ExpertLoadCallback()], ...)

    Beside the loss of training stand then, in the Trainer's history and in whatever `report_to`
    names, of all ranks and of the steps since they stood there the last time:

        expert_load/worst_layer         max / mean over experts, of the layer where it is greatest
        expert_load/mean_layer          the same, mean of all layers
        expert_load/worst_rank          max / mean over the ranks of an ep group, worst layer
        expert_load/dead_experts        experts without a token, of all layers together
        expert_load/relative_entropy    of a layer's shares over ln(experts), mean of all layers

    Args:
        every: at least so many steps lie between two of them; 1 = whenever the Trainer logs its
            loss (`logging_steps`).
        heat_map: a PNG that rank 0 writes with every checkpoint and at the end of training: layers
            x experts, at most 12 panels over time, each of all steps since the one before; of a
            run that was resumed the steps since then.
        rebalance_every: `balance_experts` after each so many steps, by their load; None = never.
        threshold: it moves experts of layers whose busiest rank has more than so many times the
            mean of the ranks.

    Raises:
        ValueError: `every` or `rebalance_every` is no whole number >= 1, or `threshold` is below 1.
            At the start of training: the model is not patched, or with experts_backend="eager", or
            has `rebalance_every` without ep. When experts are to move: as `balance_experts`.
        ImportError: `heat_map` without matplotlib.
    """

    def __init__(
        self,
        every: int = 1,
        heat_map: str | os.PathLike[str] | None = None,
        *,
        rebalance_every: int | None = None,
        threshold: float = 1.2,
    ) -> None:
        _check_steps("every", every, "try 1")
        if rebalance_every is not None:
            _check_steps("rebalance_every", rebalance_every, "try 500")
        if not threshold >= 1:
            raise ValueError(
                f"threshold is what the busiest rank may have over the mean of all, so 1 or more, "
                f"got {threshold!r}; try 1.2"
            )
        if heat_map is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError(
                f"heat_map={os.fspath(heat_map)!r} is drawn by matplotlib, which is not installed: "
                f"pip install matplotlib, or leave heat_map out"
            )
        self.every, self.heat_map = every, None if heat_map is None else Path(heat_map)
        self.rebalance_every, self.threshold = rebalance_every, threshold
        self._read_at = 0
        self._maps: list[_Map] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count from here on."""
        patched = _patched(kwargs["model"])
        count_anew(patched, _READER)
        self._read_at = state.global_step
        if self.rebalance_every is not None:
            check_has_ep(patched, "ExpertLoadCallback(rebalance_every=...)")
            count_anew(patched, _BALANCER)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move experts by the load since they moved the last time, where it is due."""
        if self.rebalance_every is None or state.global_step % self.rebalance_every:
            return
        model = kwargs["model"]
        load = load_of_reader(model, _patched(model), _BALANCER, reset=True)
        balance_experts(model, kwargs["optimizer"], load, threshold=self.threshold)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw what there is."""
        self._draw()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw everything."""
        self._draw()

    def values(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return what is logged at this step: nothing before `every` steps have passed."""
        if step - self._read_at < self.every:
            return {}
        load = load_of_reader(model, _patched(model), _READER, reset=True)
        self._keep(_Map(self._read_at + 1, step, load.counts))
        self._read_at = step
        return _logged(load)

    def _keep(self, new: _Map) -> None:
        if self.heat_map is None:
            return
        self._maps.append(new)
        if len(self._maps) > _MOST_MAPS:
            rest = self._maps[len(self._maps) // 2 * 2 :]
            pairs = zip(self._maps[::2], self._maps[1::2], strict=False)
            merged = [_Map(a.first, b.last, a.counts + b.counts) for a, b in pairs]
            self._maps = merged + rest

    def _draw(self) -> None:
        if self.heat_map is not None and self._maps:
            on_first(f"drawing {self.heat_map}", partial(_write, self.heat_map, self._maps))


def log(
    original: Callable[..., Any],
    self: transformers.Trainer,
    logs: dict[str, float],
    *args: Any,
    **kwargs: Any,
) -> None:
    """`Trainer.log`, with the values of an `ExpertLoadCallback` in the logs of training."""
    # Those of evaluation have names of their own, and the summary at the end "train_loss".
    if "loss" in logs:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExpertLoadCallback):
                logs.update(callback.values(self.model, self.state.global_step))
    original(self, logs, *args, **kwargs)


def _check_steps(name: str, steps: Any, remedy: str) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"{name} must be a whole number of steps >= 1, got {steps!r}; {remedy}")


def _logged(load: ExpertLoad) -> dict[str, float]:
    if not load.counts.any():
        return {}
    found = {
        "worst_layer": load.max_over_mean.nan_to_num(0.0).max(),
        "mean_layer": load.max_over_mean.nanmean(),
        "worst_rank": load.rank_max_over_mean.nan_to_num(0.0).max(),
        "dead_experts": load.dead.sum(),
        "relative_entropy": load.relative_entropy.nanmean(),
    }
    return {f"expert_load/{name}": float(value) for name, value in found.items()}


def _write(path: Path, maps: list[_Map]) -> None:
    from hf_moe_ep.routing.heat_map import draw_heat_maps

    titles = [f"steps {one.first} to {one.last}" for one in maps]
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_heat_maps([one.counts for one in maps], titles, path)


def _patched(model: nn.Module) -> ModelState:
    state = find_state(model)
    if state is None:
        raise ValueError(
            "ExpertLoadCallback: this model is not patched, so nothing counts its tokens; call "
            "patch(model) before Trainer(model=model)"
        )
    check_counts(state, "ExpertLoadCallback")
    return state
