"""`RunReport` prints and logs the report of `hf-moe-ep run` through the command's trainer."""

from __future__ import annotations

import time
from typing import Any

import transformers
from torch import nn

from hf_moe_ep.architectures import read_experts_per_token
from hf_moe_ep.describe import describe
from hf_moe_ep.integrations.expert_load import ExpertLoadCallback, summarise_load
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.module_names import unwrap


class RunReport(ExpertLoadCallback):
    """Print `describe(model)` when training starts, and log values with each training loss.

    Rank 0 prints. The logged values are the values of `ExpertLoadCallback` and

        tokens_per_second    tokens that all ranks have trained on since the previous log, divided
                             by the seconds of these steps

    The tokens do not include padding (`moe/counting.py`), and the seconds do not include the time
    between steps, in which the trainer evaluates and saves. A model with experts_backend="eager"
    counts no tokens, so nothing is logged.
    """

    reader = "RunReport"

    def __init__(self) -> None:
        super().__init__()
        self._began = self._seconds = 0.0
        self._top_k = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the report, and start counting tokens."""
        model = kwargs["model"]
        patched = find_state(model)
        if patched is None:
            return
        self._seconds = 0.0  # the steps of an earlier training after its last log
        if state.is_world_process_zero:
            print(describe(model), flush=True)
        if patched.config.experts_backend == "eager":
            return
        inner = without_adapters(unwrap(model))
        self._top_k = read_experts_per_token(inner, patched.plan, text_config(inner.config))
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of a step."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock of a step."""
        self._seconds += time.perf_counter() - self._began

    def values(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the values to log at this step, or {} if no tokens are counted."""
        if not self._top_k:
            return {}
        load = self.load(model, step)
        if load is None:
            return {}
        tokens = load.counts.sum().item() / (len(load.counts) * self._top_k)
        seconds, self._seconds = self._seconds, 0.0
        return {"tokens_per_second": tokens / seconds} | summarise_load(load)


def add_report(trainer: transformers.Trainer) -> None:
    """Add a `RunReport` to a trainer that has none."""
    if not any(isinstance(callback, RunReport) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(RunReport())
