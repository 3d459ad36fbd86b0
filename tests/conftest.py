"""Global test state: interpreter mode for Triton, poisoned memory, seeds, no TF32, GPU skips."""

import os

import pytest
import torch
from support.checks import Found, selected_checks
from support.poison import poison_empty

# Before anything imports triton, and inherited by spawned ranks and by subprocesses.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

poison_empty()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
