"""Saves by torch.distributed.checkpoint that each rank plans by itself: what DCP's own would be."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.resume import Layout, assert_equal, everything, start, step
from support.ranks import run_ranks
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_moe_ep.checkpoints.storage.planner import SpreadPlanner, planned_by_each
from hf_moe_ep.upstream.process_groups import fake_group

WORLD = 8


def _state(rank: int) -> dict[str, Any]:
    """A state like that of experts and AdamW: uneven and empty parts, replicas, numbers, text."""
    with torch.device("cpu"):
        two = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        one = init_device_mesh("cpu", (WORLD,))

    def lie(mesh: Any, placements: list[Any], *shape: int) -> DTensor:
        return DTensor.from_local(
            torch.zeros(_local(shape, mesh, placements)),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    return {
        "model": {
            "even": lie(one, [Shard(0)], 16, 3),
            "uneven": lie(one, [Shard(0)], 11, 2),
            "few": lie(one, [Shard(0)], 3),
            "experts": lie(two, [Shard(1), Shard(0)], 8, 6, 5),
            "replicated": lie(two, [Replicate(), Shard(0)], 12, 2),
            "whole": torch.zeros(4),
        },
        "state": {name: {"step": torch.tensor(1.0)} for name in ("a", "b", "c")},
        "groups": [{"lr": 0.1, "params": ["a"]}],
    }


def _local(shape: tuple[int, ...], mesh: Any, placements: list[Any]) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


def _planned(planner: type[DefaultSavePlanner]) -> tuple[list[SavePlan], list[Any], Metadata]:
    """Run the steps of `dcp.save`: local plans, final plans and metadata."""
    planners, told = [], []
    for rank in range(WORLD):
        with fake_group(rank, WORLD):
            planners.append(planner())
            planners[-1].set_up_planner(_state(rank), None, rank == 0)
            told.append(planners[-1].create_local_plan())
    with fake_group(0, WORLD):
        sent, metadata = planners[0].create_global_plan(told)
        written = [one.finish_plan(plan).items for one, plan in zip(planners, sent, strict=True)]
    return told, written, metadata


def _boxes(metadata: Metadata) -> dict[str, Any]:
    """Return dtype, size and non-empty parts of each tensor."""
    found: dict[str, Any] = {}
    for name, of_name in metadata.state_dict_metadata.items():
        if not hasattr(of_name, "chunks"):
            found[name] = None
            continue
        parts = {(tuple(c.offsets), tuple(c.sizes)) for c in of_name.chunks if c.sizes.numel()}
        found[name] = (of_name.properties, of_name.size, parts)
    return found


def _written(items: list[WriteItem]) -> list[tuple[str, Any]]:
    boxes = [(item.index.fqn, item.tensor_data and item.tensor_data.chunk) for item in items]
    return [
        (name, chunk and (tuple(chunk.offsets), tuple(chunk.sizes)))
        for name, chunk in boxes
        if chunk is None or chunk.sizes.numel()
    ]


def test_the_plan_is_that_of_dcp_and_nobody_is_told_it() -> None:
    """Each part is written once, by a rank that has it, and no plan is sent."""
    their_told, theirs, their_metadata = _planned(DefaultSavePlanner)
    told, ours, metadata = _planned(SpreadPlanner)
    assert all(plan.items for plan in their_told) and not any(plan.items for plan in told)
    assert _boxes(metadata) == _boxes(their_metadata)
    assert metadata.planner_data == their_metadata.planner_data
    parts = [part for items in ours for part in _written(items)]
    assert len(set(map(str, parts))) == len(parts)
    assert sorted(map(str, parts)) == sorted(
        str(part) for items in theirs for part in _written(items)
    )
    assert sum(bool(items) for items in ours) == WORLD


def test_ranks_with_other_tensors() -> None:
    planners, told = [], []
    for rank in range(2):
        with fake_group(rank, 2):
            planners.append(SpreadPlanner())
            state = {"w": torch.zeros(3 + rank)}
            planners[-1].set_up_planner(state, None, rank == 0)
            told.append(planners[-1].create_local_plan())
    with pytest.raises(ValueError, match=r"ranks \[1\] have other tensors to save than rank 0"):
        planners[0].create_global_plan(told)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _saved_and_loaded(rank: int, world: int, folder: str) -> list[str]:
    """Save by both, load each into another model; what they loaded must be what was saved."""
    layout = Layout("hsdp", world, {"ep_size": 2, "dp_replicate_size": 2})
    run = start("full", layout)
    step(run, 0)
    want, files = everything(run), []
    for name, planned in (("theirs", _as_it_is), ("ours", planned_by_each)):
        with planned():
            state = dict(zip(("model", "optimizer"), _state_dicts(run), strict=True))
            planner = dcp.default_planner.DefaultSavePlanner()
            path = f"{folder}/{name}"
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=planner)
        files.append(type(planner).__name__)
        other = start("full", layout, seed=1)
        step(other, 1)
        model, optimizer = _state_dicts(other)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        got = everything(other)
        tensors = {key: value for key, value in want.items() if isinstance(value, Tensor)}
        assert_equal(name, {key: got[key] for key in tensors}, tensors)
    dist.barrier()
    return files


def _state_dicts(run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return model, optimizer


@pytest.mark.slow
def test_files_are_read_by_stock(tmp_path: Path) -> None:
    """Four ranks with replicas save a model and AdamW with each planner, and torch loads them."""
    for names in run_ranks(_saved_and_loaded, 4, str(tmp_path)):
        assert names == ["DefaultSavePlanner", "SpreadPlanner"]
