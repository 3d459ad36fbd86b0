"""Make batches with text, images or videos that differ by rank and step."""

from torch import nn

from support.parity import Batch
from support.tiny_models import Row, vision_batch

TEXT: Row = [9]
IMAGE: Row = [3, (4, 6), 4]
IMAGES: Row = [2, (2, 4), 3, (4, 2), 1, (6, 4), 2]
VIDEO: Row = [2, (3, 4, 2), 5]
BOTH: Row = [3, (2, 2), 1, (2, 2, 4), 2]


def rows_of(
    by_rank: tuple[list[Row], ...], model: nn.Module, rank: int, world: int, step: int
) -> list[Batch]:
    """Make a rank's batch from `by_rank`, which is repeated over the ranks.

    Odd ranks get another row of text, and rank 1 is padded on the left.
    """
    rows = [*by_rank[rank % len(by_rank)], *([[6 + rank]] if rank % 2 else [])]
    return [vision_batch(model, rows, seed=100 * step + rank, left=rank == 1)]


def modality_by_step(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Step 0: only text. Step 1: an image on rank 0. Step 2: each rank has another kind of data."""
    rows = [[TEXT], [IMAGE if rank == 0 else TEXT], [(TEXT, IMAGES, VIDEO, BOTH)[rank % 4]]][step]
    return [vision_batch(model, rows, seed=10 * step + rank)]
