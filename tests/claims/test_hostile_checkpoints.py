"""Checkpoints that are damaged or hostile run no code, and load no wrong value without a message.

A corpus drawn at random of what `save_checkpoint` and `accelerator.save_state` write: a byte
flipped, a file cut short, exchanged with that of another run or deleted, and a pickle that runs
code at each place where a pickle can lie. An attacker can write a manifest too, so hostile files
come with a new one, with none, and with the old one.
"""

import pickle
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from support.launched import launched, prepared
from support.parity import whole_state
from support.planted import Shell, plant
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hf_moe_ep import load_checkpoint, save_checkpoint
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader

SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
WAYS = ("save_checkpoint", "save_state")
DAMAGES = ("flipped", "cut", "exchanged", "deleted")
MANIFESTS = ("new", "none", "old")


class _Run:
    """A patched model and its optimizer on this rank, and both ways to save them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.accelerator = Accelerator(cpu=True)
        model = tiny(dtype=torch.float32, num_hidden_layers=1)
        _, self.model, self.optimizer = prepared(model, self.accelerator, ep_size=2)

    def step(self) -> None:
        self.accelerator.backward(self.model(**batch(self.model, 2, 7, seed=self.rank)).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, way: str, folder: Path) -> None:
        if way == "save_state":
            self.accelerator.save_state(folder)
        else:
            save_checkpoint(folder, self.model, self.optimizer.optimizer)

    def load(self, way: str, folder: Path) -> None:
        if way == "save_state":
            self.accelerator.load_state(folder)
        else:
            load_checkpoint(folder, self.model, self.optimizer.optimizer)

    def values(self) -> dict[str, Tensor]:
        return whole_state(self.model, self.optimizer)


def _damage(kind: str, file: Path, other: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if kind == "deleted":
        file.unlink()
    elif kind == "exchanged":
        shutil.copy(other, file)
    elif kind == "cut":
        file.write_bytes(data[: draw.randrange(len(data))])
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)


def _places(folder: Path) -> list[tuple[str, Path]]:
    """Find the pickles of a checkpoint; `save_checkpoint` writes none."""
    dcp = sorted({file.parent for file in folder.rglob(".metadata")})
    return [
        *(("byte item", one) for one in dcp if _has_byte_items(one)),
        *(("metadata", one / ".metadata") for one in dcp),
        *(("file", file) for file in _files(folder) if file.suffix in (".pkl", ".bin", ".pt")),
    ]


def _plant(place: str, path: Path, trace: Path, draw: random.Random) -> None:
    if place == "byte item":
        plant(path, trace)
    elif place == "metadata" or draw.random() < 0.5:
        path.write_bytes(pickle.dumps(Shell(trace)))
    else:
        torch.save(Shell(trace), path)


def _has_byte_items(folder: Path) -> bool:
    metadata = MetadataReader(folder).read_metadata()
    return any(
        isinstance(one, BytesStorageMetadata) for one in metadata.state_dict_metadata.values()
    )


def _files(folder: Path) -> list[Path]:
    """Return the files that hold values. Other tests damage the manifest and the marker."""
    own = ("manifest.json", manifest.STARTED)
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in own)


def _spoil(number: int, saved: Path, other: Path, folder: Path, trace: Path) -> tuple[str, str]:
    """Copy a checkpoint and spoil the copy; returns what was done, and to its manifest."""
    draw = random.Random(number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    places = _places(folder)
    if number % 2 or not places:
        kind, what = draw.choice(DAMAGES), "old"
        files = [file for file in _files(folder) if file.stat().st_size]
        file = draw.choice(files)
        before = file.read_bytes()
        _damage(kind, file, other / file.relative_to(folder), draw)
        if file.exists() and file.read_bytes() == before:
            kind = "nothing"
        return kind, what
    (place, path), what = draw.choice(places), draw.choice(MANIFESTS)
    _plant(place, path, trace, draw)
    if what != "old":
        for file in folder.rglob("*"):
            if file.name in ("manifest.json", manifest.STARTED):
                file.unlink()
    return place, what


def _corpus(rank: int, world: int, folder: str, numbers: list[int]) -> Counter[str]:
    """Load all of them; returns how many were refused, warned of, and loaded as they were saved."""
    found: Counter[str] = Counter()
    copy, trace = Path(folder, "copy"), Path(folder, "code ran")
    with launched(**SHARDED):
        run = _Run(rank)
        saved: dict[tuple[str, str], Path] = {}
        run.step()
        wants: dict[str, Tensor] = {}
        for which in ("first", "second"):
            for way in WAYS:
                saved[which, way] = Path(folder, which, way)
                run.save(way, saved[which, way])
            if which == "first":
                wants = run.values()
                run.step()
        for number in numbers:
            way = WAYS[number % 4 != 3]  # the other has no pickles
            done = [("", "")]
            if rank == 0:
                spoiled = (saved["first", way], saved["second", way], copy, trace)
                done = [_spoil(number, *spoiled)]
            dist.broadcast_object_list(done)
            kind, with_manifest = done[0]
            if with_manifest == "new":
                manifest.write(copy, {})
            ended = _load(run, way, copy, wants)
            assert not trace.exists(), f"{number}: code ran out of {way}, {kind}, {with_manifest}"
            assert ended != "wrong", f"{number}: {way}, {kind}, {with_manifest}: loaded, not said"
            found[ended] += 1
            dist.barrier()
    return found


def _load(run: _Run, way: str, folder: Path, wants: dict[str, Tensor]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended = _outcome(lambda: run.load(way, folder))
    every: list[Any] = [None, None]
    dist.all_gather_object(every, ended)
    assert len({one == "" for one in every}) == 1, f"one rank alone raised: {every}"
    if ended:
        return "refused"
    got = run.values()
    if all(torch.equal(got[name], want) for name, want in wants.items()):
        return "as saved"
    said: list[Any] = [None, None]
    dist.all_gather_object(said, [str(one.message) for one in caught])
    return "warned of" if any("verified" in line for lines in said for line in lines) else "wrong"


def _outcome(load: Callable[[], None]) -> str:
    """Return the error of `load`, if any. Other tests check which error it is."""
    try:
        load()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_corpus(count: int, tmp_path: Path) -> None:
    found, _ = run_ranks(_corpus, 2, str(tmp_path), list(range(count)), timeout=900.0)
    print(dict(found))
    assert found.total() == count
    assert found["refused"] > count / 2
