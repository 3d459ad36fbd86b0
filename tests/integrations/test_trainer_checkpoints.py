"""Test the Trainer's checkpoints of a patched model.

A run resumes only from complete checkpoints, and old checkpoints are deleted after the new
checkpoint is complete.
"""

import errno
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.jobs.trainer import Case, launch, training_rows
from support.scripts import CPU_4
from support.tiny_models import tiny
from support.trainer_runs import Results, assert_same_log
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from transformers import Trainer, TrainingArguments

from hf_moe_ep import apply_ep_fsdp2, load_checkpoint, newest_checkpoint, patch, save_checkpoint
from hf_moe_ep.checkpoints.storage import manifest, unpickle
from hf_moe_ep.checkpoints.storage.unpickle import METADATA_FILE, MetadataReader
from hf_moe_ep.checkpoints.training import rng
from hf_moe_ep.integrations.install import TRAINER_METHODS
from hf_moe_ep.integrations.optimizer_states import use_own_optimizer_states
from hf_moe_ep.upstream.accelerate_and_trainer import SAVE_IN_PROGRESS
from hf_moe_ep.upstream.process_groups import fake_group
from hf_moe_ep.upstream.wrap import specialise

SAVE = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
# The texts have no token of these ids, which would need a picture.
VISION = {"name": "qwen3_vl_moe", "image_token_id": 1000, "video_token_id": 1001}
_BATCHES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer_checkpoints")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Results:
    """Four ranks train to step 3 and stop. Runs of a second launch resume from there.

    They resume at ep 4, and from a checkpoint of our Trainer at ep 2, unless it is said here:

    torn               the manifest is missing, as after a save that did not finish
    stock              our two files are missing, as after a save of the stock Trainer
    saved by stock     the stock Trainer has trained an unpatched model, sharded by FSDP2
    resumed by stock   the stock Trainer resumes from our checkpoint
    read in shards     the resumed model is that of hf_moe_ep.from_pretrained, sharded already
    text alone         a model with a vision tower, which has no gradients
    whole              these runs train without a stop, for comparison
    """
    half, by_stock, base = folder / "half", folder / "saved by stock", folder / "base"
    tiny(dtype=torch.float32, seed=1).save_pretrained(base)
    results = launch(
        [
            Case("whole", ep=2),
            Case("half", ep=2, arguments=SAVE, folder=half, stop_after=3),
            Case("stock half", arguments=SAVE, folder=by_stock, stop_after=3),
            Case("whole, text alone", ep=2, model=VISION),
            Case("half, text alone", ep=2, model=VISION, arguments=SAVE, stop_after=3),
        ],
        folder / "first",
        CPU_4,
    )
    assert not (by_stock / "checkpoint-3" / manifest.MANIFEST).exists()
    for name in ("resumed by stock", "read in shards"):
        shutil.copytree(half, folder / name)
    for name in ("torn", "stock"):
        shutil.copytree(half, folder / name)
        (folder / name / "checkpoint-3" / manifest.MANIFEST).unlink()
    (folder / "stock" / "checkpoint-3" / manifest.STARTED).unlink()
    resume: dict[str, Any] = {"seed": 1, "arguments": SAVE, "ep": 4}
    return results | launch(
        [
            Case("torn", ("resume",), folder=folder / "torn", **resume),
            Case("stock", ("resume 3",), folder=folder / "stock", **resume),
            Case("saved by stock", ("resume 3",), folder=by_stock, **resume),
            Case(
                "resumed by stock",
                ("resume 3",),
                folder=folder / "resumed by stock",
                **resume | {"ep": 0},
            ),
            Case(
                "read in shards",
                ("resume 3",),
                folder=folder / "read in shards",
                load=base,
                in_shards=True,
                **resume,
            ),
            Case(
                "text alone",
                ("resume",),
                folder=folder / "first" / "half, text alone",
                model=VISION,
                **resume,
            ),
        ],
        folder / "second",
        CPU_4,
    )


