"""Fine-tune adapters on the experts and the attention of a Mixture-of-Experts language model.

    accelerate launch --config_file examples/accelerate/gpu_8.yaml examples/finetune_lora.py \
        --model Qwen/Qwen3-30B-A3B --ep_size 8 --output_dir out/adapter --bf16

This is a stock PEFT script except for the lines that use hf_moe_ep. With `--ep_size 0` the model is
not patched. Any flag of TrainingArguments works. Without a GPU, launch with cpu_4.yaml and add
`--use_cpu`.

The script writes a stock PEFT adapter and trainer_state.json (every logged loss) to --output_dir.
Servers that read single experts need a converted adapter:
`hf-moe-ep export-adapter out/adapter out/served`.
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from text_data import pack, split_text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from hf_moe_ep import describe, newest_checkpoint, patch


@dataclass
class ScriptArguments:
    model: str
    ep_size: int = 1
    lora_rank: int = 16
    text_file: str | None = None
    block_size: int = 256
    # Use a multiple of ranks x per_device_eval_batch_size. Otherwise the Trainer completes the last
    # batch by repeating blocks, which changes the loss.
    eval_blocks: int = 64


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    args, training_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.bfloat16 if training_args.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    lora = LoraConfig(
        r=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    if args.ep_size > 0:
        patch(model, ep_size=args.ep_size)

    train_text, held_out_text = split_text(args.text_file)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=pack(tokenizer, train_text, args.block_size),
        eval_dataset=pack(tokenizer, held_out_text, args.block_size, args.eval_blocks),
        processing_class=tokenizer,
    )
    checkpoint = training_args.resume_from_checkpoint or newest_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        model.print_trainable_parameters()
        if args.ep_size > 0:
            print(describe(model))


if __name__ == "__main__":
    main()
