"""Each rank computes which rank writes which box, without collectives. Boxes are written once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.tiny_models import tiny
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.checkpoints.storage import part_files
from hf_moe_ep.checkpoints.storage.part_files import write_parts
from hf_moe_ep.checkpoints.storage.spread import Spread, choose_replicas
from hf_moe_ep.checkpoints.training import folder, save
from hf_moe_ep.checkpoints.training.state_file import SavedTensor, StateFile
from hf_moe_ep.checkpoints.training.tensors import collect
from hf_moe_ep.etp import list_stock_parts
from hf_moe_ep.ranks.boxes import get_local_box
from hf_moe_ep.upstream.process_groups import fake_group

WORLD = 4
LAYOUT = {"ep_size": 2, "dp_replicate_size": 2}


def test_boxes_and_writers_by_hand() -> None:
    """Check the grid in spread.py's docstring, ep and FSDP2 on one dim, and replicated tensors."""
    rows = Spread((2, 4), tuple(range(8)), (None, 0))
    assert rows.num_replicas == 2
    for replica, first in enumerate((0, 4)):
        expected = [(first + i, ((2 * i, 2 * i + 2), (0, 3))) for i in range(4)]
        assert list(rows.boxes((8, 3), replica)) == expected
    assert rows.holders((8, 3), 1, ((3, 5), (0, 3))) == {5, 6}
    assert rows.is_writer(6, 1) and not rows.is_writer(6, 0)
    # The last axis, ep, cuts 6 experts into 3 + 3. Then ep_fsdp cuts each 3 into 2 + 1.
    two_axes = Spread((2, 2), (0, 1, 2, 3), (0, 0))
    experts = [box[0] for _, box in two_axes.boxes((6, 5), 0)]
    assert experts == [(0, 2), (3, 5), (2, 3), (5, 6)] and two_axes.num_replicas == 1
    whole = Spread((4,), (0, 1, 2, 3), (None,))
    sizes = {"a": 7, "b": 5, "c": 4, "d": 3, "e": 9}
    replicated = {name: (whole, size) for name, size in sizes.items()}
    # 9, 7, 5 and 4 go to one replica each, and 3 to the replica that has 4.
    assert choose_replicas(replicated) == {"e": 0, "a": 1, "b": 2, "c": 3, "d": 3}
    # The replicas of `rows` and of `whole` are counted separately.
    assert choose_replicas({"x": (rows, 2), "y": (whole, 1), "z": (rows, 1)}) == {
        "x": 0, "y": 0, "z": 1
    }  # fmt: skip


def test_shards_that_a_rank_cannot_know_are_refused() -> None:
    with fake_group(0, 4):
        half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        part = DTensor.from_local(torch.zeros(2, 3), half, [Shard(0)], run_check=False)
        with pytest.raises(ValueError, match=r"w is sharded over 2 of 4 ranks"):
            Spread.of("w", part, range(4))
        mesh = init_device_mesh("cpu", (4,))
        summands = DTensor.from_local(torch.zeros(2, 3), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"w has the placement .*can hold Shard and Repl"):
            Spread.of("w", summands, range(4))


