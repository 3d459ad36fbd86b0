"""`Accelerator.save_state` of a patched model: complete or not there; loading it runs no code."""

import errno
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from support.checks import Check, Found, on_ranks
from support.launched import launched, prepared
from support.parity import whole_parameters
from support.planted import plant
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor

from hf_moe_ep import newest_checkpoint
from hf_moe_ep.checkpoints.storage import manifest, unpickle
from hf_moe_ep.integrations.prepare import fsdp_on_cpu

WORLD = 2
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


class _Run:
    """A patched model that Accelerate has prepared on this rank."""

    def __init__(self, rank: int, seed: int = 0, **names: Any) -> None:
        self.rank = rank
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**names))
        model = tiny(dtype=torch.float32, num_hidden_layers=1, seed=seed)
        made = prepared(model, accelerator, ep_size=2)
        self.accelerator, self.model, self.optimizer = made

    def step(self) -> None:
        self.accelerator.backward(self.model(**batch(self.model, 2, 7, seed=self.rank)).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        return whole_parameters(self.model)

    def assert_holds(self, want: dict[str, Tensor]) -> None:
        for name, value in self.parameters().items():
            assert torch.equal(value, want[name]), name


def _on_first(rank: int, do: Any) -> None:
    dist.barrier()
    if rank == 0:
        do()
    dist.barrier()


def _a_planted_item(rank: int, world: int, folder: str) -> None:
    """In the optimizer's file; behind a new manifest, and behind none."""
    state, trace = Path(folder, "state"), Path(folder, "code ran")
    with launched(**SHARDED):
        run = _Run(rank)
        run.step()
        run.accelerator.save_state(state)
        _on_first(rank, lambda: plant(state / "optimizer_0", trace))
        named = r"optimizer_0/__\d_\d\.distcp"
        with pytest.raises(ValueError, match=r"optimizer_0/.* has \d+ bytes, manifest.json says"):
            run.accelerator.load_state(state)
        manifest.write(state, {})
        with pytest.raises(ValueError, match=rf"{named} cannot be loaded: its item .*mkdir"):
            run.accelerator.load_state(state)
        _on_first(rank, lambda: [(state / n).unlink() for n in ("manifest.json", manifest.STARTED)])
        with pytest.raises(ValueError, match=rf"{named} cannot be loaded: its item .*mkdir"):
            run.accelerator.load_state(state)
    assert not trace.exists()


def _complete_or_refused(rank: int, world: int, folder: str) -> None:
    """A changed file is named, and files that are not ours may change."""
    state = Path(folder, "state")
    with launched(**SHARDED):
        run = _Run(rank)
        run.step()
        _on_first(rank, lambda: (state.mkdir(), (state / "log").write_text("step 1")))
        want = run.parameters()
        run.accelerator.save_state(str(state))
        found = manifest.read(state)
        assert found["layout"]["ep_size"] == 2 and "log" not in found["files"]
        assert {"optimizer_0/.metadata", "random_states_1.pkl"} <= found["files"].keys()
        _on_first(rank, lambda: (state / "log").write_text("step 2"))
        run.step()
        run.accelerator.load_state(str(state))
        run.assert_holds(want)
        _on_first(rank, lambda: _flip(state / "random_states_1.pkl"))
        run.step()
        before = run.parameters()
        with pytest.raises(ValueError, match=r"random_states_1\.pkl has changed since it was"):
            run.accelerator.load_state(str(state))
        run.assert_holds(before)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _without_a_manifest(rank: int, world: int, folder: str) -> None:
    """States of stock and of older versions load, with a warning on rank 0."""
    state = Path(folder, "state")
    with launched(**SHARDED):
        run = _Run(rank)
        run.step()
        want = run.parameters()
        run.accelerator.save_state(state)
        _on_first(rank, lambda: [(state / n).unlink() for n in ("manifest.json", manifest.STARTED)])
        run.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.accelerator.load_state(state)
        said = [str(one.message) for one in caught if "cannot be verified" in str(one.message)]
        assert len(said) == (rank == 0), said
        run.assert_holds(want)


def _files_of_more_ranks(rank: int, world: int, folder: str) -> None:
    """Left by an earlier save to the same folder: gone, and notes are not."""
    state = Path(folder, "state")
    stale = [state / "random_states_7.pkl", state / "optimizer_0" / "__7_0.distcp"]
    kept = [state / "notes" / "__7_0.distcp", state / "other.pkl"]

    def leave() -> None:
        for file in (*stale, *kept):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"of another run")

    with launched(**SHARDED):
        _on_first(rank, leave)
        _Run(rank).accelerator.save_state(state)
        assert not any(file.exists() for file in stale) and all(file.exists() for file in kept)
        named = manifest.read(state)["files"]
        assert "random_states_1.pkl" in named and "random_states_7.pkl" not in named


