"""GRPO or RLOO as a user of TRL writes it, with `generate` of the model that is trained.

    python tests/support/jobs/online.py FOLDER --batch 8                   stock, in one process
    accelerate launch --config_file examples/accelerate/cpu_4.yaml \
        tests/support/jobs/online.py FOLDER --batch 2 --ep-size 2          4 ranks at ep 2

`--ep-size` adds two lines, an import and a call. FOLDER/run.json holds the trainer's log, and
FOLDER/generatedR.json the completions that rank R generated.

Sampled tokens depend on the random numbers of their process. Here these come from a table with an
entry for each row of the global batch and each step of a generation, so a row draws the same
numbers on one process and on four.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from support.tiny_models import tiny
from support.words import make_tokenizer, text_of_tokens

TRAINERS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}
GENERATIONS = 4
GLOBAL_BATCH = 8
MOST_TOKENS = 12


def prompts() -> Dataset:
    """Make prompts of 1 to 7 words, so that batches have padding."""
    rows = [
        [3 + (index + position) % 11 for position in range(1 + index % 7)] for index in range(24)
    ]
    return Dataset.from_list([{"prompt": text_of_tokens(row)} for row in rows])


class RandomTable:
    """`multinomial` replaces torch.multinomial: a row and a step determine its random number."""

    def __init__(self) -> None:
        self.first_row = 0
        self.generation = 0
        self.step = 0

    def multinomial(self, probabilities: Tensor, num_samples: int, **_: Any) -> Tensor:
        assert num_samples == 1
        generator = torch.Generator().manual_seed(1000 * self.generation + self.step)
        numbers = torch.rand(GLOBAL_BATCH, 1, generator=generator, dtype=torch.float64)
        numbers = numbers[self.first_row : self.first_row + len(probabilities)]
        self.step += 1
        sums = probabilities.double().cumsum(1)
        return torch.searchsorted(sums / sums[:, -1:], numbers).clamp(max=sums.shape[1] - 1)

    def end_generation(self) -> None:
        self.generation += 1
        self.step = 0


RANDOM = RandomTable()
GENERATED: list[str] = []


def reward(completions: list[str], **_: Any) -> list[float]:
    """Reward words with even numbers and short completions. TRL calls this once per generation."""
    RANDOM.end_generation()
    GENERATED.extend(completions)
    scores = []
    for completion in completions:
        words = [int(word.removeprefix("word")) for word in completion.split()]
        scores.append(sum(word % 2 == 0 for word in words) - 0.3 * len(words))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trainer", choices=TRAINERS, default="grpo")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--ep-size", type=int)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--greedy", action="store_true")
    options = parser.parse_args()

    make, configure = TRAINERS[options.trainer]
    arguments = configure(
        output_dir=os.fspath(options.folder),
        per_device_train_batch_size=options.batch,
        num_generations=GENERATIONS,
        max_completion_length=MOST_TOKENS,
        max_steps=3,
        num_iterations=2,
        beta=0.1 if options.lora else 0.0,
        generation_kwargs={"do_sample": not options.greedy},
        gradient_checkpointing=True,
        learning_rate=3e-3,
        max_grad_norm=0.5,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_vllm=False,
    )
    model = tiny(dtype=torch.float32)

    if options.ep_size:
        from hf_moe_ep import patch

        patch(model, ep_size=options.ep_size)

    adapters = None
    if options.lora:
        from peft import LoraConfig

        adapters = LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
    trainer = make(
        model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts(),
        processing_class=make_tokenizer(model.config.vocab_size),
        peft_config=adapters,
    )
    rank = trainer.accelerator.process_index
    RANDOM.first_row = rank * options.batch
    torch.multinomial = RANDOM.multinomial  # type: ignore[assignment]
    trainer.train()
    (options.folder / f"generated{rank}.json").write_text(json.dumps(GENERATED))
    if trainer.is_world_process_zero():
        (options.folder / "run.json").write_text(json.dumps({"log": trainer.state.log_history}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: a thread of torch that nobody joins sometimes aborts the exit (SIGABRT).
    os._exit(0)
