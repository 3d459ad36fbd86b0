"""Files of torch.distributed.checkpoint (DCP) that this package loads cannot run code."""

import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.planted import Shell, plant
from support.tiny_models import tiny
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from hf_moe_ep import load_checkpoint, patch, save_checkpoint
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader, ValuesPlanner, loading_values

VALUES = {
    "lr": numpy.float64(0.1),
    "steps": numpy.int64(7),
    "betas": (0.9, 0.95),
    "fused": None,
    "words": ("b", True),
    "dtype": torch.bfloat16,
}


class _UserClass:
    """A user's class, stored in an optimizer's options."""


def _save(folder: Path, values: dict[str, Any]) -> Path:
    state = {"w": torch.arange(3.0), "options": dict(values)}
    dcp.save(state, checkpoint_id=os.fspath(folder), no_dist=True)
    return folder


def _make_empty_state(values: dict[str, Any]) -> dict[str, Any]:
    return {"w": torch.zeros(3), "options": dict.fromkeys(values, 0)}


def _load_by_our_planner(folder: Path, state: dict[str, Any]) -> None:
    with mock.patch.object(DefaultLoadPlanner, "load_bytes", side_effect=AssertionError):
        dcp.load(
            state, storage_reader=MetadataReader(folder), planner=ValuesPlanner(), no_dist=True
        )


def _load_by_stock(folder: Path, state: dict[str, Any]) -> None:
    """Load as Accelerate does."""
    reader = dcp.FileSystemReader(folder)
    dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)


def _load_guarded(folder: Path, state: dict[str, Any]) -> None:
    with loading_values(folder):
        _load_by_stock(folder, state)


def test_values_are_loaded_with_their_types(tmp_path: Path) -> None:
    folder = _save(tmp_path / "state", VALUES)
    for load in (_load_guarded, _load_by_our_planner):
        state = _make_empty_state(VALUES)
        before = set(torch.serialization.get_safe_globals())
        load(folder, state)
        assert torch.equal(state["w"], torch.arange(3.0)) and state["options"] == VALUES
        assert {k: type(v) for k, v in state["options"].items()} == {
            k: type(v) for k, v in VALUES.items()
        }
        assert set(torch.serialization.get_safe_globals()) == before


def test_a_planted_item_runs_no_code(tmp_path: Path) -> None:
    """The error names the file. Stock torch runs the code, which proves that the item works."""
    trace = tmp_path / "code ran"
    file = plant(_save(tmp_path / "state", {"lr": 0.1}), trace)
    with pytest.raises(ValueError, match=rf"{file} cannot be loaded: its item options.lr .*mkdir"):
        _load_guarded(file.parent, _make_empty_state({"lr": 0}))
    with pytest.raises(dcp.api.CheckpointException, match=f"{file} cannot be loaded"):
        _load_by_our_planner(file.parent, _make_empty_state({"lr": 0}))
    assert not trace.exists()
    _load_by_stock(file.parent, _make_empty_state({"lr": 0}))
    assert trace.is_dir()


def test_planted_metadata_runs_no_code(tmp_path: Path) -> None:
    trace, folder = tmp_path / "code ran", _save(tmp_path / "state", {"lr": 0.1})
    (folder / ".metadata").write_bytes(pickle.dumps(Shell(trace)))
    with pytest.raises(ValueError, match=rf"{folder}/.metadata cannot be loaded: posix.mkdir is"):
        _load_guarded(folder, _make_empty_state({"lr": 0}))
    assert not trace.exists()


def test_a_damaged_item_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path / "state", {"lr": 0.1})
    file = plant(folder, tmp_path / "code ran")
    os.truncate(file, file.stat().st_size - 5)
    with pytest.raises(ValueError, match=rf"{file} cannot be loaded: .*damaged"):
        _load_guarded(folder, _make_empty_state({"lr": 0}))


def test_a_class_of_the_user_is_allowed_by_name(tmp_path: Path) -> None:
    folder = _save(tmp_path / "state", {"mine": _UserClass()})
    with pytest.raises(ValueError, match=r"add_safe_globals"):
        _load_guarded(folder, _make_empty_state({"mine": 0}))
    state = _make_empty_state({"mine": 0})
    with torch.serialization.safe_globals([_UserClass]):
        _load_guarded(folder, state)
    assert isinstance(state["options"]["mine"], _UserClass)


def test_load_checkpoint_reads_no_pickle(tmp_path: Path) -> None:
    """DCP files in a folder of save_checkpoint are refused, also if its manifest names them."""
    model = patch(tiny(dtype=torch.float32, num_hidden_layers=1))
    optimizer = torch.optim.AdamW(model.parameters())
    ours, trace = tmp_path / "ours", tmp_path / "code ran"
    save_checkpoint(ours, model, optimizer)
    file = plant(_save(ours / "tensors", {"lr": 0.1}), trace)
    with pytest.raises(ValueError, match=r"tensors/\.metadata is not in manifest.json"):
        load_checkpoint(ours, model, optimizer)
    manifest.write(ours, manifest.read(ours)["layout"])
    with pytest.raises(ValueError, match=rf"{file.name}|\.metadata"):
        load_checkpoint(ours, model, optimizer)
    plant(_save(tmp_path / "theirs" / "optimizer_0", {"lr": 0.1}), trace)
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*theirs"):
        load_checkpoint(tmp_path / "theirs", model, optimizer)
    manifest.begin(tmp_path / "theirs")
    manifest.write(tmp_path / "theirs", {})
    with pytest.raises(ValueError, match=r"theirs was written by .*, not by save_checkpoint"):
        load_checkpoint(tmp_path / "theirs", model, optimizer)
    assert not trace.exists()
