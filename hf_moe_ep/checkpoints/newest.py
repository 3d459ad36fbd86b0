"""Find the checkpoint from which a restarted script resumes.

Only complete checkpoints count (`storage/manifest.py`). The newest one is chosen by the numbers in
names and manifests, not by a clock (`storage/order.py`). A warning names folders that look like
unfinished checkpoints, because a user may expect that the run resumes from them.

`newest_checkpoint` is for scripts. The Trainer and Accelerate use `find_newest_resumable`: they
also resume, with a warning, from a folder with neither marker nor manifest.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.order import Saved, sort_newest_last
from hf_moe_ep.ranks.all_ranks import is_first, run_on_first

# Names of checkpoints of the Trainer and of Accelerate.
_STOCK_NAME = re.compile(r"checkpoint[-_]\d+")
# Files of accelerator.save_state for a sharded model; the folder can have any name.
_ACCELERATE_FILES = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin")


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete checkpoint in `folder`; every rank calls this.

        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    In a training loop of your own, write

        newest = newest_checkpoint("out")
        step = load_checkpoint(newest, model, optimizer, scheduler)["step"] if newest else 0

    and with Accelerate, where `folder` may also be a single checkpoint that every save overwrites,

        if (newest := newest_checkpoint("out/checkpoints")) is not None:
            accelerator.load_state(newest)

    Checkpoints of `save_checkpoint`, of a patched model's Trainer and of `accelerator.save_state`
    are found under any name. `step-200` is newer than `step-100`; folders without a number in their
    names are ordered by a counter in their manifests. Rank 0 compares only the sizes of the files;
    loading compares the hashes. A warning names unfinished folders, and folders that cannot be
    verified because they were written without this package.

    Args:
        folder: the folder with the checkpoints of a run; it may be missing.

    Returns:
        The same path on every rank; None if there is no complete checkpoint.

    Raises:
        ValueError: on every rank: `folder` is a file.
        RuntimeError: on every rank: rank 0 could not read the folder.
    """
    root = Path(folder)
    what = f"looking for a checkpoint in {root}"

    def search() -> tuple[list[Path], dict[Path, str]]:
        if root.is_file():
            problem = "is a file; name the folder that holds the checkpoints of a run"
            raise ValueError(f"{root} {problem}")
        return manifest.list_complete(root)

    complete, reasons = run_on_first(what, search)
    newest = complete[-1] if complete else None
    skipped = [reason for path, reason in reasons.items() if is_first() and _looks_unfinished(path)]
    if skipped:
        chosen = "starting a new run" if newest is None else f"resuming from {newest}"
        warnings.warn(f"{chosen}; skipped: " + "; ".join(skipped), stacklevel=2)
    return newest


def _looks_unfinished(path: Path) -> bool:
    """Return True if a folder that is not a complete checkpoint looks like an unfinished one.

    A folder that this user has no permission to read, such as lost+found, does not. A folder that
    cannot be read for another reason, such as a failing disk, does.
    """
    if _STOCK_NAME.fullmatch(path.name):
        return True
    try:
        return manifest.is_ours(path) or any((path / x).exists() for x in _ACCELERATE_FILES)
    except OSError as error:
        return not isinstance(error, PermissionError)


def list_series(root: Path, names: re.Pattern[str]) -> list[Path]:
    """List the folders in `root` whose names match `names`, the highest number last."""
    paths = root.iterdir() if root.is_dir() else ()
    return sort_newest_last(Saved(p) for p in paths if names.fullmatch(p.name) and p.is_dir())


def find_newest_resumable(root: Path, names: re.Pattern[str]) -> tuple[Path, bool]:
    """Return the newest folder that is not unfinished, and True if it has a manifest.

    Raises:
        ValueError: there is no such folder; the message lists the unfinished folders.
    """
    unfinished = []
    for folder in reversed(list_series(root, names)):
        try:
            verifiable = is_verifiable(folder)
        except ValueError as error:
            unfinished.append(str(error))
            continue
        if unfinished:
            warnings.warn(f"resuming from {folder}, because " + "; ".join(unfinished), stacklevel=2)
        return folder, verifiable
    lines = "\n".join(f"  {line}" for line in unfinished) or (
        "  no folder in it has a name like checkpoint-100 or checkpoint_1"
    )
    raise ValueError(f"no complete checkpoint in {root}:\n{lines}")


def is_verifiable(folder: Path) -> bool:
    """Return True if a folder has a manifest. Only the sizes of its files are compared.

    Raises:
        ValueError: the checkpoint is unfinished, or files are missing or have another size.
    """
    if manifest.is_ours(folder):
        manifest.check_sizes(folder)
        return True
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise ValueError(f"{folder} {problem}; name the folder of a checkpoint")
    if not any(folder.iterdir()):
        raise ValueError(f"{folder} is empty: this checkpoint was not finished; load an older one")
    return False


def check_resumable(folder: Path, verifiable: bool) -> None:
    """Compare all files with the manifest, or warn if there is no manifest; every rank calls this.

    Raises:
        ValueError: on every rank: a file has changed.
    """
    if verifiable:
        manifest.check(folder)
    elif is_first():
        warnings.warn(
            f"{folder} cannot be verified: it has no {manifest.MANIFEST}, like all checkpoints of "
            f"the stock Trainer and Accelerate",
            stacklevel=2,
        )
