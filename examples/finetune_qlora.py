"""Fine-tune adapters on experts that are held in 4 bits: what QLoRA is to a dense model.

    accelerate launch --config_file examples/accelerate/gpu_8.yaml examples/finetune_qlora.py \
        --model Qwen/Qwen3-30B-A3B --ep_size 8 --output_dir out/adapter --bf16

`examples/finetune_lora.py`, with another line to load the model: each rank reads its share of a
checkpoint in bf16, and quantises the experts one by one as it reads them. Attention and all else
stays in bf16. `--experts_dtype fp8` takes a checkpoint that is published in FP8 as it is.

Writes a stock PEFT adapter to --output_dir, and trainer_state.json (every logged loss). Started
again, it goes on from the newest complete checkpoint there.
`hf-moe-ep merge-adapter MODEL ADAPTER OUT` adds it to the checkpoint in bf16.
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
    # Of a batch that is not full the Trainer repeats blocks: a multiple of all ranks' batches.
    eval_blocks: int = 64


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    # Making TrainingArguments starts the process group, over which the model is then read.
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
    begun = training_args.resume_from_checkpoint or newest_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=begun)
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        model.print_trainable_parameters()
        print(describe(model))


if __name__ == "__main__":
    main()
