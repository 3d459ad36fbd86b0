"""If no rank fails or differs, a rank receives as many bytes in a world of 8 and of 1024 ranks."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.tiny_models import tiny
from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2, patch
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.ranks.all_ranks import (
    check_alike,
    find_differing,
    gather_from_all,
    gather_on_first,
    run_on_all,
    run_on_first,
)
from hf_moe_ep.sharding.checks import check_ranks_agree
from hf_moe_ep.sharding.options import ShardOptions, choose_default_policy
from hf_moe_ep.state import patched_state
from hf_moe_ep.upstream.process_groups import fake_group

WORLDS = (8, 1024)


@contextmanager
def _record_collectives() -> Iterator[list[tuple[str, int]]]:
    """Record the names of the collectives that all_ranks.py uses, and their bytes on this rank."""
    collectives: list[tuple[str, int]] = []
    reduce, gather = dist.all_reduce, dist.all_gather_object
    broadcast, gather_to_first = dist.broadcast_object_list, dist.gather_object

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        collectives.append(("all_reduce", tensor.nbytes))
        return reduce(tensor, *args, **kwargs)

    def all_gather_object(by_rank: list[Any], value: Any, **kwargs: Any) -> Any:
        collectives.append(("all_gather_object", len(by_rank) * len(pickle.dumps(value))))
        return gather(by_rank, value, **kwargs)

    def broadcast_object_list(values: list[Any], **kwargs: Any) -> Any:
        collectives.append(("broadcast_object_list", len(pickle.dumps(values[0]))))
        return broadcast(values, **kwargs)

    def gather_object(value: Any, by_rank: list[Any] | None, **kwargs: Any) -> Any:
        collectives.append(("gather_object", len(by_rank or ()) * len(pickle.dumps(value))))
        return gather_to_first(value, by_rank, **kwargs)

    recording = (all_reduce, all_gather_object, broadcast_object_list, gather_object)
    with mock.patch.multiple(dist, **{function.__name__: function for function in recording}):
        yield collectives


def _check_model(model: nn.Module) -> None:
    policy, masters = choose_default_policy(model)
    options = ShardOptions(policy, OffloadPolicy(), masters, reshard_after_forward=True)
    check_ranks_agree(model, patched_state(model), options)


def test_bytes_do_not_depend_on_the_world_size(tmp_path: Any) -> None:
    """Rank 0 of 8 ranks and rank 0 of 1024 ranks run the same collectives with as many bytes."""
    model = patch(tiny(), ParallelConfig(ep_size=2))
    calls = {
        "arguments": lambda: check_alike("load_checkpoint", verify=True, directory="x" * 1000),
        "models": lambda: _check_model(model),
        "errors": lambda: run_on_all("reading", lambda: "x" * 1000),
        "a choice": lambda: run_on_first("looking", lambda: "x" * 1000),
    }
    results: dict[str, list[list[tuple[str, int]]]] = {name: [] for name in calls}
    for world in WORLDS:
        with fake_group(0, world):
            for name, call in calls.items():
                with _record_collectives() as collectives:
                    call()
                results[name].append(collectives)
    for name, by_world in results.items():
        assert by_world[0] == by_world[1], name
    hash_check, error_check = ("all_reduce", 64), ("all_reduce", 8)
    assert results["arguments"][0] == [hash_check]
    assert results["models"][0] == [hash_check, error_check]
    assert results["errors"][0] == [error_check]
    assert [name for name, _ in results["a choice"][0]] == ["all_reduce", "broadcast_object_list"]


def _write_manifest(rank: int, world: int, folder: str) -> list[str]:
    if rank == 0:
        manifest.begin(folder)
    dist.barrier()
    with _record_collectives() as collectives:
        manifest.write(folder, {"world_size": world})
    return [name for name, _ in collectives if "object" in name]


def _compare_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    differ = find_differing(("a", rank // 2))
    equal = find_differing(("a", "b"))
    # 1 and True are equal, but have different reprs: they are gathered, and no error is raised.
    check_alike("save", number=1 if rank else True)
    messages = []
    for values in (["x", "x", "y"], ["x", "y", "y"]):
        with pytest.raises(ValueError) as caught:
            check_alike("save", verify=True, directory=values[rank])
        messages.append(str(caught.value).partition(";")[0])
    model = tiny(num_hidden_layers=1 + (rank == 2))
    with pytest.raises(ValueError, match=r"about MoE layers: rank 0 has 1: .* rank 2 has 2: "):
        apply_ep_fsdp2(model)
    with pytest.raises(ValueError, match=r"of rank 0 are on the meta device"):
        apply_ep_fsdp2(tiny().to("meta") if rank == 0 else tiny())
    return {
        "differ": differ,
        "equal": equal,
        "messages": messages,
        "everyone": gather_from_all("counting", lambda: 10 + rank),
        "gather_on_first": gather_on_first("counting", lambda: 10 + rank),
        "manifest": _write_manifest(rank, world, folder),
    }


def test_errors_name_the_ranks_that_differ(tmp_path: Any) -> None:
    """If one rank differs, all ranks raise the same error, and later collectives still match."""
    called = (
        "ranks called save with different values of directory: rank 0 with 'x', rank {} with 'y'"
    )
    shared = {
        "differ": [("a", 0), ("a", 0), ("a", 1)],
        "equal": None,
        "messages": [called.format(2), called.format(1)],
        "everyone": [10, 11, 12],
        "manifest": ["broadcast_object_list", "gather_object", "broadcast_object_list"],
    }
    results = run_ranks(_compare_ranks, 3, str(tmp_path))
    assert [result.pop("gather_on_first") for result in results] == [[10, 11, 12], None, None]
    assert results == [shared] * 3
