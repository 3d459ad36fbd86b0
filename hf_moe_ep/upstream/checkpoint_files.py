"""Call private functions of torch.distributed.checkpoint for its files and its load planner.

The functions come from filesystem.py, default_planner.py and _traverse.py.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem


def make_metadata_path(reader: FileSystemReader, rank: int | None) -> Any:
    """Return the path of the metadata file of one rank, or of all ranks if `rank` is None."""
    return reader._get_metadata_path(rank)


def find_file_of_item(planner: DefaultLoadPlanner, item: ReadItem) -> str:
    """Return the path of the file that holds `item`, relative to the checkpoint's folder."""
    assert planner.metadata is not None
    stored = planner.metadata.storage_data[item.storage_index]
    return str(stored.relative_path)


def put_value(planner: DefaultLoadPlanner, name: str, value: Any) -> None:
    """Store a loaded value in the state dict, as DefaultLoadPlanner.load_bytes does."""
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value
