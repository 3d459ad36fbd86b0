"""Make the dispatcher of a model. Only this file imports all dispatchers."""

from __future__ import annotations

from typing import Any

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.dispatcher import Dispatcher
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.moe.dispatch.deepep import DeepEP, GroupBuffer
from hf_moe_ep.moe.dispatch.hierarchical import Hierarchical
from hf_moe_ep.ranks.mesh import Meshes


def make_dispatcher(
    config: ParallelConfig, meshes: Meshes, *, num_experts: int
) -> Dispatcher | None:
    """Make the dispatcher that the config requests, or return None if no tokens are dispatched.

    With etp_size > 1 each expert is cut into etp_size parts on different ranks. The dispatcher
    treats these parts as experts (`hf_moe_ep.etp.replace_by_part_ids`).

    Raises:
        ImportError: DeepEP is requested but not installed.
        ValueError: DeepEP has no settings for this number of ranks.
    """
    if meshes.dispatch.size() == 1:
        return None
    group, num_experts = meshes.dispatch.get_group(), num_experts * meshes.etp_size
    # With "auto" the first forward in training chooses the number of chunks.
    chunks = 1 if isinstance(config.dispatch_chunks, str) else config.dispatch_chunks
    limit = config.max_tokens_per_rank
    if config.dispatcher == "deepep":
        buffer = GroupBuffer(group, num_sms=config.deepep_num_sms)
        return DeepEP(buffer, num_experts, num_chunks=chunks, max_rows=limit)
    options: dict[str, Any] = {"num_chunks": chunks, "max_rows": limit}
    options["triton_sums"] = config.experts_backend != "torch"
    if meshes.nodes is not None:
        between, inside = meshes.nodes.between.get_group(), meshes.nodes.inside.get_group()
        return Hierarchical(group, between, inside, num_experts, **options)
    return AllToAll(group, num_experts, **options)
