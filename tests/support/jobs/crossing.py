"""Measure the bytes that both dispatchers send between nodes, and compare their gradients.

    torchrun ... tests/support/jobs/crossing.py FOLDER

Each rank writes `FOLDER/rank-N.json`. For each router and dispatcher it holds the bytes that this
rank's code sent to ranks of other nodes, and the bytes that the node's network interface sent in
that time. It also holds the largest difference between the dispatchers in a small model's loss and
gradients. `want` computes the expected bytes.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.dispatcher import Dispatcher, Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.moe.dispatch.hierarchical import Hierarchical
from hf_moe_ep.moe.dispatch.overlap import OverlappedChunks
from support.close import max_error
from support.messages import message_columns
from support.namespaces import sent_here
from support.parity import full_tensor
from support.tiny_models import batch, tiny

TOKENS, HIDDEN, EXPERTS, TOP_K, BYTES = 256, 1024, 64, 8, 8
# The numbers of expert groups, and of groups per token. DeepSeek-V3 has 8 and 4.
GROUPS, OF_GROUPS = 8, 2
KINDS = ("all_to_all", "hierarchical")
ROUTERS = ("any", "groups")


@dataclass(frozen=True)
class Machines:
    """The number of nodes, and the number of ranks on each node."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def ids_TK(router: str, rank: int) -> Tensor:
    """Choose experts for a rank's tokens.

    The router "any" may choose all experts, "groups" is DeepSeek-V3's and chooses two groups first.
    """
    generator = torch.Generator().manual_seed(rank)
    logits_TE = torch.randn(TOKENS, EXPERTS, generator=generator)
    if router == "any":
        return logits_TE.topk(TOP_K, dim=1).indices
    config = DeepseekV3Config(
        hidden_size=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=GROUPS,
        topk_group=OF_GROUPS,
    )
    gate = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(EXPERTS))  # the gate's logits equal its inputs
        gate.e_score_correction_bias.zero_()
        *_, ids = gate(logits_TE)
    assert isinstance(ids, Tensor) and ids.shape == (TOKENS, TOP_K)
    return ids


def pairs(kind: str, router: str, machines: Machines) -> list[list[int]]:
    """Count the rows that each node sends to each other node.

    A token sends one row to each destination with a chosen expert. A destination is a rank for
    "all_to_all", and a node for "hierarchical".
    """
    per_node = machines.ranks_per_node if kind == "all_to_all" else 1
    experts_per_destination = EXPERTS // (machines.nodes * per_node)
    rows = [[0] * machines.nodes for _ in range(machines.nodes)]
    for rank in range(machines.ranks):
        for experts in ids_TK(router, rank).tolist():
            for destination in {expert // experts_per_destination for expert in experts}:
                source, target = rank // machines.ranks_per_node, destination // per_node
                rows[source][target] += source != target
    return rows


def want(kind: str, router: str, machines: Machines, node: int) -> tuple[int, int]:
    """Return the bytes that a node's ranks send and receive, in forward and backward.

    Forward sends a row per token and destination, with its weights and ids, and returns a row for
    each received one. Backward does the same with gradients; it returns those of the weights.
    """
    rows = pairs(kind, router, machines)
    sent, received = sum(rows[node]), sum(row[node] for row in rows)
    # Rows, results and both gradients; the routing behind a row, and its gradient behind the row's.
    there = message_columns(HIDDEN + 2 * TOP_K) + HIDDEN
    back = message_columns(HIDDEN + TOP_K) + HIDDEN
    return BYTES * (sent * there + received * back), BYTES * (received * there + sent * back)


@contextmanager
def count_bytes_to_other_nodes(ranks_per_node: int) -> Iterator[list[int]]:
    """Count the bytes that this rank passes to `all_to_all_single` for ranks of other nodes."""
    num_bytes, stock = [0], dist.all_to_all_single
    node = dist.get_rank() // ranks_per_node

    def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if output.dtype == torch.int64:  # the counts
            return stock(output, input, *args, **kwargs)
        splits = kwargs.get("input_split_sizes") or args[1]
        group = kwargs.get("group")
        for index, rows in enumerate(splits):
            if dist.get_global_rank(group, index) // ranks_per_node != node:
                num_bytes[0] += rows * input[:1].nbytes
        return stock(output, input, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        yield num_bytes
    finally:
        dist.all_to_all_single = stock


def dispatch_and_combine(dispatcher: Dispatcher, router: str) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    w_TK = torch.rand(TOKENS, TOP_K, dtype=torch.float64, generator=generator).requires_grad_()
    ids = ids_TK(router, dist.get_rank())
    exchanges = dispatcher.start_plan(
        ids, Header(1, 0, True, True, False, False, TOP_K, BYTES)
    ).finish()
    with OverlappedChunks() as chunks:
        for arriving in chunks.start_chunks(exchanges, Tokens(x_TH, w_TK, ids)):
            rows_RH, w_RK, _ = arriving.finish()
            chunks.send_back(arriving, rows_RH * w_RK.sum(1, keepdim=True))
    chunks.finish().square().sum().backward()


def measure(run: Callable[[], None], ranks_per_node: int) -> dict[str, int]:
    """Call `run` on all ranks, and count the bytes in the code and at this node's interface."""
    dist.barrier()
    before = sent_here()
    dist.barrier()
    with count_bytes_to_other_nodes(ranks_per_node) as num_bytes:
        run()
    dist.barrier()
    return {"code": num_bytes[0], "interface": sent_here() - before}


def gradients(kind: str) -> dict[str, Tensor]:
    model = tiny(num_experts=8, num_experts_per_tok=3)
    apply_ep_fsdp2(model, ep_size=dist.get_world_size(), dispatcher=kind)
    loss = model(**batch(model, 2, 12, seed=dist.get_rank())).loss
    loss.backward()
    grads = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
    assert all(tensor is not None for tensor in grads.values())
    return {"loss": loss.detach(), **grads}  # type: ignore[dict-item]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    columns = [
        dist.new_group(list(range(place, world, ranks_per_node))) for place in range(ranks_per_node)
    ]
    rows = [
        dist.new_group(list(range(at, at + ranks_per_node)))
        for at in range(0, world, ranks_per_node)
    ]
    between, inside = columns[rank % ranks_per_node], rows[rank // ranks_per_node]
    world_group = dist.group.WORLD
    assert world_group is not None
    dispatchers: dict[str, Dispatcher] = {
        "all_to_all": AllToAll(world_group, EXPERTS),
        "hierarchical": Hierarchical(world_group, between, inside, EXPERTS),
    }
    results: dict[str, Any] = {}
    for router, kind in product(ROUTERS, KINDS):
        run = partial(dispatch_and_combine, dispatchers[kind], router)
        run()  # the first run opens the connections
        results[f"{router}, {kind}"] = measure(run, ranks_per_node)
    plain, hierarchical = (gradients(kind) for kind in KINDS)
    errors = {name: max_error(hierarchical[name], plain[name]) for name in plain}
    results["largest"] = max(errors.items(), key=lambda item: item[1])
    Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
