"""Ranks with a gloo group that share one GPU equal stock, with collectives on CUDA tensors.

As with NCCL, transfers of CUDA tensors run on their own streams, and `wait` makes the current
stream wait for them: memory that is freed or read too early gives a wrong gradient. The torch path
runs in fp64, and the Triton kernels in fp32.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.checks import Check, Found
from support.close import FP64_MODEL
from support.parity import CHECKPOINT, Case

FP32_MODEL = 1e-4  # fp32 sums in another order, in two layers
# A size that the Triton kernels support.
SIZES = {"moe_intermediate_size": 32}
# The cheapest cases come first, so that an interrupted run has results for them.
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
# Without a GPU, one case shows that this file works; test_parity.py has the other cases.
ON_THE_CPU = CASES[:1]


def _list_checks() -> Iterator[Any]:
    for device in ("cpu", "cuda"):
        for case in CASES if device == "cuda" else ON_THE_CPU:
            for kind, (dtype, backend, budget) in KINDS.items():
                case_on_device = case.with_(
                    model={"dtype": dtype, **SIZES},
                    config={**case.config, "experts_backend": backend},
                    budget=budget,
                    device=device,
                )
                name = f"{device}-{case.world}-{kind}-{case.name}"
                run = partial(parity.run_case, case_on_device)
                # Each case has its own spawn, because it may break the device. The stacks of ranks
                # that hang are printed before the limit of the job in benchmarks/gpu.py.
                check = Check(name, case.world, run, alone=True, timeout=60, group_timeout=40)
                mark = pytest.mark.gpu if device == "cuda" else pytest.mark.slow
                yield pytest.param(check, id=name, marks=mark)


@pytest.mark.parametrize("case", list(_list_checks()))
def test_ranks_that_share_a_device_equal_one_process(found: Found, case: Check) -> None:
    found.raise_if_failed(case)
