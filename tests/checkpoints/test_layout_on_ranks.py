"""For every MoE type, two ranks read files that stock wrote, and write the same bytes."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.architectures import MODEL_TYPES, recording, tiny
from support.checks import Check, Found
from support.hub_files import assert_equal, assert_saved_as_read, write_hub

from hf_moe_ep import from_pretrained

# deepseek_v3 has one tensor per expert; gpt_oss has stacked tensors with biases.
FAST = ("gpt_oss",)
# The published checkpoints of this type have transposed experts. Stock reads these, but does not
# transpose the experts that it writes, so our files are compared with published files.
PUBLISHED = ("qwen3_vl_moe",)


def _read_and_write(model_type: str, rank: int, world: int, folder: str) -> None:
    with recording(model_type, "hub") as errors:
        _assert_same_files(model_type, rank, folder)
        errors.append(0.0)


def _assert_same_files(model_type: str, rank: int, folder: str) -> None:
    stock, ours = Path(folder, "stock"), Path(folder, "ours")
    model_class = type(tiny(model_type, dtype=torch.float32))
    if rank == 0:
        whole = tiny(model_type, dtype=torch.float32)
        if model_type in PUBLISHED:
            write_hub(stock, whole)
        else:
            whole.save_pretrained(stock)
    dist.barrier()
    model = from_pretrained(stock, ep_size=2, model_class=model_class)
    assert_saved_as_read(model, stock, ours)
    if rank == 0:
        # Two loaded models are compared, because stock resets a bias of Zaya when it loads.
        loaded, expected = (model_class.from_pretrained(folder) for folder in (ours, stock))
        assert_equal(loaded.state_dict(), expected.state_dict())


CHECKS = [
    Check(name, 2, partial(_read_and_write, name), slow=name not in FAST).as_parameter()
    for name in MODEL_TYPES
]


@pytest.mark.parametrize("claim", CHECKS)
def test_two_ranks_write_the_files_that_stock_wrote(found: Found, claim: Check) -> None:
    """With ep_size 2, files are written that stock loads."""
    found.raise_if_failed(claim)
