"""Compiled layers with every feature of a plan: losses and gradients equal those of stock code.

Each case also counts its graphs. Their number does not depend on the number of layers, and no graph
is made after the second step.
"""

from functools import partial
from typing import Any

import pytest
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.modalities import modality_by_step
from support.parity import Batch, Case, checkpointing, run_case
from support.tiny_models import batch
from torch import nn
from torch._dynamo.utils import counters

CONFIG = {"compile_layers": "aot_eager"}
CHECKPOINTED = partial(checkpointing, use_reentrant=False)


def _batches(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Make batches whose sizes have no graph of their own: no size is 1, or equals another size."""
    return [batch(model, 2 + rank, 11 + 2 * rank + step, seed=100 * step + rank)]


BASE = Case("base", 2, ep=2, config=CONFIG, model={"num_hidden_layers": 5}, micro_batches=_batches)

# The number of graphs of each case. A MoE layer has two: in front of its MoE block, and after it.
# With sequence parallelism, the attention between two exchanges splits the first graph into three.
CASES = {
    "LoRA": (BASE.with_(wrap=with_lora, prepare=CHECKPOINTED), 2),
    "LoRA, ep 1": (BASE.with_(wrap=with_lora, ep=1), 2),
    "pictures": (BASE.with_(model={"name": "qwen3_vl_moe"}, micro_batches=modality_by_step), 4),
    "sequence parallelism": (BASE.with_(sp=2, prepare=CHECKPOINTED), 4),
}


def _run(name: str, rank: int, world: int) -> None:
    case, graphs = CASES[name]
    counters.clear()
    run_case(case.with_(name=name), rank, world)
    assert counters["stats"]["unique_graphs"] == graphs, dict(counters["graph_break"])


# A rank waits while another rank compiles, on a busy machine for more than a minute.
PATIENT: Any = {"timeout": 400, "group_timeout": 240}


@pytest.mark.parametrize(
    "claim", on_ranks(2, {name: partial(_run, name) for name in CASES}, slow=True, **PATIENT)
)
def test_equal_to_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
