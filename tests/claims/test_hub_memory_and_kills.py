"""Test loads of damaged checkpoints, saves to a full disk, and kills during a save.

test_kills.py lists the tests of kills in other saves.
"""

import errno
import json
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.hub_files import assert_equal, hub_state, read_all, write_hub
from support.killing import kill_later
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from transformers import AutoModelForCausalLM

from hf_moe_ep import apply_ep_fsdp2, from_pretrained, patch, save_pretrained
from hf_moe_ep.checkpoints.hub import save as checkpoint
from hf_moe_ep.checkpoints.hub.pieces import make_whole_piece
from hf_moe_ep.checkpoints.hub.write import TensorGroup, write_checkpoint
from hf_moe_ep.checkpoints.storage import safetensors_file
from hf_moe_ep.ranks import all_ranks
from hf_moe_ep.ranks.boxes import iterate_whole_tensor

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def _edit_tensors(folder: Path, key: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the file that contains `key`."""
    name = json.loads((folder / INDEX).read_text())["weight_map"][key]
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name)


def _truncate(folder: Path) -> None:
    path = folder / FIRST
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def _remove_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def _reshape_expert(tensors: dict[str, Any]) -> None:
    tensors[EXPERT] = torch.zeros(24, 31)


def _set_unknown_dtype(folder: Path) -> None:
    path = folder / FIRST
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F4X"', 1))


# name: (a function that damages the checkpoint, a match of the error that every rank raises)
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        _truncate,
        r"model-00001-of-00003.safetensors is truncated.* bytes instead of \d+",
    ),
    "file missing": (lambda f: (f / FIRST).unlink(), rf"{FIRST} is missing, but {INDEX} names it"),
    "empty file": (lambda f: (f / FIRST).write_bytes(b""), rf"{FIRST} is not a safetensors file"),
    "header damaged": (
        lambda f: (f / FIRST).write_bytes(b"\x10" + bytes(7) + b"{" * 200),
        rf"{FIRST} has a damaged header",
    ),
    "dtype unknown": (_set_unknown_dtype, rf"{FIRST}: .* has dtype F4X, which is not supported"),
    "tensor missing": (
        lambda f: _edit_index(f, lambda places: places.pop(EXPERT)),
        rf"does not fit this Qwen3MoeForCausalLM: missing 1 tensors: {EXPERT}",
    ),
    "index lies": (
        lambda f: _edit_index(f, lambda places: places.update(extra=FIRST)),
        rf"{FIRST} has no tensor extra, but {INDEX} says that it has",
    ),
    "misshapen": (
        lambda f: _edit_tensors(f, EXPERT, _reshape_expert),
        rf"misshapen 1 tensors: {EXPERT} \(24, 31\) instead of \(24, 32\)",
    ),
    "no checkpoint": (_remove_weights, "holds no safetensors checkpoint"),
}


def _add_tensor(folder: Path) -> None:
    name = json.loads((folder / INDEX).read_text())["weight_map"][EXPERT]
    _edit_tensors(folder, EXPERT, lambda tensors: tensors.update(surplus=torch.zeros(2)))
    _edit_index(folder, lambda places: places.update(surplus=name))


def _add_stacked_tensor(folder: Path) -> None:
    stacked = "model.layers.0.mlp.experts.down_proj"
    name = json.loads((folder / INDEX).read_text())["weight_map"][EXPERT]
    _edit_tensors(folder, EXPERT, lambda tensors: tensors.update({stacked: torch.ones(8, 32, 24)}))
    _edit_index(folder, lambda places: places.update({stacked: name}))


BROKEN["unexpected"] = (_add_tensor, "unexpected 1 tensors: surplus")
BROKEN["both layouts"] = (
    _add_stacked_tensor,
    r"unexpected 1 tensors: \S+experts.down_proj; if the",
)


def _load_damaged(rank: int, world: int, folder: str) -> None:
    for case, (_, words) in BROKEN.items():
        with pytest.raises(ValueError, match=words):
            from_pretrained(f"{folder}/{case}", ep_size=2)
    for path in ("/no/folder", "./no", "~/no", "a/b/c", f"{folder}/none"):
        with pytest.raises(ValueError, match=f"^{path} does not exist on this machine; pass a fol"):
            from_pretrained(path)
    with pytest.raises(ValueError, match=r"config.json is a file; pass a folder"):
        from_pretrained(f"{folder}/whole/config.json")
    for option, advice in (
        ({"ep_sizes": 2}, r"ep_sizes \(did you mean ep_size\?\): .*Qwen3MoeConfig$"),
        ({"variant": "fp16"}, "variant: .*load these weights with transformers"),
        ({"device_map": "auto"}, "device_map: .*leave it out: each rank reads only its own"),
        ({"load_in_4bit": True}, "load_in_4bit: .*experts_dtype='nf4' or 'fp8' quantises"),
    ):
        with pytest.raises(ValueError, match=f"unknown option {advice}"):
            from_pretrained(f"{folder}/whole", **option)
    with pytest.raises(ValueError, match=r"weights=.* is for a model on the meta device"):
        apply_ep_fsdp2(tiny(dtype=torch.float32), weights=f"{folder}/{case}")
    # Only rank 1 loads from a damaged folder.
    own_folder = f"{folder}/whole" if rank == 0 else f"{folder}/truncated"
    with pytest.raises(ValueError, match=FIRST):
        from_pretrained(own_folder, ep_size=2)
    own_folder = f"{folder}/whole" if rank == 0 else f"{folder}/other"
    with pytest.raises(ValueError, match=r"rank 1 in .*/other, rank 0 in .*/whole; name one fold"):
        from_pretrained(own_folder, ep_size=2)
    # The copy has the same tensors in other files.
    own_folder = f"{folder}/whole" if rank == 0 else f"{folder}/copy"
    from_pretrained(own_folder, ep_size=2, output_router_logits=True, trust_remote_code=False)


def _load_tied(rank: int, world: int, folder: str) -> None:
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight have different"):
        from_pretrained(f"{folder}/differ", ep_size=2)
    save_pretrained(
        from_pretrained(f"{folder}/differ", tie_word_embeddings=False), f"{folder}/untied"
    )
    save_pretrained(from_pretrained(f"{folder}/same", ep_size=2), f"{folder}/tied")


def test_a_checkpoint_with_both_names_of_a_tied_weight_loads(tmp_path: Path) -> None:
    different, equal = tiny(dtype=torch.float32), tiny(dtype=torch.float32)
    with torch.no_grad():
        equal.lm_head.weight.copy_(equal.model.embed_tokens.weight)
    for case, model in (("differ", different), ("same", equal)):
        write_hub(tmp_path / case, model)
        config = json.loads((tmp_path / case / "config.json").read_text())
        text = json.dumps(config | {"tie_word_embeddings": True})
        (tmp_path / case / "config.json").write_text(text)
    run_ranks(_load_tied, 2, str(tmp_path))
    assert_equal(read_all(tmp_path / "untied"), hub_state(different))
    want = hub_state(equal)
    del want["lm_head.weight"]
    assert_equal(read_all(tmp_path / "tied"), want)


def _load_subfolder(rank: int, world: int, folder: str) -> None:
    model = from_pretrained(folder, subfolder="checkpoint-3", ep_size=2)
    save_pretrained(model, f"{folder}/saved")


def test_subfolder_selects_the_weights(tmp_path: Path) -> None:
    write_hub(tmp_path / "hub", tiny(dtype=torch.float32))
    want = write_hub(tmp_path / "hub" / "checkpoint-3", tiny(dtype=torch.float32, seed=1))
    run_ranks(_load_subfolder, 2, str(tmp_path / "hub"))
    assert_equal(read_all(tmp_path / "hub" / "saved"), want)


def test_a_damaged_checkpoint_is_an_error_on_every_rank(tmp_path: Path) -> None:
    model = tiny(dtype=torch.float32)
    write_hub(tmp_path / "whole", model)
    write_hub(tmp_path / "copy", model, files=2)
    write_hub(tmp_path / "other", tiny(dtype=torch.float32, seed=1))
    for case, (damage, _) in BROKEN.items():
        write_hub(tmp_path / case, model)
        damage(tmp_path / case)
    run_ranks(_load_damaged, 2, str(tmp_path))


def test_an_incomplete_state_dict_overwrites_no_file(tmp_path: Path) -> None:
    model = patch(tiny(dtype=torch.float32, tie_word_embeddings=True))
    save_pretrained(model, tmp_path)
    want, complete = read_all(tmp_path), model.state_dict()
    checkpoint.save_state_dict(model, tmp_path, complete)  # it has both names of the tied weight
    router = "model.layers.1.mlp.gate.weight"
    without_router = {name: tensor for name, tensor in complete.items() if name != router}
    for wrong, words in (
        (without_router, f"missing 1 tensors: {router}"),
        (complete | {"value_head": torch.ones(2)}, "unexpected 1 tensors: value_head"),
        ({}, "missing 24 tensors"),
    ):
        with pytest.raises(ValueError, match=f"does not fit this Qwen3MoeForCausalLM: {words}"):
            checkpoint.save_state_dict(model, tmp_path, wrong)
        assert_equal(read_all(tmp_path), want)


def test_a_save_removes_old_shards_but_no_file_of_the_user(tmp_path: Path) -> None:
    users_files = (
        "model-ema.safetensors",
        "model-of-mine.safetensors",
        "adapter_model.safetensors",
    )
    old_shards = ("model-00001-of-00002.safetensors", "model-0a1b2c3d-00001-of-00002.safetensors")
    for name in (*users_files, *old_shards):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    save_pretrained(patch(tiny(dtype=torch.float32)), tmp_path)
    assert all((tmp_path / name).is_file() for name in users_files)
    assert not any((tmp_path / name).exists() for name in old_shards)


class FullDisk:
    """A disk that is full after `room` bytes of safetensors files."""

    def __init__(self, room: int) -> None:
        self.room = room

    def opener(self) -> Callable[..., Any]:
        """Return a replacement of Path.open whose files raise "No space left on device"."""
        stock = Path.open

        def open_path(path: Path, *args: Any, **kwargs: Any) -> Any:
            file = stock(path, *args, **kwargs)
            if path.suffix != ".safetensors" or args[:1] != ("wb",):
                return file
            full = mock.MagicMock(wraps=file)
            full.write = lambda data: self._write(file, data)
            return full

        return open_path

    def _write(self, file: Any, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(file.write(data))


def _disk_full(rank: int, world: int, folder: str, total: int) -> None:
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    save_pretrained(model, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    before = sorted(os.listdir(folder))
    for room in (10, total // 3, total - 10):
        with (
            mock.patch.object(safetensors_file.Path, "open", FullDisk(room).opener()),
            pytest.raises(RuntimeError, match=r"rank 0: .*No space left on device"),
        ):
            save_pretrained(model, folder, max_shard_size=40_000)
        dist.barrier()
        assert sorted(os.listdir(folder)) == before, "only the previous checkpoint may be there"
    model(**batch(model, 2, 9, seed=rank)).loss.backward()  # training can continue


def test_a_full_disk_is_an_error_on_every_rank_and_loses_nothing(tmp_path: Path) -> None:
    want = hub_state(tiny(dtype=torch.float32))
    run_ranks(_disk_full, 2, str(tmp_path), sum(tensor.nbytes for tensor in want.values()))
    assert_equal(read_all(tmp_path), want)


def test_a_failed_save_keeps_the_previous_config_with_the_previous_weights(tmp_path: Path) -> None:
    save_pretrained(patch(tiny(dtype=torch.float32)), tmp_path)
    larger = tiny(dtype=torch.float32)
    larger.resize_token_embeddings(101, mean_resizing=False)
    before = sorted(os.listdir(tmp_path))
    with (
        mock.patch.object(safetensors_file.Path, "open", FullDisk(100_000).opener()),
        pytest.raises(RuntimeError, match="No space left on device"),
    ):
        save_pretrained(patch(larger), tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    previous = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(hub_state(previous), hub_state(tiny(dtype=torch.float32)))
    save_pretrained(larger, tmp_path)
    assert_equal(hub_state(AutoModelForCausalLM.from_pretrained(tmp_path)), hub_state(larger))


def _save_with_different_arguments(rank: int, world: int, folder: str) -> None:
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    with pytest.raises(ValueError, match=r"values of max_shard_size: .*'5GB', rank 1 with '50KB'"):
        save_pretrained(model, folder, max_shard_size="50KB" if rank else "5GB")
    with pytest.raises(ValueError, match=r"values of dtype: rank 0 with None, rank 1 .*bfloat16"):
        save_pretrained(model, folder, dtype=torch.bfloat16 if rank else None)
    with pytest.raises(ValueError, match=r"max_shard_size 'five' is not a size"):
        save_pretrained(model, folder, max_shard_size="five")
    save_pretrained(model, folder if rank == 0 else f"{folder}/of another rank")


def _fail_on_one_rank(rank: int, world: int) -> None:
    """Rank 1 runs out of memory and raises, while rank 0 never calls `run_on_all`."""
    if rank == 0:
        time.sleep(5)
        return
    no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(
        RuntimeError,
        match=r"^saving failed on rank 1: .*CUDA out of memory; the other",
    ):
        all_ranks.run_on_all("saving", no_memory)


@pytest.mark.slow
def test_a_failed_rank_raises_its_own_error_without_the_others() -> None:
    run_ranks(_fail_on_one_rank, 2, group_timeout=3.0)


def test_ranks_that_save_with_other_arguments_get_an_error(tmp_path: Path) -> None:
    run_ranks(_save_with_different_arguments, 2, str(tmp_path), group_timeout=20.0)
    assert_equal(read_all(tmp_path), hub_state(tiny(dtype=torch.float32)))


def test_a_full_file_system_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """The test mounts a tmpfs of 1 MiB if this process is allowed to."""
    if os.system(f"mount -t tmpfs -o size=1m none {tmp_path} 2> /dev/null") != 0:
        pytest.skip("needs the right to mount a tmpfs of 1 MiB")
    try:
        want = hub_state(tiny(dtype=torch.float32))
        (tmp_path / "filler").write_bytes(bytes(2**20 - 330_000))
        run_ranks(_save_to_full_disk, 2, str(tmp_path))
        assert_equal(read_all(tmp_path), want)
    finally:
        os.system(f"umount {tmp_path}")


def _save_to_full_disk(rank: int, world: int, folder: str) -> None:
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    save_pretrained(model, folder)
    with pytest.raises(RuntimeError, match=r"rank 0: .*No space left on device"):
        save_pretrained(model, folder)


def test_a_rank_that_dies_after_the_commit_leaves_the_committed_files(tmp_path: Path) -> None:
    """Rank 0 notices the death in the next `run_on_all`. It must keep files that it committed."""
    state = {"a": torch.arange(6.0), "b": torch.arange(3.0)}
    for calls in (1, 2, 3):  # the first file, the second, the commit
        folder, results = tmp_path / str(calls), []

        def fail_at_call(
            what: str, part: Callable[[], None], calls: int = calls, results: Any = results
        ) -> None:
            results.append(part())
            if len(results) == calls:
                raise RuntimeError("a rank is gone")

        folder.mkdir()
        save_file({"a": torch.zeros(6)}, folder / "model.safetensors")
        files = [
            [
                TensorGroup(
                    [([make_whole_piece(key, t.shape)], partial(iterate_whole_tensor, t))], t.dtype
                )
            ]
            for key, t in state.items()
        ]
        with pytest.raises(RuntimeError, match="a rank is gone"):
            write_checkpoint(folder, files, run_on_all=fail_at_call)
        if calls == 3:
            assert_equal(read_all(folder), state)
        else:
            assert os.listdir(folder) == ["model.safetensors"]


def _save_until_killed(
    rank: int, world: int, folder: str, sizes: dict[str, int], victim: int, after: float
) -> None:
    """Save weights that are all 0, then all 1, 2, ..., until rank `victim` is killed."""
    all_ranks.PATIENCE = timedelta(seconds=5)  # instead of 5 minutes for the killed rank
    if rank == victim:
        kill_later(after)
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), **sizes)
    for version in range(1000):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(version)
        save_pretrained(model, folder, max_shard_size=40_000)
    raise AssertionError("nobody was killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [({"ep_size": 2}, 40), ({"pp_size": 2}, 20)],
    ids=["ep", "stages"],
)
def test_after_a_kill_the_folder_has_one_complete_version(
    sizes: dict[str, int], rounds: int, tmp_path: Path
) -> None:
    draw = random.Random(40)
    versions = set()
    for number in range(rounds):
        folder, victim = tmp_path / str(number), draw.randrange(2)
        outcomes = run_ranks(
            _save_until_killed, 2, str(folder), sizes, victim, draw.uniform(1.0, 3.0),
            expect_errors=True, group_timeout=20.0,
        )  # fmt: skip
        assert outcomes[victim][1] == "ProcessDied"
        if not (folder / INDEX).is_file():
            versions.add(-1)  # the kill came before the first commit
            continue
        state = read_all(folder)
        values = {tensor.unique().item() for tensor in state.values()}
        assert len(values) == 1, f"round {number}: a mixture of versions {values}"
        assert state.keys() == hub_state(tiny(dtype=torch.float32)).keys()
        AutoModelForCausalLM.from_pretrained(folder)
        versions |= values
    print(sorted(versions))
    assert len(versions) > 1, "all kills came at the same version"
