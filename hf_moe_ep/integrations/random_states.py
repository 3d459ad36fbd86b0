"""Seed the random generators of a run that resumes on other ranks than those that saved.

Accelerate and the Trainer write one file of random states per rank, and each rank reads the file
with its own number. A rank without a file keeps the generators that it has. If four ranks resume
from the checkpoint of two ranks, this leads to

    rank             0           1           2         3
    stock            restored    restored    kept      kept
    here             seeded      seeded      seeded    seeded, with a warning

As in `load_checkpoint`, all generators are then seeded from the saved state of rank 0 and the
number of the data rank (`checkpoints/training/rng.py`). This also happens if as many ranks share
their batches in another way: the ranks of a sequence-parallel group need equal generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import load as load_values

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training import rng
from hf_moe_ep.checkpoints.training.folder import layout_of
from hf_moe_ep.ranks.all_ranks import is_first, run_on_first, this_rank
from hf_moe_ep.state import ModelState


def saved_layout(folder: Path) -> dict[str, Any]:
    """Return the layout in the manifest of a checkpoint; {} if there is none."""
    if not (folder / manifest.MANIFEST).is_file():
        return {}
    return dict(manifest.read(folder)["layout"])


def reseed_on_other_ranks(
    folder: Path, state: ModelState, file_of: Callable[[int, int], str], key: str
) -> bool:
    """Seed all generators, with a warning, if other ranks have saved; every rank calls this.

    A checkpoint without any random state changes no generator.

    Args:
        folder: the checkpoint.
        state: the state of the model that is trained.
        file_of: returns the name of the file of a rank, given the rank and the number of ranks.
        key: the entry of such a file that holds the state of torch's generator on the CPU.

    Returns:
        True if the generators were seeded, False if each rank can restore its own.
    """
    layout = layout_of(state)
    world = layout["world_size"]

    def look() -> tuple[str, bytes] | None:
        saved = saved_layout(folder)
        missing = [rank for rank in range(world) if not (folder / file_of(rank, world)).is_file()]
        if not missing and ("world_size" not in saved or _shape(saved) == _shape(layout)):
            return None
        for file in {file_of(0, number): None for number in (world, 1, 2)}:
            if (folder / file).is_file():
                of_torch = load_values(folder / file, map_location="cpu")[key]
                return _describe(saved, missing), bytes(of_torch.numpy().tobytes())
        return None

    found = run_on_first(f"reading the random states in {folder}", look)
    if found is None:
        return False
    reason, of_torch = found
    rng.reseed({"torch": of_torch}, rng.data_rank_of(layout, this_rank()))
    if is_first():
        warnings.warn(
            f"{folder} {reason}, and this run has {_count(layout)}: random generators are seeded "
            f"anew, so dropout and shuffling will differ",
            stacklevel=2,
        )
    return True


def _shape(layout: dict[str, Any]) -> tuple[int, int, int]:
    """Return the numbers on which it depends which rank has which random state."""
    return layout["world_size"], rng.num_data_ranks(layout), rng.ranks_per_batch(layout)


def _describe(saved: dict[str, Any], missing: list[int]) -> str:
    if "world_size" in saved:
        return f"was saved by {_count(saved)}"
    return f"has no random state of rank {missing[0]}"


def _count(layout: dict[str, Any]) -> str:
    return f"{rng.num_data_ranks(layout)} data ranks on {layout['world_size']} ranks"
