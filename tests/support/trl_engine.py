"""Train by TRL's GRPO or RLOO with a stand-in for vLLM; the sync of weights is TRL's own code.

The completions are random tokens, which are enough for steps of the optimizer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch


def settings(kind: str, folder: str, steps: int, learning_rate: float) -> Any:
    """Return the settings of TRL's `kind`, "GRPO" or "RLOO", on CPU ranks."""
    import trl

    return getattr(trl, f"{kind}Config")(
        output_dir=folder,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=6,
        max_steps=steps,
        beta=0.0,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="colocate",
        **({} if kind == "RLOO" else {"vllm_importance_sampling_correction": False}),
    )


def generation_class(
    engine: Any,
    after_sync: Callable[[Any], None],
    *,
    mode: str = "colocate",
    during_sync: Callable[[Any], AbstractContextManager[Any]] = lambda model: nullcontext(),
    vocab_size: int = 60,
) -> Any:
    """Make a subclass of TRL's VLLMGeneration with a stand-in engine.

    Args:
        engine: has `begin`, called before each sync, and `load_weights`.
        after_sync: called with the model after each sync.
        mode: "colocate", or "server" with the engine as TRL's client.
        during_sync: returns a context for a sync of the model.
        vocab_size: completions are tokens from 3 to this number - 1.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    class Generation(VLLMGeneration):
        def _init_vllm(self) -> None:
            self.mode = mode
            runner = SimpleNamespace(model_runner=SimpleNamespace(model=engine))
            executor = SimpleNamespace(driver_worker=runner)
            self.llm = SimpleNamespace(
                llm_engine=SimpleNamespace(model_executor=executor),
                reset_prefix_cache=lambda: None,
            )
            self.vllm_client = engine

        def sync_weights(self) -> None:
            engine.begin()
            with during_sync(self.model):
                super().sync_weights()
            after_sync(self.model)

        def generate(self, prompts: Any, images: Any, num_generations: int, **_: Any) -> Any:
            completions = [torch.randint(3, vocab_size, (6,)).tolist() for _ in prompts]
            return prompts, completions, [[[-1.0]] * 6 for _ in prompts], None

    return Generation


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]