def _a_full_disk(rank: int, world: int, folder: str) -> None:
    """On one rank: every rank says so, and the state before is what a run goes on from."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "__1_0.distcp")

    with launched(**SHARDED):
        run = _Run(rank)
        run.accelerator.save_state(f"{folder}/step_1")
        want = run.parameters()
        run.step()
        stock = dcp.FileSystemWriter.write_data
        with (
            mock.patch.object(dcp.FileSystemWriter, "write_data", full if rank == 1 else stock),
            pytest.raises(RuntimeError, match=r"saving .*step_2 failed on .*No space left"),
        ):
            run.accelerator.save_state(f"{folder}/step_2")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            newest = newest_checkpoint(folder)
        said = [str(one.message) for one in caught if "step_2 has no" in str(one.message)]
        assert newest == Path(folder, "step_1") and len(said) == (rank == 0), (newest, said)
        run.accelerator.load_state(newest)
        run.assert_holds(want)


def _names_of_accelerate(rank: int, world: int, folder: str) -> None:
    """The clock goes back an hour; a torn folder is passed over and saved anew, older ones go."""
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
        want = run.parameters()
        _on_first(rank, lambda: manifest.begin(root / "checkpoint_3"))
        again = _Run(rank, seed=1, iteration=3, **names)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again.accelerator.load_state()
        said = [str(one.message) for one in caught if "checkpoint_3 has no" in str(one.message)]
        assert len(said) == (rank == 0), said
        again.assert_holds(want)
        seen, stock = [], manifest.write

        def watched(*args: Any, **kwargs: Any) -> None:
            seen.append(sorted(path.name for path in root.iterdir()))
            stock(*args, **kwargs)

        with mock.patch.object(manifest, "write", watched):
            again.accelerator.save_state()
        assert seen == [["checkpoint_1", "checkpoint_2", "checkpoint_3"]], "deleted too early"
        assert again.accelerator.project_configuration.automatic_checkpoint_naming
        dist.barrier()
        assert sorted(path.name for path in root.iterdir()) == ["checkpoint_2", "checkpoint_3"]
        assert newest_checkpoint(root) == root / "checkpoint_3"
        again.accelerator.project_configuration.iteration = 2
        with pytest.raises(ValueError, match=r"checkpoint_2 already exists; set .*iteration"):
            again.accelerator.save_state()


def _stock(rank: int, world: int, folder: str) -> None:
    """A model that is not patched: no marker, no manifest, nothing of ours in its way."""
    with launched(**SHARDED):
        accelerator = Accelerator(cpu=True)
        fsdp_on_cpu(accelerator.state, None)
        model = tiny(dtype=torch.float32, num_hidden_layers=1)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        refused = AssertionError("a function of ours ran")
        with (
            mock.patch.object(manifest, "check", side_effect=refused),
            mock.patch.object(unpickle, "_load_value", side_effect=refused),
        ):
            accelerator.save_state(folder)
            accelerator.load_state(folder)
        assert not manifest.is_ours(folder)


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        WORLD,
        _a_planted_item,
        _complete_or_refused,
        _without_a_manifest,
        _files_of_more_ranks,
        _a_full_disk,
        _names_of_accelerate,
        _stock,
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _killed_while_it_saves(rank: int, world: int, folder: str) -> None:
    """Twice into the same folder; in the second one rank 1 dies before it writes its part."""
    with launched(**SHARDED):
        run = _Run(rank)
        run.step()
        run.accelerator.save_state(f"{folder}/state")
        for _ in range(5):
            run.step()

        def die(*args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        stock = dcp.FileSystemWriter.write_data
        with mock.patch.object(dcp.FileSystemWriter, "write_data", die if rank == 1 else stock):
            run.accelerator.save_state(f"{folder}/state")


def _go_on(rank: int, world: int, folder: str) -> None:
    with launched(**SHARDED):
        run = _Run(rank)
        before = run.parameters()
        with pytest.raises(ValueError, match=r"state has no manifest.json: .* was not finished"):
            run.accelerator.load_state(f"{folder}/state")
        run.assert_holds(before)


def test_a_save_that_was_killed_is_not_loaded(tmp_path: Path) -> None:
    """The folder holds parts of two saves. Stock would load a mixture of them."""
    outcomes = run_ranks(_killed_while_it_saves, WORLD, str(tmp_path), expect_errors=True)
    assert [outcome[0] for outcome in outcomes] == ["error", "error"], outcomes
    run_ranks(_go_on, WORLD, str(tmp_path))
    with pytest.warns(UserWarning, match="starting a new run; skipped: .*state has no manifest"):
        assert newest_checkpoint(tmp_path) is None
