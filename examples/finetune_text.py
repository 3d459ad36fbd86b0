"""Fine-tune a Mixture-of-Experts language model on plain text with the stock Trainer.

    accelerate launch --config_file examples/accelerate/gpu_8.yaml examples/finetune_text.py \
        --model Qwen/Qwen3-30B-A3B --ep_size 8 --output_dir out/qwen3 --bf16

This is a stock script except for the lines that use hf_moe_ep. With `--ep_size 0` the model is not
patched. Any flag of TrainingArguments works. `run_demo.sh` runs the script on four CPU processes.
If it is started again, it resumes from the newest complete checkpoint in --output_dir.

The script writes to --output_dir the model and the tokenizer (hub layout), trainer_state.json
(every logged loss) and rank_stats.json (tokens per second and peak memory of each rank).
"""

import json
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
from text_data import pack, split_text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from hf_moe_ep import describe, newest_checkpoint, patch


@dataclass
class ScriptArguments:
    model: str
    ep_size: int = 1
    text_file: str | None = None
    block_size: int = 256
    # The evaluation uses at most eval_blocks blocks, and a multiple of eval_multiple. Set
    # eval_multiple to ranks x per_device_eval_batch_size. Otherwise the Trainer completes the last
    # batch by repeating blocks, or drops this batch with dataloader_drop_last.
    eval_blocks: int = 64
    eval_multiple: int = 1


def rank_stats(trainer: Trainer, block_size: int, steps: int, seconds: float) -> list[dict]:
    """Return tokens per second and peak memory of every rank (GPU memory if ranks use GPUs)."""
    args = trainer.args
    blocks = args.per_device_train_batch_size * args.gradient_accumulation_steps
    tokens = steps * blocks * block_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available() and not args.use_cpu:
        peak = torch.cuda.max_memory_allocated()
    row = torch.tensor([[tokens / seconds, peak / 2**20]], device=args.device)
    rows = trainer.accelerator.gather(row).tolist()
    return [{"tokens_per_s": speed, "peak_mib": mib} for speed, mib in rows]


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    args, training_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.ep_size > 0:
        patch(model, ep_size=args.ep_size)

    train_text, held_out_text = split_text(args.text_file)
    limits = (args.eval_blocks, args.eval_multiple)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=pack(tokenizer, train_text, args.block_size),
        eval_dataset=pack(tokenizer, held_out_text, args.block_size, *limits),
        processing_class=tokenizer,
    )
    checkpoint = training_args.resume_from_checkpoint or newest_checkpoint(training_args.output_dir)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    first_step = 0
    if checkpoint:
        first_step = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())["global_step"]
    steps = trainer.state.global_step - first_step
    stats = rank_stats(trainer, args.block_size, steps, result.metrics["train_runtime"])
    if trainer.is_world_process_zero():
        Path(training_args.output_dir, "rank_stats.json").write_text(json.dumps(stats, indent=2))
        if args.ep_size > 0:
            print(describe(model))


if __name__ == "__main__":
    main()
