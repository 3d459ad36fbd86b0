"""`alive_at_writes` and `Resident` count only tensors that were made inside their block."""

from pathlib import Path

import pytest
import torch
from support.alive import alive_at_writes
from support.resident import Resident, return_what_is_freed

from hf_moe_ep.checkpoints.storage.safetensors_file import Writer


def test_alive_at_writes_counts_new_tensors_except_the_written_one(tmp_path: Path) -> None:
    before = torch.zeros(1000)
    header = [(key, (5,), torch.float32) for key in "ab"]
    with alive_at_writes() as alive, Writer(tmp_path / "file", header) as file:
        values = torch.ones(5)
        file.write("a", (5,), ((0, 5),), values)
        other = torch.ones(7, 3)
        file.write("b", (5,), ((0, 5),), values)
    assert alive == [0, 7 * 3 * 4] and before.sum() == 0 and other.sum() == 21


@pytest.mark.slow
def test_resident_memory_is_counted_at_its_peak() -> None:
    return_what_is_freed()
    large = torch.ones(8 * 2**20)
    with Resident() as resident:
        del large
        torch.ones(4 * 2**20)
    assert abs(resident.grown) < 2**20, "a block that needs less memory than it frees must not grow"
    with Resident() as resident:
        torch.ones(8 * 2**20)
    assert 31 * 2**20 < resident.grown < 33 * 2**20
