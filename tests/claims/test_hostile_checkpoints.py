"""A damaged or hostile checkpoint runs no code, and loads no wrong value without a message.

The tests damage checkpoints of `save_checkpoint`, `accelerator.save_state` and the Trainer at
random: they flip a bit, truncate or delete a file, replace a file by another run's, or replace a
pickle by a pickle that runs code. An attacker can also write a manifest, so a hostile checkpoint
has a new manifest, no manifest, or the old manifest.
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
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_moe_ep import load_checkpoint, patch, save_checkpoint
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader

SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
# save_checkpoint writes no pickles.
OWN_LOOP = ("save_state", "save_state", "save_state", "save_checkpoint")
DAMAGES = ("flipped", "cut", "exchanged", "deleted")
MANIFESTS = ("new", "none", "old")
PICKLES = (".pkl", ".bin", ".pt", ".pth")


class _Run:
    """A patched model and its optimizer on this rank, which can be saved in two ways."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loaded: dict[str, Tensor] = {}
        self.accelerator = Accelerator(cpu=True)
        model = tiny(dtype=torch.float32, num_hidden_layers=1)
        _, self.model, self.optimizer = prepared(model, self.accelerator, ep_size=2)

    def save_two(self, folder: Path) -> dict[str, Tensor]:
        """Save the states after one and two steps, and return the values of the first state."""
        states = []
        for which in ("first", "second"):
            self.accelerator.backward(self.model(**batch(self.model, 2, 7, seed=self.rank)).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            states.append(whole_state(self.model, self.optimizer))
            self.accelerator.save_state(folder / which / "save_state")
            save_checkpoint(
                folder / which / "save_checkpoint", self.model, self.optimizer.optimizer
            )
        return states[0]

    def load(self, save_kind: str, folder: Path) -> None:
        if save_kind == "save_state":
            self.accelerator.load_state(folder)
        else:
            load_checkpoint(folder, self.model, self.optimizer.optimizer)
        self.loaded = whole_state(self.model, self.optimizer)


class _TrainerRun(TrainerCallback):
    """A training run, which creates a new Trainer for each checkpoint that it loads."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.states: list[dict[str, Tensor]] = []
        self.loaded: dict[str, Tensor] = {}

    def save_two(self, folder: Path) -> dict[str, Tensor]:
        self._trainer(folder, save_steps=1).train()
        dist.barrier()
        if self.rank == 0:
            for which, step in (("first", 1), ("second", 2)):
                (folder / which).mkdir()
                (folder / f"checkpoint-{step}").rename(folder / which / "Trainer")
        dist.barrier()
        return self.states[0]

    def load(self, save_kind: str, folder: Path) -> None:
        self._trainer(folder).train(resume_from_checkpoint=str(folder))

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.states.append(whole_state(kwargs["model"], kwargs["optimizer"]))

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.save_strategy == "no":  # a checkpoint has been loaded, and no step follows
            self.loaded = whole_state(kwargs["model"], kwargs["optimizer"])
            control.should_training_stop = True

    def _trainer(self, folder: Path, save_steps: int = 0) -> Trainer:
        model = patch(tiny(dtype=torch.float32, num_hidden_layers=1), ep_size=2)
        rows = [{name: x[0] for name, x in batch(model, 1, 7, seed=i).items()} for i in range(4)]
        options: Any = {"use_cpu": True, "max_steps": 2, "report_to": [], "disable_tqdm": True}
        options |= {"output_dir": str(folder), "per_device_train_batch_size": 1}
        options["save_strategy"] = "steps" if save_steps else "no"
        arguments = TrainingArguments(**options, save_steps=save_steps or 1, learning_rate=0.1)
        return Trainer(model, arguments, train_dataset=rows, callbacks=[self])


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
        *(("file", file) for file in _list_files(folder) if file.suffix in PICKLES),
    ]


def _replace_by_hostile_pickle(
    kind: str, path: Path, trace: Path, generator: random.Random
) -> None:
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


def _list_files(folder: Path) -> list[Path]:
    """List the files that hold values; other tests damage the manifest and the marker."""
    excluded = ("manifest.json", manifest.STARTED)
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in files if file.name not in excluded)


def _damage_copy(
    number: int, saved: Path, other: Path, folder: Path, trace: Path
) -> tuple[str, str]:
    """Damage a copy of a checkpoint. Return the kinds of the damage and of its manifest."""
    generator = random.Random(number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    pickles = _find_pickles(folder)
    if number % 2 or not pickles:
        kind, which_manifest = generator.choice(DAMAGES), "old"
        files = [file for file in _list_files(folder) if file.stat().st_size]
        file = generator.choice(files)
        before = file.read_bytes()
        _damage(kind, file, other / file.relative_to(folder), generator)
        if file.exists() and file.read_bytes() == before:
            kind = "nothing"
        return kind, which_manifest
    (kind_of_pickle, path), which_manifest = generator.choice(pickles), generator.choice(MANIFESTS)
    _replace_by_hostile_pickle(kind_of_pickle, path, trace, generator)
    if which_manifest != "old":
        for file in folder.rglob("*"):
            if file.name in ("manifest.json", manifest.STARTED):
                file.unlink()
    return kind_of_pickle, which_manifest


def _load_damaged_copies(
    rank: int, world: int, folder: str, save_kinds: tuple[str, ...], numbers: list[int]
) -> Counter[str]:
    """Load each damaged checkpoint, and count how many are refused, cause a warning, or load the
    saved values.
    """
    outcomes: Counter[str] = Counter()
    root, copy, trace = Path(folder), Path(folder, "copy"), Path(folder, "code ran")
    with launched(**SHARDED):
        run = _TrainerRun(rank) if "Trainer" in save_kinds else _Run(rank)
        saved_values = run.save_two(root)
        for number in numbers:
            save_kind = save_kinds[number % len(save_kinds)]
            kind_and_manifest = [("", "")]
            if rank == 0:
                damaged = (root / "first" / save_kind, root / "second" / save_kind, copy, trace)
                kind_and_manifest = [_damage_copy(number, *damaged)]
            dist.broadcast_object_list(kind_and_manifest)
            kind, which_manifest = kind_and_manifest[0]
            if which_manifest == "new":
                manifest.write(copy, {})
            outcome = _load(run, save_kind, copy, saved_values)
            assert not trace.exists(), (
                f"{number}: loading ran code, {save_kind}, {kind}, {which_manifest}"
            )
            assert outcome != "wrong", (
                f"{number}: {save_kind}, {kind}, {which_manifest}: wrong values, no message"
            )
            outcomes[outcome] += 1
            dist.barrier()
    return outcomes


def _load(
    run: _Run | _TrainerRun, save_kind: str, folder: Path, saved_values: dict[str, Tensor]
) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own_error = _get_error(lambda: run.load(save_kind, folder))
    errors: list[Any] = [None, None]
    dist.all_gather_object(errors, own_error)
    assert len({error == "" for error in errors}) == 1, f"only one rank raised: {errors}"
    if own_error:
        return "refused"
    if all(torch.equal(run.loaded[name], value) for name, value in saved_values.items()):
        return "as saved"
    messages: list[Any] = [None, None]
    dist.all_gather_object(messages, [str(warning.message) for warning in caught])
    warned = any("verified" in message for rank_messages in messages for message in rank_messages)
    return "warned of" if warned else "wrong"


def _get_error(load: Callable[[], None]) -> str:
    """Return the text of the error of `load`, or "". Other tests check the kind of the error."""
    try:
        load()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("count", "save_kinds"),
    [
        (12, OWN_LOOP),
        pytest.param(200, OWN_LOOP, marks=pytest.mark.slow),
        pytest.param(100, ("Trainer",), marks=pytest.mark.slow),
    ],
    ids=["12", "200", "100 of the Trainer"],
)
def test_damaged_checkpoints_run_no_code_and_load_no_wrong_values(
    count: int, save_kinds: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = (str(tmp_path), save_kinds, list(range(count)))
    outcomes, _ = run_ranks(_load_damaged_copies, 2, *arguments, timeout=900.0)
    print(dict(outcomes))
    assert outcomes.total() == count
    assert outcomes["refused"] > count / 2
