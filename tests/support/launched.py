"""Set up Accelerate inside a rank of `support.ranks`, as `accelerate launch` would."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from hf_moe_ep import patch

FP32_BUDGET = 1e-5  # rounding errors in fp32, which grow over three steps
LAUNCH = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


@contextlib.contextmanager
def launched(**settings: str) -> Iterator[None]:
    """Set the variables of `accelerate launch` inside the block, and reset Accelerate's state."""
    try:
        with mock.patch.dict(os.environ, LAUNCH | settings):
            yield
    finally:
        AcceleratorState._reset_state(True)


def prepared(
    model: nn.Module,
    accelerator: Accelerator | None = None,
    make_optimizer: Any = torch.optim.AdamW,
    **config: Any,
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """Patch a model, and prepare it and its optimizer with Accelerate."""
    accelerator = accelerator or Accelerator(cpu=True)
    patch(model, **config)
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer
