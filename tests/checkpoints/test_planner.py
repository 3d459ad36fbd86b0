"""Each rank plans its own writes for torch.distributed.checkpoint (DCP), as DCP would plan them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

from hf_moe_ep.checkpoints.storage.planner import SpreadPlanner, use_spread_planner
from hf_moe_ep.upstream.process_groups import fake_group

WORLD = 8


def _make_state(rank: int) -> dict[str, Any]:
    """Build a state with uneven and empty shards, replicas, plain tensors, numbers and strings."""
    with torch.device("cpu"):
        mesh_2d = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        mesh_1d = init_device_mesh("cpu", (WORLD,))

    def make(mesh: Any, placements: list[Any], *shape: int) -> DTensor:
        return DTensor.from_local(
            torch.zeros(_compute_local_shape(shape, mesh, placements)),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    return {
        "model": {
            "even": make(mesh_1d, [Shard(0)], 16, 3),
            "uneven": make(mesh_1d, [Shard(0)], 11, 2),
            "few": make(mesh_1d, [Shard(0)], 3),
            "experts": make(mesh_2d, [Shard(1), Shard(0)], 8, 6, 5),
            "replicated": make(mesh_2d, [Replicate(), Shard(0)], 12, 2),
            "whole": torch.zeros(4),
        },
        "state": {name: {"step": torch.tensor(1.0)} for name in ("a", "b", "c")},
        "groups": [{"lr": 0.1, "params": ["a"]}],
    }


def _compute_local_shape(
    shape: tuple[int, ...], mesh: Any, placements: list[Any]
) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


def _run_planner(planner: type[DefaultSavePlanner]) -> tuple[list[SavePlan], list[Any], Metadata]:
    """Run the steps of `dcp.save`: local plans, final plans and metadata."""
    planners, local_plans = [], []
    for rank in range(WORLD):
        with fake_group(rank, WORLD):
            planners.append(planner())
            planners[-1].set_up_planner(_make_state(rank), None, rank == 0)
            local_plans.append(planners[-1].create_local_plan())
    with fake_group(0, WORLD):
        global_plans, metadata = planners[0].create_global_plan(local_plans)
        pairs = zip(planners, global_plans, strict=True)
        written = [each.finish_plan(plan).items for each, plan in pairs]
    return local_plans, written, metadata


def _describe_tensors(metadata: Metadata) -> dict[str, Any]:
    """Return dtype, size and non-empty boxes of each tensor, and None for other values."""
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            tensors[name] = None
            continue
        parts = {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if c.sizes.numel()}
        tensors[name] = (entry.properties, entry.size, parts)
    return tensors


def _list_boxes(items: list[WriteItem]) -> list[tuple[str, Any]]:
    boxes = [(item.index.fqn, item.tensor_data and item.tensor_data.chunk) for item in items]
    return [
        (name, chunk and (tuple(chunk.offsets), tuple(chunk.sizes)))
        for name, chunk in boxes
        if chunk is None or chunk.sizes.numel()
    ]


def test_plans_equal_the_plans_of_dcp_and_are_not_sent() -> None:
    """Each box is written once, and every rank writes boxes. Ranks send empty plans to rank 0."""
    dcp_local, dcp_items, dcp_metadata = _run_planner(DefaultSavePlanner)
    local, items_of_ranks, metadata = _run_planner(SpreadPlanner)
    assert all(plan.items for plan in dcp_local) and not any(plan.items for plan in local)
    assert _describe_tensors(metadata) == _describe_tensors(dcp_metadata)
    assert metadata.planner_data == dcp_metadata.planner_data
    parts = [part for items in items_of_ranks for part in _list_boxes(items)]
    assert len(set(map(str, parts))) == len(parts)
    assert sorted(map(str, parts)) == sorted(
        str(part) for items in dcp_items for part in _list_boxes(items)
    )
    assert sum(bool(items) for items in items_of_ranks) == WORLD


def test_ranks_with_different_tensors_are_refused() -> None:
    planners, local_plans = [], []
    for rank in range(2):
        with fake_group(rank, 2):
            planners.append(SpreadPlanner())
            state = {"w": torch.zeros(3 + rank)}
            planners[-1].set_up_planner(state, None, rank == 0)
            local_plans.append(planners[-1].create_local_plan())
    with pytest.raises(ValueError, match=r"ranks \[1\] have other tensors to save than rank 0"):
        planners[0].create_global_plan(local_plans)


@contextmanager
def _plan_by_dcp() -> Iterator[None]:
    yield


def _save_and_load(rank: int, world: int, folder: str) -> list[str]:
    """Save with each planner and load into another model, which must get the saved values."""
    layout = Layout("hsdp", world, {"ep_size": 2, "dp_replicate_size": 2})
    run = start("full", layout)
    step(run, 0)
    saved, files = everything(run), []
    for name, plan_with in (("theirs", _plan_by_dcp), ("ours", use_spread_planner)):
        with plan_with():
            state = dict(zip(("model", "optimizer"), _state_dicts(run), strict=True))
            planner = dcp.default_planner.DefaultSavePlanner()
            path = f"{folder}/{name}"
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=planner)
        files.append(type(planner).__name__)
        other = start("full", layout, seed=1)
        step(other, 1)
        model, optimizer = _state_dicts(other)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        loaded = everything(other)
        tensors = {key: value for key, value in saved.items() if isinstance(value, Tensor)}
        assert_equal(name, {key: loaded[key] for key in tensors}, tensors)
    dist.barrier()
    return files


def _state_dicts(run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return model, optimizer


@pytest.mark.slow
def test_torch_reads_the_files_of_each_planner(tmp_path: Path) -> None:
    """Four ranks with replicas save a model and AdamW with each planner, and torch loads both."""
    for names in run_ranks(_save_and_load, 4, str(tmp_path)):
        assert names == ["DefaultSavePlanner", "SpreadPlanner"]


def test_a_save_of_another_thread_plans_with_the_class_of_dcp() -> None:
    def create() -> DefaultSavePlanner:
        return dcp.default_planner.DefaultSavePlanner(flatten_state_dict=False)

    with ThreadPoolExecutor() as other_thread, use_spread_planner():
        assert type(other_thread.submit(create).result()) is DefaultSavePlanner
        assert type(create()) is SpreadPlanner
    assert type(create()) is DefaultSavePlanner
