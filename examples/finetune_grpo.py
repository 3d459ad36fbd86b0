"""Train a Mixture-of-Experts language model with rewards that a program computes, by TRL's GRPO.

    accelerate launch --config_file examples/accelerate/gpu_8.yaml examples/finetune_grpo.py \
        --model Qwen/Qwen3-30B-A3B --ep_size 8 --output_dir out/grpo --bf16 --lora

This is a stock TRL script except for the lines that use hf_moe_ep. With `--ep_size 0` the model is
not patched. The prompts are sums of two numbers. One reward is for the right answer. The other
reward is for digits in the answer, so that a model that never answers right can learn as well. For
your own task, replace `sums` and the two rewards.

The model generates the completions itself, by `generate` on the ranks that train it. With
`--use_vllm`, vLLM generates the completions, in TRL's modes `--vllm_mode server` and
`--vllm_mode colocate`. Each step then sends vLLM the model's tensors in the hub's layout, with
adapters merged.

Any flag of GRPOConfig works. Without a GPU, launch with cpu_4.yaml and add `--use_cpu --bf16
False`. The script writes the model (with --lora a stock PEFT adapter), the tokenizer and
trainer_state.json (every logged reward) to --output_dir.
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
    """Return prompts and their answers, the same on every rank."""
    numbers = random.Random(0)
    pairs = [(numbers.randint(0, largest), numbers.randint(0, largest)) for _ in range(count)]
    return [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a, b in pairs]


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return reward 1 for each completion whose first number is the answer, else 0."""
    numbers = [re.search(r"\d+", completion) for completion in completions]
    pairs = zip(numbers, answer, strict=True)
    return [float(number is not None and number[0] == expected) for number, expected in pairs]


def in_digits(completions: list[str], **_: Any) -> list[float]:
    """Return as reward the share of digits among the characters of each completion."""
    return [
        sum(character in "0123456789" for character in completion) / max(len(completion), 1)
        for completion in completions
    ]


def main() -> GRPOTrainer:
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
    checkpoint = training_args.resume_from_checkpoint or newest_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero() and args.ep_size > 0:
        print(describe(model))
    return trainer


if __name__ == "__main__":
    main()
