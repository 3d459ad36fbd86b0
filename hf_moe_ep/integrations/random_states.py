"""Seed the random generators of a run that resumes on another number of ranks.

Accelerate and the Trainer write one file of random states per rank, and each rank reads the file
with its own number. A rank without a file keeps its current generators. If four ranks resume from
the checkpoint of two ranks, the generators are

    rank             0           1           2         3
    stock            restored    restored    kept      kept
    here             seeded      seeded      seeded    seeded, with a warning

As in `load_checkpoint`, all generators are then seeded from the saved state of rank 0 and the
number of the data rank (`checkpoints/training/rng.py`). Under the Trainer, the generators of Python
and numpy are seeded alike on all ranks. This also happens if the number of ranks is
the same but other ranks share batches, because the ranks of a sequence-parallel group need equal
generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import load as load_values

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training import rng
from hf_moe_ep.checkpoints.training.folder import describe_layout
from hf_moe_ep.ranks.all_ranks import is_first, run_on_first, this_rank
from hf_moe_ep.state import ModelState


def read_saved_layout(folder: Path) -> dict[str, Any]:
    """Return the layout in the manifest of a checkpoint, or {} if there is no manifest."""
    if not (folder / manifest.MANIFEST).is_file():
        return {}
    return dict(manifest.read(folder)["layout"])


def reseed_on_other_ranks(
    folder: Path,
    state: ModelState,
    file_of: Callable[[int, int], str],
    key: str,
    *,
    python_is_shared: bool = False,
) -> bool:
    """Seed all generators, with a warning, if other ranks have saved; every rank calls this.

    If the checkpoint has no random states, no generator is changed.

    Args:
        folder: the checkpoint.
        state: the state of the model that is trained.
        file_of: returns the name of a rank's file, given the rank and the number of ranks.
        key: the entry of such a file with the state of torch's generator on the CPU.
        python_is_shared: give the generators of Python and numpy the same seed on all ranks.

    Returns:
        True if the generators were seeded, False if stock code restores each rank's own.
    """
    layout = describe_layout(state)
    world = layout["world_size"]

    def find_seed() -> tuple[str, bytes] | None:
        saved = read_saved_layout(folder)
        missing = [rank for rank in range(world) if not (folder / file_of(rank, world)).is_file()]
        if not missing and ("world_size" not in saved or _shape(saved) == _shape(layout)):
            return None
        for file in {file_of(0, number): None for number in (world, 1, 2)}:
            if (folder / file).is_file():
                torch_state = load_values(folder / file, map_location="cpu")[key]
                return _describe(saved, missing), bytes(torch_state.numpy().tobytes())
        return None

    found = run_on_first(f"reading the random states in {folder}", find_seed)
    if found is None:
        return False
    reason, torch_state = found
    data_rank = rng.compute_data_rank(layout, this_rank())
    rng.reseed({"torch": torch_state}, data_rank, python_is_shared=python_is_shared)
    if is_first():
        warnings.warn(
            f"{folder} {reason}, and this run has {_format_ranks(layout)}: random generators are "
            f"seeded anew, so dropout and shuffling will differ",
            stacklevel=2,
        )
    return True


def _shape(layout: dict[str, Any]) -> tuple[int, int, int]:
    """Return the numbers that determine which ranks have equal random states."""
    return layout["world_size"], rng.count_data_ranks(layout), rng.count_ranks_per_batch(layout)


def _describe(saved: dict[str, Any], missing: list[int]) -> str:
    if "world_size" in saved:
        return f"was saved by {_format_ranks(saved)}"
    return f"has no random state of rank {missing[0]}"


def _format_ranks(layout: dict[str, Any]) -> str:
    return f"{rng.count_data_ranks(layout)} data ranks on {layout['world_size']} ranks"
