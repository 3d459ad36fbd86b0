"""What crosses between two nodes of two ranks, by both dispatchers; and what a model computes.

    torchrun ... tests/support/jobs/crossing.py FOLDER

Each rank writes `FOLDER/rank-N.json`: by dispatcher the bytes that its code gave for ranks of the
other node, what the node's interface sent meanwhile (local rank 0), what `want` says, and the
largest difference of a small model's loss and gradients.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.dispatcher import Dispatcher, Header
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.moe.dispatch.hierarchical import Hierarchical
from hf_moe_ep.moe.dispatch.overlap import WayHome, overlapped
from support.close import max_error
from support.namespaces import sent_here
from support.parity import full_tensor
from support.tiny_models import batch, tiny

NODES, PLACES, TOKENS, HIDDEN, EXPERTS, TOP_K, BYTES = 2, 2, 256, 1024, 64, 8, 8
KINDS = ("all_to_all", "hierarchical")


def ids_TK(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices


def want(kind: str, node: int) -> int:
    """Bytes that a node's ranks have for the other one: there and back, forward and backward.

    A row out for each token and destination, one home of each that came, and of both the gradient;
    beside rows weights and ids, and home the weights' gradient.
    """
    of_destination = EXPERTS // (NODES if kind == "hierarchical" else NODES * PLACES)
    per_node = NODES * PLACES // NODES if kind == "all_to_all" else 1
    rows = []
    for home in range(NODES):
        count = 0
        for rank in range(home * PLACES, (home + 1) * PLACES):
            for experts in ids_TK(rank).tolist():
                there = {expert // of_destination for expert in experts}
                count += sum(destination // per_node != home for destination in there)
        rows.append(count)
    out, came = rows[node], rows[1 - node]
    return BYTES * (2 * (out + came) * HIDDEN + out * 2 * TOP_K + came * TOP_K)


@contextmanager
def given() -> Iterator[list[int]]:
    """Bytes that this rank gives `all_to_all_single` for ranks of the other node."""
    found, stock = [0], dist.all_to_all_single
    node = dist.get_rank() // PLACES

    def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        splits = kwargs.get("input_split_sizes") or args[1]
        group = kwargs.get("group")
        for index, rows in enumerate(splits):
            if dist.get_global_rank(group, index) // PLACES != node:
                found[0] += rows * input[:1].nbytes
        return stock(output, input, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        yield found
    finally:
        dist.all_to_all_single = stock


def there_and_back(dispatcher: Dispatcher) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    w_TK = torch.rand(TOKENS, TOP_K, dtype=torch.float64, generator=generator).requires_grad_()
    ids = ids_TK(dist.get_rank())
    exchanges = dispatcher.plan(ids, Header(1, 0, True, True, False, False, TOP_K, BYTES))
    with WayHome() as home:
        for arriving in overlapped(exchanges, x_TH, w_TK, ids):
            rows_RH, w_RK, _ = arriving.finish()
            home.send(arriving, rows_RH * w_RK.sum(1, keepdim=True))
    home.finish().square().sum().backward()


def measure(run: Callable[[], None]) -> dict[str, int]:
    """Run it on all ranks; bytes in the code, and at the interface of this node."""
    dist.barrier()
    before = sent_here()
    dist.barrier()
    with given() as found:
        run()
    dist.barrier()
    return {"code": found[0], "interface": sent_here() - before}


def gradients(kind: str) -> dict[str, Tensor]:
    model = tiny(num_experts=8, num_experts_per_tok=3)
    apply_ep_fsdp2(model, ep_size=NODES * PLACES, dispatcher=kind)
    loss = model(**batch(model, 2, 12, seed=dist.get_rank())).loss
    loss.backward()
    found = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
    assert all(tensor is not None for tensor in found.values())
    return {"loss": loss.detach(), **found}  # type: ignore[dict-item]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (world, int(os.environ["LOCAL_WORLD_SIZE"])) == (NODES * PLACES, PLACES)
    columns = [dist.new_group([place, place + PLACES]) for place in range(PLACES)]
    rows = [dist.new_group([node * PLACES, node * PLACES + 1]) for node in range(NODES)]
    between, inside = columns[rank % PLACES], rows[rank // PLACES]
    everyone = dist.group.WORLD
    assert everyone is not None
    dispatchers: dict[str, Dispatcher] = {
        "all_to_all": AllToAll(everyone, EXPERTS),
        "hierarchical": Hierarchical(everyone, between, inside, EXPERTS),
    }
    found: dict[str, Any] = {"node": rank // PLACES}
    for kind in KINDS:
        there_and_back(dispatchers[kind])  # connections are made
        found[kind] = measure(lambda kind=kind: there_and_back(dispatchers[kind]))  # type: ignore[misc]
    of_ranks, of_nodes = (gradients(kind) for kind in KINDS)
    errors = {name: max_error(of_nodes[name], of_ranks[name]) for name in of_ranks}
    found["largest"] = max(errors.items(), key=lambda item: item[1])
    Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
