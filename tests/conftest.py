"""Global test state: interpreter mode for Triton, poisoned memory, seeds, no TF32, GPU skips."""

import os
from pathlib import Path

import pytest
import torch
from support.checks import Found, selected_checks
from support.longest_first import LONGEST_FIRST
from support.poison import poison_empty

# Before anything imports triton, and inherited by spawned ranks and by subprocesses.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

poison_empty()


def _place(item: pytest.Item) -> int:
    name = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)  # stable: the tests of a file stay together, in their order
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, torch sees none"))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    """What the module's checks on N ranks found: `support.checks`."""
    return Found(selected_checks(request))


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
