"""Fine-tune a vision-language Mixture-of-Experts model with the stock Trainer.

    accelerate launch --config_file examples/accelerate/cpu_4.yaml examples/finetune_vision.py \
        --model out/demo_vision/start --ep_size 2 --sp_size 2 --output_dir out/demo_vision/trained \
        --use_cpu

This is a stock script except for the lines that use hf_moe_ep. Any flag of TrainingArguments works.
`run_vision_demo.sh` runs the script on four CPU processes.

In some steps only some ranks have pictures; hf_moe_ep handles this without code in the script. The
model has `accepts_loss_kwargs=False`: its loss is the mean over a rank's labels, and all ranks have
the same weight. The few labels of pictures therefore weigh as much as blocks of text.

The script writes the model, the tokenizer and the image processor to --output_dir, as stock
from_pretrained reads them, and trainer_state.json.
"""

from dataclasses import dataclass
from functools import partial

from digit_data import DigitsAndText, collate, held_out_samples
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from hf_moe_ep import PositionCollator, describe, newest_checkpoint, patch


@dataclass
class ScriptArguments:
    model: str
    ep_size: int = 1
    sp_size: int = 1


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    args, training_args = parser.parse_args_into_dataclasses()
    # The data set itself draws random samples, in runs of one kind (text or pictures). In the order
    # of the data set, each run is the batch of a single rank.
    training_args.train_sampling_strategy = "sequential"

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    image_processor = AutoImageProcessor.from_pretrained(args.model, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(args.model)
    patch(model, ep_size=args.ep_size, sp_size=args.sp_size)

    train = DigitsAndText(
        tokenizer,
        image_processor,
        num_samples=100_000,
        run=training_args.per_device_train_batch_size,
    )
    digits, text = held_out_samples(tokenizer, image_processor)
    make_batch = partial(collate, pad_token_id=tokenizer.pad_token_id)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset={"digits": digits, "text": text},
        data_collator=PositionCollator(model, make_batch),
        processing_class=tokenizer,
    )
    checkpoint = training_args.resume_from_checkpoint or newest_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        image_processor.save_pretrained(training_args.output_dir)
        print(describe(model))


if __name__ == "__main__":
    main()
