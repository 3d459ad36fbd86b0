"""Training that resumes from the newest complete checkpoint whenever it is started.

    torchrun ... tests/support/jobs/going_on.py FOLDER --steps 8              a loop of its own
    accelerate launch ... tests/support/jobs/going_on.py FOLDER --steps 8 --trainer --use_cpu

FOLDER gets the checkpoints and a file `losses`, to which rank 0 adds a line for each step: its
number, its loss, and the number of restarts before it. A test can make a rank fail once at a step,
with a file `FOLDER/die-RANK-STEP`. The rank renames it to `done-RANK-STEP`. The file contains:

    rank             kill the rank (SIGKILL)
    agent            kill the rank's launcher
    stall            wait forever in front of a router
    stop             stop the rank (SIGSTOP) in front of a router
    stall in save    wait forever while the checkpoint of this step is written
"""

import argparse
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_moe_ep import load_checkpoint, newest_checkpoint, save_checkpoint
from hf_moe_ep.checkpoints.training import folder as training_folder
from support.jobs.resume import Layout, start, step


def fail_on_order(folder: Path, rank: int, number: int, model: nn.Module) -> None:
    """Make this rank fail at step `number` if there is a file that says so."""
    order = folder / f"die-{rank}-{number}"
    if not order.exists():
        return
    failure, done = order.read_text(), folder / f"done-{rank}-{number}"
    if failure == "stall in save":
        stock = training_folder.write_json

        def stall(path: Path, value: Any) -> None:
            if path.parent.name == f"step-{number + 1}":  # the previous step may still be written
                order.rename(done)
                time.sleep(3600)
            stock(path, value)

        training_folder.write_json = stall
        return
    order.rename(done)
    if failure in ("stall", "stop"):
        router = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
        wait = partial(time.sleep, 3600)
        if failure == "stop":
            wait = partial(os.kill, os.getpid(), signal.SIGSTOP)
        router.register_forward_pre_hook(lambda *_: wait())
        return
    os.kill(os.getpid() if failure == "rank" else os.getppid(), signal.SIGKILL)
    if failure == "agent":
        time.sleep(3600)  # the test kills the ranks of the agent


def record_loss(folder: Path, number: int, loss: float) -> None:
    with open(folder / "losses", "a") as log:
        log.write(f"{number} {loss!r} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")


def read_losses(folder: Path) -> dict[int, set[str]]:
    """Return step -> all losses that it had, as text, because text is exact."""
    losses: dict[int, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        number, loss, _ = line.split()
        losses.setdefault(int(number), set()).add(loss)
    return losses


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "ep_size": args.ep_size,
        "dispatcher": args.dispatcher,
        "dp_replicate_size": args.replicate,
    }


def steps_taken(folder: Path) -> list[int]:
    """List the steps in the order in which they ran. A step that was repeated is listed again."""
    log = folder / "losses"
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


def own_loop(folder: Path, args: argparse.Namespace) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.patience or 60))
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = Layout("nodes", world, config_of(args))
    run = start("full", layout, num_hidden_layers=args.layers)
    parts = (run.model, run.optimizer, run.scheduler)
    first, handle = 0, None
    if (newest := newest_checkpoint(folder)) is not None:
        first = load_checkpoint(newest, *parts)["step"]
    for number in range(first, args.steps):
        must_stop = torch.tensor(args.until_told and (folder / "stop").exists())
        dist.broadcast(must_stop, 0)
        if must_stop:
            break
        fail_on_order(folder, rank, number, run.model)
        loss = step(run, number)
        if rank == 0:
            record_loss(folder, number, loss)
        handle = save_checkpoint(
            folder / f"step-{number + 1}",
            *parts,
            progress={"step": number + 1},
            asynchronous=args.background,
        )
    if handle is not None:
        handle.wait()
    dist.destroy_process_group()


def with_trainer(folder: Path, args: argparse.Namespace, rest: list[str]) -> None:
    from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

    from hf_moe_ep import patch
    from support.jobs.clm_no_trainer import blocks
    from support.tiny_models import tiny

    class Callback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            fail_on_order(folder, args.process_index, state.global_step, kwargs["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if args.process_index == 0 and "loss" in logs:
                record_loss(folder, state.global_step - 1, logs["loss"])

    options = ["--output_dir", str(folder), "--max_steps", str(args.steps), "--save_steps", "1"]
    options += ["--logging_steps", "1", "--save_total_limit", "2", "--report_to", "none", *rest]
    parser = HfArgumentParser(TrainingArguments)
    if args.patience:  # with use_cpu, TrainingArguments ignores ddp_timeout
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.patience))
    (training,) = parser.parse_args_into_dataclasses(options)
    model = tiny(num_hidden_layers=args.layers)
    patch(model, **config_of(args))
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=blocks(model.config.vocab_size),
        callbacks=[Callback()],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ep_size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--dispatcher", default="all_to_all")
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--until_told", action="store_true", help="stop when FOLDER/stop exists")
    parser.add_argument("--patience", type=float, help="timeout of the process group, in seconds")
    parser.add_argument("--background", action="store_true", help="save checkpoints in a thread")
    parser.add_argument("--trainer", action="store_true")
    args, rest = parser.parse_known_args()
    if args.trainer:
        with_trainer(args.folder, args, rest)
    else:
        own_loop(args.folder, args)


if __name__ == "__main__":
    main()