@pytest.mark.slow
def test_each_checkpoint_is_complete(runs: Results, folder: Path) -> None:
    for number in (1, 2, 3):
        manifest.check(folder / "half" / f"checkpoint-{number}")
    content = manifest.read(folder / "half" / "checkpoint-3")
    assert content["layout"]["ep_size"] == 2 and content["layout"]["world_size"] == 4
    files = content["files"]
    assert "trainer_state.json" in files and "optimizer_0/.metadata" in files
    assert "scheduler.pt" in files and "rng_state_3.pth" in files


@pytest.mark.slow
@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_each_rank_plans_what_it_saves(runs: Results, folder: Path, part: str) -> None:
    """Tensors with the same layout then share one list of chunks in `.metadata`.

    torch gathers the plans of all ranks, and writes one list per tensor. See also
    `tests/checkpoints/test_planner.py`.
    """
    reader = MetadataReader(folder / "half" / "checkpoint-3" / part)
    entries = reader.read_metadata().state_dict_metadata.values()
    tensors = [entry for entry in entries if hasattr(entry, "chunks")]
    assert 1 < len({id(tensor.chunks) for tensor in tensors}) < len(tensors) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["torn", "stock", "saved by stock", "resumed by stock", "read in shards"]
)
def test_runs_resume_at_another_ep_size(runs: Results, case: str) -> None:
    """resume_from_checkpoint=True skips a torn checkpoint. Stock checkpoints need no manifest."""
    assert_same_log(runs[case][0], runs["whole"][0])


@pytest.mark.slow
def test_a_run_whose_tower_had_no_gradients_resumes(runs: Results) -> None:
    assert_same_log(runs["text alone"][0], runs["whole, text alone"][0])


@pytest.mark.slow
def test_skipped_and_unverified_checkpoints_are_reported(runs: Results, folder: Path) -> None:
    output = (folder / "second" / "output.txt").read_text()
    assert output.count("torn/checkpoint-2, because") == 1
    assert "torn/checkpoint-3 has no manifest.json: this checkpoint was not finished" in output
    for name in ("stock", "saved by stock"):
        unverified = f"/{name}/checkpoint-3 cannot be verified: it has no manifest.json"
        assert output.count(unverified) == 1, name


def test_parameters_of_two_meshes_are_in_one_group() -> None:
    """A model of from_pretrained is sharded when the Trainer creates the optimizer."""
    trainer = Trainer.__new__(Trainer)
    trainer.optimizer, trainer.args = None, SimpleNamespace(weight_decay=0.1)
    trainer.optimizer_cls_and_kwargs = torch.optim.AdamW, {}
    with fake_group(0, 4):
        trainer.model = apply_ep_fsdp2(tiny(num_hidden_layers=1), ep_size=2)
        specialise(trainer, Trainer, TRAINER_METHODS)
        groups = trainer.create_optimizer().param_groups
        meshes = [len({p.device_mesh for p in group["params"]}) for group in groups]
    assert meshes == [2, 1]  # the group with weight decay, and that of the norms


def test_other_groups_of_parameters_are_an_error() -> None:
    """The optimizer has 2 groups, the checkpoint 3. DCP reads 2 of them, FULL_STATE_DICT all 3."""
    model = patch(tiny(num_hidden_layers=1))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    saved = torch_state_dict.get_optimizer_state_dict(model, optimizer)
    last, names = saved["param_groups"][1], saved["param_groups"][1]["params"]
    first_part, second_part = last | {"params": names[:-1]}, last | {"params": names[-1:]}
    for read in ([first_part], [first_part, second_part]):
        state = saved | {"param_groups": [saved["param_groups"][0], *read]}
        message = r"had other groups of parameters than this one, which has 2 \(in other groups: "
        with use_own_optimizer_states(), pytest.raises(ValueError, match=message + "lm_head|model"):
            torch_state_dict.set_optimizer_state_dict(
                model, optimizer, state, options=StateDictOptions()
            )


@pytest.fixture
def environment() -> Iterator[None]:
    """Restore the environment variables, which the Trainer changes."""
    with mock.patch.dict(os.environ):
        yield


