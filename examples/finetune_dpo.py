"""Train a Mixture-of-Experts language model on preferences, with TRL's DPOTrainer.

    accelerate launch --config_file examples/accelerate/gpu_8.yaml examples/finetune_dpo.py \
        --model Qwen/Qwen3-30B-A3B --ep_size 8 --output_dir out/dpo --bf16

This is a stock TRL script except for the lines that use hf_moe_ep. With `--ep_size 0` the model is
not patched. TRL loads the reference model itself, from the checkpoint --model. If the policy is
patched, the reference is sharded in the same way and frozen. `--preferences` names a file of JSON
lines with "prompt", "chosen" and "rejected". By default, a prompt is the beginning of a passage of
the text that the other examples use. The next words of this passage are the chosen answer, and
words of another passage are the rejected answer.

Any flag of DPOConfig works. Without a GPU, launch with cpu_4.yaml and add `--use_cpu --bf16 False`.
The script writes the model, the tokenizer and trainer_state.json (every logged loss and margin) to
--output_dir.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from datasets import Dataset
from text_data import split_text
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer

from hf_moe_ep import describe, newest_checkpoint, patch

WORDS = 16


@dataclass
class ScriptArguments:
    model: str
    ep_size: int = 1
    preferences: str | None = None


def continuations(text: str) -> list[dict[str, str]]:
    """Cut a text into preferences: the passage's own next words are chosen, others are rejected.

    Each prompt and each answer has WORDS words.
    """
    passages = [passage.split() for passage in text.split("\n\n")]
    passages = [words for words in passages if len(words) >= 2 * WORDS]
    return [
        {
            "prompt": " ".join(words[:WORDS]),
            "chosen": " " + " ".join(words[WORDS : 2 * WORDS]),
            "rejected": " " + " ".join(other[WORDS : 2 * WORDS]),
        }
        for other, words in pairwise(passages)
    ]


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, DPOConfig))
    args, training_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.bfloat16 if training_args.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    if args.ep_size > 0:
        patch(model, ep_size=args.ep_size)

    if args.preferences is None:
        train_dataset = Dataset.from_list(continuations(split_text()[0]))
    else:
        train_dataset = Dataset.from_json(args.preferences)
    trainer = DPOTrainer(
        model, args=training_args, train_dataset=train_dataset, processing_class=tokenizer
    )
    checkpoint = training_args.resume_from_checkpoint or newest_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero() and args.ep_size > 0:
        print(describe(model))


if __name__ == "__main__":
    main()
