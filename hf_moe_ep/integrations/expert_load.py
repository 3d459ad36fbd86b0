"""`ExpertLoadCallback` logs the expert load through the Trainer, and draws it as heat maps.

With `rebalance_every` the callback also moves experts between ranks, so that all ranks receive
similar numbers of tokens (`placement/balance.py`).

The Trainer first writes the logs to its history, then passes them to the callbacks of tensorboard,
wandb and trackio, and at last to the user's callbacks, which therefore cannot add values in time.
For this reason `Trainer.log` is wrapped: the wrapper adds the callback's values to the logs first.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from hf_moe_ep.placement.balance import balance_experts, check_has_ep
from hf_moe_ep.ranks.all_ranks import run_on_first
from hf_moe_ep.routing.counts import reset_counts
from hf_moe_ep.routing.load import ExpertLoad, check_tokens_are_counted, read_load
from hf_moe_ep.state import ModelState, find_state

# The callback counts tokens for balancing under this name.
_BALANCER = "ExpertLoadCallback, rebalance_every"
# The maximum number of panels in the heat map. If there are more, neighbouring panels are merged in
# pairs.
_MAX_PANELS = 12


@dataclass
class _Panel:
    """The token counts of the steps `first` to `last` (inclusive)."""

    first: int
    last: int
    counts: Tensor


class ExpertLoadCallback(transformers.TrainerCallback):
    """Log the expert load of a patched model through the Trainer.

        Trainer(model=patch(model, ep_size=8), callbacks=[ExpertLoadCallback()], ...)

    The values are logged with the training loss, to the Trainer's history and to the trackers of
    `report_to`. They cover all ranks, and all steps since the previous log of this callback:

        expert_load/worst_layer         max / mean load over experts, largest value of a layer
        expert_load/mean_layer          max / mean load over experts, mean over all layers
        expert_load/worst_rank          max / mean load over the ranks of an ep group, largest value
                                        of a layer
        expert_load/dead_experts        number of experts without a token, sum over all layers
        expert_load/relative_entropy    entropy of a layer's load / ln(experts), mean over layers

    Args:
        every: the minimum number of steps between two logs. With 1 the values are logged whenever
            the Trainer logs its loss (`logging_steps`).
        heat_map: the path of a PNG that rank 0 writes with every checkpoint and at the end of
            training. The PNG shows the load of layers x experts in at most 12 panels; each panel
            covers the steps since the previous panel. A resumed run starts with the first step
            after the resume.
        rebalance_every: the number of steps between two calls of `balance_experts`, which gets the
            load of these steps. With None the function is never called.
        threshold: experts of a layer are moved if the busiest rank of the layer has more than
            `threshold` times the mean load of the ranks.

    Raises:
        ValueError: `every` or `rebalance_every` is not a whole number >= 1, or `threshold` is below
            1. At the start of training: the model is not patched or has experts_backend="eager"; or
            `rebalance_every` is given with ep_size=1. When experts are moved: see
            `balance_experts`.
        ImportError: `heat_map` is given and matplotlib is not installed.
    """

    # The callback counts tokens for its logs under this name.
    reader = "ExpertLoadCallback"

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
                f"threshold is the load of the busiest rank divided by the mean load, so it must "
                f"be 1 or more, got {threshold!r}; try 1.2"
            )
        if heat_map is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError(
                f"heat_map={os.fspath(heat_map)!r} is drawn by matplotlib, which is not installed: "
                f"pip install matplotlib, or leave heat_map out"
            )
        self.every, self.heat_map = every, None if heat_map is None else Path(heat_map)
        self.rebalance_every, self.threshold = rebalance_every, threshold
        self._read_at = 0
        self._panels: list[_Panel] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start counting tokens."""
        patched = _find_patched(kwargs["model"])
        reset_counts(patched, self.reader)
        self._read_at = state.global_step
        if self.rebalance_every is not None:
            check_has_ep(patched, "ExpertLoadCallback(rebalance_every=...)")
            reset_counts(patched, _BALANCER)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move experts every `rebalance_every` steps, based on the load since the previous call."""
        if self.rebalance_every is None or state.global_step % self.rebalance_every:
            return
        model = kwargs["model"]
        load = read_load(model, _find_patched(model), _BALANCER, reset=True)
        balance_experts(model, kwargs["optimizer"], load, threshold=self.threshold)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the heat map of the steps so far."""
        self._draw()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the heat map of all steps."""
        self._draw()

    def values(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the values to log at this step, or {} if `every` steps have not passed yet."""
        load = self.load(model, step)
        return {} if load is None else summarise_load(load)

    def load(self, model: nn.Module, step: int) -> ExpertLoad | None:
        """Return the load since the previous log, or None if `every` steps have not passed yet."""
        if step - self._read_at < self.every:
            return None
        load = read_load(model, _find_patched(model), self.reader, reset=True)
        if self.heat_map is not None:
            self._add_panel(_Panel(self._read_at + 1, step, load.counts))
        self._read_at = step
        return load

    def _add_panel(self, new: _Panel) -> None:
        self._panels.append(new)
        if len(self._panels) > _MAX_PANELS:
            unpaired = self._panels[len(self._panels) // 2 * 2 :]
            pairs = zip(self._panels[::2], self._panels[1::2], strict=False)
            merged = [_Panel(a.first, b.last, a.counts + b.counts) for a, b in pairs]
            self._panels = merged + unpaired

    def _draw(self) -> None:
        if self.heat_map is not None and self._panels:
            draw = partial(_draw_panels, self.heat_map, self._panels)
            run_on_first(f"drawing {self.heat_map}", draw)


def _check_steps(name: str, steps: Any, remedy: str) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"{name} must be a whole number of steps >= 1, got {steps!r}; {remedy}")


def summarise_load(load: ExpertLoad) -> dict[str, float]:
    """Return the values that `ExpertLoadCallback` logs, or {} if no token was counted."""
    if not load.counts.any():
        return {}
    values = {
        "worst_layer": load.max_over_mean.nan_to_num(0.0).max(),
        "mean_layer": load.max_over_mean.nanmean(),
        "worst_rank": load.rank_max_over_mean.nan_to_num(0.0).max(),
        "dead_experts": load.dead.sum(),
        "relative_entropy": load.relative_entropy.nanmean(),
    }
    return {f"expert_load/{name}": float(value) for name, value in values.items()}


def _draw_panels(path: Path, panels: list[_Panel]) -> None:
    from hf_moe_ep.routing.heat_map import draw_heat_maps

    titles = [f"steps {panel.first} to {panel.last}" for panel in panels]
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_heat_maps([panel.counts for panel in panels], titles, path)


def _find_patched(model: nn.Module) -> ModelState:
    state = find_state(model)
    if state is None:
        raise ValueError(
            "ExpertLoadCallback: this model is not patched, so its tokens are not counted; call "
            "patch(model) before Trainer(model=model)"
        )
    check_tokens_are_counted(state, "ExpertLoadCallback")
    return state
