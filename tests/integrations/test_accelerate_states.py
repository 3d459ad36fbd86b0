"""Test `save_state` and `load_state` of a patched model: only complete states are loaded."""

import errno
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from support.checks import Check, Found, on_ranks
from support.launched import launched, prepared
from support.parity import whole_parameters
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep import newest_checkpoint
from hf_moe_ep.checkpoints.storage import manifest, unpickle
from hf_moe_ep.integrations.prepare import enable_fsdp_on_cpu
from hf_moe_ep.ranks.all_ranks import gather

WORLD = 2
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


def _train_unfrozen(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr)


class _Run:
    """A patched model that Accelerate has prepared on this rank."""

    def __init__(
        self, rank: int, seed: int = 0, *, spare: nn.Module | None = None, **names: Any
    ) -> None:
        self.rank = rank
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**names))
        model = tiny(dtype=torch.float32, num_hidden_layers=1, seed=seed)
        if spare is not None:
            model.spare = spare  # a module that no forward calls
        self.accelerator, self.model, self.optimizer = prepared(
            model, accelerator, make_optimizer=_train_unfrozen, ep_size=2
        )

    def step(self) -> None:
        self.accelerator.backward(self.model(**batch(self.model, 2, 7, seed=self.rank)).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        return whole_parameters(self.model)

    def assert_holds(self, expected: dict[str, Tensor]) -> None:
        for name, value in self.parameters().items():
            assert torch.equal(value, expected[name]), name


def _call_on_rank_0(rank: int, run: Any) -> None:
    """Call `run` on rank 0 while the other ranks wait."""
    dist.barrier()
    if rank == 0:
        run()
    dist.barrier()


def _a_changed_file_is_refused(rank: int, world: int, folder: str) -> None:
    """The error names the file. A file that `save_state` has not written may change."""
    state = Path(folder, "state")
    with launched(**SHARDED):
        run = _Run(rank)
        run.step()
        _call_on_rank_0(rank, lambda: (state.mkdir(), (state / "log").write_text("step 1")))
        expected = run.parameters()
        run.accelerator.save_state(str(state))
        content = manifest.read(state)
        assert content["layout"]["ep_size"] == 2 and "log" not in content["files"]
        assert {"optimizer_0/.metadata", "random_states_1.pkl"} <= content["files"].keys()
        _call_on_rank_0(rank, lambda: (state / "log").write_text("step 2"))
        run.step()
        run.accelerator.load_state(str(state))
        run.assert_holds(expected)
        _call_on_rank_0(rank, lambda: _flip_byte(state / "random_states_1.pkl"))
        run.step()
        before = run.parameters()
        with pytest.raises(ValueError, match=r"random_states_1\.pkl has changed since it was"):
            run.accelerator.load_state(str(state))
        run.assert_holds(before)


def _flip_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _states_without_a_manifest_load(rank: int, world: int, folder: str) -> None:
    """Stock and older versions write such states. Rank 0 warns that they cannot be verified."""
    state = Path(folder, "state")
    with launched(**SHARDED):
        run = _Run(rank)
        run.step()
        expected = run.parameters()
        run.accelerator.save_state(state)
        _call_on_rank_0(
            rank, lambda: [(state / n).unlink() for n in ("manifest.json", manifest.STARTED)]
        )
        run.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.accelerator.load_state(state)
        messages = [str(warning.message) for warning in caught]
        unverified = [message for message in messages if "cannot be verified" in message]
        assert len(unverified) == (rank == 0), messages
        run.assert_holds(expected)


def _files_of_an_earlier_save_are_deleted(rank: int, world: int, folder: str) -> None:
    """More ranks, and both types of state dict, were saved there. Other files are not deleted."""
    state = Path(folder, "state")
    stale = [
        state / "random_states_7.pkl",
        state / "optimizer_0" / "__7_0.distcp",
        state / "pytorch_model_fsdp.bin",
        state / "optimizer.bin",
    ]
    user_files = [state / "notes" / "__7_0.distcp", state / "other.pkl", state / "other.bin"]

    def write_files() -> None:
        for file in (*stale, *user_files):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"of another run")

    with launched(**SHARDED):
        _call_on_rank_0(rank, write_files)
        _Run(rank).accelerator.save_state(state)
        assert not any(file.exists() for file in stale)
        assert all(file.exists() for file in user_files)
        named = manifest.read(state)["files"]
        assert "random_states_1.pkl" in named and "random_states_7.pkl" not in named


