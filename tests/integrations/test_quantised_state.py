"""Test `save_state` and `load_state` with quantised experts.

A killed run resumes bit by bit. The files contain hashes of the quantised experts, not their bytes.
"""

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

from hf_moe_ep import data_parallel_rank
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.state import iterate_quantised_matrices

WORLD, STEPS, SAVED_AFTER = 2, 4, 2
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@dataclass(frozen=True)
class Case:
    """A model and how it is saved.

    Attributes:
        experts_dtype: the format of the experts.
        state_dict_type: the value of Accelerate's FSDP_STATE_DICT_TYPE.
        adapted: True to train adapters, False to train all parameters except the frozen experts.
        sizes: the sizes of the layout.
    """

    experts_dtype: str | None
    state_dict_type: str
    adapted: bool = True
    seed: int = 0
    sizes: tuple[tuple[str, int], ...] = (("ep_size", 2),)

    def model(self) -> nn.Module:
        model = tiny(dtype=torch.float32, seed=self.seed, **SIZES[self.experts_dtype or "nf4"])
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
    "stages": Case("nf4", SHARDED, sizes=(("pp_size", 2),)),
    "no adapters, stages": Case("fp8", SHARDED, adapted=False, sizes=(("pp_size", 2),)),
}


class Run:
    """A case that Accelerate has prepared on this rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.rank = rank
        model = case.model()
        accelerator = Accelerator(cpu=True)
        self.accelerator, self.model, self.optimizer = prepared(
            model, accelerator, experts_dtype=case.experts_dtype, **dict(case.sizes)
        )

    def step(self, number: int) -> None:
        seed = 10 * number + data_parallel_rank(self.model)
        inputs = batch(self.model, 2, 9, seed=seed)
        self.accelerator.backward(self.model(**inputs).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Return this rank's shards of the trained parameters and of their optimizer states."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        tensors = {name: _to_local(p).clone() for name, p in trained.items()}
        moments = self.optimizer.optimizer.state
        for name, parameter in trained.items():
            for key, value in moments[parameter].items():
                tensors[f"{name} {key}"] = _to_local(value).clone()
        return tensors


def _to_local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read_first_bytes(run: Run) -> dict[str, list[bytes]]:
    """Return the first 256 bytes of each shard of this rank, as a file would contain them."""
    matrices = iterate_quantised_matrices(run.model)
    experts = [t for name, stack, _ in matrices for t in stack.by_name(name).values()]
    trained = [p for p in run.model.parameters() if p.requires_grad and p.ndim > 1]
    return {
        "experts": [_to_local(tensor).contiguous().numpy().tobytes()[:256] for tensor in experts],
        "trained": [_to_local(tensor).contiguous().numpy().tobytes()[:256] for tensor in trained],
    }


def _prepare_each_case(rank: int, folder: str) -> Iterator[tuple[str, Run, str]]:
    """Yield the name, the prepared run and the folder of every case."""
    for name, case in CASES.items():
        with launched(FSDP_STATE_DICT_TYPE=case.state_dict_type):
            yield name, Run(case, rank), f"{folder}/{name}"


def _train_uninterrupted(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    states = {}
    for name, run, _ in _prepare_each_case(rank, ""):
        for number in range(STEPS):
            run.step(number)
        states[name] = run.state()
    return states


def _train_until_killed(rank: int, world: int, folder: str) -> None:
    for name, run, where in _prepare_each_case(rank, folder):
        for number in range(SAVED_AFTER):
            run.step(number)
        run.accelerator.save_state(where)
        torch.save(_read_first_bytes(run), f"{folder}/bytes of {name} {rank}")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.step(SAVED_AFTER)


def _resume(rank: int, world: int, folder: str) -> dict[str, dict[str, Tensor]]:
    states = {}
    for name, run, where in _prepare_each_case(rank, folder):
        run.accelerator.load_state(where)
        for number in range(SAVED_AFTER, STEPS):
            run.step(number)
        states[name] = run.state()
    return states


# Models that must not load the state of "fp8, full", and words of the error.
OTHER_BASES = {
    "other weights": (replace(CASES["fp8, full"], seed=1), "gate_up_proj .*another base"),
    "other format": (
        replace(CASES["fp8, full"], experts_dtype=None),
        "experts_dtype='fp8'.*=None",
    ),
}


def _check_refusals(rank: int, world: int, folder: str) -> None:
    """Check that another base, and a file that lacks tensors, are refused before any load."""
    where = Path(folder, "fp8, full")
    for case, words in OTHER_BASES.values():
        _check_refusal(case, rank, where, words)
    weights = where / "pytorch_model_fsdp.bin"
    whole = torch.load(weights) if rank == 0 else {}
    for _ in range(rank == 0):
        torch.save({n: x for n, x in whole.items() if "layers.1.self_attn" not in n}, weights)
    manifest.write(where, {})
    _check_refusal(CASES["fp8, full"], rank, where, "a checkpoint lacks 4 tensors, .*self_attn")
    torch.distributed.barrier()
    for _ in range(rank == 0):
        torch.save(whole, weights)
    manifest.write(where, {})


def _check_refusal(case: Case, rank: int, where: Path, words: str) -> None:
    with launched(FSDP_STATE_DICT_TYPE=case.state_dict_type):
        run = Run(case, rank)
        before = {name: _to_local(p).clone() for name, p in run.model.named_parameters()}
        with pytest.raises(ValueError, match=words):
            run.accelerator.load_state(str(where))
        for name, parameter in run.model.named_parameters():
            assert torch.equal(_to_local(parameter), before[name]), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed after its save."""
    path = tmp_path_factory.mktemp("state")
    outcomes = run_ranks(_train_until_killed, WORLD, str(path), expect_errors=True)
    assert [outcome[0] for outcome in outcomes] == ["error", "error"], outcomes
    return path


@pytest.mark.slow
def test_a_killed_run_resumes_bit_by_bit(folder: Path) -> None:
    """Parameters and moments of each rank equal an uninterrupted run's."""
    resumed = run_ranks(_resume, WORLD, str(folder))
    for actual, expected in zip(resumed, run_ranks(_train_uninterrupted, WORLD), strict=True):
        for name in CASES:
            assert actual[name].keys() == expected[name].keys() and actual[name]
            for key, value in expected[name].items():
                assert torch.equal(actual[name][key], value), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_files_contain_hashes_and_no_bytes_of_experts(folder: Path, name: str) -> None:
    """The search works, because it finds the bytes of trained parameters in the files."""
    files = [
        path.read_bytes() for path in sorted(folder.joinpath(name).rglob("*")) if path.is_file()
    ]
    assert (folder / name / BASE).is_file()
    for rank in range(WORLD):
        first_bytes = torch.load(folder / f"bytes of {name} {rank}")
        assert first_bytes["experts"] and first_bytes["trained"]
        for expert in first_bytes["experts"]:
            assert not any(expert in content for content in files)
        for trained in first_bytes["trained"]:
            assert any(trained in content for content in files)


@pytest.mark.slow
def test_another_base_is_refused_on_every_rank(folder: Path) -> None:
    run_ranks(_check_refusals, WORLD, str(folder))
