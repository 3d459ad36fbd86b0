"""Compiled layers with every feature of a plan: losses and gradients equal those of stock code.

Each case also counts its graphs. Their number does not depend on the number of layers, and no graph
is made after the second step.
"""

from functools import partial

import pytest
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.modalities import modality_by_step
from support.parity import Batch, Case, checkpointing, run_case
from support.tiny_models import batch
from torch import nn
from torch._dynamo.utils import counters

CONFIG = {"compile_layers": "aot_eager"}
AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
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
    "aux loss": (BASE.with_(model=BASE.model | AUX_LOSS), 2),
    "aux loss, ep 1": (BASE.with_(model=BASE.model | AUX_LOSS, ep=1), 2),
    "aux loss per layer": (
        BASE.with_(model=BASE.model | AUX_LOSS, config=CONFIG | {"aux_loss_per_layer": True}),
        2,
    ),
    "pictures": (BASE.with_(model={"name": "qwen3_vl_moe"}, micro_batches=modality_by_step), 4),
    "sequence parallelism": (BASE.with_(sp=2, prepare=CHECKPOINTED), 4),
}
FAST = ("LoRA", "pictures")


def _run(name: str, rank: int, world: int) -> None:
    case, graphs = CASES[name]
    counters.clear()
    run_case(case.with_(name=name), rank, world)
    assert counters["stats"]["unique_graphs"] == graphs, dict(counters["graph_break"])


FAST_CASES = {name: partial(_run, name) for name in FAST}
SLOW_CASES = {name: partial(_run, name) for name in CASES if name not in FAST}


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, FAST_CASES, timeout=400),
        *on_ranks(2, SLOW_CASES, timeout=400, slow=True),
    ],
)
def test_equal_to_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
