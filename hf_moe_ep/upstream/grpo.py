"""GRPO's own functions, and the engine that it generates with (trl/trainer/grpo_trainer.py).

trl/generation/vllm_generation.py keeps a vllm.LLM of this process in `llm`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# Scores a generation batch; log-probabilities of tokens; the loss of a micro-batch.
GRPO = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


def engine_of(trainer: Any) -> Any:
    """Return the vllm.LLM of this process that a trainer generates with, or None."""
    return getattr(getattr(trainer, "vllm_generation", None), "llm", None)


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let an object call `function(its own, ...)` in place of a function of its own."""
    setattr(owner, name, partial(function, getattr(owner, name)))
