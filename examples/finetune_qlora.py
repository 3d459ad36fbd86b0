"""Fine-tune adapters on experts that are stored in 4 bits: QLoRA for Mixture-of-Experts models.

    accelerate launch --config_file examples/accelerate/gpu_8.yaml examples/finetune_qlora.py \
        --model Qwen/Qwen3-30B-A3B --ep_size 8 --output_dir out/adapter --bf16

The script differs from `examples/finetune_lora.py` in how it loads the model: each rank reads its
share of a checkpoint in bf16, and quantises each expert while reading it. All other weights stay in
bf16. With `--experts_dtype fp8` a checkpoint that is published in FP8 is used without conversion.

The script writes a stock PEFT adapter and trainer_state.json (every logged loss) to --output_dir.
If it is started again, it resumes from the newest complete checkpoint in --output_dir.
`hf-moe-ep merge-adapter MODEL ADAPTER OUT` writes the bf16 checkpoint with the adapter merged.
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig
from text_data import pack, split_text
from transformers import AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

from hf_moe_ep import describe, from_pretrained, newest_checkpoint


@dataclass
class ScriptArguments:
    model: str
    ep_size: int = 1
    experts_dtype: str = "nf4"
    experts_double_quant: bool = False
    lora_rank: int = 16
    text_file: str | None = None
    block_size: int = 256
    # Use a multiple of ranks x per_device_eval_batch_size. Otherwise the Trainer completes the last
    # batch by repeating blocks, which changes the loss.
    eval_blocks: int = 64


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    # Creating TrainingArguments starts the process group, which from_pretrained needs.
    args, training_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lora = LoraConfig(
        r=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = from_pretrained(
        args.model,
        dtype=torch.bfloat16 if training_args.bf16 else torch.float32,
        peft_config=lora,
        ep_size=args.ep_size,
        experts_dtype=args.experts_dtype,
        experts_double_quant=args.experts_double_quant,
    )

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
        print(describe(model))


if __name__ == "__main__":
    main()
