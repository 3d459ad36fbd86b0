"""An SFT script as a user of TRL writes it: a tiny Qwen3-MoE, documents of many lengths, packing.

    python tests/support/jobs/sft.py FOLDER --batch 2                      stock, in one process
    accelerate launch --config_file examples/accelerate/cpu_4.yaml \
        tests/support/jobs/sft.py FOLDER --batch 1 --parallel              4 ranks at ep 2, sp 2

`--parallel` adds two lines, an import and a call; nothing else asks for it. FOLDER/run.json is
what the trainer logged and the lengths of the documents in each packed row.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from support.tiny_models import tiny
from support.words import tokenizer

NUM_DOCUMENTS = 60


def documents() -> Dataset:
    """3 to 21 tokens that count round 3 .. 9, already tokenised; a prompt of 1 to 5 is not learned.

    Easy enough for accuracy to move within a few steps.
    """
    samples = []
    for index in range(NUM_DOCUMENTS):
        length = 3 + 7 * index % 19
        prompt = 1 + index % min(5, length - 1)
        tokens = [3 + (index + place) % 7 for place in range(length)]
        mask = [0] * prompt + [1] * (length - prompt)
        samples.append({"input_ids": tokens, "completion_mask": mask})
    return Dataset.from_list(samples)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--parallel", action="store_true")
    options = parser.parse_args()

    arguments = SFTConfig(
        output_dir=os.fspath(options.folder),
        packing=True,
        max_length=32,
        completion_only_loss=True,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=3e-3,
        max_grad_norm=0.5,
        router_aux_loss_coef=0.1,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = tiny(dtype=torch.float32)

    if options.parallel:
        from hf_moe_ep import patch

        patch(model, ep_size=2, sp_size=2)

    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=documents(),
        processing_class=tokenizer(model.config.vocab_size),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        rows = list(trainer.train_dataset["seq_lengths"])
        run = {"log": trainer.state.log_history, "rows": rows}
        (options.folder / "run.json").write_text(json.dumps(run))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without destructors: now and then a thread of torch, not joined, aborts the exit (SIGABRT).
    os._exit(0)
