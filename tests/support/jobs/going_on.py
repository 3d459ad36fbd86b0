"""Training that resumes from the newest complete checkpoint whenever it is started.

    torchrun ... tests/support/jobs/going_on.py FOLDER --steps 8              a loop of its own
    accelerate launch ... tests/support/jobs/going_on.py FOLDER --steps 8 --trainer --use_cpu

FOLDER gets checkpoints and `losses`, a line for each step of rank 0: its number, loss, and which
start of the ranks this was. A file `FOLDER/die-RANK-STEP` makes that rank do at that step what the
file says, once, and renames it to `done-RANK-STEP`:

    rank, agent      is killed (SIGKILL)
    stall, stop      waits for ever in front of a router; is stopped there (SIGSTOP)
    stall in save    the same while it writes the checkpoint of that step
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

SMALL = {"num_hidden_layers": 1}


def misfortune(folder: Path, rank: int, number: int, model: nn.Module) -> None:
    """Die, or stall in the MoE layer, where a file says so."""
    order = folder / f"die-{rank}-{number}"
    if not order.exists():
        return
    what, done = order.read_text(), folder / f"done-{rank}-{number}"
    if what == "stall in save":
        stock = training_folder.write_json

        def stall(path: Path, value: Any) -> None:
            if path.parent.name == f"step-{number + 1}":  # the one before may still be written
                order.rename(done)
                time.sleep(3600)
            stock(path, value)

        training_folder.write_json = stall
        return
    order.rename(done)
    if what in ("stall", "stop"):
        router = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
        wait = partial(time.sleep, 3600)
        if what == "stop":
            wait = partial(os.kill, os.getpid(), signal.SIGSTOP)
        router.register_forward_pre_hook(lambda *_: wait())
        return
    os.kill(os.getpid() if what == "rank" else os.getppid(), signal.SIGKILL)
    if what == "agent":
        time.sleep(3600)  # whoever started the agent ends what it leaves behind


def note(folder: Path, number: int, loss: float) -> None:
    """Add a step to the losses."""
    with open(folder / "losses", "a") as log:
        log.write(f"{number} {loss!r} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")


def read_losses(folder: Path) -> dict[int, set[str]]:
    """The losses that each step had; as text, which is exact."""
    found: dict[int, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        number, loss, _ = line.split()
        found.setdefault(int(number), set()).add(loss)
    return found


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "ep_size": args.ep_size,
        "dispatcher": args.dispatcher,
        "dp_replicate_size": args.replicate,
    }


def steps_taken(folder: Path) -> list[int]:
    """The steps in the order in which they were taken, those that were taken again too."""
    log = folder / "losses"
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


def own_loop(folder: Path, args: argparse.Namespace) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.patience or 60))
    rank, world = dist.get_rank(), dist.get_world_size()
    run = start("full", Layout("nodes", world, config_of(args)), **SMALL)
    parts = (run.model, run.optimizer, run.scheduler)
    first, handle = 0, None
    if (newest := newest_checkpoint(folder)) is not None:
        first = load_checkpoint(newest, *parts)["step"]
    for number in range(first, args.steps):
        told = torch.tensor(args.until_told and (folder / "stop").exists())
        dist.broadcast(told, 0)
        if told:
            break
        misfortune(folder, rank, number, run.model)
        loss = step(run, number)
        if rank == 0:
            note(folder, number, loss)
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

    class Misfortune(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            misfortune(folder, args.process_index, state.global_step, kwargs["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if args.process_index == 0 and "loss" in logs:
                note(folder, state.global_step - 1, logs["loss"])

    options = ["--output_dir", str(folder), "--max_steps", str(args.steps), "--save_steps", "1"]
    options += ["--logging_steps", "1", "--save_total_limit", "2", "--report_to", "none", *rest]
    parser = HfArgumentParser(TrainingArguments)
    if args.patience:  # TrainingArguments ignores its ddp_timeout where it has use_cpu
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.patience))
    (training,) = parser.parse_args_into_dataclasses(options)
    model = tiny(**SMALL)
    patch(model, **config_of(args))
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=blocks(model.config.vocab_size),
        callbacks=[Misfortune()],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ep_size", type=int, default=2)
    parser.add_argument("--dispatcher", default="all_to_all")
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--until_told", action="store_true", help="by FOLDER/stop")
    parser.add_argument("--patience", type=float, help="of the process group, in s")
    parser.add_argument("--background", action="store_true", help="save there")
    parser.add_argument("--trainer", action="store_true")
    args, rest = parser.parse_known_args()
    if args.trainer:
        with_trainer(args.folder, args, rest)
    else:
        own_loop(args.folder, args)


if __name__ == "__main__":
    main()