def _a_full_disk_of_one_rank_is_an_error_on_all(rank: int, world: int, folder: str) -> None:
    """The previous state is still the newest complete state, and can be loaded."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "__1_0.distcp")

    with launched(**SHARDED):
        run = _Run(rank)
        run.accelerator.save_state(f"{folder}/step_1")
        expected = run.parameters()
        run.step()
        run.accelerator.save_state(f"{folder}/step_2")  # complete until the next save
        stock = dcp.FileSystemWriter.write_data
        with (
            mock.patch.object(dcp.FileSystemWriter, "write_data", fail if rank == 1 else stock),
            pytest.raises(RuntimeError, match=r"saving .*step_2 failed on .*No space left"),
        ):
            run.accelerator.save_state(f"{folder}/step_2")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            newest = newest_checkpoint(folder)
        messages = [str(warning.message) for warning in caught]
        skipped = [message for message in messages if "step_2 has no" in message]
        assert newest == Path(folder, "step_1") and len(skipped) == (rank == 0), messages
        with pytest.raises(ValueError, match=r"step_2 has no manifest.json: .* was not finished"):
            run.accelerator.load_state(f"{folder}/step_2")
        run.accelerator.load_state(newest)
        run.assert_holds(expected)


def _a_full_disk_of_rank_0_ends_all_ranks(rank: int, world: int, folder: str) -> None:
    """With FULL_STATE_DICT rank 0 writes the model while other ranks gather the optimizer."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "pytorch_model_fsdp.bin")

    with launched(FSDP_STATE_DICT_TYPE="FULL_STATE_DICT"):
        run = _Run(rank)
        run.step()
        started = time.monotonic()
        with (
            mock.patch.object(torch, "save", fail if rank == 0 else torch.save),
            pytest.raises(RuntimeError, match=r"saving .*step_1 failed on .*No space left"),
        ):
            run.accelerator.save_state(f"{folder}/step_1")
        assert time.monotonic() - started < 30


def _a_folder_that_is_not_shared_is_refused(rank: int, world: int, folder: str) -> None:
    """The error is raised before any rank writes its shards to its own disk.

    The folder of rank 1 has the marker of an older save.
    """
    with launched(**SHARDED):
        run = _Run(rank)
        if rank == 1:
            manifest.begin(f"{folder}/of rank 1")
        with (
            mock.patch.object(dcp.FileSystemWriter, "write_data", None),
            pytest.raises(ValueError, match=r"rank 1 does not see .*a disk that all nodes share"),
        ):
            run.accelerator.save_state(f"{folder}/of rank {rank}")


