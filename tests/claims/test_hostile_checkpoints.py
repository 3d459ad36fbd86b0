"""A damaged or hostile checkpoint runs no code, and loads no wrong value without a message.

The tests take checkpoints of `save_checkpoint` and `accelerator.save_state` and spoil each at
random: they flip a bit, truncate or delete a file, exchange it with another run's, or insert a
pickle that runs code at one of the places that hold pickles. An attacker can write a manifest too,
so a hostile checkpoint has a new manifest, no manifest, or the old one.
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


def _damage(kind: str, file: Path, other: Path, generator: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if kind == "deleted":
        file.unlink()
    elif kind == "exchanged":
        shutil.copy(other, file)
    elif kind == "cut":
        file.write_bytes(data[: generator.randrange(len(data))])
    else:
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        file.write_bytes(data)


def _find_pickles(folder: Path) -> list[tuple[str, Path]]:
    """Find the pickles of a checkpoint as (kind, path). `save_checkpoint` writes none."""
    dcp_folders = sorted({file.parent for file in folder.rglob(".metadata")})
    return [
        *(("byte item", dcp) for dcp in dcp_folders if _has_byte_items(dcp)),
        *(("metadata", dcp / ".metadata") for dcp in dcp_folders),
        *(("file", file) for file in _files(folder) if file.suffix in (".pkl", ".bin", ".pt")),
    ]


def _plant(kind: str, path: Path, trace: Path, generator: random.Random) -> None:
    if kind == "byte item":
        plant(path, trace)
    elif kind == "metadata" or generator.random() < 0.5:
        path.write_bytes(pickle.dumps(Shell(trace)))
    else:
        torch.save(Shell(trace), path)


def _has_byte_items(folder: Path) -> bool:
    metadata = MetadataReader(folder).read_metadata()
    return any(
        isinstance(item, BytesStorageMetadata) for item in metadata.state_dict_metadata.values()
    )


def _files(folder: Path) -> list[Path]:
    """List the files that hold values; other tests damage the manifest and the marker."""
    excluded = ("manifest.json", manifest.STARTED)
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in files if file.name not in excluded)


def _spoil(number: int, saved: Path, other: Path, folder: Path, trace: Path) -> tuple[str, str]:
    """Spoil a copy of a checkpoint; return the kind of damage, and which manifest the copy has."""
    generator = random.Random(number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    pickles = _find_pickles(folder)
    if number % 2 or not pickles:
        kind, which_manifest = generator.choice(DAMAGES), "old"
        files = [file for file in _files(folder) if file.stat().st_size]
        file = generator.choice(files)
        before = file.read_bytes()
        _damage(kind, file, other / file.relative_to(folder), generator)
        if file.exists() and file.read_bytes() == before:
            kind = "nothing"
        return kind, which_manifest
    (kind_of_pickle, path), which_manifest = generator.choice(pickles), generator.choice(MANIFESTS)
    _plant(kind_of_pickle, path, trace, generator)
    if which_manifest != "old":
        for file in folder.rglob("*"):
            if file.name in ("manifest.json", manifest.STARTED):
                file.unlink()
    return kind_of_pickle, which_manifest


def _load_spoiled(rank: int, world: int, folder: str, numbers: list[int]) -> Counter[str]:
    """Load each spoiled checkpoint, and count how many are refused, cause a warning, or load the
    saved values.
    """
    outcomes: Counter[str] = Counter()
    copy, trace = Path(folder, "copy"), Path(folder, "code ran")
    with launched(**SHARDED):
        run = _Run(rank)
        saved: dict[tuple[str, str], Path] = {}
        run.step()
        saved_values: dict[str, Tensor] = {}
        for which in ("first", "second"):
            for way in WAYS:
                saved[which, way] = Path(folder, which, way)
                run.save(way, saved[which, way])
            if which == "first":
                saved_values = run.values()
                run.step()
        for number in numbers:
            way = WAYS[number % 4 != 3]  # mostly save_state, the only one that writes pickles
            kind_and_manifest = [("", "")]
            if rank == 0:
                spoiled = (saved["first", way], saved["second", way], copy, trace)
                kind_and_manifest = [_spoil(number, *spoiled)]
            dist.broadcast_object_list(kind_and_manifest)
            kind, which_manifest = kind_and_manifest[0]
            if which_manifest == "new":
                manifest.write(copy, {})
            outcome = _load(run, way, copy, saved_values)
            assert not trace.exists(), (
                f"{number}: loading ran code, {way}, {kind}, {which_manifest}"
            )
            assert outcome != "wrong", (
                f"{number}: {way}, {kind}, {which_manifest}: wrong values, no message"
            )
            outcomes[outcome] += 1
            dist.barrier()
    return outcomes


def _load(run: _Run, way: str, folder: Path, saved_values: dict[str, Tensor]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own_error = _error_of(lambda: run.load(way, folder))
    errors: list[Any] = [None, None]
    dist.all_gather_object(errors, own_error)
    assert len({error == "" for error in errors}) == 1, f"only one rank raised: {errors}"
    if own_error:
        return "refused"
    loaded = run.values()
    if all(torch.equal(loaded[name], value) for name, value in saved_values.items()):
        return "as saved"
    messages: list[Any] = [None, None]
    dist.all_gather_object(messages, [str(warning.message) for warning in caught])
    warned = any("verified" in message for of_rank in messages for message in of_rank)
    return "warned of" if warned else "wrong"


def _error_of(load: Callable[[], None]) -> str:
    """Return the error of `load`, if any. Other tests check which error it is."""
    try:
        load()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_spoiled_checkpoints_run_no_code_and_load_no_wrong_values(
    count: int, tmp_path: Path
) -> None:
    outcomes, _ = run_ranks(_load_spoiled, 2, str(tmp_path), list(range(count)), timeout=900.0)
    print(dict(outcomes))
    assert outcomes.total() == count
    assert outcomes["refused"] > count / 2
