"""Ranks of gloo that share one GPU compute what stock does, with collectives on CUDA tensors.

Transfers of CUDA tensors run on their own streams, and `wait` orders the current stream after them,
as under NCCL: memory that is freed or read too early gives a wrong gradient. In fp64 on the torch
path, in fp32 on the Triton kernels.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.checks import Check, Found
from support.close import FP64_MODEL
from support.parity import Case

FP32_MODEL = 1e-4  # fp32, sums in another order, through two layers
# Sizes that the Triton kernels take.
SIZES = {"moe_intermediate_size": 32}
CHECKPOINT = partial(parity.checkpointing, use_reentrant=False)
# The cheapest first: a run that is cut short has shown those.
CASES = [
    Case("ep 2", 2, 2),
    Case("3 chunks", 2, 2).with_config(dispatch_chunks=3),
    Case("checkpoint", 2, 2, prepare=CHECKPOINT),
    Case("accumulation", 2, 2, micro_batches=parity.three_micro_batches),
    Case("one token repeated", 2, 2, micro_batches=parity.one_token_everywhere),
    Case("ep 2", 4, 2),
    Case("ep 4, sp 2", 4, 4, sp=2, micro_batches=parity.even_batches),
    Case("ep 2, HSDP", 4, 2, 2),
]
KINDS = {
    "fp64": (torch.float64, "torch", FP64_MODEL),
    "fp32": (torch.float32, "triton", FP32_MODEL),
}
# Without a GPU one case shows that this file works; the others are those of test_parity.py.
ON_THE_CPU = CASES[:1]


def _checks() -> Iterator[Any]:
    for device in ("cpu", "cuda"):
        for case in CASES if device == "cuda" else ON_THE_CPU:
            for kind, (dtype, backend, budget) in KINDS.items():
                mine = case.with_(
                    model={"dtype": dtype, **SIZES},
                    config={**case.config, "experts_backend": backend},
                    budget=budget,
                    device=device,
                )
                name = f"{device}-{case.world}-{kind}-{case.name}"
                run = partial(parity.run_case, mine)
                # Each its own spawn: what one breaks on the device is not the next one's.
                check = Check(name, case.world, run, alone=True, timeout=90, group_timeout=40)
                mark = pytest.mark.gpu if device == "cuda" else pytest.mark.slow
                yield pytest.param(check, id=name, marks=mark)


@pytest.mark.parametrize("case", list(_checks()))
def test_ranks_that_share_a_device_are_one_process(found: Found, case: Check) -> None:
    found.raise_if_failed(case)