def _automatic_checkpoint_naming(rank: int, world: int, folder: str) -> None:
    """Checkpoints are ordered by number: in this test the clock goes back an hour at each save.

    A folder whose save did not finish is skipped by `load_state` and overwritten by `save_state`.
    Folders beyond `total_limit` are deleted after the new one is complete.
    """
    names = {"project_dir": folder, "automatic_checkpoint_naming": True, "total_limit": 2}
    root = Path(folder, "checkpoints")
    with launched(**SHARDED):
        run, now = _Run(rank, **names), time.time()
        for number in range(3):
            run.step()
            with mock.patch("time.time", return_value=now - 3600 * number):
                run.accelerator.save_state()
        assert sorted(path.name for path in root.iterdir()) == ["checkpoint_1", "checkpoint_2"]
        assert newest_checkpoint(root) == root / "checkpoint_2"
        expected = run.parameters()
        _call_on_rank_0(rank, lambda: manifest.begin(root / "checkpoint_3"))
        resumed = _Run(rank, seed=1, iteration=3, **names)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resumed.accelerator.load_state()
        messages = [str(warning.message) for warning in caught]
        skipped = [message for message in messages if "checkpoint_3 has no" in message]
        assert len(skipped) == (rank == 0), messages
        resumed.assert_holds(expected)
        folders, stock_write = [], manifest.write

        def record_folders(*args: Any, **kwargs: Any) -> None:
            folders.append(sorted(path.name for path in root.iterdir()))
            stock_write(*args, **kwargs)

        with mock.patch.object(manifest, "write", record_folders):
            resumed.accelerator.save_state()
        assert folders == [["checkpoint_1", "checkpoint_2", "checkpoint_3"]], "deleted too early"
        assert resumed.accelerator.project_configuration.automatic_checkpoint_naming
        dist.barrier()
        assert sorted(path.name for path in root.iterdir()) == ["checkpoint_2", "checkpoint_3"]
        assert newest_checkpoint(root) == root / "checkpoint_3"
        resumed.accelerator.project_configuration.iteration = 2
        with pytest.raises(ValueError, match=r"checkpoint_2 already exists; set .*iteration"):
            resumed.accelerator.save_state()


def _a_state_of_fewer_ranks_continues_with_one_step_on_all(
    rank: int, world: int, folder: str
) -> None:
    """Otherwise a rank without a saved state would synchronise gradients at other times, and hang.

    Each data rank gets other generators, the same ones at every load.
    """
    state = Path(folder, "state")
    with launched(**SHARDED):
        run = _Run(rank)
        run.accelerator.step = 3
        run.accelerator.save_state(state)
        run.accelerator.step = 0  # as in a new process
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.accelerator.load_state(state)  # as many ranks as saved
        _call_on_rank_0(rank, (state / "random_states_1.pkl").unlink)
        layouts = [{}, manifest.read(state)["layout"] | {"world_size": 1, "ep_size": 1}]
        reasons = ["has no random state of rank 1", "was saved by 1 data ranks on 1 ranks"]
        draws = []
        for layout, reason in zip(layouts, reasons, strict=True):
            manifest.write(state, layout)
            run.accelerator.step = 0
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.accelerator.load_state(state)
            assert run.accelerator.step == 3
            texts = [str(warning.message) for warning in caught]
            expected = f"state {reason}, and this run has 2 data ranks on 2 ranks: random gen"
            assert sum(expected in text for text in texts) == (rank == 0), texts
            draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
        assert draws[0] == draws[1]
        by_rank = gather(draws[0])
        assert all(mine != others for mine, others in zip(*by_rank, strict=True)), by_rank


def _a_parameter_that_had_no_gradient_has_no_state(rank: int, world: int, folder: str) -> None:
    """Such as those of a vision tower in a training on text alone. Stock refuses such a checkpoint.

    The resumed run takes the same steps. A parameter that the saved run had frozen is an error.
    """
    for kind, checkpointing in (("SHARDED_STATE_DICT", "true"), ("FULL_STATE_DICT", "false")):
        state = Path(folder, kind)
        settings = {
            "FSDP_STATE_DICT_TYPE": kind,
            "FSDP_ACTIVATION_CHECKPOINTING": checkpointing,
        }
        with launched(**settings):
            run = _Run(rank, spare=nn.Linear(4, 4))
            run.step()
            run.accelerator.save_state(state)
        with launched(**settings):
            resumed = _Run(rank, seed=1, spare=nn.Linear(4, 4))
            resumed.accelerator.load_state(state)
            spare = set(resumed.model.spare.parameters())
            assert spare.isdisjoint(resumed.optimizer.state), kind
            assert len(resumed.optimizer.state) == len(run.optimizer.state)
            for this in (run, resumed):
                this.step()
                _train_spare(this)
            resumed.assert_holds(run.parameters())
        with launched(**settings):
            frozen = _Run(rank, spare=nn.Linear(4, 4).requires_grad_(False))
            frozen.step()
            frozen.accelerator.save_state(state)
        with launched(**settings):
            other = _Run(rank, spare=nn.Linear(4, 4))
            with pytest.raises(Exception, match=r"trains spare\.bias \(and 1 more\), which"):
                other.accelerator.load_state(state)


