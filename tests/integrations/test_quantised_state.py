"""`Accelerator.save_state` with quantised experts: killed, resumed bit by bit; no bytes saved."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support.adapters import with_lora
from support.launched import launched, prepared
from support.quantised import SIZES
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.state import quantised_matrices

WORLD, STEPS, SAVED_AFTER = 2, 4, 2
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@dataclass(frozen=True)
class Case:
    """`held` experts, saved as `kind`; adapters on them, or no adapters and frozen experts."""

    held: str | None
    kind: str
    adapted: bool = True
    seed: int = 0

    def model(self) -> nn.Module:
        model = tiny(dtype=torch.float32, seed=self.seed, **SIZES[self.held or "nf4"])
        if self.adapted:
            return with_lora(model, r=3, seed=5)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model


CASES = {
    "nf4, sharded": Case("nf4", SHARDED),
    "fp8, full": Case("fp8", FULL),
    "no adapters, sharded": Case("nf4", SHARDED, adapted=False),
    "no adapters, full": Case("nf4", FULL, adapted=False),
}


class Run:
    """A case that Accelerate has prepared on this rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.rank = rank
        model = case.model()
        made = prepared(model, Accelerator(cpu=True), ep_size=2, experts_dtype=case.held)
        self.accelerator, self.model, self.optimizer = made

    def step(self, number: int) -> None:
        inputs = batch(self.model, 2, 9, seed=10 * number + self.rank)
        self.accelerator.backward(self.model(**inputs).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """This rank's part of all that is trained, and of its moments."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        found = {name: _local(p).clone() for name, p in trained.items()}
        moments = self.optimizer.optimizer.state
        for name, parameter in trained.items():
            for key, value in moments[parameter].items():
                found[f"{name} {key}"] = _local(value).clone()
        return found


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(run: Run) -> dict[str, list[bytes]]:
    """The first of this rank's bytes of experts and of what is trained, as a file has them."""
    held = [t for n, one, _ in quantised_matrices(run.model) for t in one.by_name(n).values()]
    trained = [p for p in run.model.parameters() if p.requires_grad and p.ndim > 1]
    return {
        "held": [_local(tensor).contiguous().numpy().tobytes()[:256] for tensor in held],
        "trained": [_local(tensor).contiguous().numpy().tobytes()[:256] for tensor in trained],
    }


def _in_turn(rank: int, folder: str) -> Iterator[tuple[str, Run, str]]:
    for name, case in CASES.items():
        with launched(FSDP_STATE_DICT_TYPE=case.kind):
            yield name, Run(case, rank), f"{folder}/{name}"


def _uninterrupted(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, run, _ in _in_turn(rank, ""):
        for number in range(STEPS):
            run.step(number)
        found[name] = run.state()
    return found


def _killed(rank: int, world: int, folder: str) -> None:
    for name, run, where in _in_turn(rank, folder):
        for number in range(SAVED_AFTER):
            run.step(number)
        run.accelerator.save_state(where)
        torch.save(_bytes_of(run), f"{folder}/bytes of {name} {rank}")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.step(SAVED_AFTER)


def _resumed(rank: int, world: int, folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, run, where in _in_turn(rank, folder):
        run.accelerator.load_state(where)
        for number in range(SAVED_AFTER, STEPS):
            run.step(number)
        found[name] = run.state()
    return found


OTHERS = {
    "other weights": (replace(CASES["fp8, full"], seed=1), "gate_up_proj .*another base"),
    "other format": (
        replace(CASES["fp8, full"], held=None),
        "experts_dtype='fp8'.*=None",
    ),
}


def _refused(rank: int, world: int, folder: str) -> None:
    """Another base, and a file with less than all: nothing is loaded, on no rank."""
    where = Path(folder, "fp8, full")
    for case, words in OTHERS.values():
        _assert_refused(case, rank, where, words)
    weights = where / "pytorch_model_fsdp.bin"
    whole = torch.load(weights) if rank == 0 else {}
    for _ in range(rank == 0):
        torch.save({n: x for n, x in whole.items() if "layers.1.self_attn" not in n}, weights)
    manifest.write(where, {})
    _assert_refused(CASES["fp8, full"], rank, where, "a checkpoint lacks 4 tensors, .*self_attn")
    torch.distributed.barrier()
    for _ in range(rank == 0):
        torch.save(whole, weights)
    manifest.write(where, {})


def _assert_refused(case: Case, rank: int, where: Path, words: str) -> None:
    with launched(FSDP_STATE_DICT_TYPE=case.kind):
        run = Run(case, rank)
        before = {name: _local(p).clone() for name, p in run.model.named_parameters()}
        with pytest.raises(ValueError, match=words):
            run.accelerator.load_state(str(where))
        for name, parameter in run.model.named_parameters():
            assert torch.equal(_local(parameter), before[name]), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a killed run left."""
    path = tmp_path_factory.mktemp("state")
    outcomes = run_ranks(_killed, WORLD, str(path), expect_errors=True)
    assert [outcome[0] for outcome in outcomes] == ["error", "error"], outcomes
    return path


@pytest.mark.slow
def test_killed_and_resumed_bit_by_bit(folder: Path) -> None:
    """Parameters and moments of each rank are those of a run that was not interrupted."""
    resumed = run_ranks(_resumed, WORLD, str(folder))
    for got, want in zip(resumed, run_ranks(_uninterrupted, WORLD), strict=True):
        for name in CASES:
            assert got[name].keys() == want[name].keys() and got[name]
            for key, value in want[name].items():
                assert torch.equal(got[name][key], value), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_files_hold_hashes_and_no_bytes_of_experts(folder: Path, name: str) -> None:
    """Trained values are found in the files, so the search works."""
    files = [
        path.read_bytes() for path in sorted(folder.joinpath(name).rglob("*")) if path.is_file()
    ]
    assert (folder / name / BASE).is_file()
    for rank in range(WORLD):
        bytes_of = torch.load(folder / f"bytes of {name} {rank}")
        assert bytes_of["held"] and bytes_of["trained"]
        for held in bytes_of["held"]:
            assert not any(held in content for content in files)
        for trained in bytes_of["trained"]:
            assert any(trained in content for content in files)


@pytest.mark.slow
def test_another_base_is_refused_on_every_rank(folder: Path) -> None:
    run_ranks(_refused, WORLD, str(folder))
