"""The hierarchical dispatcher on 2 nodes of 2 ranks equals stock in one process, in fp64.

All ranks run on one machine; `node_size=2` makes the dispatcher treat every two ranks as one node.
"""

from typing import Any

import pytest
from support import parity
from support.adapters import with_lora
from support.checks import Check, Found
from support.parity import CHECKPOINT, REENTRANT, TWO_FORWARDS, Case, on_ranks

NODES_OF_2 = {"dispatcher": "hierarchical", "node_size": 2}


def _make_case(name: str, **changes: Any) -> Case:
    """Make a case on two nodes of two ranks, by default with ep 4."""
    config = NODES_OF_2 | changes.pop("config", {})
    return Case(name, 4, changes.pop("ep", 4), config=config, **changes)


FOUR_RANKS = [
    _make_case("ep 4"),
    _make_case("3 chunks", config={"dispatch_chunks": 3}),
    _make_case("pre-activations recomputed", config={"recompute_activations": True}),
    _make_case("checkpoint", prepare=CHECKPOINT),
    _make_case("reentrant checkpoint, two forwards", prepare=REENTRANT, **TWO_FORWARDS),
    _make_case("9 chunks, checkpoint", prepare=CHECKPOINT, config={"dispatch_chunks": 9}),
    _make_case(
        "3 chunks, two forwards, checkpoint", prepare=CHECKPOINT, **TWO_FORWARDS
    ).with_config(**NODES_OF_2, dispatch_chunks=3),
    _make_case("accumulation", micro_batches=parity.three_micro_batches),
    _make_case("one token repeated", micro_batches=parity.one_token_everywhere),
    _make_case("a rank without labels", micro_batches=parity.one_rank_without_labels),
    _make_case("LoRA", wrap=with_lora),
    _make_case(
        "LoRA, chunks, checkpoint", wrap=with_lora, prepare=CHECKPOINT, **TWO_FORWARDS
    ).with_config(**NODES_OF_2, dispatch_chunks=2),
    _make_case("sp 2", sp=2),
    _make_case("every expert", model={"num_experts_per_tok": 8}),
    _make_case("one expert a rank", model={"num_experts": 4, "num_experts_per_tok": 1}),
    _make_case("ep 2 inside a node, ep_fsdp 2", ep=2),
    _make_case("ep 2 between nodes, ep_fsdp 2", ep=2, config={"ep_outside": True}),
    _make_case("HSDP, ep 2 inside a node", ep=2, replicate=2),
]


@pytest.mark.parametrize("claim", on_ranks(FOUR_RANKS, slow=True))
def test_ranks_of_two_nodes_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