def _another_type_of_state_dict_is_refused(rank: int, world: int, folder: str) -> None:
    """Stock's error names a file that is missing, but not the cause."""
    kinds, states = ("SHARDED_STATE_DICT", "FULL_STATE_DICT"), Path(folder)
    for kind in kinds:
        with launched(FSDP_STATE_DICT_TYPE=kind):
            _Run(rank).accelerator.save_state(states / kind)
    _call_on_rank_0(rank, lambda: (states / "plain").mkdir())
    _call_on_rank_0(rank, lambda: (states / "plain" / "model.safetensors").write_bytes(b"x"))
    for kind, other in (kinds, kinds[::-1]):
        with launched(FSDP_STATE_DICT_TYPE=kind):
            run = _Run(rank)
            with pytest.raises(ValueError, match=rf"type: {other}, but a run with {kind} reads"):
                run.accelerator.load_state(states / other)
            with pytest.raises(ValueError, match="plain was saved by a run without FSDP, but a ru"):
                run.accelerator.load_state(states / "plain")
            run.accelerator.load_state(states / kind)


def _trained_parameters_that_the_model_lacks_are_an_error(
    rank: int, world: int, folder: str
) -> None:
    """Such as adapters on experts that the resumed run does not have. Stock ignores their values.

    Parameters that the model has, but no longer trains, are loaded.
    """
    state = Path(folder, "state")
    with launched(**SHARDED):
        run = _Run(rank, spare=nn.Linear(4, 4))
        run.step()
        _train_spare(run)
        run.accelerator.save_state(state)
    with launched(**SHARDED):
        frozen = _Run(rank, seed=1, spare=nn.Linear(4, 4).requires_grad_(False))
        frozen.accelerator.load_state(state)
        frozen.assert_holds(run.parameters())
    with launched(**SHARDED):
        without = _Run(rank, seed=1)
        with pytest.raises(ValueError, match=r"trained spare\.bias, spare\.weight, which this mod"):
            without.accelerator.load_state(state)


def _train_spare(run: _Run) -> None:
    """Take one step with a gradient of the spare module alone."""
    for parameter in run.model.spare.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    run.optimizer.zero_grad()


def _states_of_an_unpatched_model_are_stock(rank: int, world: int, folder: str) -> None:
    """No manifest is written or checked, and stock's code unpickles the values."""
    with launched(**SHARDED):
        accelerator = Accelerator(cpu=True)
        enable_fsdp_on_cpu(accelerator.state, None)
        model = tiny(dtype=torch.float32, num_hidden_layers=1)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        error = AssertionError("a function of ours ran")
        with (
            mock.patch.object(manifest, "check", side_effect=error),
            mock.patch.object(unpickle, "_load_value", side_effect=error),
        ):
            accelerator.save_state(folder)
            accelerator.load_state(folder)
        assert not manifest.is_ours(folder)


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        WORLD,
        _a_changed_file_is_refused,
        _states_without_a_manifest_load,
        _files_of_an_earlier_save_are_deleted,
        _a_full_disk_of_one_rank_is_an_error_on_all,
        _a_full_disk_of_rank_0_ends_all_ranks,
        _a_folder_that_is_not_shared_is_refused,
        _automatic_checkpoint_naming,
        _a_state_of_fewer_ranks_continues_with_one_step_on_all,
        _a_parameter_that_had_no_gradient_has_no_state,
        _another_type_of_state_dict_is_refused,
        _trained_parameters_that_the_model_lacks_are_an_error,
        _states_of_an_unpatched_model_are_stock,
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
