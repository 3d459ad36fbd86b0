"""Tokens that cross to a node once: 4 ranks as 2 nodes of 2, against stock and against all_to_all.

Ranks of one machine are called nodes here by `node_size`; bytes between them are counted where
they enter a collective.
"""

import os
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import checks, parity
from support.adapters import with_lora
from support.architectures import steps
from support.architectures.inputs import batch as batch_of
from support.checks import Check, Found
from support.close import assert_close
from support.parity import Case, full_tensor, on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep import apply_ep_fsdp2, describe
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.moe.dispatch.hierarchical import Hierarchical
from hf_moe_ep.state import find_state

NODES_OF_2 = {"dispatcher": "hierarchical", "node_size": 2}
CHECKPOINT = partial(parity.checkpointing, use_reentrant=False)
REENTRANT = partial(parity.checkpointing, use_reentrant=True)
TWO_FORWARDS = {
    "micro_batches": parity.three_micro_batches,
    "backward": parity.two_forwards_backward,
}


def _nodes(name: str, **changes: Any) -> Case:
    """Ep 4 over two nodes of two ranks; `config` in addition to that."""
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
    Case("the launcher's one node", 4, 4, config={"dispatcher": "hierarchical"}),
]
EIGHT_RANKS = [
    Case("8 ranks, nodes of 4", 8, 8).with_config(dispatcher="hierarchical", node_size=4),
    Case("8 ranks, nodes of 2", 8, 8).with_config(**NODES_OF_2, dispatch_chunks=2),
    Case("8 ranks, HSDP", 8, 4, 2).with_config(**NODES_OF_2),
    Case("8 ranks, every other rank of nodes of 4", 8, 4).with_config(
        dispatcher="hierarchical", node_size=4, ep_outside=True
    ),
]


@pytest.mark.parametrize("claim", on_ranks(FOUR_RANKS + EIGHT_RANKS, slow=True))
def test_ranks_on_nodes_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