def _create_trainer(path: Path, patched: bool, model: Any = None, **arguments: Any) -> Trainer:
    model = tiny(dtype=torch.float32, num_hidden_layers=1) if model is None else model
    return Trainer(
        model=patch(model) if patched else model,
        args=TrainingArguments(
            output_dir=os.fspath(path),
            use_cpu=True,
            max_steps=3,
            save_strategy="steps",
            report_to=[],
            disable_tqdm=True,
            **{"save_steps": 1, "save_total_limit": 1, **arguments},
        ),
        train_dataset=training_rows("uneven")[:8],
    )


def test_old_checkpoints_are_deleted_last(tmp_path: Path, environment: None) -> None:
    folders, stock_write = [], manifest.write

    def record(folder: Path, *args: Any, **kwargs: Any) -> None:
        folders.append(sorted(path.name for path in tmp_path.iterdir()))
        assert (folder / manifest.STARTED).exists() and (folder / "trainer_state.json").exists()
        if folder.name == "checkpoint-3":
            raise OSError("killed here")
        stock_write(folder, *args, **kwargs)

    with mock.patch.object(manifest, "write", record), pytest.raises(OSError, match="killed"):
        _create_trainer(tmp_path, True).train()
    assert folders == [
        ["checkpoint-1"],
        ["checkpoint-1", "checkpoint-2"],
        ["checkpoint-2", "checkpoint-3"],
    ]
    trainer = _create_trainer(tmp_path, True)
    with pytest.warns(UserWarning, match=r"resuming from .*checkpoint-2, because .*checkpoint-3"):
        trainer.train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    manifest.check(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match=r"checkpoint-3 was written by the Trainer or by A"):
        load_checkpoint(tmp_path, trainer.model, trainer.optimizer)
    (tmp_path / "checkpoint-3" / manifest.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*\n.*checkpoint-3 has no"):
        _create_trainer(tmp_path, True).train(resume_from_checkpoint=True)


def test_folders_that_the_trainer_has_not_written_are_refused(
    tmp_path: Path, environment: None
) -> None:
    """Without this error, stock would raise FileNotFoundError."""
    trainer = _create_trainer(tmp_path / "out", True)
    hub, own, runs, file = (tmp_path / name for name in ("hub", "own", "runs", "file"))
    tiny(dtype=torch.float32).save_pretrained(hub)
    optimizer = torch.optim.SGD(trainer.model.parameters())
    save_checkpoint(own, trainer.model, optimizer)
    (runs / "checkpoint-7").mkdir(parents=True)
    sharded, full = tmp_path / "sharded", tmp_path / "full"
    for of_trainer, model in (
        (sharded, f"pytorch_model_fsdp_0/{METADATA_FILE}"),
        (full, "pytorch_model_fsdp.bin"),
    ):
        (of_trainer / model).parent.mkdir(parents=True)
        (of_trainer / model).write_bytes(b"")
        (of_trainer / "trainer_state.json").write_text("{}")
    file.write_text("x")
    (tmp_path / "empty").mkdir()
    for folder, match in {
        hub: r"hub is not a checkpoint of the Trainer, because it has no trainer_state.json",
        own: "own is not a checkpoint of the Trainer, .*written by save_checkpoint, so load it",
        runs: "runs is not a checkpoint of the Trainer, .*name a checkpoint in it, such .*point-7$",
        file: "file is a file; name the folder of a checkpoint",
        tmp_path / "nowhere": "nowhere does not exist; name the folder of a checkpoint",
        tmp_path / "empty": "empty is empty: this checkpoint was not finished; load an older one",
        sharded: "sharded was saved by a run with FSDP, but a run without FSDP reads other files",
        full: "full was saved by a run with FSDP, but a run without FSDP .*; resume with FSDP,",
    }.items():
        with pytest.raises(ValueError, match=match):
            trainer.train(resume_from_checkpoint=str(folder))
    only_model = tmp_path / "only model"
    only_model.mkdir()
    for name in ("model.safetensors", "trainer_state.json"):
        (only_model / name).write_text("{}")
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="only model was saved with save_only_model=True, so it"):
        trainer.train(resume_from_checkpoint=str(only_model))


