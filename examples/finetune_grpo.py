"""Train a Mixture-of-Experts language model by rewards that a program checks, with TRL's GRPO.

    accelerate launch --config_file examples/accelerate/gpu_8.yaml examples/finetune_grpo.py \
        --model Qwen/Qwen3-30B-A3B --ep_size 8 --output_dir out/grpo --bf16 --lora

Everything here is a stock TRL script except the lines that use hf_moe_ep; `--ep_size 0` leaves
the model stock. The prompts are sums of two numbers. One reward is for the right answer. Another,
for answering in digits, is something that a model without a clue can learn from. For a task of
your own replace `sums` and the two rewards.

Completions come from the model itself, by `generate` on the ranks that train it. `--use_vllm` lets
vLLM make them, as TRL has it: `--vllm_mode server` or `--vllm_mode colocate`. Then each step sends
vLLM the tensors of a checkpoint from the hub, adapters merged.

Any flag of GRPOConfig works; without a GPU launch with cpu_4.yaml and add `--use_cpu --bf16 False`.
Writes the model, or with --lora a stock PEFT adapter, and the tokenizer to --output_dir, and
trainer_state.json (every logged reward).
"""

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from hf_moe_ep import describe, newest_checkpoint, patch


@dataclass
class ScriptArguments:
    model: str
    ep_size: int = 1
    lora: bool = False
    lora_rank: int = 16
    num_prompts: int = 4096
    largest: int = 99


def sums(count: int, largest: int) -> list[dict[str, str]]:
    """Return prompts, the same on every rank, and their answers."""
    numbers = random.Random(0)
    pairs = [(numbers.randint(0, largest), numbers.randint(0, largest)) for _ in range(count)]
    return [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a, b in pairs]


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward 1 where the first number of a completion is the answer."""
    found = [re.search(r"\d+", completion) for completion in completions]
    pairs = zip(found, answer, strict=True)
    return [float(number is not None and number[0] == wanted) for number, wanted in pairs]


def in_digits(completions: list[str], **_: Any) -> list[float]:
    """Reward the share of a completion's characters that are digits."""
    return [
        sum(character in "0123456789" for character in completion) / max(len(completion), 1)
        for completion in completions
    ]


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, GRPOConfig))
    args, training_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.bfloat16 if training_args.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    if args.ep_size > 0:
        patch(model, ep_size=args.ep_size)

    adapters = None
    if args.lora:
        adapters = LoraConfig(
            r=args.lora_rank,
            lora_alpha=2 * args.lora_rank,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM",
        )
    trainer = GRPOTrainer(
        model,
        reward_funcs=[right, in_digits],
        args=training_args,
        train_dataset=Dataset.from_list(sums(args.num_prompts, args.largest)),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    begun = training_args.resume_from_checkpoint or newest_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=begun)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero() and args.ep_size > 0:
        print(describe(model))


if __name__ == "__main__":
    main()
