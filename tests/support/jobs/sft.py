"""An SFT script as a user of TRL writes it, with packed documents of many lengths.

    python tests/support/jobs/sft.py FOLDER --batch 2                      stock, in one process
    accelerate launch --config_file examples/accelerate/cpu_4.yaml \
        tests/support/jobs/sft.py FOLDER --batch 1 --parallel              4 ranks at ep 2, sp 2

`--parallel` adds two lines, an import and a call. With `--pp 2` the ranks form 2 pipeline stages
instead of pairs that share a sequence, and with `--ep 4` neither. `--padded` pads rows instead of
packing them. With `--own-loss` a subclass of the trainer overrides the loss. With `--unlabelled`
two of three documents have no labels, and there is no aux loss.
FOLDER/run.json holds the trainer's log, the lengths of the documents in each packed row, and the
number of steps that ran.

`--save` writes a checkpoint after every second step, and FOLDER/model at the end. With `--die-at N`
the last rank kills itself in the middle of step N, and with `--stop-after N` the run ends after
step N of `--steps`. `--resume` resumes from the newest checkpoint.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer

from support.tiny_models import tiny
from support.words import make_tokenizer

NUM_DOCUMENTS = 60


def documents(unlabelled: bool) -> Dataset:
    """Make tokenised documents of 3 to 21 tokens that count 3, 4, .. 9, 3, 4, ..

    The first 1 to 5 tokens are a prompt without labels. The documents are so easy that accuracy
    changes within a few steps. If `unlabelled`, two of three documents consist of a prompt.
    """
    samples = []
    for index in range(NUM_DOCUMENTS):
        length = 3 + 7 * index % 19
        prompt = 1 + index % min(5, length - 1)
        tokens = [3 + (index + position) % 7 for position in range(length)]
        labelled = int(not unlabelled or index % 3 == 0)
        mask = [0] * prompt + [labelled] * (length - prompt)
        sample = {"input_ids": tokens, "completion_mask": mask}
        if unlabelled:
            labels = [token if chosen else -100 for token, chosen in zip(tokens, mask, strict=True)]
            sample = {"input_ids": tokens, "labels": labels}
        samples.append(sample)
    return Dataset.from_list(samples)


class Steps(TrainerCallback):
    """Counts steps, ends the run after step `stop_after`, and kills the last rank between two
    micro-batches of step `die_at`.
    """

    def __init__(self, die_at: int, stop_after: int) -> None:
        self.die_at, self.stop_after = die_at, stop_after
        self.begun = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun += 1

    def on_step_end(
        self, args: SFTConfig, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step == self.stop_after:
            control.should_training_stop = True

    def on_substep_end(
        self, args: SFTConfig, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step + 1 == self.die_at and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class OwnLoss(SFTTrainer):
    """A trainer whose loss is SFTTrainer's, in a method as TRL's documentation suggests it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--loss", default="nll")
    parser.add_argument("--own-loss", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--unlabelled", action="store_true")
    options = parser.parse_args()

    arguments = SFTConfig(
        output_dir=os.fspath(options.folder),
        packing=not options.padded,
        loss_type=options.loss,
        max_length=32,
        completion_only_loss=True,
        # TRL's preparation drops documents without labels.
        dataset_kwargs={"skip_prepare_dataset": options.unlabelled},
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        logging_steps=1,
        learning_rate=3e-3,
        max_grad_norm=0.5,
        router_aux_loss_coef=0.0 if options.unlabelled else 0.1,
        use_cpu=True,
        bf16=False,
        save_strategy="steps" if options.save else "no",
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
    )
    model = tiny(dtype=torch.float32)

    if options.parallel:
        from hf_moe_ep import patch

        # With "gpipe" the aux loss is that of the whole batch, as in one process.
        stages = {"pp_size": options.pp, "pp_schedule": "gpipe" if options.padded else "1f1b"}
        patch(model, ep_size=options.ep, sp_size=4 // options.ep // options.pp, **stages)

    steps = Steps(options.die_at, options.stop_after)
    trainer = (OwnLoss if options.own_loss else SFTTrainer)(
        model,
        args=arguments,
        train_dataset=documents(options.unlabelled),
        processing_class=make_tokenizer(model.config.vocab_size),
        callbacks=[steps],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if options.save:
        trainer.save_model(os.fspath(options.folder / "model"))
    if trainer.is_world_process_zero():
        rows = [] if options.padded else list(trainer.train_dataset["seq_lengths"])
        run = {"log": trainer.state.log_history, "rows": rows, "steps": steps.begun}
        (options.folder / "run.json").write_text(json.dumps(run))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: a thread of torch that nobody joins sometimes aborts the exit (SIGABRT).
    os._exit(0)
