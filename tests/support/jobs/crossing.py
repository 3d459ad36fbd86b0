"""Bytes between nodes for both dispatchers, and the gradients of a model.

    torchrun ... tests/support/jobs/crossing.py FOLDER

Each rank writes `FOLDER/rank-N.json`: by router and dispatcher the bytes that its code gave for
ranks of other nodes and what the node's interface sent meanwhile, and the largest difference of a
small model's loss and gradients. `want` says how many bytes these are to be.
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
from hf_moe_ep.dispatcher import Dispatcher, Header
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.moe.dispatch.hierarchical import Hierarchical
from hf_moe_ep.moe.dispatch.overlap import WayHome
from support.close import max_error
from support.namespaces import sent_here
from support.parity import full_tensor
from support.tiny_models import batch, tiny

TOKENS, HIDDEN, EXPERTS, TOP_K, BYTES = 256, 1024, 64, 8, 8
# As DeepSeek-V3 has its 8 groups, 4 of them for a token.
GROUPS, OF_GROUPS = 8, 2
KINDS = ("all_to_all", "hierarchical")
ROUTERS = ("any", "groups")


@dataclass(frozen=True)
class Machines:
    """So many nodes, with so many ranks on each."""

    nodes: int
    places: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.places


def ids_TK(router: str, rank: int) -> Tensor:
    """Choose experts: any of them, or by DeepSeek-V3's own router out of two groups of eight."""
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
        gate.weight.copy_(torch.eye(EXPERTS))  # so that logits are what they were
        gate.e_score_correction_bias.zero_()
        *_, ids = gate(logits_TE)
    assert isinstance(ids, Tensor) and ids.shape == (TOKENS, TOP_K)
    return ids


def pairs(kind: str, router: str, machines: Machines) -> list[list[int]]:
    """Rows from node to other node: of each token one for each destination there, node or rank."""
    per_node = machines.places if kind == "all_to_all" else 1
    of_destination = EXPERTS // (machines.nodes * per_node)
    rows = [[0] * machines.nodes for _ in range(machines.nodes)]
    for rank in range(machines.ranks):
        for experts in ids_TK(router, rank).tolist():
            for destination in {expert // of_destination for expert in experts}:
                home, there = rank // machines.places, destination // per_node
                rows[home][there] += home != there
    return rows


def want(kind: str, router: str, machines: Machines, node: int) -> tuple[int, int]:
    """Return the bytes that a node's ranks send and receive, there and back, forward and backward.
    For each token and destination a row goes out, and one returns for each received row;
    gradients do the same. Weights and ids go with the rows, and the weights' gradient returns.
    """
    rows = pairs(kind, router, machines)
    out, came = sum(rows[node]), sum(of_node[node] for of_node in rows)
    both = 2 * (out + came) * HIDDEN
    return BYTES * (both + (2 * out + came) * TOP_K), BYTES * (both + (2 * came + out) * TOP_K)


@contextmanager
def given(places: int) -> Iterator[list[int]]:
    """Bytes that this rank gives `all_to_all_single` for ranks of other nodes."""
    found, stock = [0], dist.all_to_all_single
    node = dist.get_rank() // places

    def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        splits = kwargs.get("input_split_sizes") or args[1]
        group = kwargs.get("group")
        for index, rows in enumerate(splits):
            if dist.get_global_rank(group, index) // places != node:
                found[0] += rows * input[:1].nbytes
        return stock(output, input, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        yield found
    finally:
        dist.all_to_all_single = stock


def there_and_back(dispatcher: Dispatcher, router: str) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    w_TK = torch.rand(TOKENS, TOP_K, dtype=torch.float64, generator=generator).requires_grad_()
    ids = ids_TK(router, dist.get_rank())
    exchanges = dispatcher.plan(ids, Header(1, 0, True, True, False, False, TOP_K, BYTES))
    with WayHome() as home:
        for arriving in home.overlapped(exchanges, x_TH, w_TK, ids):
            rows_RH, w_RK, _ = arriving.finish()
            home.send(arriving, rows_RH * w_RK.sum(1, keepdim=True))
    home.finish().square().sum().backward()


def measure(run: Callable[[], None], places: int) -> dict[str, int]:
    """Run it on all ranks; bytes in the code, and at the interface of this node."""
    dist.barrier()
    before = sent_here()
    dist.barrier()
    with given(places) as found:
        run()
    dist.barrier()
    return {"code": found[0], "interface": sent_here() - before}


def gradients(kind: str) -> dict[str, Tensor]:
    model = tiny(num_experts=8, num_experts_per_tok=3)
    apply_ep_fsdp2(model, ep_size=dist.get_world_size(), dispatcher=kind)
    loss = model(**batch(model, 2, 12, seed=dist.get_rank())).loss
    loss.backward()
    found = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
    assert all(tensor is not None for tensor in found.values())
    return {"loss": loss.detach(), **found}  # type: ignore[dict-item]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    places = int(os.environ["LOCAL_WORLD_SIZE"])
    columns = [dist.new_group(list(range(place, world, places))) for place in range(places)]
    rows = [dist.new_group(list(range(at, at + places))) for at in range(0, world, places)]
    between, inside = columns[rank % places], rows[rank // places]
    everyone = dist.group.WORLD
    assert everyone is not None
    dispatchers: dict[str, Dispatcher] = {
        "all_to_all": AllToAll(everyone, EXPERTS),
        "hierarchical": Hierarchical(everyone, between, inside, EXPERTS),
    }
    found: dict[str, Any] = {}
    for router, kind in product(ROUTERS, KINDS):
        run = partial(there_and_back, dispatchers[kind], router)
        run()  # connections are made
        found[f"{router}, {kind}"] = measure(run, places)
    of_ranks, of_nodes = (gradients(kind) for kind in KINDS)
    errors = {name: max_error(of_nodes[name], of_ranks[name]) for name in of_ranks}
    found["largest"] = max(errors.items(), key=lambda item: item[1])
    Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
