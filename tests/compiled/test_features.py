"""Compiled layers with every feature of a plan: losses and gradients equal those of stock code.

`test_layers.py` counts graphs, and compares compiled layers with uncompiled ones.
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

CASES = {
    "LoRA": BASE.with_(wrap=with_lora, prepare=CHECKPOINTED),
    "LoRA, ep 1": BASE.with_(wrap=with_lora, ep=1),
    "pictures": BASE.with_(model={"name": "qwen3_vl_moe"}, micro_batches=modality_by_step),
    "sequence parallelism": BASE.with_(sp=2, prepare=CHECKPOINTED),
}
# In front of the MoE blocks: the first layer, whose input has no gradient, the other layers, and
# any layer without gradients. After the MoE blocks: a layer with gradients, and one without.
GRAPHS = {"LoRA": 3 + 2}


def _run(name: str, rank: int, world: int) -> None:
    counters.clear()
    run_case(CASES[name].with_(name=name), rank, world)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == GRAPHS.get(name, graphs) > 0, dict(counters["graph_break"])


# A rank waits while another rank compiles, on a busy machine for more than a minute.
PATIENT: Any = {"timeout": 400, "group_timeout": 240}


@pytest.mark.parametrize(
    "claim", on_ranks(2, {name: partial(_run, name) for name in CASES}, slow=True, **PATIENT)
)
def test_equal_to_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
