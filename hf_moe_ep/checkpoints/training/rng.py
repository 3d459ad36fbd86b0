"""Capture, restore or reseed the random generators of one rank.

A data rank is a group of ranks that share a batch (sp_size * cp_size ranks). If the number of data
ranks is the same as at the save, each rank restores its own generators. Otherwise every generator
is seeded from the saved state of rank 0 and the number of the data rank. If a run is resumed twice
from one checkpoint, it therefore draws the same numbers both times. These are other numbers than in
its first steps. The ranks of a data rank get the same seed, because they must draw the same
samples.

Under the Trainer, all ranks get the same seed for the generators of Python and numpy, as
`set_seed` seeds them when a run begins. Code may rely on equal numbers: TRL's GKD generates in a
training step if `random.random()` is small enough, and all ranks of a sharded model must do so in
the same step.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's generators, for `json_values.encode`."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tobytes(), *rest),
        "torch": _to_bytes(torch.get_rng_state()),
        "device": device.type,
    }
    if device.type != "cpu":
        state["of_device"] = _to_bytes(torch.get_device_module(device).get_rng_state(device))
    return state


def restore(saved: dict[str, Any], device: torch.device) -> None:
    """Restore the result of `capture`, on a device of the same type."""
    name, keys, *rest = saved["numpy"]
    random.setstate(saved["python"])
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_to_tensor(saved["torch"]))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_to_tensor(saved["of_device"]), device)


def reseed(rank_0_state: dict[str, Any], data_rank: int, *, python_is_shared: bool = False) -> None:
    """Seed every generator of this rank from the saved state of rank 0 and the data rank.

    With `python_is_shared`, the generators of Python and numpy are equal on all ranks.
    """
    seed = _make_seed(rank_0_state, data_rank)
    torch.manual_seed(seed)  # seeds all devices, too
    if python_is_shared:
        seed = _make_seed(rank_0_state, 0)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _make_seed(rank_0_state: dict[str, Any], data_rank: int) -> int:
    digest = hashlib.sha256(rank_0_state["torch"] + data_rank.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:7], "big")


def count_data_ranks(layout: dict[str, Any]) -> int:
    """Return the number of data ranks of a layout (`folder.describe_layout`)."""
    return _count_ranks_per_stage(layout) // count_ranks_per_batch(layout)


def compute_data_rank(layout: dict[str, Any], rank: int) -> int:
    """Return the number of the data rank to which `rank` belongs."""
    return rank % _count_ranks_per_stage(layout) // count_ranks_per_batch(layout)


def find_saved_rank(saved: dict[str, Any], layout: dict[str, Any], rank: int) -> int:
    """Return the rank of the layout `saved` whose generators a rank of `layout` restores.

    Both layouts have the same number of data ranks, and the result belongs to the same data rank.
    With the same pp_size and ranks per batch, the result is the rank itself.
    """
    stage, index = rank // _count_ranks_per_stage(layout), rank % count_ranks_per_batch(layout)
    return (
        stage % saved.get("pp_size", 1) * _count_ranks_per_stage(saved)
        + compute_data_rank(layout, rank) * count_ranks_per_batch(saved)
        + index % count_ranks_per_batch(saved)
    )


def count_ranks_per_batch(layout: dict[str, Any]) -> int:
    """Return the number of ranks that share a batch; layouts of older files have no cp_size."""
    return layout["sp_size"] * layout.get("cp_size", 1)


def _count_ranks_per_stage(layout: dict[str, Any]) -> int:
    """Return the number of ranks of a pipeline stage; layouts of older files have no pp_size."""
    return layout["world_size"] // layout.get("pp_size", 1)


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().numpy().tobytes())


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
