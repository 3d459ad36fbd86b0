"""Find the checkpoint that a restarted script goes on from.

Only complete checkpoints count (`storage/manifest.py`), and the steps in their names choose between
them, never a clock (`storage/order.py`). Folders that look like a checkpoint and are not complete
are named in a warning, because a run that begins anew beside them may be a surprise.

The Trainer and Accelerate resume from a folder that has neither marker nor manifest too, because
stock wrote it, or a version of this package that had none: with a warning.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.order import Saved, newest_last
from hf_moe_ep.ranks.together import is_first, on_first

# Names that the Trainer and Accelerate choose.
_THEIRS = re.compile(r"checkpoint[-_]\d+")
# What accelerator.save_state writes of a sharded model, in a folder of any name.
_OF_ACCELERATE = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin")


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint in `folder`; every rank calls this.

        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    or, in a loop of one's own,

        newest = newest_checkpoint("out")
        step = load_checkpoint(newest, model, optimizer, scheduler)["step"] if newest else 0

    or with Accelerate, of which `folder` may also be the one that every save goes to,

        if (newest := newest_checkpoint("out/checkpoints")) is not None:
            accelerator.load_state(newest)

    Checkpoints are those of `save_checkpoint`, of a patched model's Trainer and of
    `accelerator.save_state`, whatever their names are. Of `step-100` and `step-200` the higher
    number is the newest; names without a number go by the order of writing, not by the time.
    Rank 0 looks at the files' sizes alone, because whoever loads a checkpoint compares hashes. A
    warning names folders that are not finished, and those that cannot be verified because they
    were written without this package.

    Args:
        folder: where a run keeps its checkpoints; it need not exist.

    Returns:
        The same path on every rank, or None: there is nothing to go on from.

    Raises:
        RuntimeError: on every rank: rank 0 could not look.
    """
    root = Path(folder)
    complete, others = on_first(f"looking for a checkpoint in {root}", lambda: _look(root))
    newest = complete[-1] if complete else None
    unfit = [why for path, why in others.items() if is_first() and _looks_like_one(path)]
    if unfit:
        chosen = "beginning anew" if newest is None else f"going on from {newest}"
        warnings.warn(f"{chosen}; passed over: " + "; ".join(unfit), stacklevel=2)
    return newest


def _look(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """List complete checkpoints, the newest last, and why others are none; `root` may be one."""
    if not manifest.is_ours(root):
        return manifest.complete_in(root)
    try:
        manifest.check_sizes(root)
    except ValueError as error:
        return [], {root: str(error)}
    return [root], {}


def _looks_like_one(path: Path) -> bool:
    """Tell whether a folder that is no complete checkpoint was probably meant to be one."""
    of_accelerate = any((path / name).exists() for name in _OF_ACCELERATE)
    return manifest.is_ours(path) or bool(_THEIRS.fullmatch(path.name)) or of_accelerate


def in_series(root: Path, names: re.Pattern[str]) -> list[Path]:
    """List the folders in `root` that are named alike and numbered, the highest number last."""
    found = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return newest_last(Saved(path) for path in found if names.fullmatch(path.name))


def newest_resumable(root: Path, names: re.Pattern[str]) -> tuple[Path, bool]:
    """Find the highest-numbered folder that is not unfinished, and whether it has a manifest.

    Raises:
        ValueError: there is none; it lists what was there instead.
    """
    torn = []
    for folder in reversed(in_series(root, names)):
        try:
            verifiable = is_verifiable(folder)
        except ValueError as error:
            torn.append(str(error))
            continue
        if torn:
            warnings.warn(f"resuming from {folder}, because " + "; ".join(torn), stacklevel=2)
        return folder, verifiable
    none = "  no folder in it has a name that ends in its number"
    lines = "\n".join(f"  {line}" for line in torn) or none
    raise ValueError(f"no complete checkpoint in {root}:\n{lines}")


def is_verifiable(folder: Path) -> bool:
    """Tell whether a folder has a manifest, or was written without one; by sizes alone.

    Raises:
        ValueError: it was not finished, or files are missing or too short.
    """
    if manifest.is_ours(folder):
        manifest.check_sizes(folder)
        return True
    if not folder.is_dir() or not any(folder.iterdir()):
        what = "is empty" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}: this checkpoint was not finished; take an older one")
    return False


def check_resumable(folder: Path, verifiable: bool) -> None:
    """Compare all files with the manifest, or warn that there is none; every rank calls this.

    Raises:
        ValueError: on every rank: a file has changed.
    """
    if verifiable:
        manifest.check(folder)
    elif is_first():
        warnings.warn(
            f"{folder} has no {manifest.MANIFEST}, as checkpoints of the stock Trainer and "
            f"Accelerate: whether it is whole cannot be verified",
            stacklevel=2,
        )