def test_experts_are_resumed_in_one_process(tmp_path: Path, environment: None) -> None:
    """Stock would look for the model's parameter names in the file, and would find no experts."""
    trainer = _create_trainer(tmp_path, True)
    trainer.train()
    expected = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    resumed = _create_trainer(tmp_path, True)
    for load in ("resume", "best"):
        with torch.no_grad():
            for parameter in resumed.model.parameters():
                parameter.fill_(5.0)
        if load == "resume":
            resumed.train(resume_from_checkpoint=True)  # no step is left to train
        else:
            resumed.state.best_model_checkpoint = os.fspath(tmp_path / "checkpoint-3")
            resumed._load_best_model()
        for name, parameter in resumed.model.named_parameters():
            assert torch.equal(parameter, expected[name]), (load, name)


def test_tensors_that_peft_does_not_save_are_resumed_in_one_process(
    tmp_path: Path, environment: None
) -> None:
    """Stock saves only the adapter. A checkpoint of stock is refused if it lacks a parameter.

    If it lacks only buffers, such as a router's correction bias, there is a warning.
    """

    def make(trained: str) -> Any:
        base = tiny(dtype=torch.float32, num_hidden_layers=1)
        base.model.register_buffer("correction_bias", torch.zeros(2))
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
        for name, parameter in model.named_parameters():
            if trained and name.endswith(trained):
                parameter.requires_grad_(True)
        return model

    trainer = _create_trainer(tmp_path, True, make("mlp.gate.weight"), learning_rate=0.05)
    trainer.model.base_model.model.model.correction_bias.fill_(0.25)
    trainer.train()
    expected = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    resumed = _create_trainer(tmp_path, True, make("mlp.gate.weight"))
    resumed.train(resume_from_checkpoint=True)
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    checkpoint = tmp_path / "checkpoint-3"
    shutil.rmtree(checkpoint / "beside_adapters")
    manifest.write(checkpoint, {})
    with pytest.raises(ValueError, match=r"checkpoint-3 has the active adapter, but lacks .*gate"):
        resumed.train(resume_from_checkpoint=True)
    adapter_alone = _create_trainer(tmp_path, True, make(""))
    with pytest.warns(UserWarning, match=r"checkpoint-3 lacks .*correction_bias, as checkpoints"):
        adapter_alone._load_from_checkpoint(str(checkpoint))


@pytest.mark.slow
def test_resuming_with_other_rows_per_step_warns(tmp_path: Path, environment: None) -> None:
    """The Trainer skips 1 step of its own size, although the saved step had another size."""
    _create_trainer(tmp_path, True, save_total_limit=3, **_BATCHES).train()
    folder = os.fspath(tmp_path / "checkpoint-1")
    assert manifest.read(folder)["layout"]["rows_per_step"] == 4
    remedies = {
        (1, 2): r"has 2 \(1 data ranks, .*size=1, .*steps=2\).*set .*size=1 and .*steps=4$",
        (3, 1): r"has 3 \(1 data ranks, .*size=3, .*steps=1\).*set .*size=2 and .*steps=2$",
        (8, 1): r"has 8 \(1 data ranks, .*size=8, .*steps=1\).*set .*size=4 and .*steps=1$",
    }
    for (size, accumulation), remedy in remedies.items():
        batches = dict(zip(_BATCHES, (size, accumulation), strict=True))
        trainer = _create_trainer(tmp_path / "other", True, **batches)
        with pytest.warns(UserWarning, match=f"saved with 4 rows per optimizer step, .*{remedy}"):
            trainer.train(resume_from_checkpoint=folder)
    same = dict(zip(_BATCHES, (1, 4), strict=True))
    trainer = _create_trainer(tmp_path / "other", True, **same)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=folder)
        # The Trainer then restores the batch size of the checkpoint, which may have become smaller.
        finds = dict(zip(_BATCHES, (8, 1), strict=True)) | {"auto_find_batch_size": True}
        trainer = _create_trainer(tmp_path / "other", True, **finds)
        trainer._train_batch_size = 3
        trainer.train(resume_from_checkpoint=folder)
    assert not [w for w in caught if "rows per optimizer step" in str(w.message)]


