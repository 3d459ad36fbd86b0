"""A hub folder of every MoE type, read by 2 ranks and written again: the bytes that stock wrote."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.architectures import MODEL_TYPES, recording, tiny
from support.checks import Check, Found
from support.hub_files import assert_equal, read_all
from torch import Tensor

from hf_moe_ep import from_pretrained, hub_tensors, save_pretrained

# One tensor per expert, and stacked ones with biases.
IN_FAST_SUITE = ("deepseek_v3", "gpt_oss")
# Refused by `patch`, tests/architectures/test_every_type.py; and one that stock does not write as
# it is published, tests/checkpoints/test_hub.py.
OTHERS = ("diffusion_gemma", "inkling2", "inkling2_text", "qwen3_vl_moe")


def _there_and_back(model_type: str, rank: int, world: int, folder: str) -> None:
    with recording(model_type, "hub") as errors:
        _assert_same_files(model_type, rank, folder)
        errors.append(0.0)


def _assert_same_files(model_type: str, rank: int, folder: str) -> None:
    stock, ours = Path(folder, "stock"), Path(folder, "ours")
    model_class = type(tiny(model_type, dtype=torch.float32))
    if rank == 0:
        tiny(model_type, dtype=torch.float32).save_pretrained(stock)
    dist.barrier()
    model = from_pretrained(stock, ep_size=2, model_class=model_class)
    save_pretrained(model, ours, max_shard_size="90KB")
    iterated = dict(hub_tensors(model, max_bytes=20_000))
    dist.barrier()
    written: dict[str, Tensor] = {}
    for file in stock.glob("*.safetensors"):
        written |= load_file(file)
    assert_equal(read_all(ours), written)
    assert_equal(iterated, written)
    if rank == 0:
        # Not the tiny model's own: whatever is in the files, stock sets a bias of Zaya anew.
        loaded, wanted = (model_class.from_pretrained(folder) for folder in (ours, stock))
        assert_equal(loaded.state_dict(), wanted.state_dict())


CHECKS = [
    Check(name, 2, partial(_there_and_back, name), slow=name not in IN_FAST_SUITE).as_parameter()
    for name in MODEL_TYPES
    if name not in OTHERS
]


@pytest.mark.parametrize("claim", CHECKS)
def test_there_and_back_on_two_ranks(found: Found, claim: Check) -> None:
    """Experts are split over ep. Stock reads the files that are written."""
    found.raise_if_failed(claim)
