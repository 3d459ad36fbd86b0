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


def _nodes(name: str, **changes: Any) -> Case:
    """Make a case on two nodes of two ranks, by default with ep 4."""
    config = NODES_OF_2 | changes.pop("config", {})
    return Case(name, 4, changes.pop("ep", 4), config=config, **changes)


FOUR_RANKS = [
    _nodes("ep 4"),
    _nodes("3 chunks", config={"dispatch_chunks": 3}),
    _nodes("pre-activations recomputed", config={"recompute_activations": True}),
    _nodes("checkpoint", prepare=CHECKPOINT),
    _nodes("reentrant checkpoint, two forwards", prepare=REENTRANT, **TWO_FORWARDS),
    _nodes("9 chunks, checkpoint", prepare=CHECKPOINT, config={"dispatch_chunks": 9}),
    _nodes("3 chunks, two forwards, checkpoint", prepare=CHECKPOINT, **TWO_FORWARDS).with_config(
        **NODES_OF_2, dispatch_chunks=3
    ),
    _nodes("accumulation", micro_batches=parity.three_micro_batches),
    _nodes("one token repeated", micro_batches=parity.one_token_everywhere),
    _nodes("a rank without labels", micro_batches=parity.one_rank_without_labels),
    _nodes("LoRA", wrap=with_lora),
    _nodes(
        "LoRA, chunks, checkpoint", wrap=with_lora, prepare=CHECKPOINT, **TWO_FORWARDS
    ).with_config(**NODES_OF_2, dispatch_chunks=2),
    _nodes("sp 2", sp=2),
    _nodes("every expert", model={"num_experts_per_tok": 8}),
    _nodes("one expert a rank", model={"num_experts": 4, "num_experts_per_tok": 1}),
    _nodes("ep 2 inside a node, ep_fsdp 2", ep=2),
    _nodes("ep 2 between nodes, ep_fsdp 2", ep=2, config={"ep_outside": True}),
    _nodes("HSDP, ep 2 inside a node", ep=2, replicate=2),
]


@pytest.mark.parametrize("claim", on_ranks(FOUR_RANKS, slow=True))
def test_ranks_of_two_nodes_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