def test_a_checkpoint_of_more_ranks_reseeds_random_generators(
    tmp_path: Path, environment: None
) -> None:
    """Stock looks for `rng_state.pth`, does not find it, and does not change the generators.

    The data ranks draw equal numbers in Python and numpy, as at the start of a run: TRL's GKD
    chooses in this way if it generates, which all ranks must do together.
    """
    _create_trainer(tmp_path, True).train()
    folder = tmp_path / "checkpoint-3"
    content = manifest.read(folder)
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    manifest.write(folder, content["layout"] | {"world_size": 4})
    draws = []
    for seed, data_rank in ((1, 0), (2, 0), (1, 1)):
        trainer = _create_trainer(tmp_path / "other", True)
        trainer.args.train_sampling_strategy = "group_by_length"
        loader = trainer.get_train_dataloader()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        expected = r"was saved by 4 data ranks on 4 ranks, and this run has 1 data ranks on 1 ranks"
        number = mock.patch.object(rng, "compute_data_rank", return_value=data_rank)
        with number, pytest.warns(UserWarning, match=expected):
            trainer._load_rng_state(os.fspath(folder))
        draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
        # All data ranks must draw the same order, although their default generators differ.
        assert loader.batch_sampler.sampler.generator is not None
    assert draws[0] == draws[1]
    assert draws[2][1:] == draws[0][1:] and draws[2][0] != draws[0][0]


