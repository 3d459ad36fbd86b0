"""A rank reads its shards from the files of other ranks, with as few headers as possible."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hf_moe_ep.checkpoints.storage import part_files
from hf_moe_ep.checkpoints.storage.part_files import Parts, make_file_name, read_parts
from hf_moe_ep.etp import list_stock_parts
from hf_moe_ep.ranks.boxes import get_local_box
from hf_moe_ep.upstream.process_groups import fake_group

WORLD = 4
SIZES = {"w": (7, 6), "experts": (4, 5, 3), "whole": (3,)}  # 7 rows: 2 + 2 + 2 + 1
WHOLE = {
    name: torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    for name, shape in SIZES.items()
}


def _write_files_of_four_ranks(folder: Path) -> list[Path]:
    """Write the row shards of four ranks as DCP does. Rank 2 writes the replicated tensor."""
    files = []
    for rank in range(WORLD):
        parts = {"w": (2 * rank, 2 * rank + 2), "experts": (rank, rank + 1)}
        parts |= {"whole": (0, 3)} if rank == 2 else {}
        tensors = {name: WHOLE[name][slice(*rows)].clone() for name, rows in parts.items()}
        offsets = {
            name: {"saved_offsets": [rows[0]] + [0] * (WHOLE[name].ndim - 1)}
            for name, rows in parts.items()
        }
        files.append(folder / make_file_name(rank, 1, 1))
        save_file(tensors, files[-1], {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})
    return files


def _make_unread_shard(
    shape: tuple[int, ...], placement: Placement, rank: int, world: int
) -> Tensor:
    """Make the DTensor of a rank, filled with NaN."""
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.full(shape, float("nan"), dtype=torch.float64)
    local = whole
    if isinstance(placement, Shard):
        parts = whole.chunk(world, placement.dim)
        local = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    stride = tuple(whole.stride())
    return DTensor.from_local(
        local.clone(), mesh, [placement], run_check=False, shape=whole.shape, stride=stride
    )


def _list_parts(targets: dict[str, Tensor]) -> dict[str, Parts]:
    return {name: list_stock_parts(target, None) for name, target in targets.items()}


def _make_zeros() -> dict[str, Parts]:
    return _list_parts({name: torch.zeros(shape) for name, shape in SIZES.items()})


def _read_shards(files: list[Path], rank: int, world: int, dim: int) -> int:
    """Read a rank's shards, cut along `dim`, and return the number of headers read."""
    with fake_group(rank, world):
        cut = {name: Shard(dim) if name != "whole" else Replicate() for name in SIZES}
        targets = {name: _make_unread_shard(SIZES[name], cut[name], rank, world) for name in SIZES}
        with mock.patch.object(part_files, "read_header", wraps=part_files.read_header) as read:
            assert read_parts(files, _list_parts(targets)) == read.call_count
        for name, target in targets.items():
            box = tuple(slice(*ends) for ends in get_local_box(target))
            assert torch.equal(target.to_local(), WHOLE[name][box]), (name, rank)
        return read.call_count


def test_a_rank_stops_when_it_has_all_of_its_elements(tmp_path: Path) -> None:
    """Files are read in order. Ranks 0 to 2 have all elements after file 3, rank 3 after file 4."""
    files = _write_files_of_four_ranks(tmp_path)
    assert [_read_shards(files, rank, WORLD, 0) for rank in range(WORLD)] == [3, 3, 3, 4]
    # Two ranks read halves of the rows. Three ranks that cut columns need all files.
    assert [_read_shards(files, rank, 2, 0) for rank in range(2)] == [3, 4]
    assert [_read_shards(files, rank, 3, 1) for rank in range(3)] == [4, 4, 4]
    assert _read_shards(files, 0, 1, 0) == 4


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    """A file is missing, ends too early or is damaged. A box that is in two files counts once."""
    files = _write_files_of_four_ranks(tmp_path)
    with pytest.raises(ValueError, match=r"3 files lack 12 of 42 values .* of w \(2 ten"):
        read_parts([files[0], files[2], files[3]], _make_zeros())
    targets = {"w": torch.zeros(7, 6)}
    with pytest.raises(ValueError, match=r"4 files lack 18 of 42 values"):
        read_parts([files[0], files[0], files[2], files[0]], _list_parts(targets))
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00002-.* is truncated"):
        read_parts(files, _make_zeros())
    files[0].write_bytes(b"\x08" + b"\0" * 7 + b'{"w": 1}')
    with pytest.raises(ValueError, match=r"shard-00001-.* has a damaged header: "):
        read_parts(files, _make_zeros())
    offsets = json.dumps({"w": {part_files._OFFSETS: [0]}})  # one offset for two dims
    save_file({"w": torch.zeros(7, 6)}, files[0], {part_files._SHARDING: offsets})
    with pytest.raises(ValueError, match=r"shard-00001-.* has a damaged header: ValueError"):
        read_parts(files[:1], _make_zeros())
