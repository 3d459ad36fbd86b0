"""Global state of all tests: Triton's interpreter, poisoned memory, seeds, no TF32, GPU skips."""

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

# Must be set before triton is imported, as `support.checks` does through torch. Spawned ranks and
# subprocesses inherit it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from support.checks import Found, selected_checks
from support.poison import poison_empty

poison_empty()


# gloo's network thread does not sleep while another thread of its rank holds the lock of a
# connection (`handleEvents` in gloo/transport/tcp/pair.cc). If it has interrupted that thread, both
# wait until the end of its time slice. A thread with SCHED_BATCH interrupts no other thread when it
# wakes up. Ranks and subprocesses inherit this.
def _set_scheduling(policy: str) -> None:
    if hasattr(os, policy):  # not on macOS
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


_set_scheduling("SCHED_BATCH")

TESTS = Path(__file__).parent
# Each worker is given the next file when it has finished one. The longest files come first, of
# `make test-full` and of `make test`; otherwise one worker would be idle at the end.
LONGEST_FIRST = (
    "sequence/test_granted.py",
    "integrations/test_trainer.py",
    "checkpoints/test_training.py",
    "vision/test_tower.py",
    "ops/test_adapters.py",
    "checkpoints/test_hub.py",
    "claims/test_parity.py",
    "sequence/test_ulysses.py",
    "claims/test_notebooks.py",
    "ops/test_expert_mlp.py",
    "integrations/test_trainer_sp.py",
    "lora/test_attach.py",
    "planner/test_held.py",
    "checkpoints/test_convert.py",
    "moe/test_recompute.py",
    "claims/test_dispatch_bytes.py",
    "claims/test_errors.py",
    "claims/test_hub_memory_and_kills.py",
    "claims/test_lora_memory.py",
    "integrations/test_accelerate.py",
)


def _start_order(item: pytest.Item) -> int:
    name = item.path.relative_to(TESTS).as_posix()
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_start_order)  # stable, so the tests of a file stay in order
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, torch sees none"))


def pytest_collection_finish() -> None:
    # Trainers and tests collect garbage. What exists now need not be searched each time.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that still exist at the end


@pytest.fixture
def usual_scheduling() -> Iterator[None]:
    """Start processes without SCHED_BATCH, to measure how long transfers take beside other work."""
    _set_scheduling("SCHED_OTHER")
    yield
    _set_scheduling("SCHED_BATCH")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    """Yield the results of the module's checks on several ranks (`support.checks`)."""
    found = Found(selected_checks(request))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