def test_files_of_an_unfinished_save_are_deleted(tmp_path: Path, environment: None) -> None:
    """Eight ranks wrote the files, with both types of state dict. A resumed run must read none."""
    folder = tmp_path / "checkpoint-1"
    stale = [
        folder / "rng_state_7.pth",
        folder / "optimizer_0" / "__7_0.distcp",
        folder / "optimizer_0" / METADATA_FILE,
        folder / "pytorch_model_fsdp.bin",
        folder / "optimizer.bin",
    ]
    notes = folder / "notes.txt"
    for file in (*stale, notes):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"of another run")
    manifest.begin(folder)
    trainer = _create_trainer(tmp_path, True)
    trainer.args.max_steps = 1
    trainer.train()
    assert not any(file.exists() for file in stale) and notes.exists()
    named = manifest.read(folder)["files"]
    assert "rng_state.pth" in named and "rng_state_7.pth" not in named


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, environment: None) -> None:
    """The error names the folder and the reason."""
    small = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(small, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        trainer = _create_trainer(tmp_path, True)
        trainer.args.max_steps = 1
        trainer.train()
        free = shutil.disk_usage(tmp_path).free
        (tmp_path / "filler").write_bytes(bytes(free - 60_000))  # less than the model
        trainer = _create_trainer(tmp_path, True)
        with pytest.raises(RuntimeError) as caught:
            trainer.train(resume_from_checkpoint=True)
        assert re.search(r"saving .*checkpoint-2 failed on rank 0: .*", str(caught.value))
        assert "No space left" in str(caught.value), caught.value
        assert manifest.find_newest_complete(tmp_path).name == "checkpoint-1"
        manifest.check(tmp_path / "checkpoint-1")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_torn_checkpoint_is_deleted_before_complete_ones(
    tmp_path: Path, environment: None, limit: int
) -> None:
    """A run is killed in the save of step 3, resumes from step 1 and saves step 2."""
    trainer = _create_trainer(tmp_path, True)
    trainer.args.save_total_limit = None
    trainer.train()
    (tmp_path / "checkpoint-3" / manifest.MANIFEST).unlink()
    shutil.rmtree(tmp_path / "checkpoint-2")
    trainer = _create_trainer(tmp_path, True)
    trainer.args.save_total_limit, trainer.args.max_steps = limit, 2
    with pytest.warns(UserWarning, match=r"resuming from .*checkpoint-1, because .*checkpoint-3"):
        trainer.train(resume_from_checkpoint=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-1", "checkpoint-2"][-limit:]
    manifest.check(tmp_path / "checkpoint-2")


class _SavesOnSigterm(transformers.TrainerCallback):
    """Request a checkpoint at step 2, as the Trainer does when its process gets SIGTERM."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            callbacks = self._trainer.callback_handler.callbacks
            (jit,) = (one for one in callbacks if hasattr(one, "jit_manager"))
            jit.jit_manager.is_checkpoint_requested = True


def test_a_checkpoint_of_sigterm_is_complete(tmp_path: Path, environment: None) -> None:
    """The Trainer removes a file from such a checkpoint after the save."""
    trainer = _create_trainer(tmp_path, True, enable_jit_checkpoint=True, save_steps=100)
    trainer.add_callback(_SavesOnSigterm(trainer))
    trainer.train()
    saved = tmp_path / "checkpoint-2"
    assert not (saved / SAVE_IN_PROGRESS).exists()
    manifest.check(saved)
    assert newest_checkpoint(tmp_path) == saved
    resumed = _create_trainer(tmp_path, True)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_a_checkpoint_that_cannot_be_deleted_ends_no_run(
    tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a killed job may still have a file of the checkpoint open."""
    torn, stock = tmp_path / "checkpoint-7", shutil.rmtree
    torn.mkdir()
    manifest.begin(torn)

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path) != torn:
            stock(path, *args, **kwargs)
        elif not kwargs.get("ignore_errors"):  # stock deletes by time, and ignores errors
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(manifest.shutil, "rmtree", rmtree)
    trainer = _create_trainer(tmp_path, True)
    with pytest.warns(UserWarning, match=r"checkpoint-7 could not be deleted, .*not empty"):
        trainer.train()
    assert trainer.state.global_step == 3 and (tmp_path / "checkpoint-3").is_dir()


def test_a_deleted_file_of_nfs_is_not_in_the_manifest(tmp_path: Path) -> None:
    for name in ("weights.bin", ".nfs0000000001"):
        (tmp_path / name).write_bytes(b"1")
    manifest.begin(tmp_path)
    manifest.write(tmp_path, {})
    assert set(manifest.read(tmp_path)["files"]) == {"weights.bin", manifest.STARTED}


def test_a_push_to_the_hub_contains_the_manifest(tmp_path: Path, environment: None) -> None:
    trainer, pushed = _create_trainer(tmp_path, True), []

    def push(folder: str) -> None:
        manifest.check(folder)
        pushed.append((Path(folder).name, sorted(path.name for path in tmp_path.iterdir())))

    trainer.args.push_to_hub, trainer.hub_model_id = True, "nobody/nothing"
    trainer.args.output_dir += "/"
    with (
        mock.patch.object(transformers.Trainer, "_push_from_checkpoint", lambda self, *a: push(*a)),
        mock.patch.object(transformers.Trainer, "init_hf_repo", lambda self, **kwargs: None),
        mock.patch.object(transformers.Trainer, "_finish_current_push", lambda self: None),
    ):
        trainer.train()
    assert pushed == [
        ("checkpoint-1", ["checkpoint-1"]),
        ("checkpoint-2", ["checkpoint-1", "checkpoint-2"]),
        ("checkpoint-3", ["checkpoint-2", "checkpoint-3"]),
    ]


def test_checkpoints_of_an_unpatched_model_are_stock(tmp_path: Path, environment: None) -> None:
    _create_trainer(tmp_path, False).train()
    names = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert not names & {manifest.MANIFEST, manifest.STARTED}
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"]
    with mock.patch.object(manifest, "check", side_effect=AssertionError):
        _create_trainer(tmp_path, False).train(resume_from_checkpoint=True)


class _GetAttrCall:
    """An object that is pickled as a call of getattr(owner, name)."""

    def __init__(self, owner: Any, name: str) -> None:
        self.call = getattr, (owner, name)

    def __reduce__(self) -> Any:
        return self.call


def test_unpickling_allows_getattr_only_for_enum_members(tmp_path: Path) -> None:
    """Python up to 3.11.3 pickles enums as calls of getattr."""
    enum = metadata._MEM_FORMAT_ENCODING
    (tmp_path / "enum").write_bytes(pickle.dumps(_GetAttrCall(enum, "TORCH_CONTIGUOUS_FORMAT")))
    (tmp_path / "code").write_bytes(pickle.dumps(_GetAttrCall(enum, "__init__")))
    with (tmp_path / "enum").open("rb") as file:
        assert unpickle._Unpickler(file).load() is enum.TORCH_CONTIGUOUS_FORMAT
    with (tmp_path / "code").open("rb") as file, pytest.raises(pickle.UnpicklingError):
        unpickle._Unpickler(file).load()