def test_nothing_is_gathered_to_save(tmp_path: Path) -> None:
    """Rank 0 of 64 writes its shards without gathering objects from other ranks."""
    with fake_group(0, 64):
        model = apply_ep_fsdp2(tiny(num_hidden_layers=1), ep_size=4)
        optimizer = torch.optim.AdamW(model.parameters())
        refuse = mock.Mock(side_effect=AssertionError("gathers objects"))
        verbs = ("all_gather_object", "gather_object", "scatter_object_list")
        with (
            mock.patch.multiple(dist, **dict.fromkeys(verbs, refuse)),
            mock.patch.object(save.manifest, "write") as write,
            mock.patch.object(save, "check_everyone_calls"),  # a fake group has no store
        ):
            save.save_checkpoint(tmp_path / "one", model, optimizer)
    (name,) = write.call_args.kwargs["written"]
    (file,) = (tmp_path / "one" / folder.TENSORS).iterdir()
    assert file.name == Path(name).name == "shard-00001-model-00001-of-00001.safetensors"
    saved = folder.state_file.read(tmp_path / "one" / folder.STATE)
    embedding = saved.tensors["model.model.embed_tokens.weight"]
    assert embedding.spread == Spread((64,), tuple(range(64)), (0,))
    tensors, _ = part_files.read_header(file)
    assert tensors["model.model.embed_tokens.weight"].shape == (-(-97 // 64), 32)


def _convert_to_json_and_back(saved_tensors: dict[str, SavedTensor]) -> StateFile:
    content = StateFile({}, tensors=saved_tensors).to_json()
    return StateFile.from_json(json.loads(json.dumps(content)))


def _write_and_read(rank: int, world: int, path: Path) -> tuple[Any, list[Any], int, set[int]]:
    """Write a model whose values are their flat indices, without a collective, and read it back.

    Returns the state file as JSON, the boxes and the number of bytes that were written, and the
    ranks whose headers were read.
    """
    model = apply_ep_fsdp2(tiny(num_hidden_layers=2), **LAYOUT)
    with torch.no_grad():
        for p in model.parameters():
            whole = torch.arange(p.numel(), dtype=p.dtype).view(p.shape)
            p.to_local().copy_(whole[tuple(slice(*ends) for ends in get_local_box(p))])
    named = collect(model, None)
    refuse = mock.Mock(side_effect=AssertionError("asks other ranks"))
    verbs = ("all_gather_object", "gather_object", "scatter_object_list", "all_reduce", "barrier")
    with mock.patch.multiple(dist, **dict.fromkeys(verbs, refuse)):
        saved_tensors = named.describe_tensors()
        files = named.list_own_files(saved_tensors, bytes_per_file=5000)
        names = write_parts(path / folder.TENSORS, rank, files)
    assert len(files) > 1
    dist.barrier()
    ranks = _read_twice(path, named.tensors, saved_tensors)
    boxes = [(name, box) for shards in files for name, (box, _) in shards.items()]
    return (
        StateFile({}, tensors=saved_tensors).to_json(),
        boxes,
        sum(e["size"] for e in names.values()),
        ranks,
    )


def _read_twice(
    path: Path, tensors: dict[str, Tensor], saved_tensors: dict[str, SavedTensor]
) -> set[int]:
    """Read with shardings, and without them as for old files; return the ranks of headers read."""
    files = sorted(path.glob(f"{folder.TENSORS}/*"))
    manifest: Any = {"files": {f"{folder.TENSORS}/{file.name}": {} for file in files}}
    saved = _convert_to_json_and_back(saved_tensors)
    old = _convert_to_json_and_back({n: replace(x, spread=None) for n, x in saved_tensors.items()})
    assert saved.tensors == saved_tensors
    ranks: set[int] = set()
    values = {name: tensor.to_local().clone() for name, tensor in tensors.items()}
    parts = {name: list_stock_parts(tensor, None) for name, tensor in tensors.items()}
    for state in (old, saved):
        for tensor in tensors.values():
            tensor.to_local().fill_(-1)
        with (
            mock.patch.object(folder.manifest, "read", return_value=manifest),
            mock.patch.object(part_files, "read_header", wraps=part_files.read_header) as read,
        ):
            folder.read_tensors(path, parts, state)
        assert all(torch.equal(tensors[name].to_local(), values[name]) for name in values)
        ranks = {part_files.find_writer(call.args[0].name) for call in read.mock_calls}
    return ranks


@pytest.mark.slow
def test_ranks_write_each_value_once_and_read_few_headers(tmp_path: Path) -> None:
    """A rank reads the headers of two files. torch's reader loads all files."""
    tensors = tmp_path / folder.TENSORS
    tensors.mkdir()
    results = run_ranks(_write_and_read, WORLD, tmp_path)
    saved_tensors = StateFile.from_json(results[0][0]).tensors
    counts = {name: torch.zeros(saved.shape) for name, saved in saved_tensors.items()}
    for rank, (rank_content, boxes, _, ranks) in enumerate(results):
        assert rank_content == results[0][0]
        for name, box in boxes:
            counts[name][tuple(slice(*ends) for ends in box)] += 1
        assert ranks == {rank, (rank + 2) % WORLD}
    for name, count in counts.items():
        assert bool((count == 1).all()), name
    sizes = [size for _, _, size, _ in results]
    assert max(sizes) < 1.25 * min(sizes), sizes
    loaded = {
        name: torch.zeros(saved.shape, dtype=saved.dtype) for name, saved in saved_tensors.items()
    }
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(loaded, storage_reader=HuggingFaceStorageReader(str(tensors)))
    for name, tensor in loaded.items():
        assert torch.equal(tensor.flatten().double(), torch.arange(tensor.numel()).double()), name
