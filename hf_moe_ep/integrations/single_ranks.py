"""Refuse options of the Trainer with which one rank would do something that the others do not.

The ranks of a patched model run every forward and every save together. If one rank tried another
batch, or saved on its own, the others would wait for it.
"""

from __future__ import annotations

import transformers

from hf_moe_ep.upstream.accelerate_and_trainer import find_model_logger


def check_ranks_act_together(trainer: transformers.Trainer) -> None:
    """Raise ValueError if a training on several ranks has an option with which one acts alone."""
    num_ranks = trainer.accelerator.num_processes
    if num_ranks == 1:
        return
    if trainer.args.auto_find_batch_size:
        raise ValueError(
            f"auto_find_batch_size=True lets a rank that runs out of memory start again with a "
            f"smaller batch, while the other ranks (of {num_ranks}) wait for it in the old one; "
            f"leave it out, and set per_device_train_batch_size (`hf-moe-ep memory MODEL --gpus "
            f"{num_ranks} --seq S --batch B` plans the memory of a step)"
        )
    if (variable := find_model_logger(trainer)) is not None:
        raise ValueError(
            f"{variable} makes rank 0 save the model alone at the end of training, but all "
            f"{num_ranks} ranks save a patched model together; unset it, call "
            f"trainer.save_model(folder) on every rank after trainer.train(), and log the folder "
            f"on rank 0"
        )
