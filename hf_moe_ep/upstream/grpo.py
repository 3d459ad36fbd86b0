"""GRPO's own functions, and the engine that it generates with (trl/trainer/grpo_trainer.py).

trl/generation/vllm_generation.py keeps a vllm.LLM of this process in `llm`; vllm/outputs.py has
what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

# Scores a generation batch; log-probabilities of tokens; the loss of a micro-batch.
GRPO = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


def engine_of(trainer: Any) -> Any:
    """Return the vllm.LLM of this process that a trainer generates with, or None."""
    return getattr(getattr(trainer, "vllm_generation", None), "llm", None)


def routes_of_engine(trainer: Any, outputs: Sequence[Any]) -> list[Any] | None:
    """Return what each of this rank's samples was routed to; None where an engine tells none.

    vLLM has one array for prompt and completion, or (0.21) one for each, the first of them for all
    samples of a prompt. Ranks that share an engine (`vllm_tensor_parallel_size`) all get the
    samples of all of them.
    """
    arrays: list[Any] = []
    for output in outputs:
        prompt = getattr(output, "prompt_routed_experts", None)
        for sample in output.outputs:
            array = getattr(sample, "routed_experts", None)
            if array is None:
                return None
            arrays.append(array if prompt is None else np.concatenate([prompt, array]))
    generation = trainer.vllm_generation
    ranks = getattr(generation, "tensor_parallel_size", 1)
    if ranks == 1:
        return arrays
    rank, share = dist.get_rank(generation.tp_group), len(arrays) // ranks
    return arrays[rank * share : (rank + 1) * share]


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let an object call `function(its own, ...)` in place of a function of its own."""
    setattr(owner, name, partial(function, getattr(owner, name)))
