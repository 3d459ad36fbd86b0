"""Find the checkpoint from which a restarted script resumes.

Only complete checkpoints count (`storage/manifest.py`). The newest is chosen by the steps in their
names, not by a clock (`storage/order.py`). A warning names folders that look like an unfinished
checkpoint, because a run that starts again next to them may be a surprise.

The Trainer and Accelerate also resume, with a warning, from a folder without marker and manifest:
stock transformers or Accelerate wrote it, or a version of this package without manifests.
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
# Files of accelerator.save_state for a sharded model; the folder can have any name.
_ACCELERATE_FILES = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin")


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint in `folder`; every rank calls this.

        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    or, in a training loop of your own,

        newest = newest_checkpoint("out")
        step = load_checkpoint(newest, model, optimizer, scheduler)["step"] if newest else 0

    or with Accelerate, where `folder` may also be the one folder that every save overwrites,

        if (newest := newest_checkpoint("out/checkpoints")) is not None:
            accelerator.load_state(newest)

    Checkpoints of `save_checkpoint`, of a patched model's Trainer and of `accelerator.save_state`
    are found, whatever their names are. `step-200` is newer than `step-100`; names without a number
    are ordered by the order of writing, not by time. Rank 0 compares the sizes of the files only;
    loading compares the hashes. A warning names unfinished folders, and folders that cannot be
    verified because they were written without this package.

    Args:
        folder: the folder with the checkpoints of a run; it may be missing.

    Returns:
        The same path on every rank; None if there is no complete checkpoint.

    Raises:
        RuntimeError: on every rank: rank 0 could not read the folder.
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
    """List complete checkpoints, the newest last, and for others the reason; `root` may be one."""
    if not manifest.is_ours(root):
        return manifest.complete_in(root)
    try:
        manifest.check_sizes(root)
    except ValueError as error:
        return [], {root: str(error)}
    return [root], {}


def _looks_like_one(path: Path) -> bool:
    """Tell whether a folder looks like an unfinished checkpoint."""
    has_states = any((path / name).exists() for name in _ACCELERATE_FILES)
    return manifest.is_ours(path) or bool(_THEIRS.fullmatch(path.name)) or has_states


def in_series(root: Path, names: re.Pattern[str]) -> list[Path]:
    """List the folders in `root` whose names match, the highest number last."""
    found = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return newest_last(Saved(path) for path in found if names.fullmatch(path.name))


def newest_resumable(root: Path, names: re.Pattern[str]) -> tuple[Path, bool]:
    """Return the highest-numbered folder that is not unfinished, and whether it has a manifest.

    Raises:
        ValueError: there is no such folder; the message lists the others.
    """
    unfinished = []
    for folder in reversed(in_series(root, names)):
        try:
            verifiable = is_verifiable(folder)
        except ValueError as error:
            unfinished.append(str(error))
            continue
        if unfinished:
            warnings.warn(f"resuming from {folder}, because " + "; ".join(unfinished), stacklevel=2)
        return folder, verifiable
    none = "  no folder in it has a name that ends in its number"
    lines = "\n".join(f"  {line}" for line in unfinished) or none
    raise ValueError(f"no complete checkpoint in {root}:\n{lines}")


def is_verifiable(folder: Path) -> bool:
    """Tell whether a folder has a manifest; compares only the sizes of the files with it.

    Raises:
        ValueError: the checkpoint is unfinished, or files are missing or too short.
    """
    if manifest.is_ours(folder):
        manifest.check_sizes(folder)
        return True
    if not folder.is_dir() or not any(folder.iterdir()):
        what = "is empty" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {what}: this checkpoint was not finished; take an older one")
    return False


def check_resumable(folder: Path, verifiable: bool) -> None:
    """Compare all files with the manifest, or warn if there is none; every rank calls this.

    Raises:
        ValueError: on every rank: a file has changed.
    """
    if verifiable:
        manifest.check(folder)
    elif is_first():
        warnings.warn(
            f"{folder} has no {manifest.MANIFEST}, as checkpoints of the stock Trainer and "
            f"Accelerate: it cannot be verified",
            stacklevel=2,
        )
