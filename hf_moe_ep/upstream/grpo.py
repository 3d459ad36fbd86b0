"""Methods of TRL's GRPO trainer, and its rollout engine (trl/trainer/grpo_trainer.py).

trl/generation/vllm_generation.py keeps the vllm.LLM of this process in `llm`; vllm/outputs.py
defines the outputs of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

# The methods that score a generation batch, compute the log-probabilities of tokens, and compute
# the loss of a micro-batch.
GRPO = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


def engine_of(trainer: Any) -> Any:
    """Return the vllm.LLM of this process that a trainer generates with, or None."""
    return getattr(getattr(trainer, "vllm_generation", None), "llm", None)


def routes_of_engine(trainer: Any, outputs: Sequence[Any]) -> list[Any] | None:
    """Return the routes of each sample of this rank; None if the engine does not return routes.

    vLLM returns one array for prompt and completion. Version 0.21 returns two, of which the first
    is for all samples of a prompt. Ranks that share an engine (`vllm_tensor_parallel_size`) all
    receive the samples of all these ranks.
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
    """Replace the method `name` of one object by `function(stock method, ...)`."""
    setattr(owner, name, partial(function, getattr(owner, name)))
