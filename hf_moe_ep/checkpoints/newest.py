"""Which checkpoint a script goes on from that is started again, by a launcher or by its user.

Complete ones alone (`storage/manifest.py`). Others do not count; those that look like a checkpoint
are named, because a run that begins anew beside them may be a surprise.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.ranks.together import is_first, on_first

_TRAINERS = re.compile(r"checkpoint-\d+")


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Find the complete checkpoint in `folder` that was written last; every rank calls this.

        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    or, in a loop of one's own,

        newest = newest_checkpoint("out")
        step = load_checkpoint(newest, model, optimizer, scheduler)["step"] if newest else 0

    Checkpoints are those of `save_checkpoint` and of a patched model's Trainer, whatever they are
    called. Rank 0 looks, at sizes alone: whoever loads one reads it against its hashes. A warning
    names what was not finished, or was written by the stock Trainer and so cannot be verified.

    Args:
        folder: where a run keeps its checkpoints; it need not exist.

    Returns:
        The same path on every rank, or None: there is nothing to go on from.

    Raises:
        RuntimeError: on every rank: rank 0 could not look.
    """
    root = Path(folder)
    complete, others = on_first(
        f"looking for a checkpoint in {root}", lambda: manifest.complete_in(root)
    )
    newest = complete[-1] if complete else None
    unfit = [
        why
        for path, why in others.items()
        if manifest.is_ours(path) or _TRAINERS.fullmatch(path.name)
    ]
    if unfit and is_first():
        chosen = "beginning anew" if newest is None else f"going on from {newest}"
        warnings.warn(f"{chosen}; passed over: " + "; ".join(unfit), stacklevel=2)
    return newest
