"""TRL's GRPO with an engine in another process, which generates the completions.

    python examples/rl/engine.py --model start --port 29600 &
    accelerate launch --config_file examples/accelerate/cpu_4.yaml examples/rl/trl_grpo.py \
        --model start --vllm_server_port 29600 --ep_size 2 --use_cpu --bf16 False --output_dir out

The trainer is that of `examples/finetune_grpo.py`, with all of its flags. Each step, TRL's own code
sends the engine the tensors that hf_moe_ep gives it. `EngineGeneration` replaces TRL's class for
vLLM, because `engine.py` stands for a server of vLLM. With vLLM itself, run `finetune_grpo.py
--use_vllm` instead.

`sampling/sampling_logp_difference` in the log is the distance between the engine's
log-probabilities and the trainer's. After a correct sync it is as small as rounding.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from engine import Link
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir))

import finetune_grpo


class EngineClient:
    """Has the methods of TRL's client for a server of vLLM that a trainer calls."""

    def __init__(self, port: int) -> None:
        self.link = Link(port, 0)

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        infos = [(key, getattr(torch, dtype), tuple(shape)) for key, dtype, shape in metadata]
        self.link.give(("update", infos))
        for _, tensor in named_params:
            self.link.send(tensor.cpu())

    def reset_prefix_cache(self) -> None:
        """The engine has no cache."""

    def sample(self, prompts: list[list[int]], length: int) -> list[tuple[list[int], list[float]]]:
        """Return the new tokens of each prompt, and their log-probabilities."""
        completions = []
        for prompt in prompts:
            self.link.give(("sample", (torch.tensor([prompt]), length)))
            tokens, logprobs = self.link.take()
            completions.append((tokens[0, len(prompt) :].tolist(), logprobs[0].tolist()))
        return completions

    def stop(self) -> None:
        self.link.give(("stop", None))
        self.link.take()


class EngineGeneration(VLLMGeneration):
    """Generates on the engine. The sync of weights is TRL's code for a server of vLLM."""

    def _init_vllm(self) -> None:
        is_main = self.accelerator.is_main_process
        self.vllm_client = EngineClient(self.server_port) if is_main else None

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        of_all_ranks = gather_object(prompts)
        completions: list[Any] = [None] * len(of_all_ranks)
        if self.vllm_client is not None:
            completions = self.vllm_client.sample(of_all_ranks, self.max_completion_length)
        broadcast_object_list(completions)
        start = self.accelerator.process_index * len(prompts)
        tokens, logprobs = zip(*completions[start : start + len(prompts)], strict=True)
        return prompts, list(tokens), [[[value] for value in row] for row in logprobs], None


if __name__ == "__main__":
    grpo_trainer.VLLMGeneration = EngineGeneration
    sys.argv += ["--use_vllm", "--vllm_mode", "server"]
    trainer = finetune_grpo.main()
    if trainer.accelerator.is_main_process:
        trainer.vllm_generation.vllm_client.stop()
    dist.destroy_process_group()