class _Wire(TorchDispatchMode):
    """Bytes that leave this rank for other nodes of two ranks, by the bytes of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func) == "c10d.alltoall_base_.default":
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[2]))
            size = args[1].shape[1] * args[1].element_size()
            for receiver, rows in zip(ranks, args[4], strict=True):
                if receiver // 2 != dist.get_rank() // 2:
                    self.between[size] += rows * size
        return func(*args, **(kwargs or {}))


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Counter[int], list[Tensor]]:
    """Logits, bytes between nodes, and the experts that each planned forward chose."""
    state = find_state(model)
    assert state is not None and state.dispatcher is not None
    kind, chosen = type(state.dispatcher), []
    plan = kind.plan

    def remembered(self: Any, expert_ids_TK: Tensor, *args: Any, **options: Any) -> Any:
        chosen.append(expert_ids_TK)
        return plan(self, expert_ids_TK, *args, **options)

    with _Wire() as wire, pytest.MonkeyPatch.context() as patches:
        patches.setattr(kind, "plan", remembered)
        out = model(**inputs)
        out.loss.backward()
    return out.logits.detach(), wire.between, chosen


def _pairs(chosen: list[Tensor], num_experts: int) -> Tensor:
    """Count (token, node) pairs by the node of the token's rank and the node of the expert."""
    node, pairs = dist.get_rank() // 2, torch.zeros(2, 2, dtype=torch.int64)
    for ids_TK in chosen:
        for experts in (ids_TK // (num_experts // 2)).tolist():
            for other in set(experts):
                pairs[node, other] += 1
    return pairs


def _against_all_to_all(model_type: str, limit: int, rank: int, world: int, **options: Any) -> None:
    """Logits and every gradient to 1e-10; bytes between nodes are those of the pairs, and fewer."""
    config = options.pop("config", {})
    build = partial(steps.build, model_type, **options)
    inputs = batch_of(build(), 1 + rank % 2, 8 + 3 * rank, seed=rank)
    found = {}
    for kind in ({}, NODES_OF_2):
        model = apply_ep_fsdp2(build(), ep_size=4, **config, **kind)
        logits, between, chosen = _step(model, inputs)
        state = find_state(model)
        assert state is not None
        assert isinstance(state.dispatcher, Hierarchical if kind else AllToAll)
        grads = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
        found[bool(kind)] = logits, between, grads, chosen, state.num_experts
    logits, between, grads, chosen, num_experts = found[True]
    of_ranks = found[False]
    assert_close("logits", logits, of_ranks[0], 1e-10)
    for name, want in of_ranks[2].items():
        assert (grads[name] is None) == (want is None), name
        if want is not None:
            assert_close(f"grad of {name}", grads[name], want, 1e-10)
    # Rows leave here for the other node with own tokens, and with results of tokens from there.
    pairs = [torch.zeros(2, 2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(pairs, _pairs(chosen, num_experts))
    node, peer = rank // 2, (rank + 2) % 4
    out, back = int(pairs[rank][node, 1 - node]), int(pairs[peer][1 - node, node])
    hidden, top_k = model.config.get_text_config().hidden_size, chosen[0].shape[1]
    want_bytes = Counter(
        {
            8 * hidden: 2 * (out + back) * 8 * hidden,
            16 * top_k: out * 16 * top_k,
            8 * top_k: back * 8 * top_k,
        }
    )
    assert between == want_bytes, f"{between}, want {want_bytes}"
    assert between.total() < of_ranks[1].total()
    tokens = sum(len(ids) for ids in chosen)
    assert out > 0 and int(pairs[rank].sum()) <= limit * tokens


SAME = {
    "qwen3_moe": partial(_against_all_to_all, "qwen3_moe", 2, num_experts_per_tok=4),
    "qwen3_moe, 3 chunks": partial(
        _against_all_to_all,
        "qwen3_moe",
        2,
        num_experts_per_tok=4,
        config={"dispatch_chunks": 3},
    ),
    # A router that draws each token's experts from one of two groups: one node for each token.
    "deepseek_v3, one of two groups": partial(
        _against_all_to_all,
        "deepseek_v3",
        1,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=4,
    ),
}


def one_node_is_no_hierarchy(rank: int, world: int) -> None:
    """Where every ep group is on one node, or has a rank on each, nothing else runs than before."""
    for config, grid in (
        ({"ep_size": 4, "node_size": 4}, "1 x 4"),
        ({"ep_size": 2, "node_size": 2}, "1 x 2"),
        ({"ep_size": 2, "node_size": 2, "ep_outside": True}, "2 x 1"),
        ({"ep_size": 4, "node_size": 1}, "4 x 1"),
        ({"ep_size": 4}, "1 x 4"),  # the launcher says 4
    ):
        model = apply_ep_fsdp2(steps.build("qwen3_moe"), dispatcher="hierarchical", **config)
        state = find_state(model)
        assert state is not None and isinstance(state.dispatcher, AllToAll), config
        assert f"(nodes x ranks: {grid}, for which hierarchical" in describe(model)
    model = apply_ep_fsdp2(steps.build("qwen3_moe"), ep_size=4, **NODES_OF_2)
    assert "ep group [0, 1, 2, 3] (nodes x ranks: 2 x 2, a token crosses" in describe(model)


def what_cannot_be_is_refused_on_every_rank(rank: int, world: int) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            apply_ep_fsdp2(steps.build("qwen3_moe"), dispatcher="hierarchical", **options)
        dist.barrier()

    uneven = r"node_size \(3\) cuts the ep group of ranks 0, 1, 2, 3 into 3 \+ 1 ranks.*"
    refused(
        uneven + r"try node_size 1, 2, 4, another ep_size, or dispatcher='all_to_all'$",
        ep_size=4,
        node_size=3,
    )
    refused(
        r"ranks disagree about config: .*node_size=1.*rank 2 has .*node_size=2",
        ep_size=4,
        node_size=1 + rank // 2,
    )
    with pytest.MonkeyPatch.context() as patches:
        # As a launcher that deals ranks out like cards.
        patches.setenv("LOCAL_WORLD_SIZE", "2")
        patches.setenv("LOCAL_RANK", str(rank // 2))
        refused("rank 1 has LOCAL_RANK 0 on its machine of 2.*it would be 1; let ranks", ep_size=4)
        patches.setenv("LOCAL_RANK", str(rank % 2))
        apply_ep_fsdp2(steps.build("qwen3_moe"), dispatcher="hierarchical", ep_size=4)
        patches.setenv("LOCAL_WORLD_SIZE", str(2 + rank % 2))
        refused("ranks disagree about config: .*node_size=2.*node_size=3", ep_size=4)
        patches.delenv("LOCAL_WORLD_SIZE")
        assert "LOCAL_WORLD_SIZE" not in os.environ
        refused("how many ranks a node has, and neither node_size nor the launcher's", ep_size=4)
        # Nothing is sent between ranks: nobody asks.
        apply_ep_fsdp2(steps.build("qwen3_moe"), dispatcher="hierarchical", ep_size=1)


ON_FOUR_RANKS = checks.on_ranks(
    4,
    SAME,
    one_node_is_no_hierarchy,
    what_cannot_be_is_refused_on_every_rank,
    slow=True,
)


@pytest.mark.parametrize("claim", ON_FOUR_RANKS)
def test_on_two_nodes_of_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
