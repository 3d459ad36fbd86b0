"""Replace methods of TRL's GRPO trainer, and read the outputs of its rollout engine.

The private names come from trl/trainer/grpo_trainer.py, trl/generation/vllm_generation.py (the
attribute `llm`, this process's vllm.LLM) and vllm/outputs.py (the outputs of the engine).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

# The methods that generate and score a batch, compute the log-probabilities of tokens, and compute
# the loss of a micro-batch, in this order.
GRPO_METHODS = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
# Attributes of a trainer that calls its engine several times to generate one sample.
ATTRIBUTES_OF_SEVERAL_CALLS = ("tools", "rollout_func")


def get_engine(trainer: Any) -> Any:
    """Return the vllm.LLM with which a trainer generates in this process, or None."""
    return getattr(getattr(trainer, "vllm_generation", None), "llm", None)


def get_routes_of_engine(trainer: Any, outputs: Sequence[Any]) -> list[Any] | None:
    """Return the routes of each sample of this rank, or None if the engine returns no routes.

    vLLM returns one array for a prompt and its completion. vLLM 0.21 returns two arrays: one for
    the prompt, which all samples of the prompt share, and one for the completion. If several ranks
    share an engine (`vllm_tensor_parallel_size`), each rank receives the samples of all these
    ranks, and this function returns the routes of the rank's own samples.
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
    num_ranks = getattr(generation, "tensor_parallel_size", 1)
    if num_ranks == 1:
        return arrays
    rank, num_samples = dist.get_rank(generation.tp_group), len(arrays) // num_ranks
    return arrays[rank * num_samples : (rank + 1) * num_samples]


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace the method `name` of one object by `function(stock method, ...)`."""
    setattr(owner, name, partial(function, getattr(owner, name)))
