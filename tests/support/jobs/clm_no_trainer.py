"""Causal language modelling with an Accelerate loop, like transformers' run_clm_no_trainer.py.

    python tests/support/jobs/clm_no_trainer.py FOLDER --batch 8                stock, one process
    accelerate launch --config_file examples/accelerate/cpu_4.yaml \
        tests/support/jobs/clm_no_trainer.py FOLDER --batch 2 --ep-size 2       4 ranks at ep 2

The script has two parameter groups, gradient accumulation, a learning rate schedule, evaluation, a
tracker and a saved state every few steps. `--resume` continues from a state. At the end it calls
`save_pretrained` with the usual arguments of such scripts. `--ep-size` adds two lines, an import
and a call. FOLDER/run.json holds the losses and gradient norms.
"""

import argparse
import json
import math
import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

from support.tiny_models import tiny
from support.words import make_tokenizer, text_of_tokens

BLOCK = 16
NUM_TEXTS = 60


class Lines(GeneralTracker):
    """A user's own tracker, which writes a line of JSON for each step."""

    name = "lines"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, path: Path, fails_at: int | None) -> None:
        super().__init__()
        self.path = path
        self.fails_at = fails_at

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.log(values, None)

    def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
        if step is not None and step == self.fails_at:
            raise OSError("no space left on device")
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def texts() -> Dataset:
    """Make texts of 3 to 21 words whose numbers count upwards."""
    rows = [
        {"text": text_of_tokens([3 + (i + position) % 9 for position in range(3 + 7 * i % 19)])}
        for i in range(NUM_TEXTS)
    ]
    return Dataset.from_list(rows)


def blocks(vocab_size: int) -> Dataset:
    """Concatenate all texts and split them into blocks of BLOCK tokens."""
    words = make_tokenizer(vocab_size)
    tokenized = texts().map(lambda rows: words(rows["text"]), batched=True, remove_columns=["text"])

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain(*rows["input_ids"]))
        starts = range(0, len(tokens) // BLOCK * BLOCK, BLOCK)
        ids = [tokens[start : start + BLOCK] for start in starts]
        return {"input_ids": ids, "labels": [list(block) for block in ids]}

    return tokenized.map(group, batched=True, remove_columns=tokenized.column_names)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--ep-size", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--checkpointing-steps", type=int, default=3)
    parser.add_argument("--die-at", type=int, help="kill the process after this step is saved")
    parser.add_argument("--tracker-fails-at", type=int, help="the tracker cannot write this step")
    parser.add_argument("--resume", type=Path, help="the folder of a saved state")
    options = parser.parse_args()

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        # The order of the rows then does not depend on the number of processes.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        log_with=Lines(options.folder / "tracked.jsonl", options.tracker_fails_at),
    )
    set_seed(7)
    model = tiny(dtype=torch.float32)

    if options.ep_size:
        from hf_moe_ep import patch

        patch(model, ep_size=options.ep_size)

    data = blocks(model.config.vocab_size)
    eval_data = data.select(range(8))
    # All batches are full, because a smaller last batch would be filled up on four ranks only.
    train_data = data.select(range(8, 40))
    loader = DataLoader(
        train_data, shuffle=True, collate_fn=default_data_collator, batch_size=options.batch
    )
    eval_loader = DataLoader(eval_data, collate_fn=default_data_collator, batch_size=options.batch)
    no_decay = ("bias", "norm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = get_scheduler(
        "linear",
        optimizer,
        num_warmup_steps=accelerator.num_processes,
        num_training_steps=options.steps * accelerator.num_processes,
    )
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    accelerator.init_trackers("clm", {"lr": 3e-3, "ep_size": options.ep_size})

    done = 0
    if options.resume:
        accelerator.load_state(options.resume)
        done = int(options.resume.name.removeprefix("step_"))
    log = []
    steps_per_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    for epoch in range(done // steps_per_epoch, math.ceil(options.steps / steps_per_epoch)):
        model.train()
        batches = loader
        if options.resume and epoch == done // steps_per_epoch:
            num_done = done % steps_per_epoch * accelerator.gradient_accumulation_steps
            batches = accelerator.skip_first_batches(loader, num_done)
        batches.set_epoch(epoch)  # a resumed epoch must have the same order of rows
        total = 0.0
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += accelerator.gather(loss.detach()).mean().item()
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            log.append({"step": done, "loss": total, "grad_norm": float(norm)})
            accelerator.log({"loss": total, "lr": scheduler.get_last_lr()[0]}, step=done)
            total = 0.0
            if done % options.checkpointing_steps == 0:
                accelerator.save_state(options.folder / f"step_{done}")
            if done == options.die_at:
                accelerator.wait_for_everyone()
                os.kill(os.getpid(), signal.SIGKILL)
            if done == options.steps:
                break
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(options.batch)))
        log[-1]["eval_loss"] = torch.cat(losses).mean().item()

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        options.folder / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    if accelerator.is_main_process:
        make_tokenizer(model.config.vocab_size).save_pretrained(options.folder / "model")
        (options.folder / "run.json").write_text(json.dumps(log))
    accelerator.end_training()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: a thread of torch that nobody joins sometimes aborts the exit (SIGABRT).
    os._exit(0)
